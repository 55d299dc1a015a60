"""When a replica that fails is left alone, and when it is asked again. No clock, no I/O.

IN ──`eject_after` points of failure in a row──► OUT ──`return_after` good looks in a row──► IN
"""

from dataclasses import dataclass

from onlinerl.errors import (
    AnswerCutOff,
    EngineDisconnected,
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    GatewayFault,
)

AT_ONCE = 1_000_000
"""Points of a failure that leaves no doubt."""

_MAY_BE_BUSY = (EngineTimeout, EngineDisconnected)
_NOT_THE_REPLICAS_FAULT = (EngineRefused, AnswerCutOff, GatewayFault)


@dataclass
class Health:
    """Of one replica; one good answer makes up for every failure before it."""

    eject_after: int
    return_after: int
    points: int = 0
    good_looks: int = 0
    """In a row, since it is out."""
    is_out: bool = False

    def failed(self, points: int) -> bool:
        """Count a failure; whether it puts the replica out."""
        self.good_looks = 0
        self.points += points
        if self.is_out or self.points < self.eject_after:
            return False
        self.is_out = True
        return True

    def answered(self) -> None:
        """A request was served: it lives, however slow its health check may be."""
        if not self.is_out:
            self.points = 0

    def looked_good(self, *, is_needed: bool) -> None:
        """A look went well; `is_needed` when no other replica serves, so that one is enough."""
        self.good_looks += 1
        if self.is_out and self.good_looks < self.return_after and not is_needed:
            return
        self.is_out, self.points, self.good_looks = False, 0, 0


def points_of_look(error: EngineFailed) -> int:
    """The weight of a failed health check.

    A check that timed out or lost its connection may only mean that the machine is busy; any other
    failure ejects at once.
    """
    return 1 if isinstance(error, _MAY_BE_BUSY) else AT_ONCE


def points_of_request(error: EngineFailed) -> int:
    """The weight of a failed request: none for a refusal, which is about the request."""
    if isinstance(error, EngineUnreachable) and not error.is_late:
        return AT_ONCE
    return 0 if isinstance(error, _NOT_THE_REPLICAS_FAULT) else 2
