"""Which exact tokens a conversation was served with, so that its next turn extends them.

A bounded memory: what was forgotten is rendered anew and starts a new root, which is correct but
trains as two sequences instead of one. How conversations are told apart is in `digests`.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onlinerl.rollout_store.schema import Consent
from onlinerl.serving.conversations.digests import Marks, Place, Trail
from onlinerl.serving.interaction.request import Message


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A served answer, as the thing that a next turn extends."""

    interaction_id: str
    choice_index: int
    session_id: str
    token_ids: "array[int]"
    """Prompt and completion."""
    thinking: bool | None
    """The switch of reasoning that the prompt was rendered with."""
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
    tools: bytes = b""
    """Digest of what the model is told of tools."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """A known turn and how many of the request's messages it covers."""

    turn: Turn
    num_messages: int
    marks: Marks
    """What the assistant thought in these messages, as it was served."""


@dataclass(frozen=True)
class _Kept:
    turn: Turn
    marks: Marks
    keys: tuple[bytes, ...]


class Conversations:
    """Least recently used turns by scope and messages. Only used from the event loop.

    A turn can be found by its whole history and by its history without reasoning, within its
    session and without a session; it counts towards the bounds once. A later turn that is found
    in the same way takes the place of an earlier one.
    """

    def __init__(self, *, max_turns: int, max_tokens: int) -> None:
        self._turns: OrderedDict[int, _Kept] = OrderedDict()
        self._index: dict[bytes, int] = {}
        self._next = 0
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def num_tokens(self) -> int:
        """Tokens remembered."""
        return self._num_tokens

    def find(self, messages: Sequence[Message], *, scope: Scope) -> Match | None:
        """The longest known conversation that `messages` go on from."""
        return next(self.matches(messages, scope=scope), None)

    def matches(self, messages: Sequence[Message], *, scope: Scope) -> Iterator[Match]:
        """Known conversations that `messages` go on from, the longest first.

        A caller that leaves reasoning out is answered from what was served; one that brings other
        reasoning than was served has another conversation.
        """
        if not self._index:
            return
        place = _place(scope, scope.session_id)
        trail = Trail(messages)
        for num_messages in range(len(messages) - 1, 0, -1):
            if messages[num_messages - 1].role != "assistant":
                continue
            for digest in (trail.full[num_messages - 1], trail.bare[num_messages - 1]):
                number = self._index.get(place.key(digest))
                if number is None:
                    continue
                kept = self._turns[number]
                if trail.agrees_with(kept.marks, num_messages=num_messages):
                    self._turns.move_to_end(number)
                    yield Match(turn=kept.turn, num_messages=num_messages, marks=kept.marks)
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
            messages: the conversation as the caller sent it, and the answer as it was shown.
            turn: what was served.
            scope: whose it is; its session is that of `turn`.
            extends: the known turn whose tokens `turn` starts with. What the assistant thought in
                it was served, even where the caller left it out.
        """
        trail = Trail(messages, known=() if extends is None else extends.marks)
        keys = tuple(
            place.key(digest)
            for place in (_place(scope, turn.session_id), _place(scope, None))
            for digest in dict.fromkeys((trail.full[-1], trail.bare[-1]))
        )
        self._next += 1
        self._turns[self._next] = _Kept(turn, trail.marks(len(messages)), keys)
        self._num_tokens += len(turn.token_ids)
        for key in keys:
            self._take_over(key, self._next)
        while self._turns and (
            len(self._turns) > self._max_turns or self._num_tokens > self._max_tokens
        ):
            self._forget(next(iter(self._turns)))

    def _take_over(self, key: bytes, number: int) -> None:
        before = self._index.get(key)
        self._index[key] = number
        if before is None:
            return
        if not any(self._index.get(other) == before for other in self._turns[before].keys):
            self._forget(before)

    def _forget(self, number: int) -> None:
        kept = self._turns.pop(number)
        self._num_tokens -= len(kept.turn.token_ids)
        for key in kept.keys:
            if self._index.get(key) == number:
                del self._index[key]


def _place(scope: Scope, session_id: str | None) -> Place:
    return Place(tenant=scope.tenant, user=scope.user, session_id=session_id, tools=scope.tools)
