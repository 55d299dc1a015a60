"""Remembers the exact tokens that conversations were served with, so that next turns extend them.

The memory is bounded. A forgotten conversation is rendered anew and starts a new root, which is
correct but trains as two sequences instead of one. `digests` says when two conversations are equal.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onlinerl.rollout_store.schema import Consent
from onlinerl.serving.conversations.digests import PrefixDigests, ReasoningDigests, ScopeDigest
from onlinerl.serving.interaction.request import Message


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A served answer that a next turn can extend."""

    interaction_id: str
    choice_index: int
    session_id: str
    token_ids: "array[int]"
    """Tokens of prompt and completion."""
    thinking: bool | None
    """The switch of reasoning that the prompt was rendered with."""
    consent: Consent
    is_whole: bool
    """Whether the caller was shown all tokens; those after a stop string are not shown."""
    is_logged: bool
    """Whether the log holds the answer, so that a child may refer to it."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The scope in which equal messages are the same conversation."""

    tenant: str
    user: str | None = None
    session_id: str | None = None
    """The caller's own session id; without it, the latest equal conversation of the user counts."""
    tools: bytes = b""
    """Digest of what the model reads about tools."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """A known turn that a request extends."""

    turn: Turn
    num_messages: int
    """Number of the request's messages that the turn covers."""
    reasoning: ReasoningDigests
    """Digests of the reasoning that was served in these messages."""


@dataclass(frozen=True)
class _Entry:
    turn: Turn
    reasoning: ReasoningDigests
    keys: tuple[bytes, ...]


class Conversations:
    """A least-recently-used cache of turns, by scope and messages. Used from the event loop only.

    A turn can be found by its history with and without reasoning, and with and without its session;
    it counts towards the bounds once. A later turn with the same history replaces an earlier one.

    Args:
        max_turns: Most turns to remember.
        max_tokens: Most tokens to remember, over all turns.
    """

    def __init__(self, *, max_turns: int, max_tokens: int) -> None:
        self._turns: OrderedDict[int, _Entry] = OrderedDict()
        self._index: dict[bytes, int] = {}
        self._next = 0
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are remembered."""
        return self._num_tokens

    def find(self, messages: Sequence[Message], *, scope: Scope) -> Match | None:
        """The longest known conversation that `messages` continue; None if there is none."""
        return next(self.matches(messages, scope=scope), None)

    def matches(self, messages: Sequence[Message], *, scope: Scope) -> Iterator[Match]:
        """Known conversations that `messages` continue, the longest first.

        Messages without reasoning match whatever reasoning was served; messages with other
        reasoning than was served are another conversation.
        """
        if not self._index:
            return
        scope_digest = _scope_digest(scope, scope.session_id)
        prefixes = PrefixDigests(messages)
        for num_messages in range(len(messages) - 1, 0, -1):
            if messages[num_messages - 1].role != "assistant":
                continue
            for digest in (prefixes.full[num_messages - 1], prefixes.bare[num_messages - 1]):
                number = self._index.get(scope_digest.key(digest))
                if number is None:
                    continue
                entry = self._turns[number]
                if prefixes.agrees_with(entry.reasoning, num_messages=num_messages):
                    self._turns.move_to_end(number)
                    yield Match(
                        turn=entry.turn, num_messages=num_messages, reasoning=entry.reasoning
                    )
                    break

    def remember(
        self,
        messages: Sequence[Message],
        turn: Turn,
        *,
        scope: Scope,
        extends: Match | None = None,
    ) -> None:
        """Keep `turn`, whose answer is the last of `messages`.

        Args:
            messages: The conversation as the caller sent it, and the answer as it was shown.
            turn: The answer as it was served.
            scope: Its scope; the session is taken from `turn`.
            extends: The known turn whose tokens `turn` starts with. Its reasoning was served, even
                if the caller left it out.
        """
        prefixes = PrefixDigests(messages, served=() if extends is None else extends.reasoning)
        keys = tuple(
            scope_digest.key(digest)
            for scope_digest in (_scope_digest(scope, turn.session_id), _scope_digest(scope, None))
            for digest in dict.fromkeys((prefixes.full[-1], prefixes.bare[-1]))
        )
        self._next += 1
        self._turns[self._next] = _Entry(turn, prefixes.reasoning(len(messages)), keys)
        self._num_tokens += len(turn.token_ids)
        for key in keys:
            self._assign(key, self._next)
        while self._turns and (
            len(self._turns) > self._max_turns or self._num_tokens > self._max_tokens
        ):
            self._forget(next(iter(self._turns)))

    def _assign(self, key: bytes, number: int) -> None:
        before = self._index.get(key)
        self._index[key] = number
        if before is None:
            return
        if not any(self._index.get(other) == before for other in self._turns[before].keys):
            self._forget(before)

    def _forget(self, number: int) -> None:
        entry = self._turns.pop(number)
        self._num_tokens -= len(entry.turn.token_ids)
        for key in entry.keys:
            if self._index.get(key) == number:
                del self._index[key]


def _scope_digest(scope: Scope, session_id: str | None) -> ScopeDigest:
    return ScopeDigest(
        tenant=scope.tenant, user=scope.user, session_id=session_id, tools=scope.tools
    )
