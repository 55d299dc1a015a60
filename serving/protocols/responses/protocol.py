"""OpenAI's responses as a `Wire`, with a store of earlier responses."""

import logging
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from typing_extensions import override

from onlinerl.errors import EngineFailed, RequestRefused, ServiceUnavailable
from onlinerl.serving.encoding.json import Body
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
from onlinerl.serving.protocols.responses.messages import (
    Item,
    interaction_of,
    messages_of,
    normalize_input,
)
from onlinerl.serving.protocols.responses.output import (
    ResponsesWriter,
    response_body,
    response_id,
)
from onlinerl.serving.protocols.responses.request import ResponsesRequest, echo_of, request_of
from onlinerl.serving.protocols.responses.store import ResponseStore, StoredResponse
from onlinerl.serving.wire.errors import error_body
from onlinerl.serving.wire.parameters import sampling, wrong
from onlinerl.serving.wire.protocol import IncomingRequest, Wire

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
"""Names that the gateway uses in errors, and the names of this protocol for the same parameters."""


class ResponsesWire(Wire):
    """`/v1/responses`."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    @override
    async def read(self, incoming: IncomingRequest) -> ResponsesRequest:
        body = read_body(incoming.body)
        tenant = incoming.caller.tenant
        store = self._is_to_be_stored(body, incoming)
        chain = await self._chain(body.previous_response_id, tenant=tenant)
        input_items = await self._resolve(normalize_input(body.input), tenant=tenant)
        tools = tools_of(body)
        return ResponsesRequest(
            protocol="openai.responses",
            model=body.model,
            prompt=Conversation(
                messages=_messages(body.instructions, chain, input_items),
                tools=tools,
                thinking=body.thinking,
            ),
            sampling=sampling(
                incoming.config.sampling,
                temperature=body.temperature,
                top_p=body.top_p,
                max_tokens=body.max_output_tokens,
            ),
            stream=bool(body.stream),
            tool_choice=tool_choice_of(body, tools),
            format=body.json_format,
            top_logprobs=body.num_alternatives,
            user=body.user if body.user is not None else body.safety_identifier,
            session_id=session_of(body.metadata) or (chain[-1].session_id if chain else None),
            tags=body.metadata,
            input_items=input_items,
            previous=chain[-1] if chain else None,
            store=store,
            sealed=ENCRYPTED_REASONING in body.include,
            echo=echo_of(body, incoming.body, store=store),
        )

    @override
    def whole(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
        (outcome,) = outcomes
        return response_body(exchange, outcome)

    @override
    def writer(self, exchange: Exchange) -> ResponsesWriter:
        return ResponsesWriter(exchange)

    @override
    async def keep(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> None:
        """Store the response, unless the request asked not to.

        When the store fails, the caller still gets the answer; a request that continues it is then
        refused.
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
            input_items=_with_ids(request.input_items, source=exchange.interaction_id),
            body=self.whole(exchange, outcomes),
        )
        try:
            is_stored = await self.store.put(response, tenant=exchange.caller.tenant)
        except ServiceUnavailable as error:
            logger.error("a response was not stored", extra={"error": str(error)})
            return
        if not is_stored:
            logger.warning(
                "a response is larger than the store", extra={"id": response.response_id}
            )

    @override
    def error(self, error: RequestRefused | EngineFailed) -> Body:
        body = error_body(error)
        param = body["error"]["param"]
        body["error"]["param"] = _NAMES.get(param, param)
        return body

    def _is_to_be_stored(self, body: ResponsesBody, incoming: IncomingRequest) -> bool:
        consent = narrow_consent(
            incoming.caller.consent, incoming.headers.get("x-onlinerl-consent")
        )
        is_possible = consent != "none" and incoming.config.responses.max_rows > 0
        if body.store and not is_possible:
            why = "consent is none" if consent == "none" else "[gateway.responses].max_rows is 0"
            raise wrong("store", f"{why}, so nothing is stored: leave store out or give false")
        return is_possible and body.store is not False

    async def _chain(self, previous_id: str | None, *, tenant: str) -> Sequence[StoredResponse]:
        if previous_id is None:
            return []
        chain = await ask_store(self.store.chain(previous_id, tenant=tenant))
        if not chain:
            raise RequestRefused(
                f"previous_response_id: there is no stored response {previous_id!r} to continue. "
                "It is unknown, was sent with store false or under consent none, or it or one "
                "before it was deleted or has expired: send the whole conversation as input",
                400,
                "previous_response_id",
                "previous_response_not_found",
            )
        return chain

    async def _resolve(self, input_items: Sequence[Item], *, tenant: str) -> tuple[Item, ...]:
        """Input items with each reference replaced by the item that it names."""
        return tuple(
            [
                await self._referenced_item(item, at=f"input.{number}", tenant=tenant)
                if isinstance(item, dict) and item.get("type") == "item_reference"
                else item
                for number, item in enumerate(input_items)
            ]
        )

    async def _referenced_item(self, reference: Item, *, at: str, tenant: str) -> Item:
        item_id = reference.get("id")
        interaction_id = interaction_of(item_id) if isinstance(item_id, str) else None
        if interaction_id is not None:
            stored_id = f"resp_{interaction_id}"
            response = await ask_store(self.store.get(stored_id, tenant=tenant))
            for item in [] if response is None else response.body["output"]:
                if item["id"] == item_id:
                    return dict(item)
        raise wrong(f"{at}.id", f"no stored response has an output item {item_id!r}")


async def ask_store(answer: Awaitable[T]) -> T:
    """The result of a call to the store.

    Raises:
        RequestRefused: 503, the store did not answer; the caller may try again.
    """
    try:
        return await answer
    except ServiceUnavailable as error:
        logger.error("stored responses cannot be read", extra={"error": str(error)})
        raise RequestRefused("stored responses cannot be read now", 503) from error


def _messages(
    instructions: str | None, chain: Sequence[StoredResponse], input_items: Sequence[Item]
) -> tuple[Message, ...]:
    """The conversation. Instructions of earlier requests are not inherited."""
    stored_items = [item for row in chain for item in (*row.input_items, *row.body["output"])]
    _refuse_repeated(stored_items, input_items)
    messages = messages_of([*stored_items, *input_items], first=len(stored_items))
    if instructions:
        messages = (Message(role="system", content=instructions), *messages)
    if not messages:
        raise wrong("input", "give a text or at least one item")
    return messages


def _refuse_repeated(stored_items: Sequence[Item], input_items: Sequence[Item]) -> None:
    """Refuse an item that the conversation holds already: the model would read it twice.

    Raises:
        RequestRefused: an item is repeated; the error names it.
    """
    ids = {item["id"] for item in stored_items if item.get("id")}
    for number, item in enumerate(input_items):
        item_id = item.get("id") if isinstance(item, dict) else None
        if not isinstance(item_id, str) or not item_id:
            continue
        if item_id in ids:
            raise wrong(
                f"input.{number}.id",
                f"{item_id!r} is there already, in the input or in the conversation of "
                "previous_response_id: send it once",
            )
        ids.add(item_id)


def _with_ids(items: Sequence[Item], *, source: str) -> tuple[Item, ...]:
    """Input items with an id each; its prefix differs from those of output items."""
    return tuple(
        item if item.get("id") else {**item, "id": f"in_{source}_{number}"}
        for number, item in enumerate(items)
    )
