"""Numbers of a window."""

from onlinerl.trainer.cycle.report import window_metrics
from tests.trainer.builders import plan, row


def test_sessions_of_two_tenants_are_two_even_when_their_ids_are_the_same() -> None:
    rows = [row(0, session_id="s"), row(1, session_id="s"), row(2, session_id="s", tenant="other")]

    assert window_metrics(plan(rows))["window/sessions"] == 2
