"""Sampling parameters as OpenAI's bodies name them, for chat and for completions."""

import re
from typing import Annotated

from pydantic import Field

from onlinerl.rollout_store.schema import Sampling
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.wire.parameters import Parameters, StopString, sampling, wrong

_Stops = Annotated[list[StopString], Field(max_length=16)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")


class SamplingBody(Parameters):
    """What both bodies have in common."""

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

    def num_choices(self, most: int) -> int:
        """How many choices are asked for.

        Raises:
            RequestRefused: when there are more than `most`.
        """
        number = self.n or 1
        if number > most:
            raise wrong("n", f"is {number}: at most {most} choices")
        return number


def sampling_of(body: SamplingBody, *, config: GatewayConfig, max_tokens: int | None) -> Sampling:
    """The parameters that shape the distribution; those that change nothing are left out.

    Raises:
        RequestRefused: for a temperature that the engine would not keep, or a key of `logit_bias`
            that is no token id.
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
    given = {name: value for name, value in shaping.items() if value}
    return plain.model_copy(update={"seed": body.seed, **given})
