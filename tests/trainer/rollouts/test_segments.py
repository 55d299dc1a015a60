"""From segments to training sequences."""

import numpy as np
import pytest

from onlinerl.errors import TrainingError
from onlinerl.trainer.rollouts.segments import Segment, Span, build_data
from tests.trainer.builders import advantages_of, row, segment


def conversation(**changes: object) -> Segment:
    """Prompt 1 2, answer 3 4, user 5, answer 6, user 7, answer 8."""
    values: dict[str, object] = {
        "logprobs": [None, None, -0.1, -0.2, None, -0.3, None, -0.4],
        "loss_mask": [0, 0, 1, 1, 0, 1, 0, 1],
    }
    values |= changes
    return Segment(
        segment_id="i0000:0",
        token_ids=np.arange(1, 9, dtype=np.int32),
        # numpy reads None as nan.
        logprobs=np.array(values["logprobs"], dtype=np.float32),
        loss_mask=np.array(values["loss_mask"], dtype=np.int8),
        spans=[
            Span(interaction_id=f"i{n:04d}", choice_index=0, start=start, end=end)
            for n, (start, end) in enumerate([(2, 4), (5, 6), (7, 8)])
        ],
    )


def test_a_target_stands_one_place_after_the_token_that_predicts_it() -> None:
    rows = [row(0, reward=0.5, num_sampled=2)]
    (found,) = build_data([segment(rows[0])], rows=rows, advantages=advantages_of(rows))
    inputs = found.loss_fn_inputs

    assert found.model_input.tolist() == [5, 6, 10]
    assert inputs.target_tokens.tolist() == [6, 10, 11]
    assert inputs.mask.tolist() == [False, True, True]
    assert inputs.logprobs.tolist() == [0.0, -1.0, -1.0]
    assert inputs.advantages.tolist() == [0.0, 0.5, 0.5]
    assert inputs.temperatures[1:].tolist() == pytest.approx([0.7, 0.7])
    assert inputs.rows.tolist() == [-1, 0, 0]
    assert found.row_keys == (("i0000", 0),)


def test_a_turn_that_is_not_in_the_window_is_context_and_the_rest_is_cut_off() -> None:
    rows = [row(1, reward=1.0, num_sampled=1)]
    (found,) = build_data([conversation()], rows=rows, advantages=advantages_of(rows))

    assert found.model_input.tolist() == [1, 2, 3, 4, 5]
    assert found.loss_fn_inputs.target_tokens[found.loss_fn_inputs.mask].tolist() == [6]


def test_turns_of_one_conversation_keep_their_own_reward_and_number() -> None:
    rows = [row(0, reward=1.0), row(2, reward=-1.0, num_sampled=1, temperature=1.0)]
    (found,) = build_data([conversation()], rows=rows, advantages=advantages_of(rows))
    inputs = found.loss_fn_inputs

    assert inputs.target_tokens[inputs.mask].tolist() == [3, 4, 8]
    assert inputs.advantages[inputs.mask].tolist() == [1.0, 1.0, -1.0]
    assert inputs.rows[inputs.mask].tolist() == [0, 0, 1]
    assert inputs.temperatures[inputs.mask].tolist() == pytest.approx([0.7, 0.7, 1.0])


def test_a_masked_token_is_context_and_needs_no_logprob() -> None:
    rows = [row(0, reward=1.0)]
    masked = conversation(
        logprobs=[None, None, -0.1, None, None, -0.3, None, -0.4],
        loss_mask=[0, 0, 1, 0, 0, 1, 0, 1],
    )
    (found,) = build_data([masked], rows=rows, advantages=advantages_of(rows))
    inputs = found.loss_fn_inputs

    assert found.model_input.tolist() == [1, 2, 3]
    assert inputs.target_tokens[inputs.mask].tolist() == [3]
    assert inputs.logprobs[inputs.mask].tolist() == pytest.approx([-0.1])
    assert np.isfinite(inputs.logprobs).all()


def test_a_token_that_is_not_masked_needs_its_logprob() -> None:
    rows = [row(0)]
    broken = conversation(
        logprobs=[None, None, -0.1, None, None, -0.3, None, -0.4],
        loss_mask=[0, 0, 1, 1, 0, 1, 0, 1],
    )

    with pytest.raises(TrainingError, match="has no behaviour logprob"):
        build_data([broken], rows=rows, advantages=advantages_of(rows))


def test_a_segment_without_a_row_of_the_window_is_left_out() -> None:
    rows = [row(0)]
    others = [segment(row(5)), segment(rows[0])]

    (found,) = build_data(others, rows=rows, advantages=advantages_of(rows))

    assert found.segment_id == "i0000:0"


@pytest.mark.parametrize("logged", [None, float("nan"), float("-inf")])
def test_a_row_without_a_behaviour_logprob_is_an_error(logged: float | None) -> None:
    rows = [row(0)]
    broken = conversation(logprobs=[None, None, -0.1, logged, None, -0.3, None, -0.4])

    with pytest.raises(TrainingError, match="no behaviour logprob"):
        build_data([broken], rows=rows, advantages=advantages_of(rows))


def test_a_row_in_no_segment_or_in_two_is_an_error() -> None:
    rows = [row(0)]

    with pytest.raises(TrainingError, match="in no segment"):
        build_data([], rows=rows, advantages=advantages_of(rows))
    with pytest.raises(TrainingError, match="more than one segment"):
        build_data([segment(rows[0])] * 2, rows=rows, advantages=advantages_of(rows))


def test_the_order_of_segments_does_not_matter() -> None:
    rows = [row(n) for n in range(4)]
    segments = [segment(item) for item in rows]

    one = build_data(segments, rows=rows, advantages=advantages_of(rows))
    other = build_data(segments[::-1], rows=rows, advantages=advantages_of(rows))

    assert [item.segment_id for item in one] == [item.segment_id for item in other]
    assert all(
        np.array_equal(a.model_input, b.model_input) for a, b in zip(one, other, strict=True)
    )
