"""The loop of `onlinerl deploy`."""

import logging
import threading
from pathlib import Path
from typing import cast

import pytest

from onlinerl.deploy import metrics
from onlinerl.deploy.main import _loop
from onlinerl.deploy.promotion.controller import Controller
from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.tables.delta_store import DeltaStore


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
    """An event that records how long the loop would have waited, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return self.is_set()


def test_an_absent_engine_is_logged_once_per_absence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop, away = threading.Event(), ServiceUnavailable("no engine answers")
    controller = ScriptedController(stop, away, away, "no engine answers", away, None, away)

    with caplog.at_level(logging.WARNING):
        _loop(cast(Controller, controller), DeltaStore(str(tmp_path)), stop, poll_s=0.001)

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

    _loop(cast(Controller, controller), DeltaStore(str(tmp_path)), stop, poll_s=4.0)

    assert stop.waits == [4.0, 8.0, 16.0, 30.0, 30.0, 4.0, 4.0, 4.0, 4.0]
    assert metrics.ERRORS._value.get() - before == 7


def test_an_unexpected_fault_makes_the_process_unready_and_leaves_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = CountedWaits()
    controller = ScriptedController(stop, KeyError("a bug of ours"))

    _loop(cast(Controller, controller), DeltaStore(str(tmp_path)), stop, poll_s=4.0)

    assert controller.status == "the last pass over the registry failed; see the log"
    assert "a bug of ours" in caplog.text
