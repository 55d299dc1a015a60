"""`onlinerl up` on a tiny model: the loop closes, and every promise about it holds in one place."""

import csv
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import openai
import psutil
import pytest
from openai import OpenAI

from onlinerl.commands.probes import http_problem
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.views.connection import connect
from onlinerl.settings import Settings, load
from tests.onlinerl.configuration import write_configuration
from tests.waiting import until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1200),
]

KEY = "orl-integration"
START_TIMEOUT_S = 400.0


@dataclass
class Stack:
    """A running `onlinerl up`, and a client of its gateway."""

    config: Path
    settings: Settings
    process: "subprocess.Popen[bytes]"
    client: OpenAI
    served: list[str] = field(default_factory=list)

    def ask(self, text: str, *, max_tokens: int = 16) -> tuple[str, str]:
        """Interaction id and policy version of one answer."""
        raw = self.client.chat.completions.with_raw_response.create(
            model="assistant",
            messages=[{"role": "user", "content": text}],
            max_tokens=max_tokens,
        )
        raw.parse()
        self.served.append(raw.headers["x-onlinerl-interaction-id"])
        return self.served[-1], raw.headers["x-onlinerl-policy-version"]

    def rate(self, interaction_id: str, value: bool) -> None:
        self.client.post(
            "/feedback",
            body={"interaction_id": interaction_id, "metric": "accepted", "value": value},
            cast_to=object,
        )

    def run(self, *arguments: str, timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
        name, *rest = arguments
        command = [sys.executable, "-m", "onlinerl.cli", name, "--config", str(self.config), *rest]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def query(self, sql: str) -> list[tuple[object, ...]]:
        store = DeltaStore(self.settings.store_root)
        connection: duckdb.DuckDBPyConnection
        with connect(store, rewards=self.settings.rewards) as connection:
            return connection.execute(sql).fetchall()

    def part(self, name: str) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        (found,) = [child for child in children if name in command_of(child)]
        return found

    def decisions(self) -> list[tuple[object, ...]]:
        return self.query("SELECT action, version FROM promotions ORDER BY decided_at")


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; of one that was killed and that nobody has waited for yet, none."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module")
def stack(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    config = write_configuration(folder, model=tiny_model_dir, key=KEY)
    settings = load(config)
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "onlinerl.cli", "up", "--config", str(config)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"},
        )
    base = f"http://127.0.0.1:{settings.gateway.port}"
    client = OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0, timeout=60)
    try:
        until(
            lambda: process.poll() is not None or http_problem(f"{base}/health/ready") is None,
            timeout_s=START_TIMEOUT_S,
            what="the gateway is ready",
            every_s=0.3,
        )
        assert process.poll() is None, (folder / "up.log").read_text()
        yield Stack(config, settings, process, client)
    finally:
        client.close()
        everything = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        exit_code = process.wait(90)
    left = [one for one in everything if one.is_running() and one.status() != "zombie"]

    assert exit_code == 0
    assert left == [], "Ctrl-C leaves no process behind"


def talk(stack: Stack, num: int) -> list[str]:
    """Asks and rates; every third answer is accepted."""
    ids = []
    for number in range(num):
        interaction_id, _ = stack.ask(f"question {number}")
        stack.rate(interaction_id, number % 3 == 0)
        ids.append(interaction_id)
    return ids


def champion(stack: Stack) -> int:
    """What answers now."""
    return int(stack.ask("who are you?", max_tokens=1)[1].removeprefix("assistant/"))


def promoted(stack: Stack) -> int:
    """A version that the schedule trained and the controller promoted."""
    if ("promote", 2) not in stack.decisions():
        talk(stack, 60)
        until(
            lambda: ("promote", 2) in stack.decisions(),
            timeout_s=600,
            what="the schedule trained a candidate and the controller promoted it",
            every_s=0.3,
        )
    return 2


def test_what_users_said_is_in_the_tables(stack: Stack) -> None:
    ids = talk(stack, 12)
    wanted = ", ".join(f"'{one}'" for one in ids)
    rewards = f"SELECT interaction_id, reward FROM rewards WHERE interaction_id IN ({wanted})"
    until(
        lambda: len(stack.query(rewards)) == len(ids),
        timeout_s=30,
        what="every rating is there",
        every_s=0.3,
    )

    assert {row[0]: row[1] for row in stack.query(rewards)} == {
        one: 1.0 if place % 3 == 0 else 0.0 for place, one in enumerate(ids)
    }
    printed = stack.run(
        "query",
        f"SELECT count(*) AS n FROM interactions WHERE interaction_id IN ({wanted})",
        "--format",
        "csv",
    )
    assert list(csv.reader(printed.stdout.splitlines())) == [["n"], ["12"]]


def test_weights_change_while_users_talk_and_nobody_is_cut(stack: Stack) -> None:
    version = promoted(stack)
    before = len(stack.served)
    stop = threading.Event()
    failures: list[str] = []

    def chatter() -> None:
        while not stop.is_set():
            try:
                stack.ask("and on and on", max_tokens=200)
            except openai.OpenAIError as error:
                failures.append(str(error))

    threads = [threading.Thread(target=chatter) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        back = stack.run("rollback", "1", "--reason", "test", "--actor", "tester")
        assert back.returncode == 0, back.stderr
        assert champion(stack) == 1
        forward = stack.run("promote", str(version), "--actor", "tester")
        assert forward.returncode == 0, forward.stderr
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)

    assert failures == []
    assert len(stack.served) > before
    assert champion(stack) == version
    lived_through = "SELECT count(*) FROM interactions WHERE len(version_spans) > 1"
    until(
        lambda: stack.query(lived_through) != [(0,)],
        timeout_s=60,
        what="an answer that lived through a swap is in the tables",
        every_s=0.3,
    )
    differences = stack.query(
        "SELECT mean_abs_logprob_diff FROM promotions WHERE action IN ('bootstrap', 'promote')"
    )
    assert len(differences) >= 2
    assert all(isinstance(row[0], float) and row[0] < 0.01 for row in differences)


def test_any_earlier_version_can_serve_again_and_the_later_one_after_it(stack: Stack) -> None:
    version = promoted(stack)
    back = stack.run("rollback", "1", "--reason", "test", "--actor", "tester")

    assert back.returncode == 0, back.stderr
    assert champion(stack) == 1
    forward = stack.run("promote", str(version), "--actor", "tester")
    assert forward.returncode == 0, forward.stderr
    assert champion(stack) == version
    assert ("tester",) in stack.query("SELECT actor FROM audit")


@pytest.mark.slow
def test_a_candidate_that_fails_a_gate_never_serves(stack: Stack) -> None:
    promoted(stack)
    talk(stack, 20)
    wrong = ("learning_rate=0.5", "kl_coef=0.0", "filters=[]", "stop_k3=100.0", "stop_ess=0.0")
    options = [word for value in wrong for word in ("--set", f"trainer.{value}")]
    options += ["--set", "trainer.min_labelled_rows=4"]
    served_before = champion(stack)
    trained = stack.run("train", *options)
    assert trained.returncode == 0, trained.stderr

    def refused() -> list[object]:
        return [version for action, version in stack.decisions() if action == "refuse"]

    until(lambda: bool(refused()), timeout_s=400, what="the gates refused it", every_s=0.3)
    assert champion(stack) == served_before
    assert f"assistant/{refused()[0]}" not in {
        row[0]
        for row in stack.query(
            "SELECT span.version FROM (SELECT unnest(version_spans) AS span FROM interactions)"
        )
    }


def test_parts_that_are_killed_lose_and_double_nothing(stack: Stack) -> None:
    talk(stack, 5)
    for name in ("ingest", "broker"):
        talk(stack, 5)
        stack.part(name).kill()
        talk(stack, 5)
    until(
        lambda: stack.query("SELECT count(*) FROM interactions") == [(len(stack.served),)],
        timeout_s=90,
        what="every served answer is a row",
        every_s=0.3,
    )
    # The table itself: the view would hide a row that was stored twice.
    table = DeltaStore(stack.settings.store_root).dataset("interactions").to_table()

    assert sorted(table["interaction_id"].to_pylist()) == sorted(stack.served)


@pytest.mark.slow
def test_an_engine_that_died_serves_the_champion_again_and_never_the_base(stack: Stack) -> None:
    version = promoted(stack)
    until(
        lambda: champion(stack) == version,
        timeout_s=60,
        what="the promoted version serves",
        every_s=0.3,
    )
    (engine,) = stack.part("engine").children()
    engine.kill()
    versions: set[str] = set()

    def answers() -> bool:
        try:
            versions.add(stack.ask("hello?", max_tokens=1)[1])
        except openai.APIStatusError as error:
            assert error.status_code == 503  # noqa: PT017
            return False
        return True

    time.sleep(3)
    until(answers, timeout_s=400, what="the engine is back", every_s=0.3)
    assert versions == {f"assistant/{version}"}
