"""What `[engine]` switches on is on in a real vLLM, and its guard lets only those in who may.

One engine has all of it at once, since it takes half a minute to start: prefix caching, chunked
prefill, guessing by n-grams, a grammar backend, adapters at run time, and the guard before it.
"""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.engine_client.http import HttpEngine, engine_session
from onlinerl.serving.interaction.engine import Chunk, Generate
from onlinerl.serving.routing.arms import Arms, Target
from onlinerl.serving.routing.assembly import make_router
from onlinerl.serving.routing.router import Router
from tests.brokers import free_port
from tests.integration.engines import Engine, engine

pytestmark = [pytest.mark.integration, pytest.mark.asyncio, pytest.mark.timeout(600)]

SECRET = "a secret of enough characters"
STEP_TOKENS = 64
"""Tokens per step of the engine; the prompts here are longer, so they need chunked prefill."""
PROMPT = [5, 6, 7, 8, 9, 10] * 50


@pytest.fixture(scope="module")
def running(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine(
        tmp_path_factory.mktemp("engine"),
        model=tiny_model_dir,
        port=free_port(),
        secret=SECRET,
        prefix_caching=True,
        block_size=32,
        chunked_prefill=True,
        max_num_batched_tokens=STEP_TOKENS,
        structured_outputs="xgrammar",
        compact_json=True,
        speculative={"method": "ngram", "num_tokens": 3, "ngram_min": 1, "ngram_max": 3},
        lora={"enabled": True, "runtime_updates": True, "max_rank": 8},
        # The others pace the engine by a logits processor, which rules out guessing.
        extra_args=(),
    ) as started:
        yield started


@pytest.fixture(scope="module")
def adapter_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter that changes what the model says."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    config = peft.LoraConfig(r=8, lora_alpha=64, target_modules=targets, init_lora_weights=False)
    folder = tmp_path_factory.mktemp("adapter")
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with engine_session(secret=SECRET) as session:
        yield session


@pytest.fixture
async def router(running: Engine, http: aiohttp.ClientSession) -> Router:
    """Over the one engine, which says that it serves version 1."""
    await post(http, running, "/update_weight_version", {"new_version": "assistant/1"})
    config = GatewayConfig()
    replica = HttpEngine(running.url, model="assistant", http=http, timeouts=config.timeouts)
    router = make_router([replica], policy="assistant", config=config, registry=CollectorRegistry())
    await router.pool.look(router.pool.replicas[0])
    return router


async def post(
    http: aiohttp.ClientSession, running: Engine, path: str, body: object = None
) -> None:
    async with http.post(running.url + path, json=body) as response:
        assert response.status == 200, await response.text()


async def sampled(
    router: Router,
    *,
    tenant: str = "acme",
    prompt: Sequence[int] = PROMPT,
    top_logprobs: int = 0,
    **sampling: object,
) -> list[Chunk]:
    route = router.route(session_id="s", known=True, tenant=tenant)
    request = ask(prompt, **sampling)
    return [chunk async for chunk in route.generate(replace(request, top_logprobs=top_logprobs))]


def ask(prompt: Sequence[int] = PROMPT, **sampling: object) -> Generate:
    parameters = {"max_tokens": 16, "temperature": 1.0, "detokenize": False, **sampling}
    return Generate(request_id=f"r{id(parameters)}", token_ids=prompt, sampling=parameters)


def tokens(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def logprobs(chunks: Sequence[Chunk]) -> list[float]:
    return [value for chunk in chunks for value in chunk.logprobs]


async def metric(http: aiohttp.ClientSession, running: Engine, name: str, **labels: str) -> float:
    """Sum over the series that have these labels."""
    async with http.get(f"{running.url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    found = [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, f"no {name}"
    return sum(found)


async def test_without_the_secret_no_path_of_the_engine_answers(running: Engine) -> None:
    async with aiohttp.ClientSession() as stranger:
        for path in ("/health", "/metrics", "/weight_info", "/is_paused", "/v1/models"):
            async with stranger.get(running.url + path) as response:
                assert response.status == 401
        for path in ("/pause", "/collective_rpc", "/v1/load_lora_adapter"):
            async with stranger.post(running.url + path, json={}) as response:
                assert response.status == 401


async def test_the_administrative_endpoints_answer_through_the_guard(
    running: Engine, http: aiohttp.ClientSession
) -> None:
    await post(http, running, "/pause?mode=keep")
    async with http.get(f"{running.url}/is_paused") as response:
        paused = await response.json()
    await post(http, running, "/resume")

    assert paused == {"is_paused": True}


async def test_a_prompt_longer_than_a_step_is_read_in_chunks(
    running: Engine, router: Router
) -> None:
    chunks = await sampled(router, prompt=[*PROMPT, 11, 12, 13])

    said = f"Chunked prefill is enabled with max_num_batched_tokens={STEP_TOKENS}"
    assert len(PROMPT) > STEP_TOKENS
    assert len(tokens(chunks)) == 16
    assert said in running.log.read_text(errors="replace")


async def test_a_second_prompt_hits_the_prefix_cache_of_its_own_tenant_only(
    router: Router,
) -> None:
    prompt = [21, 22, 23, 24] * 40
    first = await sampled(router, prompt=prompt)
    second = await sampled(router, prompt=prompt)
    stranger = await sampled(router, prompt=prompt, tenant="globex")

    assert [chunks[-1].num_cached_tokens for chunks in (first, second, stranger)] == [
        0,
        128,  # four blocks of 32; the last one of the prompt is always computed
        0,
    ]


async def test_guessed_tokens_are_tried_and_what_is_logged_stays_exact(
    running: Engine, http: aiohttp.ClientSession, router: Router, tiny_model_dir: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    # Of six tokens every one was there before, so that something is guessed at each place.
    allowed = [5, 6, 7, 8, 9, 10]
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    before = await metric(http, running, accepted)
    chunks = await sampled(router, temperature=2.0, max_tokens=600, allowed_token_ids=allowed)
    after = await metric(http, running, accepted)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    ids = torch.tensor([[*PROMPT, *tokens(chunks)]])
    with torch.no_grad():
        scores = (model(ids).logits[0, len(PROMPT) - 1 : -1, allowed] / 2.0).log_softmax(-1)
    positions = torch.tensor([allowed.index(token) for token in tokens(chunks)])
    expected = scores.gather(1, positions[:, None])[:, 0]
    # How likely the sampled tokens are on the whole, against what that is of honest samples.
    mean = (scores.exp() * scores).sum(-1)
    variance = (scores.exp() * scores**2).sum(-1) - mean**2
    surprise = (expected - mean).sum() / variance.sum().sqrt()

    assert after > before
    assert logprobs(chunks) == pytest.approx(expected.tolist(), abs=2e-3)
    assert abs(surprise) < 5


async def test_an_answer_obeys_its_schema(router: Router, tiny_model_dir: Path) -> None:
    from tokenizers import Tokenizer

    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    tokenizer = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    for seed in range(3):
        chunks = await sampled(
            router, seed=seed, max_tokens=200, structured_outputs={"json": schema}
        )
        answer = json.loads(tokenizer.decode(tokens(chunks), skip_special_tokens=True))

        assert answer in ({"size": "small"}, {"size": "large"})
        assert chunks[-1].finish_reason == "stop"


async def test_twenty_alternatives_are_told_per_token_by_rank(router: Router) -> None:
    chunks = await sampled(router, top_logprobs=20, seed=1)

    places = [place for chunk in chunks for place in chunk.top_logprobs]
    assert len(places) == len(tokens(chunks)) == 16
    for place in places:
        values = [each.logprob for each in place]
        assert len({each.token_id for each in place}) == 20
        assert values == sorted(values, reverse=True)


async def test_an_adapter_loaded_at_run_time_answers_as_its_own_version(
    running: Engine, http: aiohttp.ClientSession, router: Router, adapter_dir: Path
) -> None:
    base = await sampled(router, temperature=0)
    loading = {"lora_name": "assistant@2", "lora_path": str(adapter_dir)}
    await post(http, running, "/v1/load_lora_adapter", loading)
    router.set_arms(Arms(canary=Target(arm="canary", version=2, share=1.0, adapter="assistant@2")))
    await router.pool.look(router.pool.replicas[0])
    adapted = await sampled(router, temperature=0)
    await post(http, running, "/v1/unload_lora_adapter", {"lora_name": "assistant@2"})
    await router.pool.look(router.pool.replicas[0])
    unloaded = await sampled(router, temperature=0)

    def version(chunks: Sequence[Chunk]) -> list[str]:
        return [span.version for span in chunks[-1].version_spans or ()]

    assert tokens(adapted) != tokens(base) == tokens(unloaded)
    assert (version(base), version(adapted)) == (["assistant/1"], ["assistant/2"])
    assert version(unloaded) == ["assistant/1"]


@pytest.mark.slow
async def test_a_seeded_prompt_that_is_read_in_pieces_ends_no_engine(
    running: Engine, http: aiohttp.ClientSession, router: Router
) -> None:
    chunks = await sampled(router, prompt=[31, 32, 33] * 100, seed=1)
    async with http.get(f"{running.url}/health") as response:
        healthy = response.status

    assert (len(tokens(chunks)), healthy) == (16, 200)
