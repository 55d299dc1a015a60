"""Limits of one gateway process: requests in flight, and the rates of each API key.

Requests in flight are limited in total and per key; requests and tokens per minute, per key.
Requests over a limit are refused with 429 and a computed `Retry-After`.
"""

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from onlinerl.errors import RequestRefused
from onlinerl.serving.access.token_bucket import TokenBucket
from onlinerl.serving.config import KeyLimits, LimitsConfig
from onlinerl.serving.interaction.caller import Caller
from onlinerl.serving.observability.metrics import GatewayMetrics

Clock = Callable[[], float]

BYTES_PER_TOKEN = 4
"""Estimate for a prompt before it is rendered; `Ticket.release` corrects it."""
_NEWEST_WEIGHT = 0.1
"""Weight of the newest request in the mean duration."""


class Ticket:
    """A place among the requests in flight. ENTERED -> (`reserve`) -> RELEASED.

    Use it as a context manager, or call `release` on every way out; a second release does nothing.
    """

    def __init__(self, admission: "Admission", key: "_Key", *, now_s: float) -> None:
        self._admission = admission
        self._key = key
        self._entered_at_s = now_s
        self._reserved = 0
        self._released = False

    def reserve(self, *, num_prompt_bytes: int, max_tokens: int, num_choices: int = 1) -> None:
        """Take the tokens that the request may use from the rate of its key.

        These are a quarter of the prompt's bytes and all tokens that may be sampled; `release`
        corrects the number. A request for more than a minute's worth takes a minute's worth.

        Raises:
            RequestRefused: 429, the rate is used up; the place is kept until `release`.
        """
        num_tokens = math.ceil(num_prompt_bytes / BYTES_PER_TOKEN) + max_tokens * num_choices
        self._reserved += self._admission.take_tokens(self._key, num_tokens)

    def release(self, *, num_tokens: int = 0) -> None:
        """Give the place back, and the reserved tokens that were not used.

        Args:
            num_tokens: Prompt and sampled tokens that were used.
        """
        if not self._released:
            self._released = True
            self._admission.give_back(
                self._key, unused=self._reserved - num_tokens, entered_at_s=self._entered_at_s
            )

    @property
    def headers(self) -> Mapping[str, str]:
        """The `x-ratelimit-*` headers that OpenAI's clients know; none for a key without rates."""
        return self._admission.headers(self._key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class _Key:
    """Limits and current use of one API key."""

    def __init__(self, name: str, limits: KeyLimits, *, now_s: float) -> None:
        self.name = name
        self.limits = limits
        self.num_in_flight = 0
        self.requests = _bucket(limits.requests_per_minute, now_s=now_s)
        self.tokens = _bucket(limits.tokens_per_minute, now_s=now_s)


class Admission:
    """Lets requests in or refuses them. Used from one event loop; nothing here waits.

    Call `enter` before the body is read, `Ticket.reserve` when its limits are known, and
    `Ticket.release` when the answer has ended in any way.
    """

    def __init__(
        self, limits: LimitsConfig, *, metrics: GatewayMetrics, clock: Clock = time.monotonic
    ) -> None:
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._keys: dict[str, _Key] = {}
        self._mean_s = 1.0
        self.num_in_flight = 0
        """Number of requests that hold a place."""

    def enter(self, caller: Caller, *, is_rated: bool = True) -> Ticket:
        """A place for one request of `caller`.

        Args:
            caller: The sender of the request.
            is_rated: Whether it counts for the key's rate of requests.

        Raises:
            RequestRefused: 429 with `retry-after`, a limit is reached; nothing was taken.
        """
        now_s = self._clock()
        key = self._key(caller, now_s=now_s)
        self._check_room(key)
        if key.requests is not None and is_rated:
            wait_s = key.requests.wait_s(1, now_s)
            if wait_s > 0:
                raise self._refusal(key, "requests", wait_s=wait_s)
            key.requests.change(-1, now_s)
        key.num_in_flight += 1
        self.num_in_flight += 1
        return Ticket(self, key, now_s=now_s)

    def take_tokens(self, key: _Key, num_tokens: int) -> int:
        """Take tokens from the rate of a key; returns their number. Called by `Ticket`."""
        if key.tokens is None:
            return 0
        now_s = self._clock()
        wait_s = key.tokens.wait_s(num_tokens, now_s)
        if wait_s > 0:
            raise self._refusal(key, "tokens", wait_s=wait_s)
        num_taken = min(num_tokens, key.tokens.capacity)
        key.tokens.change(-num_taken, now_s)
        return num_taken

    def give_back(self, key: _Key, *, unused: int, entered_at_s: float) -> None:
        """End a request and return its `unused` tokens; a negative number takes more."""
        now_s = self._clock()
        key.num_in_flight -= 1
        self.num_in_flight -= 1
        if key.tokens is not None:
            key.tokens.change(unused, now_s)
        self._mean_s += _NEWEST_WEIGHT * (now_s - entered_at_s - self._mean_s)

    def headers(self, key: _Key) -> dict[str, str]:
        """The rest of the rates of a key, as OpenAI's headers."""
        now_s = self._clock()
        headers: dict[str, str] = {}
        for name, bucket in (("requests", key.requests), ("tokens", key.tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.capacity)
                headers[f"x-ratelimit-remaining-{name}"] = str(bucket.remaining(now_s))
                headers[f"x-ratelimit-reset-{name}"] = _duration(bucket.reset_s(now_s))
        return headers

    def _key(self, caller: Caller, *, now_s: float) -> _Key:
        limits = _with_defaults(caller.limits, self._limits.per_key)
        entry = self._keys.get(caller.name)
        if entry is None or entry.limits != limits:
            fresh = _Key(caller.name, limits, now_s=now_s)
            # Running requests release to the old entry, so they do not count for the new one.
            self._keys[caller.name] = fresh
            return fresh
        return entry

    def _check_room(self, key: _Key) -> None:
        bound = self._limits.max_in_flight
        if self.num_in_flight >= bound:
            raise self._refusal(key, "in_flight", wait_s=self._mean_s / bound)
        own = key.limits.max_in_flight
        if own is not None and key.num_in_flight >= own:
            raise self._refusal(key, "key_in_flight", wait_s=self._mean_s / own)

    def _refusal(self, key: _Key, limit: str, *, wait_s: float) -> RequestRefused:
        self._metrics.limited.labels(limit).inc()
        retry_after_s = max(math.ceil(wait_s), 1)
        return RequestRefused(
            f"{_REASONS[limit]}; try again in {retry_after_s} s",
            429,
            None,
            "rate_limit_exceeded",
            {"retry-after": str(retry_after_s), **self.headers(key)},
        )


_REASONS = {
    "in_flight": "the gateway has as many requests in flight as allowed (limits.max_in_flight)",
    "key_in_flight": "this API key has as many requests in flight as allowed (max_in_flight)",
    "requests": "this API key sent as many requests as allowed (requests_per_minute)",
    "tokens": "this API key used as many tokens as allowed (tokens_per_minute)",
}


def _with_defaults(own: KeyLimits, common: KeyLimits) -> KeyLimits:
    return common.model_copy(update=own.model_dump(exclude_none=True))


def _bucket(per_minute: int | None, *, now_s: float) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, now_s=now_s)


def _duration(seconds: float) -> str:
    """A duration as OpenAI writes it: `6m0s`, `1.5s`, `20ms`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
