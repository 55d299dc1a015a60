"""A gateway as an operator meets it: it drains, takes and revokes keys, speaks TLS, is quiet."""

import contextlib
import hashlib
import http.client
import json
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from onlinerl.rollout_store.schema import INTERACTIONS_TOPIC, InteractionEvent
from onlinerl.serving.access.key_file import changing_keys
from onlinerl.serving.config import ApiKeyConfig
from onlinerl.serving.spool.segment_files import (
    Position,
    read_segment,
    segment_numbers,
    segment_path,
)
from tests.brokers import free_port, wait_for_port
from tests.integration import fake_vllm
from tests.integration.gateway_process import KEY, GatewayProcess, running_gateway
from tests.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SECRET = "canary-7c1f"


@contextlib.contextmanager
def running_engine(*, pace_s: float) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, fake_vllm.__file__, str(port), str(pace_s)])
    try:
        wait_for_port(port, process=process, timeout_s=90)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with running_engine(pace_s=0.005) as url:
        yield url


@pytest.fixture(scope="module")
def slow_engine() -> Iterator[str]:
    """Takes 12 times 0.2 s for an answer."""
    with running_engine(pace_s=0.2) as url:
        yield url


def start(folder: Path, engine: str, model_dir: Path, **options: Any) -> Any:
    """A gateway whose broker is away."""
    return running_gateway(
        folder,
        port=free_port(),
        engine=engine,
        bootstrap=f"127.0.0.1:{free_port()}",
        model_dir=model_dir,
        **options,
    )


def ask(gateway: GatewayProcess, *, key: str = KEY, **changes: Any) -> int:
    """Status of one chat."""
    body = {
        "model": "assistant",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        **changes,
    }
    request = urllib.request.Request(
        f"{gateway.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=20, context=gateway.tls) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def ready(gateway: GatewayProcess) -> int | None:
    """Status of readiness; None when nothing listens."""
    try:
        with urllib.request.urlopen(f"{gateway.url}/health/ready", timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return None


def spooled(folder: Path) -> list[InteractionEvent]:
    """What lies in the spool of a gateway that is gone."""
    spool = folder / "spool"
    return [
        InteractionEvent.model_validate_json(stored.record.value)
        for number in segment_numbers(spool)
        for stored in read_segment(
            spool, Position(number, 0), end=segment_path(spool, number).stat().st_size
        )
        if stored.record.topic == INTERACTIONS_TOPIC
    ]


class Stream:
    """A streamed answer that is read by a thread."""

    def __init__(self, gateway: GatewayProcess, **changes: Any) -> None:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=30)
        body = {"model": "assistant", "stream": True, **changes}
        body["messages"] = [{"role": "user", "content": "slowly"}]
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        self._response = self._connection.getresponse()
        self.first = self._response.readline()
        self.rest = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _read(self) -> None:
        with contextlib.suppress(http.client.IncompleteRead):
            self.rest = self._response.read()

    def whole(self) -> bytes:
        self._thread.join(60)
        self._connection.close()
        return self.first + self.rest


def test_on_sigterm_it_is_not_ready_at_once_and_serves_until_it_stops_listening(
    tmp_path: Path, engine: str, tiny_model_dir: Path
) -> None:
    timeouts = {"ready_grace_s": 1.5, "shutdown_s": 10}
    with start(tmp_path, engine, tiny_model_dir, timeouts=timeouts) as gateway:
        before = ready(gateway)
        gateway.process.terminate()
        until(lambda: ready(gateway) == 503)
        in_grace = ask(gateway)
        until(lambda: ready(gateway) is None)
        exit_code = gateway.process.wait(60)

    assert (before, in_grace, exit_code) == (200, 200, 0)
    assert len(spooled(tmp_path)) == 1


def test_streams_that_run_on_sigterm_end_whole_and_are_stored(
    tmp_path: Path, slow_engine: str, tiny_model_dir: Path
) -> None:
    with start(tmp_path, slow_engine, tiny_model_dir, timeouts={"shutdown_s": 20}) as gateway:
        streams = [Stream(gateway, max_tokens=12) for _ in range(4)]
        gateway.process.terminate()
        until(lambda: ready(gateway) is None)
        running = [stream.is_running for stream in streams]
        exit_code = gateway.process.wait(60)

    assert (running, exit_code) == ([True] * 4, 0)
    assert all(stream.whole().endswith(b"data: [DONE]\n\n") for stream in streams)
    reasons = [event.choices[0].finish_reason for event in spooled(tmp_path)]
    assert reasons == ["stop"] * 4


def test_streams_that_outlive_the_bound_are_cut_off_and_stored(
    tmp_path: Path, slow_engine: str, tiny_model_dir: Path
) -> None:
    with start(tmp_path, slow_engine, tiny_model_dir, timeouts={"shutdown_s": 1}) as gateway:
        stream = Stream(gateway, max_tokens=12)
        exit_code = gateway.stop()

    assert exit_code == 0
    assert not stream.whole().endswith(b"data: [DONE]\n\n")
    (event,) = spooled(tmp_path)
    assert 0 < len(event.choices[0].completion_token_ids) < 12


def test_keys_come_and_go_while_it_runs(tmp_path: Path, engine: str, tiny_model_dir: Path) -> None:
    path = tmp_path / "keys.json"
    entry = ApiKeyConfig(name="new", sha256=hashlib.sha256(b"new-key").hexdigest())
    with start(tmp_path, engine, tiny_model_dir, keys_poll_s=0.05) as gateway:
        unknown = ask(gateway, key="new-key")
        with changing_keys(path) as keys:
            keys.append(entry)
        until(lambda: ask(gateway, key="new-key") == 200)
        with changing_keys(path) as keys:
            keys.clear()
        until(lambda: ask(gateway, key="new-key") == 401)

        assert (unknown, ask(gateway)) == (401, 200)


def test_it_speaks_tls_and_nothing_else(tmp_path: Path, engine: str, tiny_model_dir: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    files = {name: str(tmp_path / f"{name}.pem") for name in ("cert", "key")}
    certificate.cert_chain_pems[0].write_to_path(files["cert"])
    certificate.private_key_pem.write_to_path(files["key"])
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    started = running_gateway(
        tmp_path,
        port=free_port(),
        engine=engine,
        bootstrap=f"127.0.0.1:{free_port()}",
        model_dir=tiny_model_dir,
        client_tls=trust,
        tls=files,
    )
    with started as gateway:
        assert ask(gateway) == 200
        assert ask(gateway, stream=True) == 200
        plain = GatewayProcess(gateway.url.replace("https", "http"), gateway.process, gateway.log)
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(plain)
        assert gateway.stop() == 0


def test_at_debug_level_it_says_nothing_of_what_it_was_told(
    tmp_path: Path, engine: str, tiny_model_dir: Path
) -> None:
    said = [{"role": "user", "content": SECRET}]
    with start(tmp_path, engine, tiny_model_dir, log_level="DEBUG") as gateway:
        statuses = [
            ask(gateway, messages=said, user=SECRET, metadata={"a": SECRET}),
            ask(gateway, messages=said, stream=True, stop=[SECRET]),
            ask(gateway, messages=said, unknown=SECRET),
            ask(gateway, key=SECRET),
        ]
        with urllib.request.urlopen(f"{gateway.url}/metrics", timeout=10) as response:
            metrics = response.read().decode()
        assert gateway.stop() == 0

    log = gateway.log.read_text()
    assert statuses == [200, 200, 400, 401]
    assert "gateway listens" in log
    assert SECRET not in log + metrics
    assert KEY not in log + metrics


def test_a_head_without_an_end_is_refused_and_serving_goes_on(
    tmp_path: Path, engine: str, tiny_model_dir: Path
) -> None:
    limits = {"max_head_bytes": 4096}
    with start(tmp_path, engine, tiny_model_dir, limits=limits) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"GET /health/live HTTP/1.1\r\nx: " + b"a" * 5000)
            answer = connection.makefile("rb").read()

        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.endswith(b"The head of the request is too large.")
        assert ask(gateway) == 200
