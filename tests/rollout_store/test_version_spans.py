from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from onlinerl.rollout_store.schema import VersionSpan
from onlinerl.rollout_store.version_spans import clip_spans, spans_tile


def spans(*edges: int) -> list[VersionSpan]:
    return [
        VersionSpan(version="assistant/1", start=start, end=end) for start, end in pairwise(edges)
    ]


def test_no_spans_tile_no_tokens() -> None:
    assert spans_tile([], num_tokens=0)
    assert not spans_tile(spans(0, 0), num_tokens=0)


def test_clipping_keeps_the_beginning() -> None:
    assert clip_spans(spans(0, 2, 5), num_tokens=4) == spans(0, 2, 4)
    assert clip_spans(spans(0, 2, 5), num_tokens=2) == spans(0, 2)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4), st.integers(0, 4))
def test_spans_tile_when_every_token_is_covered_once_and_in_order(
    bounds: list[tuple[int, int]], num_tokens: int
) -> None:
    parts = [VersionSpan(version="a/1", start=start, end=end) for start, end in bounds]
    covered = [place for start, end in bounds for place in range(start, end)]
    is_empty = any(start >= end for start, end in bounds)

    assert spans_tile(parts, num_tokens=num_tokens) == (
        covered == list(range(num_tokens)) and not is_empty
    )


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 16))
def test_clipped_spans_still_tile(lengths: list[int], num_tokens: int) -> None:
    edges = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    kept = min(num_tokens, edges[-1])

    assert spans_tile(clip_spans(spans(*edges), num_tokens=num_tokens), num_tokens=kept)
