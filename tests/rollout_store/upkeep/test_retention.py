"""Retention deletes rows that are older than the operator wants to keep."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from onlinerl.errors import ConfigError, ServiceUnavailable
from onlinerl.rollout_store.snapshots.named import create_snapshot, readable
from onlinerl.rollout_store.upkeep import retention as retention_module
from onlinerl.rollout_store.upkeep.config import RetentionConfig, TenantRetention
from onlinerl.rollout_store.upkeep.retention import due_condition, expire
from tests.events import NOON
from tests.rollout_store.people import People, some_id

TODAY = date(2026, 1, 12)
AT = datetime(2026, 1, 12, 9, tzinfo=UTC)
"""Ten days after the rows of `people` were stored."""


@pytest.fixture
def people(tmp_path: Path) -> People:
    """One old row of each of two tenants, and one young one."""
    people = People(tmp_path)
    people.says("old", user="ada", session="s")
    people.says("other", user="ada", session="s", tenant="globex")
    people.judges("f-old", interaction_id=some_id("old"))
    people.breaks(b"broken")
    people.stored_at = AT - timedelta(days=1)
    people.says("young", user="ada", session="s")
    return people


def expired(people: People, config: RetentionConfig) -> dict[str, int]:
    done = expire(people.store, config, actor="maintain", at=AT)
    return {each.table: each.num_rows for each in done}


def test_rows_are_kept_forever_without_a_retention(people: People) -> None:
    assert due_condition(RetentionConfig(), "interactions", today=TODAY) is None
    assert expired(people, RetentionConfig()) == {}


def test_days_are_counted_whole(people: People) -> None:
    """Stored on the 2nd at noon: ten days later, on the 12th, it is not yet due."""
    assert expired(people, RetentionConfig(interactions=10)) == {}
    assert expired(people, RetentionConfig(interactions=9)) == {"interactions": 2}
    assert people.column("interactions", "interaction_id") == [some_id("young")]


def test_a_tenant_can_have_its_own_retention(people: People) -> None:
    shorter = RetentionConfig(tenants=(TenantRetention(tenant="globex", interactions=5),))
    longer = RetentionConfig(
        interactions=5, tenants=(TenantRetention(tenant="globex", interactions=50),)
    )

    assert due_condition(longer, "interactions", today=TODAY) == (
        "(ingest_date < '2026-01-07' AND tenant NOT IN ('globex'))"
        " OR (ingest_date < '2025-11-23' AND tenant = 'globex')"
    )
    assert expired(people, shorter) == {"interactions": 1}
    assert expired(people, longer) == {"interactions": 1}
    assert people.column("interactions", "interaction_id") == [some_id("young")]


def test_each_table_has_its_own_retention(people: People) -> None:
    config = RetentionConfig(feedback=3, dead_letters=4)

    assert expired(people, config) == {"feedback": 1, "dead_letters": 1}
    assert len(people.column("interactions", "interaction_id")) == 3


def test_a_tenant_whose_name_is_a_quote_is_a_name(people: People) -> None:
    people.stored_at = NOON
    people.says("quoted", user=None, session="s", tenant="o'neil")
    config = RetentionConfig(tenants=(TenantRetention(tenant="o'neil", interactions=5),))

    assert expired(people, config) == {"interactions": 1}


def test_a_second_pass_deletes_and_records_nothing(people: People) -> None:
    config = RetentionConfig(interactions=5)
    expired(people, config)

    assert expired(people, config) == {}
    assert people.column("audit", "action") == ["retention"]


def test_a_snapshot_with_expired_rows_is_marked(people: People) -> None:
    create_snapshot(people.store, "june", actor="me", reason="", at=NOON)

    (done,) = expire(people.store, RetentionConfig(interactions=5), actor="maintain", at=AT)

    assert done.marked == ("june",)
    with pytest.raises(ConfigError, match="reached their retention"):
        readable(people.store, "june", at=AT)


def test_a_snapshot_of_young_rows_stays(people: People) -> None:
    expired(people, RetentionConfig(interactions=5))
    create_snapshot(people.store, "june", actor="me", reason="", at=AT)

    assert expired(people, RetentionConfig(interactions=5)) == {}
    assert readable(people.store, "june", at=AT)


@pytest.mark.parametrize("lost", ["*/*.parquet", "_delta_log/*.json"])
def test_an_unreadable_snapshot_is_marked_and_the_pass_continues(people: People, lost: str) -> None:
    create_snapshot(people.store, "june", actor="me", reason="", at=AT)
    table = Path(people.store.root) / "interactions"
    files = list(table.glob(lost))
    people.store.delta("interactions").optimize.compact()
    people.store.delta("interactions").create_checkpoint()
    for file in files:
        file.unlink()

    done = list(expire(people.store, RetentionConfig(interactions=5), actor="maintain", at=AT))

    assert [(each.num_rows, each.marked) for each in done] == [(2, ("june",))]
    with pytest.raises(ConfigError, match="files that it needs are gone"):
        readable(people.store, "june", at=AT)


def test_a_storage_failure_marks_nothing(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    create_snapshot(people.store, "june", actor="me", reason="", at=NOON)

    def fail(*args: object, **kwargs: object) -> object:
        raise ServiceUnavailable("the storage is away")

    monkeypatch.setattr(retention_module, "_count", fail)
    with pytest.raises(ServiceUnavailable, match="the storage is away"):
        expired(people, RetentionConfig(interactions=5))
    assert readable(people.store, "june", at=AT)


def test_a_tenant_is_named_once() -> None:
    twice = (TenantRetention(tenant="a", feedback=1), TenantRetention(tenant="a", feedback=2))

    with pytest.raises(ValidationError, match="names a more than once"):
        RetentionConfig(tenants=twice)
