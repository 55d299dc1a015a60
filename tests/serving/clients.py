"""The official clients, unmodified, before a gateway in this process."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anthropic
import httpx2
import openai

from onlinerl.serving.protocols.responses.store import MemoryResponseStore, ResponseStore
from onlinerl.serving.rendering.protocol import Renderer
from tests.serving.world import KEY, World, make_world, speak

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
"""A call as models trained on Hermes' form write it."""
THOUGHT = "<think>\nLook first.\n</think>\n\n"

MakeWorld = Callable[..., "AbstractAsyncContextManager[World]"]


@asynccontextmanager
async def serving(
    renderer: Renderer, *answers: str, responses: ResponseStore | None = None, **config: Any
) -> AsyncIterator[World]:
    """A gateway whose engine says `answers` in turn, the last of them again and again."""
    said = [speak(renderer, answer) for answer in answers]
    store = responses or MemoryResponseStore(max_rows=100, retain_s=3600.0)
    world = make_world(renderer, *said, responses=store, **config)
    await world.gateway.start()
    try:
        yield world
    finally:
        await world.gateway.close()


def openai_client(world: World, *, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key=key, base_url="http://gateway/v1", max_retries=0, http_client=_http(world)
    )


def anthropic_client(world: World, *, key: str = KEY) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        api_key=key, base_url="http://gateway", max_retries=0, http_client=_http(world)
    )


def _http(world: World) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=world.app))
