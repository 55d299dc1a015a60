"""The `Request` of this protocol: with what its response repeats, and what is stored of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.request import Request
from onlinerl.serving.protocols.responses.body import ResponsesBody
from onlinerl.serving.protocols.responses.messages import Item
from onlinerl.serving.protocols.responses.store import StoredResponse


@dataclass(frozen=True, kw_only=True)
class ResponsesRequest(Request):
    """A request of the responses protocol."""

    input_items: tuple[Item, ...]
    """Input items of this request alone, without those of stored responses."""
    previous: StoredResponse | None
    """The stored response that `previous_response_id` names."""
    store: bool
    """Whether the response is to be stored."""
    sealed: bool
    """Whether reasoning items carry `encrypted_content`."""
    echo: Mapping[str, object] = field(default_factory=dict)
    """Fields of the response that repeat the request."""


def request_of(exchange: Exchange) -> ResponsesRequest:
    """The request of an exchange of this protocol."""
    assert isinstance(exchange.request, ResponsesRequest), "a request of another protocol"
    return exchange.request


def echo_of(body: ResponsesBody, sent_body: object, *, store: bool) -> dict[str, object]:
    """The fields of a response that repeat its request; tools and text as the caller wrote them."""
    fields = sent_body if isinstance(sent_body, dict) else {}
    reasoning = body.reasoning
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": dict(body.metadata),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": store,
        "text": {"format": {"type": "text"}} | (fields.get("text") or {}),
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
    }
