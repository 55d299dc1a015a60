from datetime import UTC, datetime
from pathlib import Path

import pytest

from onlinerl.rollout_store.config import MetricConfig, RewardsConfig
from tests.events import after, feedback, interaction
from tests.rollout_store.views_of import Event, views_of

DAY = datetime(2026, 1, 2, tzinfo=UTC)


def suspicions(folder: Path, *events: Event, **rules: float) -> list[tuple[object, ...]]:
    bounds = {"min_feedback": 4, "burst_feedback": 3, "burst_s": 60.0} | rules
    config = RewardsConfig.model_validate(
        {"metrics": (MetricConfig(name="accepted"),), "suspicion": bounds}
    )
    connection = views_of(folder, *events, rewards=config)
    columns = "kind, subject, window_start, num_feedback, share"
    return connection.execute(f"SELECT {columns} FROM suspicions ORDER BY ALL").fetchall()


def given(number: int, minute: float, **changes: object) -> Event:
    """Feedback on an interaction of its own, so that none is a duplicate."""
    return feedback(
        f"f{number}", **({"interaction_id": f"i{number}", "given_at": after(minute)} | changes)
    )


def test_a_user_with_more_than_the_bound_of_a_days_feedback_is_flagged(tmp_path: Path) -> None:
    eve = [given(n, 10 * n, user="eve") for n in range(3)]
    bob = [given(n, 10 * n, user="bob") for n in (3, 4)]
    tomorrow = [given(n, 1440 + 10 * n, user="eve") for n in (5, 6, 7)]

    assert suspicions(tmp_path / "1", *eve, *bob, *tomorrow) == [("user_share", "eve", DAY, 3, 0.6)]
    assert suspicions(tmp_path / "2", *eve, *bob, user_share=0.6) == []


def test_a_source_with_more_than_the_bound_is_flagged(tmp_path: Path) -> None:
    events = [given(n, 10 * n, source="judge" if n else "user") for n in range(5)]

    assert suspicions(tmp_path / "1", *events) == []
    assert suspicions(tmp_path / "2", *events, source_share=0.75) == [
        ("source_share", "judge", DAY, 4, 0.8)
    ]


@pytest.mark.parametrize(("gap", "found"), [(0.5, 3), (0.51, None)], ids=["within", "beyond"])
def test_many_feedbacks_of_a_user_in_a_short_time_are_a_burst(
    tmp_path: Path, gap: float, found: int | None
) -> None:
    events = [given(n, 30 + n * gap, user="eve") for n in range(3)]
    others = [given(n, 31, user=None) for n in range(3, 9)]

    rows = suspicions(tmp_path, *events, *others)
    assert rows == ([("burst", "eve", DAY, found, None)] if found else [])


def test_the_same_judgement_twice_by_one_user_is_a_duplicate(tmp_path: Path) -> None:
    twice = [feedback(f"f{n}", user="ann", given_at=after(10 * n)) for n in (1, 2)]
    changed = feedback("f3", user="bob"), feedback("f4", user="bob", value=0.0)
    nobody = [feedback(f"f{n}") for n in (5, 6)]

    assert suspicions(tmp_path, interaction(), *twice, *changed, *nobody) == [
        ("duplicate", "ann", DAY, 2, None)
    ]


def test_retracted_feedback_is_not_flagged(tmp_path: Path) -> None:
    twice = [feedback(f"f{n}", user="ann", given_at=after(10 * n)) for n in (1, 2)]
    undo = feedback("f3", value=None, retracts="f2")

    assert suspicions(tmp_path, *twice, undo) == []
