"""Stored responses, which `previous_response_id` continues.

`SqliteResponseStore` is the real form, `MemoryResponseStore` its twin for tests. A response is
stored once, with its own input items and the id of the response before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from typing_extensions import override

Item = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """A response as it was sent, and everything needed to continue it."""

    response_id: str
    previous_id: str | None
    """The stored response that it continues; None for the first of a conversation."""
    session_id: str
    user: str | None
    """Keyed hash of the user who wrote its input, or that of the responses that it continues."""
    created_at: float
    """Unix time, seconds."""
    input_items: tuple[Item, ...]
    """Input items of its own request, without earlier ones and without `instructions`."""
    body: Item
    """The response object."""


class ResponseStore(Protocol):
    """Stored responses; a tenant sees only its own.

    Raises:
        ServiceUnavailable: from every method, if the store does not answer in time.
    """

    async def put(self, response: StoredResponse, *, tenant: str) -> bool:
        """Store a response; False if it alone exceeds the bounds of the store."""

    async def chain(self, response_id: str, *, tenant: str) -> Sequence[StoredResponse]:
        """A response and all that it continues, oldest first.

        Empty if one of them is unknown to the tenant, deleted, evicted or expired: a conversation
        with a gap cannot be continued.
        """

    async def get(self, response_id: str, *, tenant: str) -> StoredResponse | None:
        """One response; None if the tenant has none of that id."""

    async def delete(self, response_id: str, *, tenant: str) -> bool:
        """Delete a response; False if the tenant has none of that id."""

    async def forget_user(self, user: str, *, tenant: str) -> int:
        """Delete every response of a user, given as the keyed hash; returns their number."""

    async def close(self) -> None:
        """Release the store; nothing may be called afterwards."""


class MemoryResponseStore(ResponseStore):
    """A `ResponseStore` in memory, for tests."""

    def __init__(
        self, *, max_rows: int, retain_s: float, now: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._rows: dict[tuple[str, str], StoredResponse] = {}
        self._max_rows = max_rows
        self._retain_s = retain_s
        self._now = now

    @override
    async def put(self, response: StoredResponse, *, tenant: str) -> bool:
        self._rows[tenant, response.response_id] = response
        by_age = sorted(self._rows, key=lambda key: self._rows[key].created_at)
        for key in by_age[: max(len(by_age) - self._max_rows, 0)]:
            del self._rows[key]
        return (tenant, response.response_id) in self._rows

    @override
    async def chain(self, response_id: str, *, tenant: str) -> Sequence[StoredResponse]:
        chain: list[StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None:
            row = await self.get(next_id, tenant=tenant)
            if row is None:
                return []
            chain.append(row)
            next_id = row.previous_id
        return chain[::-1]

    @override
    async def get(self, response_id: str, *, tenant: str) -> StoredResponse | None:
        row = self._rows.get((tenant, response_id))
        alive = row is not None and row.created_at > self._now() - self._retain_s
        return row if alive else None

    @override
    async def delete(self, response_id: str, *, tenant: str) -> bool:
        return self._rows.pop((tenant, response_id), None) is not None

    @override
    async def forget_user(self, user: str, *, tenant: str) -> int:
        theirs = [key for key, row in self._rows.items() if key[0] == tenant and row.user == user]
        for key in theirs:
            del self._rows[key]
        return len(theirs)

    @override
    async def close(self) -> None:
        pass
