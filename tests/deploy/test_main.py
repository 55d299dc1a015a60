"""The loop of `onlinerl deploy`."""

import json
import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import pytest

from onlinerl.deploy.main import _loop, _try_to_take, _wait_for_tables
from onlinerl.deploy.promotion.controller import Controller
from onlinerl.errors import LeaseHeld, ServiceUnavailable
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.settings import Settings
from tests.waiting import until

RUN_DEPLOY = """
import logging, sys
from onlinerl.deploy.main import run_deploy
from onlinerl.settings import Settings
logging.basicConfig(level=logging.INFO)
sys.exit(run_deploy(Settings.model_validate_json(sys.argv[1])))
"""


class Looks:
    """A controller whose looks go as listed: an error, or the status that they leave."""

    def __init__(self, stop: threading.Event, *looks: str | Exception | None) -> None:
        self._stop, self._looks = stop, list(looks)
        self.status: str | None = None

    def tick(self) -> None:
        look = self._looks.pop(0)
        if not self._looks:
            self._stop.set()
        if isinstance(look, Exception):
            raise look
        self.status = look


def test_an_engine_that_is_away_is_said_once_per_absence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop, away = threading.Event(), ServiceUnavailable("no engine answers")
    looks = Looks(stop, away, away, "no engine answers", away, None, away)

    with caplog.at_level(logging.WARNING):
        _loop(cast(Controller, looks), stop, poll_s=0.001)

    assert [record.getMessage() for record in caplog.records] == [
        "look ended early: no engine answers"
    ] * 2
    assert looks.status == "no engine answers"


def test_a_lost_lease_ends_the_loop() -> None:
    stop = threading.Event()
    with pytest.raises(LeaseHeld):
        _loop(cast(Controller, Looks(stop, None, LeaseHeld("lost"), None)), stop, poll_s=0.001)


class Waits(threading.Event):
    """A stop signal that remembers how long it was waited for, and does something then."""

    def __init__(self, *acts: object) -> None:
        super().__init__()
        self.waits: list[float] = []
        self._acts = list(acts)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        act = self._acts.pop(0)
        if callable(act):
            act()
        return self.is_set()


def test_tables_that_are_away_at_the_start_are_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file stands where their folder should be."""
    (tmp_path / "store").touch()
    store = DeltaStore(str(tmp_path / "store"))
    lease = Lease(store, name="deploy assistant", ttl_s=60)
    controller = cast(Controller, Looks(threading.Event()))
    trouble = _try_to_take(lease, store)
    assert trouble is not None
    stop = Waits(None, None, (tmp_path / "store").unlink)

    _wait_for_tables(lease, store, controller, stop, trouble)

    assert lease.fence == 1
    assert stop.waits == [1.0, 2.0, 4.0]
    assert [record.getMessage() for record in caplog.records] == [controller.status]
    assert str(controller.status).startswith("cannot take the lease: cannot ")


def test_a_controller_that_waits_for_tables_can_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    store = DeltaStore(str(tmp_path / "store"))
    lease, stop = Lease(store, name="deploy assistant", ttl_s=60), Waits()
    stop._acts = [stop.set]

    controller = cast(Controller, Looks(threading.Event()))
    _wait_for_tables(lease, store, controller, stop, "away")
    assert lease.fence == 0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A registry that is away: the controller holds its lease and looks in vain."""
    return Settings.model_validate(
        {
            "data_dir": tmp_path,
            "policy": {"name": "assistant"},
            "registry": {"tracking_uri": "http://127.0.0.1:19499", "experiment": "x"},
            "deploy": {"health_port": 0, "poll_s": 0.1, "request_timeout_s": 0.2},
        }
    )


def start(settings: Settings) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN_DEPLOY, settings.model_dump_json()]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_a_second_controller_names_the_first_and_one_that_is_killed_is_followed_at_once(
    settings: Settings,
) -> None:
    hint = settings.data_dir / "deploy" / "assistant" / "controller.lease"

    def runs(process: subprocess.Popen[str], *, fence: int) -> bool:
        assert process.poll() is None
        content = hint.read_bytes() if hint.exists() else b""
        return bool(content) and json.loads(content)["fence"] == fence

    with start(settings) as first:
        until(lambda: runs(first, fence=1))
        with start(settings) as second:
            _, errors = second.communicate(timeout=60)
        assert second.returncode == 1
        assert f"'deploy assistant' is held by process {first.pid} on" in errors
        first.kill()
        first.communicate(timeout=60)
    with start(settings) as successor:
        until(lambda: runs(successor, fence=2))
        successor.send_signal(signal.SIGTERM)
        successor.communicate(timeout=60)
        assert successor.returncode == 0
