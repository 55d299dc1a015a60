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
def test_several_values_of_one_source_are_aggregated_as_declared(
    tmp_path: Path, aggregate: str, reward: float
) -> None:
    events = [
        feedback("f1", value=0.25, given_at=after(3)),
        feedback("f2", value=1.0, given_at=after(1)),
        feedback("f3", value=0.25, given_at=after(2)),
    ]
    config = spec(MetricConfig.model_validate({"name": "accepted", "aggregate": aggregate}))

    assert rewards(tmp_path, interaction(), *events, config=config) == {("i1", 0): reward}


def test_sources_are_averaged_by_weight_not_by_number(tmp_path: Path) -> None:
    events = [
        feedback("f1", value=1.0, source="user"),
        feedback("f2", value=0.0, source="judge", given_at=after(1)),
        feedback("f3", value=0.0, source="judge", given_at=after(2)),
    ]

    assert rewards(
        tmp_path, interaction(), *events, config=spec(sources={"user": 3.0, "judge": 1.0})
    ) == {("i1", 0): 0.75}


def test_a_source_of_weight_zero_is_as_if_it_had_said_nothing(tmp_path: Path) -> None:
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


def test_feedback_on_a_session_says_nothing_of_turns_that_were_served_later(
    tmp_path: Path,
) -> None:
    turns = [interaction(f"i{n}", served_at=after(n)) for n in (1, 2, 3)]
    early = feedback("f1", session_id="s1", given_at=after(2))

    assert rewards(tmp_path, *turns, early, config=spec(session_discount=0.5)) == {
        ("i1", 0): 0.5,
        ("i2", 0): 1.0,
    }


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


def test_a_retraction_counts_whatever_its_caller_allows(tmp_path: Path) -> None:
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


def test_a_value_that_is_not_a_number_is_no_label(tmp_path: Path) -> None:
    assert rewards(tmp_path, interaction(), feedback(value=float("nan"))) == {}


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
