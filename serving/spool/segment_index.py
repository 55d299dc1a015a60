"""What the spool knows of its segments: which exist, and how far they are read and shipped.

No files and no locks: `Spool` guards it, tests add it up by hand.
"""

from collections.abc import Mapping
from dataclasses import replace

from onlinerl.rollout_store.event_log import TopicIdPartition
from onlinerl.serving.spool.cursor import Cursor
from onlinerl.serving.spool.segment_files import Position


class SegmentIndex:
    """A segment is OPEN while it is written to, then CLOSED, then shipped, then taken away.

    `cursor` is before everything that is not shipped, `read_position` before everything that is not
    read; the first is never behind the second.
    """

    def __init__(self, sizes: Mapping[int, int], cursor: Cursor | None) -> None:
        self._sizes = dict(sizes)
        self._open: int | None = None
        self.next_number = max(self._sizes, default=0) + 1
        """Of the segment that is begun next."""
        self.cursor = self._valid(cursor or Cursor(self.oldest()))
        self.read_position = self.cursor.position
        self._torn: dict[Position, Position] = {}
        self._ends: dict[int, dict[TopicIdPartition, int]] = {}
        # What a former process shipped went to offsets that nobody noted.
        self._unknown = {n for n in self._sizes if Position(n, 0) < self.cursor.position}

    @property
    def backlog_bytes(self) -> int:
        """Bytes that are not shipped."""
        return self._bytes_after(self.cursor.position)

    @property
    def unread_bytes(self) -> int:
        """Bytes that are not read."""
        return self._bytes_after(self.read_position)

    @property
    def closed(self) -> dict[int, int]:
        """Sizes of the segments that nobody writes to, oldest first."""
        return {
            number: self._sizes[number] for number in sorted(self._sizes) if number != self._open
        }

    @property
    def open_bytes(self) -> int:
        """Size of the open segment; 0 when none is."""
        return 0 if self._open is None else self._sizes[self._open]

    def oldest(self) -> Position:
        """Where everything that is kept begins."""
        return Position(min(self._sizes, default=self.next_number), 0)

    def begin(self) -> None:
        """The next segment is open; it is known from its first byte on."""
        self._open = self.next_number
        self._sizes[self.next_number] = 0
        self.next_number += 1

    def grow(self, size: int) -> None:
        """The open segment has `size` bytes more."""
        assert self._open is not None
        self._sizes[self._open] += size

    def close(self) -> None:
        """Nothing is written to the open segment any more."""
        self._open = None

    def unread(self) -> tuple[Position, int] | None:
        """Where reading goes on, and the end of that segment; None when everything is read.

        Steps over segments that are read to their end.
        """
        for number in sorted(self._sizes):
            start = max(self.read_position, Position(number, 0))
            if start.segment == number and start.offset < self._sizes[number]:
                self.read_position = start
                return start, self._sizes[number]
        return None

    def after_cursor(self) -> list[tuple[Position, int]]:
        """Where what is not shipped begins, and the end of its segment, for every segment."""
        position = self.cursor.position
        return [
            (max(position, Position(number, 0)), self._sizes[number])
            for number in sorted(self._sizes)
            if number >= position.segment
        ]

    def skip_torn(self, start: Position, end: Position) -> None:
        """What lies from `start` to `end` cannot be read, so it is no backlog."""
        self._torn[start] = end
        self.read_position = end
        if self.cursor.position == start:
            self.cursor = replace(self.cursor, position=end)

    def ship(
        self,
        position: Position,
        *,
        topic_ids: Mapping[str, str],
        ends: Mapping[TopicIdPartition, int],
    ) -> None:
        """Everything before `position` was taken by the topics with these ids, before `ends`."""
        for start, size in self.after_cursor():
            if start.segment <= position.segment and start.offset < size and ends:
                noted = self._ends.setdefault(start.segment, {})
                noted.update({place: max(end, noted.get(place, 0)) for place, end in ends.items()})
        end = self._torn.get(position, position)
        self.cursor = Cursor(end, dict(topic_ids))

    def rewind(self, *, topic_ids: Mapping[str, str]) -> None:
        """Nothing that is kept counts as shipped or read any more."""
        self._torn.clear()
        self._ends.clear()
        self._unknown.clear()
        self.cursor = Cursor(self.oldest(), dict(topic_ids))
        self.read_position = self.cursor.position

    def shipped(self) -> dict[int, int]:
        """Sizes of the closed segments that are shipped, oldest first."""
        position = self.cursor.position
        return {
            number: size
            for number, size in self.closed.items()
            if number < position.segment or (number == position.segment and position.offset >= size)
        }

    def partitions(self) -> set[TopicIdPartition]:
        """Where records of the segments that are kept went."""
        return {place for ends in self._ends.values() for place in ends}

    def confirmed(self, stored: Mapping[TopicIdPartition, int]) -> dict[int, int]:
        """Sizes of the shipped segments of which every record lies before the offsets `stored`."""
        return {
            number: size
            for number, size in self.shipped().items()
            if number in self._ends
            and number not in self._unknown
            and all(stored.get(place, 0) >= end for place, end in self._ends[number].items())
        }

    def take(self, number: int) -> None:
        """A segment is to be deleted."""
        self._sizes.pop(number, None)
        self._ends.pop(number, None)
        self._unknown.discard(number)

    def resize(self, number: int, size: int, *, cursor: Cursor) -> None:
        """A segment was rewritten; nothing was read and not shipped meanwhile."""
        self._torn = {start: end for start, end in self._torn.items() if start.segment != number}
        if number in self._sizes:
            self._sizes[number] = size
        self.cursor = cursor
        self.read_position = cursor.position

    def _valid(self, cursor: Cursor) -> Cursor:
        """The cursor, or the next place that exists.

        A segment may be shorter than it was shipped: its tail dies with the machine, where the
        cursor was on disk before it.
        """
        position = cursor.position
        size = self._sizes.get(position.segment)
        if size is not None:
            offset = min(position.offset, size)
            return replace(cursor, position=replace(position, offset=offset))
        later = [number for number in self._sizes if number > position.segment]
        return replace(cursor, position=Position(min(later, default=self.next_number), 0))

    def _bytes_after(self, position: Position) -> int:
        total = sum(size for number, size in self._sizes.items() if number >= position.segment)
        return total - (position.offset if position.segment in self._sizes else 0)


def choose_evictions(
    shipped: Mapping[int, int],
    ages_s: Mapping[int, float],
    *,
    retain_bytes: int,
    retain_s: float,
) -> list[int]:
    """Which shipped segments to delete: the oldest, until what is left is small and young enough.

    Args:
        shipped: sizes of the segments, oldest first.
        ages_s: their ages; one whose age is not known counts as young.
        retain_bytes: bound on what is kept.
        retain_s: bound on its age.
    """
    kept = sum(shipped.values())
    found: list[int] = []
    for number, size in shipped.items():
        if kept <= retain_bytes and ages_s.get(number, 0.0) <= retain_s:
            break
        kept -= size
        found.append(number)
    return found
