"""Columns of exported rows by format: first those that readers expect, then the origin."""

import pyarrow as pa

_ORIGIN = [
    pa.field("interaction_id", pa.string()),
    pa.field("choice_index", pa.int64()),
    pa.field("session_id", pa.string()),
    pa.field("policy_version", pa.int64()),
    pa.field("served_at", pa.string()),
    pa.field("reward", pa.float64()),
    pa.field("origin", pa.string()),
]
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_SPAN = pa.struct(
    [
        ("interaction_id", pa.string()),
        ("choice_index", pa.int64()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("reward", pa.float64()),
    ]
)


def _text(*columns: str) -> list[pa.Field]:
    return [pa.field(name, pa.string()) for name in columns]


CHAT = pa.schema([pa.field("messages", _MESSAGES), *_text("consent"), *_ORIGIN])
SFT = pa.schema([*_text("prompt", "completion"), *_ORIGIN])
KTO = pa.schema([*_text("prompt", "completion"), pa.field("label", pa.bool_()), *_ORIGIN])
DPO = pa.schema([*_text("prompt", "chosen", "rejected"), *_ORIGIN])
VERL = pa.schema(
    [
        pa.field("data_source", pa.string()),
        pa.field("prompt", _MESSAGES),
        pa.field("ability", pa.string()),
        pa.field("reward_model", pa.struct(_text("style", "ground_truth"))),
        pa.field("extra_info", pa.struct([*_text("split", "answer"), *_ORIGIN])),
    ]
)
TOKENS = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("completion_mask", pa.list_(pa.int8())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("spans", pa.list_(_SPAN)),
        *_text("segment_id", "session_id"),
        pa.field("temperature", pa.float64()),
    ]
)
