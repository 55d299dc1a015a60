import asyncio
import contextlib
from typing import Any

import pytest

from onlinerl.errors import (
    EngineDisconnected,
    EngineFailed,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)
from onlinerl.rollout_store.schema import VersionSpan
from onlinerl.rollout_store.version_spans import spans_tile
from onlinerl.serving.routing.arms import Arms, Target
from onlinerl.serving.routing.failover import cache_salt
from tests.serving.routes import TOKENS, ask, make_fleet, sampled, spans_of, tokens_of

pytestmark = pytest.mark.asyncio

GONE = EngineUnreachable("connection refused")


async def test_an_answer_comes_through_as_the_engine_gives_it() -> None:
    fleet = await make_fleet("assistant/1")
    route = fleet.route()
    chunks = await sampled(route)

    assert tokens_of(chunks) == TOKENS
    assert [chunk.finish_reason for chunk in chunks] == [None] * 5 + ["stop"]
    assert spans_of(chunks[-1]) == [("assistant/1", 0, 6)]
    assert route.has_begun.is_set()


async def test_an_engine_that_is_gone_before_the_first_token_is_replaced() -> None:
    fleet = await make_fleet("assistant/1", "assistant/2")
    route = fleet.route()
    first = route.url
    dead = next(engine for engine in fleet.engines if engine.url == first)
    dead.failure = GONE
    chunks = await sampled(route)

    other = next(engine for engine in fleet.engines if engine.url != first)
    assert tokens_of(chunks) == TOKENS
    assert (route.url, route.version) == (other.url, other.version)
    # Keys and values are shared with the version that really answered, and with no other.
    assert other.requests[0].cache_salt == cache_salt("acme", other.version)
    assert spans_of(chunks[-1]) == [(other.version, 0, 6)]
    assert fleet.count("failovers_total", engine=first) == 1
    assert [replica.url for replica in fleet.router.pool.serving()] == [other.url]


async def test_a_session_goes_on_where_it_was_answered_when_its_replica_is_back() -> None:
    fleet = await make_fleet("assistant/1", "assistant/1")
    route = fleet.route("s")
    first = route.url
    dead = next(engine for engine in fleet.engines if engine.url == first)
    dead.failure = GONE
    await sampled(route)
    dead.failure = None
    for _ in range(5):
        await fleet.look()

    assert len(fleet.router.pool.serving()) == 2
    assert fleet.picks("s") == route.url != first


async def test_a_replica_of_the_same_version_is_asked_before_any_other() -> None:
    fleet = await make_fleet("assistant/1", "assistant/2", "assistant/1")
    fleet.engines[1].version = "assistant/2"
    for session in range(30):
        route = fleet.route(f"s{session}")
        tried = {route.replica}
        other = fleet.router.choose_alternative(route, tried=tried)
        assert other is not None
        if route.version == "assistant/1":
            assert other.version == "assistant/1"
        else:
            assert other.version == "assistant/1"


async def test_every_replica_is_tried_once_and_the_last_failure_is_told() -> None:
    fleet = await make_fleet("assistant/1", "assistant/1", "assistant/1")
    for engine in fleet.engines:
        engine.failure = GONE

    with pytest.raises(EngineUnreachable):
        await sampled(fleet.route())
    assert [len(engine.requests) for engine in fleet.engines] == [1, 1, 1]


async def test_a_request_over_which_replicas_break_meets_two_of_them_at_most() -> None:
    fleet = await make_fleet("assistant/1", "assistant/1", "assistant/1")
    for engine in fleet.engines:
        engine.failure = EngineDisconnected("the connection to the engine broke")

    with pytest.raises(EngineDisconnected):
        await sampled(fleet.route())
    assert sum(len(engine.requests) for engine in fleet.engines) == 2


async def test_after_the_first_token_nothing_is_tried_again() -> None:
    fleet = await make_fleet("assistant/1", "assistant/1")
    route = fleet.route()
    received: list[int] = []

    async def receive() -> None:
        async for chunk in route.generate(ask()):
            received.extend(chunk.token_ids)
            for engine in fleet.engines:
                engine.failure = EngineDisconnected("the connection broke")

    with pytest.raises(EngineDisconnected, match="broke"):
        await receive()
    assert received == TOKENS[:1]
    assert sum(len(engine.requests) for engine in fleet.engines) == 1


@pytest.mark.parametrize(
    "failure",
    [
        EngineRefused("too long", 400),
        EngineRefused("too many", 429),
        EngineRefused("a bug", 500),
        EngineProtocolError("no chunk"),
        EngineTimeout("too slow"),
    ],
)
async def test_a_failure_that_another_engine_may_repeat_is_not_tried_there(
    failure: EngineFailed,
) -> None:
    fleet = await make_fleet("assistant/1", "assistant/1")
    for engine in fleet.engines:
        engine.failure = failure

    with pytest.raises(EngineFailed) as caught:
        await sampled(fleet.route())
    assert caught.value is failure
    assert sum(len(engine.requests) for engine in fleet.engines) == 1


async def test_requests_of_one_answer_that_fail_together_move_to_one_replica() -> None:
    fleet = await make_fleet("assistant/1", "assistant/1", "assistant/1")
    route = fleet.route()
    next(engine for engine in fleet.engines if engine.url == route.url).failure = GONE
    answers = await asyncio.gather(*(sampled(route, ask(f"r{n}")) for n in range(4)))

    assert all(tokens_of(chunks) == TOKENS for chunks in answers)
    assert sorted(len(engine.requests) for engine in fleet.engines) == [0, 4, 4]


async def test_completions_that_lose_one_replica_together_move_to_another() -> None:
    fleet = await make_fleet("assistant/1", "assistant/1", "assistant/1")
    route = fleet.route()
    lost = next(engine for engine in fleet.engines if engine.url == route.url)
    lost.failure = EngineDisconnected("the connection broke")
    answers = await asyncio.gather(*(sampled(route, ask(f"r{n}")) for n in range(4)))

    assert all(tokens_of(chunks) == TOKENS for chunks in answers)
    assert sorted(len(engine.requests) for engine in fleet.engines) == [0, 4, 4]


async def test_a_running_completion_counts_as_load_until_it_ends_however_it_ends() -> None:
    fleet = await make_fleet("assistant/1")
    (replica,) = fleet.router.pool.replicas
    async with contextlib.aclosing(fleet.route().generate(ask())) as chunks:
        await anext(chunks)
        while_running = replica.num_running
    broken_off = replica.num_running
    fleet.engines[0].failure = EngineRefused("a bug", 500)
    with pytest.raises(EngineFailed):
        await sampled(fleet.route())

    assert (while_running, broken_off, replica.num_running) == (1, 0, 0)
    assert fleet.count("replica_running", engine="memory://0") == 0


async def test_the_version_that_an_answer_ends_with_is_taken_at_once() -> None:
    fleet = await make_fleet("assistant/1")
    fleet.engines[0].version = "assistant/2"
    await sampled(fleet.route())

    assert fleet.router.pool.versions() == ["assistant/2"]


async def test_a_route_says_what_sampled_its_first_token_once_the_engine_told() -> None:
    fleet = await make_fleet("assistant/1")
    engine = fleet.engines[0]
    engine.version = "assistant/2"
    route = fleet.route()
    before = route.version
    chunks = []
    async for chunk in route.generate(ask()):
        chunks.append(chunk)
        if len(chunks) == 2:
            engine.version = "assistant/3"

    assert spans_of(chunks[-1]) == [("assistant/2", 0, 2), ("assistant/3", 2, 6)]
    assert (before, route.version) == ("assistant/1", "assistant/2")


async def test_the_salt_is_of_tenant_and_version_and_differs_between_any_two() -> None:
    salts = {
        cache_salt(tenant, version)
        for tenant in ("acme", "globex", "acme:assistant")
        for version in ("assistant/1", "assistant/2", "1")
    }
    fleet = await make_fleet("assistant/1")
    await sampled(fleet.route(tenant="acme"))
    await sampled(fleet.route(tenant="globex"))

    assert len(salts) == 9
    assert [request.cache_salt for request in fleet.engines[0].requests] == [
        cache_salt("acme", "assistant/1"),
        cache_salt("globex", "assistant/1"),
    ]


async def test_an_abort_by_an_update_before_the_first_token_is_asked_again() -> None:
    fleet = await make_fleet("assistant/1")
    fleet.engines[0].stops_itself_at = 0
    chunks = await sampled(fleet.route())

    assert tokens_of(chunks) == TOKENS
    assert chunks[-1].finish_reason == "stop"
    assert spans_of(chunks[-1]) == [("assistant/1", 0, 6)]
    assert [list(request.token_ids) for request in fleet.engines[0].requests] == [[1], [1]]


async def test_an_abort_by_an_update_is_gone_on_with_where_it_stopped() -> None:
    fleet = await make_fleet("assistant/1")
    (engine,) = fleet.engines
    engine.stops_itself_at = 2
    route = fleet.route()
    chunks = []
    async for chunk in route.generate(ask(seed=7)):
        chunks.append(chunk)
        if len(chunks) == 2:
            engine.version = "assistant/2"

    first, rest = engine.requests
    assert tokens_of(chunks) == TOKENS
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert spans_of(chunks[-1]) == [("assistant/1", 0, 2), ("assistant/2", 2, 6)]
    assert (list(rest.token_ids), rest.sampling["max_tokens"]) == ([1, *TOKENS[:2]], 4)
    assert rest.request_id != first.request_id
    assert rest.sampling["seed"] != first.sampling["seed"]
    assert fleet.count("continued_total") == 1


async def test_the_logprobs_of_a_continued_answer_are_one_per_token() -> None:
    fleet = await make_fleet("assistant/1")
    fleet.engines[0].stops_itself_at = 3
    chunks = await sampled(fleet.route())

    assert sum(len(chunk.logprobs) for chunk in chunks) == len(TOKENS)
    assert spans_tile(chunks[-1].version_spans or [], num_tokens=len(TOKENS))


@pytest.mark.parametrize(
    "sampling",
    [
        {"structured_outputs": {"json_object": True}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"something_new": 1},
    ],
)
async def test_what_depends_on_the_tokens_before_is_reported_as_aborted(
    sampling: dict[str, Any],
) -> None:
    fleet = await make_fleet("assistant/1")
    fleet.engines[0].stops_itself_at = 2
    chunks = await sampled(fleet.route(), ask(**sampling))

    assert tokens_of(chunks) == TOKENS[:2]
    assert chunks[-1].finish_reason == "abort"
    assert len(fleet.engines[0].requests) == 1


async def test_an_engine_that_aborts_for_ever_is_given_up() -> None:
    fleet = await make_fleet("assistant/1", max_continuations=3)
    (engine,) = fleet.engines
    engine._stops_itself = lambda num_served: True  # type: ignore[method-assign]
    chunks = await sampled(fleet.route())

    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, "abort"]
    assert len(engine.requests) == 4


async def test_what_this_gateway_aborted_is_not_gone_on_with() -> None:
    fleet = await make_fleet("assistant/1")
    (engine,) = fleet.engines
    engine.hold_at = 2
    route = fleet.route()
    asking = asyncio.create_task(sampled(route))
    async with asyncio.timeout(60):
        while not route.has_begun.is_set():
            await asyncio.sleep(0.001)
    await route.abort("r")
    chunks = await asking

    assert chunks[-1].finish_reason == "abort"
    assert tokens_of(chunks) == TOKENS[:2]
    assert len(engine.requests) == 1


async def test_an_abort_before_the_engine_was_asked_asks_it_nothing() -> None:
    fleet = await make_fleet("assistant/1")
    route = fleet.route()
    await route.abort("r")
    chunks = await sampled(route)

    assert [chunk.finish_reason for chunk in chunks] == ["abort"]
    assert fleet.engines[0].requests == []


async def test_a_continued_answer_is_aborted_under_the_id_that_the_engine_knows() -> None:
    fleet = await make_fleet("assistant/1")
    (engine,) = fleet.engines
    engine.stops_itself_at = 2
    route = fleet.route()
    async for chunk in route.generate(ask()):
        if len(engine.requests) == 2 and chunk.finish_reason is None:
            await route.abort("r")

    assert engine.aborted == [engine.requests[1].request_id]


async def test_missing_spans_of_one_part_are_missing_of_the_whole() -> None:
    fleet = await make_fleet("assistant/1")
    (engine,) = fleet.engines
    engine.stops_itself_at = 2
    good = engine._chunk

    def without_spans(*args: object, **kwargs: object) -> object:
        chunk = good(*args, **kwargs)  # type: ignore[arg-type]
        if chunk.finish_reason == "abort":
            object.__setattr__(chunk, "version_spans", None)
        return chunk

    engine._chunk = without_spans  # type: ignore[method-assign, assignment]
    chunks = await sampled(fleet.route())

    assert tokens_of(chunks) == TOKENS
    assert chunks[-1].version_spans is None


def adapter_arms() -> Arms:
    return Arms(canary=Target(arm="canary", version=13, share=1.0, adapter="assistant@13"))


async def test_an_adapter_is_asked_by_name_and_its_name_is_the_version() -> None:
    fleet = await make_fleet("assistant/1")
    (engine,) = fleet.engines
    engine.loaded = frozenset({"assistant@13"})
    fleet.router.set_arms(adapter_arms())
    await fleet.look()
    route = fleet.route()
    chunks = await sampled(route)

    (request,) = engine.requests
    assert request.adapter == "assistant@13"
    assert request.cache_salt == cache_salt("acme", "assistant/13")
    assert spans_of(chunks[-1]) == [("assistant/13", 0, 6)]
    assert fleet.router.pool.versions() == ["assistant/1"]


async def test_an_adapter_whose_base_changed_below_it_has_no_version() -> None:
    fleet = await make_fleet("assistant/1")
    (engine,) = fleet.engines
    engine.loaded = frozenset({"assistant@13"})
    engine.spans = [
        VersionSpan(version="assistant/1", start=0, end=3),
        VersionSpan(version="assistant/2", start=3, end=6),
    ]
    fleet.router.set_arms(adapter_arms())
    await fleet.look()
    chunks = await sampled(fleet.route())

    assert chunks[-1].version_spans is None
