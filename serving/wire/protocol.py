"""The seam of protocols: bodies to a `Request`, and pieces of an answer to bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.encoding.json import Body
from onlinerl.serving.interaction.caller import Caller
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Outcome, Piece
from onlinerl.serving.interaction.request import Request


@dataclass(frozen=True, kw_only=True)
class IncomingRequest:
    """A request before its protocol has read it."""

    body: object
    """Parsed JSON."""
    headers: Mapping[str, str]
    caller: Caller
    config: GatewayConfig


class StreamWriter(Protocol):
    """Writes one streamed answer as server-sent events. Make one for each answer."""

    def open(self) -> bytes:
        """The bytes before the first piece; they are sent together with it."""

    def write(self, piece: Piece) -> bytes:
        """The events of one piece; may be empty."""

    def close(self, outcomes: Sequence[Outcome]) -> bytes:
        """The bytes after the last piece."""

    def fail(self, failure: EngineFailed) -> bytes:
        """The protocol's error event, which ends the stream."""


class Wire(Protocol):
    """One protocol. `read` and `keep` may wait for a store; the others are pure functions."""

    async def read(self, incoming: IncomingRequest) -> Request:
        """The request that a body asks for.

        Raises:
            RequestRefused: a parameter is wrong or not supported; the error names it.
        """

    def whole(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
        """The answer to a request that does not stream."""

    def writer(self, exchange: Exchange) -> StreamWriter:
        """The writer of an answer that streams."""

    async def keep(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> None:
        """Store what the protocol needs of an answer; most protocols need nothing.

        Called right before a whole answer, or the end of a streamed one, is sent.
        """
        return

    def error(self, error: RequestRefused | EngineFailed) -> Body:
        """The protocol's error envelope."""
