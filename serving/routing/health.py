"""When a replica that fails is left alone, and when it is asked again. No clock, no I/O.

IN ──`eject_after` points of failure in a row──► OUT ──`return_after` good looks in a row──► IN
"""

from dataclasses import dataclass

from onlinerl.errors import EngineFailed, EngineUnreachable

AT_ONCE = 1_000_000
"""Points of a failure that leaves no doubt."""

_SLOW = 504
_BROKEN = (502, 503, 504)


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
    """A health check that came too late says that a machine is busy; anything else is certain."""
    return 1 if error.status == _SLOW else AT_ONCE


def points_of_request(error: EngineFailed) -> int:
    """A refusal is about the request, a broken answer about the replica."""
    if isinstance(error, EngineUnreachable) and not error.is_late:
        return AT_ONCE
    return 2 if error.status in _BROKEN else 0
