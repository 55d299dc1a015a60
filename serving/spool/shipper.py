"""The thread that moves events from the spool to the event log, in order, until acknowledged."""

import contextlib
import logging
import threading
import time
from collections.abc import Mapping

from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.event_log import TopicIdPartition
from onlinerl.serving.config import SpoolConfig
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.spool.log_writer import Connect, LogWriter
from onlinerl.serving.spool.queue import Spool

logger = logging.getLogger(__name__)

_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_BATCH_BYTES = 8 * 2**20


class Shipper:
    """CONNECTING -> SHIPPING -> (log away) -> CONNECTING, with a back-off of at most 5 s.

    After the log has acknowledged a batch, the topic ids are read again, and only then does the
    spool's cursor move. Records that went to a log which was lost meanwhile are sent again.
    """

    def __init__(
        self, spool: Spool, *, connect: Connect, config: SpoolConfig, metrics: GatewayMetrics
    ) -> None:
        self._spool = spool
        self._connect = connect
        self._config = config
        self._metrics = metrics
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shipper", daemon=True)
        self.fault: str | None = "not connected yet"
        """Why nothing is shipped; None while the log takes events."""

    def start(self) -> None:
        """Begin to ship."""
        self._thread.start()

    def close(self, *, drain_s: float) -> None:
        """Stop when the spool is empty or after `drain_s` seconds; the rest stays on disk."""
        deadline = time.monotonic() + drain_s
        while time.monotonic() < deadline and not self._spool.is_drained and self.fault is None:
            self._stopping.wait(0.05)
        self._stopping.set()
        self._thread.join(self._config.ship_timeout_s + _MAX_BACKOFF_S)

    def _run(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        while not self._stopping.is_set():
            try:
                self._spool.reread()
                self._spool.handle_forget_requests()
                with contextlib.closing(self._connect()) as log:
                    self._ship(log)
                    backoff_s = _MIN_BACKOFF_S
            except ServiceUnavailable as error:
                self._note_fault(str(error))
            except Exception as error:
                logger.exception("shipping failed")
                self._note_fault(repr(error))
            self._stopping.wait(backoff_s)
            backoff_s = _MIN_BACKOFF_S if self.fault is None else min(2 * backoff_s, _MAX_BACKOFF_S)

    def _ship(self, log: LogWriter) -> None:
        topic_ids = log.topic_ids()
        if self._spool.topic_ids not in ({}, topic_ids):
            self._ship_again(topic_ids)
        while not self._stopping.is_set():
            self._note_health()
            self._spool.handle_forget_requests()
            batch = self._spool.read(
                max_records=self._config.ship_batch,
                max_bytes=_BATCH_BYTES,
                timeout_s=self._config.topic_poll_s,
            )
            ends: Mapping[TopicIdPartition, int] = {}
            if batch:
                published = log.publish([stored.record for stored in batch])
                ends = _with_ids(published.ends, topic_ids)
                for record in published.refused:
                    self._metrics.lost.labels("refused_by_log").inc()
                    logger.error("the log refuses a record", extra={"key": record.key})
            topic_ids_after = log.topic_ids()
            if topic_ids_after != topic_ids:
                topic_ids = topic_ids_after
                self._ship_again(topic_ids)
            elif batch:
                self._metrics.shipping.shipped.inc(len(batch))
                self._spool.ack(batch, topic_ids=topic_ids, ends=ends)
            else:
                self._spool.prune()
            if 0 < len(batch) < self._config.ship_batch:
                # Many small batches would take more time from requests than they gain for events.
                self._stopping.wait(self._config.ship_linger_s)

    def _ship_again(self, topic_ids: dict[str, str]) -> None:
        self._metrics.shipping.reshipped.inc()
        logger.warning("the log came back empty: kept events are shipped again")
        self._spool.rewind(topic_ids=topic_ids)

    def _note_health(self) -> None:
        if self.fault is not None:
            logger.info("the event log takes events")
            self.fault = None

    def _note_fault(self, fault: str) -> None:
        self._metrics.shipping.ship_failures.inc()
        if self.fault is None or self.fault == "not connected yet":
            logger.warning("the event log is away, events are kept", extra={"fault": fault})
        self.fault = fault


def _with_ids(
    ends: Mapping[tuple[str, int], int], topic_ids: Mapping[str, str]
) -> dict[TopicIdPartition, int]:
    return {
        TopicIdPartition(topic, topic_ids.get(topic, ""), partition): end
        for (topic, partition), end in ends.items()
    }
