import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message, Send

from onlinerl.errors import EngineAborted, EngineFailed, RequestRefused
from onlinerl.serving.config import IdempotencyConfig
from onlinerl.serving.http.idempotency import Idempotency, IdempotentRequest, parse_idempotency_key
from onlinerl.serving.interaction.caller import Caller
from onlinerl.serving.observability.metrics import GatewayMetrics

pytestmark = pytest.mark.asyncio

ACME = Caller(name="a", tenant="acme", consent="log")
START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"x-onlinerl-interaction-id", b"i1")],
}


def key(
    value: str = "k", *, caller: Caller = ACME, path: str = "/v1", body: object = 1
) -> IdempotentRequest:
    found = parse_idempotency_key(value, caller=caller, path=path, body=body)
    assert found is not None
    return found


class Desk:
    """An idempotency with a clock, and an answer that is counted."""

    def __init__(self, **config: Any) -> None:
        self.now_s = 0.0
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.idempotency = Idempotency(
            IdempotencyConfig(**config), metrics=self.metrics, clock=lambda: self.now_s
        )
        self.num_answers = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.whole = True
        self.failure: Exception | None = None
        self.pieces: Sequence[bytes] = (b"data: 1\n\n", b"data: 2\n\n")
        self.left = asyncio.Event()

    async def ask(self, request: IdempotentRequest | None) -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await self.idempotency.answer(request, self._answer, receive=self._receive, send=send)
        return sent

    async def _receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _answer(self, send: Send) -> bool:
        self.num_answers += 1
        number = str(self.num_answers).encode()
        await send({**START, "headers": [(b"number", number)]})
        await self.go_on.wait()
        if self.failure is not None:
            raise self.failure
        for position, piece in enumerate(self.pieces):
            more = position + 1 < len(self.pieces)
            await send({"type": "http.response.body", "body": piece, "more_body": more})
        return self.whole


async def test_the_same_key_gets_the_same_answer_event_by_event() -> None:
    desk = Desk()
    first = await desk.ask(key())
    again = await desk.ask(key())

    assert again == first
    assert [message.get("body") for message in again] == [None, b"data: 1\n\n", b"data: 2\n\n"]
    assert desk.num_answers == 1
    assert desk.metrics.registry.get_sample_value("onlinerl_gateway_replayed_total") == 1


async def test_without_a_key_equal_requests_are_two_samples() -> None:
    desk = Desk()
    await desk.ask(None)
    await desk.ask(None)

    assert desk.num_answers == 2


async def test_keys_of_other_tenants_keys_and_paths_are_other_keys() -> None:
    desk = Desk()
    for other in (
        key(),
        key(caller=Caller(name="a", tenant="globex", consent="log")),
        key(caller=Caller(name="b", tenant="acme", consent="log")),
        key(path="/v2"),
        key("K"),
    ):
        await desk.ask(other)

    assert desk.num_answers == 5


@pytest.mark.parametrize("running", [True, False])
async def test_the_same_key_with_another_body_is_refused(running: bool) -> None:
    desk = Desk()
    if running:
        desk.go_on.clear()
    first = asyncio.create_task(desk.ask(key(body={"a": 1})))
    await asyncio.sleep(0)
    if not running:
        await first
    with pytest.raises(RequestRefused) as caught:
        await desk.ask(key(body={"a": 2}))
    desk.go_on.set()
    await first

    assert (caught.value.status, caught.value.code) == (422, "idempotency_key_reused")


async def test_other_spacing_is_the_same_body_and_other_terms_are_not() -> None:
    same = parse_idempotency_key("k", caller=ACME, path="/", body={"a": 1, "b": 2})

    assert same == parse_idempotency_key("k", caller=ACME, path="/", body={"b": 2, "a": 1})
    assert same != parse_idempotency_key(
        "k", caller=ACME, path="/", body={"a": 1, "b": 2}, terms=["none"]
    )


async def test_a_second_request_waits_for_the_first() -> None:
    desk = Desk()
    desk.go_on.clear()
    both = [asyncio.create_task(desk.ask(key())) for _ in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    desk.go_on.set()
    first, *others = [await task for task in both]

    assert all(other == first for other in others)
    assert desk.num_answers == 1


async def test_waiting_is_bounded() -> None:
    desk = Desk(wait_s=0.01)
    desk.go_on.clear()
    first = asyncio.create_task(desk.ask(key()))
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused) as caught:
        await desk.ask(key())
    desk.go_on.set()
    await first

    assert (caught.value.status, caught.value.code) == (409, "idempotency_key_in_use")


async def test_a_caller_that_leaves_waits_no_longer() -> None:
    desk = Desk()
    desk.go_on.clear()
    first = asyncio.create_task(desk.ask(key()))
    await asyncio.sleep(0)
    desk.left.set()
    sent = await desk.ask(key())
    desk.go_on.set()
    await first

    assert sent == []


@pytest.mark.parametrize("how", ["left", "failed"])
async def test_an_answer_that_is_not_whole_frees_the_key(how: str) -> None:
    desk = Desk()
    desk.go_on.clear()
    first = asyncio.create_task(desk.ask(key()))
    await asyncio.sleep(0)
    second = asyncio.create_task(desk.ask(key()))
    await asyncio.sleep(0)
    desk.whole, desk.failure = how != "left", EngineAborted("no") if how == "failed" else None
    desk.go_on.set()
    await asyncio.wait({first})
    desk.whole, desk.failure = True, None
    sent = await second

    assert isinstance(first.exception(), EngineFailed if how == "failed" else type(None))
    assert sent[0]["headers"] == [(b"number", b"2")]
    assert await desk.ask(key()) == sent
    assert desk.num_answers == 2


async def test_answers_are_forgotten_after_their_time() -> None:
    desk = Desk(ttl_s=60)
    await desk.ask(key())
    desk.now_s = 59.9
    await desk.ask(key())
    desk.now_s = 60
    await desk.ask(key())

    assert desk.num_answers == 2


async def test_entries_are_bounded_and_the_oldest_goes_first() -> None:
    desk = Desk(max_entries=2)
    for name in "abc":
        await desk.ask(key(name))
    for name in "bca":
        await desk.ask(key(name))

    assert desk.num_answers == 4


async def test_bytes_are_bounded() -> None:
    desk = Desk(max_bytes=10_000)
    desk.pieces = (b"x" * 3000,)
    sizes = []
    for number in range(20):
        await desk.ask(key(str(number)))
        sizes.append(desk.idempotency.num_bytes)
    await desk.ask(key("19"))

    assert max(sizes) <= 10_000
    assert desk.num_answers == 20


async def test_an_answer_that_is_too_large_to_keep_is_served_and_never_sampled_twice() -> None:
    desk = Desk(max_bytes=10_000)
    desk.pieces = (b"x" * 6000, b"x" * 6000)
    sent = await desk.ask(key())
    with pytest.raises(RequestRefused) as caught:
        await desk.ask(key())

    assert len(sent) == 3
    assert (caught.value.status, caught.value.code) == (409, "idempotency_answer_not_kept")
    assert desk.num_answers == 1
    assert desk.idempotency.num_bytes < 1000


async def test_an_answer_that_is_too_large_pushes_no_other_out() -> None:
    desk = Desk(max_bytes=10_000)
    await desk.ask(key("small"))
    desk.pieces = (b"x" * 11_000,)
    await desk.ask(key("large"))
    await desk.ask(key("small"))

    assert desk.num_answers == 2


async def test_answers_that_run_count_too() -> None:
    desk = Desk(max_bytes=10_000)
    desk.pieces = (b"x" * 3000,) * 2
    desk.go_on.clear()
    running = [asyncio.create_task(desk.ask(key(str(number)))) for number in range(5)]
    await asyncio.sleep(0)
    desk.go_on.set()
    for task in running:
        assert len(await task) == 3
        assert desk.idempotency.num_bytes <= 10_000


async def test_everything_is_given_back_when_answers_fail() -> None:
    desk = Desk()
    desk.failure = EngineAborted("no")
    for _ in range(3):
        with pytest.raises(EngineFailed):
            await desk.ask(key())

    assert desk.idempotency.num_bytes == 0


@pytest.mark.parametrize("header", ["", "x" * 256, "a\nb", "ä"])
async def test_a_key_that_is_no_key_is_refused(header: str) -> None:
    with pytest.raises(RequestRefused, match="Idempotency-Key"):
        parse_idempotency_key(header, caller=ACME, path="/", body={})


async def test_a_gateway_without_entries_refuses_the_header_instead_of_ignoring_it() -> None:
    desk = Desk(max_entries=0)
    with pytest.raises(RequestRefused, match="not supported"):
        await desk.ask(key())
    await desk.ask(None)

    assert desk.num_answers == 1
