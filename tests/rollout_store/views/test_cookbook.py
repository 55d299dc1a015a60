"""Every query of docs/cookbook.md on a small store, against answers worked out by hand."""

import math
import re
from collections.abc import Iterator
from datetime import date, timedelta
from typing import Any

import duckdb
import pytest

from onlinerl.rollout_store.config import MetricConfig, RewardsConfig, SuspicionConfig
from onlinerl.rollout_store.schema import (
    AuditRow,
    DeadLetterRow,
    InteractionEvent,
    PromotionRow,
    TokenSpan,
)
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table
from onlinerl.rollout_store.views.connection import connect
from tests.events import (
    NOON,
    after,
    completion,
    feedback,
    feedback_row,
    interaction,
    interaction_rows,
)
from tests.reference import DOCS

PAGE = DOCS / "cookbook.md"
_QUESTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_SQL = re.compile(r"^```sql\n(.*?)^```", re.DOTALL | re.MULTILINE)
QUESTIONS = {
    title: _SQL.findall(body) for title, body in _QUESTION.findall(PAGE.read_text(encoding="utf-8"))
}
REWARDS = RewardsConfig(
    metrics=(MetricConfig(name="accepted", type="bool"),),
    attribution_window_s=3600.0,
    suspicion=SuspicionConfig(min_feedback=4, user_share=0.5),
)
DAY1, DAY2 = date(2026, 1, 2), date(2026, 1, 3)
NEXT = NOON + timedelta(days=1)


def fill(store: DeltaStore) -> None:
    """Version 1 on the first day, 2 on the second.

    s1 (acme): a1 -> a2 -> a3, and a2b is a second child of a1. s2 (acme): b1, untrainable. s3
    (globex): c1 with two answers, c2 a day later.
    """
    turn: dict[str, object] = {"session_id": "s1", "policy_version": 1}
    two = [completion([7, 8]), completion([9], choice_index=1, finish_reason="length")]
    hidden = {"mask_spans": [TokenSpan(start=0, end=1)]}
    rows: list[tuple[InteractionEvent, dict[str, object]]] = [
        (interaction("a1", ttft_ms=10.0), turn),
        (
            interaction(
                "a2", parent_id="a1", prefix_length=5, prompt_token_ids=[4], served_at=after(1),
                ttft_ms=30.0,
            ),
            turn,
        ),
        (
            interaction(
                "a2b", parent_id="a1", prefix_length=5, prompt_token_ids=[5, 6],
                served_at=after(2), choices=[completion([7, 8, 9, 1], **hidden)],
                prompt_mask_spans=[TokenSpan(start=0, end=1)],
            ),
            turn,
        ),
        (
            interaction(
                "a3", parent_id="a2", prefix_length=8, prompt_token_ids=[6], served_at=after(3),
                arm="canary", choices=[completion([7], logprobs=[-2.0])],
            ),
            {"session_id": "s1", "policy_version": 2},
        ),
        (
            interaction(
                "b1", session_id="s2", served_at=after(4), trainable=False,
                untrainable_reason="top_p < 1",
            ),
            {"policy_version": 1},
        ),
        (
            interaction("c1", session_id="s3", tenant="globex", choices=two, served_at=after(5)),
            {"policy_version": 1},
        ),
        (
            interaction(
                "c2", session_id="s4", tenant="globex", consent="log", served_at=NEXT,
                ttft_ms=50.0,
            ),
            {"policy_version": 2},
        ),
        (interaction("d1", session_id="s5", served_at=NEXT), {"policy_version": 2}),
    ]  # fmt: skip
    for event, changes in rows:
        store.append("interactions", to_table(interaction_rows(event, **changes)))
    given: list[Any] = [
        feedback("f1", interaction_id="a1", value=1.0, user="ann", given_at=after(0.5)),
        feedback("f2", interaction_id="a2", value=0.0, user="ann", given_at=after(3)),
        feedback("f3", interaction_id="a3", value=1.0, user="ann", given_at=after(4)),
        feedback("f4", interaction_id="d1", value=1.0, given_at=NEXT + timedelta(minutes=10)),
        feedback("f5", interaction_id="a1", value=0.0, user="bob", given_at=after(100)),
        feedback("f6", interaction_id="a2b", metric="stars", value=4.0, given_at=after(3)),
        feedback("f7", interaction_id="c1", tenant="globex", choice_index=1, given_at=after(6)),
        feedback("f8", interaction_id="b1", given_at=after(5), user="bob"),
        feedback("f9", interaction_id="a2b", value=None, demonstration="so", given_at=after(4)),
        feedback("g1", interaction_id="a1", value=0.5, given_at=after(1)),
    ]
    store.append("feedback", to_table([feedback_row(event) for event in given]))
    store.append("promotions", to_table([_promotion(1), _promotion(2)]))
    store.append("dead_letters", to_table([_dead_letter(n, r) for n, r in enumerate("aab")]))
    store.append("audit", to_table([_act("1", "erase"), _act("1", "erase"), _act("2", "export")]))


def _promotion(version: int) -> PromotionRow:
    return PromotionRow(
        promotion_id=f"p{version}",
        policy="assistant",
        version=version,
        from_version=version - 1 or None,
        action="bootstrap" if version == 1 else "promote",
        reason="",
        actor="controller",
        pause_ms=None if version == 1 else 12.5,
        delta_bytes=None if version == 1 else 25,
        full_bytes=100,
        decided_at=after(version),
        ingest_date=DAY1,
    )


def _dead_letter(offset: int, reason: str) -> DeadLetterRow:
    return DeadLetterRow(
        topic="t",
        partition=0,
        offset=offset,
        reason=reason,
        payload=b"x",
        ingested_at=after(offset),
        ingest_date=DAY1,
    )


def _act(audit_id: str, action: str) -> AuditRow:
    return AuditRow(
        audit_id=audit_id,
        actor="me",
        action=action,
        subject="u",
        acted_at=NOON,
        ingest_date=DAY1,
    )


ANSWERS: dict[str, list[tuple[object, ...]]] = {
    "Accept rate per version and day": [
        (1, DAY1, 0.75, 4),  # a1 yes, a2 no, b1 yes, c1's second answer yes
        (2, DAY1, 1.0, 1),
        (2, DAY2, 1.0, 1),
    ],
    # accepted: 30, 120, 60, 600, 6000, 60, 60 and the half of a1 after 60 s; stars: 60 s.
    "Delay of feedback": [
        ("accepted", 9, 60.0, pytest.approx(1680.0), 6000.0),
        ("stars", 1, 60.0, 60.0, 60.0),
    ],
    "Outcomes of feedback": [
        ("counts", 6),
        ("demonstration", 1),
        ("invalid_value", 1),
        ("other_metric", 1),
        ("too_late", 1),
    ],
    "Late feedback": [("accepted", 1, 0), ("stars", 0, 0)],
    # On the first day 7 completions, labelled a1, a2, a3, b1, c1:1.
    "Share of labelled completions per day": [(DAY1, 7, 5 / 7), (DAY2, 2, 0.5)],
    # s1 has 4 requests, s2 and s3 one each; s4 and s5 one each.
    "Growth of sessions": [(DAY1, 3, 2.0, None), (DAY2, 2, 1.0, -1.0)],
    "The longest sessions": [
        ("acme", "s1", 4, 9, timedelta(minutes=3), pytest.approx(2 / 3)),
        ("globex", "s3", 1, 3, timedelta(0), 1.0),
        ("acme", "s2", 1, 2, timedelta(0), 1.0),
    ],
    "Forks per session": [("acme", "s1", 1)],
    # Labelled, trainable and consented: a1, a2, c1:1 of version 1, a3, d1 of version 2.
    "Staleness of labelled completions": [(0, 2, 0.4), (1, 3, 0.6)],
    "Token share per tenant": [("acme", 13, 13 / 18), ("globex", 5, 5 / 18)],
    # Of acme's four on the first day that may count, ann gave 3 and bob gave f5 and f8: 3 of 5.
    "Suspicious users and sources": [("acme", "user_share", "ann", DAY1, 3, 0.6)],
    "Reward by arm": [
        ("canary", 1, 1.0, None),
        # 1, 0, 1, 1, 1: variance 0.2, so sqrt(0.2 / 5)
        ("champion", 5, 0.8, pytest.approx(0.2)),
    ],
    "Time to first token per version": [
        (1, 2, 20.0, pytest.approx(29.0)),
        (2, 1, 50.0, 50.0),
    ],
    "Why completions cannot be trained on": [("consent is log", 1), ("top_p < 1", 1)],
    "Dead letters by reason": [("t", "a", 2, after(1)), ("t", "b", 1, after(2))],
    "Demonstrations per version": [(1, 1, after(4))],
    # Version 1: a1 2, a2 2, a2b 2 of 4 tokens, c1 2 + 1, all -0.5; version 2: a3 -2, c2, d1.
    "Drift of logprobs per version": [
        (1, 11, -0.5, pytest.approx(math.exp(0.5))),
        (2, 5, pytest.approx(-0.8), pytest.approx(math.exp(0.8))),
    ],
    "Timeline of promotions": [
        (after(1), "bootstrap", None, 1, "controller", None, None),
        (after(2), "promote", 1, 2, "controller", 12.5, 0.25),
    ],
    "Acts on data: erasures, exports, snapshots": [("erase", 1, NOON), ("export", 1, NOON)],
    # Prompts: a1 3, a2 6, a2b 7, a3 9, b1 c1 c2 d1 3 each; logged 3, 1, 2, 1 and 3 each.
    # Segments: a1-a2-a3 of 10, a2b of 11, c1 twice, 5 and 4, d1 5; b1 and c2 are none.
    # Sampled: 2 + 2 + 1, 3 of 4, 2, 1, 2.
    "Tokens saved by the log": [(37, 19, 35, 13)],
    "How answers end": [(1, "length", 1), (1, "stop", 5), (2, "stop", 3)],
    "Consent by tenant": [("acme", "train", 6), ("globex", "log", 1), ("globex", "train", 1)],
    "Tokens hidden by scrubbing": [(1, 1, 9)],
}


@pytest.fixture(scope="module")
def connection(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[duckdb.DuckDBPyConnection]:
    store = DeltaStore(str(tmp_path_factory.mktemp("tables")))
    store.create()
    fill(store)
    with connect(store, rewards=REWARDS, as_of=NOON + timedelta(days=9)) as connection:
        yield connection


@pytest.mark.parametrize("title", QUESTIONS)
def test_a_question_has_one_query_and_this_answer(
    connection: duckdb.DuckDBPyConnection, title: str
) -> None:
    (sql,) = QUESTIONS[title]

    assert connection.execute(sql).fetchall() == ANSWERS[title]


def test_there_are_at_least_twenty_questions() -> None:
    assert len(QUESTIONS) >= 20
    assert set(QUESTIONS) == set(ANSWERS)
