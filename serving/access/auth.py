"""The keys that the gateway knows, and who calls with one of them."""

import hashlib
import hmac
from collections import Counter
from collections.abc import Sequence

from onlinerl.errors import ConfigError, RequestRefused
from onlinerl.serving.config import ApiKeyConfig
from onlinerl.serving.interaction.caller import Caller


class Keyring:
    """The keys that are known, by their SHA-256. Replaced as a whole while the gateway runs.

    Raises:
        ConfigError: when there is none, or two share a name or a hash; an open gateway is never
            started.
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
        """Know exactly `keys` from now on; none means that nobody is let in.

        Raises:
            ConfigError: when two share a name or a hash; then nothing changes.
        """
        self._keys = _callers(keys)

    def identify(self, authorization: str | None, api_key: str | None = None) -> Caller:
        """The caller of a request.

        Args:
            authorization: the header `Authorization: Bearer KEY`, which counts where both are
                given.
            api_key: the header `x-api-key`, which Anthropic's clients send.

        Raises:
            RequestRefused: with 401 when the key is missing or unknown.
        """
        key = _bearer(authorization) if authorization else (api_key or "").strip()
        digest = hashlib.sha256(key.encode()).hexdigest()
        found = None
        for known, caller in self._keys:
            # Every key is compared, so the time tells nothing.
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None or not key:
            raise RequestRefused("the API key is missing or unknown", 401, None, "invalid_api_key")
        return found


def check_unique(keys: Sequence[ApiKeyConfig]) -> None:
    """Nothing, when every key has a name and a hash of its own.

    Raises:
        ConfigError: naming what two of them share.
    """
    for what, values in (
        ("name", [key.name for key in keys]),
        ("sha256", [key.sha256 for key in keys]),
    ):
        twice = [value for value, number in Counter(values).items() if number > 1]
        if twice:
            raise ConfigError(
                f"API keys: two have the {what} {twice[0]!r}; names and hashes are unique over "
                "configuration, keys file and environment"
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
