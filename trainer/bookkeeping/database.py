"""The SQLite file behind the ledger: its tables, and how it is written.

It also keeps the highest fence of each lease, so that a write of the ledger can refuse a lower one
in its own transaction. A connection lives for one operation: threads and forks share nothing.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

BUSY_TIMEOUT_S = 10.0

_TABLES = """
CREATE TABLE IF NOT EXISTS cycles (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  policy TEXT NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('planned', 'trained', 'registered', 'failed')),
  attempts INTEGER NOT NULL DEFAULT 0,
  plan TEXT NOT NULL,
  planned_at REAL NOT NULL,
  finished_at REAL,
  version INTEGER,
  reason TEXT,
  baselines TEXT
);
CREATE TABLE IF NOT EXISTS trained (
  interaction_id TEXT NOT NULL,
  choice_index INTEGER NOT NULL,
  cycle INTEGER NOT NULL REFERENCES cycles (number),
  PRIMARY KEY (interaction_id, choice_index)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS fences (
  name TEXT PRIMARY KEY,
  fence INTEGER NOT NULL
) WITHOUT ROWID;
"""


class Database:
    """Opens the file; creates it and its tables when missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(self._connect()) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_TABLES)
            has_leases = _has_leases(connection)
        if has_leases:
            self._replace_leases()

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection for queries."""
        with closing(self._connect()) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed and synced at the end, rolled back on an error."""
        with closing(self._connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def _replace_leases(self) -> None:
        """Keep the fences of a file that also held the leases themselves."""
        with self.write() as connection:
            if _has_leases(connection):  # unless another process was faster
                connection.execute("INSERT OR IGNORE INTO fences SELECT name, fence FROM leases")
                connection.execute("DROP TABLE leases")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection


def _has_leases(connection: sqlite3.Connection) -> bool:
    found = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'leases'")
    return found.fetchone() is not None
