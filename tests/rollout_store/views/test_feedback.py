from pathlib import Path

from onlinerl.rollout_store.config import MetricConfig, RewardsConfig
from onlinerl.rollout_store.schema import TokenSpan
from onlinerl.rollout_store.views.feedback import OUTCOMES
from tests.events import after, completion, feedback, interaction
from tests.rollout_store.views_of import Event, views_of

CONFIG = RewardsConfig(
    metrics=(MetricConfig(name="accepted", type="bool"),),
    sources={"judge": 0.0},
    attribution_window_s=60.0,
)


def test_every_feedback_has_one_outcome_and_each_outcome_can_happen(tmp_path: Path) -> None:
    events: list[Event] = [
        interaction("i1"),
        interaction("i2", served_at=after(30)),
        feedback("counts"),
        feedback("counts2", value=0.0, given_at=after(1)),
        feedback("retracted"),
        feedback("retraction", value=None, retracts="retracted"),
        feedback("other_metric", metric="speed"),
        feedback("invalid_value", value=0.5),
        feedback("ignored_source", source="judge"),
        feedback("no_consent", consent="log"),
        feedback("no_target", interaction_id="i9"),
        feedback("no_target2", session_id="s1", given_at=after(-1)),
        feedback("too_late", given_at=after(1.5)),
        feedback("demonstration", value=None, demonstration="better"),
    ]
    connection = views_of(tmp_path, *events, rewards=CONFIG)

    rows = connection.execute("SELECT feedback_id, outcome FROM feedback_use").fetchall()
    assert all(name.rstrip("2") == outcome for name, outcome in rows)
    assert len(rows) == len(events) - 2
    assert {outcome for _, outcome in rows} == set(OUTCOMES)


def test_the_delay_is_counted_from_the_turn_before_the_feedback(tmp_path: Path) -> None:
    two = [completion(), completion(choice_index=1)]
    events: list[Event] = [
        interaction("i1", choices=two),
        interaction("i2", served_at=after(2), choices=two),
        interaction("i3", served_at=after(9)),
        feedback("f1", interaction_id="i1", given_at=after(0.5)),
        feedback("f2", session_id="s1", given_at=after(3)),
        feedback("f3", interaction_id="gone"),
    ]
    connection = views_of(tmp_path, *events, rewards=CONFIG)

    rows = connection.execute("SELECT feedback_id, delay_s FROM feedback_use ORDER BY 1")
    assert rows.fetchall() == [("f1", 30.0), ("f2", 60.0), ("f3", None)]


def test_a_demonstration_comes_with_the_whole_prompt_it_answers(tmp_path: Path) -> None:
    events: list[Event] = [
        interaction("i1"),
        interaction(
            "i2",
            parent_id="i1",
            prefix_length=5,
            prompt_token_ids=[4],
            served_at=after(1),
            prompt_mask_spans=[TokenSpan(start=0, end=1)],
        ),
        interaction("i3", consent="log", session_id="s3"),
        feedback("f1", value=None, demonstration="better"),
        feedback("f2", session_id="s1", value=None, demonstration="best", given_at=after(1)),
        feedback("f3", value=None, demonstration="taken back"),
        feedback("f4", value=None, retracts="f3"),
        feedback("f5", value=None, demonstration="private", consent="log"),
        feedback("f6", value=None, demonstration="not to be learned", interaction_id="i3"),
        feedback("f7", value=None, demonstration="of another", tenant="globex"),
    ]
    connection = views_of(tmp_path, *events, rewards=CONFIG)

    rows = connection.execute(
        "SELECT feedback_id, interaction_id, demonstration, full_prompt_token_ids, masked "
        "FROM demonstrations ORDER BY 1"
    )
    assert rows.fetchall() == [
        ("f1", "i1", "better", [1, 2, 3], [0, 0, 0]),
        ("f2", "i2", "best", [1, 2, 3, 7, 8, 4], [0, 0, 0, 0, 0, 1]),
    ]


def test_feedback_on_a_session_does_not_judge_shadow_answers(tmp_path: Path) -> None:
    shadow = {"arm": "shadow", "served_at": after(1)}
    events: list[Event] = [
        interaction("i1"),
        interaction("shadow", **shadow),
        interaction("alone", session_id="s2", **shadow),
        feedback("f1", session_id="s1", given_at=after(2)),
        feedback("f2", session_id="s2", given_at=after(1)),
        feedback("f3", session_id="s1", value=None, demonstration="best", given_at=after(2)),
    ]
    connection = views_of(tmp_path, *events, rewards=RewardsConfig(metrics=CONFIG.metrics))

    used = "SELECT feedback_id, outcome, delay_s FROM feedback_use WHERE value IS NOT NULL"
    assert connection.execute(f"{used} ORDER BY 1").fetchall() == [
        ("f1", "counts", 120.0),
        ("f2", "no_target", None),
    ]
    shown = connection.execute("SELECT feedback_id, interaction_id FROM demonstrations")
    assert shown.fetchall() == [("f3", "i1")]
