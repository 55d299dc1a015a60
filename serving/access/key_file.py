"""API keys outside the configuration: the file of `onlinerl keys`, and the environment.

Both hold hashes only. The file is replaced in one step, so a running gateway reads it whole or not.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from onlinerl.errors import ConfigError, LeaseHeld
from onlinerl.secret_names import API_KEYS
from onlinerl.serving.access.auth import check_unique
from onlinerl.serving.config import ApiKeyConfig

_KEYS = TypeAdapter(tuple[ApiKeyConfig, ...])


def load_keys(path: Path) -> tuple[ApiKeyConfig, ...]:
    """The keys of a file; none when there is no file.

    Raises:
        ConfigError: when it cannot be read, or when others than its owner may write it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the keys file {path} cannot be read: {error}") from error
    if mode & 0o022:
        raise ConfigError(
            f"the keys file {path} may be written by others (mode {mode & 0o777:o}), who could add "
            f"a key of theirs: chmod 600 {path}"
        )
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the keys file {path} is not JSON: {error}") from error
    if not isinstance(document, dict) or set(document) != {"keys"}:
        raise ConfigError(f'the keys file {path} is not of the form {{"keys": [...]}}')
    return _parse(document["keys"], source=f"the keys file {path}")


def keys_of_environment(environment: Mapping[str, str]) -> tuple[ApiKeyConfig, ...]:
    """The keys of `ONLINERL_API_KEYS`.

    Raises:
        ConfigError: when it is not a JSON list of keys.
    """
    text = environment.get(API_KEYS, "").strip()
    if not text:
        return ()
    try:
        entries = json.loads(text)
    except ValueError as error:
        # The text itself may be a key that was pasted into the wrong place.
        raise ConfigError(f"{API_KEYS} is not a JSON list of hashed keys") from error
    return _parse(entries, source=API_KEYS)


@contextlib.contextmanager
def changing_keys(path: Path) -> Iterator[list[ApiKeyConfig]]:
    """The keys of a file, to be changed in place; stored when the block ends without an error.

    The file is readable by its owner only.

    Raises:
        ConfigError: when the file cannot be read or written, or two keys share name or hash.
        LeaseHeld: when somebody else is changing it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock").open("ab")
    except OSError as error:
        raise ConfigError(f"the keys file {path} cannot be written: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LeaseHeld(f"somebody else is changing {path}: try again") from error
        keys = list(load_keys(path))
        yield keys
        check_unique(keys)
        try:
            _store(path, keys)
        except OSError as error:
            raise ConfigError(f"the keys file {path} cannot be written: {error}") from error


def _parse(entries: object, *, source: str) -> tuple[ApiKeyConfig, ...]:
    try:
        keys = _KEYS.validate_python(entries)
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"]) or "the list"
        raise ConfigError(f"{source}: {where}: {fault['msg']}") from error
    check_unique(keys)
    return keys


def _store(path: Path, keys: Sequence[ApiKeyConfig]) -> None:
    entries = [key.model_dump(mode="json", exclude_defaults=True) for key in keys]
    staging = path.with_name(f".{path.name}.tmp")
    staging.unlink(missing_ok=True)
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"keys": entries}, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)
