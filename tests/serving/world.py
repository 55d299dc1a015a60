"""A gateway over engines without a model, and callers that can go away."""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Route

from onlinerl.rollout_store.schema import (
    FEEDBACK_TOPIC,
    INTERACTIONS_TOPIC,
    FeedbackEvent,
    InteractionEvent,
)
from onlinerl.rollout_store.user_hash import UserHasher
from onlinerl.serving.access.admission import Admission
from onlinerl.serving.access.auth import Keyring
from onlinerl.serving.api.app import create_app, wire_route
from onlinerl.serving.config import ApiKeyConfig, GatewayConfig, LimitsConfig, TimeoutsConfig
from onlinerl.serving.engine_client.memory import MemoryEngine
from onlinerl.serving.feedback.recorder import FeedbackRecorder
from onlinerl.serving.gateway.answering import Gateway
from onlinerl.serving.http.idempotency import Idempotency
from onlinerl.serving.http.protocol_route import EntryChecks
from onlinerl.serving.interaction.engine import Generate
from onlinerl.serving.interaction.events import MemorySink
from onlinerl.serving.interaction.request import Conversation, Message
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.protocols.responses.store import ResponseStore
from onlinerl.serving.rendering.protocol import Renderer
from onlinerl.serving.routing.assembly import make_router
from onlinerl.serving.wire.protocol import Wire

KEY = "key-of-acme"
OTHER_KEY = "key-of-globex"
LOG_KEY = "key-that-only-logs"
USER = [{"role": "user", "content": "How do I reset my password?"}]


def key_config(name: str, key: str, **changes: Any) -> ApiKeyConfig:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return ApiKeyConfig(**{"name": name, "sha256": digest, "consent": "train", **changes})


KEYS = (
    key_config("acme", KEY, tenant="acme"),
    key_config("globex", OTHER_KEY, tenant="globex"),
    key_config("acme-log", LOG_KEY, tenant="acme", consent="log"),
)


@dataclass
class World:
    """Everything that a test looks at."""

    app: Starlette
    gateway: Gateway
    engines: list[MemoryEngine]
    sink: MemorySink
    renderer: Renderer
    answers: list[list[int]] = field(default_factory=list)
    """What the engines answer, in turn; the last is repeated."""

    @property
    def engine(self) -> MemoryEngine:
        return self.engines[0]

    @property
    def interactions(self) -> list[InteractionEvent]:
        values = self.sink.of(INTERACTIONS_TOPIC)
        return [InteractionEvent.model_validate_json(value) for value in values]

    @property
    def feedback(self) -> list[FeedbackEvent]:
        return [FeedbackEvent.model_validate_json(value) for value in self.sink.of(FEEDBACK_TOPIC)]

    def count(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0

    async def ended(self) -> None:
        """Wait until no answer runs."""
        async with asyncio.timeout(60):
            while self.gateway.num_in_flight:
                await asyncio.sleep(0.001)


def make_world(
    renderer: Renderer,
    *answers: Sequence[int],
    num_engines: int = 1,
    limits: LimitsConfig | None = None,
    sink: MemorySink | None = None,
    store_timeout_s: float = 1.0,
    wires: Mapping[str, Wire] | None = None,
    responses: ResponseStore | None = None,
    **config: Any,
) -> World:
    """A world whose engines say `answers`; by default a short sentence and the end token."""
    said = [list(answer) for answer in answers] or [speak(renderer, "Click the link.")]
    turn = iter([*range(len(said))])

    def script(_: Generate) -> Sequence[int]:
        return said[min(next(turn, len(said) - 1), len(said) - 1)]

    engines = [MemoryEngine(script, url=f"memory://{n}") for n in range(num_engines)]
    settings = GatewayConfig(
        api_keys=KEYS,
        limits=limits or LimitsConfig(),
        timeouts=TimeoutsConfig(receive_s=0.5, drain_s=0.5, shutdown_s=0.5),
        **config,
    )
    metrics, users = GatewayMetrics(CollectorRegistry()), UserHasher("pepper")
    sink = sink or MemorySink()
    gateway = Gateway(
        settings,
        policy="assistant",
        router=make_router(engines, policy="assistant", config=settings, registry=metrics.registry),
        renderer=renderer,
        sink=sink,
        metrics=metrics,
        users=users,
    )
    feedback = FeedbackRecorder(
        sink=sink,
        users=users,
        metrics=metrics,
        max_recent=100,
        store_timeout_s=store_timeout_s,
    )
    keyring = Keyring(KEYS)
    app = create_app(gateway, keyring=keyring, feedback=feedback, responses=responses)
    checks = EntryChecks(
        keyring=keyring,
        admission=Admission(settings.limits, metrics=metrics),
        idempotency=Idempotency(settings.idempotency, metrics=metrics),
    )
    for path, wire in (wires or {}).items():
        methods, endpoint = wire_route(wire, gateway, checks)
        app.router.routes.append(Route(path, endpoint, methods=[methods]))
    return World(app, gateway, engines, sink, renderer, said)


def speak(renderer: Renderer, text: str, *, end: bool = True) -> list[int]:
    """Token ids of an answer."""
    ids: list[int] = renderer.tokenize(text)
    return [*ids, min(renderer.end_ids)] if end else ids


def rendered(renderer: Renderer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The prompt for an answer to plain messages."""
    said = [Message(role=m["role"], content=m["content"]) for m in messages]  # type: ignore[arg-type]
    return renderer.render(Conversation(messages=tuple(said)))


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "assistant", "messages": USER, **changes}


class Caller:
    """One HTTP request against an ASGI application, that can be broken off."""

    def __init__(
        self,
        app: Starlette,
        *,
        json_body: object = None,
        key: str | None = KEY,
        path: str = "/v1/chat/completions",
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> None:
        self._app = app
        self._left = asyncio.Event()
        self._sent_body = False
        self._raw = raw if raw is not None else json.dumps(json_body).encode()
        given = {"content-type": "application/json", **(headers or {})}
        if key is not None:
            given["authorization"] = f"Bearer {key}"
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.received = b""
        self.complete = False
        self.task = asyncio.create_task(self._run())

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    async def done(self) -> "Caller":
        async with asyncio.timeout(60):
            await self.task
        return self

    async def until(self, text: bytes) -> None:
        """Wait until `text` was received."""
        async with asyncio.timeout(60):
            while text not in self.received:
                await asyncio.sleep(0.001)

    @property
    def json(self) -> Any:
        return json.loads(self.received)

    @property
    def events(self) -> list[Any]:
        """The events of a stream; the last may be `[DONE]`."""
        blocks = [block for block in self.received.split(b"\n\n") if block]
        data = [block.removeprefix(b"data: ") for block in blocks]
        return [item.decode() if item == b"[DONE]" else json.loads(item) for item in data]

    @property
    def text(self) -> str:
        """The streamed text of choice 0."""
        deltas = [
            choice["delta"].get("content", "")
            for event in self.events
            if event != "[DONE]"
            for choice in event.get("choices", [])
            if choice["index"] == 0
        ]
        return "".join(deltas)

    async def _run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._sent_body:
            self._sent_body = True
            return {"type": "http.request", "body": self._raw, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self._left.is_set():
            raise OSError("the connection is closed")
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.received += message.get("body", b"")
            self.complete = not message.get("more_body", False)


async def ask(world: World, json_body: object = None, **options: Any) -> Caller:
    """One whole request."""
    if json_body is None:
        json_body = body()
    return await Caller(world.app, json_body=json_body, **options).done()
