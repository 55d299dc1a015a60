"""The ASGI endpoint of every protocol: admit a request, read it, answer it whole or as a stream.

What differs between protocols is in their `Wire`; nothing here depends on one of them.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from onlinerl.errors import EngineFailed, GatewayFault
from onlinerl.serving.access.admission import Admission, Ticket
from onlinerl.serving.access.auth import Keyring
from onlinerl.serving.gateway.answer import Answer
from onlinerl.serving.gateway.answering import Gateway, Terms
from onlinerl.serving.http.asgi import leave_on_disconnect, read_json, send_json
from onlinerl.serving.http.idempotency import Idempotency, IdempotentRequest, parse_idempotency_key
from onlinerl.serving.interaction.caller import Caller
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.ids import check_session_id
from onlinerl.serving.interaction.pieces import Outcome
from onlinerl.serving.interaction.request import Request
from onlinerl.serving.wire.protocol import IncomingRequest, StreamWriter, Wire

logger = logging.getLogger(__name__)

SESSION_HEADER = "x-onlinerl-session-id"
CONSENT_HEADER = "x-onlinerl-consent"


@dataclass(frozen=True, kw_only=True)
class EntryChecks:
    """The checks that every request passes before it is answered."""

    keyring: Keyring
    admission: Admission
    idempotency: Idempotency


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A request that was read and admitted."""

    request: Request
    caller: Caller
    terms: Terms
    ticket: Ticket


class WireRoute:
    """The POST endpoint of one protocol. It raises errors, which `GuardedRoute` answers with."""

    def __init__(self, wire: Wire, *, gateway: Gateway, checks: EntryChecks) -> None:
        self._wire = wire
        self._gateway = gateway
        self._checks = checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = Headers(scope=scope)
        checks = self._checks
        caller = checks.keyring.identify(headers.get("authorization"), headers.get("x-api-key"))
        # Released here unless an answer began, which may outlive its caller and then releases it.
        ticket = checks.admission.enter(caller)
        has_begun = False
        try:
            config = self._gateway.config
            body = await read_json(scope, receive, config=config)
            incoming = IncomingRequest(body=body, headers=headers, caller=caller, config=config)
            call = _Call(
                request=await self._wire.read(incoming),
                caller=caller,
                terms=terms_of(headers),
                ticket=ticket,
            )

            async def answer_once(send: Send) -> bool:
                nonlocal has_begun
                exchange, answer = self._begin(call)
                has_begun = True
                return await self._reply(exchange, answer, call, receive=receive, send=send)

            await checks.idempotency.answer(
                _idempotent(headers, caller=caller, path=scope["path"], body=body),
                answer_once,
                receive=receive,
                send=send,
            )
        finally:
            if not has_begun:
                ticket.release()

    def _begin(self, call: _Call) -> tuple[Exchange, Answer]:
        return self._gateway.begin(
            call.request, caller=call.caller, terms=call.terms, ticket=call.ticket
        )

    async def _reply(
        self, exchange: Exchange, answer: Answer, call: _Call, *, receive: Receive, send: Send
    ) -> bool:
        """Send the answer; True when the caller got all of it."""
        is_whole = False
        async with leave_on_disconnect(answer, receive):
            reply = self._stream if call.request.stream else self._send_whole
            is_whole = await reply(exchange, answer, limits=call.ticket.headers, send=send)
        return is_whole

    async def _send_whole(
        self, exchange: Exchange, answer: Answer, *, limits: Mapping[str, str], send: Send
    ) -> bool:
        outcomes = await answer.wait_outcomes()
        if answer.has_left:
            return False
        fault = await self._keep(exchange, outcomes)
        if fault is not None:
            raise fault
        await send_json(
            send,
            self._wire.whole(exchange, outcomes),
            headers={**_id_headers(exchange), **limits},
        )
        return True

    async def _stream(
        self, exchange: Exchange, answer: Answer, *, limits: Mapping[str, str], send: Send
    ) -> bool:
        """Send events as pieces come.

        The headers wait for the first piece, so that an early error is sent with its own status.
        """
        writer: StreamWriter | None = None
        try:
            async for batch in answer.batches():
                head = b""
                if writer is None:
                    # Only now it is known which version answers. A writer may number its events, so
                    # it is opened before it writes.
                    writer = self._wire.writer(exchange)
                    head = writer.open()
                    await send(_stream_start({**_id_headers(exchange), **limits}))
                data = head + b"".join([writer.write(piece) for piece in batch])
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            outcomes = await answer.wait_outcomes()
        except EngineFailed as failure:
            if answer.has_left:
                return False
            if writer is None:
                raise
            await _end(send, writer.fail(failure))
            return False
        if answer.has_left or writer is None:
            return False
        fault = await self._keep(exchange, outcomes)
        await _end(send, writer.close(outcomes) if fault is None else writer.fail(fault))
        return fault is None

    async def _keep(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> GatewayFault | None:
        """Let the protocol store what it needs; returns the failure when it could not."""
        try:
            await self._wire.keep(exchange, outcomes)
        except Exception:
            logger.exception("an answer could not be stored")
            return GatewayFault("the gateway failed to keep the answer")
        return None


def terms_of(headers: Headers) -> Terms:
    """What a caller sends in headers.

    Raises:
        RequestRefused: when the session id is not valid.
    """
    session_id = headers.get(SESSION_HEADER)
    if session_id is not None:
        check_session_id(session_id, param=SESSION_HEADER)
    return Terms(session_id=session_id, consent=headers.get(CONSENT_HEADER))


def _idempotent(
    headers: Headers, *, caller: Caller, path: str, body: object
) -> IdempotentRequest | None:
    key = headers.get("idempotency-key")
    if key is None:
        return None
    terms = (headers.get(SESSION_HEADER), headers.get(CONSENT_HEADER))
    return parse_idempotency_key(key, caller=caller, path=path, body=body, terms=terms)


async def _end(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": False})


def _id_headers(exchange: Exchange) -> dict[str, str]:
    return {
        "x-onlinerl-interaction-id": exchange.interaction_id,
        "x-onlinerl-session-id": exchange.lineage.session_id,
        "x-onlinerl-policy-version": exchange.policy_version,
        # OpenAI's clients show this as the id of a request.
        "x-request-id": exchange.interaction_id,
    }


def _stream_start(headers: Mapping[str, str]) -> dict[str, Any]:
    fields = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        # Proxies that buffer would delay the stream.
        "x-accel-buffering": "no",
        **headers,
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}
