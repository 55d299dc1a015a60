import asyncio
import hashlib
import socket
from pathlib import Path
from typing import Any

import pytest

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.serving.config import ApiKeyConfig, GatewayConfig, TimeoutsConfig
from onlinerl.serving.gateway.answering import Gateway
from onlinerl.serving.main import GatewayProcess, serve_gateway
from tests.brokers import free_port

KEYS = (ApiKeyConfig(name="a", sha256=hashlib.sha256(b"k").hexdigest()),)


def serve(tmp_path: Path, *, tokenizer: str, **config: Any) -> None:
    asyncio.run(
        serve_gateway(
            GatewayProcess(
                config=GatewayConfig(**config),
                broker=BrokerConfig(),
                policy="assistant",
                tokenizer=tokenizer,
                spool_dir=tmp_path / "spool",
                keys_path=tmp_path / "keys.json",
                responses_path=tmp_path / "responses.sqlite",
                environment={"ONLINERL_USER_HASH_KEY": "pepper"},
                stored=lambda _: {},
            )
        )
    )


def test_a_gateway_without_keys_refuses_to_start(tmp_path: Path, smollm2_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no default key"):
        serve(tmp_path, tokenizer=str(smollm2_dir))

    assert not (tmp_path / "spool").exists()


def test_a_taken_port_is_told_before_anything_is_started(tmp_path: Path, smollm2_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            serve(tmp_path, tokenizer=str(smollm2_dir), api_keys=KEYS, port=port)

    assert not (tmp_path / "spool").exists()


def test_a_gateway_that_does_not_start_is_an_error(
    tmp_path: Path, smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Gateway) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Gateway, "start", fail)
    timeouts = TimeoutsConfig(shutdown_s=1)
    with pytest.raises(SystemExit, match="3"):
        serve(
            tmp_path,
            tokenizer=str(smollm2_dir),
            api_keys=KEYS,
            port=free_port(),
            timeouts=timeouts,
        )


def test_a_missing_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="base_model"):
        serve(tmp_path, tokenizer="", api_keys=KEYS)
