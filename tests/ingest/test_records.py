import base64
import contextlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.errors import InvalidEvent
from onlinerl.ingest.log import LogRecord
from onlinerl.ingest.records import dead_letter, feedback_rows, interaction_rows
from onlinerl.rollout_store.schema import (
    FEEDBACK_TOPIC,
    INTERACTIONS_TOPIC,
    InteractionEvent,
    InteractionRow,
)
from tests.events import NOON, after, completion, feedback, interaction


def record(value: bytes, *, topic: str = INTERACTIONS_TOPIC) -> LogRecord:
    return LogRecord(topic, 3, 41, b"s1", value)


def parsed(event: InteractionEvent) -> list[InteractionRow]:
    return list(interaction_rows(record(event.model_dump_json().encode()), ingested_at=after(1)))


def edited(**changes: object) -> bytes:
    return json.dumps(json.loads(interaction().model_dump_json()) | changes).encode()


def test_a_row_has_the_fields_of_event_and_choice_and_where_it_came_from() -> None:
    event = interaction(choices=[completion([7, 8], logprobs=[-0.25, -1.5])])
    (row,) = interaction_rows(record(event.model_dump_json().encode()), ingested_at=after(1))

    assert (row.interaction_id, row.prompt_token_ids) == ("i1", [1, 2, 3])
    assert (row.completion_token_ids, row.logprobs) == ([7, 8], [-0.25, -1.5])
    assert (row.topic, row.partition, row.offset) == (INTERACTIONS_TOPIC, 3, 41)
    assert (row.ingested_at, row.ingest_date) == (after(1), NOON.date())
    assert (row.trainable, row.untrainable_reason, row.policy_version) == (True, None, 1)
    assert row.extra is None


def test_a_row_per_choice() -> None:
    rows = parsed(interaction(choices=[completion(), completion([9], choice_index=1)]))

    assert [(row.choice_index, row.completion_token_ids) for row in rows] == [(0, [7, 8]), (1, [9])]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"logprobs": [-0.5]}, "1 logprobs for 2 tokens"),
        ({"logprobs": []}, "0 logprobs for 2 tokens"),
        ({"logprobs": [-0.5, float("nan")]}, "a logprob is not finite"),
        ({"logprobs": [-0.5, float("-inf")]}, "a logprob is not finite"),
        ({"version_spans": []}, "version spans do not tile the completion"),
        ({"version_spans": [("a/1", 0, 1)]}, "version spans do not tile the completion"),
        ({"version_spans": [("a/1", 0, 2), ("a/2", 1, 2)]}, "version spans do not tile"),
        ({"version_spans": [("a/1", 0, 0), ("a/1", 0, 2)]}, "version spans do not tile"),
        ({"version_spans": [("a/1", 1, 2)]}, "version spans do not tile the completion"),
        ({"version_spans": [("a/1", 0, 3)]}, "version spans do not tile the completion"),
    ],
)
def test_what_learning_cannot_use_is_kept_and_says_why(
    choice: dict[str, list[Any]], reason: str
) -> None:
    spans = choice.get("version_spans")
    if spans is not None:
        choice = {
            "version_spans": [dict(zip(("version", "start", "end"), s, strict=True)) for s in spans]
        }
    good, bad = parsed(interaction(choices=[completion(choice_index=1), completion(**choice)]))

    assert (good.trainable, good.untrainable_reason) == (True, None)
    assert not bad.trainable
    assert str(bad.untrainable_reason).startswith(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trainable": False, "untrainable_reason": "greedy"}, "greedy"),
        ({"trainable": False}, "the gateway gave no reason"),
        ({"prefix_length": 4}, "prefix_length without a parent"),
        ({"prompt_token_ids": []}, "no prompt tokens"),
    ],
)
def test_what_holds_for_the_request_holds_for_each_row(
    changes: dict[str, Any], reason: str
) -> None:
    (row,) = parsed(interaction(**changes))

    assert (row.trainable, row.untrainable_reason) == (False, reason)


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("assistant/12", 12),
        ("other/12", None),
        ("default", None),
        ("assistant/x", None),
        ("assistant/", None),
        ("assistant/²", None),
        (f"assistant/{10**30}", None),
    ],
)
def test_the_policy_version_is_that_of_the_last_token(version: str, number: int | None) -> None:
    spans = [
        {"version": "assistant/3", "start": 0, "end": 1},
        {"version": version, "start": 1, "end": 2},
    ]
    (row,) = parsed(interaction(choices=[completion(version_spans=spans)]))

    assert row.policy_version == number


def test_no_tokens_have_no_version() -> None:
    (row,) = parsed(interaction(choices=[completion([])]))

    assert (row.trainable, row.policy_version) == (True, None)


def test_fields_of_a_newer_writer_are_kept() -> None:
    raw = json.loads(interaction().model_dump_json()) | {"mood": {"a": [1]}}
    raw["choices"][0]["beam"] = 2
    raw["sampling"]["min_p"] = 0.1
    (row,) = interaction_rows(record(json.dumps(raw).encode()), ingested_at=NOON)

    assert row.extra is not None
    assert json.loads(row.extra) == {
        "mood": {"a": [1]},
        "choice": {"beam": 2},
        "sampling": {"min_p": 0.1},
    }


def test_without_consent_there_is_no_row() -> None:
    assert parsed(interaction(consent="none")) == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "the record is empty"),
        (b"\xff\xfe", "Invalid JSON"),
        (b"null", "record: Input should be an object"),
        (b'{"a": 1}', "interaction_id: Field required"),
        (edited(choices=[]), "choices: List should have at least 1 item"),
        (edited(schema_version=2), "schema_version 2 is not 1"),
        (edited(served_at="2026-01-02T12:00:00"), "served_at: Input should have timezone info"),
        (edited(prompt_token_ids="AAA="), "prompt_token_ids: Value error, buffer size"),
        (edited(prompt_token_ids="???"), "prompt_token_ids: Value error"),
        (edited(consent="maybe"), "consent: Input should be"),
        (edited(prefix_length=-1), "prefix_length: Input should be greater"),
    ],
)
def test_what_cannot_be_read_says_why(value: bytes, reason: str) -> None:
    with pytest.raises(InvalidEvent) as caught:
        interaction_rows(record(value), ingested_at=NOON)
    assert reason in str(caught.value)


def test_a_reason_does_not_repeat_what_the_record_contains() -> None:
    with pytest.raises(InvalidEvent) as caught:
        interaction_rows(record(edited(consent="my secret")), ingested_at=NOON)
    assert "secret" not in str(caught.value)


def test_two_choices_with_one_number_are_refused() -> None:
    with pytest.raises(InvalidEvent, match=r"choice_index repeats: \[0, 0\]"):
        parsed(interaction(choices=[completion(), completion()]))


@pytest.mark.parametrize(
    "changes",
    [
        {"interaction_id": None},
        {"session_id": "s1"},
        {"value": None},
        {"metric": ""},
        {"feedback_id": ""},
        {"schema_version": 0},
    ],
)
def test_feedback_needs_one_target_and_something_to_say(changes: dict[str, object]) -> None:
    raw = json.loads(feedback().model_dump_json()) | changes

    with pytest.raises(InvalidEvent):
        feedback_rows(record(json.dumps(raw).encode(), topic=FEEDBACK_TOPIC), ingested_at=NOON)


def test_a_boolean_is_a_number() -> None:
    raw = json.loads(feedback().model_dump_json()) | {"value": True, "new": 1}
    (row,) = feedback_rows(record(json.dumps(raw).encode()), ingested_at=NOON)

    assert (row.value, row.extra) == (1.0, '{"new": 1}')


def test_a_dead_letter_is_the_record_byte_for_byte() -> None:
    row = dead_letter(record(b"\x00\xff"), reason="why", ingested_at=NOON)

    assert (row.key, row.payload, row.reason) == (b"s1", b"\x00\xff", "why")
    assert (row.topic, row.partition, row.offset) == (INTERACTIONS_TOPIC, 3, 41)


@given(st.binary(max_size=64) | st.text().map(str.encode))
def test_any_bytes_are_rows_or_an_invalid_event(value: bytes) -> None:
    for parse in (interaction_rows, feedback_rows):
        attempt(parse, value)


@given(
    st.sampled_from(sorted(InteractionEvent.model_fields)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=5,
    ),
)
def test_any_value_in_any_field_is_rows_or_an_invalid_event(name: str, value: object) -> None:
    attempt(interaction_rows, edited(**{name: value}))


def attempt(parse: Callable[..., object], value: bytes) -> None:
    with contextlib.suppress(InvalidEvent):
        parse(record(value), ingested_at=NOON)


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=8))
def test_logprobs_survive_the_wire_bit_for_bit(logprobs: list[float]) -> None:
    event = interaction(choices=[completion([1] * len(logprobs), logprobs=logprobs)])
    raw = json.loads(event.model_dump_json())
    (row,) = parsed(event)

    packed = base64.b64decode(raw["choices"][0]["logprobs"])
    assert packed == np.asarray(row.logprobs, "<f4").tobytes()
