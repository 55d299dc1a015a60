"""Which engines a request may go to.

An engine is in the pool while it is healthy and says that it serves a version of the policy. One
that was restarted and not yet seeded again says `default`, and gets no request.
"""

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.serving.engine_client import Engine

logger = logging.getLogger(__name__)


@dataclass
class Replica:
    """An engine as the pool sees it."""

    engine: Engine
    version: str | None = None
    """The version it serves; None keeps it out of the pool."""
    num_running: int = 0
    reason: str = "not looked at yet"
    """Why it is not in the pool."""


class ReplicaPool:
    """Looks at every engine each `poll_s` and gives out the least busy one in the pool."""

    def __init__(self, engines: Sequence[Engine], *, policy: str, poll_s: float) -> None:
        self.replicas = [Replica(engine) for engine in engines]
        self._policy = policy
        self._own_version = re.compile(rf"{re.escape(policy)}/[1-9][0-9]*")
        self._poll_s = poll_s
        self._next = 0
        self._watchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look."""
        self._watchers = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]

    async def close(self) -> None:
        """Stop looking."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def pick(self) -> Replica:
        """The least busy replica; equally busy ones take turns.

        Raises:
            RequestRefused: with 503 when no engine serves the policy.
        """
        pool = [replica for replica in self.replicas if replica.version is not None]
        if not pool:
            raise RequestRefused(self.fault() or "", 503, None, "engine_unavailable")
        self._next += 1
        start = self._next % len(pool)
        return min(pool[start:] + pool[:start], key=lambda replica: replica.num_running)

    def fault(self) -> str | None:
        """Why no request can be served; None when one can."""
        if any(replica.version is not None for replica in self.replicas):
            return None
        reasons = sorted({replica.reason for replica in self.replicas})
        return f"no engine serves {self._policy!r}: {'; '.join(reasons)}"

    def versions(self) -> list[str]:
        """The versions in the pool."""
        return sorted({replica.version for replica in self.replicas if replica.version})

    def saw(self, replica: Replica, version: str) -> None:
        """An engine told its version, when asked or in an answer."""
        if self._own_version.fullmatch(version):
            self._set(replica, version, reason="")
        else:
            self._set(replica, None, reason=f"an engine serves {version!r}")

    def lost(self, replica: Replica, error: EngineFailed) -> None:
        """An engine did not answer: no request goes there until it does."""
        self._set(replica, None, reason=f"an engine does not answer: {error}")

    async def look(self, replica: Replica) -> None:
        """Ask one engine what it serves."""
        try:
            version = await replica.engine.weight_version()
        except EngineFailed as error:
            self.lost(replica, error)
        else:
            self.saw(replica, version)

    def _set(self, replica: Replica, version: str | None, *, reason: str) -> None:
        if version != replica.version:
            logger.info(
                "replica changed",
                extra={"engine": replica.engine.url, "version": version, "reason": reason},
            )
        replica.version, replica.reason = version, reason

    async def _watch(self, replica: Replica) -> None:
        while True:
            try:
                await self.look(replica)
            except Exception:
                logger.exception("looking at a replica failed")
            await asyncio.sleep(self._poll_s)
