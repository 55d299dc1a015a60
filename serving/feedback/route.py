"""POST /v1/feedback."""

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.feedback.desk import FeedbackDesk
from onlinerl.serving.http.asgi import read_json, send_json
from onlinerl.serving.http.protocol_route import CONSENT_HEADER, EntryChecks
from onlinerl.serving.interaction.caller import narrow_consent


class FeedbackRoute:
    """Takes feedback. It counts among the requests in flight, not for the rate of its key."""

    def __init__(self, desk: FeedbackDesk, checks: EntryChecks, *, config: GatewayConfig) -> None:
        self._desk = desk
        self._checks = checks
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one feedback or a list; 200 also for an identical retry."""
        headers = Headers(scope=scope)
        caller = self._checks.keyring.identify(
            headers.get("authorization"), headers.get("x-api-key")
        )
        consent = narrow_consent(caller.consent, headers.get(CONSENT_HEADER))
        with self._checks.admission.enter(caller, is_rated=False):
            body = await read_json(scope, receive, config=self._config)
            answer = await self._desk.take(body, caller=caller, consent=consent)
        await send_json(send, answer)
