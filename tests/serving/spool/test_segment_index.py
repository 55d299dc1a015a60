import pytest

from onlinerl.rollout_store.event_log import TopicIdPartition
from onlinerl.serving.spool.cursor import Cursor
from onlinerl.serving.spool.segment_files import Position
from onlinerl.serving.spool.segment_index import SegmentIndex, choose_evictions

IDS = {"t": "1"}


def index(*sizes: int, cursor: Position | None = None) -> SegmentIndex:
    """Segments 1, 2, … of these sizes."""
    numbered = dict(enumerate(sizes, start=1))
    return SegmentIndex(numbered, None if cursor is None else Cursor(cursor, IDS))


def test_the_backlog_is_what_lies_behind_the_cursor() -> None:
    found = index(100, 50, 30, cursor=Position(2, 20))

    assert found.backlog_bytes == (50 - 20) + 30
    assert found.next_number == 4
    assert found.after_cursor() == [(Position(2, 20), 50), (Position(3, 0), 30)]


@pytest.mark.parametrize(
    ("cursor", "valid"),
    [
        (None, Position(1, 0)),
        (Position(2, 50), Position(2, 50)),
        (Position(7, 3), Position(4, 0)),
        (Position(0, 9), Position(1, 0)),
    ],
)
def test_a_cursor_whose_segment_is_gone_is_put_at_the_next(
    cursor: Position | None, valid: Position
) -> None:
    assert index(100, 50, 30, cursor=cursor).cursor.position == valid


def test_a_cursor_past_the_end_of_its_segment_is_put_at_its_end() -> None:
    """A crash of the machine may cost a segment its tail, which was shipped."""
    found = index(100, 50, cursor=Position(2, 70))

    assert found.cursor == Cursor(Position(2, 50), IDS)
    assert (found.backlog_bytes, found.unread_bytes, found.unread()) == (0, 0, None)


def test_reading_steps_over_what_is_read_to_its_end() -> None:
    found = index(100, 0, 30)
    found.read_position = Position(1, 100)

    assert found.unread() == (Position(3, 0), 30)
    found.read_position = Position(3, 30)
    assert found.unread() is None
    assert found.unread_bytes == 0


def test_a_segment_is_known_from_its_first_byte_on() -> None:
    found = index()
    found.begin()
    found.rewind(topic_ids=IDS)
    found.grow(10)

    assert found.unread() == (Position(1, 0), 10)
    assert found.closed == {}
    found.close()
    assert found.closed == {1: 10}


def test_what_is_torn_counts_as_shipped_with_what_is_before_it() -> None:
    found = index(100, 50)
    found.read_position = Position(1, 60)
    found.skip_torn(Position(1, 60), Position(1, 100))
    found.ship(Position(1, 60), topic_ids=IDS, ends={})

    assert found.backlog_bytes == 50
    assert found.shipped() == {1: 100}


def test_the_open_segment_is_never_shipped_whole() -> None:
    found = index(100)
    found.begin()
    found.grow(10)
    found.ship(Position(2, 10), topic_ids=IDS, ends={})

    assert found.shipped() == {1: 100}


ONE = TopicIdPartition("t", "1", 0)
OTHER = TopicIdPartition("t", "1", 1)


def shipped_index() -> SegmentIndex:
    """Three segments; the batches ended in the middle of the first, of the second, and last."""
    found = index(100, 50, 30)
    found.ship(Position(1, 40), topic_ids=IDS, ends={ONE: 4})
    found.ship(Position(2, 20), topic_ids=IDS, ends={ONE: 9, OTHER: 3})
    found.ship(Position(3, 30), topic_ids=IDS, ends={OTHER: 8})
    return found


@pytest.mark.parametrize(
    ("stored", "confirmed"),
    [
        ({}, {}),
        ({ONE: 9}, {}),
        ({ONE: 8, OTHER: 8}, {3: 30}),
        ({ONE: 9, OTHER: 3}, {1: 100}),
        ({ONE: 9, OTHER: 7}, {1: 100}),
        ({ONE: 9, OTHER: 8}, {1: 100, 2: 50, 3: 30}),
    ],
)
def test_a_segment_is_confirmed_when_every_record_is_stored(
    stored: dict[TopicIdPartition, int], confirmed: dict[int, int]
) -> None:
    found = shipped_index()

    assert found.partitions() == {ONE, OTHER}
    assert found.confirmed(stored) == confirmed


def test_offsets_of_another_incarnation_confirm_nothing() -> None:
    later = {TopicIdPartition("t", "2", n): 100 for n in range(2)}

    assert shipped_index().confirmed(later) == {}


def test_a_log_that_came_back_empty_makes_nothing_confirmed() -> None:
    found = shipped_index()
    found.rewind(topic_ids={"t": "2"})
    found.ship(Position(1, 100), topic_ids={"t": "2"}, ends={TopicIdPartition("t", "2", 0): 1})

    assert found.confirmed({ONE: 9, OTHER: 8}) == {}
    assert found.confirmed({TopicIdPartition("t", "2", 0): 1}) == {1: 100}


def test_a_segment_that_a_former_process_began_to_ship_is_never_confirmed() -> None:
    found = index(100, 50, 30, cursor=Position(2, 20))
    found.ship(Position(3, 30), topic_ids=IDS, ends={ONE: 1})

    assert found.confirmed({ONE: 1}) == {3: 30}


def test_a_segment_without_an_offset_is_not_confirmed() -> None:
    found = index(100)
    found.ship(Position(1, 100), topic_ids=IDS, ends={})

    assert found.confirmed({ONE: 100}) == {}


@pytest.mark.parametrize(
    ("retain_bytes", "retain_s", "gone"),
    [
        (180, 100.0, []),
        (179, 100.0, [1]),
        (79, 100.0, [1, 2]),
        (-1, 0.0, [1, 2, 3]),
        (180, 50.0, [1]),
        (180, 5.0, [1, 2, 3]),
    ],
)
def test_the_oldest_go_until_the_rest_is_small_and_young_enough(
    retain_bytes: int, retain_s: float, gone: list[int]
) -> None:
    shipped, ages_s = {1: 100, 2: 50, 3: 30}, {1: 60.0, 2: 40.0, 3: 10.0}

    assert choose_evictions(shipped, ages_s, retain_bytes=retain_bytes, retain_s=retain_s) == gone
