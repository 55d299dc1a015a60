"""What an address that is no engine costs the others."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from onlinerl.deploy.config import DeployConfig
from onlinerl.deploy.replicas.engine_control import HttpEngineControl, MemoryEngineControl
from onlinerl.deploy.replicas.fleet import Expectation, Fleet
from onlinerl.errors import ServiceUnavailable


class Maintenance(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = b"<html>We are back soon</html>"
        self.send_response(200)
        self.send_header("content-length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[HttpEngineControl]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Maintenance) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        yield HttpEngineControl(url, policy="assistant", request_timeout_s=30, commit_timeout_s=30)
        server.shutdown()


def test_a_page_of_a_proxy_is_no_engine(proxy: HttpEngineControl) -> None:
    with pytest.raises(ServiceUnavailable, match="is no engine: it answered b'<html>We are"):
        proxy.status()


def test_an_address_that_is_no_engine_holds_up_no_other(proxy: HttpEngineControl) -> None:
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
