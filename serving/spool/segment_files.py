"""The spool's segment files: records with a checksum each, which are only appended to.

One process writes a segment, and a restarted process begins the next one. A torn record is
therefore always at the end of a segment.
"""

import fcntl
import json
import logging
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from onlinerl.errors import LeaseHeld
from onlinerl.serving.encoding.json import to_json
from onlinerl.serving.interaction.events import Record

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<II")
"""Length and CRC-32 of the payload that follows."""
_SUFFIX = ".segment"


@dataclass(frozen=True, order=True)
class Position:
    """A place between two records: number of the segment, and offset in bytes."""

    segment: int
    offset: int


@dataclass(frozen=True)
class Stored:
    """A record in a segment, and the place after it."""

    record: Record
    end: Position


def pack(record: Record) -> bytes:
    """The bytes of a record in a segment."""
    head = to_json([record.topic, record.key])
    payload = head + b"\n" + record.value
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def unpack(payload: bytes) -> Record:
    """The record in a payload whose checksum was verified."""
    head, _, value = payload.partition(b"\n")
    topic, key = json.loads(head)
    return Record(topic=topic, key=key, value=value)


def segment_path(folder: Path, number: int) -> Path:
    """File of one segment."""
    return folder / f"{number:012d}{_SUFFIX}"


def segment_numbers(folder: Path) -> list[int]:
    """The segments that exist, oldest first."""
    return sorted(int(path.stem) for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdigit())


def remove_temporary_files(folder: Path) -> None:
    """Delete what a process left that was killed while it replaced a file of a spool.

    It may hold events of users, and no later erasure would look into it. Only for the process that
    has locked the folder.
    """
    for path in folder.glob("*.tmp"):
        path.unlink(missing_ok=True)


def read_segment(folder: Path, start: Position, *, end: int) -> Iterator[Stored]:
    """The records from `start` up to byte `end` of that segment.

    It stops at the first record that is torn or has a wrong checksum, and logs an error, because
    the records after it cannot be found.
    """
    path = segment_path(folder, start.segment)
    with path.open("rb") as file:
        file.seek(start.offset)
        position = start.offset
        while position < end:
            next_record = _read_record(file)
            if next_record is None:
                logger.error(
                    "a spool segment ends in a torn record",
                    extra={"path": str(path), "offset": position, "lost_bytes": end - position},
                )
                return
            record, size = next_record
            position += size
            yield Stored(record, Position(start.segment, position))


def count_records(folder: Path, start: Position, *, end: int) -> int:
    """Count the records from `start` to byte `end`, reading only their lengths."""
    num = 0
    try:
        with segment_path(folder, start.segment).open("rb") as file:
            position = start.offset
            while position < end:
                file.seek(position)
                head = file.read(_HEAD.size)
                if len(head) < _HEAD.size:
                    break
                length, _ = _HEAD.unpack(head)
                position += _HEAD.size + length
                if length == 0 or position > end:
                    break
                num += 1
    except FileNotFoundError:
        return num
    return num


def lock_folder(folder: Path) -> BinaryIO:
    """Lock a spool for this process until the returned file is closed.

    Raises:
        LeaseHeld: when another process has locked it.
    """
    file = (folder / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise LeaseHeld(f"another gateway uses the spool {folder}") from error
    return file


def _read_record(file: BinaryIO) -> tuple[Record, int] | None:
    """The next record and its size in the file; None when it is torn."""
    payload = _read_payload(file)
    if payload is None:
        return None
    try:
        return unpack(payload), _HEAD.size + len(payload)
    except ValueError:
        # A crash may leave zeros in a file, which read as an empty payload with a valid checksum.
        return None


def _read_payload(file: BinaryIO) -> bytes | None:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, checksum = _HEAD.unpack(head)
    payload = file.read(length)
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None
