import asyncio
import errno
import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from onlinerl.commands.keys import key_hash
from onlinerl.errors import ConfigError, LeaseHeld, RequestRefused
from onlinerl.serving.access import keys_watcher as keys_watcher_module
from onlinerl.serving.access.auth import Keyring
from onlinerl.serving.access.key_file import changing_keys, keys_of_environment, load_keys
from onlinerl.serving.access.keys_watcher import KeysWatcher
from onlinerl.serving.config import ApiKeyConfig
from onlinerl.serving.observability.metrics import GatewayMetrics


def key(name: str) -> ApiKeyConfig:
    return ApiKeyConfig(name=name, sha256=key_hash(name), tenant="acme", consent="train")


def add(path: Path, *names: str) -> None:
    with changing_keys(path) as keys:
        keys += [key(name) for name in names]


def test_keys_are_read_as_they_were_stored(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "keys.json"
    add(path, "a", "b")

    assert load_keys(path) == (key("a"), key("b"))


def test_no_file_is_no_keys(tmp_path: Path) -> None:
    assert load_keys(tmp_path / "keys.json") == ()


def test_only_the_owner_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"keys": []}')
    path.chmod(0o644)
    add(path, "a")

    assert path.stat().st_mode & 0o777 == 0o600


def _clear_and_fail(path: Path) -> None:
    with changing_keys(path) as keys:
        keys.clear()
        raise ZeroDivisionError


def test_a_change_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, "a")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="two API keys have the name 'a'"):
        add(path, "a")
    with pytest.raises(ZeroDivisionError):
        _clear_and_fail(path)

    assert path.read_bytes() == before


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, "a")
    path.chmod(0o622)

    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not of the form"),
        ('{"keys": [], "more": 1}', "not of the form"),
        ('{"keys": [{"name": "a"}]}', "0.sha256"),
        ('{"keys": [{"name": "a", "sha256": "orl-plain"}]}', "0.sha256"),
    ],
)
def test_an_error_names_the_fault_of_a_file_without_its_content(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=words) as caught:
        load_keys(path)

    assert "orl-plain" not in str(caught.value)


def test_keys_of_the_environment_are_a_json_list() -> None:
    entries = json.dumps([{"name": "a", "sha256": key_hash("a"), "tenant": "acme"}])
    (found,) = keys_of_environment({"ONLINERL_API_KEYS": entries})

    assert (found.name, found.tenant, found.consent) == ("a", "acme", "log")
    assert keys_of_environment({}) == keys_of_environment({"ONLINERL_API_KEYS": " "}) == ()


@pytest.mark.parametrize("text", ["orl-plain", '{"a": "orl-plain"}', '[{"name": "orl-plain"}]'])
def test_a_key_pasted_into_the_environment_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="ONLINERL_API_KEYS") as caught:
        keys_of_environment({"ONLINERL_API_KEYS": text})

    assert "orl-plain" not in str(caught.value)


def test_two_simultaneous_changes_lose_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with changing_keys(path) as keys:
        with pytest.raises(LeaseHeld, match="try again"):
            add(path, "b")
        keys.append(key("a"))
    add(path, "b")

    assert [found.name for found in load_keys(path)] == ["a", "b"]


class Watched:
    """A keyring that is filled from a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.ring = Keyring([key("fixed"), *load_keys(path)])
        self.watcher = KeysWatcher(
            path, self.ring, others=[key("fixed")], poll_s=1, metrics=self.metrics
        )

    def knows(self, name: str) -> bool:
        self.watcher.check()
        try:
            return self.ring.identify(f"Bearer {name}").name == name
        except RequestRefused:
            return False

    @property
    def fault(self) -> float | None:
        return self.metrics.registry.get_sample_value("onlinerl_gateway_keys_fault")


def test_a_running_gateway_takes_new_keys_and_refuses_revoked_ones(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, "a")
    watched = Watched(path)
    before = watched.knows("a"), watched.knows("b")
    with changing_keys(path) as keys:
        keys[:] = [key("b")]

    assert before == (True, False)
    assert (watched.knows("a"), watched.knows("b"), watched.knows("fixed")) == (False, True, True)
    path.unlink()
    assert (watched.knows("b"), watched.knows("fixed")) == (False, True)


def test_a_broken_file_changes_nothing_and_sets_the_metric(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, "a")
    watched = Watched(path)
    path.write_text("{")

    assert (watched.knows("a"), watched.fault) == (True, 1)
    path.unlink()
    add(path, "b")
    assert (watched.knows("a"), watched.knows("b"), watched.fault) == (False, True, 0)


def test_a_file_with_a_configured_key_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    watched = Watched(path)
    add(path, "fixed")

    assert (watched.knows("fixed"), watched.fault) == (True, 1)


def test_a_refused_file_that_is_put_right_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, "a", "b")
    watched = Watched(path)
    others = tmp_path / "others.json"
    add(others, "a")
    others.chmod(0o664)
    others.replace(path)
    known, fault = watched.knows("b"), watched.fault
    path.chmod(0o600)

    assert (known, fault) == (True, 1)
    assert (watched.knows("a"), watched.knows("b"), watched.fault) == (True, False, 0)


def test_a_key_that_is_revoked_while_the_gateway_starts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, "a")
    watched = Watched(path)
    watched.ring.replace([key("a"), key("revoked")])  # what the file held before

    assert (watched.knows("revoked"), watched.knows("a")) == (False, True)


def test_a_file_that_did_not_change_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    add(path, "a")
    watched = Watched(path)
    before = watched.knows("a")

    def read(_: Path) -> tuple[ApiKeyConfig, ...]:
        raise ConfigError("read again")

    monkeypatch.setattr(keys_watcher_module, "load_keys", read)
    assert (before, watched.knows("a"), watched.fault) == (True, True, 0)


def test_a_file_that_could_not_be_opened_for_once_is_read_by_the_next_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has no file descriptor left, and the file stays as it is."""
    path = tmp_path / "keys.json"
    watched = Watched(path)
    add(path, "a")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fail)
        with pytest.raises(ConfigError, match="too many open files"):
            watched.watcher.check()

    assert watched.knows("a")


async def test_a_fault_that_repeats_is_counted_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    add(path, "a")
    watched = Watched(path)
    waits: list[float] = []

    def fail(_: Path) -> tuple[ApiKeyConfig, ...]:
        raise TypeError("a bug")

    async def sleep(wait_s: float) -> None:
        waits.append(wait_s)
        if len(waits) == 5:
            monkeypatch.setattr(keys_watcher_module, "load_keys", load_keys)
        if len(waits) == 6:
            raise asyncio.CancelledError

    monkeypatch.setattr(keys_watcher_module, "load_keys", fail)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await watched.watcher.watch()

    failures = watched.metrics.registry.get_sample_value("onlinerl_gateway_keys_failures_total")
    logged = [record for record in caplog.records if record.exc_info]
    assert (waits, failures, len(logged)) == ([1, 1, 2, 4, 8, 1], 4, 1)
    assert (watched.fault, watched.knows("a")) == (0, True)
