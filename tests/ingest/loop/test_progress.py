import logging
from collections.abc import Iterator

import pytest

from onlinerl.ingest.loop.progress import ProgressBar, ProgressLog, progress_for


def test_a_line_says_how_many_how_fast_and_how_many_are_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times: Iterator[float] = iter([0.0, 5.0, 10.0, 10.0])
    lines = ProgressLog(interval_s=10.0, clock=lambda: next(times))
    with caplog.at_level(logging.INFO):
        lines.report(40, lag=7)
        lines.report(50, lag=None)
    lines.close()

    assert caplog.messages == ["50 records stored, 5 a second, lag unknown"]


def test_without_news_there_is_no_line(caplog: pytest.LogCaptureFixture) -> None:
    lines = ProgressLog(interval_s=0.0, clock=lambda: 1.0)
    with caplog.at_level(logging.INFO):
        lines.report(0, lag=0)

    assert caplog.messages == []


def test_a_bar_grows_to_what_is_stored_and_left(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    bar.report(3, lag=1)
    bar.report(4, lag=0)
    bar.close()

    assert "4/4" in capsys.readouterr().err


def test_a_bar_is_for_somebody_who_waits_in_front_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = progress_for(once=True)
    bar.close()

    assert isinstance(bar, ProgressBar)
    assert isinstance(progress_for(once=False), ProgressLog)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    assert isinstance(progress_for(once=True), ProgressLog)
