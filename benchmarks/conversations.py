"""Measures how much of a conversation's prompt the engine has in its prefix cache.

This is the part of `benchmarks.gateway` that needs a real model.
"""

import concurrent.futures
import json
import urllib.request
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.processes import KEY, Running, gateway, wait_until_shipped
from onlinerl.rollout_store.schema import INTERACTIONS_TOPIC, InteractionEvent
from tests.brokers import free_port, read_log, tansu
from tests.integration.engines import Engine, engine

NUM_CONVERSATIONS = 6
NUM_TURNS = 10
TURN_TOKENS = 60
QUESTIONS = (
    "How do I reset my password?",
    "And where do I find that link?",
    "It says that the link has expired. What now?",
    "Can you send me a new one to another address?",
    "How long does that take?",
    "What if I do not get it?",
    "Can I call somebody?",
    "At which hours?",
    "Do they need my account number?",
    "Thank you. Is there anything else that I should know?",
)


def measure(folder: Path, *, model: Path, console: Console) -> dict[str, float]:
    """Run the conversations; returns the figures about them by key."""
    console.print("conversations on the real engine ...")
    place = folder / "conversations"
    place.mkdir()
    with (
        tansu(place) as broker,
        # 32 is the smallest block on a CPU, where the default is 128; on a GPU it is 16.
        engine(
            place,
            model=model,
            port=free_port(),
            max_model_len=2048,
            block_size=32,
        ) as running,
    ):
        _post(f"{running.url}/update_weight_version", {"new_version": "assistant/1"})
        with gateway(place, engine=running.url, bootstrap=broker.bootstrap, model=model) as served:
            before = _cache_counters(running)
            with concurrent.futures.ThreadPoolExecutor(NUM_CONVERSATIONS) as pool:
                transcripts = list(pool.map(lambda n: _talk(served, n), range(NUM_CONVERSATIONS)))
            queries, hits = (
                after - first for after, first in zip(_cache_counters(running), before, strict=True)
            )
            extended = served.metric("onlinerl_gateway_extended_total", 'known="yes"')
            anew = served.metric("onlinerl_gateway_extended_total", 'known="no"')
            events = _events(served, broker.bootstrap)
    return {
        "prefix_cache_hit_ratio": hits / queries,
        "extension_rate": extended / (extended + anew),
        "extension_rate_chat_template": _rendered_rate(transcripts, events, model=model),
    }


def _talk(served: Running, number: int) -> list[dict[str, str]]:
    """Hold one conversation; returns the messages as its client sees them."""
    messages: list[dict[str, str]] = []
    for question in QUESTIONS[:NUM_TURNS]:
        messages.append({"role": "user", "content": f"({number}) {question}"})
        answer = _post(
            f"{served.url}/v1/chat/completions",
            {
                "model": "assistant",
                "messages": messages,
                "max_tokens": TURN_TOKENS,
                "temperature": 0.7,
                "seed": number,
            },
        )
        content = json.loads(answer)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
    return messages


def _rendered_rate(
    transcripts: list[list[dict[str, str]]], events: list[InteractionEvent], *, model: Path
) -> float:
    """Share of later turns whose re-rendered prompt begins with the tokens of the turn before."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    by_id = {event.interaction_id: event for event in events}

    def prompt(event: InteractionEvent) -> list[int]:
        if event.parent_id is None:
            return list(event.prompt_token_ids)
        parent = by_id[event.parent_id]
        known = prompt(parent) + list(parent.choices[0].completion_token_ids)
        return known[: event.prefix_length] + list(event.prompt_token_ids)

    exact, total = 0, 0
    for number, messages in enumerate(transcripts):
        mine = [event for event in events if event.sampling.seed == number]
        for turn, event in enumerate(sorted(mine, key=lambda e: e.served_at)[:-1]):
            known = prompt(event) + list(event.choices[0].completion_token_ids)
            rendered = tokenizer.apply_chat_template(
                messages[: 2 * turn + 3], add_generation_prompt=True, return_dict=False
            )
            total += 1
            exact += rendered[: len(known)] == known
    return exact / total


def _cache_counters(running: Engine) -> tuple[float, float]:
    with urllib.request.urlopen(f"{running.url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()

    def total(name: str) -> float:
        samples = [line for line in lines if line.startswith(f"vllm:{name}{{")]
        return sum(float(sample.rsplit(" ", 1)[1]) for sample in samples)

    return total("prefix_cache_queries_total"), total("prefix_cache_hits_total")


def _events(served: Running, bootstrap: str) -> list[InteractionEvent]:
    wait_until_shipped(served)
    values = read_log(bootstrap, INTERACTIONS_TOPIC)
    return [InteractionEvent.model_validate_json(value) for value in values]


def _post(url: str, body: object) -> bytes:
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: bytes = response.read()
    return answer
