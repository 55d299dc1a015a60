"""From segments of the rollout store to training sequences.

A segment may hold completions that this window does not learn from (unlabelled, trained before,
held back by consent): their tokens stay as context and are masked. Tokens after the last
completion that is learned from are cut off.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from onlinerl.errors import TrainingError
from onlinerl.trainer.rollouts.advantages import Advantages
from onlinerl.trainer.rollouts.data import NO_ROW, Datum, LossInputs
from onlinerl.trainer.rollouts.rows import RowKey, WindowRow


class Span(BaseModel):
    """Tokens `start` to `end` (exclusive) of a segment are one completion."""

    model_config = ConfigDict(frozen=True)

    interaction_id: str
    choice_index: int
    start: int
    end: int


class Segment(BaseModel):
    """A row of the view `segments`."""

    model_config = ConfigDict(frozen=True)

    segment_id: str
    token_ids: list[int]
    logprobs: list[float | None]
    """Null where the token was not sampled or is masked."""
    loss_mask: list[int] | None = None
    """0 where a token of a span is masked; absent when none is."""
    spans: list[Span]


def build_data(
    segments: Iterable[Segment], *, rows: Sequence[WindowRow], advantages: Advantages
) -> list[Datum]:
    """One datum per segment that holds a row of the window.

    Raises:
        TrainingError: when a row of the window is in no segment, or in two: a token would be
            skipped or trained twice. When a logged logprob is missing or not finite.
    """
    wanted = {row.key: row for row in rows}
    data: list[Datum] = []
    found: list[RowKey] = []
    for segment in segments:
        spans = [span for span in segment.spans if _key(span) in wanted]
        if spans:
            data.append(_datum(segment, spans=spans, rows=wanted, advantages=advantages))
            found += [_key(span) for span in spans]
    _check_each_once(found, wanted=wanted)
    return sorted(data, key=lambda datum: datum.segment_id)


def _datum(
    segment: Segment,
    *,
    spans: Sequence[Span],
    rows: Mapping[RowKey, WindowRow],
    advantages: Advantages,
) -> Datum:
    length = max(span.end for span in spans)
    tokens = np.asarray(segment.token_ids[:length], dtype=np.int64)
    mask = np.zeros(length, dtype=np.bool_)
    logprobs, values, weights = (np.zeros(length, dtype=np.float32) for _ in range(3))
    temperatures = np.ones(length, dtype=np.float32)
    row_of = np.full(length, NO_ROW, dtype=np.int32)
    for number, span in enumerate(spans):
        place, row = slice(span.start, span.end), rows[_key(span)]
        kept = _kept(segment, span=span)
        mask[place] = kept
        logprobs[place] = _behavior(segment, span=span, kept=kept)
        values[place] = advantages.values[row.key]
        weights[place] = advantages.weights[row.key]
        temperatures[place] = row.temperature
        row_of[place] = number
    return Datum(
        segment_id=segment.segment_id,
        row_keys=tuple(_key(span) for span in spans),
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


def _kept(segment: Segment, *, span: Span) -> NDArray[np.bool_]:
    """Which tokens of a completion are learned from: those that scrubbing did not mask."""
    if segment.loss_mask is None:
        return np.ones(span.end - span.start, dtype=np.bool_)
    return np.asarray(segment.loss_mask[span.start : span.end], dtype=np.bool_)


def _behavior(segment: Segment, *, span: Span, kept: NDArray[np.bool_]) -> NDArray[np.float32]:
    """The logged logprobs of a completion; a ratio needs one for every token that is kept."""
    logged = segment.logprobs[span.start : span.end]
    values = np.asarray([np.nan if value is None else value for value in logged], dtype=np.float32)
    whole = len(values) == span.end - span.start == len(kept)
    if span.start < 1 or not whole or not np.isfinite(values[kept]).all():
        raise TrainingError(
            f"interaction {span.interaction_id} choice {span.choice_index} has no behaviour "
            f"logprob for some of its tokens {span.start}..{span.end} in segment "
            f"{segment.segment_id}: it cannot be corrected for the policy's age"
        )
    return np.where(kept, values, np.float32(0))


def _check_each_once(found: Sequence[RowKey], *, wanted: Mapping[RowKey, WindowRow]) -> None:
    missing = set(wanted) - set(found)
    if missing:
        raise TrainingError(f"{len(missing)} rows are in no segment, e.g. {min(missing)}")
    if len(found) != len(wanted):
        twice = sorted({key for key in found if found.count(key) > 1})
        raise TrainingError(f"{len(twice)} rows are in more than one segment, e.g. {twice[0]}")


def _key(span: Span) -> RowKey:
    return (span.interaction_id, span.choice_index)
