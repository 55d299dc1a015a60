from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from onlinerl.errors import RequestRefused
from onlinerl.serving.access.admission import Admission, Ticket
from onlinerl.serving.config import KeyLimits, LimitsConfig
from onlinerl.serving.interaction.caller import Caller
from onlinerl.serving.observability.metrics import GatewayMetrics


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Harness:
    """An admission with a manual clock."""

    def __init__(self, **limits: Any) -> None:
        self.clock = Clock()
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.admission = Admission(LimitsConfig(**limits), metrics=self.metrics, clock=self.clock)

    def refused(self, caller: Caller) -> RequestRefused:
        with pytest.raises(RequestRefused) as caught:
            self.admission.enter(caller)
        assert caught.value.status == 429
        return caught.value

    def count(self, limit: str) -> float:
        name = "onlinerl_gateway_limited_total"
        return self.metrics.registry.get_sample_value(name, {"limit": limit}) or 0.0


def caller(name: str = "a", **limits: Any) -> Caller:
    return Caller(name=name, tenant="acme", consent="log", limits=KeyLimits(**limits))


def test_more_requests_at_once_than_the_whole_may_have_are_refused() -> None:
    harness = Harness(max_in_flight=2)
    first = harness.admission.enter(caller("a"))
    harness.admission.enter(caller("b"))
    refused = harness.refused(caller("c"))
    first.release()
    harness.admission.enter(caller("c"))

    assert refused.code == "rate_limit_exceeded"
    assert harness.count("in_flight") == 1


def test_a_key_that_is_full_leaves_room_for_the_others() -> None:
    harness = Harness(max_in_flight=10, per_key=KeyLimits(max_in_flight=1))
    harness.admission.enter(caller("a"))
    harness.refused(caller("a"))
    harness.admission.enter(caller("b"))
    generous = caller("c", max_in_flight=2)
    harness.admission.enter(generous)
    harness.admission.enter(generous)
    harness.refused(generous)

    assert harness.count("key_in_flight") == 2


def test_releasing_twice_frees_one_place() -> None:
    harness = Harness(max_in_flight=2)
    one, _ = harness.admission.enter(caller()), harness.admission.enter(caller())
    one.release()
    one.release()
    harness.admission.enter(caller())

    harness.refused(caller())


def test_an_error_while_answering_frees_the_place() -> None:
    harness = Harness(max_in_flight=1)
    with pytest.raises(ZeroDivisionError), harness.admission.enter(caller()):
        raise ZeroDivisionError

    assert harness.admission.num_in_flight == 0


def test_when_to_come_back_is_how_long_a_place_usually_takes_to_free() -> None:
    harness = Harness(max_in_flight=2)
    for _ in range(200):
        with harness.admission.enter(caller()):
            harness.clock.now_s += 30
    harness.admission.enter(caller())
    harness.admission.enter(caller())

    assert harness.refused(caller()).headers["retry-after"] == "15"


def test_requests_over_the_rate_get_a_retry_after() -> None:
    harness = Harness()
    twice = caller(requests_per_minute=2)
    for _ in range(2):
        harness.admission.enter(twice).release()
    refused = harness.refused(twice)
    harness.clock.now_s += 29
    harness.refused(twice)
    harness.clock.now_s += 1
    harness.admission.enter(twice)

    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"


def test_a_refused_request_holds_no_place() -> None:
    harness = Harness()
    once = caller(requests_per_minute=1)
    harness.admission.enter(once).release()
    harness.refused(once)

    assert harness.admission.num_in_flight == 0


def test_unrated_requests_count_only_while_in_flight() -> None:
    harness = Harness(max_in_flight=1)
    once = caller(requests_per_minute=1)
    for _ in range(3):
        with harness.admission.enter(once, is_rated=False):
            harness.refused(once)

    harness.admission.enter(once)


def test_unused_reserved_tokens_are_returned() -> None:
    harness = Harness()
    key = caller(tokens_per_minute=600)
    ticket = harness.admission.enter(key)
    ticket.reserve(num_prompt_bytes=401, max_tokens=50, num_choices=2)

    assert ticket.headers["x-ratelimit-remaining-tokens"] == str(600 - 101 - 100)
    ticket.release(num_tokens=30)
    assert ticket.headers["x-ratelimit-remaining-tokens"] == "570"


def test_tokens_that_are_not_there_are_refused_until_they_are() -> None:
    harness = Harness()
    key = caller(tokens_per_minute=60)
    with harness.admission.enter(key) as ticket:
        ticket.reserve(num_prompt_bytes=0, max_tokens=50)
        with harness.admission.enter(key) as second, pytest.raises(RequestRefused) as caught:
            second.reserve(num_prompt_bytes=0, max_tokens=30)
        harness.clock.now_s += 20
        with harness.admission.enter(key) as third:
            third.reserve(num_prompt_bytes=0, max_tokens=30)

    assert caught.value.headers["retry-after"] == "20"
    assert harness.count("tokens") == 1


def test_more_tokens_than_were_reserved_are_a_debt() -> None:
    harness = Harness()
    key = caller(tokens_per_minute=60)
    ticket = harness.admission.enter(key)
    ticket.reserve(num_prompt_bytes=0, max_tokens=10)
    ticket.release(num_tokens=90)
    with harness.admission.enter(key) as late, pytest.raises(RequestRefused) as caught:
        late.reserve(num_prompt_bytes=4, max_tokens=0)

    assert caught.value.headers["retry-after"] == "31"


def test_a_request_of_more_than_a_minute_waits_for_a_whole_minute() -> None:
    harness = Harness()
    key = caller(tokens_per_minute=60)
    harness.admission.enter(key).reserve(num_prompt_bytes=0, max_tokens=1000)
    with pytest.raises(RequestRefused) as caught:
        harness.admission.enter(key).reserve(num_prompt_bytes=0, max_tokens=1000)

    assert caught.value.headers["retry-after"] == "60"


def test_without_a_rate_there_are_no_headers() -> None:
    assert Harness().admission.enter(caller()).headers == {}


def test_new_limits_of_a_key_hold_from_the_next_request_on() -> None:
    harness = Harness()
    harness.admission.enter(caller(requests_per_minute=1)).release()
    harness.refused(caller(requests_per_minute=1))

    harness.admission.enter(caller(requests_per_minute=2))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["enter", "leave"]))))
def test_places_never_leak_and_are_never_exceeded(steps: list[tuple[str, str]]) -> None:
    harness = Harness(max_in_flight=3, per_key=KeyLimits(max_in_flight=2))
    held: dict[str, list[Ticket]] = {"a": [], "b": []}
    for name, step in steps:
        if step == "leave" and held[name]:
            held[name].pop().release()
        elif step == "enter":
            full = sum(map(len, held.values())) >= 3 or len(held[name]) >= 2
            if full:
                harness.refused(caller(name))
            else:
                held[name].append(harness.admission.enter(caller(name)))
        assert harness.admission.num_in_flight == sum(map(len, held.values()))
