"""`onlinerl promote`, `rollback` and `status`, as a person runs them.

The commands leave a request in the registry and wait for the answer of the controller, because only
the controller moves aliases and changes engines.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from onlinerl.deploy.registry.protocol import (
    PROMOTE_REQUEST,
    PROMOTE_RESULT,
    ROLLBACK_REQUEST,
    ROLLBACK_RESULT,
    Registry,
)
from onlinerl.deploy.registry.requests import OperatorReply, OperatorRequest, read_reply
from onlinerl.deploy.replicas.engine_control import EngineControl
from onlinerl.errors import ConfigError, OnlineRLError, PromotionFailed, ServiceUnavailable
from onlinerl.registry.version import CANDIDATE, CHAMPION, REVIEW, VERDICT, RegisteredVersion
from onlinerl.rollout_store.tables.lease import Lease

_TAGS = ("parent_version", "gate.finite", "gate.drift", "gate.reward", "gate.perplexity", REVIEW)

_WIDTH = 200
"""Columns of a table that is written to a file or a pipe."""


@dataclass(frozen=True)
class RollbackCommand:
    """The arguments of `onlinerl rollback`."""

    version: int | None
    """Number of the version to serve again; None for the one before the champion."""
    actor: str
    reason: str


class Commands:
    """Sends requests to the controller and waits for its answers.

    Args:
        registry: Holds requests and answers as tags.
        lease: The controller's lease; tells whether one runs.
        timeout_s: Longest wait for an answer, seconds.
        poll_s: Time between two reads of the registry, seconds.
        console: Prints the answer; None prints to the terminal.
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
        """Approve a version and ask the controller to promote it.

        Args:
            version: Number of the version; None takes the candidate.
            actor: Who asks.

        Returns:
            0, the exit code, when the version serves.

        Raises:
            ConfigError: when there is no such version.
            ServiceUnavailable: when no controller runs, or it did not answer in time.
            PromotionFailed: when it was refused or could not be put into the engines.
        """
        self._require_controller()
        number = self._registry.alias(CANDIDATE) if version is None else version
        if number is None or self._registry.version(number) is None:
            raise ConfigError(
                "there is no candidate to promote"
                if number is None
                else f"there is no version {number} to promote; `onlinerl status` lists them"
            )
        request = OperatorRequest(id=uuid.uuid4().hex, version=number, actor=actor)
        self._registry.set_tags(
            number, {REVIEW: "approved", PROMOTE_REQUEST: request.model_dump_json()}
        )

        def answer() -> str | None:
            registered = self._registry.version(number)
            return None if registered is None else registered.tags.get(PROMOTE_RESULT)

        return self._report(self._wait(request, answer), number)

    def roll_back(self, command: RollbackCommand) -> int:
        """Ask the controller to serve an earlier version again.

        Returns:
            0, the exit code, when the version serves.

        Raises:
            ServiceUnavailable: when no controller runs, or it did not answer in time.
            PromotionFailed: when there is no such version or the engines did not take it.
        """
        self._require_controller()
        request = OperatorRequest(
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

    def _wait(self, request: OperatorRequest, read_tag: Callable[[], str | None]) -> OperatorReply:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            answer = read_reply(read_tag())
            if answer is not None and answer.id == request.id:
                return answer
            time.sleep(self._poll_s)
        raise ServiceUnavailable(
            f"the controller did not answer within {self._timeout_s:g} s"
            " (deploy.command_timeout_s); it may still carry the request out, see `onlinerl status`"
        )

    def _report(self, answer: OperatorReply, version: int | None) -> int:
        subject = "the version before" if version is None else f"version {version}"
        if answer.verdict not in ("promoted", "rolled back"):
            raise PromotionFailed(f"{subject}: {answer.verdict}: {answer.reason}")
        self._console.print(f"{subject}: {answer.verdict}: {answer.reason}", markup=False)
        return 0


def show_status(
    registry: Registry,
    replicas: Sequence[EngineControl],
    *,
    controller: str | None,
    console: Console | None = None,
) -> int:
    """Print the versions and the engines as tables.

    Args:
        registry: Holds the versions.
        replicas: The engines.
        controller: The controller that holds the lease; None when none runs.
        console: Prints the tables; None prints to the terminal.

    Returns:
        The exit code: 0 when an engine serves the champion, else 1.
    """
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
    # A file or a pipe has no width of its own, and text in folded cells cannot be searched.
    return console if console.is_terminal else Console(width=_WIDTH, emoji=False)


def _versions_table(
    versions: Sequence[RegisteredVersion], *, champion: int | None, candidate: int | None
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


def _stamp(replica: EngineControl) -> str:
    try:
        return replica.stamp()
    except OnlineRLError as error:
        return f"away ({error})"
