"""`/v1/completions`, OpenAI's older form: a raw prompt, text or token ids, and its continuation.

One prompt a request. What is not supported (`echo`, `suffix`, `best_of`) is refused by name.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.encoding.json import to_json
from onlinerl.serving.encoding.sse import DONE, event
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Finish, Outcome, Piece, TextDelta, TokenLogprob
from onlinerl.serving.interaction.request import RawPrompt, Request
from onlinerl.serving.protocols.chat.output import usage_body
from onlinerl.serving.protocols.chat.sampling import SamplingBody, sampling_of
from onlinerl.serving.wire.errors import error_body
from onlinerl.serving.wire.parameters import Harmless, Parameters, checked, unsupported, wrong
from onlinerl.serving.wire.protocol import Asked, Body

DEFAULT_MAX_TOKENS = 16
"""What OpenAI samples when a body does not say."""

_HARMLESS: Harmless = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "suffix": ("",),
}
_INT32 = 2**31


class _StreamOptions(Parameters):
    include_usage: bool | None = None


class CompletionBody(SamplingBody):
    """A body whose plain values are checked; the prompt is read by `read_prompt`."""

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = Field(default=None, max_length=512)


def read_completion(body: object, *, config: GatewayConfig) -> Request:
    """A checked request.

    Raises:
        RequestRefused: naming the parameter that is wrong or not supported.
    """
    asked = checked(CompletionBody, body, harmless=_HARMLESS)
    if asked.stream_options is not None and not asked.stream:
        raise wrong("stream_options", "needs stream")
    options = asked.stream_options or _StreamOptions()
    max_tokens = asked.max_tokens or config.sampling.max_tokens or DEFAULT_MAX_TOKENS
    return Request(
        protocol="openai.completions",
        model=asked.model,
        prompt=read_prompt(asked.prompt),
        sampling=sampling_of(asked, config=config, max_tokens=max_tokens),
        num_choices=asked.num_choices(config.limits.max_choices),
        stream=bool(asked.stream),
        top_logprobs=asked.logprobs,
        user=asked.user,
        include_usage=bool(options.include_usage),
    )


def read_prompt(value: Any) -> RawPrompt:  # noqa: ANN401 any JSON
    """One prompt: text, token ids, or a list with one of them.

    Raises:
        RequestRefused: for none, several, or what is neither.
    """
    if isinstance(value, str):
        return RawPrompt(text=value)
    if isinstance(value, list) and value:
        if all(_is_token_id(item) for item in value):
            return RawPrompt(token_ids=tuple(value))
        if all(isinstance(item, str | list) for item in value):
            if len(value) > 1:
                raise unsupported("prompt", f"{len(value)} prompts, send one a request")
            return read_prompt(value[0])
    raise wrong("prompt", "give a text, or a list of token ids")


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value < _INT32


class CompletionsWire:
    """OpenAI's completions."""

    async def read(self, asked: Asked) -> Request:
        """A checked request."""
        return read_completion(asked.body, config=asked.config)

    def whole(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
        """One `text_completion`."""
        choices = [
            _choice(
                outcome.choice_index,
                outcome.content,
                logprobs=LegacyLogprobs().of(outcome.logprobs)
                if exchange.request.top_logprobs is not None
                else None,
                finish_reason=outcome.finish_reason,
            )
            for outcome in outcomes
        ]
        return {**_head(exchange), "choices": choices, "usage": usage_body(exchange, outcomes)}

    def writer(self, exchange: Exchange) -> "CompletionWriter":
        """The same object, piece by piece."""
        return CompletionWriter(exchange)

    async def ended(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> None:
        """Nothing is kept."""

    def error(self, error: RequestRefused | EngineFailed) -> Body:
        """OpenAI's envelope."""
        return error_body(error)


class CompletionWriter:
    """Events of one stream."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        num_choices = exchange.request.num_choices
        self._logprobs = [LegacyLogprobs() for _ in range(num_choices)]

    def open(self) -> bytes:
        """Nothing comes before the first piece."""
        return b""

    def write(self, piece: Piece) -> bytes:
        """A piece of text, or the end of a choice."""
        finish = piece.reason if isinstance(piece, Finish) else None
        text = piece.text if isinstance(piece, TextDelta) else ""
        if not text and not piece.logprobs and finish is None:
            return b""
        index = piece.choice_index
        logprobs = self._logprobs[index].of(piece.logprobs) if piece.logprobs else None
        choice = _choice(index, text, logprobs=logprobs, finish_reason=finish)
        body: Body = {**_head(self._exchange), "choices": [choice]}
        if self._exchange.request.include_usage:
            body["usage"] = None
        return event(to_json(body))

    def close(self, outcomes: Sequence[Outcome]) -> bytes:
        """The counts, for callers that asked for them."""
        if not self._exchange.request.include_usage:
            return event(DONE)
        usage = usage_body(self._exchange, outcomes)
        return event(to_json({**_head(self._exchange), "choices": [], "usage": usage})) + event(
            DONE
        )

    def fail(self, failure: EngineFailed) -> bytes:
        """OpenAI's clients raise what an event holds under `error`."""
        return event(to_json(error_body(failure)))


class LegacyLogprobs:
    """Log-probabilities of one choice in four parallel lists; counts where each token begins."""

    def __init__(self) -> None:
        self._offset = 0

    def of(self, logprobs: Sequence[TokenLogprob]) -> Body:
        """The next tokens. Offsets are characters from the beginning of the answer."""
        offsets: list[int] = []
        for each in logprobs:
            offsets.append(self._offset)
            self._offset += len(each.text)
        return {
            "tokens": [each.text for each in logprobs],
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [
                {other.text: other.logprob for other in each.top} if each.top else None
                for each in logprobs
            ],
            "text_offset": offsets,
        }


def _head(exchange: Exchange) -> Body:
    return {
        "id": f"cmpl-{exchange.interaction_id}",
        "object": "text_completion",
        "created": int(exchange.served_at.timestamp()),
        "model": exchange.policy,
        "system_fingerprint": exchange.policy_version,
    }


def _choice(index: int, text: str, *, logprobs: Body | None, finish_reason: str | None) -> Body:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
