"""Segments with their tokens, put together outside the query engine.

The views say which pieces a segment is made of: ids and lengths. The tokens come from the files in
Arrow batches and are copied once, into the arrays of the segments; no number becomes a Python
object. A window of millions of tokens so costs about nine bytes per token until it is training
data.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from onlinerl.errors import TrainingError
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.views.scope import Scope
from onlinerl.rollout_store.views.window import read_window
from onlinerl.trainer.rollouts.segments import Segment, Span

BATCH_ROWS = 1_000
"""Completions in memory at a time, besides the segments."""

_ID = ("tenant", "interaction_id", "choice_index")
_TOKENS = ("prompt_token_ids", "completion_token_ids", "logprobs")

_RowId = tuple[str, str, int]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens of one completion, or the new tokens of its prompt, within a segment."""

    interaction_id: str
    choice_index: int
    is_prompt: bool
    start: int
    """Position of the first token in the segment."""
    length: int
    """Tokens that are taken, from the first one on."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a segment is made of, in order: its pieces, and which of them were sampled."""

    segment_id: str
    tenant: str
    pieces: Sequence[Piece]
    spans: Sequence[Span]


@dataclass(eq=False)
class _Draft:
    """A segment whose arrays are being filled."""

    layout: Layout
    token_ids: NDArray[np.int32] = field(init=False)
    logprobs: NDArray[np.float32] = field(init=False)
    loss_mask: NDArray[np.int8] = field(init=False)

    def __post_init__(self) -> None:
        length = max(piece.start + piece.length for piece in self.layout.pieces)
        self.token_ids = np.zeros(length, dtype=np.int32)
        self.logprobs = np.full(length, np.nan, dtype=np.float32)
        self.loss_mask = np.zeros(length, dtype=np.int8)

    def segment(self) -> Segment:
        return Segment(
            segment_id=self.layout.segment_id,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            loss_mask=self.loss_mask,
            spans=self.layout.spans,
        )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a piece belongs."""

    draft: _Draft
    piece: Piece
    is_sampled: bool

    def fill(self, row: "_Row") -> None:
        piece, draft = self.piece, self.draft
        place = slice(piece.start, piece.start + piece.length)
        draft.token_ids[place] = (row.prompt if piece.is_prompt else row.completion)[: piece.length]
        if self.is_sampled:
            logged = row.logprobs[: piece.length]
            draft.logprobs[piece.start : piece.start + len(logged)] = logged
            draft.loss_mask[place] = 1
            for masked in row.masked:
                hidden = slice(piece.start + masked["start"], piece.start + masked["end"])
                draft.logprobs[hidden], draft.loss_mask[hidden] = np.nan, 0


@dataclass(frozen=True, eq=False, kw_only=True)
class _Row:
    """A stored completion. The arrays are parts of a batch."""

    prompt: NDArray[np.int32]
    completion: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    masked: Sequence[Mapping[str, int]]
    """Spans of the completion that scrubbing masked."""


def read_segments(
    store: DeltaStore, layouts: Sequence[Layout], *, since: datetime, at: Mapping[str, int]
) -> Iterator[Segment]:
    """The segments of `layouts`, in their order. Their memory is given up as they are consumed.

    Args:
        store: Where the tables lie.
        layouts: What each segment is made of.
        since: No piece was served or ingested before.
        at: Table versions that the layouts were found at.

    Raises:
        TrainingError: a completion that a layout names is not in the table.
        ServiceUnavailable: the storage does not answer.
    """
    drafts = deque(_Draft(layout) for layout in layouts)
    places = _places(drafts)
    scope = Scope(interaction_ids={interaction_id for _, interaction_id, _ in places}, since=since)
    columns = (*_ID, *_TOKENS, "mask_spans")
    for batch in read_window(store, scope, columns=columns, versions=at, batch_rows=BATCH_ROWS):
        for row_id, row in _rows(batch, wanted=places):
            for place in places.pop(row_id):
                place.fill(row)
    if places:
        raise TrainingError(f"{len(places)} completions of the window are gone: {min(places)}")
    while drafts:
        yield drafts.popleft().segment()


def _places(drafts: Sequence[_Draft] | deque[_Draft]) -> dict[_RowId, list[_Place]]:
    """Where the tokens of each stored completion belong."""
    places: dict[_RowId, list[_Place]] = {}
    for draft in drafts:
        sampled = {span.key for span in draft.layout.spans}
        for piece in draft.layout.pieces:
            key = (piece.interaction_id, piece.choice_index)
            is_sampled = key in sampled and not piece.is_prompt
            place = _Place(draft=draft, piece=piece, is_sampled=is_sampled)
            places.setdefault((draft.layout.tenant, *key), []).append(place)
    return places


def _rows(
    batch: pa.RecordBatch, *, wanted: Mapping[_RowId, object]
) -> Iterator[tuple[_RowId, _Row]]:
    ids = zip(*(batch[name].to_pylist() for name in _ID), strict=True)
    columns = [_list_arrays(batch[name]) for name in _TOKENS]
    masks = batch["mask_spans"]
    for number, row_id in enumerate(ids):
        if row_id in wanted:
            prompt, completion, logprobs = (
                values[offsets[number] : offsets[number + 1]] for offsets, values in columns
            )
            masked = masks[number].as_py() or ()
            yield (
                row_id,
                _Row(prompt=prompt, completion=completion, logprobs=logprobs, masked=masked),
            )


def _list_arrays(column: pa.ListArray) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Offsets and values of a column of lists; a null among values that are float is nan."""
    return column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False)
