"""The spool's segments in memory: which exist, and how far they are read and shipped.

It touches no files and takes no locks: `Spool` guards it.
"""

from collections.abc import Mapping
from dataclasses import replace

from onlinerl.rollout_store.event_log import TopicIdPartition
from onlinerl.serving.spool.cursor import Cursor
from onlinerl.serving.spool.segment_files import Position


class SegmentIndex:
    """A segment is OPEN while it is written to, then CLOSED, then shipped, then removed.

    `cursor` is before everything that is not shipped, and `read_position` before everything that is
    not read; `cursor` is never after `read_position`.

    Args:
        sizes: Bytes of the existing segments, by number.
        cursor: The stored cursor; None ships everything.
    """

    def __init__(self, sizes: Mapping[int, int], cursor: Cursor | None) -> None:
        self._sizes = dict(sizes)
        self._open: int | None = None
        self.next_number = max(self._sizes, default=0) + 1
        """Number of the segment that is begun next."""
        self.cursor = self._valid(cursor or Cursor(self.oldest()))
        self.read_position = self.cursor.position
        self._torn: dict[Position, Position] = {}
        self._ends: dict[int, dict[TopicIdPartition, int]] = {}
        # The offsets of what an earlier process shipped are not known.
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
        """Sizes of the closed segments, oldest first."""
        return {
            number: self._sizes[number] for number in sorted(self._sizes) if number != self._open
        }

    @property
    def open_bytes(self) -> int:
        """Size of the open segment; 0 when none is."""
        return 0 if self._open is None else self._sizes[self._open]

    def oldest(self) -> Position:
        """The beginning of the oldest segment."""
        return Position(min(self._sizes, default=self.next_number), 0)

    def begin(self) -> None:
        """Add the next segment and open it."""
        self._open = self.next_number
        self._sizes[self.next_number] = 0
        self.next_number += 1

    def grow(self, size: int) -> None:
        """Add `size` bytes to the open segment."""
        assert self._open is not None
        self._sizes[self._open] += size

    def close(self) -> None:
        """Close the open segment, if there is one."""
        self._open = None

    def unread(self) -> tuple[Position, int] | None:
        """The next place to read and the end of its segment; None when everything is read.

        It moves `read_position` past segments that are read to their end.
        """
        for number in sorted(self._sizes):
            start = max(self.read_position, Position(number, 0))
            if start.segment == number and start.offset < self._sizes[number]:
                self.read_position = start
                return start, self._sizes[number]
        return None

    def after_cursor(self) -> list[tuple[Position, int]]:
        """For every segment that is not shipped: the first place not shipped, and its end."""
        position = self.cursor.position
        return [
            (max(position, Position(number, 0)), self._sizes[number])
            for number in sorted(self._sizes)
            if number >= position.segment
        ]

    def skip_torn(self, start: Position, end: Position) -> None:
        """Skip the bytes from `start` to `end`, which cannot be read and are no backlog."""
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
        """Note that topics with these ids took everything before `position`, up to `ends`."""
        for start, size in self.after_cursor():
            if start.segment <= position.segment and start.offset < size and ends:
                known = self._ends.setdefault(start.segment, {})
                known.update({place: max(end, known.get(place, 0)) for place, end in ends.items()})
        end = self._torn.get(position, position)
        self.cursor = Cursor(end, dict(topic_ids))

    def rewind(self, *, topic_ids: Mapping[str, str]) -> None:
        """Forget what was shipped and read, so that every segment is shipped again."""
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
        """The partitions that hold shipped records of existing segments."""
        return {place for ends in self._ends.values() for place in ends}

    def confirmed(self, stored: Mapping[TopicIdPartition, int]) -> dict[int, int]:
        """Sizes of the shipped segments whose records all lie before the offsets `stored`."""
        return {
            number: size
            for number, size in self.shipped().items()
            if number in self._ends
            and number not in self._unknown
            and all(stored.get(place, 0) >= end for place, end in self._ends[number].items())
        }

    def remove(self, number: int) -> None:
        """Remove a segment whose file was deleted."""
        self._sizes.pop(number, None)
        self._ends.pop(number, None)
        self._unknown.discard(number)

    def resize(self, number: int, size: int, *, cursor: Cursor) -> None:
        """Set the size of a rewritten segment, while no records are read but not shipped."""
        self._torn = {start: end for start, end in self._torn.items() if start.segment != number}
        if number in self._sizes:
            self._sizes[number] = size
        self.cursor = cursor
        self.read_position = cursor.position

    def _valid(self, cursor: Cursor) -> Cursor:
        """The cursor, moved to the next place that exists.

        A segment may be shorter than the cursor says: when a machine crashes, the cursor may be on
        disk already and the end of the segment not yet.
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
    """Choose shipped segments to delete: the oldest, until the rest is small and young enough.

    Args:
        shipped: Sizes of the segments in bytes, oldest first.
        ages_s: Their ages in seconds; an unknown age counts as young.
        retain_bytes: Largest size of the rest.
        retain_s: Largest age of the rest, seconds.
    """
    num_bytes = sum(shipped.values())
    evicted: list[int] = []
    for number, size in shipped.items():
        if num_bytes <= retain_bytes and ages_s.get(number, 0.0) <= retain_s:
            break
        num_bytes -= size
        evicted.append(number)
    return evicted
