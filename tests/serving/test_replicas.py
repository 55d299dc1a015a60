import asyncio

import pytest

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.serving.memory_engine import MemoryEngine
from onlinerl.serving.replicas import ReplicaPool

pytestmark = pytest.mark.asyncio


def make_pool(*versions: str) -> tuple[ReplicaPool, list[MemoryEngine]]:
    engines = [MemoryEngine(lambda _: [2], url=f"memory://{v}", version=v) for v in versions]
    return ReplicaPool(engines, policy="assistant", poll_s=0.01), engines


async def look(pool: ReplicaPool) -> None:
    for replica in pool.replicas:
        await pool.look(replica)


async def test_nothing_serves_before_the_first_look() -> None:
    pool, _ = make_pool("assistant/1")

    with pytest.raises(RequestRefused, match="not looked at yet") as caught:
        pool.pick()
    assert caught.value.status == 503


@pytest.mark.parametrize(
    "version", ["default", "assistant/0", "assistant/x", "other/1", "assistant"]
)
async def test_an_engine_without_a_version_of_the_policy_gets_nothing(version: str) -> None:
    pool, _ = make_pool(version)
    await look(pool)

    assert version in (pool.fault() or "")
    with pytest.raises(RequestRefused):
        pool.pick()


async def test_the_least_busy_is_picked_and_equals_take_turns() -> None:
    pool, _ = make_pool("assistant/1", "assistant/2", "default")
    await look(pool)
    turns = {id(pool.pick()) for _ in range(4)}
    pool.replicas[0].num_running = 1

    assert turns == {id(pool.replicas[0]), id(pool.replicas[1])}
    assert all(pool.pick() is pool.replicas[1] for _ in range(4))
    assert pool.versions() == ["assistant/1", "assistant/2"]


async def test_an_engine_leaves_and_returns_as_it_is_seen() -> None:
    pool, (engine,) = make_pool("assistant/1")
    await pool_started(pool)
    engine.failure = EngineFailed("down", 503)
    await until(lambda: pool.fault() is not None)
    fault = pool.fault()
    engine.failure = None
    engine.version = "assistant/2"
    await until(lambda: pool.fault() is None)
    await pool.close()

    assert "down" in (fault or "")
    assert pool.pick().version == "assistant/2"


async def test_a_bug_in_a_look_does_not_end_the_watch() -> None:
    pool, (engine,) = make_pool("assistant/1")
    good = engine.weight_version

    async def bad() -> str:
        raise RuntimeError("a bug")

    engine.weight_version = bad  # type: ignore[method-assign]
    await pool_started(pool)
    await asyncio.sleep(0.03)
    engine.weight_version = good  # type: ignore[method-assign]
    await until(lambda: pool.fault() is None)
    await pool.close()


async def pool_started(pool: ReplicaPool) -> None:
    pool.start()
    await asyncio.sleep(0)


async def until(condition: "object") -> None:
    assert callable(condition)
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)
