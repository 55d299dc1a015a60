"""One ASGI endpoint for every protocol: let in, read, answer whole or streamed, in its envelope.

What a protocol adds is its `Wire`; nothing here knows any.
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
from onlinerl.serving.http.asgi import leaving_when_gone, read_json, send_json
from onlinerl.serving.http.idempotency import Idempotency, Once, once
from onlinerl.serving.interaction.caller import Caller
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.ids import check_session_id
from onlinerl.serving.interaction.pieces import Outcome
from onlinerl.serving.interaction.request import Request
from onlinerl.serving.wire.protocol import Asked, StreamWriter, Wire

logger = logging.getLogger(__name__)

SESSION_HEADER = "x-onlinerl-session-id"
CONSENT_HEADER = "x-onlinerl-consent"


@dataclass(frozen=True, kw_only=True)
class Door:
    """What every request passes before it is answered."""

    keyring: Keyring
    admission: Admission
    idempotency: Idempotency


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A request that was read."""

    request: Request
    caller: Caller
    terms: Terms
    ticket: Ticket


class WireRoute:
    """POST of one protocol. Raises its errors: `GuardedRoute` writes them."""

    def __init__(self, wire: Wire, *, gateway: Gateway, door: Door) -> None:
        self._wire = wire
        self._gateway = gateway
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = Headers(scope=scope)
        door = self._door
        caller = door.keyring.identify(headers.get("authorization"), headers.get("x-api-key"))
        # Released here in any case, and by the answer when it lives longer than its caller.
        ticket = door.admission.enter(caller)
        held = False
        try:
            config = self._gateway.config
            body = await read_json(scope, receive, config=config)
            asked = Asked(body=body, headers=headers, caller=caller, config=config)
            call = _Call(
                request=await self._wire.read(asked),
                caller=caller,
                terms=terms_of(headers),
                ticket=ticket,
            )

            async def answer_once(send: Send) -> bool:
                nonlocal held
                exchange, answer = self._begin(call)
                held = True
                return await self._reply(exchange, answer, call, receive=receive, send=send)

            await door.idempotency.answer(
                _once(headers, caller=caller, path=scope["path"], body=body),
                answer_once,
                receive=receive,
                send=send,
            )
        finally:
            if not held:
                ticket.release()

    def _begin(self, call: _Call) -> tuple[Exchange, Answer]:
        return self._gateway.begin(
            call.request, caller=call.caller, terms=call.terms, ticket=call.ticket
        )

    async def _reply(
        self, exchange: Exchange, answer: Answer, call: _Call, *, receive: Receive, send: Send
    ) -> bool:
        """Send the answer; whether the caller got all of it."""
        whole = False
        async with leaving_when_gone(answer, receive):
            reply = self._stream if call.request.stream else self._whole
            whole = await reply(exchange, answer, limits=call.ticket.headers, send=send)
        return whole

    async def _whole(
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
        """Send events as pieces come; the status waits for the first: an early error keeps it."""
        writer: StreamWriter | None = None
        try:
            async for batch in answer.batches():
                head = b""
                if writer is None:
                    # Only now it is known which version answers. Opened before it writes: a writer
                    # may number what it writes.
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
        """Let the protocol keep what it needs; why it could not."""
        try:
            await self._wire.ended(exchange, outcomes)
        except Exception:
            logger.exception("an answer was not kept")
            return GatewayFault("the gateway failed to keep the answer")
        return None


def terms_of(headers: Headers) -> Terms:
    """What a caller says in headers.

    Raises:
        RequestRefused: when the session id is none.
    """
    session_id = headers.get(SESSION_HEADER)
    if session_id is not None:
        check_session_id(session_id, param=SESSION_HEADER)
    return Terms(session_id=session_id, consent=headers.get(CONSENT_HEADER))


def _once(headers: Headers, *, caller: Caller, path: str, body: object) -> Once | None:
    key = headers.get("idempotency-key")
    if key is None:
        return None
    terms = (headers.get(SESSION_HEADER), headers.get(CONSENT_HEADER))
    return once(key, caller=caller, path=path, body=body, terms=terms)


async def _end(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": False})


def _id_headers(exchange: Exchange) -> dict[str, str]:
    return {
        "x-onlinerl-interaction-id": exchange.interaction_id,
        "x-onlinerl-session-id": exchange.lineage.session_id,
        "x-onlinerl-policy-version": exchange.policy_version,
        # What OpenAI's clients show as the id of a request.
        "x-request-id": exchange.interaction_id,
    }


def _stream_start(headers: Mapping[str, str]) -> dict[str, Any]:
    named = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        # Proxies that buffer would hold the stream back.
        "x-accel-buffering": "no",
        **headers,
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}
