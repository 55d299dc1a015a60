"""The one rule for what may be learned from: every writer and every reader agrees on it."""

import string
from collections.abc import Sequence
from typing import Any, get_args

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onlinerl.rollout_store.schema import (
    Arm,
    Completion,
    FinishReason,
    InteractionEvent,
    LogprobMode,
    Sampling,
)
from onlinerl.rollout_store.tables.rows import to_table
from onlinerl.rollout_store.trainability import (
    SHAPING,
    Reason,
    completion_fault,
    fault_of,
    prompt_fault,
    request_fault,
    request_fault_sql,
)
from onlinerl.serving.capture.eligibility import untrainable_reason
from tests.events import interaction, interaction_rows
from tests.ingest.sorted import batch_of

VERSIONS = ("assistant/1", "assistant/12", "assistant/0", "assistant/007", "other/1", "default")
LOGPROBS = st.sampled_from([-0.5, -3.0, 0.0, -9998.0, -9999.0, -1e30, float("-inf"), float("nan")])


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    fields: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.0])),
        "top_p": draw(st.sampled_from([0.9, 1.0])),
        "top_k": draw(st.sampled_from([-1, 0, 20])),
    }
    names = draw(st.lists(st.sampled_from([*SHAPING, "min_p"]), max_size=1))
    return Sampling.model_validate(fields | dict.fromkeys(names, 1))


@st.composite
def completions(draw: st.DrawFn, choice_index: int) -> Completion:
    """Lengths and spans are right: an event that claims more than it has is a dead letter."""
    num_tokens = draw(st.integers(0, 3))
    cut = draw(st.integers(0, num_tokens))
    edges = sorted({0, cut, num_tokens})
    versions = draw(
        st.lists(
            st.one_of(st.just("assistant/1"), st.sampled_from(VERSIONS)), min_size=2, max_size=2
        )
    )
    spans = [
        {"version": version, "start": start, "end": end}
        for version, start, end in zip(versions, edges, edges[1:], strict=False)
    ]
    logprobs = st.one_of(st.just(-0.5), LOGPROBS)
    return Completion.model_validate(
        {
            "choice_index": choice_index,
            "completion_token_ids": [7] * num_tokens,
            "logprobs": draw(st.lists(logprobs, min_size=num_tokens, max_size=num_tokens)),
            "finish_reason": draw(
                st.one_of(st.just("stop"), st.sampled_from(get_args(FinishReason)))
            ),
            "version_spans": spans,
        }
    )


@st.composite
def events(draw: st.DrawFn) -> InteractionEvent:
    num_choices = draw(st.integers(1, 2))
    return interaction(
        choices=[draw(completions(number)) for number in range(num_choices)],
        sampling=draw(st.one_of(st.just(Sampling(temperature=0.7)), samplings())),
        arm=draw(st.one_of(st.just("champion"), st.sampled_from(get_args(Arm)))),
        logprob_mode=draw(st.one_of(st.just("processed"), st.sampled_from(get_args(LogprobMode)))),
        parent_id=draw(st.sampled_from([None, "i0"])),
        prefix_length=draw(st.sampled_from([0, 2])),
        prompt_token_ids=draw(st.sampled_from([[1, 2], []])),
    )


def fault_texts(event: InteractionEvent) -> list[str | None]:
    """Per choice the verdict of the rule."""
    of_all = prompt_fault(
        num_prompt_tokens=len(event.prompt_token_ids),
        prefix_length=event.prefix_length,
        parent_id=event.parent_id,
    ) or request_fault(
        arm=event.arm,
        sampling=event.sampling,
        logprob_mode=event.logprob_mode,
        other_parameters=event.sampling.model_extra or (),
    )
    faults = [of_all or completion_fault(one, policy=event.policy) for one in event.choices]
    return [None if fault is None else fault.text for fault in faults]


@given(events())
def test_ingest_stores_the_verdict_of_the_rule_for_every_choice(event: InteractionEvent) -> None:
    batch = batch_of(event.model_dump_json().encode())
    expected = fault_texts(event)

    assert not batch.dead
    assert batch.rows["untrainable_reason"].to_pylist() == expected
    assert batch.rows["trainable"].to_pylist() == [text is None for text in expected]


@given(events())
def test_what_the_gateway_claims_to_be_trainable_ingest_stores_as_trainable(
    event: InteractionEvent,
) -> None:
    served = event.model_copy(
        update={"logprob_mode": "processed", "parent_id": None, "prefix_length": 0}
    ).model_copy(update={"prompt_token_ids": [1]})
    claim = untrainable_reason(
        served.choices, policy=served.policy, sampling=served.sampling, arm=served.arm
    )
    stored = batch_of(served.model_dump_json().encode()).rows["trainable"].to_pylist()

    assert (claim is None) == all(stored)


def sql_verdicts(events_to_judge: Sequence[InteractionEvent]) -> list[str | None]:
    """What a reader of the tables finds, of rows that all claim to be trainable."""
    rows = to_table([row for event in events_to_judge for row in interaction_rows(event)])
    query = f'SELECT {request_fault_sql("i")} AS fault FROM served AS i ORDER BY i."offset"'
    with duckdb.connect() as connection:
        connection.register("served", _numbered(rows))
        found: list[str | None] = connection.sql(query).to_arrow_table()["fault"].to_pylist()
    return found


def _numbered(rows: pa.Table) -> pa.Table:
    at = rows.schema.get_field_index("offset")
    return rows.set_column(at, rows.schema.field(at), pa.array(range(len(rows)), pa.int64()))


@settings(max_examples=40)
@given(st.lists(events(), min_size=1, max_size=20))
def test_a_reader_of_the_tables_judges_requests_as_the_rule_does(
    judged: list[InteractionEvent],
) -> None:
    faults = [
        request_fault(arm=event.arm, sampling=event.sampling, logprob_mode=event.logprob_mode)
        for event in judged
        for _ in event.choices
    ]
    expected = [None if fault is None else fault.reason.value for fault in faults]

    assert sql_verdicts(judged) == expected


@settings(max_examples=40)
@given(st.lists(events(), min_size=1, max_size=20))
def test_no_row_that_the_rule_allows_is_refused_by_a_reader(
    judged: list[InteractionEvent],
) -> None:
    allowed = [text is None for event in judged for text in fault_texts(event)]
    readable = [fault is None for fault in sql_verdicts(judged)]

    assert all(is_readable for is_readable, is_ok in zip(readable, allowed, strict=True) if is_ok)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_text(reason: Reason) -> None:
    names = ("name", "finish_reason", "num_tokens", "num_logprobs", "version", "policy")
    text = fault_of(reason, **dict.fromkeys(names, "x")).text

    assert text
    assert not set(text) & set("{}")
    assert text[0] in string.ascii_lowercase + "'"


def test_a_row_without_a_fault_is_trainable_and_a_constrained_one_is_not() -> None:
    sampling = Sampling()

    assert request_fault(arm="champion", sampling=sampling) is None
    constrained = request_fault(arm="champion", sampling=sampling, constrained=True)
    assert constrained is not None
    assert constrained.reason is Reason.CONSTRAINED
