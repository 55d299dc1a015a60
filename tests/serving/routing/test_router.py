import asyncio
from collections import Counter

import pytest

from onlinerl.errors import EngineUnreachable, RequestRefused
from onlinerl.serving.routing.arms import Arms, Target
from tests.serving.routes import Fleet, make_fleet

pytestmark = pytest.mark.asyncio

SESSIONS = [f"session-{n}" for n in range(300)]


def arms(
    *,
    canary: float | None = None,
    shadow: float | None = None,
    adapter: bool = False,
    champion_adapter: str | None = None,
) -> Arms:
    """Canary 13 and shadow 14 with these shares."""
    return Arms(
        champion=Target(arm="champion", version=12, share=1.0, adapter=champion_adapter)
        if champion_adapter
        else None,
        canary=Target(
            arm="canary", version=13, share=canary, adapter="assistant@13" if adapter else None
        )
        if canary is not None
        else None,
        shadow=Target(
            arm="shadow", version=14, share=shadow, adapter="assistant@14" if adapter else None
        )
        if shadow is not None
        else None,
    )


def versions(fleet: Fleet) -> Counter[tuple[str, str]]:
    """How many of the sessions each arm and version got."""
    routes = [fleet.route(session) for session in SESSIONS]
    return Counter((route.arm, route.version) for route in routes)


async def test_a_session_stays_on_its_replica_and_sessions_spread() -> None:
    fleet = await make_fleet("assistant/1", "assistant/1", "assistant/1")
    picks = {session: fleet.picks(session) for session in SESSIONS}

    assert all(fleet.picks(session) == pick for session, pick in picks.items())
    assert all(count > 60 for count in Counter(picks.values()).values())


async def test_another_gateway_sends_known_sessions_to_the_same_replica() -> None:
    one = await make_fleet("assistant/1", "assistant/1", "assistant/1")
    two = await make_fleet("assistant/1", "assistant/1", "assistant/1")

    assert all(one.picks(session) == two.picks(session) for session in SESSIONS)


async def test_a_replica_that_fails_moves_only_its_sessions() -> None:
    fleet = await make_fleet("assistant/1", "assistant/1", "assistant/1")
    before = {session: fleet.picks(session) for session in SESSIONS}
    fleet.engines[0].failure = EngineUnreachable("gone")
    await fleet.look()
    after = {session: fleet.picks(session) for session in SESSIONS}

    moved = {session for session in SESSIONS if before[session] != after[session]}
    assert moved == {session for session in SESSIONS if before[session] == "memory://0"}


async def test_a_new_session_goes_to_the_least_busy_and_equals_take_turns() -> None:
    fleet = await make_fleet("assistant/1", "assistant/2", "default")
    turns = {fleet.picks(f"new-{n}", known=False) for n in range(4)}
    fleet.router.pool.replicas[0].num_running = 1
    then = {fleet.picks(f"newer-{n}", known=False) for n in range(4)}

    assert turns == {"memory://0", "memory://1"}
    assert then == {"memory://1"}


async def test_a_new_session_stays_where_it_was_placed() -> None:
    fleet = await make_fleet(*["assistant/1"] * 4)
    placed = {session: fleet.picks(session, known=False) for session in SESSIONS}

    assert all(fleet.picks(session) == place for session, place in placed.items())


async def test_a_forgotten_session_is_placed_by_its_hash() -> None:
    forgetful = await make_fleet(*["assistant/1"] * 4, max_sessions=0)
    remembering = await make_fleet(*["assistant/1"] * 4)
    for session in SESSIONS:
        forgetful.picks(session, known=False)

    assert all(forgetful.picks(s) == remembering.picks(s) for s in SESSIONS)


async def test_the_remembered_places_are_bounded() -> None:
    fleet = await make_fleet("assistant/1", max_sessions=10)
    for session in SESSIONS:
        fleet.route(session)

    assert len(fleet.router._url_of_session) == 10


async def test_a_session_leaves_a_replica_that_is_far_over_the_mean() -> None:
    fleet = await make_fleet("assistant/1", "assistant/1", load_factor=1.0, load_slack=4)
    home = fleet.picks("s")
    busy = next(r for r in fleet.router.pool.replicas if r.url == home)
    busy.num_running = 8  # 9 against the mean of 4.5, rounded up, and 4
    stays = fleet.picks("s")
    busy.num_running = 9
    leaves = fleet.picks("s")

    assert stays == home
    assert leaves != home
    assert fleet.count("routed_total", engine=leaves, by="spill") == 1
    assert fleet.count("routed_total", engine=home, by="session") == 2


async def test_without_a_canary_the_champion_is_certain() -> None:
    fleet = await make_fleet("assistant/12", "assistant/12")
    route = fleet.route()

    assert (route.arm, route.arm_probability, route.version) == ("champion", 1.0, "assistant/12")


async def test_a_canary_answers_its_share_by_its_version_and_nobody_else_does() -> None:
    fleet = await make_fleet("assistant/12", "assistant/13", "assistant/12")
    fleet.router.set_arms(arms(canary=0.25))
    got = versions(fleet)

    assert set(got) == {("champion", "assistant/12"), ("canary", "assistant/13")}
    assert 50 < got["canary", "assistant/13"] < 100
    for session in SESSIONS:
        route = fleet.route(session)
        assert route.arm_probability == (0.25 if route.arm == "canary" else 0.75)
        assert fleet.route(session).arm == route.arm


async def test_the_champion_arm_takes_every_version_that_no_arm_pins() -> None:
    """A promotion goes from replica to replica: between two of them there are two versions."""
    fleet = await make_fleet("assistant/11", "assistant/12", "assistant/13")
    fleet.router.set_arms(arms(canary=0.0))

    assert {version for _, version in versions(fleet)} == {"assistant/11", "assistant/12"}


async def test_without_a_replica_of_its_own_the_canary_is_answered_by_the_champion() -> None:
    fleet = await make_fleet("assistant/12", "assistant/13")
    fleet.router.set_arms(arms(canary=0.5))
    fleet.engines[1].failure = EngineUnreachable("gone")
    await fleet.look()
    routes = [fleet.route(session) for session in SESSIONS]

    assert {(r.arm, r.arm_probability, r.version) for r in routes} == {
        ("champion", 1.0, "assistant/12")
    }
    drawn = fleet.count("arm_fallbacks_total", arm="canary")
    assert 100 < drawn < 200


async def test_a_canary_that_is_on_every_replica_answers_everybody() -> None:
    """As in a promotion, between the last replica and the decision that ends the canary."""
    fleet = await make_fleet("assistant/13", "assistant/13")
    fleet.router.set_arms(arms(canary=0.1))
    routes = [fleet.route(session) for session in SESSIONS]

    answered_by_draw = sum(r.arm_probability == 0.1 for r in routes)
    assert {(r.arm, r.version) for r in routes} == {("canary", "assistant/13")}
    assert {r.arm_probability for r in routes} == {0.1, 1.0}
    assert answered_by_draw < 60


async def test_a_shadow_answers_no_caller() -> None:
    fleet = await make_fleet("assistant/12", "assistant/14")
    fleet.router.set_arms(arms(shadow=1.0))

    assert set(versions(fleet)) == {("champion", "assistant/12")}


async def test_a_shadow_that_is_left_alone_still_answers_no_caller() -> None:
    fleet = await make_fleet("assistant/12", "assistant/14")
    fleet.router.set_arms(arms(shadow=1.0))
    fleet.engines[0].failure = EngineUnreachable("gone")
    await fleet.look()

    with pytest.raises(RequestRefused, match="shadow") as caught:
        fleet.route()
    assert caught.value.status == 503


async def test_a_shadow_that_was_promoted_to_every_replica_serves() -> None:
    fleet = await make_fleet("assistant/14", "assistant/14")
    fleet.router.set_arms(arms(shadow=1.0))

    assert set(versions(fleet)) == {("champion", "assistant/14")}


async def test_a_shadow_route_leads_to_its_version_or_nowhere() -> None:
    fleet = await make_fleet("assistant/12", "assistant/14")
    before = fleet.router.shadow_route(tenant="acme")
    fleet.router.set_arms(arms(shadow=0.5))
    route = fleet.router.shadow_route(tenant="acme")
    fleet.engines[1].version = "assistant/15"
    await fleet.look()

    assert before is None
    assert route is not None
    assert (route.arm, route.version, route.arm_probability) == ("shadow", "assistant/14", 0.5)
    assert fleet.router.shadow_route(tenant="acme") is None


async def test_adapters_pin_no_replica_and_answer_where_they_are_loaded() -> None:
    fleet = await make_fleet("assistant/1", "assistant/1")
    fleet.engines[1].loaded = frozenset({"assistant@13"})
    fleet.router.set_arms(arms(canary=0.5, adapter=True))
    await fleet.look()
    routes = [fleet.route(session) for session in SESSIONS]

    canary = [route for route in routes if route.arm == "canary"]
    champion = [route for route in routes if route.arm == "champion"]
    assert {(r.url, r.version, r.adapter) for r in canary} == {
        ("memory://1", "assistant/13", "assistant@13")
    }
    assert {(r.version, r.adapter) for r in champion} == {("assistant/1", None)}
    assert {r.url for r in champion} == {"memory://0", "memory://1"}


async def test_which_adapters_are_loaded_is_asked_only_where_an_arm_is_one() -> None:
    fleet = await make_fleet("assistant/1")
    fleet.engines[0].loaded = frozenset({"assistant@13"})
    await fleet.look()
    before = fleet.router.pool.replicas[0].adapters
    fleet.router.set_arms(arms(canary=0.5, adapter=True))
    await fleet.look()

    assert before == frozenset()
    assert fleet.router.pool.replicas[0].adapters == {"assistant@13"}


async def test_a_champion_that_is_an_adapter_answers_by_it_or_by_the_weights_under_it() -> None:
    fleet = await make_fleet("assistant/1")
    fleet.router.set_arms(arms(champion_adapter="assistant@12"))
    without = fleet.route()
    fleet.engines[0].loaded = frozenset({"assistant@12"})
    await fleet.look()
    loaded = fleet.route()

    assert (without.version, without.adapter) == ("assistant/1", None)
    assert (loaded.version, loaded.adapter) == ("assistant/12", "assistant@12")
    assert fleet.count("arm_fallbacks_total", arm="champion") == 1


async def test_a_started_router_looks_before_the_first_request() -> None:
    fleet = await make_fleet("assistant/1")
    fleet.engines[0].version = "assistant/2"
    await fleet.router.start()
    version = fleet.route().version
    await fleet.router.close()
    await asyncio.sleep(0)

    assert version == "assistant/2"
