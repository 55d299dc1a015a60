"""The last word on what is stored: nothing of erased people, and text only as it was scrubbed."""

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from onlinerl.ingest import metrics
from onlinerl.ingest.scrubbing.rows import RowScrubber
from onlinerl.ingest.scrubbing.scrubber import scrubbers
from onlinerl.ingest.scrubbing.tokens import open_token_bytes
from onlinerl.rollout_store.erasure.erased import ErasedSet
from onlinerl.rollout_store.tables.delta_store import DeltaStore

if TYPE_CHECKING:
    from onlinerl.settings import Settings

logger = logging.getLogger(__name__)


class Screening:
    """Called with every batch of `interactions`, `feedback` and `dead_letters` before its commit.

    Dead letters are kept as they came, byte for byte, so scrubbing does not reach them.
    """

    def __init__(self, erased: ErasedSet, *, scrubber: RowScrubber | None) -> None:
        self._erased = erased
        self._scrubber = scrubber

    def __call__(self, table: str, rows: pa.Table) -> pa.Table:
        """The rows that may be stored.

        Raises:
            ServiceUnavailable: it cannot be read who was erased, or not be stored what went with
                them.
        """
        if not rows.num_rows:
            return rows
        self._erased.refresh()
        kept = self._erased.without(table, rows)
        self._erased.record(at=datetime.now(UTC))
        metrics.ERASED.labels(table).inc(rows.num_rows - kept.num_rows)
        if self._scrubber is None or table == "dead_letters":
            return kept
        scrubbed = self._scrubber.scrub(table, kept)
        for (rule, action), count in scrubbed.findings.items():
            metrics.SCRUB_FINDINGS.labels(rule, action).inc(count)
        metrics.SCRUB_DROPPED.labels(table).inc(scrubbed.num_dropped)
        return scrubbed.rows


def open_screening(settings: "Settings", store: DeltaStore) -> Screening:
    """As configured; the tokenizer is loaded only when there is something to look for.

    Raises:
        ConfigError: scrubbing is on and there is no tokenizer.
        DependencyMissing: an extra that scrubbing needs is not installed.
    """
    config = settings.scrub
    scrubber = None
    if config.is_on:
        scrubber = RowScrubber(
            config,
            scrubbers=scrubbers(config),
            bytes_of=open_token_bytes(settings.policy.base_model),
        )
        names = [rule.name for rule in config.rules] + list(config.presidio.entities)
        logger.info("scrubbing looks for %s", ", ".join(names))
    return Screening(ErasedSet(store), scrubber=scrubber)
