"""What a person types: a request left in the registry, and the wait for the controller's answer.

Only the controller moves aliases, so these commands never touch an engine.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from onlinerl.deploy.registry.protocol import (
    CANDIDATE,
    CHAMPION,
    PROMOTE_REQUEST,
    PROMOTE_RESULT,
    REVIEW,
    ROLLBACK_REQUEST,
    ROLLBACK_RESULT,
    VERDICT,
    PolicyVersion,
    Registry,
)
from onlinerl.deploy.registry.requests import Answer, Request, read_answer
from onlinerl.deploy.replicas.engine_control import Replica
from onlinerl.errors import ConfigError, OnlineRLError, PromotionFailed, ServiceUnavailable
from onlinerl.rollout_store.tables.lease import Lease

_TAGS = ("parent_version", "gate.finite", "gate.drift", "gate.reward", "gate.perplexity", REVIEW)

_WIDTH = 200
"""Columns of a table that is not shown in a terminal."""


@dataclass(frozen=True)
class RollbackCommand:
    """What `onlinerl rollback` was given."""

    version: int | None
    actor: str
    reason: str


class Commands:
    """Requests to a controller.

    Args:
        registry: Where requests and answers are left.
        lease: The controller's; tells whether one runs.
        timeout_s: Longest wait for an answer.
        poll_s: Time between two looks for it.
        console: Where the answer goes.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        lease: Lease,
        timeout_s: float,
        poll_s: float,
        console: Console | None = None,
    ) -> None:
        self._registry = registry
        self._lease = lease
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._console = console or Console(soft_wrap=True, emoji=False)

    def promote(self, version: int | None, *, actor: str) -> int:
        """Approve a version and ask for it; 0 when it serves.

        Raises:
            ConfigError: when there is no such version.
            ServiceUnavailable: when no controller runs, or none answered in time.
            PromotionFailed: when it was refused or could not be put into the engines.
        """
        self._require_controller()
        number = self._registry.alias(CANDIDATE) if version is None else version
        if number is None or self._registry.version(number) is None:
            raise ConfigError(f"there is no version {number or 'candidate'} to promote")
        request = Request(id=uuid.uuid4().hex, version=number, actor=actor)
        self._registry.set_tags(
            number, {REVIEW: "approved", PROMOTE_REQUEST: request.model_dump_json()}
        )

        def answer() -> str | None:
            found = self._registry.version(number)
            return None if found is None else found.tags.get(PROMOTE_RESULT)

        return self._report(self._wait(request, answer), number)

    def roll_back(self, command: RollbackCommand) -> int:
        """Ask for an earlier version; 0 when it serves.

        Raises:
            ServiceUnavailable: when no controller runs, or none answered in time.
            PromotionFailed: when there is no such version or the engines did not take it.
        """
        self._require_controller()
        request = Request(
            id=uuid.uuid4().hex,
            version=command.version,
            actor=command.actor,
            reason=command.reason,
        )
        self._registry.set_model_tag(ROLLBACK_REQUEST, request.model_dump_json())
        answer = self._wait(request, lambda: self._registry.model_tags().get(ROLLBACK_RESULT))
        return self._report(answer, command.version)

    def _require_controller(self) -> None:
        if self._lease.holder() is None:
            raise ServiceUnavailable(
                "no deploy controller runs for this policy: start `onlinerl deploy`"
            )

    def _wait(self, request: Request, look: Callable[[], str | None]) -> Answer:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            answer = read_answer(look())
            if answer is not None and answer.id == request.id:
                return answer
            time.sleep(self._poll_s)
        raise ServiceUnavailable(
            f"the controller did not answer within {self._timeout_s:g} s; the request stands"
        )

    def _report(self, answer: Answer, version: int | None) -> int:
        subject = "the version before" if version is None else f"version {version}"
        if answer.verdict not in ("promoted", "rolled back"):
            raise PromotionFailed(f"{subject}: {answer.verdict}: {answer.reason}")
        self._console.print(f"{subject}: {answer.verdict}: {answer.reason}", markup=False)
        return 0


def show_status(
    registry: Registry,
    replicas: Sequence[Replica],
    *,
    controller: str | None,
    console: Console | None = None,
) -> int:
    """Two tables for a person; 1 when no engine serves the champion."""
    out = console or _console()
    champion, candidate = registry.alias(CHAMPION), registry.alias(CANDIDATE)
    out.print(_versions_table(registry.versions(), champion=champion, candidate=candidate))
    serving = [(replica.name, _stamp(replica)) for replica in replicas]
    engines = Table("engine", "serves", title="Engines")
    for name, stamp in serving:
        engines.add_row(name, stamp)
    out.print(engines)
    out.print(f"controller: {controller or 'none runs for this policy'}", markup=False)
    return 0 if any(stamp.endswith(f"/{champion}") for _, stamp in serving) else 1


def _console() -> Console:
    console = Console(emoji=False)
    # A file or a pipe has no width, and what is folded there cannot be searched.
    return console if console.is_terminal else Console(width=_WIDTH, emoji=False)


def _versions_table(
    versions: Sequence[PolicyVersion], *, champion: int | None, candidate: int | None
) -> Table:
    table = Table("version", "alias", VERDICT, *(tag.removeprefix("gate.") for tag in _TAGS))
    table.title = "Versions"
    for version in versions:
        aliases = [
            name
            for name, number in ((CHAMPION, champion), (CANDIDATE, candidate))
            if number == version.number
        ]
        tags = [version.tags.get(tag, "") for tag in _TAGS]
        table.add_row(f"{version.number}", " ".join(aliases), version.verdict or "", *tags)
    return table


def _stamp(replica: Replica) -> str:
    try:
        return replica.stamp()
    except OnlineRLError as error:
        return f"away ({error})"
