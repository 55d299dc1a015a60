"""A user is taken out of the spool: out of what waits for the log, and out of what is kept.

`forget_user` is for a gateway that is stopped and for one that runs: the first is changed here, the
second finds a request in its folder and does it between two batches.
"""

import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from onlinerl.errors import ConfigError, LeaseHeld, ServiceUnavailable
from onlinerl.serving.interaction.events import Record
from onlinerl.serving.spool.cursor import Cursor, load_cursor, store_cursor
from onlinerl.serving.spool.segment_files import (
    Position,
    lock_folder,
    pack,
    read_segment,
    segment_numbers,
    segment_path,
)
from onlinerl.serving.spool.shelf import Shelf

logger = logging.getLogger(__name__)

_USER_HASH = re.compile(r"[0-9a-f]{16,64}")
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Person:
    """Whose events go."""

    user_hash: str
    """Keyed hash, as it is logged."""
    tenant: str = ""
    """Where `names` are looked for."""
    names: frozenset[str] = frozenset()
    """Sessions and interactions that go as a whole, whoever their events are of."""

    def owns(self, record: Record) -> bool:
        """Whether an event is of the person, or about what goes with them."""
        if not self.names and self.user_hash.encode() not in record.value:
            return False
        try:
            event = json.loads(record.value)
        except ValueError:
            return False
        return isinstance(event, dict) and (
            event.get("user") == self.user_hash
            or (event.get("tenant") == self.tenant and not self.names.isdisjoint(_named(event)))
        )


@dataclass(frozen=True, kw_only=True)
class Forgotten:
    """What became of a segment."""

    num_records: int
    """Events of the user."""
    num_waiting: int
    """Of these, how many were not shipped."""
    size: int
    """Of the segment without them, bytes."""
    cursor: Cursor
    """The same place as before."""


def forget_user(
    folder: Path,
    user_hash: str,
    *,
    tenant: str = "",
    names: Iterable[str] = (),
    timeout_s: float = 60.0,
) -> int:
    """Take every event of a user out of a spool; how many there were.

    Args:
        folder: of the spool; one that does not exist holds nothing.
        user_hash: keyed hash of the user, as it is logged.
        tenant: of the sessions and interactions in `names`.
        names: sessions and interactions of which every event goes, whoever it is of.
        timeout_s: for a running gateway to do it.

    Raises:
        ConfigError: when `user_hash` is no hash.
        ServiceUnavailable: when a gateway uses the spool and did not do it in time; it still will.
    """
    if _USER_HASH.fullmatch(user_hash) is None:
        raise ConfigError(f"{user_hash!r} is no hash of a user: give the value that is logged")
    if not folder.is_dir():
        return 0
    ask, done = _paths(folder, user_hash)
    person = Person(user_hash=user_hash, tenant=tenant, names=frozenset(names))
    token = secrets.token_hex(8)
    asked = False
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            lock = lock_folder(folder)
        except LeaseHeld:
            if not asked:
                asked = True
                _write(ask, _request(person, token=token))
            num = _answer(done, token=token)
            if num is not None:
                return num
        else:
            with lock:
                num = _forget_here(folder, person)
                ask.unlink(missing_ok=True)
                done.unlink(missing_ok=True)
                return num
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"the gateway that uses the spool {folder} did not take the user out within "
                f"{timeout_s:g} s; it does so as soon as its disk lets it"
            )
        time.sleep(_POLL_S)


def asked_to_forget(folder: Path, *, told: set[str]) -> Iterator[tuple[Person, str]]:
    """Users that the gateway of this folder is asked to forget, each with the asker's token.

    A request that cannot be read is passed over: it may be readable next time. `told` holds those
    that were warned of.
    """
    for path in sorted((folder / "forget").glob("*.ask")):
        if _USER_HASH.fullmatch(path.stem):
            try:
                asked = json.loads(path.read_bytes())
                names = frozenset(asked["names"])
                person = Person(user_hash=path.stem, tenant=asked["tenant"], names=names)
                token = str(asked["token"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                if path.name not in told:
                    told.add(path.name)
                    reason = type(error).__name__
                    logger.warning("%s, to forget a user, cannot be read: %s", path.name, reason)
                continue
            yield person, token


def note_forgotten(folder: Path, user_hash: str, *, token: str, num_records: int) -> None:
    """Tell whoever asked that a user is forgotten."""
    ask, done = _paths(folder, user_hash)
    _write(done, f"{token} {num_records}".encode())
    ask.unlink(missing_ok=True)


def forget_in_segment(
    folder: Path, number: int, *, end: int, person: Person, cursor: Cursor
) -> Forgotten | None:
    """Rewrite a segment that nobody writes to without a user's events; None when it has none.

    What is torn goes too: nobody can tell whose it is. A crash in between loses nothing: at worst
    some events are shipped twice.
    """
    shipped_to = _shipped_to(cursor.position, number)
    kept: list[bytes] = []
    num_records = num_waiting = intact = moved_to = size = 0
    try:
        for stored in read_segment(folder, Position(number, 0), end=end):
            intact = stored.end.offset
            if person.owns(stored.record):
                num_records += 1
                num_waiting += intact > shipped_to
                continue
            kept.append(pack(stored.record))
            size += len(kept[-1])
            if intact <= shipped_to:
                moved_to = size
    except FileNotFoundError:
        return None  # dropped meanwhile
    if not num_records and intact == end:
        return None
    if cursor.position.segment == number:
        # Until the new file is there no place in it is right but its beginning.
        store_cursor(folder, replace(cursor, position=Position(number, 0)))
        cursor = replace(cursor, position=Position(number, moved_to))
    _rewrite(segment_path(folder, number), b"".join(kept))
    store_cursor(folder, cursor)
    return Forgotten(num_records=num_records, num_waiting=num_waiting, size=size, cursor=cursor)


def _forget_here(folder: Path, person: Person) -> int:
    """In a folder that is locked."""
    sizes = {n: segment_path(folder, n).stat().st_size for n in segment_numbers(folder)}
    cursor = Shelf(sizes, load_cursor(folder)).cursor
    num = 0
    for number, size in sizes.items():
        found = forget_in_segment(folder, number, end=size, person=person, cursor=cursor)
        if found is not None:
            num += found.num_records
            cursor = found.cursor
    return num


def _shipped_to(position: Position, number: int) -> int:
    """Bytes of a segment that are shipped; more than any for one that is shipped whole."""
    if number == position.segment:
        return position.offset
    return sys.maxsize if number < position.segment else 0


def _named(event: Mapping[str, object]) -> Iterator[str]:
    """Sessions and interactions that an event is of, goes on from or is about."""
    for field in ("session_id", "interaction_id", "parent_id"):
        name = event.get(field)
        if isinstance(name, str):
            yield name


def _request(person: Person, *, token: str) -> bytes:
    content = {"token": token, "tenant": person.tenant, "names": sorted(person.names)}
    return json.dumps(content).encode()


def _rewrite(path: Path, data: bytes) -> None:
    """Replace a file in one step; its age stays, so that it is kept no longer than before."""
    status = path.stat()
    _write(path, data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    staging = path.with_name(f"{path.name}.tmp")
    with staging.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _answer(done: Path, *, token: str) -> int | None:
    """What the gateway that runs answered to this request."""
    try:
        told, _, num = done.read_text(encoding="ascii").partition(" ")
    except FileNotFoundError:
        return None
    if told != token:
        return None
    done.unlink(missing_ok=True)
    return int(num)


def _paths(folder: Path, user_hash: str) -> tuple[Path, Path]:
    base = folder / "forget"
    return base / f"{user_hash}.ask", base / f"{user_hash}.done"
