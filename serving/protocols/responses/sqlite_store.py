"""Stored responses in a SQLite file: they survive a restart and never exceed their bounds.

One thread writes and one reads, each with its own connection (WAL: neither waits for the other).
Other processes may open the same file, e.g. to erase a user.
"""

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from typing_extensions import override

from onlinerl.errors import ConfigError, ServiceUnavailable
from onlinerl.serving.config import ResponsesConfig
from onlinerl.serving.encoding.json import to_json
from onlinerl.serving.protocols.responses.sqlite_thread import SqliteThread, connect
from onlinerl.serving.protocols.responses.store import ResponseStore, StoredResponse

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT NOT NULL,
    response_id TEXT NOT NULL,
    previous_id TEXT,
    session_id TEXT NOT NULL,
    user TEXT,
    created_at REAL NOT NULL,
    num_bytes INTEGER NOT NULL,
    input_items TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (tenant, response_id)
);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (created_at);
CREATE INDEX IF NOT EXISTS responses_by_user ON responses (tenant, user);
CREATE TABLE IF NOT EXISTS totals (num_rows INTEGER NOT NULL, num_bytes INTEGER NOT NULL);
INSERT INTO totals SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM totals);
CREATE TRIGGER IF NOT EXISTS count_in AFTER INSERT ON responses BEGIN
    UPDATE totals SET num_rows = num_rows + 1, num_bytes = num_bytes + NEW.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS count_out AFTER DELETE ON responses BEGIN
    UPDATE totals SET num_rows = num_rows - 1, num_bytes = num_bytes - OLD.num_bytes;
END;
"""

_COLUMNS = "response_id, previous_id, session_id, user, created_at, input_items, body"

_CHAIN = f"""
WITH RECURSIVE chain AS (
    SELECT 0 AS depth, * FROM responses WHERE tenant = :tenant AND response_id = :response_id
    UNION ALL
    SELECT chain.depth + 1, earlier.* FROM chain JOIN responses AS earlier
    ON earlier.tenant = :tenant AND earlier.response_id = chain.previous_id
)
SELECT {_COLUMNS} FROM chain WHERE created_at > :since ORDER BY depth DESC
"""

_EXPIRE = "DELETE FROM responses WHERE created_at <= ?"
_FORGET_USER = "DELETE FROM responses WHERE tenant = ? AND user = ?"
_FORGET_SESSIONS = """
DELETE FROM responses WHERE tenant = ? AND session_id IN (SELECT value FROM json_each(?))
"""


class SqliteResponseStore(ResponseStore):
    """The `ResponseStore` of a gateway; creates the file if there is none.

    At most `config.max_waiting` calls wait for each of the two threads, and each call gives up
    after `timeout_s`. Responses that are evicted, expired or deleted are overwritten in the file,
    not only unlinked.

    Raises:
        ConfigError: the file cannot be created, or is not of this kind.
    """

    def __init__(
        self,
        path: Path,
        config: ResponsesConfig,
        *,
        timeout_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._now = now
        _prepare(path, timeout_s=timeout_s, expired=now() - config.retain_s)
        self._writer = SqliteThread(path, timeout_s=timeout_s, max_waiting=config.max_waiting)
        self._reader = SqliteThread(path, timeout_s=timeout_s, max_waiting=config.max_waiting)

    @override
    async def put(self, response: StoredResponse, *, tenant: str) -> bool:
        input_items = to_json(response.input_items).decode()
        body = to_json(response.body).decode()
        num_bytes = len(input_items) + len(body)
        if num_bytes > self._config.max_bytes or not self._config.max_rows:
            return False
        row = (
            tenant,
            response.response_id,
            response.previous_id,
            response.session_id,
            response.user,
            response.created_at,
            num_bytes,
            input_items,
            body,
        )
        expired = self._now() - self._config.retain_s

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO responses VALUES (?,?,?,?,?,?,?,?,?)", row)
            connection.execute(_EXPIRE, (expired,))
            _evict(connection, config=self._config)

        await self._writer.run(write)
        return True

    @override
    async def chain(self, response_id: str, *, tenant: str) -> Sequence[StoredResponse]:
        values = {
            "tenant": tenant,
            "response_id": response_id,
            "since": self._now() - self._config.retain_s,
        }
        rows = await self._reader.run(lambda sqlite: sqlite.execute(_CHAIN, values).fetchall())
        chain = [_response(*row) for row in rows]
        return [] if chain and chain[0].previous_id is not None else chain

    @override
    async def get(self, response_id: str, *, tenant: str) -> StoredResponse | None:
        query = (
            f"SELECT {_COLUMNS} FROM responses "
            "WHERE tenant = ? AND response_id = ? AND created_at > ?"
        )
        values = (tenant, response_id, self._now() - self._config.retain_s)
        row = await self._reader.run(lambda sqlite: sqlite.execute(query, values).fetchone())
        return None if row is None else _response(*row)

    @override
    async def delete(self, response_id: str, *, tenant: str) -> bool:
        query = "DELETE FROM responses WHERE tenant = ? AND response_id = ?"
        values = (tenant, response_id)
        return await self._writer.run(lambda sqlite: sqlite.execute(query, values).rowcount) > 0

    @override
    async def forget_user(self, user: str, *, tenant: str) -> int:
        values = (tenant, user)
        return await self._writer.run(lambda sqlite: sqlite.execute(_FORGET_USER, values).rowcount)

    @override
    async def close(self) -> None:
        """Finish the waiting calls and close the file."""
        await asyncio.to_thread(self._reader.close)
        await asyncio.to_thread(self._writer.close)


def forget_user(
    path: Path, *, tenant: str, user: str, sessions: Iterable[str] = (), timeout_s: float = 30.0
) -> int:
    """Delete every response of a user, from another process; returns their number.

    Args:
        path: File of a gateway, which may be running; a missing file holds no responses.
        tenant: Tenant of the user.
        user: Keyed hash of the user.
        sessions: Sessions whose responses are deleted too, for any user.
        timeout_s: Seconds to wait for another writer.

    Raises:
        ServiceUnavailable: the file could not be written in that time, or a reader keeps the
            write-ahead log from being emptied; call again to finish.
    """
    if not path.exists():
        return 0
    try:
        connection = connect(path, timeout_s=timeout_s)
        try:
            with connection:
                number = connection.execute(_FORGET_USER, (tenant, user)).rowcount
                among = (tenant, json.dumps(sorted(sessions)))
                number += connection.execute(_FORGET_SESSIONS, among).rowcount
            # Deleted rows must leave the write-ahead log too.
            busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise ServiceUnavailable(
                    f"{path}-wal is still read after {timeout_s:g} s and may hold deleted responses"
                )
            return number
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise ServiceUnavailable(f"the stored responses in {path}: {error}") from error


def _prepare(path: Path, *, timeout_s: float, expired: float) -> None:
    """Create the file and its tables if they are missing, and delete expired responses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # it holds conversations
        connection = connect(path, timeout_s=timeout_s)
        connection.executescript(_SCHEMA)
        with connection:
            connection.execute(_EXPIRE, (expired,))
        connection.close()
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"[gateway.responses].path: {path} cannot be used ({error}): name another file"
        ) from error


def _evict(connection: sqlite3.Connection, *, config: ResponsesConfig) -> None:
    """Delete the oldest responses until both bounds hold."""
    while True:
        num_rows, num_bytes = connection.execute(
            "SELECT num_rows, num_bytes FROM totals"
        ).fetchone()
        if num_rows <= config.max_rows and num_bytes <= config.max_bytes:
            return
        connection.execute(
            "DELETE FROM responses WHERE rowid IN "
            "(SELECT rowid FROM responses ORDER BY created_at, rowid LIMIT ?)",
            (max(num_rows - config.max_rows, 1),),
        )


def _response(
    response_id: str,
    previous_id: str | None,
    session_id: str,
    user: str | None,
    created_at: float,
    input_items: str,
    body: str,
) -> StoredResponse:
    return StoredResponse(
        response_id=response_id,
        previous_id=previous_id,
        session_id=session_id,
        user=user,
        created_at=created_at,
        input_items=tuple(json.loads(input_items)),
        body=json.loads(body),
    )
