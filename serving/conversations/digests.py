"""Digests of conversations: equal if the model reads the same, however the JSON is written.

The arguments of a tool call are compared as JSON values, so key order, spacing and escapes make no
difference. Reasoning has digests of its own, because callers may leave it out.
"""

import json
import math
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from onlinerl.serving.encoding.json import sorted_json
from onlinerl.serving.interaction.request import Message, Tool

_SIZE = 20
_EXACT_BELOW = 2**53
"""A whole float from here on may stand for several integers."""
_ABSENT = b"\0"
_PRESENT = b"\1"

ReasoningDigests = tuple[bytes | None, ...]
"""The digest of the reasoning of every assistant message, in order; None for one without."""


class ScopeDigest:
    """Digest of the scope of a conversation: equal messages in two scopes are two conversations."""

    def __init__(
        self, *, tenant: str, user: str | None, session_id: str | None, tools: bytes
    ) -> None:
        parts = [_text(tenant), _optional(user), _optional(session_id), tools]
        self._digest = _join(parts)

    def key(self, digest: bytes) -> bytes:
        """The digest of a conversation in this scope."""
        return blake2b(self._digest + digest, digest_size=_SIZE).digest()


class PrefixDigests:
    """Digests of the prefixes of a conversation, one for each of its messages.

    Args:
        messages: A conversation.
        served: Reasoning that was served in the first assistant messages; it counts for messages
            that bring none.
    """

    def __init__(self, messages: Sequence[Message], *, served: ReasoningDigests = ()) -> None:
        self.bare: list[bytes] = []
        """Digests without reasoning."""
        self.full: list[bytes] = []
        """Digests with reasoning."""
        self._reasoning: list[bytes | None] = []
        self._num_reasoning: list[int] = []
        bare = full = b""
        for message in messages:
            own = _join(_bare_parts(message))
            bare = _join((bare, own))
            full = _join((full, own, self._reasoning_digest(message, served=served) or b""))
            self.bare.append(bare)
            self.full.append(full)
            self._num_reasoning.append(len(self._reasoning))

    def reasoning(self, num_messages: int) -> ReasoningDigests:
        """Digests of the reasoning in the first `num_messages` messages."""
        return tuple(self._reasoning[: self._num_reasoning[num_messages - 1]])

    def agrees_with(self, served: ReasoningDigests, *, num_messages: int) -> bool:
        """Whether the first messages bring the reasoning that was served, or none."""
        brought = self.reasoning(num_messages)
        return all(one is None or one == other for one, other in zip(brought, served, strict=True))

    def _reasoning_digest(self, message: Message, *, served: ReasoningDigests) -> bytes | None:
        if message.role != "assistant":
            return None
        digest = _digest_of_reasoning(message)
        if digest is None and len(self._reasoning) < len(served):
            digest = served[len(self._reasoning)]
        self._reasoning.append(digest)
        return digest


def tools_digest(tools: Sequence[Tool]) -> bytes:
    """Digest of what the model reads about `tools`, whatever the key order of their schemas."""
    described = [
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        for tool in tools
    ]
    return _join([sorted_json(described).encode()])


def canonical_json(text: str) -> str:
    """A JSON text in its one canonical spelling; a text that is no JSON stays as it is."""
    try:
        value = json.loads(text, parse_float=_number)
    except (ValueError, RecursionError):
        return text
    return sorted_json(value)


def _number(text: str) -> float:
    """A number with a point or an exponent; a whole one as int, since JavaScript writes it so."""
    number = float(text)
    if math.isinf(number):
        raise ValueError("larger than every float, so different numbers would count as equal")
    return int(number) if number.is_integer() and abs(number) < _EXACT_BELOW else number


def _digest_of_reasoning(message: Message) -> bytes | None:
    # Callers without reasoning may send an empty one.
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
    # The length in front keeps different lists of parts from joining to the same bytes.
    data = text.encode()
    return len(data).to_bytes(8, "little") + data


def _optional(text: str | None) -> bytes:
    return _ABSENT if text is None else _PRESENT + _text(text)


def _join(parts: Iterable[bytes]) -> bytes:
    return blake2b(b"".join(parts), digest_size=_SIZE).digest()
