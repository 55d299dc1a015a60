from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.serving.routing.rendezvous import choose_name, is_overloaded

NAMES = [f"http://10.0.0.{n}:8001" for n in range(4)]
names = st.lists(st.text(min_size=1), min_size=2, max_size=6, unique=True)


@given(session=st.text(), among=names, order=st.randoms())
def test_the_order_of_the_replicas_does_not_matter(
    session: str, among: list[str], order: "object"
) -> None:
    shuffled = list(among)
    order.shuffle(shuffled)  # type: ignore[attr-defined]

    assert choose_name(session, among) == choose_name(session, shuffled)


@given(session=st.text(), among=names)
def test_a_replica_that_goes_moves_only_the_sessions_that_it_held(
    session: str, among: list[str]
) -> None:
    held_by = choose_name(session, among)
    for gone in among:
        left = [name for name in among if name != gone]
        if gone != held_by:
            assert choose_name(session, left) == held_by


def test_sessions_spread_evenly_and_a_fifth_replica_takes_a_fifth() -> None:
    sessions = [f"session-{n}" for n in range(8000)]
    before = {session: choose_name(session, NAMES) for session in sessions}
    after = {
        session: choose_name(session, [*NAMES, "http://10.0.0.9:8001"]) for session in sessions
    }
    moved = [session for session in sessions if before[session] != after[session]]

    assert all(abs(count - 2000) < 200 for count in Counter(before.values()).values())
    assert abs(len(moved) - 1600) < 200
    assert {after[session] for session in moved} == {"http://10.0.0.9:8001"}


@pytest.mark.parametrize(
    ("load", "loads", "expected"),
    [
        (0, [0], False),
        (8, [8, 0], False),  # 9 against ceil(1.5 * 4.5) + 8 = 15
        (14, [14, 0], False),  # 15 against ceil(1.5 * 7.5) + 8 = 20
        (40, [40, 0], True),  # 41 against ceil(1.5 * 20.5) + 8 = 39
        (40, [40, 40], False),
        (100, [100], False),
    ],
)
def test_a_replica_is_overloaded_far_over_the_mean(
    load: int, loads: list[int], expected: bool
) -> None:
    assert is_overloaded(load, loads, factor=1.5, slack=8) is expected


@given(st.lists(st.integers(min_value=0, max_value=1000), min_size=1, max_size=8))
def test_the_least_busy_replica_is_never_overloaded(loads: list[int]) -> None:
    assert not is_overloaded(min(loads), loads, factor=1.0, slack=0)
