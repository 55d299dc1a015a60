"""The process `onlinerl ingest`."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from onlinerl.health import HealthServer
from onlinerl.ingest.ingester import Ingester
from onlinerl.ingest.kafka_log import KafkaLog
from onlinerl.ingest.writer import STEPS, TableWriter
from onlinerl.rollout_store.store import DeltaStore

if TYPE_CHECKING:
    from onlinerl.config import Settings

logger = logging.getLogger(__name__)

FAULT_VARIABLE = "ONLINERL_FAULT"
"""For tests only: `step` or `step:n` kills the process, as by kill -9, the n-th time at a step."""


def run_ingest(settings: "Settings", once: bool = False) -> int:
    """Copy the event log into the tables until SIGTERM or SIGINT.

    Args:
        settings: The whole configuration.
        once: End when everything that is in the log was written.

    Returns:
        0 after a clean stop.

    Raises:
        StoreConflict: another ingest took over.
    """
    # Every lost connection is logged there many times a second; `Ingester` says it once.
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    writer = TableWriter(
        DeltaStore(settings.store_root, settings.store.storage_options),
        recent_ids=settings.ingest.recent_ids,
        now=lambda: datetime.now(UTC),
        fault=kill_at(os.environ.get(FAULT_VARIABLE, "")),
    )
    ingester = Ingester(lambda: KafkaLog(settings.broker), writer=writer, config=settings.ingest)
    health = HealthServer(
        settings.ingest.health_host, settings.ingest.health_port, ready=ingester.ready
    )
    with health:
        logger.info("ingest follows %s into %s", settings.broker.bootstrap, settings.store_root)
        ingester.run(stop, once=once)
    logger.info("ingest stopped")
    return 0


def kill_at(specification: str) -> Callable[[str], None]:
    """A fault that kills this process at one of `STEPS`; does nothing for an empty text."""
    step, _, number = specification.partition(":")
    if step and step not in STEPS:
        raise ValueError(f"{FAULT_VARIABLE}={specification!r}: the steps are {', '.join(STEPS)}")
    left = int(number or 1)

    def fault(at: str) -> None:
        nonlocal left
        if at == step:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return fault
