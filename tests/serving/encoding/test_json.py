import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.serving.encoding.json import (
    MAX_DEPTH,
    read_json_text,
    sorted_json,
    to_json,
    unescaped_json,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    # No halves of surrogate pairs: those are refused.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab\u2028😀"), inner),
    max_leaves=20,
)  # fmt: skip


@given(value=JSON, ascii_only=st.booleans())
def test_json_is_read(value: object, ascii_only: bool) -> None:
    assert read_json_text(json.dumps(value, ensure_ascii=ascii_only)) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("NaN", "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1e999}', "a number is too large"),
        (r'{"a": "\ud800"}', "surrogates not allowed"),
        (r'{"\udc00": 1}', "surrogates not allowed"),
        ('"\ud800"', "surrogates not allowed"),
        ("", "Expecting value"),
        ("{} {}", "Extra data"),
    ],
)
def test_json_that_other_readers_refuse_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_json_text(text)


def test_pairs_of_surrogates_are_characters() -> None:
    assert read_json_text(r'"\ud83d\ude00"') == "😀"
    assert read_json_text(r'"\\ud800"') == r"\ud800"


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_bounded(opening: str, closing: str) -> None:
    def nested(depth: int) -> str:
        return f"{opening * depth}1{closing * depth}"

    assert read_json_text(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 900, 100_000):
        with pytest.raises(ValueError, match="nested deeper than 128 levels"):
            read_json_text(nested(depth))


def test_many_shallow_objects_are_not_deep() -> None:
    assert len(read_json_text("[" + "{}," * 1000 + "{}]")) == 1001  # type: ignore[arg-type]


@given(value=JSON)
def test_every_way_to_write_json_gives_the_value_back(value: object) -> None:
    for text in (to_json(value).decode("ascii"), sorted_json(value), unescaped_json(value)):
        assert read_json_text(text) == value


def test_sorted_json_does_not_depend_on_the_order_of_keys() -> None:
    assert sorted_json({"b": {"d": 1, "c": 2}, "a": 3}) == '{"a":3,"b":{"c":2,"d":1}}'


def test_numbers_that_are_not_finite_are_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"logprob": float("nan")})
