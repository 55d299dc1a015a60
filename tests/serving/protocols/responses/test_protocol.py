"""The responses protocol as a wire, with its store."""

from collections.abc import Mapping

import pytest

from onlinerl.errors import EngineAborted, RequestRefused, ServiceUnavailable
from onlinerl.serving.interaction.exchange import Lineage
from onlinerl.serving.interaction.pieces import Outcome
from onlinerl.serving.interaction.request import Message, ToolCall
from onlinerl.serving.protocols.responses.protocol import ResponsesWire
from onlinerl.serving.protocols.responses.request import ResponsesRequest
from onlinerl.serving.protocols.responses.store import MemoryResponseStore, StoredResponse
from tests.serving.protocol_cases import (
    WEATHER,
    asked,
    called,
    caller,
    exchange,
    outcome,
    said,
    thought,
)

FIRST, SECOND = (f"01890000-0000-7000-8000-00000000000{n}" for n in (1, 2))
TOOLS = [{"type": "function", "name": "weather", "parameters": WEATHER}]
CALLED = outcome(thought("Hm."), *called(0, "weather", '{"city": "Bern"}'), finish="tool_calls")


class BrokenStore(MemoryResponseStore):
    """A store that does not answer."""

    def __init__(self) -> None:
        super().__init__(max_rows=10, retain_s=60)

    async def put(self, response: StoredResponse, *, tenant: str) -> bool:
        raise ServiceUnavailable("away")

    async def get(self, response_id: str, *, tenant: str) -> StoredResponse | None:
        raise ServiceUnavailable("away")


@pytest.fixture
def wire() -> ResponsesWire:
    return ResponsesWire(MemoryResponseStore(max_rows=10, retain_s=60, now=lambda: 0.0))


async def serve(
    wire: ResponsesWire,
    body: Mapping[str, object],
    answer: Outcome,
    *,
    interaction_id: str = FIRST,
    tenant: str = "acme",
) -> ResponsesRequest:
    """One request from its body to its stored response."""
    request = await wire.read(asked({"model": "assistant", **body}, tenant=tenant))
    served = exchange(
        request,
        interaction_id=interaction_id,
        caller=caller(tenant=tenant),
        lineage=Lineage(session_id="session-7"),
        user="hash-of-ann" if request.user else None,
    )
    await wire.keep(served, [answer])
    return request


async def test_a_stored_response_is_continued_with_its_calls(wire: ResponsesWire) -> None:
    await serve(wire, {"input": "Weather in Bern?", "tools": TOOLS}, CALLED)
    output = {"type": "function_call_output", "call_id": "call_0", "output": "sunny"}
    request = await wire.read(
        asked(
            {
                "model": "assistant",
                "previous_response_id": f"resp_{FIRST}",
                "input": [output],
                "tools": TOOLS,
            }
        )
    )

    assert request.session_id == "session-7"
    assert request.messages == (
        Message(role="user", content="Weather in Bern?"),
        Message(
            role="assistant",
            reasoning="Hm.",
            tool_calls=(ToolCall(id="call_0", name="weather", arguments='{"city": "Bern"}'),),
        ),
        Message(role="tool", content="sunny", tool_call_id="call_0", name="weather"),
    )


async def test_three_turns_are_one_conversation(wire: ResponsesWire) -> None:
    await serve(wire, {"input": "One"}, outcome(said("A")))
    again = {"input": "Two", "previous_response_id": f"resp_{FIRST}"}
    await serve(wire, again, outcome(said("B")), interaction_id=SECOND)
    request = await wire.read(
        asked({"model": "m", "input": "Three", "previous_response_id": f"resp_{SECOND}"})
    )

    assert [message.content for message in request.messages] == ["One", "A", "Two", "B", "Three"]


async def test_a_session_that_is_named_comes_before_that_of_the_stored_response(
    wire: ResponsesWire,
) -> None:
    await serve(wire, {"input": "One"}, outcome(said("A")))
    more = {"model": "m", "input": "Two", "previous_response_id": f"resp_{FIRST}"}
    request = await wire.read(asked({**more, "metadata": {"session_id": "mine"}}))

    assert request.session_id == "mine"
    with pytest.raises(RequestRefused, match=r"metadata\.session_id"):
        await wire.read(asked({**more, "metadata": {"session_id": "not plain"}}))


async def test_an_item_that_is_there_already_is_refused_and_named(wire: ResponsesWire) -> None:
    await serve(wire, {"input": "One"}, outcome(said("A")))
    stored = await wire.store.get(f"resp_{FIRST}", tenant="acme")
    assert stored is not None
    (item,) = stored.body["output"]
    new = {"type": "message", "role": "user", "content": "Two"}
    own = {**new, "id": "mine"}
    more = {"model": "m", "previous_response_id": f"resp_{FIRST}"}

    with pytest.raises(RequestRefused, match="is there already") as caught:
        await wire.read(asked({**more, "input": [new, item]}))
    assert (caught.value.status, caught.value.param) == (400, "input.1.id")
    with pytest.raises(RequestRefused, match=r"input\.1\.id: 'mine' is there already"):
        await wire.read(asked({"model": "m", "input": [own, own]}))
    unnamed = {**new, "id": ""}
    await wire.read(asked({"model": "m", "input": [unnamed, unnamed]}))
    alone = await wire.read(asked({"model": "m", "input": [item, own]}))
    assert [message.content for message in alone.messages] == ["A", "Two"]


async def test_instructions_count_for_one_request_only(wire: ResponsesWire) -> None:
    first = await serve(wire, {"input": "One", "instructions": "Be brief."}, outcome(said("A")))
    second = await wire.read(
        asked({"model": "m", "input": "Two", "previous_response_id": f"resp_{FIRST}"})
    )

    assert first.messages[0] == Message(role="system", content="Be brief.")
    assert [message.role for message in second.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("body", "tenant", "consent"),
    [
        ({"input": "One"}, "globex", None),
        ({"input": "One", "store": False}, "acme", None),
        ({"input": "One"}, "acme", "none"),
    ],
    ids=["another tenant's", "not stored", "consent none"],
)
async def test_a_response_that_cannot_be_continued_is_refused(
    wire: ResponsesWire, body: dict[str, object], tenant: str, consent: str | None
) -> None:
    headers = {} if consent is None else {"x-onlinerl-consent": consent}
    request = await wire.read(asked({"model": "m", **body}, headers=headers, tenant=tenant))
    served = exchange(request, caller=caller(tenant=tenant))
    await wire.keep(served, [outcome(said("A"))])
    more = {"model": "m", "input": "Two", "previous_response_id": f"resp_{FIRST}"}

    with pytest.raises(RequestRefused, match="no stored response") as caught:
        await wire.read(asked(more))
    assert (caught.value.status, caught.value.param) == (400, "previous_response_id")
    assert request.echo["store"] is (tenant == "globex")


async def test_asking_to_store_under_consent_none_is_refused(wire: ResponsesWire) -> None:
    headers = {"x-onlinerl-consent": "none"}

    with pytest.raises(RequestRefused, match="consent is none") as caught:
        await wire.read(asked({"model": "m", "input": "x", "store": True}, headers=headers))
    assert caught.value.param == "store"


async def test_an_output_item_is_found_by_its_id(wire: ResponsesWire) -> None:
    await serve(wire, {"input": "Weather?", "tools": TOOLS}, CALLED)
    reference = {"type": "item_reference", "id": f"fc_{FIRST}_1"}
    output = {"type": "function_call_output", "call_id": "call_0", "output": "sunny"}
    body = {"model": "m", "input": [reference, output]}
    request = await wire.read(asked(body))

    assert [message.role for message in request.messages] == ["assistant", "tool"]
    with pytest.raises(RequestRefused, match="no stored response has") as caught:
        await wire.read(asked(body, tenant="globex"))
    assert caught.value.param == "input.0.id"


async def test_a_stored_response_belongs_to_the_user_whose_words_it_holds(
    wire: ResponsesWire,
) -> None:
    await serve(wire, {"input": "One", "user": "ann"}, outcome(said("A")))
    again = {"input": "Two", "previous_response_id": f"resp_{FIRST}"}
    await serve(wire, again, outcome(said("B")), interaction_id=SECOND)

    assert await wire.store.forget_user("hash-of-ann", tenant="acme") == 2


async def test_an_answer_is_given_also_when_it_cannot_be_stored() -> None:
    await serve(ResponsesWire(BrokenStore()), {"input": "One"}, outcome(said("A")))


async def test_a_store_that_does_not_answer_is_a_503() -> None:
    body = {"model": "m", "input": "x", "previous_response_id": "resp_1"}

    with pytest.raises(RequestRefused) as caught:
        await ResponsesWire(BrokenStore()).read(asked(body))
    assert caught.value.status == 503


async def test_a_request_without_any_message_is_refused(wire: ResponsesWire) -> None:
    with pytest.raises(RequestRefused, match="input"):
        await wire.read(asked({"model": "m"}))


async def test_the_response_repeats_its_request(wire: ResponsesWire) -> None:
    body: dict[str, object] = {
        "input": "Hi",
        "instructions": "Be brief.",
        "max_output_tokens": 5,
        "metadata": {"feature": "help"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "text": {"format": {"type": "json_object"}},
        "tool_choice": "none",
        "tools": TOOLS,
        "top_logprobs": 2,
        "user": "ann",
    }
    request = await serve(wire, body, outcome(said("{}")))
    whole = wire.whole(exchange(request), [outcome(said("{}"))])

    assert {name: whole[name] for name in body if name != "input"} == {
        name: value for name, value in body.items() if name != "input"
    }
    assert request.tags == {"feature": "help"}
    assert (whole["object"], whole["model"], whole["store"]) == ("response", "assistant", True)


def test_errors_are_in_the_envelope_under_this_protocols_names(wire: ResponsesWire) -> None:
    refused = wire.error(RequestRefused("too long", 400, "messages", "context_length_exceeded"))
    failed = wire.error(EngineAborted("gone"))

    assert refused["error"] == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "input",
        "code": "context_length_exceeded",
    }
    assert failed["error"]["type"] == "server_error"
