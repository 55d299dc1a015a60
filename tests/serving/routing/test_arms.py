from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.rollout_store.schema import ArmRow
from onlinerl.serving.routing.arms import Arms, Target, hash_fraction, read_newest

KEY = b"a key"
START = datetime(2026, 1, 1, tzinfo=UTC)


def row(decision: str, arm: str, version: int, *, minute: int = 0, **changes: Any) -> ArmRow:
    decided_at = START + timedelta(minutes=minute)
    fields: dict[str, Any] = {
        "decision_id": decision,
        "policy": "assistant",
        "arm": arm,
        "version": version,
        "share": 0.1,
        "decided_at": decided_at,
        "ingest_date": decided_at.date(),
    }
    return ArmRow(**fields | changes)


def canary(share: float, *, version: int = 13) -> Arms:
    return Arms(canary=Target(arm="canary", version=version, share=share))


def test_without_rows_the_champion_takes_all() -> None:
    assert read_newest([], policy="assistant") == Arms()
    assert read_newest([row("d1", "canary", 13)], policy="other") == Arms()


def test_the_newest_decision_holds_and_not_the_last_row() -> None:
    rows = [
        row("d2", "canary", 14, minute=5, share=0.25),
        row("d2", "shadow", 15, minute=5, share=0.5),
        row("d1", "canary", 13, minute=1),
    ]
    arms = read_newest(rows, policy="assistant")

    assert arms.decision_id == "d2"
    assert arms.canary == Target(arm="canary", version=14, share=0.25)
    assert arms.shadow == Target(arm="shadow", version=15, share=0.5)


def test_a_later_champion_ends_a_canary() -> None:
    rows = [row("d1", "canary", 13), row("d2", "champion", 13, minute=9, share=1.0)]
    arms = read_newest(rows, policy="assistant")

    assert arms.canary is None
    assert arms.champion == Target(arm="champion", version=13, share=1.0)


def test_a_champion_keeps_its_adapter_through_later_canaries() -> None:
    rows = [
        row("d1", "champion", 12, share=1.0, adapter="assistant@12"),
        row("d2", "canary", 13, minute=1, adapter="assistant@13"),
    ]
    arms = read_newest(rows, policy="assistant")

    assert arms.champion is not None
    assert arms.champion.adapter == "assistant@12"
    assert arms.uses_adapters


def test_a_decision_that_was_stored_twice_counts_once() -> None:
    rows = [row("d1", "canary", 13), row("d1", "canary", 13, minute=1)]

    assert read_newest(rows, policy="assistant").canary == Target(
        arm="canary", version=13, share=0.1
    )


@given(name=st.text(), version=st.integers(min_value=1), key=st.binary(max_size=64))
def test_a_place_is_in_the_half_open_unit_interval(name: str, version: int, key: bytes) -> None:
    assert 0.0 <= hash_fraction(name, version=version, key=key) < 1.0


@pytest.mark.parametrize("share", [0.01, 0.05, 0.25, 0.9])
def test_the_canary_gets_its_share_of_sessions(share: float) -> None:
    drawn = sum(canary(share).draws_canary(f"session-{n}", key=KEY) for n in range(20_000))

    assert abs(drawn / 20_000 - share) < 0.01


@given(session=st.text(), small=st.floats(0, 1), large=st.floats(0, 1))
def test_a_share_that_grows_sends_no_session_away(session: str, small: float, large: float) -> None:
    small, large = sorted((small, large))
    if canary(small).draws_canary(session, key=KEY):
        assert canary(large).draws_canary(session, key=KEY)


@given(session=st.text())
def test_a_share_of_nothing_takes_nobody_and_one_of_all_everybody(session: str) -> None:
    assert not canary(0.0).draws_canary(session, key=KEY)
    assert canary(1.0).draws_canary(session, key=KEY)


def test_the_next_canary_and_another_key_draw_anew() -> None:
    sessions = [f"session-{n}" for n in range(4000)]
    first = {s for s in sessions if canary(0.5).draws_canary(s, key=KEY)}
    next_one = {s for s in sessions if canary(0.5, version=14).draws_canary(s, key=KEY)}
    other_key = {s for s in sessions if canary(0.5).draws_canary(s, key=b"other")}

    assert abs(len(first & next_one) - 1000) < 120
    assert abs(len(first & other_key) - 1000) < 120
