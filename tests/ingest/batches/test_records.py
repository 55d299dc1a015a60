import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.ingest.batches.records import dead_letter
from onlinerl.rollout_store.schema import INTERACTIONS_TOPIC, InteractionEvent, InteractionRow
from onlinerl.rollout_store.tables.rows import schema_of, to_table
from tests.events import NOON, after, completion, feedback, feedback_row, interaction
from tests.events import interaction_rows as expected_rows
from tests.ingest.sorted import FEEDBACK, batch_of, edited_feedback, record, rows_of, with_choice


def parsed(event: InteractionEvent) -> list[dict[str, Any]]:
    return rows_of(event.model_dump_json().encode())


def test_a_row_has_the_fields_of_event_and_choice_and_where_it_came_from() -> None:
    event = interaction(choices=[completion([7, 8], logprobs=[-0.25, -1.5])])
    (row,) = rows_of(event.model_dump_json().encode(), ingested_at=after(1))

    assert (row["interaction_id"], row["prompt_token_ids"]) == ("i1", [1, 2, 3])
    assert (row["completion_token_ids"], row["logprobs"]) == ([7, 8], [-0.25, -1.5])
    assert (row["topic"], row["partition"], row["offset"]) == (INTERACTIONS_TOPIC, 3, 41)
    assert (row["ingested_at"], row["ingest_date"]) == (after(1), NOON.date())
    assert (row["trainable"], row["untrainable_reason"], row["policy_version"]) == (True, None, 1)
    assert row["extra"] is None


def test_the_columns_are_those_of_the_row_model_value_by_value() -> None:
    event = interaction(
        parent_id="i0",
        prefix_length=2,
        prompt_mask_spans=[{"start": 0, "end": 1}],
        arm_probability=0.25,
        user="u",
        ttft_ms=1.5,
        tags={"a": "b", "c": "d"},
        sampling={"temperature": 0.5, "seed": 3, "stop": ["x", "y"]},
        choices=[
            completion([3], choice_index=2, mask_spans=[]),
            completion([4], choice_index=1),
            completion([9], mask_spans=[{"start": 0, "end": 1}], routed_experts="AA=="),
        ],
    )
    batch = batch_of(event.model_dump_json().encode())

    origin = {"partition": 3, "offset": 41}
    rows = [row.model_copy(update={"policy_version": 1}) for row in expected_rows(event, **origin)]
    assert batch.rows.schema == schema_of(InteractionRow)
    assert batch.rows.equals(to_table(rows))


def test_feedback_columns_are_those_of_the_row_model_value_by_value() -> None:
    event = feedback(tags={"a": "b"}, comment="c", choice_index=1, consent="train")
    batch = batch_of(event.model_dump_json().encode(), route=FEEDBACK)

    assert batch.rows.equals(to_table([feedback_row(event, partition=3, offset=41)]))


def test_a_row_per_choice() -> None:
    rows = parsed(interaction(choices=[completion(), completion([9], choice_index=1)]))

    assert [(row["choice_index"], row["completion_token_ids"]) for row in rows] == [
        (0, [7, 8]),
        (1, [9]),
    ]


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), float("inf"), -9999.0])
def test_a_logprob_that_is_not_finite_is_kept_untrainable_and_spares_its_neighbours(
    logprob: float,
) -> None:
    good, bad = parsed(
        interaction(choices=[completion(choice_index=1), completion(logprobs=[-0.5, logprob])])
    )

    assert (good["trainable"], good["untrainable_reason"]) == (True, None)
    assert not bad["trainable"]
    assert bad["untrainable_reason"] == "a log-probability is missing or not finite"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trainable": False, "untrainable_reason": "greedy"}, "greedy"),
        ({"trainable": False}, "the gateway gave no reason"),
        ({"prefix_length": 4}, "prefix_length without a parent"),
        ({"prompt_token_ids": []}, "no prompt tokens"),
        ({"trainable": False, "choices": [completion(logprobs=[])]}, "the gateway gave no reason"),
        ({"trainable": False, "choices": [completion(version_spans=[])]}, "the gateway gave no"),
        ({"arm": "shadow"}, "a shadow answer was shown to nobody"),
        ({"sampling": {"temperature": 0}}, "greedy sampling"),
        ({"logprob_mode": "raw"}, "the log-probabilities are not those of the served"),
        ({"sampling": {"top_p": 0.9}}, "top_p or top_k cut"),
        ({"sampling": {"top_k": 20}}, "top_p or top_k cut"),
        ({"sampling": {"logit_bias": {"7": 1}}}, "logit_bias changes the distribution"),
        ({"choices": [completion(finish_reason="abort")]}, "the answer ended with abort"),
    ],
)
def test_events_that_cannot_be_learned_from_are_kept_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    (row,) = parsed(interaction(**changes))

    assert not row["trainable"]
    assert row["untrainable_reason"].startswith(reason)


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("assistant/12", 12),
        ("other/12", None),
        ("default", None),
        ("assistant/x", None),
        ("assistant/0", None),
        ("assistant/007", None),
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

    assert row["policy_version"] == number
    assert row["trainable"] == (number is not None)
    if number is None:
        assert row["untrainable_reason"] == f"{version!r} is not a version of 'assistant'"


def test_no_tokens_have_no_version_and_are_untrainable() -> None:
    (row,) = parsed(interaction(choices=[completion([])]))

    assert (row["trainable"], row["policy_version"]) == (False, None)
    assert row["untrainable_reason"] == "no token was sampled"


def test_fields_of_a_newer_writer_are_kept_wherever_they_stand() -> None:
    raw = json.loads(interaction().model_dump_json()) | {"mood": {"a": [1]}}
    raw["choices"][0]["beam"] = 2
    raw["choices"][0]["version_spans"][0]["adapter"] = "x"
    raw["sampling"]["min_p"] = 0.1
    raw["renderer"]["tools"] = "t"
    (row,) = rows_of(json.dumps(raw).encode())

    assert json.loads(row["extra"]) == {
        "mood": {"a": [1]},
        "choice": {"beam": 2, "version_spans": {"0": {"adapter": "x"}}},
        "sampling": {"min_p": 0.1},
        "renderer": {"tools": "t"},
    }


def test_a_field_of_one_choice_is_not_given_to_the_other() -> None:
    raw = json.loads(
        interaction(choices=[completion(), completion(choice_index=1)]).model_dump_json()
    )
    raw["choices"][1]["beam"] = 2
    first, second = rows_of(json.dumps(raw).encode())

    assert first["extra"] is None
    assert json.loads(second["extra"]) == {"choice": {"beam": 2}}


def test_without_consent_there_is_no_row_and_no_dead_letter_either() -> None:
    broken = with_choice(lambda choice: choice.update(logprobs=""))
    silent = json.dumps(json.loads(broken) | {"consent": "none"}).encode()
    unreadable = json.dumps(json.loads(silent) | {"served_at": "yesterday"}).encode()
    batch = batch_of(interaction(consent="none").model_dump_json().encode(), silent, unreadable)

    assert (batch.rows.num_rows, list(batch.dead), batch.num_withheld) == (0, [], 3)


def test_a_boolean_is_a_number() -> None:
    (row,) = rows_of(edited_feedback(value=True, new=1), route=FEEDBACK)

    assert (row["value"], row["extra"]) == (1.0, '{"new": 1}')


def test_a_dead_letter_is_the_record_byte_for_byte() -> None:
    row = dead_letter(record(b"\x00\xff"), reason="why", ingested_at=NOON)

    assert (row.key, row.payload, row.reason) == (b"s1", b"\x00\xff", "why")
    assert (row.topic, row.partition, row.offset) == (INTERACTIONS_TOPIC, 3, 41)


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=8))
def test_logprobs_survive_the_wire_bit_for_bit(logprobs: list[float]) -> None:
    event = interaction(choices=[completion([1] * len(logprobs), logprobs=logprobs)])
    raw = json.loads(event.model_dump_json())
    (row,) = parsed(event)

    packed = base64.b64decode(raw["choices"][0]["logprobs"])
    assert packed == np.asarray(row["logprobs"], "<f4").tobytes()
