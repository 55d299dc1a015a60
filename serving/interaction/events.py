"""The records that leave the gateway for the event log, and the seam that takes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from onlinerl.errors import SpoolFull


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record of the event log."""

    topic: str
    key: str
    """Records of one key stay in order."""
    value: bytes


class EventSink(Protocol):
    """Takes records without waiting for storage."""

    def put(self, record: Record, *, on_stored: Callable[[], None] | None = None) -> None:
        """Take a record.

        Args:
            record: The record.
            on_stored: Called from any thread once a crash of the process cannot lose the record.

        Raises:
            SpoolFull: when the sink is at its bound and did not take the record.
        """


class MemorySink(EventSink):
    """Twin of the spool for tests; it keeps every record in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.full = False
        """Whether `put` refuses records."""

    @override
    def put(self, record: Record, *, on_stored: Callable[[], None] | None = None) -> None:
        if self.full:
            raise SpoolFull("the sink is full")
        self.records.append(record)
        if on_stored is not None:
            on_stored()

    def of(self, topic: str) -> list[bytes]:
        """The values of one topic, in order."""
        return [record.value for record in self.records if record.topic == topic]
