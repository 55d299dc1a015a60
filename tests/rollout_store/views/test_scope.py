from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onlinerl.rollout_store.config import MetricConfig, RewardsConfig, SuspicionConfig
from onlinerl.rollout_store.schema import InteractionEvent
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table
from onlinerl.rollout_store.views.connection import connect
from onlinerl.rollout_store.views.scope import Scope
from tests.events import NOON, after, feedback, feedback_row, interaction, interaction_rows
from tests.rollout_store.views.test_segments import conversations, turn
from tests.rollout_store.views_of import Event, stored

CONFIG = RewardsConfig(
    metrics=(MetricConfig(name="accepted", aggregate="mean"),), session_discount=0.5
)
DAY = timedelta(days=1)


def ingested_daily(folder: Path, events: Sequence[Event]) -> DeltaStore:
    """Tables in which every event is ingested a minute after it happened."""
    store = stored(folder, [])
    for event in events:
        at = event.served_at if isinstance(event, InteractionEvent) else event.given_at
        origin = {"ingested_at": at + timedelta(minutes=1), "ingest_date": at.date()}
        if isinstance(event, InteractionEvent):
            store.append("interactions", to_table(interaction_rows(event, **origin)))
        else:
            store.append("feedback", to_table([feedback_row(event, **origin)]))
    return store


def rows(
    store: DeltaStore, sql: str, scope: Scope | None, *, config: RewardsConfig = CONFIG
) -> list[tuple[object, ...]]:
    with connect(store, rewards=config, scope=scope) as connection:
        return connection.execute(sql).fetchall()


def long_session() -> list[Event]:
    """Three turns of one conversation, ten days apart, and a lone request before and after."""
    return [
        interaction("old", session_id="s0", served_at=NOON - 10 * DAY),
        turn(1, served_at=NOON),
        turn(2, served_at=NOON + 10 * DAY),
        turn(3, served_at=NOON + 20 * DAY),
        interaction("new", session_id="s9", served_at=NOON + 20 * DAY),
        feedback("f0", interaction_id="old", given_at=NOON - 10 * DAY),
        feedback("f1", session_id="s1", given_at=NOON + 21 * DAY),
    ]


def test_a_window_keeps_the_turns_its_prompts_are_built_from(tmp_path: Path) -> None:
    store = ingested_daily(tmp_path, long_session())
    scope = Scope(since=NOON + 15 * DAY)

    prompt = "SELECT interaction_id, full_prompt_token_ids FROM prompts ORDER BY 1"
    assert rows(store, prompt, scope) == [("i3", [1, 2, 3, 7, 8, 2, 7, 8, 3]), ("new", [1, 2, 3])]
    segments = "SELECT segment_id, num_sampled FROM segments ORDER BY 1"
    assert rows(store, segments, scope) == [("i1:0", 6), ("new:0", 2)]


def test_days_that_a_window_does_not_need_are_not_read(tmp_path: Path) -> None:
    store = ingested_daily(tmp_path, long_session())

    ids = "SELECT interaction_id FROM interactions ORDER BY 1"
    assert rows(store, ids, Scope(since=NOON + 15 * DAY)) == [
        ("i1",), ("i2",), ("i3",), ("new",)
    ]  # fmt: skip
    assert rows(store, ids, Scope(interaction_ids=["new"])) == [("i3",), ("new",)]
    feedback_ids = "SELECT feedback_id FROM feedback"
    assert rows(store, feedback_ids, Scope(since=NOON)) == [("f1",)]


def test_an_empty_scope_has_no_rows(tmp_path: Path) -> None:
    store = ingested_daily(tmp_path, long_session())

    for scope in (Scope(since=NOON + 99 * DAY), Scope(policy="other"), Scope(interaction_ids=[])):
        for view in ("interactions", "feedback", "rewards", "prompts", "segments", "sessions"):
            assert rows(store, f"FROM {view}", scope) == []


def test_tables_that_were_never_created_have_an_empty_scope(tmp_path: Path) -> None:
    assert rows(DeltaStore(str(tmp_path)), "FROM segments", Scope(since=NOON)) == []


@pytest.mark.parametrize(
    ("scope", "found"),
    [
        (Scope(until=NOON), {"old"}),
        (Scope(policy="other"), {"theirs"}),
        (Scope(interaction_ids=["i2", "nobody's"]), {"i2"}),
        (Scope(since=NOON, until=NOON + 11 * DAY, policy="assistant"), {"i1", "i2"}),
        (Scope(), {"old", "i1", "i2", "i3", "new", "theirs"}),
    ],
)
def test_a_scope_names_interactions_by_time_policy_and_id(
    tmp_path: Path, scope: Scope, found: set[str]
) -> None:
    theirs = interaction("theirs", policy="other", session_id="s7", served_at=NOON + 99 * DAY)
    store = ingested_daily(tmp_path, [*long_session(), theirs])

    assert {row[0] for row in rows(store, "SELECT interaction_id FROM prompts", scope)} == found


def test_a_sibling_outside_the_window_still_decides_which_turn_continues_a_segment(
    tmp_path: Path,
) -> None:
    events: list[Event] = [
        turn(1, served_at=NOON),
        turn(2, served_at=NOON + DAY),
        turn(2, interaction_id="j2", prompt_token_ids=[5], served_at=NOON + 9 * DAY),
    ]
    store = ingested_daily(tmp_path, events)

    segments = "SELECT segment_id, loss_mask FROM segments"
    assert rows(store, segments, Scope(since=NOON + 8 * DAY)) == [
        ("j2:0", [0, 0, 0, 0, 0, 0, 1, 1])
    ]


def test_a_reward_in_scope_is_discounted_over_the_whole_session(tmp_path: Path) -> None:
    store = ingested_daily(tmp_path, long_session())

    reward = "SELECT interaction_id, reward FROM rewards ORDER BY 1"
    assert rows(store, reward, Scope(interaction_ids=["i2"])) == [
        ("i1", 0.25), ("i2", 0.5), ("i3", 1.0)
    ]  # fmt: skip


def test_a_user_is_capped_in_scope_over_the_whole_window_of_the_cap(tmp_path: Path) -> None:
    """Weeks from the first of January on: eve gave 4 of 5 in this one, 1 of 2 in scope."""
    config = RewardsConfig(
        metrics=CONFIG.metrics, user_cap=0.5, suspicion=SuspicionConfig(window_s=7 * 86400.0)
    )
    later = NOON + 4 * DAY
    events: list[Event] = [
        interaction("old"),
        interaction("new", session_id="s2", served_at=later),
        *(feedback(f"f{n}", interaction_id="old", user="eve") for n in (1, 2, 3)),
        feedback("f4", interaction_id="new", user="eve", value=0.0, given_at=later),
        feedback("f5", interaction_id="new", user="bob", value=1.0, given_at=later),
    ]
    store = ingested_daily(tmp_path, events)

    # each of eve's counts 0.5 * 5 / 4 = 0.625
    reward = "SELECT reward, weight FROM rewards WHERE interaction_id = 'new'"
    for scope in (None, Scope(since=later), Scope(interaction_ids=["new"])):
        assert rows(store, reward, scope, config=config) == [
            (pytest.approx(1 / 1.625), pytest.approx(1.625 / 2))
        ]


def columns(view: str) -> str:
    return {
        "prompts": "interaction_id, full_prompt_token_ids",
        "segments": "segment_id, token_ids, loss_mask, spans",
        "rewards": "interaction_id, choice_index, reward, weight",
    }[view]


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    events=conversations(),
    first=st.integers(0, 7),
    length=st.integers(1, 7),
    hours=st.sampled_from([1, 30]),
)
def test_rows_in_scope_are_the_same_as_without_a_scope(
    tmp_path_factory: pytest.TempPathFactory,
    events: list[InteractionEvent],
    first: int,
    length: int,
    hours: int,
) -> None:
    def moved(at: datetime) -> datetime:
        return NOON + (at - NOON) * 60 * hours

    served = [e.model_copy(update={"served_at": moved(e.served_at)}) for e in events]
    signals = [feedback("f1", session_id="s1", given_at=moved(after(9)))]
    signals += [
        feedback(f"g{e.interaction_id}", interaction_id=e.interaction_id, given_at=e.served_at)
        for e in served
    ]
    store = ingested_daily(tmp_path_factory.mktemp("tables"), [*served, *signals])
    scope = Scope(since=moved(after(first)), until=moved(after(first + length)))
    named = {e.interaction_id for e in served[first : first + length]}

    for view in ("prompts", "rewards"):
        whole = rows(store, f"SELECT {columns(view)} FROM {view} ORDER BY 1, 2", None)
        part = rows(store, f"SELECT {columns(view)} FROM {view} ORDER BY 1, 2", scope)
        assert [r for r in part if r[0] in named] == [r for r in whole if r[0] in named]
    sql = f"SELECT {columns('segments')} FROM segments ORDER BY segment_id"
    wanted = [
        row
        for row in rows(store, sql, None)
        if any(span["interaction_id"] in named for span in row[3])  # type: ignore[attr-defined]
    ]
    assert rows(store, sql, scope) == wanted
