import signal
import subprocess
import sys

import pytest

from onlinerl.ingest.committing.writer import STEPS
from onlinerl.ingest.main import kill_at


def test_without_a_fault_every_step_passes() -> None:
    fault = kill_at("")

    for step in STEPS:
        fault(step)


def test_an_unknown_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="after_lunch"):
        kill_at("after_lunch")


def test_the_process_ends_at_the_named_visit() -> None:
    code = (
        "from onlinerl.ingest.main import kill_at\n"
        "fault = kill_at('after_rows:2')\n"
        "for visit in range(3):\n"
        "    fault('before_commit'); fault('after_rows'); print(visit, flush=True)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == "0\n"
