"""What leaves the gateway, and the seam through which it leaves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from onlinerl.errors import SpoolFull


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record of the event log."""

    topic: str
    key: str
    """Records of one key stay in order."""
    value: bytes


class EventSink(Protocol):
    """Takes records without making anybody wait."""

    def put(self, record: Record, *, on_stored: Callable[[], None] | None = None) -> None:
        """Take a record; `on_stored` is called, from any thread, when a crash cannot lose it.

        Raises:
            SpoolFull: at its bound; the record was not taken.
        """


class MemorySink:
    """An `EventSink` that remembers what it was given."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.full = False

    def put(self, record: Record, *, on_stored: Callable[[], None] | None = None) -> None:
        """Remember a record unless `full` is set."""
        if self.full:
            raise SpoolFull("the sink is full")
        self.records.append(record)
        if on_stored is not None:
            on_stored()

    def of(self, topic: str) -> list[bytes]:
        """The values of one topic, in order."""
        return [record.value for record in self.records if record.topic == topic]
