"""Reading and deleting stored responses: `/v1/responses/{id}` and its input items."""

import re
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from onlinerl.errors import RequestRefused
from onlinerl.serving.access.auth import Keyring
from onlinerl.serving.http.asgi import json_response
from onlinerl.serving.interaction.caller import Caller
from onlinerl.serving.protocols.responses.protocol import ask_store
from onlinerl.serving.protocols.responses.store import ResponseStore
from onlinerl.serving.wire.parameters import unsupported, wrong

Item = dict[str, Any]

_MAX_ITEMS = 100
_NUMBER = re.compile(r"[0-9]{1,3}")


class StoredResponseRoute:
    """GET and DELETE /v1/responses/{response_id}."""

    def __init__(self, store: ResponseStore, keyring: Keyring) -> None:
        self._store = store
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stored response, or the confirmation that it was deleted."""
        caller, response_id = _read(scope, self._keyring, known=())
        if scope["method"] == "DELETE":
            answer = await self._delete(response_id, tenant=caller.tenant)
        else:
            answer = await self._get(response_id, tenant=caller.tenant)
        await json_response(answer)(scope, receive, send)

    async def _get(self, response_id: str, *, tenant: str) -> Item:
        row = await ask_store(self._store.get(response_id, tenant=tenant))
        if row is None:
            raise _not_found(response_id)
        return row.body

    async def _delete(self, response_id: str, *, tenant: str) -> Item:
        if not await ask_store(self._store.delete(response_id, tenant=tenant)):
            raise _not_found(response_id)
        return {"id": response_id, "object": "response", "deleted": True}


class InputItemsRoute:
    """GET /v1/responses/{response_id}/input_items."""

    def __init__(self, store: ResponseStore, keyring: Keyring) -> None:
        self._store = store
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a page of the items before the response, newest first by default."""
        caller, response_id = _read(scope, self._keyring, known=("after", "limit", "order"))
        chain = await ask_store(self._store.chain(response_id, tenant=caller.tenant))
        if not chain:
            raise _not_found(response_id)
        earlier = [item for row in chain[:-1] for item in (*row.input_items, *row.body["output"])]
        page = _page([*earlier, *chain[-1].input_items], QueryParams(scope["query_string"]))
        await json_response(page)(scope, receive, send)


def _read(scope: Scope, keyring: Keyring, *, known: Sequence[str]) -> tuple[Caller, str]:
    """The caller, and the id of the response.

    Raises:
        RequestRefused: 401, the key is unknown; 400, a query parameter is not supported.
    """
    headers = Headers(scope=scope)
    caller = keyring.identify(headers.get("authorization"), headers.get("x-api-key"))
    for name in QueryParams(scope["query_string"]):
        if name not in known:
            raise unsupported(name, f"give {' or '.join(known) or 'no query'}")
    return caller, scope["path_params"]["response_id"]


def _page(items: list[Item], query: QueryParams) -> Item:
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise wrong("order", f"give asc or desc, not {order!r}")
    if _NUMBER.fullmatch(limit) is None or not 1 <= int(limit) <= _MAX_ITEMS:
        raise wrong("limit", f"give 1 to {_MAX_ITEMS}, not {limit!r}")
    ordered = items if order == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise wrong("after", f"there is no item {after!r}")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(page) < len(ordered),
    }


def _not_found(response_id: str) -> RequestRefused:
    return RequestRefused(
        f"there is no stored response {response_id!r}", 404, "response_id", "not_found"
    )
