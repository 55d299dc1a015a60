"""The log may go away: every answer is served, and every row arrives."""

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onlinerl.rollout_store.schema import (
    FEEDBACK_TOPIC,
    INTERACTIONS_TOPIC,
    FeedbackEvent,
    InteractionEvent,
)
from onlinerl.serving.spool.segment_files import segment_numbers
from tests.brokers import Broker, free_port, kafka, needs_kafka, read_log, tansu, wait_for_port
from tests.integration import fake_vllm
from tests.integration.gateway_process import KEY, GatewayProcess, running_gateway, wait_until_ready
from tests.integration.ingest_pipeline import Pipeline

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    # kafka-python reads its protocol's files by an older function of importlib.
    pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning"),
]

AWAY_S = 30.0
"""How long the broker is away."""


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, fake_vllm.__file__, str(port)])
    wait_for_port(port, process=process, timeout_s=90)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait(10)


class Traffic:
    """Callers that ask without pause, streamed and not, and rate what they get."""

    def __init__(self, gateway: GatewayProcess, *, num_callers: int = 4) -> None:
        self.served: list[str] = []
        self.rated: list[str] = []
        self.faults: list[str] = []
        self._url = gateway.url
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_for_ever, args=(n,)) for n in range(num_callers)
        ]

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask_for_ever(self, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                interaction_id = chat(self._url, f"{number}-{count}", stream=count % 2 == 0)
                self.served.append(interaction_id)
                self.rated.append(rate(self._url, interaction_id))
            except urllib.error.HTTPError as error:
                self.faults.append(f"{error.code}: {error.read().decode()}")
            except Exception as error:  # noqa: BLE001 the test looks at them
                self.faults.append(repr(error))
            time.sleep(0.02)


def post(url: str, body: dict[str, Any]) -> tuple[bytes, str]:
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    # Who waited for a broker that is away would wait longer.
    with urllib.request.urlopen(request, timeout=AWAY_S - 5) as response:
        return response.read(), response.headers.get("x-onlinerl-interaction-id", "")


def chat(url: str, text: str, *, stream: bool = False) -> str:
    messages = [{"role": "user", "content": text}]
    body = {"model": "assistant", "messages": messages, "max_tokens": 8, "stream": stream}
    received, interaction_id = post(f"{url}/v1/chat/completions", body)
    assert (b"[DONE]" if stream else b"Click the link") in received
    return interaction_id


def rate(url: str, interaction_id: str) -> str:
    body = {"interaction_id": interaction_id, "metric": "accepted", "value": True}
    received, _ = post(f"{url}/v1/feedback", body)
    return str(json.loads(received)["feedback_id"])


def logged(bootstrap: str) -> tuple[list[str], list[str]]:
    """Ids of interactions and feedback in the log."""
    interactions = [
        InteractionEvent.model_validate_json(value).interaction_id
        for value in read_log(bootstrap, INTERACTIONS_TOPIC)
    ]
    feedback = [
        FeedbackEvent.model_validate_json(value).feedback_id.removeprefix("default/")
        for value in read_log(bootstrap, FEEDBACK_TOPIC)
    ]
    return interactions, feedback


def wait_until_shipped(gateway: GatewayProcess, *, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(0.3)  # the last answers are stored
        status = gateway.get("/health/ready")
        if (status["backlog_bytes"], status["event_log"]) == (0, "ok"):
            return
    raise AssertionError(gateway.log.read_text()[-4000:])


def start(folder: Path, engine: str, broker: Broker, model_dir: Path, **gateway: Any) -> Any:
    return running_gateway(
        folder,
        port=free_port(),
        engine=engine,
        bootstrap=broker.bootstrap,
        model_dir=model_dir,
        **gateway,
    )


def check_all_arrived(gateway: GatewayProcess, traffic: Traffic, bootstrap: str) -> None:
    wait_until_shipped(gateway)
    interactions, feedback = logged(bootstrap)

    assert traffic.faults == []
    assert len(traffic.served) > 50
    assert set(interactions) == set(traffic.served)
    assert set(feedback) == set(traffic.rated)
    assert gateway.metric("onlinerl_gateway_events_lost_total") == 0


@pytest.mark.slow
def test_a_frozen_broker_stops_nobody_and_every_row_arrives(
    tmp_path: Path, engine: str, tiny_model_dir: Path
) -> None:
    with tansu(tmp_path) as broker, start(tmp_path, engine, broker, tiny_model_dir) as gateway:
        with Traffic(gateway) as traffic:
            time.sleep(2)
            broker.freeze()
            before = len(traffic.served)
            time.sleep(AWAY_S)
            during = len(traffic.served) - before
            broker.thaw()
            time.sleep(2)
        check_all_arrived(gateway, traffic, broker.bootstrap)
        assert during > 50
        assert gateway.stop() == 0


@pytest.mark.slow
@needs_kafka
def test_a_killed_broker_that_keeps_its_log_stops_nobody_and_every_row_arrives(
    tmp_path: Path, engine: str, tiny_model_dir: Path
) -> None:
    with (
        kafka(tmp_path, free_port()) as broker,
        start(tmp_path, engine, broker, tiny_model_dir) as gateway,
    ):
        with Traffic(gateway) as traffic:
            time.sleep(2)
            broker.kill()
            before = len(traffic.served)
            time.sleep(AWAY_S)
            during = len(traffic.served) - before
            broker.start()
            time.sleep(2)
        check_all_arrived(gateway, traffic, broker.bootstrap)
        assert during > 50


def test_a_broker_that_comes_back_empty_gets_every_row_again(
    tmp_path: Path, engine: str, tiny_model_dir: Path
) -> None:
    with tansu(tmp_path) as broker, start(tmp_path, engine, broker, tiny_model_dir) as gateway:
        first = [chat(gateway.url, f"a{n}") for n in range(5)]
        wait_until_shipped(gateway)
        broker.restart()
        second = [chat(gateway.url, f"b{n}") for n in range(5)]
        wait_for_metric(gateway, "onlinerl_gateway_spool_rewinds_total", at_least=1)
        wait_until_shipped(gateway)
        interactions, _ = logged(broker.bootstrap)

    assert sorted(interactions) == sorted(first + second)


def wait_for_metric(gateway: GatewayProcess, name: str, *, at_least: float) -> None:
    deadline = time.monotonic() + 60
    while gateway.metric(name) < at_least:
        assert time.monotonic() < deadline, gateway.log.read_text()[-4000:]
        time.sleep(0.2)


def test_what_the_tables_hold_is_let_go_and_the_rest_survives_an_empty_broker(
    tmp_path: Path, engine: str, tiny_model_dir: Path
) -> None:
    with tansu(tmp_path) as broker:
        pipeline = Pipeline(tmp_path, broker)
        data_dir = tmp_path / "data of it"
        data_dir.mkdir()
        spool = {"segment_bytes": 4096, "confirm_s": 0.2, "topic_poll_s": 0.2}
        with start(data_dir, engine, broker, tiny_model_dir, spool=spool) as gateway:
            first = [chat(gateway.url, f"a{n}") for n in range(20)]
            wait_until_shipped(gateway)
            num_shipped = len(segment_numbers(data_dir / "spool"))
            pipeline.drain()
            # All but the segment that is written to.
            wait_for_metric(
                gateway, "onlinerl_gateway_spool_dropped_segments_total", at_least=num_shipped - 1
            )
            second = [chat(gateway.url, f"b{n}") for n in range(20)]
            wait_until_shipped(gateway)
            broker.restart()
            wait_for_metric(gateway, "onlinerl_gateway_spool_rewinds_total", at_least=1)
            wait_until_shipped(gateway)
            interactions, _ = logged(broker.bootstrap)
            pipeline.drain()
            assert gateway.stop() == 0

    assert num_shipped > 3
    assert set(interactions) >= set(second)
    assert set(first) - set(interactions), "what was stored is not shipped again"
    assert pipeline.stored("interactions", "interaction_id") == dict.fromkeys(first + second, 1)


def test_a_killed_gateway_ships_what_it_had_acknowledged_when_it_is_back(
    tmp_path: Path, engine: str, tiny_model_dir: Path
) -> None:
    with tansu(tmp_path) as broker:
        broker.freeze()
        with start(tmp_path, engine, broker, tiny_model_dir) as gateway:
            served = [chat(gateway.url, f"a{n}") for n in range(5)]
            rated = [rate(gateway.url, interaction_id) for interaction_id in served]
            gateway.kill()
        broker.thaw()
        with start(tmp_path, engine, broker, tiny_model_dir) as gateway:
            wait_until_ready(gateway)
            wait_until_shipped(gateway)
            interactions, feedback = logged(broker.bootstrap)
            assert gateway.stop() == 0

    assert sorted(interactions) == sorted(served)
    assert sorted(feedback) == sorted(rated)
