"""The loop of `onlinerl deploy`."""

import logging
import threading
from pathlib import Path
from typing import cast

import pytest

from onlinerl.deploy.main import _loop
from onlinerl.deploy.promotion.controller import Controller
from onlinerl.errors import ServiceUnavailable


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
