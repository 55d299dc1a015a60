"""Whatever callers do with their histories, the log is a forest that tells what each of them saw.

Every question, answer, argument and thought has a number of its own, so a prompt that was
decoded shows which of them it holds, and in which order.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from onlinerl.rollout_store.schema import InteractionEvent
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.over_http.test_lineage import whole_prompt
from tests.serving.world import KEY, OTHER_KEY, World, ask, body, make_world, speak

TOOLS = [
    [],
    [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    [{"type": "function", "function": {"name": "look", "description": "again"}}],
]
STOP = "END"
TAG = re.compile(r"([qacszt])([0-9]+);")

Message = dict[str, Any]


@dataclass(frozen=True)
class History:
    """A conversation as one caller holds it."""

    messages: tuple[Message, ...] = ()
    key: str = KEY
    tools: int = 0
    session: str | None = None


@dataclass(frozen=True)
class Step:
    """What a caller does, and what the model says then."""

    history: int
    act: str
    answer: str
    stream: bool


ACTS = [
    *("ask", "ask", "ask"),  # the others are the exception
    *("retry", "edit", "compact", "mute", "respell", "lie", "move", "retool", "steal"),
]
ANSWERS = {
    "plain": "a{n};\n\n",
    "thought": "<think>t{n};</think>a{n};",
    "call": '<think>t{n};</think>a{n};<tool_call>\n{{"name": "look", "arguments": '
    '{{"é": [1, 2.0], "at": "c{n};"}}}}\n</tool_call>',
    "cut": "a{n};" + STOP + "z{n};",
}

STEPS = st.lists(
    st.builds(
        Step,
        history=st.integers(min_value=0, max_value=99),
        act=st.sampled_from(ACTS),
        answer=st.sampled_from(sorted(ANSWERS)),
        stream=st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


def changed(history: History, step: Step, number: int) -> History:
    """The history that a caller sends: with a question of its own, and as it was or not."""
    messages = list(history.messages)
    if step.act == "edit" and messages:
        messages[0] = {"role": "user", "content": f"q{number}00;"}
    if step.act == "compact" and len(messages) > 2:
        messages[:2] = [{"role": "system", "content": f"s{number};"}]
        while messages[1:] and messages[1]["role"] == "tool":
            del messages[1]
    if step.act == "mute":
        messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
    if step.act == "lie":
        messages = [
            {**m, "reasoning_content": f"t{number}00;"} if "reasoning_content" in m else m
            for m in messages
        ]
    if step.act == "steal":
        history = replace(history, key=OTHER_KEY if history.key == KEY else KEY)
    if step.act == "respell":
        messages = [respelled(m) for m in messages]
    moved = {"session": f"session-{number}"} if step.act == "move" else {}
    tools = (history.tools + 1) % len(TOOLS) if step.act == "retool" else history.tools
    if step.act != "retry" or not messages:
        messages.append({"role": "user", "content": f"q{number};"})
    return replace(history, messages=tuple(messages), tools=tools, **moved)


def respelled(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": turned_round(call)}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else message


def turned_round(call: Mapping[str, Any]) -> str:
    arguments = json.loads(call["function"]["arguments"])
    return json.dumps(dict(reversed(arguments.items())), indent=1)


def answered(history: History, message: Message) -> History:
    """With the answer, and the results of the calls that it makes."""
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        for call in message.get("tool_calls") or []
    ]
    return replace(history, messages=(*history.messages, message, *results))


async def play(world: World, steps: Sequence[Step]) -> list[History]:
    """What was sent, step by step. Every history that there ever was can be gone on from."""
    await world.gateway.start()
    histories = [History(), History(key=OTHER_KEY), History(tools=1)]
    sent = []
    for number, step in enumerate(steps):
        history = changed(histories[step.history % len(histories)], step, number)
        sent.append(history)
        message = await say(world, history, stream=step.stream)
        histories.append(answered(history, message))
    await world.gateway.close()
    return sent


async def say(world: World, history: History, *, stream: bool) -> Message:
    caller = await ask(
        world,
        body(messages=history.messages, tools=TOOLS[history.tools], stop=[STOP], stream=stream),
        key=history.key,
        headers={"x-onlinerl-session-id": history.session} if history.session else None,
    )
    assert caller.status == 200, caller.received
    if not stream:
        message: Message = caller.json["choices"][0]["message"]
        return message
    return gathered([e["choices"][0]["delta"] for e in caller.events[:-1]])


def gathered(deltas: Sequence[Message]) -> Message:
    calls: list[Message] = []
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            if "id" in call:
                calls.append({**call, "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message = {
        "role": "assistant",
        "content": "".join(delta.get("content", "") for delta in deltas),
        "tool_calls": calls,
    }
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    return {**message, "reasoning_content": thought} if thought else message


def seen(history: History) -> list[str]:
    """The numbers of what a caller holds, without what was thought."""
    told = []
    for message in history.messages:
        told += TAG.findall(message.get("content") or "")
        for call in message.get("tool_calls") or []:
            told += TAG.findall(call["function"]["arguments"])
    return [kind + number for kind, number in told]


def thoughts(history: History) -> dict[str, str]:
    """What a caller brings as thought before an answer, by the answer's number."""
    brought = {}
    for message in history.messages:
        thought = TAG.findall(message.get("reasoning_content") or "")
        answer = TAG.findall(message.get("content") or "")
        if thought and answer:
            brought[answer[0][1]] = thought[0][1]
    return brought


def check_prompt(text: str, history: History) -> None:
    """A prompt holds what its caller holds, in order.

    A thought stands before the answer that it led to, and is the one that the caller brings, if
    it brings any.
    """
    told = [kind + number for kind, number in TAG.findall(text)]
    assert [tag for tag in told if tag[0] != "t"] == seen(history)
    assert STOP not in text
    brought = thoughts(history)
    for position, tag in enumerate(told):
        if tag[0] == "t":
            answer = told[position + 1]
            assert answer[0] == "a"
            assert tag[1:] == brought.get(answer[1:], answer[1:])


def check_forest(events: Sequence[InteractionEvent]) -> None:
    logged: dict[str, InteractionEvent] = {}
    for event in events:
        if event.parent_id is not None:
            parent = logged[event.parent_id]  # it comes before its children in the log
            assert (parent.tenant, parent.session_id) == (event.tenant, event.session_id)
            assert parent.renderer == event.renderer
        logged[event.interaction_id] = event
    assert len(logged) == len(events)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_any_interleaving_gives_a_forest_in_which_every_token_occurs_once(
    chatml: TemplateRenderer, steps: list[Step]
) -> None:
    said = [speak(chatml, ANSWERS[step.answer].format(n=n)) for n, step in enumerate(steps)]
    world = make_world(chatml, *said)
    sent = asyncio.run(play(world, steps))
    events = world.interactions

    assert len(events) == len(steps)
    check_forest(events)
    by_id = {event.interaction_id: event for event in events}
    for event, request, history in zip(events, world.engine.requests, sent, strict=True):
        prompt = whole_prompt(event, by_id)
        assert prompt == list(request.token_ids)
        check_prompt(chatml.decode(prompt), history)
    for event, answer, step in zip(events, said, steps, strict=True):
        sampled = event.choices[0].completion_token_ids
        assert sampled == (answer[: len(sampled)] if step.answer == "cut" else answer)
