"""Asks the tables how far they are: the spool need not keep events that the tables hold."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping

from onlinerl.errors import ServiceUnavailable
from onlinerl.process.fault_streak import FaultStreak
from onlinerl.rollout_store.event_log import TABLE_OF, TopicIdPartition
from onlinerl.rollout_store.tables.delta_store import DeltaStore, storage_errors
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.spool.queue import Spool

logger = logging.getLogger(__name__)

StoredOffsets = Callable[[Collection[TopicIdPartition]], Mapping[TopicIdPartition, int]]
"""Gives the offset up to which the tables hold each partition; unknown partitions are left out."""


class Confirmation:
    """Asks the tables each `every_s` seconds, in a thread of its own.

    While the tables are away or far behind, the spool keeps shipped events up to its bounds.
    """

    def __init__(
        self, spool: Spool, stored: StoredOffsets, *, every_s: float, metrics: GatewayMetrics
    ) -> None:
        self._spool = spool
        self._stored = stored
        self._every_s = every_s
        self._metrics = metrics
        self._faults = FaultStreak()
        self._stopping = threading.Event()
        # A daemon thread, so that a store that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="confirmation", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Stop asking; a call that hangs is left to its daemon thread."""
        self._stopping.set()

    def look(self) -> None:
        """Ask once; a failure confirms nothing."""
        partitions = self._spool.shipped_to()
        if not partitions:
            return
        try:
            self._spool.confirm(self._stored(partitions))
        except (ServiceUnavailable, OSError) as error:
            if self._faults.add(str(error)):
                logger.warning("how far the tables are cannot be read: %s", error)
            self._metrics.shipping.confirmations.labels("failed").inc()
        except Exception as error:
            if self._faults.add(repr(error)):
                logger.exception("looking up how far the tables are failed unexpectedly")
            self._metrics.shipping.confirmations.labels("failed").inc()
        else:
            self._faults.clear()
            self._metrics.shipping.confirmations.labels("ok").inc()

    def _run(self) -> None:
        while not self._stopping.wait(self._faults.wait_s(self._every_s)):
            self.look()


def stored_in(store: DeltaStore) -> StoredOffsets:
    """The offsets that ingest stored with its rows; none while the tables do not exist."""

    def stored(partitions: Collection[TopicIdPartition]) -> dict[TopicIdPartition, int]:
        ends: dict[TopicIdPartition, int] = {}
        for topic, table in TABLE_OF.items():
            places = [place for place in partitions if place.topic == topic]
            with storage_errors(f"look up how far table {table} is"):
                if not places or not store.exists(table):
                    continue
                offsets = store.transaction_versions(table, [place.app_id for place in places])
            known = {place: offsets[place.app_id] for place in places}
            ends |= {place: end for place, end in known.items() if end is not None}
        return ends

    return stored
