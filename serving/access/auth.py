"""The API keys that the gateway knows, and the callers they stand for."""

import hashlib
import hmac
from collections import Counter
from collections.abc import Sequence

from onlinerl.errors import ConfigError, RequestRefused
from onlinerl.serving.config import ApiKeyConfig
from onlinerl.serving.interaction.caller import Caller


class Keyring:
    """All known keys, by their SHA-256. `replace` changes them while the gateway runs.

    Raises:
        ConfigError: there is no key, because a gateway never runs open; or two keys share a name
            or a hash.
    """

    def __init__(self, keys: Sequence[ApiKeyConfig]) -> None:
        if not keys:
            raise ConfigError(
                "[gateway].api_keys is empty, and no other source has a key: make one with "
                "`onlinerl keys add NAME`; there is no default key"
            )
        self._keys = _callers(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def replace(self, keys: Sequence[ApiKeyConfig]) -> None:
        """Know exactly `keys` from now on; without any, nobody is let in.

        Raises:
            ConfigError: two keys share a name or a hash; nothing was changed.
        """
        self._keys = _callers(keys)

    def identify(self, authorization: str | None, api_key: str | None = None) -> Caller:
        """The caller of a request.

        Args:
            authorization: The header `Authorization: Bearer KEY`; it counts if both are given.
            api_key: The header `x-api-key`, which Anthropic's clients send.

        Raises:
            RequestRefused: 401, the key is missing or unknown.
        """
        key = _bearer(authorization) if authorization else (api_key or "").strip()
        digest = hashlib.sha256(key.encode()).hexdigest()
        match = None
        for known, caller in self._keys:
            # Every key is compared, so that the time does not depend on the key.
            if hmac.compare_digest(known, digest):
                match = caller
        if match is None or not key:
            raise RequestRefused("the API key is missing or unknown", 401, None, "invalid_api_key")
        return match


def check_unique(keys: Sequence[ApiKeyConfig]) -> None:
    """Check that no two keys share a name or a hash.

    Raises:
        ConfigError: two keys do; the error says what they share.
    """
    for what, values in (
        ("name", [key.name for key in keys]),
        ("sha256", [key.sha256 for key in keys]),
    ):
        repeated = [value for value, number in Counter(values).items() if number > 1]
        if repeated:
            raise ConfigError(
                f"two API keys have the {what} {repeated[0]!r}: names and hashes must be unique "
                "over configuration, keys file and environment"
            )


def _callers(keys: Sequence[ApiKeyConfig]) -> list[tuple[str, Caller]]:
    check_unique(keys)
    return [
        (
            key.sha256,
            Caller(
                name=key.name,
                tenant=key.tenant,
                consent=key.consent,
                limits=key.limits,
                policies=key.policies,
            ),
        )
        for key in keys
    ]


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
