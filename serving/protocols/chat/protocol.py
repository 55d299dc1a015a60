"""OpenAI's chat completions as a `Wire`."""

from collections.abc import Sequence

from typing_extensions import override

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.encoding.json import Body
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.ids import session_of
from onlinerl.serving.interaction.pieces import Outcome
from onlinerl.serving.interaction.request import Conversation, Request
from onlinerl.serving.protocols.chat.body import (
    json_format_of,
    max_tokens_of,
    read_body,
    thinking_of,
    tool_choice_of,
    tools_of,
    top_logprobs_of,
)
from onlinerl.serving.protocols.chat.messages import messages_of
from onlinerl.serving.protocols.chat.output import ChatWriter, completion_body
from onlinerl.serving.wire.errors import error_body
from onlinerl.serving.wire.openai import sampling_of
from onlinerl.serving.wire.protocol import IncomingRequest, Wire


class ChatWire(Wire):
    """`/v1/chat/completions`."""

    @override
    async def read(self, incoming: IncomingRequest) -> Request:
        return read_request(incoming.body, config=incoming.config)

    @override
    def whole(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
        return completion_body(exchange, outcomes)

    @override
    def writer(self, exchange: Exchange) -> ChatWriter:
        return ChatWriter(exchange)

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
    tools = tools_of(body)
    tags = body.metadata or {}
    return Request(
        protocol="openai.chat",
        model=body.model,
        prompt=Conversation(
            messages=messages_of(body.messages), tools=tools, thinking=thinking_of(body)
        ),
        sampling=sampling_of(body, config=config, max_tokens=max_tokens_of(body)),
        num_choices=body.num_choices(config.limits.max_choices),
        stream=bool(body.stream),
        tool_choice=tool_choice_of(body, tools),
        format=json_format_of(body),
        top_logprobs=top_logprobs_of(body),
        user=body.user if body.user is not None else body.safety_identifier,
        session_id=session_of(tags),
        tags=tags,
        include_usage=include_usage,
    )
