"""The tables as `CREATE TABLE` statements, for declaring them in another system.

onlinerl itself never runs them, because Delta Lake stores the schema with the table. They are
derived from the row models and shown in `docs/tables.md`.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import pyarrow as pa

from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.tables.rows import schema_of

Dialect = Literal["duckdb", "spark"]

_DUCKDB = {
    "string": "VARCHAR",
    "int64": "BIGINT",
    "int32": "INTEGER",
    "double": "DOUBLE",
    "float": "FLOAT",
    "bool": "BOOLEAN",
    "binary": "BLOB",
    "date32[day]": "DATE",
    "timestamp[us, tz=UTC]": "TIMESTAMP WITH TIME ZONE",
}
_SPARK = {
    "string": "STRING",
    "int64": "BIGINT",
    "int32": "INT",
    "double": "DOUBLE",
    "float": "FLOAT",
    "bool": "BOOLEAN",
    "binary": "BINARY",
    "date32[day]": "DATE",
    "timestamp[us, tz=UTC]": "TIMESTAMP",
}
_DUCKDB_MEMBER = '"{}" {}'
_SPARK_MEMBER = "`{}`: {}"


def create_table(table: str, *, dialect: Dialect, location: str = "…") -> str:
    """`CREATE TABLE` for one of `TABLES`.

    Args:
        table: Name of the table.
        dialect: `spark` declares the Delta table at `location`; `duckdb` declares an empty table
            with the same columns.
        location: Folder or URI of the table, for `spark`.
    """
    schema = schema_of(TABLES[table])
    lines = ",\n".join(f"  {_column(field, dialect)}" for field in schema)
    if dialect == "duckdb":
        return f"CREATE TABLE {table} (\n{lines}\n);"
    return (
        f"CREATE TABLE {table} (\n{lines}\n) USING DELTA\n"
        f"PARTITIONED BY (ingest_date)\nLOCATION '{location}';"
    )


def _column(field: pa.Field, dialect: Dialect) -> str:
    required = "" if field.nullable else " NOT NULL"
    if dialect == "duckdb":
        return f'"{field.name}" {_duckdb_type(field.type)}{required}'
    return f"`{field.name}` {_spark_type(field.type)}{required}"


def _duckdb_type(kind: pa.DataType) -> str:
    if pa.types.is_map(kind):
        return f"MAP({_duckdb_type(kind.key_type)}, {_duckdb_type(kind.item_type)})"
    if pa.types.is_list(kind):
        return f"{_duckdb_type(kind.value_type)}[]"
    if pa.types.is_struct(kind):
        return f"STRUCT({_members(kind, _duckdb_type, template=_DUCKDB_MEMBER)})"
    return _scalar(kind, _DUCKDB)


def _spark_type(kind: pa.DataType) -> str:
    if pa.types.is_map(kind):
        return f"MAP<{_spark_type(kind.key_type)}, {_spark_type(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"ARRAY<{_spark_type(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"STRUCT<{_members(kind, _spark_type, template=_SPARK_MEMBER)}>"
    return _scalar(kind, _SPARK)


def _members(kind: pa.StructType, type_of: Callable[[pa.DataType], str], *, template: str) -> str:
    return ", ".join(template.format(field.name, type_of(field.type)) for field in kind)


def _scalar(kind: pa.DataType, names: Mapping[str, str]) -> str:
    try:
        return names[str(kind)]
    except KeyError:
        raise TypeError(f"no DDL type for {kind}") from None
