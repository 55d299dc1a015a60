import pytest

from onlinerl.process.fault_streak import FaultStreak


def test_the_wait_doubles_to_its_bound_and_a_success_resets_it() -> None:
    streak = FaultStreak(max_wait_s=10.0)
    waits = [streak.wait_s(2.0)]
    for _ in range(5):
        streak.add("away")
        waits.append(streak.wait_s(2.0))
    streak.clear()

    assert waits == [2.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert streak.wait_s(2.0) == 2.0


def test_an_interval_above_the_bound_is_not_shortened() -> None:
    streak = FaultStreak(max_wait_s=10.0)
    for _ in range(2000):
        streak.add("away")

    assert streak.wait_s(300.0) == 300.0
    assert streak.wait_s(0.1) == 10.0


def test_a_repeated_reason_is_not_new() -> None:
    streak = FaultStreak()
    is_new = [streak.add(reason) for reason in ("away", "away", "full", "away")]
    streak.clear()

    assert is_new == [True, False, True, True]
    assert streak.add("away")


@pytest.mark.parametrize("unready_after", [1, 3])
def test_trouble_is_reported_after_the_configured_number_of_faults(unready_after: int) -> None:
    streak = FaultStreak(unready_after=unready_after)
    for _ in range(unready_after - 1):
        streak.add("away")
    before = streak.trouble
    streak.add("away")

    assert before is None
    assert streak.trouble == "away"
    streak.clear()
    assert streak.trouble is None
