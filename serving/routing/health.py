"""When a failing replica gets no more requests, and when it gets them again. No clock, no I/O.

IN ──`eject_after` points of failure in a row──► OUT ──`return_after` good checks in a row──► IN
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
"""Points of a failure that ejects a replica whatever `eject_after` is."""

_MAY_BE_BUSY = (EngineTimeout, EngineDisconnected)
_NOT_THE_REPLICAS_FAULT = (EngineRefused, AnswerCutOff, GatewayFault)


@dataclass
class Health:
    """Health of one replica. One good answer cancels every failure before it."""

    eject_after: int
    return_after: int
    points: int = 0
    """Points of failure since the last good answer."""
    good_looks: int = 0
    """Good checks in a row since the replica is out."""
    is_out: bool = False

    def note_failure(self, points: int) -> bool:
        """Add the points of a failure; True when this one ejects the replica."""
        self.good_looks = 0
        self.points += points
        if self.is_out or self.points < self.eject_after:
            return False
        self.is_out = True
        return True

    def note_answer(self) -> None:
        """Note that a request was served, which proves health however slow the checks may be."""
        if not self.is_out:
            self.points = 0

    def note_good_look(self, *, is_needed: bool) -> None:
        """Note a good check; one is enough when the replica `is_needed`: no other serves."""
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
