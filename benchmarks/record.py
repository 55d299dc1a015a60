"""Records a 100-token answer of a real vLLM for `benchmarks.mock_engine`.

`python -m benchmarks.record` starts an engine on the demo's model (about a minute on two cores).
"""

import json
import tempfile
import urllib.request
from pathlib import Path

from benchmarks.recorded import RECORDED
from onlinerl.serving.interaction.request import Conversation, Message
from onlinerl.serving.rendering.loading import load_renderer
from tests.brokers import free_port
from tests.integration.engines import Engine, engine
from tests.models import smollm2

NUM_TOKENS = 100
MESSAGES = [{"role": "user", "content": "Write a long story about a support desk."}]


def main() -> None:
    """Make the recordings and write them to `benchmarks/recorded/`."""
    model = smollm2()
    with (
        tempfile.TemporaryDirectory() as folder,
        engine(Path(folder), model=model, port=free_port()) as running,
    ):
        _post(running, "/update_weight_version", {"new_version": "assistant/1"})
        question = Message(role="user", content=MESSAGES[0]["content"])
        prompt_ids = load_renderer("auto", str(model)).render(Conversation(messages=(question,)))
        sampling = {"max_tokens": NUM_TOKENS, "seed": 1, "temperature": 0.7, "ignore_eos": True}
        generate = {
            "model": "assistant",
            "token_ids": prompt_ids,
            "sampling_params": {**sampling, "logprobs": 0, "detokenize": False},
            "stream": True,
        }
        chat = {"model": "assistant", "messages": MESSAGES, **sampling}
        RECORDED.mkdir(exist_ok=True)
        for name, path, body in (
            ("generate.sse", "/inference/v1/generate", generate),
            ("generate.json", "/inference/v1/generate", {**generate, "stream": False}),
            ("chat.sse", "/v1/chat/completions", {**chat, "stream": True}),
            ("chat.json", "/v1/chat/completions", chat),
        ):
            (RECORDED / name).write_bytes(_post(running, path, body))


def _post(running: Engine, path: str, body: object) -> bytes:
    request = urllib.request.Request(
        running.url + path,
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer none"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: bytes = response.read()
    return answer


if __name__ == "__main__":
    main()
