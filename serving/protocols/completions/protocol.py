"""OpenAI's completions as a `Wire`: the older protocol, a raw prompt and its continuation."""

from collections.abc import Sequence

from typing_extensions import override

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.encoding.json import Body
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Outcome
from onlinerl.serving.interaction.request import Request
from onlinerl.serving.protocols.completions.body import prompt_of, read_body
from onlinerl.serving.protocols.completions.output import CompletionWriter, completion_body
from onlinerl.serving.wire.errors import error_body
from onlinerl.serving.wire.openai import sampling_of
from onlinerl.serving.wire.protocol import IncomingRequest, Wire

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for a body without `max_tokens`."""


class CompletionsWire(Wire):
    """`/v1/completions`."""

    @override
    async def read(self, incoming: IncomingRequest) -> Request:
        return read_request(incoming.body, config=incoming.config)

    @override
    def whole(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
        return completion_body(exchange, outcomes)

    @override
    def writer(self, exchange: Exchange) -> CompletionWriter:
        return CompletionWriter(exchange)

    @override
    def error(self, error: RequestRefused | EngineFailed) -> Body:
        return error_body(error)


def read_request(value: object, *, config: GatewayConfig) -> Request:
    """The request that a body asks for.

    Raises:
        RequestRefused: a parameter is wrong or not supported; the error names it.
    """
    body = read_body(value)
    include_usage = body.include_usage()
    max_tokens = body.max_tokens or config.sampling.max_tokens or DEFAULT_MAX_TOKENS
    return Request(
        protocol="openai.completions",
        model=body.model,
        prompt=prompt_of(body.prompt),
        sampling=sampling_of(body, config=config, max_tokens=max_tokens),
        num_choices=body.num_choices(config.limits.max_choices),
        stream=bool(body.stream),
        top_logprobs=body.logprobs,
        user=body.user,
        include_usage=include_usage,
    )
