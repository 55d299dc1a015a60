"""`onlinerl keys`: makes, lists and revokes API keys.

Only the owner keeps a key. The keys file and the configuration hold its SHA-256.
"""

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.schema import Consent
from onlinerl.secret_names import API_KEYS
from onlinerl.serving.access.auth import check_unique
from onlinerl.serving.access.key_file import changing_keys, keys_of_environment, load_keys
from onlinerl.serving.config import ApiKeyConfig, KeyLimits
from onlinerl.settings import Settings

PREFIX = "orl-"
"""Start of every key, so that people and secret scanners recognise one."""


def new_key() -> str:
    """A new key with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def key_hash(key: str) -> str:
    """The SHA-256 of a key in lower-case hexadecimal, as configurations and keys files hold it.

    A plain hash is enough, because the key is too long and random to be guessed offline.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def keys_path(settings: Settings) -> Path:
    """The file that `onlinerl keys` writes and the gateway reads."""
    return Path(settings.gateway.keys_file or settings.folder("keys.json"))


def known_keys(
    settings: Settings, environment: Mapping[str, str]
) -> dict[str, tuple[ApiKeyConfig, ...]]:
    """The keys that a gateway with these settings accepts, by source.

    The sources are the configuration, the keys file and the environment variable.

    Raises:
        ConfigError: the file or the variable cannot be read, or two keys share a name or a hash.
    """
    path = keys_path(settings)
    sources = {
        "configuration": settings.gateway.api_keys,
        str(path): load_keys(path),
        API_KEYS: keys_of_environment(environment),
    }
    check_unique([key for keys in sources.values() for key in keys])
    return sources


def run_keys_new(*, name: str, tenant: str, consent: Consent) -> int:
    """Print a new key to standard error, and the TOML that admits it to standard output.

    Raises:
        ConfigError: the gateway would refuse the name or the tenant.
    """
    key = new_key()
    entry = _entry(name=name, sha256=key_hash(key), tenant=tenant, consent=consent)
    fields = entry.model_dump(mode="json", include={"name", "sha256", "tenant", "consent"})
    # A JSON string is also a TOML string unless it holds escaped surrogates or DEL. There are none:
    # ensure_ascii=False keeps what is not ASCII as it is, and an entry has no control characters.
    lines = [f"{field} = {json.dumps(text, ensure_ascii=False)}" for field, text in fields.items()]
    _show_once(key)
    sys.stdout.write("\n".join(["[[gateway.api_keys]]", *lines]) + "\n")
    return 0


def key_limits(**limits: int | None) -> KeyLimits:
    """Validate the limits of a key that the command line gives; None means no limit of its own.

    Raises:
        ConfigError: a limit is out of range.
    """
    try:
        return KeyLimits(**limits)
    except ValidationError as error:
        raise ConfigError(_describe(error)) from error


def run_keys_add(
    settings: Settings,
    *,
    name: str,
    tenant: str,
    consent: Consent,
    policies: Sequence[str],
    limits: KeyLimits,
) -> int:
    """Add a new key to the keys file and print it to standard error, once.

    A running gateway accepts it within `gateway.keys_poll_s`.

    Raises:
        ConfigError: the name is taken, a value is invalid, or the keys file cannot be written.
    """
    key = new_key()
    entry = _entry(
        name=name,
        sha256=key_hash(key),
        tenant=tenant,
        consent=consent,
        policies=policies,
        limits=limits,
    )
    path = keys_path(settings)
    with changing_keys(path) as keys:
        if any(known.name == name for known in (*settings.gateway.api_keys, *keys)):
            raise ConfigError(f"there is a key {name!r} already; revoke it or choose another name")
        keys.append(entry)
    sys.stdout.write(f"added {name!r} (tenant {tenant}, consent {consent}) to {path}\n")
    _show_once(key)
    return 0


def run_keys_list(settings: Settings) -> int:
    """Print one line per key of configuration, file and environment; none shows the key itself."""
    sources = known_keys(settings, os.environ)
    rows = [_row(key, source) for source, keys in sources.items() for key in keys]
    heads = ("name", "tenant", "consent", "policies", "limits", "sha256", "from")
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    for row in (heads, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    return 0


def run_keys_revoke(settings: Settings, *, name: str) -> int:
    """Remove a key from the keys file; a running gateway refuses it within `gateway.keys_poll_s`.

    Raises:
        ConfigError: the keys file has no such key.
    """
    path = keys_path(settings)
    with changing_keys(path) as keys:
        others = [key for key in keys if key.name != name]
        if len(others) == len(keys):
            raise ConfigError(_explain_absence(settings, name=name, path=path))
        keys[:] = others
    sys.stdout.write(f"revoked {name!r}\n")
    return 0


def _entry(
    *,
    name: str,
    sha256: str,
    tenant: str,
    consent: Consent,
    policies: Sequence[str] = (),
    limits: KeyLimits | None = None,
) -> ApiKeyConfig:
    try:
        return ApiKeyConfig(
            name=name,
            sha256=sha256,
            tenant=tenant,
            consent=consent,
            policies=tuple(policies),
            limits=limits or KeyLimits(),
        )
    except ValidationError as error:
        raise ConfigError(_describe(error)) from error


def _describe(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field} = {first['input']!r}: {first['msg']}"


def _explain_absence(settings: Settings, *, name: str, path: Path) -> str:
    if any(key.name == name for key in settings.gateway.api_keys):
        return (
            f"the key {name!r} stands in the configuration; delete its [[gateway.api_keys]] there "
            "and restart the gateway"
        )
    return f"{path} has no key {name!r}; `onlinerl keys list` shows those that exist"


def _row(key: ApiKeyConfig, source: str) -> tuple[str, ...]:
    own_limits = key.limits.model_dump(exclude_none=True)
    limits = ",".join(f"{name}={value}" for name, value in own_limits.items())
    policies = ",".join(key.policies) or "all"
    return key.name, key.tenant, key.consent, policies, limits or "-", key.sha256[:12], source


def _show_once(key: str) -> None:
    sys.stderr.write(f"key (shown once, give it to the client): {key}\n")
