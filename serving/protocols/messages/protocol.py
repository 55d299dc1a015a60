"""Anthropic's messages as a `Wire`."""

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.rollout_store.schema import Sampling
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.encoding.json import Body
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Outcome
from onlinerl.serving.interaction.request import Conversation, Request
from onlinerl.serving.protocols.messages.body import (
    CountBody,
    read_body,
    read_count_body,
    tool_choice_of,
    tools_of,
)
from onlinerl.serving.protocols.messages.errors import error_body
from onlinerl.serving.protocols.messages.messages import messages_of
from onlinerl.serving.protocols.messages.output import MessagesWriter, message_body
from onlinerl.serving.wire.parameters import sampling
from onlinerl.serving.wire.protocol import IncomingRequest, Wire


class MessagesWire(Wire):
    """`/v1/messages`."""

    @override
    async def read(self, incoming: IncomingRequest) -> Request:
        return read_request(incoming.body, config=incoming.config)

    @override
    def whole(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
        (outcome,) = outcomes
        return message_body(exchange, outcome)

    @override
    def writer(self, exchange: Exchange) -> MessagesWriter:
        return MessagesWriter(exchange)

    @override
    def error(self, error: RequestRefused | EngineFailed) -> Body:
        return error_body(error)


def read_request(value: object, *, config: GatewayConfig) -> Request:
    """The request that a body asks for.

    Raises:
        RequestRefused: a parameter is wrong or not supported; the error names it.
    """
    body = read_body(value)
    parameters = sampling(
        config.sampling,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
    )
    user = None if body.metadata is None else body.metadata.user_id
    return replace(_request(body, sampling=parameters), stream=bool(body.stream), user=user)


def read_count_request(value: object) -> Request:
    """The request whose prompt a `count_tokens` body wants to have counted.

    Raises:
        RequestRefused: a parameter is wrong or not supported; the error names it.
    """
    return _request(read_count_body(value), sampling=Sampling())


def _request(body: CountBody, *, sampling: Sampling) -> Request:
    tools = tools_of(body)
    return Request(
        protocol="anthropic.messages",
        model=body.model,
        prompt=Conversation(
            messages=messages_of(body.system, body.messages), tools=tools, thinking=body.thinks
        ),
        sampling=sampling,
        tool_choice=tool_choice_of(body, tools),
        format=body.json_format,
    )
