"""Which exact tokens a conversation was served with, so that its next turn extends them.

A bounded memory: what was forgotten is rendered anew and starts a new root, which is correct but
trains as two sequences instead of one.
"""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onlinerl.rollout_store.schema import Consent
from onlinerl.serving.renderer import Message


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A served answer, as the thing that a next turn extends."""

    interaction_id: str
    choice_index: int
    session_id: str
    token_ids: "array[int]"
    """Prompt and completion."""
    consent: Consent
    whole: bool
    """Whether the tokens say what the caller was shown; past a stop string they say more."""
    logged: bool
    """Whether the log holds it, so that a child may refer to it."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Within which equal messages are the same conversation."""

    tenant: str
    user: str | None = None
    session_id: str | None = None
    """As the caller named it; without it, the latest equal conversation of the user counts."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """A known turn and how many of the request's messages it covers."""

    turn: Turn
    num_messages: int


class Conversations:
    """Least recently used turns by scope and messages.

    Only used from the event loop. A turn is kept under two keys, with its session and without;
    both count towards the bounds, and each ages by its own use.
    """

    def __init__(self, *, max_turns: int, max_tokens: int) -> None:
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def num_tokens(self) -> int:
        """Tokens remembered; a turn that can be found in two ways counts twice."""
        return self._num_tokens

    def find(self, messages: Sequence[Message], *, scope: Scope) -> Match | None:
        """The longest known conversation that `messages` go on from."""
        digests = list(_digests(messages, scope=scope))
        for num_messages in range(len(messages) - 1, 0, -1):
            if messages[num_messages - 1]["role"] != "assistant":
                continue
            digest = digests[num_messages - 1]
            turn = self._turns.get(digest)
            if turn is not None:
                self._turns.move_to_end(digest)
                return Match(turn=turn, num_messages=num_messages)
        return None

    def remember(self, messages: Sequence[Message], turn: Turn, *, scope: Scope) -> None:
        """Keep `turn`, whose answer is the last of `messages`, under its session and without."""
        named = Scope(tenant=scope.tenant, user=scope.user, session_id=turn.session_id)
        unnamed = Scope(tenant=scope.tenant, user=scope.user)
        for place in (named, unnamed):
            *_, digest = _digests(messages, scope=place)
            self._forget(digest)
            self._turns[digest] = turn
            self._num_tokens += len(turn.token_ids)
        while len(self._turns) > self._max_turns or self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._turns)))

    def _forget(self, digest: bytes) -> None:
        turn = self._turns.pop(digest, None)
        if turn is not None:
            self._num_tokens -= len(turn.token_ids)


def _digests(messages: Sequence[Message], *, scope: Scope) -> Iterator[bytes]:
    """A digest for every beginning of `messages`."""
    place = [scope.tenant, scope.user, scope.session_id]
    digest = hashlib.sha256(_canonical(place)).digest()
    for message in messages:
        digest = hashlib.sha256(digest + _canonical(message)).digest()
        yield digest


def _canonical(value: object) -> bytes:
    """JSON that does not depend on key order or escapes."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return text.encode("ascii")
