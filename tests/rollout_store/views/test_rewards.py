from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onlinerl.rollout_store.config import MetricConfig, RewardsConfig
from tests.events import after, completion, feedback, interaction
from tests.rollout_store.views_of import Event, views_of

ACCEPTED = MetricConfig(name="accepted")


def spec(*metrics: MetricConfig, **changes: object) -> RewardsConfig:
    fields = {"metrics": metrics or (ACCEPTED,), "clip": (-10.0, 10.0)}
    return RewardsConfig.model_validate(fields | changes)


def rewards(
    folder: Path,
    *events: Event,
    config: RewardsConfig | None = None,
    as_of: datetime | None = None,
) -> dict[tuple[str, int], float]:
    connection = views_of(folder, *events, rewards=config or spec(), as_of=as_of)
    rows = connection.execute("SELECT interaction_id, choice_index, reward FROM rewards").fetchall()
    assert len({row[:2] for row in rows}) == len(rows)
    return {(i, c): reward for i, c, reward in rows}


def test_feedback_is_a_reward(tmp_path: Path) -> None:
    assert rewards(tmp_path, interaction(), feedback(value=0.5)) == {("i1", 0): 0.5}


def test_no_feedback_is_unlabelled_and_not_zero(tmp_path: Path) -> None:
    labelled_zero = rewards(tmp_path, interaction("i1"), interaction("i2"), feedback(value=0))

    assert labelled_zero == {("i1", 0): 0.0}


def test_feedback_of_a_metric_that_is_not_configured_labels_nothing(tmp_path: Path) -> None:
    assert rewards(tmp_path, interaction(), feedback(metric="speed")) == {}
    assert rewards(tmp_path / "2", interaction(), feedback(), config=RewardsConfig()) == {}


def test_feedback_before_its_interaction_is_joined(tmp_path: Path) -> None:
    early = feedback(given_at=after(-5))

    assert rewards(tmp_path, early, interaction()) == {("i1", 0): 1.0}


@pytest.mark.parametrize(
    ("aggregate", "reward"), [("last", 0.25), ("first", 1.0), ("mean", 0.5), ("sum", 1.5)]
)
def test_several_values_of_one_source_are_aggregated_as_configured(
    tmp_path: Path, aggregate: str, reward: float
) -> None:
    events = [
        feedback("f1", value=0.25, given_at=after(3)),
        feedback("f2", value=1.0, given_at=after(1)),
        feedback("f3", value=0.25, given_at=after(2)),
    ]
    config = spec(MetricConfig.model_validate({"name": "accepted", "aggregate": aggregate}))

    assert rewards(tmp_path, interaction(), *events, config=config) == {("i1", 0): reward}


@pytest.mark.parametrize(("aggregate", "reward"), [("last", 0.75), ("first", 0.25)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["f1 first", "f2 first"])
def test_values_of_the_same_time_are_ordered_by_feedback_id(
    tmp_path: Path, aggregate: str, reward: float, order: tuple[int, int]
) -> None:
    events = [feedback("f1", value=0.25), feedback("f2", value=0.75)]
    config = spec(MetricConfig.model_validate({"name": "accepted", "aggregate": aggregate}))

    found = rewards(tmp_path, interaction(), *(events[n] for n in order), config=config)
    assert found == {("i1", 0): reward}


def test_sources_are_averaged_by_weight_not_by_number(tmp_path: Path) -> None:
    events = [
        feedback("f1", value=1.0, source="user"),
        feedback("f2", value=0.0, source="judge", given_at=after(1)),
        feedback("f3", value=0.0, source="judge", given_at=after(2)),
    ]

    assert rewards(
        tmp_path, interaction(), *events, config=spec(sources={"user": 3.0, "judge": 1.0})
    ) == {("i1", 0): 0.75}


def test_a_source_of_weight_zero_is_ignored(tmp_path: Path) -> None:
    config = spec(sources={"judge": 0.0})

    assert rewards(tmp_path, interaction(), feedback(source="judge"), config=config) == {}


def test_metrics_are_scaled_shifted_weighted_and_added(tmp_path: Path) -> None:
    config = spec(
        MetricConfig(name="accepted", weight=0.5, scale=2.0, offset=-1.0),
        MetricConfig(name="it's fast", weight=2.0, scale=0.1),
    )
    events = [feedback("f1", value=0.0), feedback("f2", metric="it's fast", value=3.0)]

    assert rewards(tmp_path, interaction(), *events, config=config) == {
        ("i1", 0): pytest.approx(0.5 * -1 + 2 * 0.3)
    }


def test_reward_is_clipped(tmp_path: Path) -> None:
    config = spec(clip=(-1.0, 1.0))

    assert rewards(tmp_path, interaction(), feedback(value=7.0), config=config) == {("i1", 0): 1.0}


def test_a_retraction_undoes_one_value_and_may_bring_another(tmp_path: Path) -> None:
    up = feedback("f1", value=1.0)
    undo = feedback("f2", value=None, retracts="f1", given_at=after(1))
    replace = feedback("f3", value=-1.0, retracts="f1", given_at=after(1))

    assert rewards(tmp_path / "1", interaction(), up, undo) == {}
    assert rewards(tmp_path / "2", interaction(), undo, up) == {}
    assert rewards(tmp_path / "3", interaction(), up, replace) == {("i1", 0): -1.0}


def test_feedback_reaches_one_choice_or_all(tmp_path: Path) -> None:
    two = interaction(choices=[completion(), completion([9], choice_index=1)])

    assert rewards(tmp_path / "1", two, feedback(choice_index=1)) == {("i1", 1): 1.0}
    assert rewards(tmp_path / "2", two, feedback()) == {("i1", 0): 1.0, ("i1", 1): 1.0}


def test_feedback_on_a_session_reaches_its_turns_discounted_from_the_end(tmp_path: Path) -> None:
    turns = [interaction(f"i{n}", served_at=after(n)) for n in (1, 2, 3)]
    other = interaction("i9", session_id="s2")
    of_session = feedback("f1", session_id="s1", given_at=after(3))
    events: list[Event] = [*turns, other, of_session, feedback("f2", interaction_id="i1")]

    assert rewards(tmp_path, *events, config=spec(session_discount=0.5)) == {
        ("i1", 0): 1.25,
        ("i2", 0): 0.5,
        ("i3", 0): 1.0,
    }


def test_feedback_on_a_session_does_not_count_on_later_turns(
    tmp_path: Path,
) -> None:
    turns = [interaction(f"i{n}", served_at=after(n)) for n in (1, 2, 3)]
    early = feedback("f1", session_id="s1", given_at=after(2))

    assert rewards(tmp_path, *turns, early, config=spec(session_discount=0.5)) == {
        ("i1", 0): 0.5,
        ("i2", 0): 1.0,
    }


def test_a_shadow_answer_is_no_turn_of_the_session(tmp_path: Path) -> None:
    turns: list[Event] = [interaction("a"), interaction("b", served_at=after(2))]
    shadows: list[Event] = [
        interaction("shadow-a", arm="shadow", served_at=after(1)),
        interaction("shadow-b", arm="shadow", served_at=after(3)),
    ]
    of_session = feedback("f1", session_id="s1", given_at=after(4))
    config = spec(session_discount=0.5)

    plain = rewards(tmp_path / "1", *turns, of_session, config=config)
    assert plain == {("a", 0): 0.5, ("b", 0): 1.0}
    assert rewards(tmp_path / "2", *turns, *shadows, of_session, config=config) == plain
    judged = feedback("f2", interaction_id="shadow-a", value=0.25)
    found = rewards(tmp_path / "3", *turns, *shadows, of_session, judged, config=config)
    assert found == {**plain, ("shadow-a", 0): 0.25}


@pytest.mark.parametrize(
    ("aggregate", "first_turn"),
    # On i1 the values 1 and 3 count 1 and 1/2 times; the offset of 1 as the values do.
    [("first", 2.0), ("last", 2.0), ("mean", 2.0), ("sum", 1.0 + 1.5 + 0.75)],
)
def test_each_feedback_on_a_session_is_discounted_from_when_it_was_given(
    tmp_path: Path, aggregate: str, first_turn: float
) -> None:
    metric = MetricConfig.model_validate(
        {"name": "accepted", "aggregate": aggregate, "offset": 1.0}
    )
    events: list[Event] = [
        interaction("i1", served_at=after(1)),
        feedback("f1", session_id="s1", value=1.0, given_at=after(2)),
        interaction("i2", served_at=after(3)),
        feedback("f2", session_id="s1", value=3.0, given_at=after(4)),
    ]

    assert rewards(tmp_path, *events, config=spec(metric, session_discount=0.5)) == {
        ("i1", 0): pytest.approx(first_turn),
        ("i2", 0): 4.0,
    }


@pytest.mark.parametrize(("consent", "counts"), [(None, True), ("train", True), ("log", False)])
def test_only_feedback_that_may_be_learned_from_is_a_reward(
    tmp_path: Path, consent: str | None, counts: bool
) -> None:
    found = rewards(tmp_path, interaction(), feedback(consent=consent))

    assert found == ({("i1", 0): 1.0} if counts else {})


def test_a_retraction_counts_without_consent(tmp_path: Path) -> None:
    undo = feedback("f2", value=None, retracts="f1", consent="log")

    assert rewards(tmp_path, interaction(), feedback("f1"), undo) == {}


def test_feedback_of_another_tenant_counts_nowhere(tmp_path: Path) -> None:
    events = [
        feedback("f1", tenant="globex"),
        feedback("f2", tenant="globex", session_id="s1"),
        feedback("f3", value=0.5),
        feedback("f4", tenant="globex", value=None, retracts="f3"),
    ]

    config = spec(MetricConfig(name="accepted", aggregate="sum"))
    assert rewards(tmp_path, interaction(), *events, config=config) == {("i1", 0): 0.5}


def test_a_reward_is_listed_when_its_interaction_is_old_enough(tmp_path: Path) -> None:
    config = spec(maturity_s=600.0)
    events = (interaction(), feedback())

    assert rewards(tmp_path / "1", *events, config=config, as_of=after(9.9)) == {}
    assert rewards(tmp_path / "2", *events, config=config, as_of=after(10)) == {("i1", 0): 1.0}


def test_a_label_says_how_many_signals_and_when(tmp_path: Path) -> None:
    connection = views_of(
        tmp_path,
        interaction(),
        feedback("f1", given_at=after(1)),
        feedback("f2", given_at=after(2), source="judge"),
        rewards=spec(),
    )

    rows = connection.execute("SELECT num_feedback, labelled_at FROM rewards").fetchall()
    assert rows == [(2, after(2))]


def test_a_value_that_is_not_finite_is_ignored(tmp_path: Path) -> None:
    assert rewards(tmp_path, interaction(), feedback(value=float("nan"))) == {}


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, float("inf")])
def test_a_value_that_is_not_of_the_metrics_type_is_ignored(tmp_path: Path, value: float) -> None:
    config = spec(MetricConfig(name="accepted", type="bool"))
    events = [feedback("f1", value=1.0), feedback("f2", value=value, given_at=after(1))]

    assert rewards(tmp_path, interaction(), *events, config=config) == {("i1", 0): 1.0}


def test_a_source_may_be_aggregated_and_weighed_in_its_own_way(tmp_path: Path) -> None:
    metric = MetricConfig(
        name="accepted", aggregate="last", aggregates={"judge": "mean"}, sources={"user": 3.0}
    )
    events = [
        feedback("f1", value=0.0, given_at=after(1)),
        feedback("f2", value=1.0, given_at=after(2)),
        feedback("f3", value=0.0, source="judge", given_at=after(1)),
        feedback("f4", value=1.0, source="judge", given_at=after(2)),
    ]

    # last of the user 1, mean of the judge 0.5: (3 * 1 + 1 * 0.5) / 4, not (1 + 0.5) / 2
    found = rewards(
        tmp_path, interaction(), *events, config=spec(metric, sources={"user": 1.0, "judge": 1.0})
    )
    assert found == {("i1", 0): 0.875}


@pytest.mark.parametrize(("value", "reward"), [(1.0, 0.75), (0.0, -0.25)])
def test_a_threshold_gives_one_minus_it_or_minus_it(
    tmp_path: Path, value: float, reward: float
) -> None:
    config = spec(MetricConfig(name="accepted", type="bool", threshold=0.25))

    assert rewards(tmp_path, interaction(), feedback(value=value), config=config) == {
        ("i1", 0): reward
    }


def test_a_threshold_is_applied_to_each_value_before_they_are_aggregated(tmp_path: Path) -> None:
    metric = MetricConfig(name="stars", aggregate="mean", threshold=0.5, passes_at=4.0)
    stars = [feedback(f"f{n}", metric="stars", value=n) for n in (2.0, 3.0, 5.0)]

    # -0.5, -0.5, 0.5: the mean of 10/3 stars would not have passed either, but counts -0.5
    assert rewards(tmp_path, interaction(), *stars, config=spec(metric)) == {
        ("i1", 0): pytest.approx(-0.5 / 3)
    }


def test_feedback_after_the_attribution_window_does_not_count(tmp_path: Path) -> None:
    config = spec(attribution_window_s=60.0, session_discount=0.5)
    events: list[Event] = [
        interaction("i1"),
        interaction("i2", served_at=after(1)),
        feedback("f1", interaction_id="i1", given_at=after(1)),
        feedback("f2", interaction_id="i1", value=0.5, given_at=after(1.1)),
        feedback("f3", session_id="s1", value=2.0, given_at=after(1.5)),
    ]

    # f2 is 66 s late; f3 reaches only the second turn, 30 s after it
    assert rewards(tmp_path, *events, config=config, as_of=after(60)) == {
        ("i1", 0): 1.0,
        ("i2", 0): 2.0,
    }


def test_a_reward_is_listed_when_its_window_has_closed_or_a_final_signal_came(
    tmp_path: Path,
) -> None:
    config = spec(ACCEPTED, MetricConfig(name="resolved", final=True), attribution_window_s=600.0)
    events: list[Event] = [
        interaction("i1"),
        interaction("i2", session_id="s2"),
        feedback("f1", interaction_id="i1"),
        feedback("f2", interaction_id="i2", given_at=after(1)),
        feedback("f3", interaction_id="i2", metric="resolved", value=0.5, given_at=after(2)),
    ]

    found = rewards(tmp_path / "1", *events, config=config, as_of=after(9.9))
    assert found == {("i2", 0): 1.5}
    connection = views_of(tmp_path / "2", *events, rewards=config, as_of=after(10))
    rows = connection.execute("SELECT interaction_id, matured_at FROM rewards ORDER BY 1")
    assert rows.fetchall() == [("i1", after(10)), ("i2", after(2))]


def test_a_default_labels_mature_completions_without_feedback(tmp_path: Path) -> None:
    config = spec(
        MetricConfig(name="accepted", weight=2.0, default=-0.25),
        MetricConfig(name="speed"),
        attribution_window_s=600.0,
    )
    events: list[Event] = [
        interaction("i1"),
        interaction("i2", served_at=after(1)),
        interaction("i3", served_at=after(1), session_id="s3"),
        interaction("i4", served_at=after(5), session_id="s4"),
        interaction("i5", arm="shadow", session_id="s5"),
        feedback("f1", interaction_id="i2", metric="speed", value=0.125, given_at=after(2)),
        feedback("f2", interaction_id="i3", value=1.0, given_at=after(2)),
    ]
    connection = views_of(tmp_path, *events, rewards=config, as_of=after(11))

    rows = connection.execute("SELECT interaction_id, reward, num_feedback FROM rewards ORDER BY 1")
    assert rows.fetchall() == [("i1", -0.5, 0), ("i2", -0.375, 1), ("i3", 2.0, 1)]


def test_a_user_above_the_cap_weighs_less_within_a_row_and_so_does_the_row(
    tmp_path: Path,
) -> None:
    config = spec(MetricConfig(name="accepted", aggregate="mean"), user_cap=0.25)
    own = [interaction(f"i{n}", session_id=f"s{n}") for n in (1, 2, 3)]
    events: list[Event] = [
        *own,
        # eve gives 3 of 5 on this day, so each weighs 0.25 * 5 / 3 = 5/12; bob 1 of 5 weighs 1
        feedback("f1", interaction_id="i1", user="eve", value=0.0),
        feedback("f2", interaction_id="i2", user="eve", value=0.0),
        feedback("f3", interaction_id="i2", user="eve", value=0.0),
        feedback("f4", interaction_id="i2", user="bob", value=1.0),
        feedback("f5", interaction_id="i3", value=1.0),
        # the next day eve is alone: 0.25 * 1 / 1
        feedback("f6", interaction_id="i3", user="eve", value=1.0, given_at=after(1440)),
        feedback("f7", interaction_id="i3", user="ann", metric="other", given_at=after(1440)),
    ]
    connection = views_of(tmp_path, *events, rewards=config)

    rows = connection.execute("SELECT interaction_id, reward, weight FROM rewards ORDER BY 1")
    assert rows.fetchall() == [
        ("i1", 0.0, pytest.approx(5 / 12)),
        ("i2", pytest.approx(1 / (1 + 2 * 5 / 12)), pytest.approx((1 + 2 * 5 / 12) / 3)),
        ("i3", 1.0, pytest.approx((1 + 0.25) / 2)),
    ]


def test_without_a_cap_every_row_weighs_the_same(tmp_path: Path) -> None:
    events = [feedback("f1", user="eve"), feedback("f2", user="eve")]
    connection = views_of(tmp_path, interaction(), *events, rewards=spec())

    assert connection.execute("SELECT weight FROM rewards").fetchall() == [(1.0,)]


EVERYTHING = spec(
    MetricConfig(name="accepted", type="bool", threshold=0.25, aggregates={"judge": "mean"}),
    MetricConfig(name="stars", aggregate="sum", scale=0.25, offset=-0.5, sources={"judge": 0.5}),
    MetricConfig(name="resolved", aggregate="first", final=True, default=0.125),
    session_discount=0.5,
    attribution_window_s=300.0,
    user_cap=0.5,
    clip=(-2.0, 2.0),
)


@st.composite
def signals(draw: st.DrawFn) -> list[Event]:
    """A few turns and feedback of every kind on them, some of it retracted."""
    turns = [interaction(f"i{n}", session_id=f"s{n % 2}", served_at=after(n)) for n in range(4)]
    events: list[Event] = list(turns)
    for number in range(draw(st.integers(0, 8))):
        target = draw(st.sampled_from([{"interaction_id": "i1"}, {"session_id": "s1"}]))
        events.append(
            feedback(
                f"f{number}",
                **target,
                metric=draw(st.sampled_from(["accepted", "stars", "resolved", "other"])),
                value=draw(st.sampled_from([0.0, 1.0, 0.5, None])),
                retracts=f"f{draw(st.integers(0, 8))}" if draw(st.booleans()) else "none",
                source=draw(st.sampled_from(["user", "judge"])),
                user=draw(st.sampled_from([None, "ann", "bob"])),
                given_at=after(draw(st.integers(0, 9))),
            )
        )
    return events


def views(folder: Path, events: list[Event]) -> list[object]:
    connection = views_of(folder, *events, rewards=EVERYTHING, as_of=after(6))
    columns = "interaction_id, choice_index, round(reward, 9), round(weight, 9), num_feedback"
    return [
        connection.execute(f"SELECT {columns}, matured_at FROM rewards ORDER BY ALL").fetchall(),
        connection.execute("FROM feedback_use ORDER BY feedback_id").fetchall(),
        connection.execute("FROM suspicions ORDER BY ALL").fetchall(),
    ]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=signals(), data=st.data())
def test_any_order_and_repetition_of_events_gives_the_same_rewards(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event], data: st.DataObject
) -> None:
    repeated = events + data.draw(st.lists(st.sampled_from(events), max_size=4))
    other = data.draw(st.permutations(repeated))

    first = views(tmp_path_factory.mktemp("tables"), events)
    assert views(tmp_path_factory.mktemp("tables"), list(other)) == first


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(order=st.permutations(range(6)))
def test_the_order_of_arrival_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    events: list[Event] = [
        interaction("i1"),
        interaction("i2", served_at=after(1)),
        feedback("f1", value=0.25, given_at=after(1)),
        feedback("f2", value=0.75, given_at=after(1)),
        feedback("f3", session_id="s1", value=0.5, given_at=after(1)),
        feedback("f4", value=None, retracts="f9"),
    ]
    folder = tmp_path_factory.mktemp("tables")

    assert rewards(folder, *(events[n] for n in order)) == {("i1", 0): 1.25, ("i2", 0): 0.5}
