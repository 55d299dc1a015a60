import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.errors import RequestRefused
from onlinerl.serving.tokens.control_tokens import ControlTokens

TOKENS = ("<|end|>", "<|endless|>", '<|"|>', "a\\n", "\n\n", "<é>")
CONTROL = ControlTokens(TOKENS)
TEXT = st.lists(st.sampled_from([*TOKENS, '"', "\\", "x", "é", "<|end"]), max_size=4).map("".join)
JSON = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def texts(value: object) -> Iterator[str]:
    """Every text within a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)


@given(JSON)
def test_no_control_token_is_left_in_json_and_all_of_it_comes_back(value: object) -> None:
    hidden = CONTROL.hide_json(value)

    assert not any(token in text for text in texts(hidden) for token in TOKENS)
    assert [CONTROL.restore(text) for text in texts(hidden)] == list(texts(value))


def test_json_without_control_tokens_is_not_copied() -> None:
    value = {"a": ["<|end", 'say "|"', {"b": None}]}

    assert CONTROL.hide_json(value) is value


@pytest.mark.parametrize("token", TOKENS)
def test_marks_survive_json_and_a_cut_mark_is_refused(token: str) -> None:
    hidden = CONTROL.hide(f"x{token}y")

    assert json.loads(json.dumps({"a": hidden}))["a"] == hidden
    assert CONTROL.restore(hidden.strip()) == f"x{token}y"
    with pytest.raises(RequestRefused, match="a control token of the model"):
        CONTROL.restore(hidden[2:])
