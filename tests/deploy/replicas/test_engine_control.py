"""Addresses that are no engine, and engines whose answers are not as agreed."""

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from onlinerl.deploy.config import DeployConfig
from onlinerl.deploy.replicas.engine_control import HttpEngineControl, MemoryEngineControl
from onlinerl.deploy.replicas.fleet import Expectation, Fleet
from onlinerl.errors import ServiceUnavailable, WeightsError


@contextmanager
def answering(body: bytes) -> Iterator[HttpEngineControl]:
    """An engine whose every answer is `body`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield HttpEngineControl(
                url,
                policy="assistant",
                request_timeout_s=30,
                commit_timeout_s=30,
                probe_timeout_s=30,
            )
        finally:
            server.shutdown()
            serving.join()


@pytest.fixture
def proxy() -> Iterator[HttpEngineControl]:
    with answering(b"<html>We are back soon</html>") as control:
        yield control


@pytest.mark.parametrize(
    "positions",
    [
        None,
        [None],
        [None, {}],
        [None, None],
        [None, {"6": {"logprob": None}}],
        [None, {"7": {"logprob": -1.0}}],
    ],
)
def test_logprobs_that_are_missing_are_an_error_that_a_swap_falls_back_from(
    positions: object,
) -> None:
    body = json.dumps({"prompt_logprobs": positions}).encode()

    with answering(body) as engine, pytest.raises(WeightsError, match="logprob"):
        engine.logprobs([5, 6])


def test_an_engine_that_does_not_score_is_given_up_after_the_timeout_of_probes() -> None:
    """The other two bounds are longer than this test may run."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = HttpEngineControl(
            f"http://127.0.0.1:{silent.getsockname()[1]}",
            policy="assistant",
            request_timeout_s=1000,
            commit_timeout_s=1000,
            probe_timeout_s=0.05,
        )
        with pytest.raises(ServiceUnavailable, match="did not answer"):
            engine.logprobs([5, 6])


def test_a_web_page_is_recognised_as_no_engine(proxy: HttpEngineControl) -> None:
    with pytest.raises(ServiceUnavailable, match="is no engine: it answered b'<html>We are"):
        proxy.status()


def test_an_address_that_is_no_engine_does_not_block_the_others(proxy: HttpEngineControl) -> None:
    engine = MemoryEngineControl("good")
    engine.digests = {1: "one"}
    fleet = Fleet(
        [proxy, engine],
        policy="assistant",
        root=Path("weights"),
        config=DeployConfig(),
        sleep=lambda _: None,
    )

    fleet.swap(Expectation(1, "one", []), fallback=None)

    assert fleet.reachable() == [engine]
    assert engine.stamp() == "assistant/1"
