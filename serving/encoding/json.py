"""Strict JSON parsing for everything that callers and models write, and the ways JSON is written.

Python's parser accepts more than RFC 8259 and RFC 7493 (I-JSON) allow: NaN, numbers beyond a float,
and halves of surrogate pairs. None of these can be sent or logged, so they are refused on the way
in.
"""

import json
import math
import re
from collections.abc import Iterable
from typing import Any

Body = dict[str, Any]
"""A JSON object that is about to be written."""

MAX_DEPTH = 128
"""Most objects and lists that may be nested within each other."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"
_COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_SORTED = json.JSONEncoder(separators=(",", ":"), sort_keys=True)


def read_json_text(text: str) -> object:
    """Parse `text`.

    Raises:
        ValueError: `text` is no JSON, is nested deeper than `MAX_DEPTH`, or holds a number or a
            string that other JSON readers refuse.
    """
    text.encode()
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_too_deep(value):
        raise ValueError(_TOO_DEEP)
    if _SURROGATE.search(text) is not None:
        unescaped_json(value).encode()
    return value


def to_json(value: object) -> bytes:
    """Compact JSON for answers and files; ASCII only, so that no reader splits a line in a string.

    Raises:
        ValueError: a number is not finite.
    """
    return _COMPACT.encode(value).encode("ascii")


def sorted_json(value: object) -> str:
    """Compact JSON with sorted keys, for digests: equal for equal values, whatever their order."""
    return _SORTED.encode(value)


def unescaped_json(value: object) -> str:
    """JSON that keeps every character as it is, for text that a model reads."""
    return json.dumps(value, ensure_ascii=False)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number is too large")
    return number


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for outer in level for item in _items(outer) if isinstance(item, dict | list)]
    return bool(level)


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
