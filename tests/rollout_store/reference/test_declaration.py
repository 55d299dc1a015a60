"""Every row is declared once: events, Arrow, Delta, DDL, views and docs say the same."""

import json
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args

import duckdb
import pyarrow as pa
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.reference.ddl import create_table
from onlinerl.rollout_store.reference.tables_page import tables_page
from onlinerl.rollout_store.schema import (
    TABLES,
    Completion,
    FeedbackEvent,
    FeedbackRow,
    InteractionEvent,
    InteractionRow,
)
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import schema_of
from onlinerl.rollout_store.views.connection import connect

PAGE = tables_page()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DeltaStore:
    store = DeltaStore(str(tmp_path_factory.mktemp("tables")))
    store.create()
    return store


def test_every_field_of_an_event_is_a_column_and_optional_in_both_or_neither() -> None:
    events: dict[type[BaseModel], Mapping[str, FieldInfo]] = {
        InteractionRow: {**InteractionEvent.model_fields, **Completion.model_fields},
        FeedbackRow: FeedbackEvent.model_fields,
    }
    for row_type, fields in events.items():
        schema = schema_of(row_type)
        for name, field in fields.items():
            if name in ("schema_version", "choices"):
                continue
            assert row_type.model_fields[name].annotation == field.annotation
            assert schema.field(name).nullable == (NoneType in get_args(field.annotation))


@pytest.mark.parametrize("table", TABLES)
def test_a_stored_table_has_the_columns_of_its_row_model(store: DeltaStore, table: str) -> None:
    stored = pa.schema(store.delta(table).schema().to_arrow())

    assert stored.names == schema_of(TABLES[table]).names == list(TABLES[table].model_fields)
    for field in schema_of(TABLES[table]):
        assert stored.field(field.name).nullable == field.nullable


@pytest.mark.parametrize("table", TABLES)
def test_the_ddl_for_duckdb_makes_the_columns_of_the_view(store: DeltaStore, table: str) -> None:
    with connect(store, rewards=RewardsConfig()) as connection:
        view = connection.execute(f"DESCRIBE {table}").fetchall()
    with duckdb.connect(":memory:") as fresh:
        fresh.execute(create_table(table, dialect="duckdb"))
        made = fresh.execute(f"DESCRIBE {table}").fetchall()

    assert [row[:2] for row in made] == [row[:2] for row in view]
    required = [row[0] for row in made if row[2] == "NO"]
    assert required == [field.name for field in schema_of(TABLES[table]) if not field.nullable]


@pytest.mark.parametrize("table", TABLES)
def test_the_ddl_for_spark_has_the_types_that_delta_stores(store: DeltaStore, table: str) -> None:
    fields = json.loads(store.delta(table).schema().to_json())["fields"]
    ddl = create_table(table, dialect="spark", location="s3://b/t")

    columns = re.findall(r"^  `(\w+)` (.+?)( NOT NULL)?,?$", ddl, re.MULTILINE)
    assert columns == [
        (f["name"], spark_type(f["type"]), "" if f["nullable"] else " NOT NULL") for f in fields
    ]
    assert ddl.endswith("USING DELTA\nPARTITIONED BY (ingest_date)\nLOCATION 's3://b/t';")


def spark_type(kind: Any) -> str:
    """Delta's own name of a type, which is Spark's, as DDL."""
    if isinstance(kind, str):
        return {"long": "BIGINT", "integer": "INT"}.get(kind, kind.upper())
    if kind["type"] == "array":
        return f"ARRAY<{spark_type(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"MAP<{spark_type(kind['keyType'])}, {spark_type(kind['valueType'])}>"
    members = ", ".join(f"`{f['name']}`: {spark_type(f['type'])}" for f in kind["fields"])
    return f"STRUCT<{members}>"


def test_a_type_without_ddl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from onlinerl.rollout_store.reference import ddl

    monkeypatch.setattr(ddl, "schema_of", lambda _: pa.schema([pa.field("a", pa.int16())]))
    for dialect in ("duckdb", "spark"):
        with pytest.raises(TypeError, match="no DDL type for int16"):
            create_table("audit", dialect=dialect)


@pytest.mark.parametrize("table", TABLES)
def test_the_page_explains_every_column_and_shows_the_ddl(table: str) -> None:
    section = PAGE.partition(f"## `{table}`\n")[2].partition("\n## ")[0]

    for name, field in TABLES[table].model_fields.items():
        assert field.description, f"{table}.{name} has no docstring"
        assert re.search(rf"^\| `{name}` \| `[^|]+` \| [^|]+ \|$", section, re.MULTILINE)
    for dialect in ("duckdb", "spark"):
        assert create_table(table, dialect=dialect) in section
