import json
from collections.abc import Callable
from typing import Any

import pytest

from onlinerl.errors import InvalidEvent
from onlinerl.ingest.batches.recent import RecentEvents, event_key
from onlinerl.ingest.decoding.contract import Kind
from tests.events import completion, interaction
from tests.ingest.sorted import (
    FEEDBACK,
    batch_of,
    edited,
    edited_feedback,
    reasons_of,
    rows_of,
    with_choice,
)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "empty: the record is empty"),
        (b"\xff\xfe", "not_json: record: Invalid JSON"),
        (b"null", "fields: record: Input should be an object"),
        (b'{"a": 1}', "fields: interaction_id: Field required"),
        (edited(choices=[]), "fields: choices: List should have at least 1 item"),
        (edited(schema_version=2), "schema_version: schema_version 2 is not 1"),
        (edited(schema_version="2"), "schema_version: schema_version 2 is not 1"),
        (edited(schema_version=2, choices=3), "schema_version: schema_version 2 is not 1"),
        (edited(served_at="2026-01-02T12:00:00"), "fields: served_at: Input should have timezone"),
        (edited(served_at="2026-02-30T12:00:00Z"), "fields: served_at: Input should be a valid"),
        (edited(prompt_token_ids="AAA="), "fields: prompt_token_ids: Value error, buffer size"),
        (edited(prompt_token_ids="???"), "fields: prompt_token_ids: Value error"),
        (edited(consent="maybe"), "fields: consent: Input should be"),
        (edited(prefix_length=-1), "fields: prefix_length: Input should be greater"),
        (edited(prompt_token_ids=[2**31]), "value: a value fits no column"),
        (edited(sampling={"seed": 2**70}), "value: a value fits no column"),
    ],
)
def test_what_cannot_be_read_says_why(value: bytes, reason: str) -> None:
    (found,) = reasons_of(batch_of(value))

    assert found.startswith(reason)


def test_a_reason_does_not_repeat_what_the_record_contains() -> None:
    (found,) = reasons_of(batch_of(edited(consent="my secret")))

    assert "secret" not in found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.update(logprobs="AAAAvw=="), "lengths: 1 logprobs for 2 tokens"),
        (lambda c: c.update(logprobs=""), "lengths: 0 logprobs for 2 tokens"),
        (lambda c: c.update(completion_token_ids=""), "lengths: 2 logprobs for 0 tokens"),
        (lambda c: c.update(version_spans=[]), "spans: version spans do not tile"),
        (lambda c: c.update(version_spans=spans((0, 1))), "spans: version spans do not tile"),
        (lambda c: c.update(version_spans=spans((0, 3))), "spans: version spans do not tile"),
        (lambda c: c.update(version_spans=spans((1, 2))), "spans: version spans do not tile"),
        (lambda c: c.update(version_spans=spans((0, 2), (1, 2))), "spans: version spans do not"),
        (lambda c: c.update(version_spans=spans((0, 0), (0, 2))), "spans: version spans do not"),
    ],
)
def test_a_trainable_claim_with_wrong_lengths_or_spans_is_a_dead_letter(
    change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    value = with_choice(change)
    (found,) = reasons_of(batch_of(value))
    honest = json.dumps(json.loads(value) | {"trainable": False}).encode()

    assert found.startswith(reason)
    assert not rows_of(honest)[0]["trainable"]


def spans(*bounds: tuple[int, int]) -> list[dict[str, object]]:
    return [{"version": "assistant/1", "start": start, "end": end} for start, end in bounds]


@pytest.mark.parametrize(
    ("ids", "vocab_size", "is_fine"),
    [
        ([0, 99], 100, True),
        ([0, 100], 100, False),
        ([-1, 5], 100, False),
        ([-1, 5], 0, False),
        ([2**31 - 1], 0, True),
    ],
)
@pytest.mark.parametrize("where", ["prompt", "completion"])
def test_a_token_id_is_one_of_the_vocabulary_where_it_is_known(
    ids: list[int], vocab_size: int, is_fine: bool, where: str
) -> None:
    event = (
        interaction("bad", prompt_token_ids=ids)
        if where == "prompt"
        else interaction("bad", choices=[completion(), completion(ids, choice_index=1)])
    )
    values = [interaction("good").model_dump_json().encode(), event.model_dump_json().encode()]
    batch = batch_of(*values, vocab_size=vocab_size)

    assert [reason.split(":")[0] for reason in reasons_of(batch)] == (
        [] if is_fine else [Kind.VOCABULARY]
    )
    assert "good" in batch.rows["interaction_id"].to_pylist()


@pytest.mark.parametrize(
    ("prefix_length", "is_fine"), [(4, True), (5, True), (6, False)], ids=["part", "all", "more"]
)
@pytest.mark.parametrize("where", ["same batch", "stored"])
def test_a_prefix_is_no_longer_than_its_parent(
    prefix_length: int, is_fine: bool, where: str
) -> None:
    parent = interaction("parent").model_dump_json().encode()  # 3 tokens, and 2 sampled
    child = interaction("child", parent_id="parent", prefix_length=prefix_length)
    value = child.model_dump_json().encode()
    if where == "stored":
        recent = RecentEvents(9, [(event_key("acme", "parent"), 5)])
        batch = batch_of(value, recent=recent)
    else:
        batch = batch_of(parent, value)

    expected = [] if is_fine else ["prefix: prefix_length 6 is longer than its parent of 5"]
    assert reasons_of(batch) == expected


def test_a_prefix_is_measured_by_the_choice_it_continues() -> None:
    parent = interaction(
        "parent", choices=[completion([7]), completion([7, 8, 9], choice_index=4)]
    ).model_dump_json()

    def child(prefix_length: int, choice: int) -> bytes:
        event = interaction(
            f"{prefix_length} of {choice}",
            parent_id="parent",
            parent_choice=choice,
            prefix_length=prefix_length,
        )
        return event.model_dump_json().encode()

    values = [child(4, 0), child(5, 0), child(6, 4), child(7, 4), child(99, 1)]
    batch = batch_of(parent.encode(), *values)

    assert batch.rows["interaction_id"].to_pylist()[2:] == ["4 of 0", "6 of 4", "99 of 1"]


@pytest.mark.parametrize("tenant", ["acme", "globex"])
def test_a_prefix_of_an_unknown_parent_is_accepted(tenant: str) -> None:
    recent = RecentEvents(9, [(event_key("globex", "parent"), 5), (event_key("acme", "other"), 5)])
    event = interaction("child", parent_id="parent", prefix_length=99, tenant=tenant)
    batch = batch_of(event.model_dump_json().encode(), recent=recent)

    assert len(batch.dead) == (tenant == "globex")


def test_two_choices_with_one_number_are_refused() -> None:
    value = interaction(choices=[completion(), completion()]).model_dump_json().encode()

    with pytest.raises(InvalidEvent, match=r"choices: choice_index repeats: \[0, 0\]"):
        rows_of(value)


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
    with pytest.raises(InvalidEvent):
        rows_of(edited_feedback(**changes), route=FEEDBACK)


def test_dead_letters_are_in_the_order_of_the_log_and_counted_by_kind() -> None:
    bad_id = interaction("a", prompt_token_ids=[-1]).model_dump_json().encode()
    batch = batch_of(bad_id, b"{", with_choice(lambda c: c.update(logprobs="")), b"}")

    assert [row.offset for row in batch.dead] == [41, 42, 43, 44]
    assert batch.dead_by_kind == {Kind.NOT_JSON: 2, Kind.VOCABULARY: 1, Kind.LENGTHS: 1}
