"""The window query against real tables."""

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from onlinerl.rollout_store.holdout import is_heldout
from onlinerl.rollout_store.schema import Sampling, VersionSpan
from onlinerl.rollout_store.snapshots.named import create_snapshot, mark_snapshot, snapshots
from onlinerl.rollout_store.snapshots.pins import held_versions
from onlinerl.rollout_store.tables.rows import to_table
from onlinerl.trainer.rollouts.source import DeltaSource
from onlinerl.trainer.rollouts.window import Candidate, WindowQuery
from tests.trainer.builders import REWARDS, START, feedback, interaction, make_store, promotion


def query(**changes: object) -> WindowQuery:
    values: dict[str, object] = {
        "policy": "assistant",
        "versions": frozenset({1, 2}),
        "heldout_fraction": 0.0,
        "served_after": START - timedelta(days=1),
        "max_row_tokens": 100,
        "task_tag": "task",
    }
    return WindowQuery(**(values | changes))  # type: ignore[arg-type]


def only_exclusion(
    tmp_path: Path, *, labelled: bool = True, changes: Mapping[str, object] | None = None
) -> str | None:
    served = interaction(0, **(changes or {}))
    store = make_store(
        tmp_path / "store",
        interactions=[served],
        feedback_rows=[feedback(served, value=1.0)] if labelled else [],
    )
    source = DeltaSource(store, rewards=REWARDS)
    found = source.candidates(query(), trained=[], at=source.versions())
    (candidate,) = found
    return candidate.exclusion


def test_a_labelled_row_carries_what_the_cycle_needs(tmp_path: Path) -> None:
    served = interaction(tags={"task": "refund"}, policy_version=2)
    store = make_store(
        tmp_path / "store", interactions=[served], feedback_rows=[feedback(served, value=0.0)]
    )
    source = DeltaSource(store, rewards=REWARDS)

    (candidate,) = source.candidates(query(), trained=[], at=source.versions())

    assert candidate.row is not None
    assert candidate.row.reward == -1.0
    assert candidate.row.task == "refund"
    assert candidate.row.version == 2
    assert candidate.row.temperature == pytest.approx(0.7)
    assert candidate.row.num_sampled == 2
    assert candidate.row.served_at == START


def test_no_feedback_is_unlabelled_and_not_a_reward_of_zero(tmp_path: Path) -> None:
    assert only_exclusion(tmp_path, labelled=False) == "unlabelled"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"consent": "log"}, "no_consent"),
        ({"trainable": False, "untrainable_reason": "short logprobs"}, "untrainable"),
        ({"policy_version": 3}, "stale_version"),
        ({"sampling": Sampling(temperature=0.0)}, "greedy"),
        ({"logprob_mode": "raw"}, "raw_logprobs"),
        ({"sampling": Sampling(temperature=1.0, top_p=0.9)}, "truncated_sampling"),
        ({"sampling": Sampling(temperature=1.0, top_k=20)}, "truncated_sampling"),
        ({"prompt_token_ids": [4] * 99}, "too_long"),
        ({"parent_id": "gone", "prefix_length": 2}, "broken_history"),
    ],
)
def test_a_row_that_may_not_be_learned_from_is_named_with_its_reason(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    assert only_exclusion(tmp_path, changes=changes) == reason


def test_a_history_is_broken_by_a_parent_without_consent_and_not_by_another_answer(
    tmp_path: Path,
) -> None:
    answers = [interaction(0, choice_index=n, offset=n) for n in (0, 1)]
    private = interaction(1, consent="log")
    follow_up = {"prefix_length": 5, "prompt_token_ids": [7]}
    children = [
        interaction(2, parent_id="i0000", parent_choice=1, **follow_up),
        interaction(3, parent_id="i0001", **follow_up),
        interaction(4, parent_id="i0002", prefix_length=8, prompt_token_ids=[7]),
    ]
    served = [*answers, private, *children]
    store = make_store(
        tmp_path / "store",
        interactions=served,
        feedback_rows=[feedback(item, value=1.0) for item in served],
    )
    source = DeltaSource(store, rewards=REWARDS)

    found = source.candidates(query(), trained=[], at=source.versions())

    assert sorted(map(_outcome, found)) == [
        "broken_history",
        "i0000",
        "i0000",
        "i0002",
        "i0004",
        "no_consent",
    ]


def test_a_row_that_lived_through_a_swap_from_a_stale_version_is_stale(tmp_path: Path) -> None:
    spans = [
        VersionSpan(version="assistant/3", start=0, end=1),
        VersionSpan(version="assistant/2", start=1, end=2),
    ]

    changes = {"policy_version": 2, "version_spans": spans}
    assert only_exclusion(tmp_path, changes=changes) == "stale_version"


def test_shadow_traffic_and_other_policies_are_not_candidates(tmp_path: Path) -> None:
    others = [interaction(0, arm="shadow"), interaction(1, policy="other")]
    source = DeltaSource(make_store(tmp_path / "store", interactions=others), rewards=REWARDS)

    assert source.candidates(query(), trained=[], at=source.versions()) == []


def test_held_out_sessions_are_those_of_the_shared_hash(tmp_path: Path) -> None:
    served = [interaction(number) for number in range(60)]
    store = make_store(
        tmp_path / "store",
        interactions=served,
        feedback_rows=[feedback(item, value=1.0) for item in served],
    )
    source = DeltaSource(store, rewards=REWARDS)

    found = source.candidates(query(heldout_fraction=0.3), trained=[], at=source.versions())

    expected = sum(is_heldout(item.session_id, fraction=0.3) for item in served)
    assert 0 < expected < 60
    assert Counter(c.exclusion for c in found) == {"held_out": expected, None: 60 - expected}


def test_rows_of_an_earlier_cycle_are_already_trained(tmp_path: Path) -> None:
    served = [interaction(0), interaction(1)]
    store = make_store(
        tmp_path / "store",
        interactions=served,
        feedback_rows=[feedback(item, value=1.0) for item in served],
    )
    source = DeltaSource(store, rewards=REWARDS)

    found = source.candidates(query(), trained=[("i0000", 0)], at=source.versions())

    assert sorted(map(_outcome, found)) == ["already_trained", "i0001"]


def test_feedback_after_a_row_was_trained_does_not_train_it_again(tmp_path: Path) -> None:
    served = interaction(0)
    folder = tmp_path / "store"
    make_store(folder, interactions=[served], feedback_rows=[feedback(served, value=1.0)])
    later = feedback(served, value=0.0, feedback_id="late", given_at=START + timedelta(days=1))
    source = DeltaSource(make_store(folder, feedback_rows=[later]), rewards=REWARDS)

    found = source.candidates(query(), trained=[("i0000", 0)], at=source.versions())
    assert [_outcome(candidate) for candidate in found] == ["already_trained"]


def test_a_row_that_is_masked_whole_is_untrainable(tmp_path: Path) -> None:
    changes = {"mask_spans": [{"start": 0, "end": 2}]}

    assert only_exclusion(tmp_path, changes=changes) == "untrainable"


def test_masked_tokens_are_known_to_the_segment_and_the_row(tmp_path: Path) -> None:
    served = interaction(0, mask_spans=[{"start": 0, "end": 1}])
    store = make_store(
        tmp_path / "store", interactions=[served], feedback_rows=[feedback(served, value=1.0)]
    )
    source = DeltaSource(store, rewards=REWARDS)

    (candidate,) = source.candidates(query(), trained=[], at=source.versions())
    (segment,) = source.segments([("i0000", 0)], at=source.versions())
    assert candidate.row is not None
    assert candidate.row.num_sampled == 1
    assert segment.loss_mask.tolist() == [0, 0, 0, 0, 1]
    assert np.isnan(segment.logprobs[:4]).all()
    assert segment.logprobs[4] == -1.5


def test_a_window_can_be_read_again_at_its_table_versions(tmp_path: Path) -> None:
    served = interaction(0)
    store = make_store(tmp_path / "store", interactions=[served])
    source = DeltaSource(store, rewards=REWARDS)
    then = source.versions()
    make_store(tmp_path / "store", interactions=[interaction(1)])

    assert len(source.candidates(query(), trained=[], at=then)) == 1
    assert len(source.candidates(query(), trained=[], at=source.versions())) == 2


def test_a_conversation_is_one_segment_with_a_span_per_turn(tmp_path: Path) -> None:
    first = interaction(0)
    second = interaction(
        1,
        session_id=first.session_id,
        parent_id=first.interaction_id,
        prefix_length=5,
        prompt_token_ids=[7],
        completion_token_ids=[12],
        logprobs=[-0.5],
    )
    source = DeltaSource(
        make_store(tmp_path / "store", interactions=[first, second]), rewards=REWARDS
    )

    (found,) = source.segments([("i0001", 0)], at=source.versions())

    assert found.token_ids.tolist() == [1, 2, 3, 10, 11, 7, 12]
    expected = [np.nan, np.nan, np.nan, -1.0, -1.5, np.nan, -0.5]
    assert np.array_equal(found.logprobs, expected, equal_nan=True)
    assert [(span.interaction_id, span.start, span.end) for span in found.spans] == [
        ("i0000", 3, 5),
        ("i0001", 6, 7),
    ]


def test_versions_that_served_are_read_in_order_and_refusals_are_not(tmp_path: Path) -> None:
    rows = [
        promotion(2, minutes=2),
        promotion(1, action="bootstrap"),
        promotion(3, action="refuse", minutes=3),
        promotion(1, action="rollback", minutes=4),
    ]
    source = DeltaSource(make_store(tmp_path / "store", promotions=rows), rewards=REWARDS)

    assert source.served_versions("assistant", at=source.versions()) == [1, 2, 1]


def _outcome(candidate: Candidate) -> str:
    return candidate.exclusion or (candidate.row.interaction_id if candidate.row else "")


def test_what_a_cycle_holds_is_held_in_the_tables_and_released(tmp_path: Path) -> None:
    now = START
    store = make_store(tmp_path / "store", interactions=[interaction()])
    source = DeltaSource(store, rewards=REWARDS, hold_s=3600.0, now=lambda: now)
    at = source.versions()

    assert source.hold("c1", at=at) is None
    assert held_versions(store, at=START)["interactions"] == {at["interactions"]}
    assert held_versions(store, at=START + timedelta(hours=1)) == {}
    source.release("c1")
    assert held_versions(store, at=START) == {}


def test_a_hold_on_erased_rows_says_why(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", interactions=[interaction()])
    source = DeltaSource(store, rewards=REWARDS, now=lambda: START)
    source.hold("c1", at=source.versions())
    (held,) = snapshots(store)
    mark_snapshot(store, held, actor="me", reason="rows in it were erased by e1", at=START)

    assert source.hold("c1", at=source.versions()) == "rows in it were erased by e1"


def test_a_release_that_fails_does_not_fail_the_cycle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(tmp_path / "store", interactions=[interaction()])
    source = DeltaSource(store, rewards=REWARDS, now=lambda: START)
    source.hold("c1", at=source.versions())
    (tmp_path / "store" / "snapshots" / "_delta_log").rename(tmp_path / "gone")
    (tmp_path / "store" / "snapshots" / "_delta_log").mkdir()
    (tmp_path / "store" / "snapshots" / "_delta_log" / f"{0:020d}.json").write_text("{")

    source.release("c1")

    assert "could not release" in caplog.text


def test_a_window_can_be_chosen_from_a_snapshot(tmp_path: Path) -> None:
    served = interaction(0)
    store = make_store(
        tmp_path / "store", interactions=[served], feedback_rows=[feedback(served, value=1.0)]
    )
    held = create_snapshot(store, "june", actor="me", reason="", at=START)
    later = interaction(1)
    store.append("interactions", to_table([later]))
    store.append("feedback", to_table([feedback(later, value=1.0)]))
    source = DeltaSource(store, rewards=REWARDS, pinned=held.versions)

    assert source.versions() == held.versions
    assert len(source.candidates(query(), trained=[], at=source.versions())) == 1
