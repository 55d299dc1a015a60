from array import array

import pytest

from onlinerl.serving.conversations import Conversations, Scope, Turn
from onlinerl.serving.renderer import Message

ACME = Scope(tenant="acme")


def chat(*contents: str) -> list[Message]:
    roles = ["user", "assistant"]
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def turn(name: str = "i1", *, session_id: str = "s1", num_tokens: int = 3) -> Turn:
    return Turn(
        interaction_id=name,
        choice_index=0,
        session_id=session_id,
        token_ids=array("i", range(num_tokens)),
        consent="train",
        whole=True,
        logged=True,
    )


def memory(**bounds: int) -> Conversations:
    return Conversations(**{"max_turns": 100, "max_tokens": 1000, **bounds})


def test_the_longest_known_beginning_is_found() -> None:
    known = memory()
    known.remember(chat("a", "b"), turn("i1"), scope=ACME)
    known.remember(chat("a", "b", "c", "d"), turn("i2"), scope=ACME)
    match = known.find(chat("a", "b", "c", "d", "e"), scope=ACME)

    assert match is not None
    assert (match.turn.interaction_id, match.num_messages) == ("i2", 4)


def test_the_same_messages_again_are_not_an_extension() -> None:
    known = memory()
    known.remember(chat("a", "b"), turn(), scope=ACME)

    assert known.find(chat("a"), scope=ACME) is None
    assert known.find(chat("a", "b"), scope=ACME) is None


@pytest.mark.parametrize(
    "messages",
    [chat("a", "B", "c"), chat("A", "b", "c"), chat("ab", "", "c"), chat("a", "b\n", "c")],
)
def test_another_history_is_another_conversation(messages: list[Message]) -> None:
    known = memory()
    known.remember(chat("a", "b"), turn(), scope=ACME)

    assert known.find(messages, scope=ACME) is None


@pytest.mark.parametrize(
    "scope",
    [
        Scope(tenant="globex"),
        Scope(tenant="acme", user="ada"),
        Scope(tenant="acme", session_id="s2"),
    ],
)
def test_scopes_do_not_meet(scope: Scope) -> None:
    known = memory()
    known.remember(chat("a", "b"), turn(), scope=ACME)

    assert known.find(chat("a", "b", "c"), scope=scope) is None


def test_a_session_is_found_by_its_name_among_equal_conversations() -> None:
    known = memory()
    known.remember(chat("a", "b"), turn("i1", session_id="s1"), scope=ACME)
    known.remember(chat("a", "b"), turn("i2", session_id="s2"), scope=ACME)

    def found(session_id: str | None) -> str:
        match = known.find(chat("a", "b", "c"), scope=Scope(tenant="acme", session_id=session_id))
        assert match is not None
        return match.turn.interaction_id

    assert (found("s1"), found("s2"), found(None)) == ("i1", "i2", "i2")


def test_key_order_does_not_matter() -> None:
    known = memory()
    known.remember(chat("a", "b"), turn(), scope=ACME)
    swapped = [{"content": m["content"], "role": m["role"]} for m in chat("a", "b", "c")]

    assert known.find(swapped, scope=ACME) is not None


def test_the_least_recently_used_is_forgotten() -> None:
    known = memory(max_turns=4)
    known.remember(chat("a", "b"), turn("i1"), scope=ACME)
    known.remember(chat("x", "y"), turn("i2"), scope=ACME)
    for other in ("p", "r"):
        known.find(chat("a", "b", "c"), scope=ACME)
        known.remember(chat(other, "q"), turn("i3"), scope=ACME)

    assert len(known) == 4
    assert known.find(chat("a", "b", "c"), scope=ACME) is not None
    assert known.find(chat("x", "y", "c"), scope=ACME) is None


def test_tokens_are_bounded_and_counted() -> None:
    known = memory(max_tokens=20)
    for number in range(5):
        known.remember(chat(str(number), "b"), turn(num_tokens=4), scope=ACME)
        known.remember(chat(str(number), "b"), turn(num_tokens=4), scope=ACME)

    assert known.num_tokens == 20


def test_a_memory_of_nothing_works() -> None:
    known = memory(max_turns=0)
    known.remember(chat("a", "b"), turn(), scope=ACME)

    assert (len(known), known.num_tokens) == (0, 0)
