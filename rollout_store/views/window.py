"""Reads the rows of a window as Arrow batches, for reading many tokens at once.

The rows are those of `SELECT … FROM interactions`. Only ids and times pass through the query
engine, to find events that were stored twice; tokens come directly from the files.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import duckdb
import pyarrow as pa
from pyarrow import compute
from pyarrow.dataset import Dataset

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.schema import InteractionRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import schema_of
from onlinerl.rollout_store.views.connection import with_every_column
from onlinerl.rollout_store.views.scope import Scope

_KEY = ("tenant", "interaction_id", "choice_index")
_PLACE = ("ingested_at", "partition", "offset")
_CONDITION_COLUMNS = ("served_at", "policy", "interaction_id")
_Key = tuple[str, str, int]
_Place = tuple[object, ...]
_REPEATED = """
SELECT tenant, interaction_id, choice_index, min((ingested_at, partition, "offset")) FROM stored
GROUP BY tenant, interaction_id, choice_index HAVING count(*) > 1
"""


def read_window(
    store: DeltaStore,
    scope: Scope,
    *,
    columns: Sequence[str] | None = None,
    versions: Mapping[str, int] | None = None,
    batch_rows: int = 10_000,
) -> Iterator[pa.RecordBatch]:
    """The completions in scope, in no particular order.

    Args:
        store: Where the tables lie.
        scope: Which interactions to read; their ancestors are not included.
        columns: Columns of `interactions`; all columns when absent.
        versions: Table versions to read; the newest version if `interactions` is not among them.
        batch_rows: Maximum number of rows in a batch.

    Raises:
        ConfigError: the table has no such column.
        ServiceUnavailable: the storage does not answer, or there is no such table.
    """
    wanted = list(schema_of(InteractionRow).names if columns is None else columns)
    if unknown := set(wanted) - set(schema_of(InteractionRow).names):
        raise ConfigError(f"interactions has no column {', '.join(sorted(unknown))}")
    # Rows are ingested after they are served, but the clocks of two machines may differ.
    first = None if scope.since is None else scope.since.date() - timedelta(days=1)
    dataset = with_every_column(
        store.dataset(
            "interactions", version=(versions or {}).get("interactions"), ingested_from=first
        ),
        "interactions",
    )
    return _batches(dataset, scope, wanted, batch_rows)


def _batches(
    dataset: Dataset, scope: Scope, wanted: Sequence[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    first_copies = _first_copies(dataset)
    helpers = (*_CONDITION_COLUMNS, *(_KEY + _PLACE if first_copies else ()))
    read = list(dict.fromkeys([*wanted, *helpers]))
    ids = None if scope.interaction_ids is None else pa.array(scope.interaction_ids, pa.string())
    for batch in dataset.to_batches(columns=read, batch_size=batch_rows):
        mask = _in_scope(batch, scope, ids)
        if first_copies:
            mask = compute.and_(mask, _is_kept(batch, first_copies))
        num_kept = compute.sum(mask).as_py() or 0
        if num_kept:
            # Filtering copies every token, so a batch that is wanted as a whole is not filtered.
            kept = batch if num_kept == batch.num_rows else batch.filter(mask)
            yield kept.select(list(wanted))


def _is_kept(batch: pa.RecordBatch, first_copies: dict[_Key, _Place]) -> pa.Array:
    """Per row, whether it is the only copy of its event, or the first one."""
    keys = zip(*(batch[name].to_pylist() for name in _KEY), strict=True)
    places = zip(*(batch[name].to_pylist() for name in _PLACE), strict=True)
    pairs = zip(keys, places, strict=True)
    return pa.array([first_copies.get(key, place) == place for key, place in pairs], pa.bool_())


def _in_scope(batch: pa.RecordBatch, scope: Scope, ids: pa.Array | None) -> pa.Array:
    mask = compute.is_valid(batch["served_at"])
    if scope.since is not None:
        mask = compute.and_(mask, compute.greater_equal(batch["served_at"], scope.since))
    if scope.until is not None:
        mask = compute.and_(mask, compute.less(batch["served_at"], scope.until))
    if scope.policy is not None:
        mask = compute.and_(mask, compute.equal(batch["policy"], scope.policy))
    if ids is not None:
        mask = compute.and_(mask, compute.is_in(batch["interaction_id"], value_set=ids))
    return mask


def _first_copies(dataset: Dataset) -> dict[_Key, _Place]:
    """The place of the first copy of each event that is stored twice, which is rare."""
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("stored", dataset)
        rows = connection.execute(_REPEATED).fetchall()
    return {
        (tenant, interaction, choice): tuple(place) for tenant, interaction, choice, place in rows
    }
