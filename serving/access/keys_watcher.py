"""Applies changes of the keys file while the gateway runs."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from onlinerl.errors import ConfigError
from onlinerl.process.fault_streak import FaultStreak
from onlinerl.serving.access.auth import Keyring
from onlinerl.serving.access.key_file import load_keys
from onlinerl.serving.config import ApiKeyConfig
from onlinerl.serving.observability.metrics import GatewayMetrics

logger = logging.getLogger(__name__)


class KeysWatcher:
    """Checks a keys file regularly and puts its keys into a keyring.

    While the file cannot be used, the keyring stays as it was and the fault is logged and counted.
    A file that is gone holds no keys.

    Args:
        path: The keys file.
        keyring: Gets the keys of the file, and `others`.
        others: Keys from other sources, which never change.
        poll_s: Seconds between two checks; longer after repeated unexpected faults.
        metrics: Counts faults.
    """

    def __init__(
        self,
        path: Path,
        keyring: Keyring,
        *,
        others: Sequence[ApiKeyConfig],
        poll_s: float,
        metrics: GatewayMetrics,
    ) -> None:
        self._path = path
        self._keyring = keyring
        self._others = others
        self._poll_s = poll_s
        self._metrics = metrics
        # No file has this signature: the file may have changed since the gateway loaded it.
        self._signature: tuple[int, ...] | None = ()

    async def watch(self) -> None:
        """Check the file until cancelled."""
        streak = FaultStreak()
        while True:
            await asyncio.sleep(streak.wait_s(self._poll_s))
            try:
                self.check()
            except Exception as error:
                self._count_fault()
                if streak.add(repr(error)):
                    logger.exception("checking the keys file failed; keys stay as they were")
            else:
                streak.clear()

    def check(self) -> None:
        """Read the file if it changed since it was last read.

        Raises:
            ConfigError: the operating system could not read it; the next call tries again.
        """
        signature = _signature(self._path)
        if signature == self._signature:
            return
        try:
            self._keyring.replace([*self._others, *load_keys(self._path)])
        except ConfigError as error:
            if isinstance(error.__cause__, OSError):
                raise  # it may pass although the file stays the same, so the next check reads again
            self._count_fault()
            logger.error("the keys file cannot be used, keys stay as they were: %s", error)
        else:
            self._metrics.keys_fault.set(0)
            logger.info("API keys were read", extra={"num_keys": len(self._keyring)})
        # Not after an unexpected fault: the next check then reads the file again.
        self._signature = signature

    def _count_fault(self) -> None:
        self._metrics.keys_fault.set(1)
        self._metrics.keys_failures.inc()


def _signature(path: Path) -> tuple[int, ...] | None:
    """Changes with the content, owner or mode of the file; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_ino, status.st_mode, status.st_size, *times
