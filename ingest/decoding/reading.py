"""Decodes the bytes of a record into an event, or says why it is none.

There is a fast path and a slow path to the same event. The fast one is a typed decoder. It reads
everything that a gateway of this version writes, and fields that a newer one added. Records that it
refuses take the slow path through the event models, which coerce values and can say what is wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
import numpy as np
import pydantic_core
from pydantic import BaseModel, PlainSerializer, ValidationError

from onlinerl.ingest.decoding.contract import BrokenEvent, Kind
from onlinerl.ingest.decoding.structs import decoder_of, struct_of
from onlinerl.ingest.decoding.unknown_fields import EventModel, undeclared_fields
from onlinerl.rollout_store.schema import SCHEMA_VERSION

_NUMBER_BYTES = 4


@dataclass(slots=True)
class Event:
    """One event as it was written; token arrays are packed little-endian int32 and float32."""

    body: Any
    """A struct of `structs.struct_of`, with the fields of the event model."""
    extra: Sequence[str | None] | None = None
    """JSON of the undeclared fields of each row; None when no row has any."""


def read_event(value: bytes, model: EventModel) -> Event | None:
    """The event of a record; None when its consent is `none`, so that it must not be stored.

    Raises:
        BrokenEvent: Says what is wrong, without quoting the event.
    """
    event = read_by_struct(value, model) or read_by_model(value, model)
    return None if event is None or event.body.consent == "none" else event


def read_by_struct(value: bytes, model: EventModel) -> Event | None:
    """The fast path: the event, or None when the record must take the slow path."""
    extra = None
    try:
        body = decoder_of(model).decode(value)
    except msgspec.ValidationError:
        try:
            body = decoder_of(model, keep_unknown=True).decode(value)
            extra = undeclared_fields(pydantic_core.from_json(value), model)
        except (msgspec.DecodeError, ValueError):
            return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if body.schema_version != SCHEMA_VERSION:
        return None
    is_plain = _is_plain_interaction if hasattr(body, "choices") else _is_plain_feedback
    return Event(body, extra) if is_plain(body) else None


def read_by_model(value: bytes, model: EventModel) -> Event | None:
    """The slow path: the event as its model reads it; None when its consent is `none`.

    Raises:
        BrokenEvent: Says what is wrong, without quoting the event.
    """
    if not value:
        raise BrokenEvent(Kind.EMPTY, "the record is empty")
    raw = _json(value)
    if raw is not None and raw.get("consent") == "none":
        return None  # must not be stored, broken or not
    if raw is not None:
        # Checked first, because fields may have another meaning in another version.
        _check_version(raw.get("schema_version"))
    try:
        event = model.model_validate_json(value)
    except ValidationError as error:
        raise _broken_event(error) from None
    _check_version(event.schema_version)
    try:
        body = msgspec.convert(_plain(event), struct_of(model))
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise BrokenEvent(Kind.VALUE, f"a value fits no column: {error}"[:1000]) from None
    return Event(body, undeclared_fields(raw or {}, model))


def _is_plain_interaction(body: Any) -> bool:  # noqa: ANN401 - a generated struct
    if len(body.prompt_token_ids) % _NUMBER_BYTES or not _is_instant(body.served_at):
        return False
    for choice in body.choices:
        if (len(choice.completion_token_ids) | len(choice.logprobs)) % _NUMBER_BYTES:
            return False
    return True


def _is_plain_feedback(body: Any) -> bool:  # noqa: ANN401 - a generated struct
    if not _is_instant(body.given_at):
        return False
    has_one_target = (body.interaction_id is None) != (body.session_id is None)
    content = (body.value, body.demonstration, body.retracts)
    return has_one_target and content != (None, None, None)


def _is_instant(text: str) -> bool:
    """Whether the text, whose form is right, names a day and a time that exist."""
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _json(value: bytes) -> Mapping[str, Any] | None:
    try:
        raw = pydantic_core.from_json(value)
    except ValueError:
        return None
    return raw if isinstance(raw, dict) else None


def _check_version(version: object) -> None:
    if isinstance(version, int) and version != SCHEMA_VERSION:
        shown = version if abs(version) < 10**9 else "a large number"
        raise BrokenEvent(
            Kind.SCHEMA_VERSION, f"schema_version {shown} is not {SCHEMA_VERSION}, the one known"
        )


def _broken_event(error: ValidationError) -> BrokenEvent:
    details = error.errors(include_input=False, include_context=False, include_url=False)
    shown = [f"{'.'.join(map(str, d['loc'])) or 'record'}: {d['msg']}" for d in details[:3]]
    more = [f"and {len(details) - 3} more"] if len(details) > 3 else []
    kind = Kind.NOT_JSON if details[0]["type"] == "json_invalid" else Kind.FIELDS
    return BrokenEvent(kind, "; ".join(shown + more)[:1000])


def _plain(value: Any) -> Any:  # noqa: ANN401 - walks any model
    """A model as plain values for its struct: packed arrays, and timestamps in one form."""
    if isinstance(value, BaseModel):
        return {
            name: _pack(getattr(value, name), info.metadata, info.annotation)
            for name, info in type(value).model_fields.items()
        }
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return value


def _pack(value: Any, metadata: Sequence[object], annotation: object) -> Any:  # noqa: ANN401
    if not any(isinstance(item, PlainSerializer) for item in metadata):
        return _plain(value)
    if get_args(annotation) == (int,):
        return np.asarray(value, dtype="<i4").tobytes()
    # A value beyond float32 becomes infinite, which the rule for trainability refuses.
    with np.errstate(over="ignore"):
        return np.asarray(value, dtype="<f8").astype("<f4").tobytes()
