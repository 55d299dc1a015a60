"""The gateway before a real vLLM engine with a tiny model, asked by the official client."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import openai
import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from onlinerl.rollout_store.schema import INTERACTIONS_TOPIC, InteractionEvent
from onlinerl.rollout_store.user_hash import UserHasher
from onlinerl.serving.access.auth import Keyring
from onlinerl.serving.api.app import create_app
from onlinerl.serving.config import ApiKeyConfig, GatewayConfig
from onlinerl.serving.engine_client.http import HttpEngine
from onlinerl.serving.feedback.recorder import FeedbackRecorder
from onlinerl.serving.gateway.answering import Gateway
from onlinerl.serving.interaction.events import MemorySink
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.rendering.chat_template import load_model_text
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from onlinerl.serving.routing.assembly import make_router
from tests.brokers import free_port
from tests.integration.engines import Engine
from tests.serving.world import KEY, key_config

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio,
    pytest.mark.timeout(600),
]

QUESTION = "How do I reset my password?"


@pytest.fixture
def engine_url(shared_engine: Engine) -> str:
    return shared_engine.url


class Service:
    """A gateway behind a real port, in this process, whose sink the test can read."""

    def __init__(
        self, gateway: Gateway, sink: MemorySink, renderer: TemplateRenderer, url: str
    ) -> None:
        self.gateway = gateway
        self.sink = sink
        self.renderer = renderer
        self.url = url
        self.client = openai.AsyncOpenAI(api_key=KEY, base_url=f"{url}/v1", max_retries=0)

    async def logged(self, number: int) -> list[InteractionEvent]:
        """The interactions, when there are `number`."""
        async with asyncio.timeout(60):
            while len(self.sink.of(INTERACTIONS_TOPIC)) < number or self.gateway.num_in_flight:
                await asyncio.sleep(0.01)
        values = self.sink.of(INTERACTIONS_TOPIC)
        assert len(values) == number
        return [InteractionEvent.model_validate_json(value) for value in values]

    async def sampling(self) -> None:
        """Wait until an answer has its first tokens."""
        async with asyncio.timeout(60):
            while not any(
                len(choice.sampled.token_ids) > 2
                for answer in self.gateway._answers
                for choice in answer.choices
            ):
                await asyncio.sleep(0.005)


async def stamp(http: aiohttp.ClientSession, url: str, version: str) -> None:
    body = {"new_version": version}
    async with http.post(f"{url}/update_weight_version", json=body) as response:
        assert response.status == 200


@pytest.fixture
async def service(engine_url: str, tiny_model_dir: Path) -> AsyncIterator[Service]:
    keys: tuple[ApiKeyConfig, ...] = (key_config("test", KEY),)
    port = free_port()
    config = GatewayConfig(port=port, engines=(engine_url,), api_keys=keys, max_model_len=1024)
    metrics, sink, users = GatewayMetrics(CollectorRegistry()), MemorySink(), UserHasher("pepper")
    renderer = TemplateRenderer(load_model_text(str(tiny_model_dir)))
    async with aiohttp.ClientSession() as http:
        await stamp(http, engine_url, "assistant/1")
        replica = HttpEngine(engine_url, model="assistant", http=http, timeouts=config.timeouts)
        gateway = Gateway(
            config,
            policy="assistant",
            router=make_router(
                [replica], policy="assistant", config=config, registry=metrics.registry
            ),
            renderer=renderer,
            sink=sink,
            metrics=metrics,
            users=users,
        )
        feedback = FeedbackRecorder(
            sink=sink, users=users, metrics=metrics, max_recent=10, store_timeout_s=1
        )
        app = create_app(gateway, keyring=Keyring(keys), feedback=feedback)
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None))
        serving = asyncio.create_task(server._serve())
        async with asyncio.timeout(60):
            while not server.started:
                await asyncio.sleep(0.01)
        service = Service(gateway, sink, renderer, f"http://127.0.0.1:{port}")
        yield service
        await service.client.close()
        server.should_exit = True
        await serving


async def streamed_text(service: Service, **options: object) -> str:
    stream = await service.client.chat.completions.create(
        model="assistant",
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        **options,  # type: ignore[call-overload]
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_streamed_equals_whole_under_greedy_sampling(service: Service) -> None:
    whole = await service.client.chat.completions.create(
        model="assistant",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=40,
    )
    text = await streamed_text(service, temperature=0, max_tokens=40)
    one, two = await service.logged(2)

    assert text == whole.choices[0].message.content
    assert one.choices[0].completion_token_ids == two.choices[0].completion_token_ids
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(one.choices[0].completion_token_ids)
    assert whole.usage.prompt_tokens == len(one.prompt_token_ids)


async def test_decoded_logged_ids_are_what_was_received(service: Service) -> None:
    """Random weights say many bytes that are no character: the hardest text there is."""
    texts = [await streamed_text(service, max_tokens=60, seed=seed) for seed in range(6)]
    events = await service.logged(6)

    for text, event in zip(texts, events, strict=True):
        (choice,) = event.choices
        assert service.renderer.decode(choice.completion_token_ids) == text
        assert event.trainable, event.untrainable_reason
        assert [span.version for span in choice.version_spans] == ["assistant/1"]
        assert all(-50 < value <= 0 for value in choice.logprobs)


async def test_stop_strings_end_text_in_engine_and_gateway_at_the_same_token(
    service: Service,
) -> None:
    free = await streamed_text(service, temperature=0, max_tokens=40)
    stop = free[len(free) // 2 : len(free) // 2 + 2]
    cut = await streamed_text(service, temperature=0, max_tokens=40, stop=[stop])
    whole, stopped = await service.logged(2)

    assert cut == free[: free.index(stop)]
    ids = stopped.choices[0].completion_token_ids
    assert ids == whole.choices[0].completion_token_ids[: len(ids)]
    assert stopped.choices[0].finish_reason == "stop"
    assert service.renderer.decode(ids).startswith(cut + stop)
    assert stopped.choices[0].version_spans[-1].end == len(ids)


async def test_several_choices_differ_and_are_all_logged(service: Service) -> None:
    answer = await service.client.chat.completions.create(
        model="assistant",
        messages=[{"role": "user", "content": QUESTION}],
        n=3,
        max_tokens=12,
        temperature=0.7,
        seed=1,
    )
    (event,) = await service.logged(1)

    assert len({choice.message.content for choice in answer.choices}) == 3
    assert [choice.choice_index for choice in event.choices] == [0, 1, 2]
    assert event.trainable, event.untrainable_reason


async def test_a_second_turn_extends_the_first(service: Service) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        answer = await service.client.chat.completions.create(
            model="assistant",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=10,
        )
        messages.append(answer.choices[0].message)  # type: ignore[arg-type]
        messages.append({"role": "user", "content": "And then?"})
    one, two = await service.logged(2)

    assert (two.parent_id, two.session_id) == (one.interaction_id, one.session_id)
    num_known = len(one.prompt_token_ids) + len(one.choices[0].completion_token_ids)
    assert two.prefix_length == num_known


@pytest.fixture
def paced(shared_engine: Engine) -> Iterator[None]:
    """Answers take seconds, so that what a test does falls into them."""
    with shared_engine.paced():
        yield


@pytest.mark.usefixtures("paced")
@pytest.mark.parametrize("streamed", [True, False])
async def test_leaving_stops_the_engine_and_logs_what_was_sampled(
    service: Service, engine_url: str, streamed: bool
) -> None:
    body = {
        "model": "assistant",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 900,
        "stream": streamed,
        "stop": ["never said, so the engine decodes"],
        "logit_bias": {},
    }
    headers = {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        call = asyncio.create_task(http.post(f"{service.url}/v1/chat/completions", json=body))
        if streamed:
            await service.sampling()
            response = await call
            await response.content.readany()
            response.close()
        else:
            await sampled_tokens(engine_url, at_least=3)
            call.cancel()
    (event,) = await service.logged(1)

    (choice,) = event.choices
    assert choice.finish_reason == "client_disconnect"
    assert 0 < len(choice.completion_token_ids) < 900
    assert event.trainable, event.untrainable_reason
    assert await running_requests(engine_url) == 0


async def running_requests(engine_url: str) -> float:
    """As the engine tells it; after an abort it takes a step until it does."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        while (number := await told(http, engine_url, "num_requests_running")) > 0:
            await asyncio.sleep(0.05)
    return number


async def sampled_tokens(engine_url: str, *, at_least: int) -> None:
    """Wait until the engine has sampled some more tokens than now."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        before = await told(http, engine_url, "generation_tokens_total")
        while await told(http, engine_url, "generation_tokens_total") < before + at_least:
            await asyncio.sleep(0.02)


async def told(http: aiohttp.ClientSession, engine_url: str, metric: str) -> float:
    async with http.get(f"{engine_url}/metrics") as response:
        lines = (await response.text()).splitlines()
    found = [line for line in lines if line.startswith(f"vllm:{metric}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@pytest.mark.usefixtures("paced")
async def test_a_new_version_shows_within_an_answer(service: Service, engine_url: str) -> None:
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(streamed_text(service, max_tokens=200, seed=11))
        await service.sampling()
        await stamp(http, engine_url, "assistant/2")
        await asking
    (event,) = await service.logged(1)

    spans = event.choices[0].version_spans
    assert event.trainable, event.untrainable_reason
    assert [span.version for span in spans] == ["assistant/1", "assistant/2"]
    assert (spans[0].start, spans[0].end) == (0, spans[1].start)
    assert spans[1].end == len(event.choices[0].completion_token_ids)
    assert service.gateway.pool.versions() == ["assistant/2"]


async def test_an_unstamped_engine_gets_no_request(service: Service, engine_url: str) -> None:
    async with aiohttp.ClientSession() as http:
        await stamp(http, engine_url, "default")
        await service.gateway.pool.look(service.gateway.pool.replicas[0])
        with pytest.raises(openai.InternalServerError, match="'default'"):
            await streamed_text(service)
        await stamp(http, engine_url, "assistant/1")
