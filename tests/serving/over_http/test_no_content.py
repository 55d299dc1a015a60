"""What callers say is in no log, metric or error of ours, whatever goes wrong."""

import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import generate_latest

from onlinerl.process.logs import ContentFreeFormatter
from onlinerl.serving.engine_client.completions_api import failure_of
from onlinerl.serving.http.protocol_route import WireRoute
from onlinerl.serving.rendering.protocol import Renderer
from tests.serving.world import KEY, Caller, World, ask, body, make_world

SECRET = "canary-7c1f"
SAID = [{"role": "user", "content": SECRET}]


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that a gateway would write at its most talkative."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(ContentFreeFormatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield text
    root.setLevel(level)
    root.removeHandler(handler)


@pytest.fixture
async def world(renderer: Renderer) -> World:
    world = make_world(renderer)
    await world.gateway.pool.look(world.gateway.pool.replicas[0])
    return world


def told(world: World, log: io.StringIO) -> str:
    return log.getvalue() + generate_latest(world.gateway.metrics.registry).decode()


async def test_answers_and_refusals_leave_no_trace_of_content(
    world: World, log: io.StringIO
) -> None:
    for changes in ({}, {"stream": True}, {SECRET: 1}, {"model": SECRET}, {"stop": SECRET}):
        await ask(world, body(messages=SAID, user=SECRET, metadata={SECRET: SECRET}, **changes))
    await ask(world, body(messages=[{"role": SECRET, "content": SECRET}]))
    await ask(world, raw=b"{" + SECRET.encode())
    await ask(world, body(), key=SECRET)
    await ask(world, body(), headers={"idempotency-key": SECRET, "x-onlinerl-consent": SECRET})
    for comment in ({"comment": SECRET}, {"demonstration": SECRET}, {"source": SECRET}):
        feedback = {"interaction_id": "i", "metric": "m", "value": 1, **comment}
        await ask(world, feedback, path="/v1/feedback")
    await Caller(world.app, json_body={}, path=f"/v1/{SECRET}").done()
    await world.ended()

    assert SECRET not in told(world, log)
    assert KEY not in told(world, log)
    assert len(world.interactions) >= 2


async def test_what_an_engine_says_about_a_prompt_is_not_logged(
    world: World, log: io.StringIO
) -> None:
    for status in (400, 500, 503):
        world.engine.failure = failure_of(status, f"cannot read {SECRET}")
        await ask(world, body(messages=SAID))
        await ask(world, body(messages=SAID, stream=True))
        await world.ended()
        world.engine.failure = None
        await world.gateway.pool.look(world.gateway.pool.replicas[0])

    assert SECRET not in told(world, log)


async def test_a_lost_event_is_told_without_its_content(world: World, log: io.StringIO) -> None:
    world.sink.full = True
    await ask(world, body(messages=SAID))
    await world.ended()

    assert "served and not logged" in log.getvalue()
    assert SECRET not in told(world, log)


async def test_a_bug_is_told_with_its_place_and_without_its_message(
    world: World, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: Any, **__: Any) -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(f"no place for {SECRET}") from error

    monkeypatch.setattr(WireRoute, "_begin", bug)
    caller = await ask(world, body(messages=SAID))

    assert caller.status == 500
    assert SECRET not in told(world, log)
    assert SECRET.encode() not in caller.received
    assert "ValueError" in log.getvalue()
    assert "in bug" in log.getvalue()
