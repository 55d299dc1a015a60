"""Takes a user out of the spool: out of what waits for the log, and out of what is kept.

If the gateway is stopped, `forget_user` edits its spool directly. If it is running, `forget_user`
leaves a request file, which the gateway handles between two batches.
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
from onlinerl.process.files import replace_file
from onlinerl.serving.interaction.events import Record
from onlinerl.serving.spool.cursor import Cursor, load_cursor, store_cursor
from onlinerl.serving.spool.segment_files import (
    Position,
    lock_folder,
    pack,
    read_segment,
    remove_temporary_files,
    segment_numbers,
    segment_path,
)
from onlinerl.serving.spool.segment_index import SegmentIndex

logger = logging.getLogger(__name__)

_USER_HASH = re.compile(r"[0-9a-f]{16,64}")
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Person:
    """The user whose events are removed."""

    user_hash: str
    """Keyed hash, as it is logged."""
    tenant: str = ""
    """Tenant of the sessions and interactions in `names`."""
    names: frozenset[str] = frozenset()
    """Sessions and interactions that are removed as a whole, whichever user their events have."""

    def owns(self, record: Record) -> bool:
        """Whether an event is the user's, or belongs to a session or interaction in `names`."""
        if not self.names and self.user_hash.encode() not in record.value:
            return False
        try:
            event = json.loads(record.value)
        except ValueError:
            return False
        return isinstance(event, dict) and (
            event.get("user") == self.user_hash
            or (event.get("tenant") == self.tenant and not self.names.isdisjoint(_names_in(event)))
        )


@dataclass(frozen=True, kw_only=True)
class RewrittenSegment:
    """A segment without the user's events."""

    num_records: int
    """Events of the user that it held."""
    num_waiting: int
    """How many of these were not shipped."""
    size: int
    """Its new size, bytes."""
    cursor: Cursor
    """The spool's cursor, at the same place as before."""


def forget_user(
    folder: Path,
    user_hash: str,
    *,
    tenant: str = "",
    names: Iterable[str] = (),
    timeout_s: float = 60.0,
) -> int:
    """Remove every event of a user from a spool, and return how many there were.

    Args:
        folder: Folder of the spool; one that does not exist holds nothing.
        user_hash: Keyed hash of the user, as it is logged.
        tenant: Tenant of the sessions and interactions in `names`.
        names: Sessions and interactions of which every event is removed, whichever user it has.
        timeout_s: How long a running gateway may take.

    Raises:
        ConfigError: when `user_hash` is not a hash.
        ServiceUnavailable: when a running gateway did not do it in time; it will do it later.
    """
    if _USER_HASH.fullmatch(user_hash) is None:
        raise ConfigError(f"{user_hash!r} is no hash of a user: give the value that is logged")
    if not folder.is_dir():
        return 0
    person = Person(user_hash=user_hash, tenant=tenant, names=frozenset(names))
    request = _Request(folder, person)
    deadline = time.monotonic() + timeout_s
    while True:
        num = _forget_when_stopped(folder, person)
        if num is not None:
            request.withdraw()
            return num
        num = request.poll()
        if num is not None:
            return num
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"the gateway that uses the spool {folder} did not take the user out within "
                f"{timeout_s:g} s; it does so as soon as its disk lets it"
            )
        time.sleep(_POLL_S)


class _Request:
    """A request file for the gateway that uses the spool, and the file with its answer."""

    def __init__(self, folder: Path, person: Person) -> None:
        self._ask, self._done = _paths(folder, person.user_hash)
        self._person = person
        self._token = secrets.token_hex(8)
        """Tells the answer to this request from one that was left behind."""
        self._is_written = False

    def poll(self) -> int | None:
        """Write the request once, then look for its answer: how many events were removed."""
        if not self._is_written:
            self._is_written = True
            _write(self._ask, self._content())
        try:
            token, _, num = self._done.read_text(encoding="ascii").partition(" ")
        except FileNotFoundError:
            return None
        if token != self._token:
            return None
        self._done.unlink(missing_ok=True)
        return int(num)

    def withdraw(self) -> None:
        """Remove the request and its answer."""
        self._ask.unlink(missing_ok=True)
        self._done.unlink(missing_ok=True)

    def _content(self) -> str:
        person = self._person
        return json.dumps(
            {"token": self._token, "tenant": person.tenant, "names": sorted(person.names)}
        )


def read_requests(folder: Path, *, warned: set[str]) -> Iterator[tuple[Person, str]]:
    """The users that the gateway of this folder is asked to forget, each with the request's token.

    A request that cannot be read is skipped, because it may be readable next time. `warned` holds
    the file names that a warning was logged for.
    """
    for path in sorted((folder / "forget").glob("*.ask")):
        if _USER_HASH.fullmatch(path.stem):
            try:
                content = json.loads(path.read_bytes())
                names = frozenset(content["names"])
                person = Person(user_hash=path.stem, tenant=content["tenant"], names=names)
                token = str(content["token"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                if path.name not in warned:
                    warned.add(path.name)
                    reason = type(error).__name__
                    logger.warning("%s, to forget a user, cannot be read: %s", path.name, reason)
                continue
            yield person, token


def answer_request(folder: Path, user_hash: str, *, token: str, num_records: int) -> None:
    """Tell the process that asked that the user is forgotten."""
    ask, done = _paths(folder, user_hash)
    _write(done, f"{token} {num_records}")
    ask.unlink(missing_ok=True)


def forget_in_segment(
    folder: Path, number: int, *, end: int, person: Person, cursor: Cursor
) -> RewrittenSegment | None:
    """Rewrite a closed segment without a user's events; None when it holds none.

    A torn tail is removed too, because nobody can tell whose it is. A crash in between loses
    nothing: at worst some events are shipped twice.
    """
    shipped_to = _shipped_to(cursor.position, number)
    rest: list[bytes] = []
    num_records = num_waiting = intact = moved_to = size = 0
    try:
        for stored in read_segment(folder, Position(number, 0), end=end):
            intact = stored.end.offset
            if person.owns(stored.record):
                num_records += 1
                num_waiting += intact > shipped_to
                continue
            rest.append(pack(stored.record))
            size += len(rest[-1])
            if intact <= shipped_to:
                moved_to = size
    except FileNotFoundError:
        return None  # deleted meanwhile
    if not num_records and intact == end:
        return None
    if cursor.position.segment == number:
        # Until the new file is in place, its beginning is the only position that is valid in both.
        store_cursor(folder, replace(cursor, position=Position(number, 0)))
        cursor = replace(cursor, position=Position(number, moved_to))
    _rewrite(segment_path(folder, number), b"".join(rest))
    store_cursor(folder, cursor)
    return RewrittenSegment(
        num_records=num_records, num_waiting=num_waiting, size=size, cursor=cursor
    )


def _forget_when_stopped(folder: Path, person: Person) -> int | None:
    """Remove the user's events from a spool that no gateway uses; None when one uses it."""
    try:
        lock = lock_folder(folder)
    except LeaseHeld:
        return None
    with lock:
        remove_temporary_files(folder)
        sizes = {n: segment_path(folder, n).stat().st_size for n in segment_numbers(folder)}
        cursor = SegmentIndex(sizes, load_cursor(folder)).cursor
        num = 0
        for number, size in sizes.items():
            segment = forget_in_segment(folder, number, end=size, person=person, cursor=cursor)
            if segment is not None:
                num += segment.num_records
                cursor = segment.cursor
        return num


def _shipped_to(position: Position, number: int) -> int:
    """Bytes of a segment that are shipped; larger than any file for one that is shipped whole."""
    if number == position.segment:
        return position.offset
    return sys.maxsize if number < position.segment else 0


def _names_in(event: Mapping[str, object]) -> Iterator[str]:
    """The session and the interactions that an event belongs to, extends or is about."""
    for field in ("session_id", "interaction_id", "parent_id"):
        name = event.get(field)
        if isinstance(name, str):
            yield name


def _rewrite(path: Path, data: bytes) -> None:
    """Replace a segment and keep its age, so that it is not kept longer than before."""
    status = path.stat()
    replace_file(path, data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(exist_ok=True)
    replace_file(path, content)


def _paths(folder: Path, user_hash: str) -> tuple[Path, Path]:
    """The file of the request and the file of its answer."""
    base = folder / "forget"
    return base / f"{user_hash}.ask", base / f"{user_hash}.done"
