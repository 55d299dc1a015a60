"""Who calls the gateway, and what may be done with their traffic."""

from dataclasses import dataclass, field

from onlinerl.errors import RequestRefused
from onlinerl.rollout_store.schema import Consent
from onlinerl.serving.config import KeyLimits

_WIDTHS: dict[str, int] = {"none": 0, "log": 1, "train": 2}


@dataclass(frozen=True, kw_only=True)
class Caller:
    """A caller whose API key was recognised."""

    name: str
    tenant: str
    consent: Consent
    limits: KeyLimits = field(default_factory=KeyLimits)
    policies: tuple[str, ...] = ()
    """Policies that the caller may use; all of them when empty."""

    def check_policy(self, policy: str) -> None:
        """Refuse a policy that the caller may not use.

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


def narrow_consent(granted: Consent, asked: str | None) -> Consent:
    """The consent of a request: that of its API key, narrowed to what the request asks for.

    Args:
        granted: Consent of the API key.
        asked: Value of the consent header; None when it was not sent.

    Raises:
        RequestRefused: when `asked` is not a consent.
    """
    consents: dict[str, Consent] = {"none": "none", "log": "log", "train": "train"}
    if asked is None:
        return granted
    if asked not in consents:
        raise RequestRefused(f"x-onlinerl-consent is {asked!r}: give none, log or train")
    return intersect_consents(consents[asked], granted)


def intersect_consents(one: Consent, other: Consent) -> Consent:
    """What both consents allow: the narrower one."""
    return one if _WIDTHS[one] <= _WIDTHS[other] else other
