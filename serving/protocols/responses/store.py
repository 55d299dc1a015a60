"""What the gateway keeps of answers, so that `previous_response_id` goes on from them.

`SqliteResponseStore` (see `responses_sqlite`) is the real form, `MemoryResponseStore` its twin.
Each answer is kept once, with the input that it was given and the id of the answer before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Item = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """An answer as it was sent, and what it takes to go on from it."""

    response_id: str
    previous_id: str | None
    """The stored answer that it goes on from."""
    session_id: str
    user: str | None
    """Keyed hash of the user whose words it holds, those of earlier turns included."""
    created_at: float
    """Unix time, seconds."""
    input_items: tuple[Item, ...]
    """What this request added; not what came before, nor `instructions`."""
    body: Item
    """The response object."""


class ResponseStore(Protocol):
    """Stored answers, apart for every tenant.

    Raises:
        ServiceUnavailable: from every method, when the store does not answer in time.
    """

    async def put(self, response: StoredResponse, *, tenant: str) -> bool:
        """Keep an answer; False when it alone is larger than the store may be."""

    async def chain(self, response_id: str, *, tenant: str) -> Sequence[StoredResponse]:
        """An answer and all that it goes on from, oldest first.

        Empty when one of them is unknown to the tenant, was deleted, evicted or has expired: a
        conversation with a gap is none.
        """

    async def get(self, response_id: str, *, tenant: str) -> StoredResponse | None:
        """One answer."""

    async def delete(self, response_id: str, *, tenant: str) -> bool:
        """Forget an answer; False when the tenant has none of that id."""

    async def forget_user(self, user: str, *, tenant: str) -> int:
        """Forget every answer of a user, given as the keyed hash; returns how many there were."""

    async def close(self) -> None:
        """End."""


class MemoryResponseStore:
    """A `ResponseStore` that a restart empties."""

    def __init__(
        self, *, max_rows: int, retain_s: float, now: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._rows: dict[tuple[str, str], StoredResponse] = {}
        self._max_rows = max_rows
        self._retain_s = retain_s
        self._now = now

    async def put(self, response: StoredResponse, *, tenant: str) -> bool:
        """Keep an answer; the oldest make room."""
        self._rows[tenant, response.response_id] = response
        by_age = sorted(self._rows, key=lambda key: self._rows[key].created_at)
        for key in by_age[: max(len(by_age) - self._max_rows, 0)]:
            del self._rows[key]
        return (tenant, response.response_id) in self._rows

    async def chain(self, response_id: str, *, tenant: str) -> Sequence[StoredResponse]:
        """An answer and all that it goes on from, oldest first."""
        chain: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            row = await self.get(wanted, tenant=tenant)
            if row is None:
                return []
            chain.append(row)
            wanted = row.previous_id
        return chain[::-1]

    async def get(self, response_id: str, *, tenant: str) -> StoredResponse | None:
        """One answer."""
        row = self._rows.get((tenant, response_id))
        alive = row is not None and row.created_at > self._now() - self._retain_s
        return row if alive else None

    async def delete(self, response_id: str, *, tenant: str) -> bool:
        """Forget an answer."""
        return self._rows.pop((tenant, response_id), None) is not None

    async def forget_user(self, user: str, *, tenant: str) -> int:
        """Forget every answer of a user."""
        theirs = [key for key, row in self._rows.items() if key[0] == tenant and row.user == user]
        for key in theirs:
            del self._rows[key]
        return len(theirs)

    async def close(self) -> None:
        """Nothing to end."""
