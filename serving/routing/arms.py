"""Which arm answers whom: champion, canary or shadow. Pure functions of values.

A session stays with its arm for as long as a canary lives. A keyed hash of its id and the canary's
version gives it a fraction in [0, 1), and the canary answers the fractions below its share. A share
that grows therefore adds sessions and drops none, and the next canary draws other sessions.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from onlinerl.rollout_store.schema import Arm, ArmRow


@dataclass(frozen=True, kw_only=True)
class Target:
    """What an arm serves, and its share of the traffic."""

    arm: Arm
    version: int
    share: float
    """Share of the sessions; for a shadow, share of the requests that it answers as well."""
    adapter: str | None = None
    """LoRA adapter that answers; None means replicas that serve the full weights."""


@dataclass(frozen=True, kw_only=True)
class Arms:
    """What is decided for a policy. Without canary and shadow the champion answers everything."""

    decision_id: str | None = None
    champion: Target | None = None
    """Only its adapter counts: full weights of the champion are those that no other arm pins."""
    canary: Target | None = None
    shadow: Target | None = None

    @property
    def uses_adapters(self) -> bool:
        """Whether an arm is a LoRA adapter."""
        targets = (self.champion, self.canary, self.shadow)
        return any(target is not None and target.adapter is not None for target in targets)

    def draws_canary(self, session_id: str, *, key: bytes) -> bool:
        """Whether a session belongs to the canary."""
        canary = self.canary
        return canary is not None and (
            hash_fraction(session_id, version=canary.version, key=key) < canary.share
        )

    def draws_shadow(self, interaction_id: str, *, key: bytes) -> bool:
        """Whether the shadow answers a request as well."""
        shadow = self.shadow
        return shadow is not None and (
            hash_fraction(interaction_id, version=shadow.version, key=key) < shadow.share
        )


def hash_fraction(name: str, *, version: int, key: bytes) -> float:
    """A number in [0, 1), uniform over names; without the key nobody can choose it by the name."""
    digest = hmac.digest(key, f"{version}:{name}".encode(), hashlib.sha256)
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def read_newest(rows: Sequence[ArmRow], *, policy: str) -> Arms:
    """The arms of the newest decision about `policy` in `rows`.

    The champion's adapter holds until a later decision names another champion. A decision that was
    stored twice counts once.
    """
    own = sorted(
        (row for row in rows if row.policy == policy),
        key=lambda row: (row.decided_at, row.decision_id),
    )
    if not own:
        return Arms()
    decision_id = own[-1].decision_id
    targets: dict[Arm, Target] = {}
    for row in own:
        if row.decision_id == decision_id:
            targets[row.arm] = _target(row)
    champions = [row for row in own if row.arm == "champion"]
    return Arms(
        decision_id=decision_id,
        champion=_target(champions[-1]) if champions else None,
        canary=targets.get("canary"),
        shadow=targets.get("shadow"),
    )


def _target(row: ArmRow) -> Target:
    return Target(arm=row.arm, version=row.version, share=row.share, adapter=row.adapter)
