"""Conversations as digests: equal where a model is told the same, whatever the JSON around it.

The arguments of a tool call count as a JSON value, so key order, spacing and escapes make no
difference. What an assistant thought is kept apart, because callers may leave it out.
"""

import json
import math
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from onlinerl.serving.encoding.json import sorted_json
from onlinerl.serving.interaction.request import Message, Tool

_SIZE = 20
_EXACT_BELOW = 2**53
"""Whole floats above may stand for any of several numbers."""
_ABSENT = b"\0"
_PRESENT = b"\1"


Marks = tuple[bytes | None, ...]
"""A digest of the reasoning of every assistant message, in order; None where there is none."""


class Place:
    """Where a conversation belongs; equal digests in two places are two conversations."""

    def __init__(
        self, *, tenant: str, user: str | None, session_id: str | None, tools: bytes
    ) -> None:
        parts = [_text(tenant), _optional(user), _optional(session_id), tools]
        self._digest = _join(parts)

    def key(self, digest: bytes) -> bytes:
        """The digest of a conversation in this place."""
        return blake2b(self._digest + digest, digest_size=_SIZE).digest()


class Trail:
    """The beginnings of a conversation, one up to each of its messages.

    Args:
        messages: a conversation.
        known: reasoning that was served, for the first assistant messages; it counts where the
            conversation brings none.
    """

    def __init__(self, messages: Sequence[Message], *, known: Marks = ()) -> None:
        self.bare: list[bytes] = []
        """Digests without reasoning."""
        self.full: list[bytes] = []
        """Digests with it."""
        self._marks: list[bytes | None] = []
        self._num_marks: list[int] = []
        bare = full = b""
        for message in messages:
            own = _join(_bare_parts(message))
            bare = _join((bare, own))
            full = _join((full, own, self._mark(message, known=known) or b""))
            self.bare.append(bare)
            self.full.append(full)
            self._num_marks.append(len(self._marks))

    def marks(self, num_messages: int) -> Marks:
        """What the assistant thought in the first messages."""
        return tuple(self._marks[: self._num_marks[num_messages - 1]])

    def agrees_with(self, served: Marks, *, num_messages: int) -> bool:
        """Whether the first messages bring no other reasoning than was served."""
        given = self.marks(num_messages)
        return all(mark is None or mark == known for mark, known in zip(given, served, strict=True))

    def _mark(self, message: Message, *, known: Marks) -> bytes | None:
        if message.role != "assistant":
            return None
        thought = _thought(message)
        if thought is None and len(self._marks) < len(known):
            thought = known[len(self._marks)]
        self._marks.append(thought)
        return thought


def tools_digest(tools: Sequence[Tool]) -> bytes:
    """What a model is told of tools, whatever the key order of their schemas."""
    described = [
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        for tool in tools
    ]
    return _join([sorted_json(described).encode()])


def canonical_json(text: str) -> str:
    """A JSON text without what does not matter; a text that is no JSON stays as it is."""
    try:
        value = json.loads(text, parse_float=_number)
    except (ValueError, RecursionError):
        return text
    return sorted_json(value)


def _number(text: str) -> float:
    """A number with a point or an exponent: JavaScript writes whole ones without them."""
    number = float(text)
    if math.isinf(number):
        raise ValueError("beyond every float, so all of these would be one")
    return int(number) if number.is_integer() and abs(number) < _EXACT_BELOW else number


def _thought(message: Message) -> bytes | None:
    # An empty reasoning is what callers send that had none.
    if not message.reasoning:
        return None
    return blake2b(message.reasoning.encode(), digest_size=_SIZE).digest()


def _bare_parts(message: Message) -> Iterable[bytes]:
    yield _text(message.role)
    yield _text(message.content)
    yield _optional(message.tool_call_id)
    yield _optional(message.name)
    for call in message.tool_calls:
        yield _text(call.id)
        yield _text(call.name)
        yield _text(canonical_json(call.arguments))


def _text(text: str) -> bytes:
    # With its length in front, no two lists of parts join to the same bytes.
    data = text.encode()
    return len(data).to_bytes(8, "little") + data


def _optional(text: str | None) -> bytes:
    return _ABSENT if text is None else _PRESENT + _text(text)


def _join(parts: Iterable[bytes]) -> bytes:
    return blake2b(b"".join(parts), digest_size=_SIZE).digest()
