"""`/v1/chat/completions`, the way out: an answer as OpenAI's objects. Pure functions of values."""

import json
from collections.abc import Sequence
from typing import Any

from onlinerl.serving.answer import Choice, Delta
from onlinerl.serving.exchange import Exchange

Body = dict[str, Any]


def completion_body(exchange: Exchange, choices: Sequence[Choice]) -> Body:
    """The answer to a request that does not stream."""
    return {
        **_head(exchange, kind="chat.completion"),
        "choices": [
            {
                "index": choice.sampled.choice_index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.sampled.finish_reason,
            }
            for choice in choices
        ],
        "usage": usage_body(exchange, choices),
    }


def opening_chunk(exchange: Exchange, *, choice_index: int) -> Body:
    """The first chunk of a choice says who speaks."""
    return _chunk(exchange, choice_index, {"role": "assistant", "content": ""}, None)


def delta_chunk(exchange: Exchange, delta: Delta) -> Body:
    """A piece of text, or the end of a choice."""
    content = {"content": delta.text} if delta.text else {}
    return _chunk(exchange, delta.choice_index, content, delta.finish_reason)


def usage_chunk(exchange: Exchange, choices: Sequence[Choice]) -> Body:
    """The last chunk, for callers that asked for it: counts and no choice."""
    return {
        **_head(exchange, kind="chat.completion.chunk"),
        "choices": [],
        "usage": usage_body(exchange, choices),
    }


def usage_body(exchange: Exchange, choices: Sequence[Choice]) -> Body:
    """Tokens as they are logged: the prompt once, every sampled token of every choice."""
    num_prompt = len(exchange.prompt_ids)
    num_completion = sum(len(choice.sampled.token_ids) for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def error_body(message: str, *, status: int, param: str | None, code: str | None) -> Body:
    """OpenAI's error envelope."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def to_json(body: Body) -> bytes:
    """Compact and ASCII only, so that no reader can split a line inside a string."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")


def _head(exchange: Exchange, *, kind: str) -> Body:
    return {
        "id": f"chatcmpl-{exchange.interaction_id}",
        "object": kind,
        "created": int(exchange.served_at.timestamp()),
        "model": exchange.policy,
        "system_fingerprint": exchange.policy_version,
    }


def _chunk(exchange: Exchange, choice_index: int, delta: Body, finish_reason: str | None) -> Body:
    choice = {
        "index": choice_index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": finish_reason,
    }
    chunk = {**_head(exchange, kind="chat.completion.chunk"), "choices": [choice]}
    if exchange.chat.include_usage:
        chunk["usage"] = None
    return chunk
