"""The fast path of reading an event against the slow one."""

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onlinerl.errors import InvalidEvent
from onlinerl.ingest.batches.records import DecodedRecord
from onlinerl.ingest.batches.sorting import Batch, Route
from onlinerl.ingest.decoding import reading
from onlinerl.ingest.decoding.contract import BrokenEvent
from onlinerl.ingest.decoding.structs import struct_of
from onlinerl.rollout_store.schema import TABLES, Completion, FeedbackEvent, InteractionEvent
from tests.events import NOON, completion, feedback, interaction
from tests.ingest.sorted import FEEDBACK, INTERACTIONS, batch_of, edited, record

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NUMBERS = st.integers(-(2**66), 2**66) | st.floats() | st.sampled_from([True, "1", "1.5", -0.0])
PACKED = st.sampled_from(
    ["", "AAAA", "AAAAAA==", "AAAAAAE=", "AAAAAAAAgD8=", "AACAfwAAwH8=", "////fw==", [1]]
) | st.binary(max_size=12).map(lambda raw: base64.b64encode(raw).decode())
TIMES = st.sampled_from(
    [
        "2026-01-02T12:00:00Z",
        "2026-01-02T12:00:00.5Z",
        "2026-01-02T12:00:00.123456Z",
        "2026-01-02T12:00:00.1234567Z",
        "2026-01-02T12:00:00.9999999Z",
        "2026-01-02t12:00:00z",
        "2026-01-02 12:00:00+02:00",
        "2026-02-29T12:00:00Z",
        "2024-02-29T24:00:00Z",
        "2024-02-29T23:59:60Z",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:59:59.999999Z",
        "2026-01-02T12:00:00Z\n",
        "\uff12026-01-02T12:00:00Z",
        "2026-01-02T12:00:00",
        "2026-W01-1T12:00:00Z",
        1767355200,
        1767355200.25,
    ]
) | st.datetimes().map(lambda at: at.isoformat() + "Z")
SPANS = st.lists(
    st.fixed_dictionaries({"version": st.sampled_from(["assistant/1", "x", 3]), "start": NUMBERS}),
    max_size=2,
) | st.lists(
    st.fixed_dictionaries(
        {"version": st.just("assistant/2"), "start": st.integers(-1, 2), "end": st.integers(0, 3)}
    ),
    max_size=2,
)
VALUES = JSON | NUMBERS | PACKED | TIMES | SPANS
PLACES = st.sampled_from(["event", "choice", "sampling", "renderer", "span"])
DECLARED = {*InteractionEvent.model_fields, *FeedbackEvent.model_fields, *Completion.model_fields}
NAMES = st.sampled_from(sorted({*DECLARED, "seed", "stop", "top_p", "temperature", "start", "end"}))
NAMES = NAMES | st.text(max_size=4)


def outcome(value: bytes, route: Route) -> Any:
    """The rows of the slow path as text, or why there are none."""
    try:
        event = reading.read_by_model(value, route.model)
    except BrokenEvent:
        return "broken"
    return "withheld" if event is None else table(event, route)


def table(event: reading.Event, route: Route) -> Any:
    """The rows as text: NaN is not equal to itself."""
    return repr(route.table_of([DecodedRecord(record(b""), event)], ingested_at=NOON).to_pylist())


def agree(value: bytes, route: Route) -> bool:
    """Whether both paths read the same; the fast one may leave the event to the slow one."""
    event = reading.read_by_struct(value, route.model)
    if event is None:
        return True
    by_model = outcome(value, route)
    if event.body.consent == "none":
        return bool(by_model == "withheld")
    return bool(by_model == table(event, route))


def changed(raw: dict[str, Any], changes: list[tuple[str, str, Any]]) -> dict[str, Any]:
    places = {
        "event": raw,
        "choice": raw.get("choices", [{}])[0],
        "sampling": raw.get("sampling", {}),
        "renderer": raw.get("renderer", {}),
        "span": raw.get("choices", [{"version_spans": [{}]}])[0]["version_spans"][0],
    }
    for place, name, value in changes:
        if value == "absent":
            places[place].pop(name, None)
        else:
            places[place][name] = value
    return raw


@given(st.lists(st.tuples(PLACES, NAMES, VALUES | st.just("absent")), min_size=1, max_size=3))
@example([("event", "served_at", "2026-01-02T12:00:00.1234567Z")])
@example([("event", "served_at", "2026-01-02T12:00:00.5Z")])
@example([("event", "new", {"a": 2**70})])
@example([("event", "new", 1), ("event", "consent", "none")])
@example([("choice", "logprobs", "AACAfwAAwH8=")])
@example([("sampling", "temperature", 2**70)])
@example([("sampling", "seed", 2**63)])
def test_both_ways_read_the_same_interaction(changes: list[tuple[str, str, Any]]) -> None:
    raw = changed(json.loads(interaction().model_dump_json()), changes)

    assert agree(json.dumps(raw).encode(), INTERACTIONS)
    assert agree(json.dumps(raw, ensure_ascii=False).encode("utf-8", "replace"), INTERACTIONS)


@given(st.lists(st.tuples(st.just("event"), NAMES, VALUES | st.just("absent")), max_size=3))
@example([("event", "value", None)])
@example([("event", "session_id", "s")])
@example([("event", "comment", "\ud800")])
def test_both_ways_read_the_same_feedback(changes: list[tuple[str, str, Any]]) -> None:
    raw = changed(json.loads(feedback().model_dump_json()), changes)

    assert agree(json.dumps(raw).encode(), FEEDBACK)


@given(st.data())
def test_both_ways_read_the_same_of_damaged_bytes(data: st.DataObject) -> None:
    whole = interaction().model_dump_json().encode()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(start + 6, len(whole))))
    value = whole[:start] + data.draw(st.binary(max_size=4)) + whole[end:]

    assert agree(value, INTERACTIONS)


@pytest.mark.parametrize("skipped", ["\xff", "[" * 300 + "]" * 300, "9" * 5000], ids=len)
def test_values_that_the_fast_path_must_not_skip(skipped: str) -> None:
    value = interaction().model_dump_json().encode()
    odd = value[:-1] + b', "new": ' + skipped.encode("latin-1") + b"}"

    assert agree(odd, INTERACTIONS)


def test_what_a_gateway_of_this_version_writes_takes_the_fast_path() -> None:
    full = interaction(
        parent_id="p",
        prefix_length=1,
        prompt_mask_spans=[{"start": 0, "end": 1}],
        arm_probability=0.5,
        choices=[completion(mask_spans=[], routed_experts="x")],
    )
    for event in (interaction(), full, feedback(), feedback(value=None, demonstration="d")):
        model = type(event)
        assert reading.read_by_struct(event.model_dump_json().encode(), model) is not None


def test_a_field_of_a_newer_writer_takes_the_fast_path_too() -> None:
    event = reading.read_by_struct(edited(mood=1), InteractionEvent)

    assert event is not None
    assert event.extra == ['{"mood": 1}']


EVENTS = st.sampled_from(
    [
        interaction("a").model_dump_json().encode(),
        interaction("b", parent_id="a", prefix_length=5).model_dump_json().encode(),
        interaction("c", parent_id="a", prefix_length=6).model_dump_json().encode(),
        interaction("d", consent="none").model_dump_json().encode(),
        interaction("e", choices=[completion(), completion([], choice_index=1)])
        .model_dump_json()
        .encode(),
        interaction("f", choices=[completion(logprobs=[0.0, float("nan")])])
        .model_dump_json()
        .encode(),
        interaction("g", prompt_token_ids=[9, -1]).model_dump_json().encode(),
        edited(interaction_id="h", mood=1),
        edited(interaction_id="i", prompt_token_ids=[1, 2]),
        edited(interaction_id="j", sampling={"seed": 2**65}),
        edited(interaction_id="k", schema_version=9),
        b"{",
        b"",
    ]
)


@given(st.lists(EVENTS, max_size=12))
def test_a_batch_is_the_same_row_for_row_without_the_fast_path(values: list[bytes]) -> None:
    fast = batch_of(*values, vocab_size=50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "read_by_struct", lambda value, model: None)
        slow = batch_of(*values, vocab_size=50)

    assert facts(fast) == facts(slow)


def facts(batch: Batch) -> object:
    return (
        [repr(row) for row in batch.rows.to_pylist()],
        list(batch.dead),
        batch.dead_by_kind,
        batch.events,
        batch.ends,
        batch.num_repeated,
        batch.num_withheld,
    )


@given(st.binary(max_size=64) | st.text().map(str.encode))
def test_any_bytes_are_rows_or_an_invalid_event(value: bytes) -> None:
    for route in (INTERACTIONS, FEEDBACK):
        batch = batch_of(value, route=route)
        assert batch.rows.num_rows + len(batch.dead) + batch.num_withheld == 1


@given(st.sampled_from(sorted(InteractionEvent.model_fields)), VALUES)
def test_any_value_in_any_field_is_rows_or_an_invalid_event(name: str, value: object) -> None:
    with contextlib.suppress(InvalidEvent):
        batch = batch_of(edited(**{name: value}))
        assert batch.rows.num_rows + len(batch.dead) + batch.num_withheld == 1


def test_every_field_of_an_event_is_a_column_or_known_to_be_none() -> None:
    columns = set(TABLES["interactions"].model_fields)
    fields = set(struct_of(InteractionEvent).__struct_fields__)

    assert fields - columns == {"schema_version", "choices"}
