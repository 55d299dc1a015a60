"""JSON that every reader takes: what callers and models write is read no other way.

Python's reader takes more than RFC 8259 and RFC 7493 (I-JSON) allow: NaN, numbers beyond a float,
and halves of surrogate pairs, which nothing that is sent or logged can hold.
"""

import json
import math
import re
from collections.abc import Iterable
from typing import Any

Body = dict[str, Any]
"""A JSON object that is about to be written."""

MAX_DEPTH = 128
"""Objects and lists within each other."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json_text(text: str) -> object:
    """The value that `text` is.

    Raises:
        ValueError: when it is no JSON, is nested deeper than `MAX_DEPTH`, or holds a number or a
            text that others cannot read.
    """
    text.encode()
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_too_deep(value):
        raise ValueError(_TOO_DEEP)
    if _SURROGATE.search(text) is not None:
        json.dumps(value, ensure_ascii=False).encode()
    return value


_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


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


def to_json(body: Body) -> bytes:
    """Compact and ASCII only, so that no reader can split a line inside a string."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
