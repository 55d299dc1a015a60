"""POST /v1/feedback."""

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.feedback.recorder import FeedbackRecorder
from onlinerl.serving.http.asgi import read_json, send_json
from onlinerl.serving.http.protocol_route import CONSENT_HEADER, EntryChecks
from onlinerl.serving.interaction.caller import narrow_consent


class FeedbackRoute:
    """Takes feedback. It counts as a request in flight, but not for the rate of its key."""

    def __init__(
        self, recorder: FeedbackRecorder, checks: EntryChecks, *, config: GatewayConfig
    ) -> None:
        self._recorder = recorder
        self._checks = checks
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Record one feedback or a list; an identical retry is answered with 200 too."""
        headers = Headers(scope=scope)
        caller = self._checks.keyring.identify(
            headers.get("authorization"), headers.get("x-api-key")
        )
        consent = narrow_consent(caller.consent, headers.get(CONSENT_HEADER))
        with self._checks.admission.enter(caller, is_rated=False):
            body = await read_json(scope, receive, config=self._config)
            answer = await self._recorder.record(body, caller=caller, consent=consent)
        await send_json(send, answer)
