"""Both stores of responses behave in the same way, and the file survives a crash."""

import asyncio
import sqlite3
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from onlinerl.errors import ConfigError, ServiceUnavailable
from onlinerl.serving.config import ResponsesConfig
from onlinerl.serving.protocols.responses.sqlite_store import SqliteResponseStore, forget_user
from onlinerl.serving.protocols.responses.store import (
    MemoryResponseStore,
    ResponseStore,
    StoredResponse,
)

RETAIN_S = 100.0


class Clock:
    """A manual clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def stored(response_id: str, previous_id: str | None = None, **changes: Any) -> StoredResponse:
    values = {
        "response_id": response_id,
        "previous_id": previous_id,
        "session_id": "session-1",
        "user": None,
        "created_at": 1000.0,
        "input_items": ({"type": "message", "role": "user", "content": "Grüß\u2028dich"},),
        "body": {"id": response_id, "output": []},
    }
    return StoredResponse(**{**values, **changes})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_file(tmp_path: Path, clock: Clock) -> Callable[..., SqliteResponseStore]:
    def open_store(timeout_s: float = 5.0, **config: Any) -> SqliteResponseStore:
        settings = ResponsesConfig(**{"max_rows": 3, "retain_s": RETAIN_S, **config})
        path = tmp_path / "gateway" / "responses.sqlite"
        return SqliteResponseStore(path, settings, timeout_s=timeout_s, now=clock)

    return open_store


@pytest.fixture(params=["memory", "file"])
async def store(
    request: pytest.FixtureRequest, clock: Clock, open_file: Callable[..., SqliteResponseStore]
) -> AsyncIterator[ResponseStore]:
    made: ResponseStore = (
        open_file()
        if request.param == "file"
        else MemoryResponseStore(max_rows=3, retain_s=RETAIN_S, now=clock)
    )
    yield made
    await made.close()


async def ids(store: ResponseStore, response_id: str, tenant: str = "acme") -> list[str]:
    return [row.response_id for row in await store.chain(response_id, tenant=tenant)]


async def test_a_chain_is_read_oldest_first(store: ResponseStore) -> None:
    first, second = stored("a"), stored("b", "a", user="u")
    assert await store.put(first, tenant="acme")
    assert await store.put(second, tenant="acme")

    assert await store.chain("b", tenant="acme") == [first, second]
    assert await store.get("b", tenant="acme") == second


async def test_a_tenant_reads_and_deletes_only_its_own(store: ResponseStore) -> None:
    await store.put(stored("a"), tenant="acme")
    await store.put(stored("b", "a"), tenant="globex")

    assert await store.get("a", tenant="globex") is None
    assert await ids(store, "a", "globex") == []
    assert await ids(store, "b", "globex") == []
    assert not await store.delete("a", tenant="globex")
    assert await store.forget_user("u", tenant="globex") == 0
    assert await ids(store, "a") == ["a"]


async def test_a_chain_with_a_gap_is_empty(store: ResponseStore) -> None:
    for row in (stored("a"), stored("b", "a"), stored("c", "b")):
        await store.put(row, tenant="acme")
    assert await store.delete("b", tenant="acme")

    assert await ids(store, "c") == []
    assert await ids(store, "a") == ["a"]
    assert not await store.delete("b", tenant="acme")


async def test_the_oldest_makes_room(store: ResponseStore) -> None:
    for number, name in enumerate("abcd"):
        await store.put(stored(name, created_at=1000.0 + number), tenant="acme")

    assert await ids(store, "a") == []
    assert [await ids(store, name) for name in "bcd"] == [["b"], ["c"], ["d"]]


async def test_expired_responses_are_not_read(store: ResponseStore, clock: Clock) -> None:
    await store.put(stored("a"), tenant="acme")
    await store.put(stored("b", "a", created_at=1050.0), tenant="acme")
    clock.now = 1000.0 + RETAIN_S

    assert await store.get("a", tenant="acme") is None
    assert await store.get("b", tenant="acme") is not None
    assert await ids(store, "b") == []


async def test_a_user_is_forgotten(store: ResponseStore) -> None:
    for row in (stored("a", user="u"), stored("b", "a", user="u"), stored("c", user="v")):
        await store.put(row, tenant="acme")

    assert await store.forget_user("u", tenant="acme") == 2
    assert await ids(store, "b") == []
    assert await ids(store, "c") == ["c"]


async def test_the_file_survives_a_restart(open_file: Callable[..., SqliteResponseStore]) -> None:
    before = open_file()
    await before.put(stored("a"), tenant="acme")
    await before.put(stored("b", "a"), tenant="acme")
    await before.close()
    after = open_file()

    assert await after.chain("b", tenant="acme") == [stored("a"), stored("b", "a")]
    await after.close()


async def test_the_file_survives_a_crash(
    open_file: Callable[..., SqliteResponseStore], tmp_path: Path
) -> None:
    crashed = open_file()
    await crashed.put(stored("a"), tenant="acme")
    after = open_file()  # while the first still has it open: nothing was flushed by a close

    assert await ids(after, "a") == ["a"]
    await after.close()
    await crashed.close()


@pytest.mark.parametrize("after", ["a write", "a start"])
async def test_expired_responses_are_deleted_from_the_file(
    open_file: Callable[..., SqliteResponseStore], tmp_path: Path, clock: Clock, after: str
) -> None:
    store = open_file()
    await store.put(stored("a"), tenant="acme")
    clock.now = 1000.0 + RETAIN_S
    if after == "a write":
        await store.put(stored("b", created_at=clock.now), tenant="globex")
    await store.close()
    if after == "a start":
        await open_file().close()

    rows = read(tmp_path, "SELECT response_id FROM responses")
    assert rows == ([("b",)] if after == "a write" else [])


async def test_the_file_keeps_to_its_bytes(open_file: Callable[..., SqliteResponseStore]) -> None:
    store = open_file(max_rows=100, max_bytes=1000)
    text = "x" * 300
    for number, name in enumerate("abcde"):
        body = {"id": name, "output": [text]}
        assert await store.put(stored(name, body=body, created_at=1000.0 + number), tenant="acme")

    assert await ids(store, "b") == []
    assert await ids(store, "e") == ["e"]
    await store.close()


async def test_a_response_larger_than_the_store_is_not_kept(
    open_file: Callable[..., SqliteResponseStore],
) -> None:
    store = open_file(max_bytes=1000)
    await store.put(stored("a"), tenant="acme")

    assert not await store.put(stored("b", body={"text": "x" * 1000}), tenant="acme")
    assert await ids(store, "a") == ["a"]
    await store.close()


async def test_an_answer_stored_twice_counts_once(
    open_file: Callable[..., SqliteResponseStore], tmp_path: Path
) -> None:
    store = open_file()
    for _ in range(2):
        await store.put(stored("a"), tenant="acme")
    await store.close()

    totals = read(tmp_path, "SELECT num_rows, num_bytes FROM totals")
    assert totals == read(tmp_path, "SELECT count(*), sum(num_bytes) FROM responses")


async def test_the_file_is_for_its_owner_only(
    open_file: Callable[..., SqliteResponseStore], tmp_path: Path
) -> None:
    store = open_file()
    await store.put(stored("a"), tenant="acme")

    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "gateway").iterdir()}
    assert modes == {0o600}
    await store.close()


async def test_another_process_forgets_a_user_while_the_gateway_runs(
    open_file: Callable[..., SqliteResponseStore], tmp_path: Path
) -> None:
    store = open_file()
    secret = {"id": "a", "output": ["a very private matter" * 1000]}
    path = tmp_path / "gateway" / "responses.sqlite"
    await store.put(stored("a", user="u", body=secret), tenant="acme")
    await store.put(stored("b", user="v"), tenant="acme")
    assert b"private matter" in all_bytes(path)
    number = await asyncio.to_thread(forget_user, path, tenant="acme", user="u")

    assert number == 1
    assert await ids(store, "a") == []
    assert await ids(store, "b") == ["b"]
    assert b"private matter" not in all_bytes(path)
    await store.close()


async def test_deleted_responses_are_overwritten_in_the_file(
    open_file: Callable[..., SqliteResponseStore], tmp_path: Path
) -> None:
    path = tmp_path / "gateway" / "responses.sqlite"
    secret = {"id": "a", "output": ["a very private matter" * 1000]}
    store = open_file()
    await store.put(stored("a", body=secret), tenant="acme")
    await store.close()
    assert b"private matter" in all_bytes(path)
    store = open_file()
    await store.delete("a", tenant="acme")
    await store.close()

    assert b"private matter" not in all_bytes(path)


def test_forgetting_in_a_file_that_is_not_there_makes_none(tmp_path: Path) -> None:
    path = tmp_path / "nothing.sqlite"

    assert forget_user(path, tenant="acme", user="u") == 0
    assert not path.exists()


async def test_a_file_that_is_no_database_is_a_configuration_error(
    open_file: Callable[..., SqliteResponseStore], tmp_path: Path
) -> None:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "responses.sqlite").write_text("no database, but long enough" * 50)

    with pytest.raises(ConfigError, match=r"\[gateway.responses\].path"):
        open_file()


async def test_a_store_that_is_locked_gives_up_in_time(
    open_file: Callable[..., SqliteResponseStore], tmp_path: Path
) -> None:
    store, patient = open_file(timeout_s=0.05), open_file()
    path = tmp_path / "gateway" / "responses.sqlite"
    other = sqlite3.connect(path)
    other.execute("BEGIN IMMEDIATE")

    with pytest.raises(ServiceUnavailable):
        await store.put(stored("a"), tenant="acme")
    assert await ids(patient, "a") == []  # reading goes on
    other.rollback()
    other.close()
    await store.close()
    await patient.close()


async def test_calls_beyond_the_bound_fail_at_once(
    open_file: Callable[..., SqliteResponseStore], tmp_path: Path
) -> None:
    store = open_file(timeout_s=30.0, max_waiting=1)
    other = sqlite3.connect(tmp_path / "gateway" / "responses.sqlite")
    other.execute("BEGIN IMMEDIATE")
    waiting = asyncio.create_task(store.put(stored("a"), tenant="acme"))
    await asyncio.sleep(0)

    with pytest.raises(ServiceUnavailable, match="1 calls wait"):
        await store.put(stored("b"), tenant="acme")
    other.rollback()
    other.close()
    assert await waiting
    await store.close()


def all_bytes(path: Path) -> bytes:
    """All bytes on the disk, the write-ahead log included."""
    return b"".join(file.read_bytes() for file in path.parent.iterdir())


def read(tmp_path: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(tmp_path / "gateway" / "responses.sqlite")
    rows = connection.execute(query).fetchall()
    connection.close()
    return rows
