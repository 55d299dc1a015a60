"""The SQLite file behind the ledger and the lease: its tables, and how it is written.

One file for both, so that a write of the ledger can check in its own transaction that the lease
is still held. A connection lives for one operation: threads and forks share nothing.
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
CREATE TABLE IF NOT EXISTS leases (
  name TEXT PRIMARY KEY,
  fence INTEGER NOT NULL,
  host TEXT,
  pid INTEGER,
  started TEXT,
  taken_at REAL,
  seen_at REAL
);
"""


class Database:
    """Opens the file; creates it and its tables when missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(self._connect()) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_TABLES)

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

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection
