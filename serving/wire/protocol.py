"""A protocol, as the routes see it: a thin translation in and out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.interaction.caller import Caller
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Outcome, Piece
from onlinerl.serving.interaction.request import Request

Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as it came in."""

    body: object
    """Parsed JSON."""
    headers: Mapping[str, str]
    caller: Caller
    config: GatewayConfig


class StreamWriter(Protocol):
    """Writes one streamed answer as server-sent events; keeps what numbering needs."""

    def open(self) -> bytes:
        """What comes before the first piece; sent together with it."""

    def write(self, piece: Piece) -> bytes:
        """One piece; may be empty."""

    def close(self, outcomes: Sequence[Outcome]) -> bytes:
        """What comes after the last piece."""

    def fail(self, failure: EngineFailed) -> bytes:
        """The protocol's error event, after which the stream ends."""


class Wire(Protocol):
    """One protocol. `read` may wait for a store; the rest are pure functions of values."""

    async def read(self, asked: Asked) -> Request:
        """A checked request.

        Raises:
            RequestRefused: naming the parameter that is wrong or not supported.
        """

    def whole(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
        """The answer to a request that does not stream."""

    def writer(self, exchange: Exchange) -> StreamWriter:
        """For an answer that streams."""

    async def ended(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> None:
        """A whole answer is about to be sent, or the end of a streamed one: keep what is needed."""

    def error(self, error: RequestRefused | EngineFailed) -> Body:
        """The protocol's error envelope."""
