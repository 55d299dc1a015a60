"""The rows of each export format, and the queries that they are made from.

A row is a dictionary: first the columns that readers of the format expect, then the origin of the
row. Nothing here reads or writes files.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from onlinerl.rollout_store.export import columns as schema
from onlinerl.rollout_store.export.text import Decoder, answer_of, messages_of, text_of

Format = Literal["chat", "trl-sft", "trl-kto", "trl-dpo", "verl", "tokens"]
Row = dict[str, Any]
Source = Mapping[str, Any]
"""A row of one of the queries below."""

_COMPLETIONS = """
SELECT i.interaction_id, i.choice_index, i.session_id, i.tenant, i.consent, i.policy,
    i.policy_version, i.served_at, p.full_prompt_token_ids AS prompt_ids,
    p.masked AS prompt_masked, i.completion_token_ids AS ids,
    masked_tokens(i.completion_token_ids, i.mask_spans) AS masked, r.reward
FROM interactions AS i
SEMI JOIN scope_ids AS o ON o.interaction_id = i.interaction_id AND o.tenant = i.tenant
JOIN prompts AS p ON p.interaction_id = i.interaction_id AND p.tenant = i.tenant
LEFT JOIN rewards AS r ON r.interaction_id = i.interaction_id AND r.tenant = i.tenant
    AND r.choice_index = i.choice_index
WHERE i.trainable AND i.arm <> 'shadow' AND len(i.completion_token_ids) > 0
"""
_CONSENTED = " AND i.consent = 'train' AND p.consented"
_ORDER = " ORDER BY i.served_at, i.interaction_id, i.choice_index"

COMPLETIONS = _COMPLETIONS + _CONSENTED + _ORDER
LOGGED_COMPLETIONS = _COMPLETIONS + " AND i.consent IN ('log', 'train')" + _ORDER

LABELLED = _COMPLETIONS + _CONSENTED + " AND r.reward IS NOT NULL" + _ORDER

DEMONSTRATIONS = f"""
SELECT c.*, d.feedback_id, d.demonstration FROM demonstrations AS d
JOIN ({COMPLETIONS}) AS c USING (interaction_id, tenant)
QUALIFY row_number() OVER (PARTITION BY d.tenant, d.feedback_id
    ORDER BY c.reward NULLS FIRST, c.choice_index) = 1
ORDER BY c.served_at, c.interaction_id, d.feedback_id
"""
"""Each demonstration with the worst answer that was served instead."""

RANKED = f"""
SELECT best.*, worst.choice_index AS worst_choice, worst.ids AS worst_ids,
    worst.masked AS worst_masked, worst.reward AS worst_reward
FROM (FROM ({LABELLED}) QUALIFY row_number() OVER (
    PARTITION BY tenant, interaction_id ORDER BY reward DESC, choice_index) = 1) AS best
JOIN (FROM ({LABELLED}) QUALIFY row_number() OVER (
    PARTITION BY tenant, interaction_id ORDER BY reward, choice_index) = 1) AS worst
    USING (tenant, interaction_id)
WHERE worst.reward < best.reward
ORDER BY best.served_at, best.interaction_id
"""
"""The best and the worst of several answers to one prompt."""

SEGMENTS = """
SELECT s.segment_id, s.session_id, s.tenant, s.policy, s.temperature, s.token_ids, s.logprobs,
    s.loss_mask, s.masked, list_transform(s.spans, lambda span: {
        interaction_id: span.interaction_id, choice_index: span.choice_index, start: span.start,
        "end": span."end"}) AS spans
FROM segments AS s
SEMI JOIN scope_ids AS o ON o.tenant = s.tenant
    AND o.interaction_id = s.spans[1].interaction_id
ORDER BY s.segment_id
"""
"""A segment belongs to the window in which its first completion was served."""

REWARDS = "SELECT interaction_id, choice_index, tenant, reward FROM rewards"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One export format."""

    queries: tuple[str, ...]
    make: Callable[[Source, Decoder], Row | None]
    """Makes a row; None when the format cannot hold it."""
    schema: pa.Schema
    about: str
    """A description for the dataset card."""


def _origin(source: Source) -> Row:
    demonstrated = source.get("demonstration") is not None
    return {
        "interaction_id": source["interaction_id"],
        "choice_index": source["choice_index"],
        "session_id": source["session_id"],
        "policy_version": source["policy_version"],
        "served_at": source["served_at"].isoformat(),
        "reward": source["reward"],
        "origin": "demonstration" if demonstrated else "served",
    }


def _prompt(source: Source, decoder: Decoder) -> str:
    return text_of(decoder, source["prompt_ids"], source["prompt_masked"])


def _completion(source: Source, decoder: Decoder) -> str:
    return text_of(decoder, source["ids"], source["masked"])


def _chat(source: Source, decoder: Decoder) -> Row | None:
    prompt, completion = _prompt(source, decoder), _completion(source, decoder)
    messages = messages_of(prompt)
    if messages is None:
        return None
    answer = {"role": "assistant", "content": answer_of(completion)}
    return {"messages": [*messages, answer], "consent": source["consent"], **_origin(source)}


def _sft(source: Source, decoder: Decoder) -> Row | None:
    shown = source.get("demonstration") or _completion(source, decoder)
    return {"prompt": _prompt(source, decoder), "completion": shown, **_origin(source)}


def _dpo(source: Source, decoder: Decoder) -> Row | None:
    if source.get("demonstration") is not None:
        chosen, rejected = source["demonstration"], _completion(source, decoder)
    else:
        chosen = _completion(source, decoder)
        rejected = text_of(decoder, source["worst_ids"], source["worst_masked"])
    if chosen == rejected:
        return None
    return {
        "prompt": _prompt(source, decoder),
        "chosen": chosen,
        "rejected": rejected,
        **_origin(source),
    }


def _verl(source: Source, decoder: Decoder) -> Row | None:
    messages = messages_of(_prompt(source, decoder))
    if messages is None:
        return None
    answer = answer_of(_completion(source, decoder))
    return {
        "data_source": f"onlinerl/{source['policy']}",
        "prompt": messages,
        "ability": "chat",
        "reward_model": {"style": "rule", "ground_truth": source.get("demonstration") or answer},
        "extra_info": {"split": "train", "answer": answer, **_origin(source)},
    }


def kto(boundary: float) -> Callable[[Source, Decoder], Row | None]:
    """Makes rows that are labelled true above the boundary; rows at the boundary are left out."""

    def make(source: Source, decoder: Decoder) -> Row | None:
        row = _sft(source, decoder)
        if row is None or source["reward"] == boundary:
            return None
        label = {"label": source["reward"] > boundary}
        return {"prompt": row.pop("prompt"), "completion": row.pop("completion"), **label, **row}

    return make


def tokens(rewards: Mapping[tuple[str, str, int], float]) -> Callable[[Source, Decoder], Row]:
    """Makes training sequences with the rewards of their completions; hidden ids become 0.

    Args:
        rewards: Rewards by tenant, interaction id and choice index.
    """

    def make(source: Source, _: Decoder) -> Row:
        pairs = zip(source["token_ids"], source["masked"], strict=True)
        spans = [
            {**span, "reward": rewards.get((source["tenant"], *_key(span)))}
            for span in source["spans"]
        ]
        return {
            "input_ids": [0 if hidden else token for token, hidden in pairs],
            "completion_mask": source["loss_mask"],
            "logprobs": source["logprobs"],
            "spans": spans,
            **{name: source[name] for name in ("segment_id", "session_id", "temperature")},
        }

    return make


def _key(span: Mapping[str, Any]) -> tuple[str, int]:
    return span["interaction_id"], span["choice_index"]


_SHAPES: dict[Format, Shape] = {
    "chat": Shape(
        queries=(COMPLETIONS,),
        make=_chat,
        schema=schema.CHAT,
        about="conversations as `messages`",
    ),
    "trl-sft": Shape(
        queries=(COMPLETIONS, DEMONSTRATIONS),
        make=_sft,
        schema=schema.SFT,
        about="prompt and completion, for supervised training with TRL",
    ),
    "trl-kto": Shape(
        queries=(LABELLED,),
        make=kto(0.0),
        schema=schema.KTO,
        about="prompt, completion and a yes or no, for KTO with TRL",
    ),
    "trl-dpo": Shape(
        queries=(RANKED, DEMONSTRATIONS),
        make=_dpo,
        schema=schema.DPO,
        about="prompt, a better and a worse answer, for DPO with TRL",
    ),
    "verl": Shape(
        queries=(LABELLED, DEMONSTRATIONS),
        make=_verl,
        schema=schema.VERL,
        about="prompts with a reference answer, for verl",
    ),
    "tokens": Shape(
        queries=(SEGMENTS,),
        make=tokens({}),
        schema=schema.TOKENS,
        about="training sequences as token ids",
    ),
}


def shape_of(format: Format, *, include_log: bool, boundary: float) -> Shape:
    """The shape of a format.

    The shape of `tokens` has no rewards yet, because they differ between runs; see `tokens`.
    """
    shape = _SHAPES[format]
    if format == "trl-kto":
        return dataclasses.replace(shape, make=kto(boundary))
    if include_log:
        return dataclasses.replace(shape, queries=(LOGGED_COMPLETIONS,))
    return shape
