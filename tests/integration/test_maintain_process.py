"""`onlinerl maintain` as a process of its own, beside one that appends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from onlinerl.rollout_store.snapshots.named import create_snapshot
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.rollout_store.upkeep.process import LEASE
from tests.brokers import free_port
from tests.events import NOON
from tests.rollout_store.people import People
from tests.waiting import until

pytestmark = pytest.mark.integration

WAIT_S = 120.0


def start(config: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "onlinerl.cli", "maintain", "--config", str(config)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ)


def answer(port: int, path: str) -> bytes | None:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as opened:
            content: bytes = opened.read()
            return content
    except (URLError, OSError):
        return None


def metric(port: int, name: str) -> float:
    lines = (answer(port, "/metrics") or b"").decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_it_keeps_the_tables_up_survives_a_kill_and_stops_when_asked(tmp_path: Path) -> None:
    people = People(tmp_path)
    people.says("first", user="ada", session="s")
    held = create_snapshot(people.store, "june", actor="me", reason="", at=NOON)
    port = free_port()
    config = tmp_path / "onlinerl.toml"
    config.write_text(
        f'data_dir = "."\n[policy]\nbase_model = "m"\n[maintenance]\nhealth_port = {port}\n'
        "interval_s = 0.2\nmin_small_files = 3\nlease_ttl_s = 2\n"
    )
    process = start(config)
    try:
        until(lambda: answer(port, "/health/ready") is not None)
        for number in range(20):
            people.says(f"i{number}", user="bob", session="s")
        until(lambda: metric(port, "onlinerl_maintain_compacted_files_total") > 0)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=WAIT_S)
        process = start(config)  # waits for the lease of the dead one, if that held it
        for number in range(20, 40):
            people.says(f"i{number}", user="bob", session="s")
        until(lambda: len(people.store.delta("interactions").file_uris()) <= 3)
        process.send_signal(signal.SIGTERM)

        assert process.wait(timeout=WAIT_S) == 0
    finally:
        process.kill()
        process.wait(timeout=WAIT_S)

    version = held.versions["interactions"]
    assert len(people.column("interactions", "interaction_id")) == 41
    assert people.store.dataset("interactions", version=version).count_rows() == 1
    with Lease(people.store, name=LEASE, ttl_s=1):
        pass
    acts = people.store.dataset("audit").to_table(["action", "detail"]).to_pylist()
    upkeep = [json.loads(act["detail"]) for act in acts if act["action"] == "maintain"]
    assert sum(each["files_compacted"] for each in upkeep) > 0
