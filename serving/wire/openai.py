"""Parameters and counts that OpenAI's chat completions and completions have in common."""

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from onlinerl.rollout_store.schema import Sampling
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.encoding.json import Body
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Outcome
from onlinerl.serving.wire.parameters import Parameters, StopString, sampling, wrong

_Stops = Annotated[list[StopString], Field(max_length=16)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")


class _StreamOptions(Parameters):
    include_usage: bool | None = None


class CompletionParameters(Parameters):
    """Base of the two bodies."""

    model: str
    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = Field(default=None, ge=-(2**62), lt=2**62)
    stop: StopString | _Stops | None = None
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, _Bias] | None = Field(default=None, max_length=1024)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def num_choices(self, most: int) -> int:
        """Number of choices to sample.

        Raises:
            RequestRefused: there are more than `most`.
        """
        number = self.n or 1
        if number > most:
            raise wrong("n", f"is {number}: at most {most} choices")
        return number

    def include_usage(self) -> bool:
        """Whether a stream ends with the counts.

        Raises:
            RequestRefused: `stream_options` is given without `stream`.
        """
        if self.stream_options is None:
            return False
        if not self.stream:
            raise wrong("stream_options", "needs stream")
        return bool(self.stream_options.include_usage)


def sampling_of(
    body: CompletionParameters, *, config: GatewayConfig, max_tokens: int | None
) -> Sampling:
    """The sampling parameters of a body; penalties and biases that change nothing are left out.

    Raises:
        RequestRefused: the engine would change the temperature, or a key of `logit_bias` is no
            token id.
    """
    plain = sampling(
        config.sampling,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k or 0, 0),
        max_tokens=max_tokens,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
    )
    for key in body.logit_bias or ():
        if _TOKEN_ID.fullmatch(key) is None:
            raise wrong("logit_bias", f"{key!r} is no token id")
    shaping = {
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": body.logit_bias,
        "presence_penalty": body.presence_penalty,
    }
    effective = {name: value for name, value in shaping.items() if value}
    return plain.model_copy(update={"seed": body.seed, **effective})


def usage_body(exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
    """Token counts as they are logged: the prompt once, every sampled token of every choice."""
    num_prompt = len(exchange.prompt_ids)
    num_completion = sum(outcome.num_tokens for outcome in outcomes)
    num_reasoning = sum(outcome.num_reasoning_tokens for outcome in outcomes)
    usage: Body = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }
    cached = outcomes[0].num_cached_tokens if outcomes else None
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage
