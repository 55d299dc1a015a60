"""What a run of the tests leaves out, and how it says so.

A test marked `slow` proves something that takes many seconds: a process killed at every point, an
outage of minutes, the same faults against Apache Kafka. `make test` leaves these out, `make
test-all` runs them. Whatever a run skips is summed up in one line that says how to run it.
"""

from collections import Counter
from collections.abc import Iterable

import pytest

SLOW_REASON = "slow (`make test-all` runs them)"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Called by pytest."""
    parser.addoption("--slow", action="store_true", help="run the tests marked `slow` as well")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Called by pytest, in every worker, after the tests were shuffled."""
    # Those with real processes take longest. One that began last would run alone at the end.
    items.sort(key=lambda item: item.get_closest_marker("integration") is None)
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.skip(reason=SLOW_REASON))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Called by pytest at the end, in the process that prints."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_line(summary(reason_of(report) for report in skipped))


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


def summary(reasons: Iterable[str]) -> str:
    """One line: how many tests were skipped for each reason."""
    counts = Counter(reasons)
    parts = [f"{number} {reason}" for reason, number in counts.most_common()]
    return f"skipped {counts.total()}: " + "; ".join(parts)
