"""Filters rows before they are stored: drops erased people, and scrubs personal data."""

import logging
from datetime import UTC, datetime

import pyarrow as pa

from onlinerl.ingest import metrics
from onlinerl.ingest.scrubbing.config import ScrubConfig
from onlinerl.ingest.scrubbing.rows import RowScrubber
from onlinerl.ingest.scrubbing.scrubber import make_scrubbers
from onlinerl.ingest.scrubbing.tokens import open_token_bytes
from onlinerl.rollout_store.erasure.erased import ErasedSet
from onlinerl.rollout_store.tables.delta_store import DeltaStore

logger = logging.getLogger(__name__)


class Screening:
    """Filters every batch of `interactions`, `feedback` and `dead_letters` before its commit.

    Dead letters are stored byte for byte, so they are not scrubbed.

    Args:
        erased: The people, sessions and interactions whose rows are dropped.
        scrubber: Scrubs the rows; None when scrubbing is off.
    """

    def __init__(self, erased: ErasedSet, *, scrubber: RowScrubber | None) -> None:
        self._erased = erased
        self._scrubber = scrubber

    def __call__(self, table: str, rows: pa.Table) -> pa.Table:
        """The rows that may be stored.

        Args:
            table: Name of the table.
            rows: Rows of that table.

        Raises:
            ServiceUnavailable: The table of erased people could not be read, or not be extended by
                what was dropped with them.
        """
        if not rows.num_rows:
            return rows
        self._erased.refresh()
        allowed = self._erased.without(table, rows)
        self._erased.record(at=datetime.now(UTC))
        metrics.ERASED.labels(table).inc(rows.num_rows - allowed.num_rows)
        if self._scrubber is None or table == "dead_letters":
            return allowed
        result = self._scrubber.scrub(table, allowed)
        for (rule, action), count in result.findings.items():
            metrics.SCRUB_FINDINGS.labels(rule, action).inc(count)
        metrics.SCRUB_DROPPED.labels(table).inc(result.num_dropped)
        return result.rows


def open_screening(config: ScrubConfig, store: DeltaStore, *, base_model: str) -> Screening:
    """The configured screening. A tokenizer is loaded only when scrubbing is on.

    Args:
        config: What to look for.
        store: Holds the table of erased people.
        base_model: Folder or Hugging Face id of the model whose tokenizer made the tokens.

    Raises:
        ConfigError: Scrubbing is on and the model has no tokenizer here.
        DependencyMissing: An extra that scrubbing needs is not installed.
    """
    scrubber = None
    if config.is_on:
        scrubber = RowScrubber(
            config,
            scrubbers=make_scrubbers(config),
            bytes_of=open_token_bytes(base_model),
        )
        names = [rule.name for rule in config.rules] + list(config.presidio.entities)
        logger.info("scrubbing looks for %s", ", ".join(names))
    return Screening(ErasedSet(store), scrubber=scrubber)
