import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from onlinerl.serving.interaction.events import MemorySink, Record
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.world import KEY, LOG_KEY, OTHER_KEY, Caller, World, ask, make_world

pytestmark = pytest.mark.asyncio


@pytest.fixture
def world(renderer: TemplateRenderer) -> World:
    return make_world(renderer)


def feedback(**changes: Any) -> dict[str, Any]:
    return {
        "feedback_id": "f1",
        "interaction_id": "i1",
        "metric": "accepted",
        "value": True,
    } | changes


async def post(world: World, json_body: object, key: str = KEY) -> Caller:
    return await ask(world, json_body, key=key, path="/v1/feedback")


async def test_feedback_is_logged_before_its_answer_is_visible(world: World) -> None:
    caller = await post(world, feedback(user="ada", comment="nice", tags={"a": "b"}))

    assert (caller.status, caller.json["feedback_id"]) == (200, "f1")
    (event,) = world.feedback
    assert (event.interaction_id, event.metric, event.value) == ("i1", "accepted", 1.0)
    assert (event.tenant, event.source, event.comment) == ("acme", "user", "nice")
    assert event.user not in (None, "ada")
    assert world.sink.records[0].key == "i1"


async def test_an_id_is_made_when_none_is_given(world: World) -> None:
    one = await post(world, feedback(feedback_id=None))
    two = await post(world, feedback(feedback_id=None))

    assert one.json["feedback_id"] != two.json["feedback_id"]
    assert len(world.feedback) == 2


async def test_a_retry_is_accepted_and_logged_once(world: World) -> None:
    statuses = [(await post(world, feedback())).status for _ in range(3)]

    assert statuses == [200, 200, 200]
    assert len(world.feedback) == 1


async def test_the_same_id_with_another_value_is_a_conflict(world: World) -> None:
    await post(world, feedback())
    caller = await post(world, feedback(value=False))

    assert caller.status == 409
    assert len(world.feedback) == 1


async def test_ids_and_retractions_stay_within_a_tenant(world: World) -> None:
    await post(world, feedback())
    await post(world, feedback(value=False), key=OTHER_KEY)
    await post(world, feedback(feedback_id="f2", value=None, retracts="f1"), key=OTHER_KEY)

    one, two, three = world.feedback
    assert one.feedback_id != two.feedback_id
    assert three.retracts == two.feedback_id
    assert three.tenant == two.tenant == "globex"


async def test_a_list_is_taken_whole(world: World) -> None:
    caller = await post(world, [feedback(), feedback(feedback_id="f2"), feedback(feedback_id=None)])

    assert caller.status == 200
    ids = [item["feedback_id"] for item in caller.json["data"]]
    assert ids[:2] == ["f1", "f2"]
    assert [event.feedback_id for event in world.feedback] == [f"acme/{name}" for name in ids]


async def test_a_list_that_is_sent_again_is_logged_once(world: World) -> None:
    bodies = [feedback(), feedback(feedback_id="f2"), feedback()]
    statuses = [(await post(world, bodies)).status for _ in range(2)]
    alone = await post(world, feedback())

    assert [*statuses, alone.status] == [200, 200, 200]
    assert len(world.feedback) == 2


@pytest.mark.parametrize(
    ("bodies", "status", "param"),
    [
        ([feedback(), feedback(feedback_id="f2", metric="")], 400, "1.metric"),
        ([feedback(), feedback(value=False)], 409, "feedback_id"),
        ([feedback(), 1], 400, "1"),
        ([], 400, None),
        ([feedback(feedback_id=f"f{n}") for n in range(101)], 400, None),
    ],
    ids=["a bad one", "a clash", "no object", "empty", "too long"],
)
async def test_a_list_with_a_fault_is_refused_whole(
    world: World, bodies: list[Any], status: int, param: str | None
) -> None:
    caller = await post(world, bodies)

    assert (caller.status, caller.json["error"]["param"]) == (status, param)
    assert world.feedback == []


async def test_feedback_is_accepted_whatever_it_is_about(world: World) -> None:
    """It may be about an answer that is not logged yet, an earlier turn, a session or a choice."""
    for changes in (
        {"interaction_id": "not-seen-yet"},
        {"interaction_id": None, "session_id": "s1"},
        {"choice_index": 2},
        {"value": None, "demonstration": "Say this."},
    ):
        assert (await post(world, feedback(feedback_id=None, **changes))).status == 200

    assert [event.choice_index for event in world.feedback] == [None, None, 2, None]


async def test_the_key_may_come_in_the_header_of_anthropic(world: World) -> None:
    headers = {"x-api-key": KEY}
    caller = await ask(world, feedback(), key=None, path="/v1/feedback", headers=headers)

    assert caller.status == 200


@pytest.mark.parametrize(
    ("key", "header", "consent"),
    [(KEY, None, "train"), (KEY, "log", "log"), (LOG_KEY, "train", "log")],
)
async def test_feedback_carries_the_narrowed_consent(
    world: World, key: str, header: str | None, consent: str
) -> None:
    headers = {} if header is None else {"x-onlinerl-consent": header}
    await ask(world, feedback(), key=key, path="/v1/feedback", headers=headers)

    assert [event.consent for event in world.feedback] == [consent]


async def test_without_consent_feedback_is_not_logged(world: World) -> None:
    headers = {"x-onlinerl-consent": "none"}
    caller = await ask(world, feedback(), path="/v1/feedback", headers=headers)

    assert (caller.status, world.feedback) == (200, [])
    assert world.count("onlinerl_gateway_withheld_total") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"interaction_id": None},
        {"session_id": "s1"},
        {"value": None},
        {"value": "yes!"},
        {"metric": ""},
        {"source": "nobody"},
        {"choice_index": -1},
        {"choice_index": 0, "interaction_id": None, "session_id": "s1"},
        {"feedback_id": "a/b"},
        {"feedback_id": "x" * 65},
        {"given_at": "2026-01-01T00:00:00"},
        {"tenant": "globex"},
        {"unknown": 1},
    ],
)
async def test_bad_feedback_is_refused(world: World, changes: dict[str, Any]) -> None:
    caller = await post(world, feedback(**changes))

    assert caller.status == 400
    assert world.feedback == []


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("choice_index", 2**63),
        ("given_at", "9999-12-31T23:59:59-12:00"),
        ("given_at", "0001-01-01T00:00:00+12:00"),
    ],
)
async def test_values_beyond_the_table_columns_are_refused_by_name(
    world: World, param: str, value: object
) -> None:
    one = await post(world, feedback(**{param: value}))
    listed = await post(world, [feedback(), feedback(feedback_id="f2", **{param: value})])

    assert (one.status, one.json["error"]["param"]) == (400, param)
    assert (listed.status, listed.json["error"]["param"]) == (400, f"1.{param}")
    assert world.feedback == []


@pytest.mark.parametrize(
    "changes",
    [
        {"choice_index": 2**63 - 1},
        {"given_at": "9999-12-31T23:59:59Z"},
        {"given_at": "0001-01-01T00:00:00Z"},
    ],
)
async def test_the_largest_values_of_the_columns_are_accepted(
    world: World, changes: dict[str, Any]
) -> None:
    caller = await post(world, feedback(**changes))

    assert (caller.status, len(world.feedback)) == (200, 1)


async def test_a_longest_id_of_a_longest_tenant_fits(renderer: TemplateRenderer) -> None:
    """The schema bounds a logged id to 128 characters: tenant, slash, id."""
    from onlinerl.serving.config import ApiKeyConfig

    field = ApiKeyConfig.model_fields["tenant"]
    assert "{0,62}" in str(field.metadata)
    caller = await post(make_world(renderer), feedback(feedback_id="x" * 64))

    assert caller.status == 200


async def test_a_full_spool_is_503_and_a_retry_works(world: World) -> None:
    world.sink.full = True
    refused = await post(world, feedback())
    world.sink.full = False
    retried = await post(world, feedback())

    assert (refused.status, retried.status) == (503, 200)
    assert len(world.feedback) == 1


class SlowSink(MemorySink):
    """A sink that stores when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.store: list[Callable[[], None]] = []

    def put(self, record: Record, *, on_stored: Callable[[], None] | None = None) -> None:
        super().put(record)
        if on_stored is not None:
            self.store.append(on_stored)


async def test_feedback_is_acknowledged_when_it_is_stored_and_not_before(
    renderer: TemplateRenderer,
) -> None:
    world, sink = slow_world(renderer)
    first = Caller(world.app, json_body=feedback(), path="/v1/feedback")
    retry = Caller(world.app, json_body=feedback(), path="/v1/feedback")
    await asyncio.sleep(0.05)
    waiting = (first.status, retry.status)
    sink.store[0]()
    await first.done()
    await retry.done()

    assert waiting == (None, None)
    assert (first.status, retry.status, len(sink.records)) == (200, 200, 1)


async def test_feedback_that_is_not_stored_in_time_may_be_given_again(
    renderer: TemplateRenderer,
) -> None:
    world, sink = slow_world(renderer)
    late = await Caller(world.app, json_body=feedback(), path="/v1/feedback").done()
    again = Caller(world.app, json_body=feedback(), path="/v1/feedback")
    await asyncio.sleep(0.05)
    for on_stored in sink.store:
        on_stored()
    await again.done()

    assert (late.status, again.status) == (503, 200)


def slow_world(renderer: TemplateRenderer) -> tuple[World, SlowSink]:
    sink = SlowSink()
    return make_world(renderer, sink=sink, store_timeout_s=0.3), sink
