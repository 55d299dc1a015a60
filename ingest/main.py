"""The process `onlinerl ingest`."""

import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from onlinerl.ingest.committing.writer import STEPS, TableWriter
from onlinerl.ingest.event_log.kafka import KafkaLog
from onlinerl.ingest.loop.ingester import Ingester
from onlinerl.ingest.loop.progress import progress_for
from onlinerl.ingest.scrubbing.screening import open_screening
from onlinerl.process.health import HealthServer
from onlinerl.rollout_store.tables.delta_store import DeltaStore

if TYPE_CHECKING:
    from onlinerl.settings import Settings

logger = logging.getLogger(__name__)

FAULT_VARIABLE = "ONLINERL_FAULT"
"""For tests only: `step` or `step:n` kills the process with SIGKILL at the n-th visit of a step."""


def run_ingest(settings: "Settings", once: bool = False) -> int:
    """Copy the event log into the tables until SIGTERM or SIGINT.

    Args:
        settings: The whole configuration.
        once: Stop when everything in the log was written.

    Returns:
        0 after a clean stop.

    Raises:
        StoreConflict: Another ingest took over.
        CommitStuck: A commit took longer than `max_commit_s`; start ingest again.
    """
    # Decoded records contain no cycles; looking for some would take a fifth of the time.
    gc.set_threshold(50_000, 20, 100)
    # kafka-python logs a lost connection many times a second; `Ingester` logs it once.
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    config = settings.ingest
    in_group = config.mode == "group"
    store = DeltaStore(settings.store_root, settings.store.storage_options)
    writer = TableWriter(
        store,
        recent_ids=config.recent_ids,
        now=lambda: datetime.now(UTC),
        exclusive=not in_group,
        vocab_size=config.vocab_size,
        screen=open_screening(settings.scrub, store, base_model=settings.policy.base_model),
        fault=kill_at(os.environ.get(FAULT_VARIABLE, "")),
    )
    progress = progress_for(once=once)
    ingester = Ingester(
        lambda: KafkaLog(
            settings.broker,
            group_id=config.group_id if in_group else None,
            session_timeout_s=config.session_timeout_s,
            check_crcs=config.check_crcs,
        ),
        writer=writer,
        config=config,
        progress=progress,
    )
    health = HealthServer(
        settings.ingest.health_host, settings.ingest.health_port, ready=ingester.ready
    )
    with health, contextlib.closing(progress):
        logger.info("ingest follows %s into %s", settings.broker.bootstrap, settings.store_root)
        ingester.run(stop, once=once)
    logger.info("ingest stopped")
    return 0


def kill_at(specification: str) -> Callable[[str], None]:
    """A function that kills this process at one of `STEPS`; for an empty text it does nothing.

    Raises:
        ValueError: The specification names no step.
    """
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
