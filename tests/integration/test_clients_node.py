"""OpenAI's Node client, unmodified, before a gateway in this process."""

import asyncio
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onlinerl.serving.rendering.chat_template import ChatTemplate, load_model_text
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.integration.gateway_service import listening
from tests.models import CACHE
from tests.serving.clients import CALL, THOUGHT, serving
from tests.serving.conftest import REASONING_CHATML
from tests.serving.world import KEY

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SOURCES = Path(__file__).parent / "node"


@pytest.fixture(scope="session")
def node_dir() -> Path:
    """A folder with the client and our script, installed once per checkout."""
    folder = CACHE / "node"
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "client.mjs"):
        shutil.copy(SOURCES / name, folder / name)
    if not _is_installed(folder):
        install = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"]
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=180)
        if done.returncode:
            pytest.skip(f"npm cannot install the client: {done.stderr[-300:]}")
    return folder


def _is_installed(folder: Path) -> bool:
    wanted = json.loads((folder / "package.json").read_text())["dependencies"]["openai"]
    found = folder / "node_modules" / "openai" / "package.json"
    return found.exists() and json.loads(found.read_text())["version"] == wanted


async def run_client(folder: Path, *arguments: str) -> dict[str, Any]:
    """What the script understood."""
    process = await asyncio.create_subprocess_exec(
        "node",
        "client.mjs",
        *arguments,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(120):
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    told: dict[str, Any] = json.loads(output)
    return told


async def test_the_node_client_understands_everything(node_dir: Path, smollm2_dir: Path) -> None:
    template = ChatTemplate(REASONING_CHATML, special_tokens={})
    text = replace(load_model_text(str(smollm2_dir)), template=template)
    answers = ["Click the link.", "Click the link.", CALL, "It is sunny."]
    async with (
        serving(
            TemplateRenderer(text, kind="chatml"), *answers, THOUGHT + "Hello.", "Bye."
        ) as world,
        listening(world.app) as url,
    ):
        told = await run_client(node_dir, url, KEY)

    rows = world.interactions
    whole, streamed, called, after, hello, bye = rows
    assert (told["whole"], told["streamed"]) == ("Click the link.", "Click the link.")
    assert told["interactionId"] == whole.interaction_id
    assert told["usage"]["completion_tokens"] == len(streamed.choices[0].completion_token_ids)
    assert told["call"]["name"] == "weather"
    assert json.loads(told["call"]["arguments"]) == {"city": "Bern"}
    assert (told["afterCall"], after.parent_id) == ("It is sunny.", called.interaction_id)
    assert told["events"][0] == "response.created"
    assert told["events"][-1] == "response.completed"
    assert told["output"] == ["reasoning", "message"]
    assert (told["outputText"], told["next"]) == ("Hello.", "Bye.")
    assert bye.parent_id == hello.interaction_id
    assert told["feedback"] == 200
    assert world.feedback[0].interaction_id == whole.interaction_id
    assert told["refused"] == {"status": 400, "param": "background"}
