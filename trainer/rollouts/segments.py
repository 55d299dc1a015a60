"""From segments of the rollout store to training sequences.

A segment may hold completions that are not in the window (unlabelled, already trained, without
consent): their tokens stay as context and are masked. Tokens after the last completion of the
window are cut off.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onlinerl.errors import TrainingError
from onlinerl.trainer.rollouts.advantages import Advantages
from onlinerl.trainer.rollouts.data import NO_ROW, Datum, LossInputs
from onlinerl.trainer.rollouts.rows import RowKey, WindowRow


@dataclass(frozen=True, kw_only=True)
class Span:
    """The tokens `start` to `end` (exclusive) of a segment, which are one completion."""

    interaction_id: str
    choice_index: int
    start: int
    end: int

    @property
    def key(self) -> RowKey:
        """Identity of the completion."""
        return (self.interaction_id, self.choice_index)


@dataclass(frozen=True, eq=False, kw_only=True)
class Segment:
    """A row of the view `segments`; its arrays have one length, in tokens."""

    segment_id: str
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """nan where the token was not sampled or is masked."""
    loss_mask: NDArray[np.int8]
    """1 where the token was sampled and is not masked."""
    spans: Sequence[Span]


def build_data(
    segments: Iterable[Segment], *, rows: Sequence[WindowRow], advantages: Advantages
) -> list[Datum]:
    """One datum per segment that holds a row of the window.

    Raises:
        TrainingError: a row of the window is in no segment or in two, so that a token would be
            skipped or trained twice; or a logged logprob is missing or not finite.
    """
    wanted = {row.key: row for row in rows}
    data: list[Datum] = []
    keys: list[RowKey] = []
    for segment in segments:
        spans = [span for span in segment.spans if span.key in wanted]
        if spans:
            data.append(_datum(segment, spans=spans, rows=wanted, advantages=advantages))
            keys += [span.key for span in spans]
    _check_each_once(keys, wanted=wanted)
    return sorted(data, key=lambda datum: datum.segment_id)


def _datum(
    segment: Segment,
    *,
    spans: Sequence[Span],
    rows: Mapping[RowKey, WindowRow],
    advantages: Advantages,
) -> Datum:
    length = max(span.end for span in spans)
    tokens = segment.token_ids[:length].astype(np.int64)
    mask = np.zeros(length, dtype=np.bool_)
    logprobs, values, weights = (np.zeros(length, dtype=np.float32) for _ in range(3))
    temperatures = np.ones(length, dtype=np.float32)
    row_of = np.full(length, NO_ROW, dtype=np.int32)
    for number, span in enumerate(spans):
        place, row = slice(span.start, span.end), rows[span.key]
        kept = segment.loss_mask[place].astype(np.bool_)  # false where scrubbing masked it
        logprobs[place] = _behavior(segment, span=span, kept=kept)
        mask[place] = kept
        values[place] = advantages.values[row.key]
        weights[place] = advantages.weights[row.key]
        temperatures[place] = row.temperature
        row_of[place] = number
    return Datum(
        segment_id=segment.segment_id,
        row_keys=tuple(span.key for span in spans),
        model_input=tokens[:-1],
        loss_fn_inputs=LossInputs(
            target_tokens=tokens[1:],
            mask=mask[1:],
            logprobs=logprobs[1:],
            advantages=values[1:],
            weights=weights[1:],
            temperatures=temperatures[1:],
            rows=row_of[1:],
        ),
    )


def _behavior(segment: Segment, *, span: Span, kept: NDArray[np.bool_]) -> NDArray[np.float32]:
    """The logged logprobs of a completion, 0 where it is not learned from.

    Raises:
        TrainingError: one is missing of a token that is learned from: a ratio needs it.
    """
    values = segment.logprobs[span.start : span.end]
    is_whole = len(values) == span.end - span.start == len(kept)
    if span.start < 1 or not is_whole or not np.isfinite(values[kept]).all():
        raise TrainingError(
            f"interaction {span.interaction_id} choice {span.choice_index} has no behaviour "
            f"logprob for some of its tokens {span.start}..{span.end} in segment "
            f"{segment.segment_id}: it cannot be corrected for the policy's age"
        )
    return np.where(kept, values, np.float32(0))


def _check_each_once(keys: Sequence[RowKey], *, wanted: Mapping[RowKey, WindowRow]) -> None:
    missing = set(wanted) - set(keys)
    if missing:
        raise TrainingError(f"{len(missing)} rows are in no segment, e.g. {min(missing)}")
    if len(keys) != len(wanted):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise TrainingError(f"{len(twice)} rows are in more than one segment, e.g. {twice[0]}")
