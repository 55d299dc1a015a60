from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from onlinerl.deploy.promotion.arms import champion_only, write_arms
from onlinerl.deploy.promotion.journal import DeltaJournal, MemoryJournal
from onlinerl.errors import ConfigError, ServiceUnavailable
from onlinerl.rollout_store.schema import ArmRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def row(arm: str, version: int, **changes: Any) -> ArmRow:
    fields: dict[str, Any] = {
        "decision_id": "d1",
        "policy": "assistant",
        "arm": arm,
        "version": version,
        "share": 0.1,
        "decided_at": NOW,
        "ingest_date": NOW.date(),
    }
    return ArmRow(**fields | changes)


@pytest.fixture
def store(tmp_path: Path) -> DeltaStore:
    store = DeltaStore(str(tmp_path))
    store.create()
    return store


def stored(store: DeltaStore) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = store.dataset("arms").to_table().to_pylist()
    return rows


def test_a_decision_is_one_commit(store: DeltaStore) -> None:
    before = store.versions()["arms"]
    DeltaJournal(store).arms([row("canary", 13), row("shadow", 14)])

    assert store.versions()["arms"] == before + 1
    assert {(each["arm"], each["version"]) for each in stored(store)} == {
        ("canary", 13),
        ("shadow", 14),
    }


def test_the_champion_alone_ends_every_other_arm(store: DeltaStore) -> None:
    write_arms(store, champion_only("assistant", 12, reason="promoted", decided_at=NOW))
    (only,) = stored(store)

    assert (only["arm"], only["version"], only["share"]) == ("champion", 12, 1.0)


def test_a_repeated_decision_has_the_same_id_and_another_has_its_own() -> None:
    ids = [
        champion_only("assistant", version, reason=reason, decided_at=NOW)[0].decision_id
        for version, reason in [(12, "a"), (12, "a"), (12, "b"), (13, "a")]
    ]

    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    ("decision", "problem"),
    [
        ([], "no row"),
        ([row("canary", 13), row("shadow", 14, decision_id="d2")], "differ in decision_id"),
        ([row("canary", 13), row("shadow", 14, policy="other")], "differ in policy"),
        ([row("canary", 13), row("canary", 14)], "same arm twice"),
        ([row("canary", 13), row("shadow", 13)], "same version twice"),
        ([row("canary", 13, adapter="assistant@12")], "has to be assistant@13"),
    ],
)
def test_a_decision_that_gateways_cannot_follow_is_not_stored(
    store: DeltaStore, decision: list[ArmRow], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        write_arms(store, decision)
    with pytest.raises(ConfigError, match=problem):
        MemoryJournal().arms(decision)
    assert stored(store) == []


def test_an_absent_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailable):
        write_arms(DeltaStore(str(tmp_path / "nowhere")), [row("canary", 13)])
