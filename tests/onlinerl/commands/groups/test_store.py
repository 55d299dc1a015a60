"""The commands on the tables, run through the command line."""

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from onlinerl.cli import main
from onlinerl.commands import erase, lineage
from onlinerl.deploy.registry.trained_rows import MemoryRows
from onlinerl.errors import LeaseHeld, ServiceUnavailable
from onlinerl.rollout_store.erasure import erase as erasure
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.rollout_store.upkeep.process import LEASE
from onlinerl.serving.config import ResponsesConfig
from onlinerl.serving.interaction.events import Record
from onlinerl.serving.protocols.responses.sqlite_store import SqliteResponseStore, forget_user
from onlinerl.serving.protocols.responses.store import StoredResponse
from onlinerl.serving.spool.segment_files import pack, segment_path
from tests.rollout_store.people import People, hash_of, some_id

Run = Callable[..., str]


@pytest.fixture
def people(tmp_path: Path) -> People:
    people = People(tmp_path)
    for number in range(8):
        people.says(f"ada-{number}", user="ada", session="s-ada")
    people.says("bob-1", user="bob", session="s-bob")
    people.says("globex-1", user="ada", session="s", tenant="globex")
    return people


@pytest.fixture
def trained(people: People, monkeypatch: pytest.MonkeyPatch) -> MemoryRows:
    """Version 2 learned from Ada and Bob, 3 from Bob and from version 2, 4 from version 1."""
    rows = MemoryRows(
        tables={1: None, 2: table("ada-1", "bob-1"), 3: table("bob-1"), 4: table("x")},
        parents={2: 1, 3: 2, 4: 1},
    )
    monkeypatch.setattr(lineage, "open_trained_rows", lambda settings: rows)
    return rows


def table(*names: str) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "tenant": "acme",
                "interaction_id": some_id(name),
                "choice_index": 0,
                "session_id": "s",
            }
            for name in names
        ]
    )


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command on the tables of `people`; returns its output, or its errors if it fails."""
    monkeypatch.setenv("ONLINERL_USER_HASH_KEY", "pepper")
    config = tmp_path / "onlinerl.toml"
    config.write_text(
        'data_dir = "."\n[policy]\nbase_model = "m"\n[maintenance]\nmin_small_files = 2\n'
        '[[gateway.api_keys]]\nname = "k"\ntenant = "globex"\nsha256 = "' + "0" * 64 + '"\n'
    )

    def run(*arguments: str, code: int = 0) -> str:
        assert main([*arguments, "--config", str(config)]) == code
        printed = capsys.readouterr()
        return printed.out if code == 0 else printed.err

    return run


def test_a_snapshot_is_created_listed_read_and_dropped(people: People, run: Run) -> None:
    assert run("snapshot", "create", "june", "--reason", "the gate") == "snapshot june: held\n"
    people.says("late", user="bob", session="s-bob")
    count = ("query", "SELECT count(*) AS n FROM interactions", "--format", "json")

    assert json.loads(run(*count, "--snapshot", "june")) == [{"n": 10}]
    assert json.loads(run(*count)) == [{"n": 11}]
    assert "the gate" in run("snapshot", "list")
    assert run("snapshot", "drop", "june") == "snapshot june: dropped\n"
    assert "was given up" in run(*count, "--snapshot", "june", code=1)
    assert "name the snapshot" in run("snapshot", "drop", code=1)


def test_the_reason_of_a_snapshot_is_printed_verbatim(people: People, run: Run) -> None:
    run("snapshot", "create", "june", "--reason", "ticket:key:12 [red]")

    assert "ticket:key:12 [red]" in run("snapshot", "list")


def test_maintain_once_makes_one_pass(people: People, run: Run) -> None:
    run("maintain", "--once")

    assert len(people.store.delta("interactions").file_uris()) == 1
    with Lease(people.store, name=LEASE, ttl_s=600):
        assert "is held" in run("maintain", "--once", code=1)


def test_a_person_is_erased_in_every_tenant(
    people: People, run: Run, trained: MemoryRows, tmp_path: Path
) -> None:
    plan = json.loads(run("erase", "--user", "ada", "--dry-run", "--format", "json"))
    assert plan["would_erase"] == [
        {"tenant": "acme", "sessions": 1, "interactions": 8},
        {"tenant": "globex", "sessions": 1, "interactions": 1},
    ]
    assert people.column("audit", "action") == []

    report = json.loads(run("erase", "--user", "ada", "--actor", "dpo", "--format", "json"))

    assert report["rows_deleted"] == {"interactions": 9}
    assert report["traces_left"] == 0
    assert report["versions_trained"] == {"2": 1}
    assert people.column("interactions", "interaction_id") == [some_id("bob-1")]
    assert people.column("audit", "actor") == ["dpo"]
    assert trained.marks == {2: 1}
    assert not list((tmp_path / "erasures").iterdir())


def test_a_person_is_erased_in_one_tenant_only(
    people: People, run: Run, trained: MemoryRows
) -> None:
    shown = run("erase", "--user", "ada", "--tenant", "globex")

    assert "traces_left" in shown
    assert len(people.column("interactions", "interaction_id")) == 9


def test_an_erasure_works_without_the_registry(
    people: People, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(settings: object) -> MemoryRows:
        raise ServiceUnavailable("the registry is away")

    monkeypatch.setattr(lineage, "open_trained_rows", away)
    report = json.loads(run("erase", "--user", "ada", "--format", "json"))

    assert report["versions_trained"] is None
    assert report["traces_left"] == 0


def test_an_erasure_needs_the_hash_key(
    people: People, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONLINERL_USER_HASH_KEY")

    assert "ONLINERL_USER_HASH_KEY is not set" in run("erase", "--user", "ada", code=1)


def test_an_erasure_fails_when_upkeep_does_not_end(
    people: People, run: Run, trained: MemoryRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erase, "LEASE_POLL_S", 0.0)
    monkeypatch.setattr(erase, "LEASE_WAIT_S", 0.0)
    with Lease(people.store, name=LEASE, ttl_s=600):
        assert "is held" in run("erase", "--user", "ada", code=1)
    assert len(people.column("interactions", "interaction_id")) == 10


def test_an_erasure_that_loses_its_lease_takes_it_again_and_completes(
    people: People, run: Run, trained: MemoryRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([LeaseHeld("it was taken by somebody else")])

    def renew(lease: Lease) -> None:
        for loss in losses:
            raise loss

    monkeypatch.setattr(Lease, "renew", renew)

    report = json.loads(run("erase", "--user", "ada", "--format", "json"))

    assert report["rows_deleted"] == {"interactions": 9}
    assert people.column("interactions", "interaction_id") == [some_id("bob-1")]


def test_an_erasure_continues_after_a_crash_when_a_tenant_has_no_rows_left(
    people: People, run: Run, trained: MemoryRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state file is named by the arguments, not by the tenants that still have rows."""

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(erasure, "_report", die)
        run("erase", "--user", "ada", code=130)
    assert len(list((tmp_path / "erasures").iterdir())) == 1

    report = json.loads(run("erase", "--user", "ada", "--format", "json"))

    assert report["tenants"] == ["acme", "globex"]
    assert report["rows_deleted"] == {"interactions": 9}
    assert not list((tmp_path / "erasures").iterdir())


def test_an_erasure_covers_tenants_of_keys_that_were_added_later(
    people: People, run: Run, trained: MemoryRows
) -> None:
    run("keys", "add", "new", "--tenant", "initech")

    report = json.loads(run("erase", "--user", "ada", "--format", "json"))

    assert report["tenants"] == ["acme", "globex", "initech"]


def test_an_erasure_covers_the_spool_and_the_stored_responses(
    people: People, run: Run, trained: MemoryRows, tmp_path: Path
) -> None:
    spool, responses = tmp_path / "spool", tmp_path / "responses.sqlite"
    spool.mkdir()
    mate = {"user": None, "tenant": "acme", "session_id": "s-ada"}
    events = [{"user": hash_of("ada"), "n": 1}, {"user": hash_of("bob"), "n": 2}, mate]
    records = [Record(topic="t", key="k", value=json.dumps(each).encode()) for each in events]
    segment_path(spool, 1).write_bytes(b"".join(map(pack, records)))
    asyncio.run(_store_responses(responses))

    report = json.loads(run("erase", "--user", "ada", "--format", "json"))

    assert report["copies_forgotten"] == {"spool": 2, "responses": 2}
    assert hash_of("ada").encode() not in segment_path(spool, 1).read_bytes()
    assert hash_of("bob").encode() in segment_path(spool, 1).read_bytes()
    assert b"s-ada" not in segment_path(spool, 1).read_bytes()
    assert b"hello Ada" not in responses.read_bytes()


async def _store_responses(path: Path) -> None:
    """For Ada, for another user in her session, and in a session of the same name elsewhere."""
    store = SqliteResponseStore(path, ResponsesConfig(), timeout_s=30.0)
    owners = [
        ("acme", hash_of("ada"), "s-other"),
        ("acme", None, "s-ada"),
        ("globex", None, "s-ada"),
    ]
    for number, (tenant, user, session) in enumerate(owners):
        answer = StoredResponse(
            response_id=f"resp_{number}",
            previous_id=None,
            session_id=session,
            user=user,
            created_at=datetime.now(UTC).timestamp(),
            input_items=(),
            body={"output": "hello Ada" if tenant == "acme" else "hello"},
        )
        await store.put(answer, tenant=tenant)
    await store.close()


def test_an_erasure_fails_while_a_reader_keeps_deleted_responses_in_the_log(tmp_path: Path) -> None:
    """The rows are deleted, but their bytes stay in the write-ahead log until the reader ends."""
    path = tmp_path / "responses.sqlite"
    asyncio.run(_store_responses(path))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM responses").fetchone()
        with pytest.raises(ServiceUnavailable, match="may hold deleted responses"):
            forget_user(path, tenant="acme", user=hash_of("ada"), timeout_s=0.1)
        reader.execute("COMMIT")

    forget_user(path, tenant="acme", user=hash_of("ada"))
    assert forget_user(path, tenant="acme", user="x", sessions=["s-ada"]) == 1
    assert b"hello Ada" not in path.read_bytes()


def test_lineage_of_a_version_lists_its_rows(people: People, run: Run, trained: MemoryRows) -> None:
    found = json.loads(run("lineage", "--version", "2", "--format", "json"))

    assert found["rows"] == 2
    assert found["rows_erased_since"] == 0
    assert {line["interaction_id"] for line in found["lines"]} == {
        some_id("ada-1"),
        some_id("bob-1"),
    }
    assert json.loads(run("lineage", "--version", "1", "--format", "json"))["rows"] == 0
    assert "there is no version 9" in run("lineage", "--version", "9", code=1)
    assert people.column("audit", "subject") == ["version 1", "version 2"]


def test_lineage_of_an_interaction_lists_versions_and_their_descendants(
    people: People, run: Run, trained: MemoryRows
) -> None:
    found = json.loads(run("lineage", "--interaction", some_id("ada-1"), "--format", "json"))

    assert found["versions"] == {"2": 1}
    assert found["inherited"] == [3]
    assert json.loads(run("lineage", "--interaction", some_id("nobody"), "--format", "json")) == {
        "subject": f"interaction {some_id('nobody')}",
        "versions": {},
        "inherited": [],
        "lines": [],
    }


def test_lineage_prints_the_id_of_an_interaction_verbatim(
    people: People, run: Run, trained: MemoryRows
) -> None:
    assert "ticket:key:12 [red]" in run("lineage", "--interaction", "ticket:key:12 [red]")


def test_lineage_creates_no_tables(run: Run, trained: MemoryRows, tmp_path: Path) -> None:
    assert "there are no tables" in run("lineage", "--version", "2", "--set", "data_dir=x", code=1)
    assert not (tmp_path / "x").exists()


def test_lineage_without_a_registry_writes_nothing(
    people: People, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(settings: object) -> MemoryRows:
        raise ServiceUnavailable("the registry is away")

    def create(store: DeltaStore) -> None:
        pytest.fail("lineage wrote to the tables")

    monkeypatch.setattr(lineage, "open_trained_rows", away)
    monkeypatch.setattr(DeltaStore, "create", create)
    assert "the registry is away" in run("lineage", "--version", "2", code=1)


def test_lineage_of_a_person_is_the_same_after_the_erasure(
    people: People, run: Run, trained: MemoryRows
) -> None:
    before = json.loads(run("lineage", "--user", "ada", "--format", "json"))
    run("erase", "--user", "ada")
    after = json.loads(run("lineage", "--user", "ada", "--format", "json"))

    assert before["versions"] == after["versions"] == {"2": 1}
    assert before["inherited"] == [3]
    assert hash_of("ada") not in json.dumps(after)
    of_2 = json.loads(run("lineage", "--version", "2", "--format", "json"))
    assert of_2["rows_erased_since"] == 1
    assert "learned from them" in run("lineage", "--user", "ada")
    assert json.loads(run("lineage", "--user", "bob", "--format", "json"))["versions"] == {
        "2": 1,
        "3": 1,
    }
