import asyncio
from collections.abc import Callable

import pytest

from onlinerl.errors import (
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    EngineUnreachable,
    RequestRefused,
)
from tests.serving.routes import make_fleet, sampled

pytestmark = pytest.mark.asyncio

SLOW = EngineTimeout("not answered in time")
GONE = EngineUnreachable("connection refused")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_nothing_serves_before_the_first_look() -> None:
    fleet = await make_fleet("assistant/1")
    fleet.router.pool.replicas[0].reported_version = None
    fleet.router.pool.replicas[0].reason = "not looked at yet"

    with pytest.raises(RequestRefused, match="not looked at yet") as caught:
        fleet.route()
    assert caught.value.status == 503


@pytest.mark.parametrize(
    "version", ["default", "assistant/0", "assistant/x", "other/1", "assistant"]
)
async def test_an_engine_without_a_version_of_the_policy_gets_nothing(version: str) -> None:
    fleet = await make_fleet(version)

    assert version in (fleet.router.pool.fault() or "")
    with pytest.raises(RequestRefused):
        fleet.route()


async def test_one_late_health_check_ejects_nobody_and_three_in_a_row_do() -> None:
    fleet = await make_fleet("assistant/1")
    (engine,) = fleet.engines
    engine.failure = SLOW
    faults = []
    for _ in range(3):
        await fleet.look()
        faults.append(fleet.router.pool.fault())

    assert faults[:2] == [None, None]
    assert "in time" in (faults[2] or "")
    assert fleet.count("replica_ejections_total", engine=engine.url) == 1
    assert fleet.count("replica_failures_total", engine=engine.url, kind="look") == 3


async def test_a_replica_that_serves_is_not_ejected_by_late_health_checks() -> None:
    fleet = await make_fleet("assistant/1")
    (engine,) = fleet.engines
    for _ in range(5):
        engine.failure = SLOW
        await fleet.look()
        await fleet.look()
        engine.failure = None
        await sampled(fleet.route())

    assert fleet.router.pool.fault() is None


@pytest.mark.parametrize("failure", [GONE, EngineUnavailable("the engine is dead")])
async def test_a_refused_connection_or_an_unhealthy_answer_ejects_at_once(
    failure: EngineFailed,
) -> None:
    fleet = await make_fleet("assistant/1", "assistant/1")
    fleet.engines[0].failure = failure
    await fleet.look()

    assert {fleet.picks(f"s{n}") for n in range(20)} == {"memory://1"}


async def test_an_ejected_replica_returns_after_two_good_looks() -> None:
    fleet = await make_fleet("assistant/1", "assistant/1")
    fleet.engines[0].failure = GONE
    await fleet.look()
    fleet.engines[0].failure = None
    await fleet.look()
    after_one = len(fleet.router.pool.serving())
    await fleet.look()

    assert after_one == 1
    assert len(fleet.router.pool.serving()) == 2


async def test_the_only_replica_returns_after_one_good_look() -> None:
    fleet = await make_fleet("assistant/1")
    fleet.engines[0].failure = GONE
    await fleet.look()
    fleet.engines[0].failure = None
    await fleet.look()

    assert fleet.router.pool.fault() is None


async def test_a_version_is_taken_at_once_and_an_alien_one_leaves_at_once() -> None:
    fleet = await make_fleet("assistant/1", "assistant/1")
    fleet.engines[0].version = "assistant/2"
    fleet.engines[1].version = "default"
    await fleet.look()

    assert fleet.router.pool.versions() == ["assistant/2"]
    fleet.engines[1].version = "assistant/2"
    await fleet.look()
    assert len(fleet.router.pool.serving()) == 2


async def test_an_engine_leaves_and_returns_while_it_is_watched() -> None:
    fleet = await make_fleet("assistant/1")
    pool, (engine,) = fleet.router.pool, fleet.engines
    pool.start()
    engine.failure = GONE
    await until(lambda: pool.fault() is not None)
    fault = pool.fault()
    engine.failure = None
    engine.version = "assistant/2"
    await until(lambda: pool.fault() is None)
    await pool.close()

    assert "connection refused" in (fault or "")
    assert fleet.route().version == "assistant/2"


async def test_a_bug_in_a_look_is_counted_and_does_not_end_the_watch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = await make_fleet("assistant/1")
    pool, (engine,) = fleet.router.pool, fleet.engines
    good = engine.weight_version
    seen: list[int] = []

    async def bad() -> str:
        seen.append(1)
        raise RuntimeError("a bug")

    engine.weight_version = bad  # type: ignore[method-assign]
    pool.start()
    await until(lambda: len(seen) > 1)
    engine.weight_version = good  # type: ignore[method-assign]
    engine.version = "assistant/2"
    await until(lambda: pool.versions() == ["assistant/2"])
    await pool.close()

    assert fleet.count("routing_faults_total", loop="replicas") == len(seen)
    assert caplog.text.count("checking a replica failed") == 1


async def test_readiness_and_metrics_tell_of_every_replica() -> None:
    fleet = await make_fleet("assistant/1", "default")
    one, two = fleet.router.pool.report()

    assert one == {
        "engine": "memory://0",
        "ready": True,
        "version": "assistant/1",
        "running": 0,
        "reason": None,
    }
    assert (two["ready"], two["version"]) == (False, None)
    assert "'default'" in str(two["reason"])
    assert fleet.count("replica_ready", engine="memory://0") == 1
    assert fleet.count("replica_ready", engine="memory://1") == 0
