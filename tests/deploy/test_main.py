"""The loop of `onlinerl deploy`."""

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from onlinerl.deploy import metrics
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


class ScriptedController:
    """A controller whose passes end as listed: with an error, or with the status they leave."""

    def __init__(self, stop: threading.Event, *results: str | Exception | None) -> None:
        self._stop, self._results = stop, list(results)
        self.status: str | None = None

    def tick(self) -> None:
        result = self._results.pop(0)
        if not self._results:
            self._stop.set()
        if isinstance(result, Exception):
            raise result
        self.status = result


class CountedWaits(threading.Event):
    """An event that records how long the loop would have waited, and does not wait.

    Args:
        actions: What happens during each wait, in order; nothing for None.
    """

    def __init__(self, *actions: Callable[[], object] | None) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self.actions = list(actions)

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        action = self.actions.pop(0) if self.actions else None
        if action is not None:
            action()
        return self.is_set()


def test_an_absent_engine_is_logged_once_per_absence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop, away = threading.Event(), ServiceUnavailable("no engine answers")
    controller = ScriptedController(stop, away, away, "no engine answers", away, None, away)

    with caplog.at_level(logging.WARNING):
        _loop(cast(Controller, controller), stop, poll_s=0.001)

    assert [record.getMessage() for record in caplog.records] == [
        "pass ended early: no engine answers"
    ] * 2
    assert controller.status == "no engine answers"


@pytest.mark.parametrize("error", [ServiceUnavailable("away"), KeyError("a bug of ours")])
def test_repeated_faults_are_counted_and_slow_the_loop_down(
    tmp_path: Path, error: Exception
) -> None:
    stop = CountedWaits()
    controller = ScriptedController(stop, *[error] * 5, None, error, "being prepared", error)
    before = metrics.ERRORS._value.get()

    _loop(cast(Controller, controller), stop, poll_s=4.0)

    assert stop.waits == [4.0, 8.0, 16.0, 30.0, 30.0, 4.0, 4.0, 4.0, 4.0]
    assert metrics.ERRORS._value.get() - before == 7


def test_an_unexpected_fault_makes_the_process_unready_and_leaves_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = CountedWaits()
    controller = ScriptedController(stop, KeyError("a bug of ours"))

    _loop(cast(Controller, controller), stop, poll_s=4.0)

    assert controller.status == "the last pass over the registry failed; see the log"
    assert "a bug of ours" in caplog.text


def test_a_lost_lease_ends_the_loop() -> None:
    stop = threading.Event()
    with pytest.raises(LeaseHeld):
        _loop(
            cast(Controller, ScriptedController(stop, None, LeaseHeld("lost"), None)),
            stop,
            poll_s=0.001,
        )


def test_tables_that_are_away_at_the_start_are_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file stands where their folder should be."""
    (tmp_path / "store").touch()
    store = DeltaStore(str(tmp_path / "store"))
    lease = Lease(store, name="deploy assistant", ttl_s=60)
    controller = cast(Controller, ScriptedController(threading.Event()))
    trouble = _try_to_take(lease, store)
    assert trouble is not None
    stop = CountedWaits(None, None, (tmp_path / "store").unlink)

    _wait_for_tables(lease, store, controller, stop, trouble)

    assert lease.fence == 1
    assert stop.waits == [1.0, 2.0, 4.0]
    assert [record.getMessage() for record in caplog.records] == [controller.status]
    assert str(controller.status).startswith("cannot take the lease: cannot ")


def test_a_controller_that_waits_for_tables_can_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    store = DeltaStore(str(tmp_path / "store"))
    lease, stop = Lease(store, name="deploy assistant", ttl_s=60), CountedWaits()
    stop.actions = [stop.set]

    controller = cast(Controller, ScriptedController(threading.Event()))
    _wait_for_tables(lease, store, controller, stop, "away")
    assert lease.fence == 0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A registry that is away: the controller holds its lease and all of its passes fail."""
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
