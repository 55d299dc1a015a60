"""The rows of a window as Arrow batches, for those who read many tokens at once.

The same rows as `SELECT … FROM interactions` gives. Only ids and times pass through the query
engine, to find events that were stored twice; tokens come straight from the files.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import duckdb
import pyarrow as pa
from pyarrow import compute
from pyarrow.dataset import Dataset

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.rows import schema_of
from onlinerl.rollout_store.schema import InteractionRow
from onlinerl.rollout_store.scope import Scope
from onlinerl.rollout_store.store import DeltaStore
from onlinerl.rollout_store.views import with_every_column

_KEY = ("tenant", "interaction_id", "choice_index")
_PLACE = ("ingested_at", "partition", "offset")
_TESTED = ("served_at", "policy")
_REPEATS = """
SELECT tenant, interaction_id, choice_index, ingested_at, partition, "offset" FROM stored
QUALIFY row_number() OVER (
    PARTITION BY tenant, interaction_id, choice_index ORDER BY ingested_at, partition, "offset"
) > 1
"""
_REPEATED_IDS = """
SELECT tenant, interaction_id, choice_index FROM stored GROUP BY ALL HAVING count(*) > 1 LIMIT 1
"""


def read_window(
    store: DeltaStore,
    scope: Scope,
    *,
    columns: Sequence[str] | None = None,
    versions: Mapping[str, int] | None = None,
    batch_rows: int = 10_000,
) -> Iterator[pa.RecordBatch]:
    """Completions in scope, in no particular order.

    Args:
        store: Where the tables lie.
        scope: What to read; ancestors of it are not added.
        columns: Of `interactions`; all of them when absent.
        versions: Table versions to pin; the newest when `interactions` is not among them.
        batch_rows: Most rows of a batch.

    Raises:
        ConfigError: a column that the table does not have.
        ServiceUnavailable: the storage does not answer, or there is no such table.
    """
    wanted = list(schema_of(InteractionRow).names if columns is None else columns)
    if unknown := set(wanted) - set(schema_of(InteractionRow).names):
        raise ConfigError(f"interactions has no column {', '.join(sorted(unknown))}")
    # A row is ingested after it was served, but by another machine's clock.
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
    repeats = _repeats(dataset)
    helpers = (*_TESTED, *(_KEY + _PLACE if repeats else ("interaction_id",)))
    read = list(dict.fromkeys([*wanted, *helpers]))
    ids = None if scope.interaction_ids is None else pa.array(scope.interaction_ids, pa.string())
    for batch in dataset.to_batches(columns=read, batch_size=batch_rows):
        mask = _in_scope(batch, scope, ids)
        if repeats:
            keys = zip(*(batch[name].to_pylist() for name in _KEY + _PLACE), strict=True)
            mask = compute.and_(mask, pa.array([key not in repeats for key in keys], pa.bool_()))
        kept = compute.sum(mask).as_py() or 0
        if kept:
            # Filtering copies every token: not where all rows are wanted, which is the rule.
            yield (batch if kept == batch.num_rows else batch.filter(mask)).select(list(wanted))


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


def _repeats(dataset: Dataset) -> set[tuple[object, ...]]:
    """Later copies of events that are stored twice, which is rare."""
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("stored", dataset)
        if not connection.execute(_REPEATED_IDS).fetchall():
            return set()
        return set(connection.execute(_REPEATS).fetchall())
