"""Segments from the files are those of the view, token for token."""

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onlinerl.errors import TrainingError
from onlinerl.rollout_store.schema import InteractionRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table
from onlinerl.rollout_store.views.connection import connect
from onlinerl.trainer.rollouts.advantages import Advantages
from onlinerl.trainer.rollouts.data import Datum
from onlinerl.trainer.rollouts.rows import RowKey
from onlinerl.trainer.rollouts.segment_reader import Layout, Piece, read_segments
from onlinerl.trainer.rollouts.segments import Segment, Span, build_data
from onlinerl.trainer.rollouts.source import DeltaSource
from tests.trainer.builders import REWARDS, START, interaction, make_store, row

AS_BEFORE = "bbf21991c466947da97d121c45a8df184eeec8361b5d6adc81566669fcb10c66"
"""sha256 of `conversation`'s training data."""


def conversation() -> list[InteractionRow]:
    """Prompt 1 2 3, answer 10 11; user 7, answer 12 13 14 of which 13 is masked; user 8, answer 15.

    The first answer was the second of two, and a week older than the rest.
    """
    turn = {"session_id": "chat", "parent_choice": 0}
    old = START - timedelta(days=7)
    return [
        interaction(0, session_id="chat", served_at=old, completion_token_ids=[20, 21]),
        interaction(0, session_id="chat", served_at=old, choice_index=1, offset=50),
        interaction(
            1,
            **turn | {"parent_choice": 1},
            parent_id="i0000",
            prefix_length=5,
            prompt_token_ids=[7],
            completion_token_ids=[12, 13, 14],
            logprobs=[-0.1, -0.2, -0.3],
            mask_spans=[{"start": 1, "end": 2}],
            prompt_mask_spans=[{"start": 0, "end": 1}],
        ),
        interaction(
            2,
            **turn,
            parent_id="i0001",
            prefix_length=9,
            prompt_token_ids=[8],
            completion_token_ids=[15],
            logprobs=[-0.5],
        ),
    ]


def other_trees() -> list[InteractionRow]:
    """A branch, an edited history, a history without consent, another tenant's, a shadow."""
    return [
        interaction(
            3,
            session_id="chat",
            parent_id="i0001",
            prefix_length=9,
            prompt_token_ids=[9, 9],
            completion_token_ids=[16, 17],
        ),
        interaction(4, parent_id="i0001", prefix_length=4, prompt_token_ids=[5]),
        interaction(5, consent="log"),
        interaction(6, parent_id="i0005", prefix_length=5, prompt_token_ids=[5]),
        interaction(0, tenant="other", completion_token_ids=[30, 31], offset=60),
        interaction(7, trainable=False, untrainable_reason="short logprobs"),
        interaction(8, arm="shadow"),
    ]


@pytest.fixture
def store(tmp_path: Path) -> DeltaStore:
    """Several files; one event is stored twice."""
    rows = [*conversation(), *other_trees()]
    store = make_store(tmp_path / "store", interactions=rows[:3])
    store.append("interactions", to_table(rows[3:]))
    store.append("interactions", to_table([rows[2].model_copy(update={"offset": 99})]))
    return store


def segments_of_the_view(store: DeltaStore, keys: Sequence[RowKey]) -> list[dict[str, Any]]:
    """As they were read before: every number a Python object."""
    with connect(store, rewards=REWARDS) as connection:
        rows = connection.sql(
            "SELECT segment_id, tenant, token_ids, logprobs, loss_mask, spans FROM segments"
        ).to_arrow_table()
    return [
        found
        for found in rows.to_pylist()
        if {(span["interaction_id"], span["choice_index"]) for span in found["spans"]} & {*keys}
    ]


def as_row(segment: Segment) -> dict[str, Any]:
    logged = zip(segment.logprobs.tolist(), np.isnan(segment.logprobs), strict=True)
    return {
        "segment_id": segment.segment_id,
        "token_ids": segment.token_ids.tolist(),
        "logprobs": [None if is_absent else value for value, is_absent in logged],
        "loss_mask": segment.loss_mask.tolist(),
        "spans": [vars(span) for span in segment.spans],
    }


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the tenant, whose segments may have the same id."""
    plain = [{name: value for name, value in each.items() if name != "tenant"} for each in rows]
    return sorted(plain, key=lambda found: (found["segment_id"], found["token_ids"]))


@pytest.mark.parametrize(
    "keys",
    [
        [("i0002", 0)],
        [("i0001", 0), ("i0004", 0)],
        [("i0000", 0), ("i0000", 1), ("i0003", 0)],
        [(f"i{number:04d}", choice) for number in range(9) for choice in (0, 1)],
        [],
    ],
)
def test_segments_are_those_of_the_view(store: DeltaStore, keys: list[RowKey]) -> None:
    source = DeltaSource(store, rewards=REWARDS)

    found = [as_row(segment) for segment in source.segments(keys, at=source.versions())]

    assert in_order(found) == in_order(segments_of_the_view(store, keys))
    assert bool(found) == bool(keys)


def test_a_segment_of_both_a_mask_and_older_turns_is_as_written_here(store: DeltaStore) -> None:
    source = DeltaSource(store, rewards=REWARDS)

    (found,) = source.segments([("i0002", 0)], at=source.versions())

    assert found.segment_id == "i0000:1"
    assert found.token_ids.tolist() == [1, 2, 3, 10, 11, 7, 12, 13, 14, 8, 15]
    assert found.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 1, 0, 1]
    logged = [-1.0, -1.5, np.float32(-0.1), np.float32(-0.3), -0.5]
    assert found.logprobs[found.loss_mask == 1].tolist() == logged
    assert np.isnan(found.logprobs[found.loss_mask == 0]).all()
    assert found.spans == [
        Span(interaction_id="i0000", choice_index=1, start=3, end=5),
        Span(interaction_id="i0001", choice_index=0, start=6, end=9),
        Span(interaction_id="i0002", choice_index=0, start=10, end=11),
    ]


def test_a_row_that_was_served_after_its_ingestion_is_found(tmp_path: Path) -> None:
    late = interaction(0, served_at=START + timedelta(days=30))
    store = make_store(tmp_path / "store", interactions=[late, interaction(1)])
    source = DeltaSource(store, rewards=REWARDS)

    (found,) = source.segments([("i0000", 0)], at=source.versions())

    assert found.token_ids.tolist() == [1, 2, 3, 10, 11]


def digest(data: Sequence[Datum]) -> str:
    """A hash of every byte that a backend is given."""
    found = hashlib.sha256()
    for datum in data:
        found.update(f"{datum.segment_id} {datum.row_keys}".encode())
        found.update(datum.model_input.tobytes())
        for values in vars(datum.loss_fn_inputs).values():
            found.update(f"{values.dtype}".encode() + values.tobytes())
    return found.hexdigest()


def test_training_data_is_bit_for_bit_what_lists_of_numbers_gave(store: DeltaStore) -> None:
    source = DeltaSource(store, rewards=REWARDS)
    rows = [
        row(0, choice_index=1, reward=1.0),
        row(1, reward=-0.25, num_sampled=2),
        row(2, reward=0.5, num_sampled=1, temperature=1.0),
    ]
    advantages = Advantages(
        values={each.key: each.reward for each in rows},
        weights={each.key: 1 / 3 for each in rows},
        baselines={},
    )

    segments = source.segments([each.key for each in rows], at=source.versions())
    data = build_data(segments, rows=rows, advantages=advantages)

    (datum,) = data
    inputs = datum.loss_fn_inputs
    assert datum.model_input.tolist() == [1, 2, 3, 10, 11, 7, 12, 13, 14, 8]
    assert inputs.target_tokens.tolist() == [2, 3, 10, 11, 7, 12, 13, 14, 8, 15]
    assert inputs.mask.tolist() == [bool(bit) for bit in (0, 0, 1, 1, 0, 1, 0, 1, 0, 1)]
    assert inputs.logprobs[inputs.mask].tolist() == [
        np.float32(value) for value in (-1, -1.5, -0.1, -0.3, -0.5)
    ]
    assert inputs.advantages[inputs.mask].tolist() == [1.0, 1.0, -0.25, -0.25, 0.5]
    assert digest(data) == AS_BEFORE


def test_a_completion_that_is_not_in_the_table_is_an_error(store: DeltaStore) -> None:
    piece = Piece(interaction_id="gone", choice_index=0, is_prompt=True, start=0, length=2)
    layout = Layout(segment_id="gone:0", tenant="acme", pieces=[piece], spans=[])

    with pytest.raises(TrainingError, match=r"1 completions of the window are gone: .*'gone'"):
        list(read_segments(store, [layout], since=START, at=store.versions()))
