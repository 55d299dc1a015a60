"""Liveness does not depend on readiness, and readiness gives a reason."""

import json
import socket
import urllib.error
import urllib.request

import pytest

from examples.support_desk.desk import free_ports
from onlinerl.commands.probes import http_problem
from onlinerl.errors import ConfigError
from onlinerl.process.health import HealthServer


def test_an_unready_process_is_live_and_gives_a_reason() -> None:
    (port,) = free_ports(1)
    reasons: list[str | None] = ["the broker is away"]
    with HealthServer("127.0.0.1", port, ready=lambda: reasons[0]):
        base = f"http://127.0.0.1:{port}"

        assert http_problem(f"{base}/health/live") is None
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{base}/health/ready", timeout=5)
        with caught.value as answer:
            assert answer.code == 503
            assert json.load(answer) == {"status": "not ready", "reason": "the broker is away"}
        reasons[0] = None
        assert http_problem(f"{base}/health/ready") is None
        with urllib.request.urlopen(f"{base}/metrics", timeout=5) as metrics:
            assert b"# HELP" in metrics.read()
        assert "404" in str(http_problem(f"{base}/admin"))


def test_a_port_in_use_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port} cannot be bound"):
            HealthServer("127.0.0.1", port, ready=lambda: None).start()


def test_port_0_turns_the_server_off() -> None:
    with HealthServer("127.0.0.1", 0, ready=lambda: None) as server:
        assert server._server is None
