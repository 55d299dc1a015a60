import subprocess
import sys
from pathlib import Path

import pytest
from onlinerl.deploy.promotion.lease import Lease

from onlinerl.errors import LeaseHeld

HOLD = """
import sys, time
from pathlib import Path
from onlinerl.deploy.promotion.lease import Lease
with Lease(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_controller_is_told_who_holds_it(tmp_path: Path) -> None:
    with (
        Lease(tmp_path),
        pytest.raises(LeaseHeld, match=r"process \d+ on .+ since 20"),
        Lease(tmp_path),
    ):
        pass


def test_it_is_free_after_it_was_given_back(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    assert lease.holder() is None
    with lease:
        assert "since" in str(Lease(tmp_path).holder())

    assert lease.holder() is None
    with Lease(tmp_path):
        pass


def test_it_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(LeaseHeld, match=f"process {process.pid} on"), Lease(tmp_path):
            pass
        process.kill()

    with Lease(tmp_path):
        pass
