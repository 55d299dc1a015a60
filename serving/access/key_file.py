"""API keys outside the configuration: in the file of `onlinerl keys`, and in the environment.

Both hold only hashes of keys. The file is replaced in one step, so a running gateway never reads a
partial one.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from onlinerl.errors import ConfigError, LeaseHeld
from onlinerl.process.files import replace_file
from onlinerl.secret_names import API_KEYS
from onlinerl.serving.access.auth import check_unique
from onlinerl.serving.config import ApiKeyConfig

_KEYS = TypeAdapter(tuple[ApiKeyConfig, ...])


def load_keys(path: Path) -> tuple[ApiKeyConfig, ...]:
    """The keys of a file; none if there is no file.

    Raises:
        ConfigError: the file cannot be read or is malformed, or others than its owner may write it.
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
            f"keys of their own: chmod 600 {path}"
        )
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the keys file {path} is not JSON: {error}") from error
    if not isinstance(document, dict) or set(document) != {"keys"}:
        raise ConfigError(f'the keys file {path} is not of the form {{"keys": [...]}}')
    return _parse(document["keys"], source=f"the keys file {path}")


def keys_of_environment(environment: Mapping[str, str]) -> tuple[ApiKeyConfig, ...]:
    """The keys in the variable `ONLINERL_API_KEYS`; none if it is not set.

    Raises:
        ConfigError: the variable is not a JSON list of keys.
    """
    text = environment.get(API_KEYS, "").strip()
    if not text:
        return ()
    try:
        entries = json.loads(text)
    except ValueError as error:
        # The text is not quoted: it may be a key that was pasted into the wrong place.
        raise ConfigError(f"{API_KEYS} is not a JSON list of hashed keys") from error
    return _parse(entries, source=API_KEYS)


@contextlib.contextmanager
def changing_keys(path: Path) -> Iterator[list[ApiKeyConfig]]:
    """A list of the file's keys to change; it is written when the block ends without an error.

    Only the owner can read the file.

    Raises:
        ConfigError: the file cannot be read or written, or two keys share a name or a hash.
        LeaseHeld: another process is changing the file.
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
            raise LeaseHeld(f"another process is changing {path}: try again") from error
        keys = list(load_keys(path))
        yield keys
        check_unique(keys)
        try:
            _write(path, keys)
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


def _write(path: Path, keys: Sequence[ApiKeyConfig]) -> None:
    entries = [key.model_dump(mode="json", exclude_defaults=True) for key in keys]
    replace_file(path, json.dumps({"keys": entries}, indent=2) + "\n", private=True)
