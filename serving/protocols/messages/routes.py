"""POST /v1/messages/count_tokens: the length of a prompt, without an answer to it."""

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from onlinerl.serving.gateway.answering import Gateway
from onlinerl.serving.http.asgi import json_response, read_json
from onlinerl.serving.http.protocol_route import EntryChecks, terms_of
from onlinerl.serving.protocols.messages.protocol import read_count_request


class CountTokensRoute:
    """Counts the prompt tokens that the same body would be logged with if it were sent now."""

    def __init__(self, gateway: Gateway, checks: EntryChecks) -> None:
        self._gateway = gateway
        self._checks = checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; it counts for the limits like any other."""
        headers = Headers(scope=scope)
        caller = self._checks.keyring.identify(
            headers.get("authorization"), headers.get("x-api-key")
        )
        with self._checks.admission.enter(caller):
            body = await read_json(scope, receive, config=self._gateway.config)
            request = read_count_request(body)
            number = self._gateway.count_tokens(request, caller=caller, terms=terms_of(headers))
        await json_response({"input_tokens": number})(scope, receive, send)
