"""Synthetic rollouts and feedback that resemble production, in bulk.

Token ids are drawn independently from a Zipf-Mandelbrot law over SmolLM2's 49,152 ids, so they
compress worse than real text. Logprobs resemble those of a sharp chat model: three of five tokens
are nearly certain (log-normal around -e^-6), the others are exponential with mean 1.2 nats.
Identifiers have as many random bits as UUIDv7.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from onlinerl.rollout_store.schema import FeedbackRow, InteractionRow
from onlinerl.rollout_store.tables.rows import schema_of

VOCABULARY = 49_152
START = datetime(2026, 1, 5, tzinfo=UTC)

_RANKS = np.arange(1, VOCABULARY + 1)
_CUMULATIVE = np.cumsum(1 / (_RANKS + 2.7))
_CUMULATIVE /= _CUMULATIVE[-1]


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Requests of many sessions; those of a session follow each other."""

    interaction_ids: NDArray[np.str_]
    session_ids: NDArray[np.str_]
    num_prompt: NDArray[np.int64]
    """New prompt tokens of each turn."""
    num_sampled: NDArray[np.int64]
    """Sampled tokens of each turn."""
    turn: NDArray[np.int64]
    """Number of the turn within its session, from 0."""
    prefix_length: NDArray[np.int64]
    """Tokens of the session before each turn."""
    served_at: NDArray[np.datetime64]


def random_ids(random: np.random.Generator, count: int, *, first: int = 0) -> NDArray[np.str_]:
    """Ids like UUIDv7: a time, then 74 random bits."""
    bits = random.integers(0, 1 << 37, (count, 2))
    return np.array(
        [
            f"{0x019B8C000000 + first + n:012x}-{int(a):010x}-{int(b):010x}"
            for n, (a, b) in enumerate(bits)
        ]
    )


def token_ids(random: np.random.Generator, count: int) -> NDArray[np.int32]:
    """Token ids by Zipf-Mandelbrot frequency; frequent ids are scattered over the vocabulary."""
    scatter = np.random.default_rng(7).permutation(VOCABULARY).astype(np.int32)
    ranks = np.searchsorted(_CUMULATIVE, random.random(count), side="right")
    return np.asarray(scatter[ranks], dtype=np.int32)


def logprobs(random: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Logprobs of sampled tokens, nats."""
    sure = -random.lognormal(-6.0, 2.5, count)
    unsure = -random.exponential(1.2, count)
    drawn = np.where(random.random(count) < 0.6, sure, unsure)
    return np.asarray(np.maximum(drawn, -20.0), dtype=np.float32)


def make_turns(
    random: np.random.Generator,
    *,
    num_sessions: int,
    turns: int,
    first_prompt: int = 300,
    prompt: int = 60,
    sampled: int = 200,
    first: int = 0,
    start: datetime = START,
) -> Turns:
    """Sessions of `turns` requests; numbers of tokens vary by half around the given means."""
    count = num_sessions * turns
    turn = np.tile(np.arange(turns), num_sessions)
    num_prompt = random.integers(prompt // 2, prompt * 3 // 2 + 1, count)
    num_prompt[turn == 0] += first_prompt
    num_sampled = random.integers(sampled // 2, sampled * 3 // 2 + 1, count)
    both = (num_prompt + num_sampled).reshape(num_sessions, turns)
    before = np.cumsum(both, axis=1) - both
    seconds = np.arange(count) * 5
    return Turns(
        interaction_ids=random_ids(random, count, first=first),
        session_ids=np.repeat(random_ids(random, num_sessions, first=first), turns),
        num_prompt=num_prompt,
        num_sampled=num_sampled,
        turn=turn,
        prefix_length=before.reshape(-1),
        served_at=np.datetime64(start.replace(tzinfo=None), "us")
        + seconds.astype("timedelta64[s]"),
    )


def interactions_table(
    random: np.random.Generator, turns: Turns, *, ingest_day: datetime
) -> pa.Table:
    """The turns as rows of the table `interactions`."""
    count = len(turns.turn)
    parents = _null_where(turns.turn == 0, np.roll(turns.interaction_ids, 1))
    num_sampled = int(turns.num_sampled.sum())
    columns: dict[str, object] = {
        "interaction_id": turns.interaction_ids,
        "session_id": turns.session_ids,
        "parent_id": parents,
        "prefix_length": turns.prefix_length,
        "prompt_token_ids": _lists(
            token_ids(random, int(turns.num_prompt.sum())), turns.num_prompt, pa.int32()
        ),
        "completion_token_ids": _lists(
            token_ids(random, num_sampled), turns.num_sampled, pa.int32()
        ),
        "logprobs": _lists(logprobs(random, num_sampled), turns.num_sampled, pa.float32()),
        "version_spans": [
            [{"version": "assistant/12", "start": 0, "end": int(n)}] for n in turns.num_sampled
        ],
        "user": random_ids(np.random.default_rng(3), 1_000)[random.integers(0, 1_000, count)],
        "served_at": turns.served_at,
        "ttft_ms": random.lognormal(4, 0.5, count),
        "latency_ms": random.lognormal(7, 0.5, count),
        "offset": np.arange(count),
        "ingested_at": turns.served_at + np.timedelta64(2, "s"),
    }
    return _table(InteractionRow, columns, _INTERACTION | {"ingest_date": ingest_day.date()}, count)


def feedback_table(
    random: np.random.Generator, turns: Turns, *, num_rows: int, ingest_day: datetime
) -> pa.Table:
    """Feedback on the turns by users, judges and verifiers; one row in ten is about a session."""
    target = random.integers(0, len(turns.turn), num_rows)
    about_session = random.random(num_rows) < 0.1
    given = turns.served_at[target] + random.integers(1, 3_000, num_rows).astype("timedelta64[s]")
    columns: dict[str, object] = {
        "feedback_id": random_ids(random, num_rows, first=1 << 40),
        "interaction_id": _null_where(about_session, turns.interaction_ids[target]),
        "session_id": _null_where(~about_session, turns.session_ids[target]),
        "metric": np.array(["accepted", "stars"])[random.integers(0, 2, num_rows)],
        "value": random.integers(0, 2, num_rows).astype(np.float64),
        "source": np.array(["user", "judge", "verifier"])[random.integers(0, 3, num_rows)],
        "user": random_ids(np.random.default_rng(3), 1_000)[random.integers(0, 1_000, num_rows)],
        "given_at": given,
        "offset": np.arange(num_rows),
        "ingested_at": given + np.timedelta64(2, "s"),
    }
    return _table(FeedbackRow, columns, _FEEDBACK | {"ingest_date": ingest_day.date()}, num_rows)


_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 512, "seed": None}
_INTERACTION: dict[str, object] = {
    "parent_choice": 0,
    "policy": "assistant",
    "arm": "champion",
    "protocol": "openai.chat",
    "streamed": True,
    "sampling": _SAMPLING | {"stop": []},
    "logprob_mode": "processed",
    "renderer": {"name": "chatml", "hash": "5d41402abc4b2a76"},
    "tenant": "acme",
    "consent": "train",
    "trainable": True,
    "tags": [],
    "choice_index": 0,
    "finish_reason": "stop",
    "topic": "onlinerl.interactions",
    "partition": 0,
    "policy_version": 12,
}
_FEEDBACK: dict[str, object] = {
    "tenant": "acme",
    "consent": "train",
    "tags": [],
    "topic": "onlinerl.feedback",
    "partition": 0,
}


def _table(
    row_type: type[InteractionRow] | type[FeedbackRow],
    columns: dict[str, object],
    constants: dict[str, object],
    count: int,
) -> pa.Table:
    arrays = []
    for field in schema_of(row_type):
        if field.name in columns:
            values = columns[field.name]
            arrays.append(
                values.cast(field.type)
                if isinstance(values, pa.Array)
                else pa.array(values, field.type, from_pandas=True)
            )
        else:
            one = pa.array([constants.get(field.name)], field.type)
            arrays.append(one.take(pa.array(np.zeros(count, np.int64))))
    return pa.Table.from_arrays(arrays, schema=schema_of(row_type))


def _lists(
    values: NDArray[np.int32] | NDArray[np.float32],
    lengths: NDArray[np.int64],
    kind: pa.DataType,
) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    element = pa.field("element", kind, nullable=False)
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(values, kind), type=pa.list_(element)
    )


def _null_where(missing: NDArray[np.bool_], values: NDArray[np.str_]) -> pa.Array:
    return pa.array(values, pa.string(), mask=missing)


def batches(table: pa.Table, size: int) -> Sequence[pa.Table]:
    """The table in slices of at most `size` rows, as ingest commits them."""
    return [table.slice(at, size) for at in range(0, table.num_rows, size)]


def days_after(days: int) -> datetime:
    """The time `days` after the start of the synthetic data."""
    return START + timedelta(days=days)
