from hypothesis import given
from hypothesis import strategies as st

from onlinerl.serving.access.token_bucket import TokenBucket


def test_a_bucket_of_60_a_minute_fills_by_one_a_second() -> None:
    bucket = TokenBucket(60, now_s=100.0)
    bucket.change(-60, 100.0)

    assert bucket.wait_s(1, 100.0) == 1.0
    assert bucket.wait_s(5, 102.0) == 3.0
    assert bucket.wait_s(5, 105.0) == 0.0
    assert bucket.remaining(107.9) == 7
    assert bucket.reset_s(110.0) == 50.0


def test_a_bucket_starts_full_and_never_holds_more_than_a_minute() -> None:
    bucket = TokenBucket(10, now_s=0.0)

    assert bucket.remaining(0.0) == 10
    assert bucket.remaining(3600.0) == 10
    bucket.change(+5, 3600.0)
    assert bucket.remaining(3600.0) == 10


def test_more_than_fits_can_be_taken_when_it_is_full() -> None:
    bucket = TokenBucket(10, now_s=0.0)

    assert bucket.wait_s(1000, 0.0) == 0.0
    bucket.change(-1, 0.0)
    assert bucket.wait_s(1000, 0.0) == 6.0


def test_debt_is_paid_off_before_anything_can_be_taken() -> None:
    bucket = TokenBucket(60, now_s=0.0)
    bucket.change(-90, 0.0)

    assert bucket.remaining(0.0) == 0
    assert bucket.wait_s(1, 0.0) == 31.0


def test_a_clock_that_stands_still_gives_nothing() -> None:
    bucket = TokenBucket(60, now_s=10.0)
    bucket.change(-60, 10.0)

    assert bucket.level(9.0) == 0.0


@given(
    per_minute=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), max_size=50),
)
def test_no_interval_gives_more_than_the_rate_and_one_full_bucket(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now_s, taken = TokenBucket(per_minute, now_s=0.0), 0.0, 0
    for pause_s, amount in steps:
        now_s += pause_s
        if amount <= per_minute and bucket.wait_s(amount, now_s) == 0:
            bucket.change(-amount, now_s)
            taken += amount

    assert taken <= per_minute + now_s * per_minute / 60 + 1e-6
