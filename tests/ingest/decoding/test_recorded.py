"""Recorded events of every released schema version, and the rows that ingest must read from them.

A file `recorded/<topic>-<schema version>-<what>.json` is a record as a writer of its time logged
it. The file `<same name>.rows.json` beside it has the rows, or the reason why there are none. These
files never change: a change of the schema adds new ones.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, Field

from onlinerl.ingest.decoding import reading
from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.schema import (
    SCHEMA_VERSION,
    Completion,
    FeedbackEvent,
    InteractionEvent,
)
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.views.connection import connect
from tests.events import interaction
from tests.ingest.sorted import FEEDBACK, INTERACTIONS, batch_of
from tests.ingest.world import World, make_world

FOLDER = Path(__file__).parent / "recorded"
RECORDED = sorted(path for path in FOLDER.glob("*.json") if not path.name.endswith(".rows.json"))


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The rows, in the form of the `.rows.json` files."""
    route = FEEDBACK if path.name.startswith("feedback") else INTERACTIONS
    batch = batch_of(path.read_bytes(), route=route)
    if batch.dead:
        return [{"dead": batch.dead[0].reason.partition(":")[0]}]
    stamps = ("ingested_at", "ingest_date", "topic", "partition", "offset")
    table = batch.rows.drop_columns(list(stamps))
    found: list[dict[str, Any]] = json.loads(json.dumps(table.to_pylist(), default=str))
    return found


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_was_ever_written_is_read_as_it_was_then(path: Path) -> None:
    expected = json.loads(path.with_suffix(".rows.json").read_text())
    found = rows_in(path)

    assert len(found) == len(expected)
    for row, was in zip(found, expected, strict=True):
        # Rows of today may have columns that nobody had then; they are empty.
        assert row == dict.fromkeys(row) | was


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_it_is_the_same_without_the_fast_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = rows_in(path)
    monkeypatch.setattr(reading, "read_by_struct", lambda value, model: None)

    assert rows_in(path) == fast


def test_there_is_a_record_of_every_version_and_with_every_field() -> None:
    records = {path.name: json.loads(path.read_bytes()) for path in RECORDED}
    interactions = [raw for name, raw in records.items() if name.startswith("interactions")]
    feedback = [raw for name, raw in records.items() if name.startswith("feedback")]
    choices = [choice for raw in interactions for choice in raw["choices"]]

    assert {int(name.split("-")[1]) for name in records} == set(range(1, SCHEMA_VERSION + 1))
    assert set(InteractionEvent.model_fields) <= {name for raw in interactions for name in raw}
    assert set(Completion.model_fields) <= {name for choice in choices for name in choice}
    assert set(FeedbackEvent.model_fields) <= {name for raw in feedback for name in raw}


def test_a_value_of_a_newer_writer_is_a_dead_letter_until_an_upgrade_and_a_replay() -> None:
    (letter,) = batch_of((FOLDER / "interactions-1-newer-word.json").read_bytes()).dead

    assert letter.reason.startswith("fields: choices.0.finish_reason")


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Tables from before the columns for the arm's probability and for masked spans."""
    world = make_world(tmp_path)
    for number in range(2):
        world.send(interaction(f"old{number}"))
    world.ingest()
    return world


def test_an_older_table_gets_the_columns_that_it_lacks(tmp_path: Path, world: World) -> None:
    table = world.store.dataset("interactions").to_table()
    older = table.drop_columns(["arm_probability", "mask_spans", "extra"])
    root = tmp_path / "older"
    DeltaTable.create(str(root / "interactions"), schema=older.schema, partition_by=["ingest_date"])
    old_store = DeltaStore(str(root))
    old_store.append("interactions", older)
    other = World(world.log, old_store)
    other.store.create()
    other.send(interaction("new", arm_probability=0.5))
    other.ingest()

    rows = old_store.dataset("interactions").to_table().to_pylist()
    found = {row["interaction_id"]: row["arm_probability"] for row in rows}
    assert found == {"old0": None, "old1": None, "new": 0.5}


def test_a_table_of_a_newer_reader_takes_rows_of_this_one(world: World) -> None:
    table = world.store.delta("interactions")
    table.alter.add_columns([Field("mood", "string", nullable=True)])
    world.send(interaction("new"))
    world.ingest()

    rows = world.store.dataset("interactions").to_table(["interaction_id", "mood"]).to_pylist()
    assert {row["interaction_id"]: row["mood"] for row in rows} == {
        "old0": None,
        "old1": None,
        "new": None,
    }


def test_an_older_reader_sees_the_columns_that_it_knows(world: World) -> None:
    world.send_raw((FOLDER / "interactions-1-newer-writer.json").read_bytes())
    world.ingest()
    connection = connect(world.store, rewards=RewardsConfig())

    known = connection.sql("SELECT interaction_id, extra FROM interactions ORDER BY 1").fetchall()
    newer = "0197a000-0000-7000-8000-000000000005"
    assert [row[0] for row in known] == [newer, newer, "old0", "old1"]
    assert json.loads(known[0][1])["cache_hit_tokens"] == 12
