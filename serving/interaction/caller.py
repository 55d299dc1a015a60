"""Who calls, and what may be done with their traffic."""

from dataclasses import dataclass, field

from onlinerl.errors import RequestRefused
from onlinerl.rollout_store.schema import Consent
from onlinerl.serving.config import KeyLimits

_WIDTH: dict[str, int] = {"none": 0, "log": 1, "train": 2}


@dataclass(frozen=True, kw_only=True)
class Caller:
    """A caller whose key was recognised."""

    name: str
    tenant: str
    consent: Consent
    limits: KeyLimits = field(default_factory=KeyLimits)
    policies: tuple[str, ...] = ()
    """Policies that it may ask; every one when empty."""

    def check_policy(self, policy: str) -> None:
        """Nothing, when the caller may ask `policy`.

        Raises:
            RequestRefused: with 403.
        """
        if self.policies and policy not in self.policies:
            raise RequestRefused(
                f"this API key may not ask {policy!r}: it is allowed {', '.join(self.policies)}",
                403,
                "model",
                "model_not_allowed",
            )


def narrowed(granted: Consent, asked: str | None) -> Consent:
    """The consent of a request: that of its key, or less.

    Raises:
        RequestRefused: when `asked` is not a consent.
    """
    consents: dict[str, Consent] = {"none": "none", "log": "log", "train": "train"}
    if asked is None:
        return granted
    if asked not in consents:
        raise RequestRefused(f"x-onlinerl-consent is {asked!r}: give none, log or train")
    return narrowest(consents[asked], granted)


def narrowest(one: Consent, other: Consent) -> Consent:
    """The narrower of two consents."""
    return one if _WIDTH[one] <= _WIDTH[other] else other
