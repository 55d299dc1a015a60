"""OpenAI's responses protocol as a `Wire`: items in, items and numbered events out.

`responses_body` and `responses_items` read, `responses_output`, `responses_object` and
`responses_writer` write, `responses_store` keeps.
"""

import logging
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from onlinerl.errors import EngineFailed, RequestRefused, ServiceUnavailable
from onlinerl.serving.interaction.caller import narrow_consent
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.ids import session_of
from onlinerl.serving.interaction.pieces import Outcome
from onlinerl.serving.interaction.request import Conversation, Message
from onlinerl.serving.protocols.responses.body import (
    ENCRYPTED_REASONING,
    ResponsesBody,
    read_body,
    tool_choice_of,
    tools_of,
)
from onlinerl.serving.protocols.responses.items import Item, messages_of, normal_input, own_source
from onlinerl.serving.protocols.responses.response import (
    ResponsesRequest,
    echo_of,
    output_of,
    request_of,
    response_body,
    response_id,
    status_of,
)
from onlinerl.serving.protocols.responses.store import ResponseStore, StoredResponse
from onlinerl.serving.protocols.responses.stream import ResponsesWriter
from onlinerl.serving.wire.errors import error_body
from onlinerl.serving.wire.parameters import sampling, wrong
from onlinerl.serving.wire.protocol import Asked, Body, StreamWriter

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
"""What this protocol calls what the gateway refuses under the name of the chat protocol."""


class ResponsesWire:
    """`/v1/responses`."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    async def read(self, asked: Asked) -> ResponsesRequest:
        """A checked request; its conversation starts with what `previous_response_id` names."""
        body = read_body(asked.body)
        tenant = asked.caller.tenant
        store = self._stores(body, asked)
        chain = await self._chain(body.previous_response_id, tenant=tenant)
        given = await self._resolved(normal_input(body.input), tenant=tenant)
        tools = tools_of(body)
        return ResponsesRequest(
            protocol="openai.responses",
            model=body.model,
            prompt=Conversation(
                messages=_messages(body.instructions, chain, given),
                tools=tools,
                thinking=body.thinking,
            ),
            sampling=sampling(
                asked.config.sampling,
                temperature=body.temperature,
                top_p=body.top_p,
                max_tokens=body.max_output_tokens,
            ),
            stream=bool(body.stream),
            tool_choice=tool_choice_of(body, tools),
            format=body.json_format,
            top_logprobs=body.wants_logprobs,
            user=body.user if body.user is not None else body.safety_identifier,
            session_id=session_of(body.metadata) or (chain[-1].session_id if chain else None),
            tags=body.metadata,
            given=given,
            previous=chain[-1] if chain else None,
            store=store,
            sealed=ENCRYPTED_REASONING in body.include,
            echo=echo_of(body, asked.body, store=store),
        )

    def whole(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
        """The response object."""
        (outcome,) = outcomes
        output, status = output_of(exchange), status_of(outcome)
        for piece in outcome.pieces:
            output.add(piece)
        output.close(status)
        return response_body(exchange, output.items, status=status, outcome=outcome)

    def writer(self, exchange: Exchange) -> StreamWriter:
        """For a response that streams."""
        return ResponsesWriter(exchange)

    async def ended(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> None:
        """Keep the response, if it is to be kept.

        An answer that was made is given to its caller also when the store fails: a request that
        goes on from it is then refused.
        """
        request = request_of(exchange)
        if not request.store:
            return
        previous = request.previous
        response = StoredResponse(
            response_id=response_id(exchange),
            previous_id=None if previous is None else previous.response_id,
            session_id=exchange.lineage.session_id,
            user=exchange.user or (None if previous is None else previous.user),
            created_at=exchange.served_at.timestamp(),
            input_items=_with_ids(request.given, source=exchange.interaction_id),
            body=self.whole(exchange, outcomes),
        )
        try:
            kept = await self.store.put(response, tenant=exchange.caller.tenant)
        except ServiceUnavailable as error:
            logger.error("a response was not stored", extra={"error": str(error)})
            return
        if not kept:
            logger.warning("a response exceeds the store", extra={"id": response.response_id})

    def error(self, error: RequestRefused | EngineFailed) -> Body:
        """OpenAI's error envelope, with the names that parameters have in this protocol."""
        body = error_body(error)
        param = body["error"]["param"]
        body["error"]["param"] = _NAMES.get(param, param)
        return body

    def _stores(self, body: ResponsesBody, asked: Asked) -> bool:
        """Whether the response is kept: yes unless the caller, or its consent, says no."""
        consent = narrow_consent(asked.caller.consent, asked.headers.get("x-onlinerl-consent"))
        possible = consent != "none" and asked.config.responses.max_rows > 0
        if body.store and not possible:
            why = "consent is none" if consent == "none" else "[gateway.responses].max_rows is 0"
            raise wrong("store", f"{why}, so nothing is kept: leave store out or give false")
        return possible and body.store is not False

    async def _chain(self, previous_id: str | None, *, tenant: str) -> Sequence[StoredResponse]:
        if previous_id is None:
            return []
        chain = await asked_store(self.store.chain(previous_id, tenant=tenant))
        if not chain:
            raise RequestRefused(
                f"previous_response_id: there is no stored response {previous_id!r} to go on from. "
                "It is unknown, was sent with store false or under consent none, or it or one "
                "before it was deleted or has expired: send the whole conversation as input",
                400,
                "previous_response_id",
                "previous_response_not_found",
            )
        return chain

    async def _resolved(self, given: Sequence[Item], *, tenant: str) -> tuple[Item, ...]:
        """Items with each reference replaced by what it refers to."""
        return tuple(
            [
                await self._referred(item, at=f"input.{number}", tenant=tenant)
                if isinstance(item, dict) and item.get("type") == "item_reference"
                else item
                for number, item in enumerate(given)
            ]
        )

    async def _referred(self, reference: Item, *, at: str, tenant: str) -> Item:
        item_id = reference.get("id")
        source = own_source(item_id) if isinstance(item_id, str) else None
        if source is not None:
            made_by = f"resp_{source}"
            response = await asked_store(self.store.get(made_by, tenant=tenant))
            for item in [] if response is None else response.body["output"]:
                if item["id"] == item_id:
                    return dict(item)
        raise wrong(f"{at}.id", f"no stored response has an output item {item_id!r}")


async def asked_store(answer: Awaitable[T]) -> T:
    """What the store says.

    Raises:
        RequestRefused: with 503 when it does not; the caller may try again.
    """
    try:
        return await answer
    except ServiceUnavailable as error:
        logger.error("stored responses cannot be read", extra={"error": str(error)})
        raise RequestRefused("stored responses cannot be read now", 503) from error


def _messages(
    instructions: str | None, chain: Sequence[StoredResponse], given: Sequence[Item]
) -> tuple[Message, ...]:
    """The conversation; instructions count for one request, those of earlier ones do not."""
    known = [item for row in chain for item in (*row.input_items, *row.body["output"])]
    _check_each_is_new(known, given)
    messages = messages_of([*known, *given], first=len(known))
    if instructions:
        messages = (Message(role="system", content=instructions), *messages)
    if not messages:
        raise wrong("input", "give a text or at least one item")
    return messages


def _check_each_is_new(known: Sequence[Item], given: Sequence[Item]) -> None:
    """An item that is sent again beside the response that holds it would be said twice.

    Raises:
        RequestRefused: naming it.
    """
    seen = {item["id"] for item in known if item.get("id")}
    for number, item in enumerate(given):
        item_id = item.get("id") if isinstance(item, dict) else None
        if not isinstance(item_id, str) or not item_id:
            continue
        if item_id in seen:
            raise wrong(
                f"input.{number}.id",
                f"{item_id!r} is there already, in the input or in what previous_response_id names:"
                " send it once",
            )
        seen.add(item_id)


def _with_ids(items: Sequence[Item], *, source: str) -> tuple[Item, ...]:
    """Input items with an id each, told apart from output items by their name."""
    return tuple(
        item if item.get("id") else {**item, "id": f"in_{source}_{number}"}
        for number, item in enumerate(items)
    )
