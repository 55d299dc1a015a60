import csv
import json
import re
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.config import RewardsConfig, StoreConfig
from onlinerl.rollout_store.query import command
from onlinerl.rollout_store.query.command import Format
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from tests.events import feedback, interaction
from tests.rollout_store.views_of import stored

SQL = "SELECT interaction_id, completion_token_ids, served_at FROM interactions"


run_query = partial(command.run_query, rewards=RewardsConfig(), limits=StoreConfig())


@pytest.fixture
def store(tmp_path: Path) -> DeltaStore:
    return stored(tmp_path, [interaction("i[1]"), feedback(interaction_id="i[1]")])


def test_a_table_shows_names_and_values(
    store: DeltaStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_query(store, SQL) == 0

    shown = capsys.readouterr().out
    assert "interaction_id" in shown
    assert "i[1]" in shown
    assert "[7, 8]" in shown


def test_a_table_outside_a_terminal_has_one_line_per_row(
    store: DeltaStore, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ", ".join(f"repeat('{n}', 60) AS column{n}" for n in range(9))
    run_query(store, f"SELECT {columns}")

    shown = capsys.readouterr().out
    assert all(str(n) * 60 in shown for n in range(9))
    assert len(shown.splitlines()) == 5


def test_a_table_rounds_floats_and_json_does_not(
    store: DeltaStore, capsys: pytest.CaptureFixture[str]
) -> None:
    sql = "SELECT (2 / 3)::DOUBLE AS a, [1234567.89::DOUBLE] AS b, 12345678 AS c"
    run_query(store, sql)
    shown = capsys.readouterr().out
    assert "0.666667 " in shown
    assert "[1234570.0]" in shown
    assert "12345678" in shown

    run_query(store, sql, "json")
    assert json.loads(capsys.readouterr().out)[0]["a"] == 2 / 3


def test_a_table_shows_text_as_it_is(store: DeltaStore, capsys: pytest.CaptureFixture[str]) -> None:
    run_query(store, """SELECT 'ticket:key:12 [bold]x[/]' AS ":key: [red]" """)

    shown = capsys.readouterr().out
    assert "ticket:key:12 [bold]x[/]" in shown
    assert ":key: [red]" in shown


def test_json_has_numbers_for_decimals_and_null_for_nan(
    store: DeltaStore, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {
        "total": "(SELECT sum(len(completion_token_ids)) FROM interactions)",
        "huge": "170141183460469231731687303715884105727::HUGEINT",
        "half": "1.50::DECIMAL(5, 2)",
        "none": "['nan'::DOUBLE, 'inf'::DOUBLE, 1]",
        "inner": "{'a': '-inf'::FLOAT, 'b': 2.0::DECIMAL(3, 1), 'c': true}",
        "pairs": "MAP {'a': 3::HUGEINT}",
        "span": "[INTERVAL 1 DAY]",
    }
    sql = "SELECT " + ", ".join(f"{value} AS {name}" for name, value in columns.items())
    run_query(store, sql, "json")

    (row,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert row == {
        "total": 2,
        "huge": 2**127 - 1,
        "half": 1.5,
        "none": [None, None, 1],
        "inner": {"a": None, "b": 2, "c": True},
        "pairs": [["a", 3]],
        "span": ["1 day"],
    }
    run_query(store, sql, "csv")
    assert '"[null, null, 1.0]"' in capsys.readouterr().out


INTERVALS = (
    "max(served_at) - min(served_at)",
    "INTERVAL '14 months 3 days 04:05:06.5'",
    "-INTERVAL '13 months 1 day 1.000001 seconds'",
    "INTERVAL 1200 HOUR",
    "NULL::INTERVAL",
)


@pytest.mark.parametrize("format", ["table", "json", "csv", "parquet"])
def test_an_interval_is_text_as_duckdb_writes_it(
    store: DeltaStore, capsysbinary: pytest.CaptureFixture[bytes], format: Format
) -> None:
    spans = [f"{span} AS s{n}" for n, span in enumerate(INTERVALS)]
    texts = [f"({span})::VARCHAR AS t{n}" for n, span in enumerate(INTERVALS)]
    run_query(store, f"SELECT {', '.join([*spans, *texts])} FROM interactions", format)

    out = capsysbinary.readouterr().out
    if format == "table":
        cells = [cell.strip() for cell in out.decode().splitlines()[3].strip("│").split("│")]
    elif format == "json":
        cells = list(json.loads(out)[0].values())
    elif format == "csv":
        cells = next(csv.reader(out.decode().splitlines()[1:]))
    else:
        cells = list(parquet.read_table(pa.BufferReader(out)).to_pylist()[0].values())
    assert cells[: len(spans)] == cells[len(spans) :]
    assert cells[:2] == ["00:00:00", "1 year 2 months 3 days 04:05:06.5"]


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_nested_values_that_a_format_cannot_hold_are_json_text(
    store: DeltaStore, capsysbinary: pytest.CaptureFixture[bytes], format: Format
) -> None:
    run_query(store, "SELECT {'a': [INTERVAL 1 DAY]} AS a, union_value(k := 1) AS b", format)

    out = capsysbinary.readouterr().out
    if format == "csv":
        _, row = csv.reader(out.decode().splitlines())
    else:
        row = list(parquet.read_table(pa.BufferReader(out)).to_pylist()[0].values())
    assert row == ['{"a": ["1 day"]}', "1"]


def test_json_has_lists_and_times_in_utc(
    store: DeltaStore, capsys: pytest.CaptureFixture[str]
) -> None:
    run_query(store, SQL, "json")

    assert json.loads(capsys.readouterr().out) == [
        {
            "interaction_id": "i[1]",
            "completion_token_ids": [7, 8],
            "served_at": "2026-01-02T12:00:00+00:00",
        }
    ]


def test_csv_has_a_header_and_lists_as_json(
    store: DeltaStore, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run_query(store, SQL, "csv")

    header, row = capsysbinary.readouterr().out.decode().splitlines()
    assert header == '"interaction_id","completion_token_ids","served_at"'
    assert row == '"i[1]","[7, 8]",2026-01-02 12:00:00.000000Z'


def test_parquet_can_be_read_back(
    store: DeltaStore, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run_query(store, SQL, "parquet")

    table = parquet.read_table(pa.BufferReader(capsysbinary.readouterr().out))
    assert table["completion_token_ids"].to_pylist() == [[7, 8]]


@pytest.mark.parametrize("format", ["table", "json", "csv", "parquet"])
def test_columns_of_the_same_name_are_numbered(
    store: DeltaStore, capsysbinary: pytest.CaptureFixture[bytes], format: Format
) -> None:
    run_query(store, "SELECT 1 AS a, 2 AS b, 3 AS a, 4 AS a_1, 5 AS a", format)

    out = capsysbinary.readouterr().out
    if format == "table":
        words = [re.findall(r"\w+", line) for line in out.decode().splitlines()]
        names, values = [found for found in words if found]
    elif format == "json":
        (row,) = json.loads(out)
        names, values = list(row), [str(value) for value in row.values()]
    elif format == "csv":
        names, values = (line.replace('"', "").split(",") for line in out.decode().splitlines())
    else:
        table = parquet.read_table(pa.BufferReader(out))
        names, values = table.column_names, [str(value.to_pylist()[0]) for value in table.columns]
    assert names == ["a", "b", "a_2", "a_1", "a_3"]
    assert values == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT nothing FROM interactions",
        "SELEC 1",
        "COPY interactions TO '{folder}/out.parquet'",
        "SELECT * FROM read_text('{folder}/secret')",
        "ATTACH '{folder}/x.db'",
        "INSTALL httpfs",
        "SET threads = 1; SELECT 1",
        "",
    ],
)
def test_statements_that_are_not_queries_on_the_views_are_refused(
    store: DeltaStore, tmp_path: Path, sql: str
) -> None:
    (tmp_path / "secret").write_text("x")

    with pytest.raises(ConfigError):
        run_query(store, sql.format(folder=tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "store"]


def test_a_query_without_tables_is_refused(tmp_path: Path) -> None:
    empty = DeltaStore(str(tmp_path))

    with pytest.raises(ConfigError, match="there are no tables under"):
        run_query(empty, SQL)
