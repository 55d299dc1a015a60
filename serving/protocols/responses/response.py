"""The response object of `/v1/responses`: what it repeats of its request, and what it counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Outcome
from onlinerl.serving.interaction.request import Request
from onlinerl.serving.protocols.responses.body import ResponsesBody
from onlinerl.serving.protocols.responses.items import Item
from onlinerl.serving.protocols.responses.output import OutputItems, Status
from onlinerl.serving.protocols.responses.store import StoredResponse
from onlinerl.serving.wire.protocol import Body


@dataclass(frozen=True, kw_only=True)
class ResponsesRequest(Request):
    """A request with what its response says again, and what is stored of it."""

    given: tuple[Item, ...]
    """Input items of this request alone."""
    previous: StoredResponse | None
    store: bool
    sealed: bool
    """Whether reasoning items carry `encrypted_content`."""
    echo: Mapping[str, object] = field(default_factory=dict)
    """Fields of the response that repeat the request."""


def response_id(exchange: Exchange) -> str:
    """The id of a response tells the interaction that it is logged as."""
    return f"resp_{exchange.interaction_id}"


def response_body(
    exchange: Exchange, output: Sequence[Item], *, status: str, outcome: Outcome | None = None
) -> Body:
    """The response object; `outcome` is None before the end."""
    request = request_of(exchange)
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": response_id(exchange),
        "object": "response",
        "created_at": int(exchange.served_at.timestamp()),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": details,
        "model": exchange.policy,
        "output": list(output),
        **request.echo,
        "temperature": exchange.sampling.temperature,
        "top_p": exchange.sampling.top_p,
        "usage": None if outcome is None else _usage(exchange, outcome),
    }


def echo_of(body: ResponsesBody, given: object, *, store: bool) -> dict[str, object]:
    """What a response repeats of its request; tools and text as the caller wrote them."""
    wrote = given if isinstance(given, dict) else {}
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
        "text": {"format": {"type": "text"}} | (wrote.get("text") or {}),
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
    }


def output_of(exchange: Exchange) -> OutputItems:
    """Where the pieces of the answer become items."""
    return OutputItems(source=exchange.interaction_id, sealed=request_of(exchange).sealed)


def status_of(outcome: Outcome) -> Status:
    """Whether the answer came to its end or to its bound."""
    return "incomplete" if outcome.finish_reason == "length" else "completed"


def request_of(exchange: Exchange) -> ResponsesRequest:
    """The request of an exchange of this protocol."""
    assert isinstance(exchange.request, ResponsesRequest), "another protocol's request"
    return exchange.request


def _usage(exchange: Exchange, outcome: Outcome) -> Body:
    """Tokens as they are logged."""
    num_input = len(exchange.prompt_ids)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {
            "cached_tokens": outcome.num_cached_tokens or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": outcome.num_tokens,
        "output_tokens_details": {"reasoning_tokens": outcome.num_reasoning_tokens},
        "total_tokens": num_input + outcome.num_tokens,
    }
