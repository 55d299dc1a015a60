"""Generates `docs/tables.md` from the schema and the views.

`python -m onlinerl.rollout_store.reference.tables_page > docs/tables.md`
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel

from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.reference.ddl import create_table
from onlinerl.rollout_store.reference.view_columns import VIEW_COLUMNS, VIEWS_ABOUT
from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.views.connection import VIEWS, connect

_TITLE = """\
# Tables and views

`make docs` generates this page; a test fails when it is out of date.

The tables are Delta Lake tables under `[store].root`, partitioned by `ingest_date`. Read them
through the views with `onlinerl query "SELECT …"`. A view has the same columns as its table,
without rows that were stored twice. [The cookbook](cookbook.md) has example queries, and
[rewards.md](rewards.md) explains how feedback becomes a number.
"""


def tables_page() -> str:
    """The page as Markdown."""
    with TemporaryDirectory() as folder:
        store = DeltaStore(folder)
        with connect(store, rewards=RewardsConfig()) as connection:
            types = {
                view: connection.execute(
                    "SELECT column_name, data_type FROM duckdb_columns() "
                    "WHERE table_name = ? ORDER BY column_index",
                    [view],
                ).fetchall()
                for view in VIEWS
            }
    sections = [_TITLE]
    for view in VIEWS:
        sections.append("\n".join(_section(view, types[view])))
    return "\n".join(sections)


def _section(view: str, columns: list[tuple[str, str]]) -> Iterator[str]:
    row_type = TABLES.get(view)
    about = VIEWS_ABOUT[view] if row_type is None else row_type.__doc__ or ""
    about = " ".join(about.split()).removeprefix(f"Table `{view}`: ")
    yield f"## `{view}`\n\n{about[0].upper()}{about[1:]}\n"
    yield "| column | type | |\n|---|---|---|"
    for name, data_type in columns:
        known = VIEW_COLUMNS[view][name] if row_type is None else _field_text(row_type, name)
        yield f"| `{name}` | `{data_type}` | {known} |"
    yield ""
    if row_type is not None:
        yield from _ddl(view)


def _ddl(table: str) -> Iterator[str]:
    yield "<details><summary>As DDL</summary>\n"
    yield f"```sql\n-- DuckDB\n{create_table(table, dialect='duckdb')}\n```\n"
    yield f"```sql\n-- Spark\n{create_table(table, dialect='spark')}\n```\n"
    yield "</details>\n"


def _field_text(row_type: type[BaseModel], name: str) -> str:
    return " ".join((row_type.model_fields[name].description or "").split())


if __name__ == "__main__":
    page = tables_page()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page, encoding="utf-8")
    else:
        sys.stdout.write(page)
