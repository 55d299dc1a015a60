import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.serving.interaction import ids as ids_module
from onlinerl.serving.interaction.ids import IdGenerator, uuid7

NOW_MS = 1_800_000_000_000
YEAR_9999_MS = 253_402_300_799_000
MAX_STAMP_MS = (1 << 48) - 1
CLOCKS = st.lists(
    st.one_of(
        st.integers(0, 1 << 64),
        st.integers(NOW_MS - 3, NOW_MS + 3),
        st.sampled_from([0, NOW_MS, YEAR_9999_MS, MAX_STAMP_MS, MAX_STAMP_MS + 1]),
    ),
    min_size=1,
    max_size=60,
)


def stamp_ms(text: str) -> int:
    return UUID(text).int >> 80


def is_uuid7(text: str) -> bool:
    uuid = UUID(text)
    return str(uuid) == text and (uuid.version, uuid.variant) == (7, RFC_4122)


def assert_strictly_increasing(ids: list[str]) -> None:
    assert all(one < other for one, other in pairwise(ids))
    numbers = [UUID(text).int for text in ids]
    assert all(one < other for one, other in pairwise(numbers))


def generator_over(readings: list[int]) -> IdGenerator:
    reading: Iterator[int] = iter(readings)
    return IdGenerator(lambda: next(reading))


@given(CLOCKS)
def test_ids_increase_and_stay_valid_whatever_the_clock_does(readings: list[int]) -> None:
    generator = generator_over(readings)

    ids = [generator.new_id() for _ in readings]

    assert_strictly_increasing(ids)
    assert all(map(is_uuid7, ids))


@given(st.lists(st.integers(NOW_MS, NOW_MS + 1000), min_size=1, max_size=60))
def test_stamp_is_the_latest_reading_so_far(readings: list[int]) -> None:
    generator = generator_over(readings)

    stamps = [stamp_ms(generator.new_id()) for _ in readings]

    assert stamps == [max(readings[: index + 1]) for index in range(len(readings))]


def test_clock_that_came_back_from_the_year_9999_gives_new_ids_for_ever() -> None:
    readings = [YEAR_9999_MS, *[NOW_MS] * 2000]
    generator = generator_over(readings)

    ids = [generator.new_id() for _ in readings]

    assert_strictly_increasing(ids)
    assert {stamp_ms(text) for text in ids} == {YEAR_9999_MS}


def test_overflowing_counter_moves_the_stamp_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbits", lambda bits: (1 << bits) - 1)
    generator = IdGenerator(lambda: NOW_MS)
    num_per_stamp = 1 << (ids_module._RANDOM_BITS - ids_module._STEP_BITS - 1)

    ids = [generator.new_id() for _ in range(2 * num_per_stamp)]

    assert_strictly_increasing(ids)
    assert is_uuid7(ids[-1])
    assert stamp_ms(ids[0]) == NOW_MS
    assert NOW_MS < stamp_ms(ids[-1]) <= NOW_MS + 2


def test_overflow_at_the_latest_stamp_still_gives_valid_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ids_module, "_STEP_BITS", 74)
    generator = IdGenerator(lambda: MAX_STAMP_MS + 5)

    ids = [generator.new_id() for _ in range(500)]

    assert_strictly_increasing(ids)
    assert all(map(is_uuid7, ids))


@given(st.integers(2, 6))
def test_ids_of_one_millisecond_differ_by_a_random_amount(num_ids: int) -> None:
    generator = IdGenerator(lambda: NOW_MS)

    numbers = [UUID(generator.new_id()).int & ids_module._MASK_62 for _ in range(num_ids)]
    steps = {(after - before) % (1 << 62) for before, after in pairwise(numbers)}

    # Two random steps of 56 bits are equal, or one of them below 2**20, once in 2**30 runs.
    assert len(steps) == num_ids - 1
    assert all(1 << 20 < step <= 1 << 56 for step in steps)


@given(CLOCKS, st.integers(2, 4))
def test_ids_of_several_threads_are_unique_and_increase_in_each(
    readings: list[int], num_threads: int
) -> None:
    # An endless clock that several threads read, so that it also steps back between them.
    position = 0

    def clock_ms() -> int:
        nonlocal position
        position += 1
        return readings[position % len(readings)]

    generator = IdGenerator(clock_ms)
    start = threading.Barrier(num_threads)

    def make() -> list[str]:
        start.wait()
        return [generator.new_id() for _ in range(30)]

    with ThreadPoolExecutor(num_threads) as pool:
        made = [future.result() for future in [pool.submit(make) for _ in range(num_threads)]]

    assert len({text for ids in made for text in ids}) == 30 * num_threads
    for ids in made:
        assert_strictly_increasing(ids)


def test_ids_of_the_process_increase_and_carry_the_present_time() -> None:
    before_ms = time.time_ns() // 1_000_000

    ids = [uuid7() for _ in range(5000)]

    assert_strictly_increasing(ids)
    assert before_ms <= stamp_ms(ids[0]) <= before_ms + 60_000


def test_forked_process_makes_other_ids() -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    before = uuid7()

    child = context.Process(target=lambda: results.put([uuid7() for _ in range(100)]))
    child.start()
    from_child = results.get()
    child.join()
    from_parent = [uuid7() for _ in range(100)]

    assert_strictly_increasing([before, *from_child])
    assert set(from_child).isdisjoint(from_parent)
