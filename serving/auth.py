"""Who calls, and what may be done with their traffic."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from onlinerl.errors import ConfigError, RequestRefused
from onlinerl.rollout_store.schema import Consent
from onlinerl.serving.config import ApiKeyConfig

_WIDTH: dict[str, int] = {"none": 0, "log": 1, "train": 2}


@dataclass(frozen=True, kw_only=True)
class Caller:
    """A caller whose key was recognised."""

    name: str
    tenant: str
    consent: Consent


class Keyring:
    """The configured keys.

    Raises:
        ConfigError: when there is none; an open gateway is never started.
    """

    def __init__(self, keys: Sequence[ApiKeyConfig]) -> None:
        if not keys:
            raise ConfigError(
                "[gateway].api_keys is empty: add {name, sha256, tenant, consent}; there is no "
                "default key"
            )
        self._keys = [
            (key.sha256, Caller(name=key.name, tenant=key.tenant, consent=key.consent))
            for key in keys
        ]

    def identify(self, authorization: str | None) -> Caller:
        """The caller of an `Authorization: Bearer …` header.

        Raises:
            RequestRefused: with 401 when the key is missing or unknown.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).hexdigest()
        found = None
        for known, caller in self._keys:
            # Every key is compared, so the time tells nothing.
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None or scheme.lower() != "bearer":
            raise RequestRefused("the API key is missing or unknown", 401, None, "invalid_api_key")
        return found


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


class UserHasher:
    """Keyed hash of user ids: equal users stay equal, nobody reads who they are."""

    def __init__(self, key: str | None) -> None:
        self._key = None if key is None else key.encode()

    def hash(self, user: str | None, *, tenant: str) -> str | None:
        """What is logged in place of `user`; nothing when there is no key."""
        if user is None or self._key is None:
            return None
        message = f"{tenant}\0{user}".encode()
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()[:32]
