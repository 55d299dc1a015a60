"""Keys that come and go while the gateway runs."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from onlinerl.errors import ConfigError
from onlinerl.serving.access.auth import Keyring
from onlinerl.serving.access.key_file import load_keys
from onlinerl.serving.config import ApiKeyConfig
from onlinerl.serving.observability.metrics import GatewayMetrics

logger = logging.getLogger(__name__)


class KeysWatcher:
    """Looks at a keys file every `poll_s` and puts what changed into a keyring.

    A file that cannot be read any more changes nothing and is told loudly: whoever had a key keeps
    it until the file is right again. A file that is gone holds no key.
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
        # Equal to no file: it may have changed between loading and the first look.
        self._seen: tuple[int, ...] | None = ()

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                self.look()
            except Exception:
                logger.exception("looking at the keys file failed")

    def look(self) -> None:
        """Read the file if it changed since the last look."""
        signature = _signature(self._path)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._keyring.replace([*self._others, *load_keys(self._path)])
        except ConfigError as error:
            self._metrics.keys_fault.set(1)
            logger.error("the keys file is not used, keys stay as they were: %s", error)
            return
        self._metrics.keys_fault.set(0)
        logger.info("API keys were read", extra={"num_keys": len(self._keyring)})


def _signature(path: Path) -> tuple[int, ...] | None:
    """What differs when the file does, or who may read and write it; None when it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_ino, status.st_mode, status.st_size, *times
