"""Fields that a newer writer added and no model declares; they are kept as JSON."""

import functools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from onlinerl.rollout_store.schema import Completion, FeedbackEvent, InteractionEvent

EventModel = type[InteractionEvent] | type[FeedbackEvent]


def undeclared_fields(raw: Mapping[str, Any], model: EventModel) -> Sequence[str | None] | None:
    """JSON of the undeclared fields of each row of an event; None when no row has any.

    A row of an interaction has the undeclared fields of the event, and those of its completion
    under `choice`. Fields of a nested part are under its name, those of a list item under its
    number.

    Args:
        raw: The record; its declared fields are known to be right.
        model: The kind of event.
    """
    shared = _undeclared(raw, model)
    if model is FeedbackEvent:
        rows = [shared]
    else:
        own = [_undeclared(choice, Completion) for choice in raw["choices"]]
        rows = [shared | ({"choice": fields} if fields else {}) for fields in own]
    return [_to_json(row) for row in rows] if any(rows) else None


def _undeclared(raw: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    fields = {name: value for name, value in raw.items() if name not in model.model_fields}
    for name, part in _parts(model).items():
        value = raw.get(name)
        if isinstance(value, dict):
            inner = _undeclared(value, part)
        elif isinstance(value, list):
            by_number = {str(at): _undeclared(item, part) for at, item in enumerate(value)}
            inner = {at: of_item for at, of_item in by_number.items() if of_item}
        else:
            continue
        if inner:
            fields[name] = inner
    return fields


@functools.cache
def _parts(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields that are models or lists of models, without choices, which are rows themselves."""
    parts: dict[str, type[BaseModel]] = {}
    for name, info in model.model_fields.items():
        inner = _innermost(info.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel) and inner is not Completion:
            parts[name] = inner
    return parts


def _innermost(annotation: Any) -> Any:  # noqa: ANN401 - any annotation
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _innermost(next(item for item in args if item is not types.NoneType))
    return _innermost(args[0]) if origin is list else annotation


def _to_json(extra: Mapping[str, Any]) -> str | None:
    return json.dumps(extra, sort_keys=True) if extra else None
