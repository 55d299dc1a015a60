from array import array
from dataclasses import replace

import pytest

from onlinerl.serving.conversations.digests import tools_digest
from onlinerl.serving.conversations.memory import Conversations, Scope, Turn
from onlinerl.serving.interaction.request import Message, Role, Tool, ToolCall

ACME = Scope(tenant="acme")
W = {"type": "object", "title": "W"}


def chat(*contents: str) -> list[Message]:
    roles: list[Role] = ["user", "assistant"]
    return [Message(role=roles[n % 2], content=text) for n, text in enumerate(contents)]


def turn(name: str = "i1", *, session_id: str = "s1", num_tokens: int = 3) -> Turn:
    return Turn(
        interaction_id=name,
        choice_index=0,
        session_id=session_id,
        token_ids=array("i", range(num_tokens)),
        thinking=None,
        consent="train",
        is_whole=True,
        is_logged=True,
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


def called(arguments: str, *, call_id: str = "c1") -> list[Message]:
    call = ToolCall(id=call_id, name="weather", arguments=arguments)
    return [
        Message(role="user", content="a"),
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content="Sunny", tool_call_id=call_id, name="weather"),
    ]


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        ('{"city": "Zürich", "days": 2}', True),
        ('{"days":2,"city":"Zürich"}', True),
        ('{ "city" : "Z\\u00fcrich",\n "days": 2 }', True),
        ('{"city": "Zurich", "days": 2}', False),
        ('{"city": "Zürich", "days": "2"}', False),
        ('{"city": "Zürich"}', False),
        ("not JSON", False),
    ],
)
def test_arguments_of_a_call_count_as_a_json_value(arguments: str, same: bool) -> None:
    known = memory()
    served = called('{"city":"Zürich","days":2}')
    known.remember(served[:2], turn(), scope=ACME)

    assert (known.find(called(arguments), scope=ACME) is not None) == same


@pytest.mark.parametrize(
    ("served", "echoed", "same"),
    [
        ('{"lat": 47.0}', '{"lat":47}', True),
        ('{"lat": [-0.0, 2e3]}', '{"lat":[0,2000]}', True),
        ('{"lat": 0.10}', '{"lat":0.1}', True),
        ('{"lat": 47.5}', '{"lat":47}', False),
        ('{"lat": 47.0}', '{"lat":"47"}', False),
        ('{"lat": 9007199254740991.0}', '{"lat":9007199254740991}', True),
        # Larger floats stand for several integers.
        ('{"lat": 9007199254740993.0}', '{"lat":9007199254740992}', False),
        ('{"lat": 1e308}', '{"lat":1e307}', False),
        ('{"lat": 1e400}', '{"lat":1e308}', False),
        ('{"lat": 1e400}', '{"lat":1e500}', False),
        ('{"lat": 1e400}', '{"lat": 1e400}', True),
    ],
)
def test_whole_numbers_may_lose_their_point(served: str, echoed: str, same: bool) -> None:
    """JavaScript has one kind of number, and writes whole ones without a point."""
    known = memory()
    known.remember(called(served)[:2], turn(), scope=ACME)

    assert (known.find(called(echoed), scope=ACME) is not None) == same


def test_calls_of_another_id_are_other_calls() -> None:
    known = memory()
    known.remember(called("{}")[:2], turn(), scope=ACME)

    assert known.find(called("{}", call_id="c2"), scope=ACME) is None


@pytest.mark.parametrize(
    ("tools", "same"),
    [
        ([Tool(name="weather", parameters=W)], True),
        ([Tool(name="weather", parameters={"title": "W", "type": "object"})], True),
        ([Tool(name="weather", parameters={"type": "object"})], False),
        ([Tool(name="weather", description="x", parameters=W)], False),
        ([], False),
    ],
)
def test_a_changed_list_of_tools_is_another_conversation(tools: list[Tool], same: bool) -> None:
    told = [Tool(name="weather", parameters=W)]
    known = memory()
    known.remember(chat("a", "b"), turn(), scope=replace(ACME, tools=tools_digest(told)))

    found = known.find(chat("a", "b", "c"), scope=replace(ACME, tools=tools_digest(tools)))
    assert (found is not None) == same


def thinking(*thoughts: str | None) -> list[Message]:
    """A question after each answer; the answers are all equal."""
    messages = [Message(role="user", content="a")]
    for thought in thoughts:
        messages += [
            Message(role="assistant", content="b", reasoning=thought),
            Message(role="user", content="c"),
        ]
    return messages


@pytest.mark.parametrize(
    ("brought", "same"),
    [
        (("one", "two"), True),
        ((None, None), True),
        (("", ""), True),
        (("one", None), True),
        ((None, "two"), True),
        (("one", "other"), False),
        (("other", "two"), False),
        (("other", None), False),
    ],
)
def test_reasoning_may_be_left_out_and_not_be_changed(
    brought: tuple[str | None, ...], same: bool
) -> None:
    known = memory()
    known.remember(thinking("one", "two")[:-1], turn("i2"), scope=ACME)

    match = known.find(thinking(*brought), scope=ACME)
    assert (match is not None) == same


def test_reasoning_that_a_caller_left_out_is_remembered_by_the_turns_after_it() -> None:
    known = memory()
    known.remember(thinking("one")[:-1], turn("i1"), scope=ACME)
    match = known.find(thinking(None), scope=ACME)
    assert match is not None
    known.remember(thinking(None, "two")[:-1], turn("i2"), scope=ACME, extends=match)

    def found(*thoughts: str | None) -> str | None:
        match = known.find(thinking(*thoughts), scope=ACME)
        return None if match is None else match.turn.interaction_id

    assert (found("one", "two"), found(None, None), found(None, "two")) == ("i2", "i2", "i2")
    # Reasoning that was never served does not match.
    assert found("other", "two") is None


def test_reasoning_tells_equal_answers_apart() -> None:
    known = memory()
    known.remember(thinking("one")[:-1], turn("i1"), scope=ACME)
    known.remember(thinking("two")[:-1], turn("i2"), scope=ACME)

    def found(thought: str | None) -> str | None:
        match = known.find(thinking(thought), scope=ACME)
        return None if match is None else match.turn.interaction_id

    assert (found("one"), found("two"), found(None)) == ("i1", "i2", "i2")


def test_all_known_beginnings_come_the_longest_first() -> None:
    known = memory()
    known.remember(chat("a", "b"), turn("i1"), scope=ACME)
    known.remember(chat("a", "b", "c", "d"), turn("i2"), scope=ACME)

    found = known.matches(chat("a", "b", "c", "d", "e"), scope=ACME)
    assert [match.turn.interaction_id for match in found] == ["i2", "i1"]


def test_the_least_recently_used_is_forgotten() -> None:
    known = memory(max_turns=2)
    known.remember(chat("a", "b"), turn("i1"), scope=ACME)
    known.remember(chat("x", "y"), turn("i2"), scope=ACME)
    known.find(chat("a", "b", "c"), scope=ACME)
    known.remember(chat("p", "q"), turn("i3"), scope=ACME)

    assert len(known) == 2
    assert known.find(chat("a", "b", "c"), scope=ACME) is not None
    assert known.find(chat("x", "y", "c"), scope=ACME) is None
    assert known.find(chat("x", "y", "c"), scope=replace(ACME, session_id="s1")) is None


def test_tokens_are_bounded_and_counted_once() -> None:
    known = memory(max_tokens=10)
    for number in range(5):
        known.remember(chat(str(number), "b"), turn(num_tokens=4), scope=ACME)
        # An equal turn replaces the first.
        known.remember(chat(str(number), "b"), turn(num_tokens=4), scope=ACME)

    assert (len(known), known.num_tokens) == (2, 8)


def test_a_turn_stays_while_it_can_be_found_in_any_way() -> None:
    known = memory()
    known.remember(chat("a", "b"), turn("i1", session_id="s1"), scope=ACME)
    known.remember(chat("a", "b"), turn("i2", session_id="s2"), scope=ACME)

    assert len(known) == 2
    known.remember(chat("a", "b"), turn("i3", session_id="s1"), scope=ACME)
    assert len(known) == 2


@pytest.mark.parametrize("bounds", [{"max_turns": 0}, {"max_tokens": 0}])
def test_a_memory_of_nothing_works(bounds: dict[str, int]) -> None:
    known = memory(**bounds)
    known.remember(chat("a", "b"), turn(), scope=ACME)

    assert (len(known), known.num_tokens) == (0, 0)
    assert known.find(chat("a", "b", "c"), scope=ACME) is None
