"""Stored responses outlive the gateway, however it ends."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import openai
import pytest

from onlinerl.rollout_store.user_hash import UserHasher
from onlinerl.serving.protocols.responses.sqlite_store import forget_user
from tests.brokers import free_port, wait_for_port
from tests.integration import fake_vllm
from tests.integration.gateway_process import KEY, GatewayProcess, running_gateway

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture
def engine() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, fake_vllm.__file__, str(port)])
    wait_for_port(port, process=process, timeout_s=90)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait(10)


def ask(gateway: GatewayProcess, text: str, previous_id: str | None = None) -> str:
    """The id of a response, as soon as the client has it."""
    with openai.OpenAI(api_key=KEY, base_url=f"{gateway.url}/v1", max_retries=0) as client:
        return client.responses.create(
            model="assistant", input=text, previous_response_id=previous_id, user="ann"
        ).id


def test_a_response_survives_a_kill_and_a_stop_and_goes_with_its_user(
    tmp_path: Path, smollm2_dir: Path, engine: str
) -> None:
    port, nobody = free_port(), f"127.0.0.1:{free_port()}"

    def start() -> AbstractContextManager[GatewayProcess]:
        return running_gateway(
            tmp_path,
            port=port,
            engine=engine,
            bootstrap=nobody,
            model_dir=smollm2_dir,
            timeouts={"shutdown_s": 1.0},
        )

    with start() as gateway:
        one = ask(gateway, "One")
        gateway.kill()
    with start() as gateway:
        two = ask(gateway, "Two", one)
        assert gateway.stop() == 0
    with start() as gateway:
        three = ask(gateway, "Three", two)
        ann = UserHasher("pepper").hash("ann", tenant="default")
        assert ann is not None
        number = forget_user(tmp_path / "responses.sqlite", tenant="default", user=ann)

        assert number == 3
        with pytest.raises(openai.BadRequestError, match="no stored response"):
            ask(gateway, "Four", three)
