"""POST /v1/feedback."""

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.feedback.desk import FeedbackDesk
from onlinerl.serving.http.asgi import read_json, send_json
from onlinerl.serving.http.protocol_route import CONSENT_HEADER, Door
from onlinerl.serving.interaction.caller import narrow_consent


class FeedbackRoute:
    """Takes feedback. It counts among the requests in flight, not for the rate of its key."""

    def __init__(self, desk: FeedbackDesk, door: Door, *, config: GatewayConfig) -> None:
        self._desk = desk
        self._door = door
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one feedback or a list; 200 also for an identical retry."""
        headers = Headers(scope=scope)
        caller = self._door.keyring.identify(headers.get("authorization"), headers.get("x-api-key"))
        consent = narrow_consent(caller.consent, headers.get(CONSENT_HEADER))
        with self._door.admission.enter(caller, is_rated=False):
            body = await read_json(scope, receive, config=self._config)
            answer = await self._desk.take(body, caller=caller, consent=consent)
        await send_json(send, answer)
