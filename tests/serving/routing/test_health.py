from hypothesis import given
from hypothesis import strategies as st

from onlinerl.errors import (
    EngineAborted,
    EngineDisconnected,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    EngineUnreachable,
    GatewayFault,
)
from onlinerl.serving.routing.health import Health, points_of_look, points_of_request


def health() -> Health:
    return Health(eject_after=3, return_after=2)


def test_three_late_looks_in_a_row_eject_and_two_do_not() -> None:
    replica = health()

    assert [replica.note_failure(1) for _ in range(4)] == [False, False, True, False]
    assert replica.is_out


def test_a_good_look_or_a_served_request_makes_up_for_late_looks() -> None:
    replica = health()
    for _ in range(2):
        replica.note_failure(1)
        replica.note_failure(1)
        replica.note_good_look(is_needed=False)
        replica.note_failure(1)
        replica.note_failure(1)
        replica.note_answer()
    replica.note_failure(1)

    assert not replica.is_out


def test_an_ejected_replica_returns_after_two_good_looks_in_a_row() -> None:
    replica = health()
    replica.note_failure(3)
    replica.note_good_look(is_needed=False)
    replica.note_failure(1)
    replica.note_good_look(is_needed=False)
    after_one = replica.is_out
    replica.note_good_look(is_needed=False)

    assert after_one
    assert not replica.is_out


def test_one_good_look_is_enough_when_nothing_else_serves() -> None:
    replica = health()
    replica.note_failure(3)
    replica.note_good_look(is_needed=True)

    assert not replica.is_out


def test_an_answer_that_was_on_its_way_does_not_bring_a_replica_back() -> None:
    replica = health()
    replica.note_failure(3)
    replica.note_answer()

    assert replica.is_out


def test_what_counts_how_much() -> None:
    limit = health().eject_after
    refused = EngineUnreachable("nothing listens")

    assert points_of_look(EngineTimeout("slow")) == 1
    assert points_of_look(EngineDisconnected("slow as well")) == 1
    assert points_of_look(EngineUnavailable("dead")) >= limit
    assert points_of_look(EngineProtocolError("no version")) >= limit
    assert points_of_look(refused) >= limit
    assert points_of_request(refused) >= limit
    assert points_of_request(EngineUnreachable("busy", is_late=True)) == 2
    for cause in (
        EngineAborted, EngineDisconnected, EngineProtocolError, EngineTimeout, EngineUnavailable,
    ):  # fmt: skip
        assert points_of_request(cause("broken")) == 2
    # A request that an engine cannot take must not eject one replica after the other.
    assert points_of_request(EngineRefused("too long", 400)) == 0
    assert points_of_request(EngineRefused("a bug", 500)) == 0
    assert points_of_request(GatewayFault("a bug of ours")) == 0


@given(st.lists(st.sampled_from(["late", "good", "served"]), max_size=40))
def test_a_replica_is_out_only_after_enough_failures_without_a_good_answer(
    events: list[str],
) -> None:
    replica = health()
    in_a_row = 0
    for event in events:
        was_out = replica.is_out
        if event == "late":
            replica.note_failure(1)
            in_a_row += 1
        elif event == "good":
            replica.note_good_look(is_needed=False)
            in_a_row = 0
        else:
            replica.note_answer()
            in_a_row = 0 if not was_out else in_a_row
        if replica.is_out and not was_out:
            assert in_a_row >= 3
