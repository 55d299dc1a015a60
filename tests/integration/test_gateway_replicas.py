"""A gateway before two engines that die, freeze, come back and serve different versions."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest

from onlinerl.deploy.promotion.arms import champion_only, write_arms
from onlinerl.rollout_store.schema import ArmRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from tests.brokers import free_port, wait_for_port
from tests.integration import fake_vllm
from tests.integration.gateway_process import KEY, GatewayProcess, running_gateway
from tests.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@dataclass
class FakeEngine:
    """A process that can be killed, frozen and started again at its address."""

    port: int
    version: str
    process: "subprocess.Popen[bytes]"

    @classmethod
    def started(cls, version: str, *, port: int | None = None) -> "FakeEngine":
        port = port or free_port()
        arguments = [sys.executable, fake_vllm.__file__, str(port), "0.002", version]
        process = subprocess.Popen(arguments)
        wait_for_port(port, process=process, timeout_s=90)
        return cls(port, version, process)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def restart(self) -> None:
        self.process = FakeEngine.started(self.version, port=self.port).process

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[FakeEngine]]:
    engines = [FakeEngine.started("assistant/1"), FakeEngine.started("assistant/2")]
    yield engines
    for engine in engines:
        engine.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gateway's data folder."""
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def gateway(engines: list[FakeEngine], folder: Path, smollm2_dir: Path) -> Iterator[GatewayProcess]:
    with running_gateway(
        folder,
        port=free_port(),
        engine=engines[0].url,
        bootstrap=f"127.0.0.1:{free_port()}",
        model_dir=smollm2_dir,
        engines=[engine.url for engine in engines],
        timeouts={"poll_s": 0.1, "connect_s": 1.0, "idle_s": 20.0},
        arms={"poll_s": 0.1},
    ) as running:
        yield running


def ask(gateway: GatewayProcess, session: str) -> str:
    """The version that answered, as the gateway tells it."""
    request = urllib.request.Request(
        f"{gateway.url}/v1/chat/completions",
        json.dumps(
            {
                "model": "assistant",
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 4,
            }
        ).encode(),
        {
            "content-type": "application/json",
            "authorization": f"Bearer {KEY}",
            "x-onlinerl-session-id": session,
        },
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        response.read()
        version: str = response.headers["x-onlinerl-policy-version"]
        return version


def ask_many(gateway: GatewayProcess, number: int = 40, *, of: str | None = None) -> Counter[str]:
    """How often each version answered in `number` sessions; new ones unless `of` names them."""
    # A session stays on its engine, so the sessions of one test may not be those of another.
    of = of or uuid4().hex
    return Counter(ask(gateway, f"{of}-{n}") for n in range(number))


def num_ready(gateway: GatewayProcess) -> int:
    return sum(replica["ready"] for replica in gateway.get("/health/ready")["replicas"])


def test_no_request_fails_when_an_engine_dies_and_it_returns_when_it_is_back(
    gateway: GatewayProcess, engines: list[FakeEngine]
) -> None:
    until(lambda: num_ready(gateway) == 2)
    before = ask_many(gateway, of="early")
    engines[0].kill()
    after = ask_many(gateway, of="early")
    ready_without_it = num_ready(gateway)
    engines[0].restart()
    until(lambda: num_ready(gateway) == 2)
    stayed = ask_many(gateway, of="early")
    back = ask_many(gateway, of="later")

    # Sessions stay where they went on: their prefix is cached there.
    assert set(stayed) == {"assistant/2"}
    assert set(before) == set(back) == {"assistant/1", "assistant/2"}
    # One request may have found the engine gone itself, and went on to the other.
    assert sum(after.values()) == 40
    assert after["assistant/2"] >= 39
    assert ready_without_it == 1


def test_a_frozen_engine_leaves_and_returns_when_it_thaws(
    gateway: GatewayProcess, engines: list[FakeEngine]
) -> None:
    until(lambda: num_ready(gateway) == 2)
    ejections = gateway.metric("onlinerl_gateway_replica_ejections_total")
    engines[0].freeze()
    until(lambda: num_ready(gateway) == 1)
    frozen = ask_many(gateway)
    engines[0].thaw()
    until(lambda: num_ready(gateway) == 2)

    assert set(frozen) == {"assistant/2"}
    assert gateway.metric("onlinerl_gateway_replica_ejections_total") == ejections + 1


def test_arms_that_the_controller_decides_are_served_and_ended(
    gateway: GatewayProcess, folder: Path
) -> None:
    store = DeltaStore(str(folder / "store"))
    store.create()
    now = datetime.now(UTC)
    canary = ArmRow(
        decision_id="d1",
        policy="assistant",
        arm="canary",
        version=2,
        share=0.5,
        decided_at=now,
        ingest_date=now.date(),
    )
    until(lambda: num_ready(gateway) == 2)
    write_arms(store, [canary])
    until(lambda: canary_serves(gateway))
    first = {n: ask(gateway, f"s{n}") for n in range(60)}
    again = {n: ask(gateway, f"s{n}") for n in range(60)}
    served_by_canary = canary_requests(gateway)
    write_arms(store, champion_only("assistant", 2, reason="test", decided_at=datetime.now(UTC)))
    ask_many(gateway, 40)
    until(lambda: settled(gateway))

    assert first == again
    assert 15 < Counter(first.values())["assistant/2"] < 45
    assert served_by_canary >= 2 * Counter(first.values())["assistant/2"]


def canary_requests(gateway: GatewayProcess) -> float:
    return gateway.metric('onlinerl_gateway_arm_requests_total{arm="canary"}')


def canary_serves(gateway: GatewayProcess) -> bool:
    ask_many(gateway, 8)
    return canary_requests(gateway) > 0


def settled(gateway: GatewayProcess) -> bool:
    """Whether twenty requests in a row were all the champion's."""
    before = canary_requests(gateway)
    ask_many(gateway, 20)
    return canary_requests(gateway) == before
