"""The views `prompts` and `segments`: whole prompts, and training sequences.

An event does not repeat the tokens that its prompt shares with its parent. The view `prompts` puts
them back. The view `segments` merges interactions whose prompt is exactly the parent's prompt and
completion plus new tokens, so that a conversation becomes one sequence. Every sampled token is in
exactly one segment with mask 1.

Only completions that may be trained on count as sampled: they are `trainable`, and they and every
interaction in their prompt have consent `train`. Tokens that scrubbing masked stay in place, with
mask 0.
"""

from onlinerl.rollout_store.views.sql_files import read_sql

# Expressions over a row `p` of pieces and the row `i` of `interactions` that holds its tokens.
_PIECE_TOKENS = {
    "tokens": """(CASE WHEN p.piece.is_prompt THEN i.prompt_token_ids
            ELSE i.completion_token_ids END)[1:p.piece.length]""",
    "hidden": "(CASE WHEN p.piece.is_prompt THEN i.prompt_mask_spans ELSE i.mask_spans END)",
    "join_tokens": """JOIN interactions AS i ON i.interaction_id = p.piece.interaction_id
        AND i.tenant = p.tenant AND i.choice_index = p.piece.choice_index""",
}


def mask_macro() -> str:
    """`CREATE MACRO` for `masked_tokens`: per token 1 where scrubbing hides it, else 0."""
    return read_sql("masked_tokens")


def lengths_view(*, scoped: bool) -> str:
    """`CREATE VIEW` for the internal `lengths`: completions without their tokens.

    Args:
        scoped: Whether only the completions in the table `scope_trees` are wanted.
    """
    return read_sql("lengths", within=_in_scope("scope_trees", "interactions") if scoped else "")


def prompt_pieces_view() -> str:
    """`CREATE VIEW` for the internal `prompt_pieces`: of which pieces each prompt is made."""
    return read_sql("prompt_pieces", walk=read_sql("prompt_walk"))


def prompts_view(*, scoped: bool) -> str:
    """`CREATE VIEW` for `prompts`.

    Args:
        scoped: Whether only the prompts of interactions in the table `scope_ids` are wanted.
    """
    within = _in_scope("scope_ids", "p") if scoped else ""
    return read_sql("prompts", within=within, **_PIECE_TOKENS)


def segments_view(*, scoped: bool) -> str:
    """`CREATE VIEW` for `segments`.

    Args:
        scoped: Whether only segments with a completion in the table `scope_ids` are wanted.
    """
    within = f"""
        SEMI JOIN (SELECT DISTINCT s.segment_id, s.tenant
            FROM spans AS s {_in_scope("scope_ids", "s")}) AS inside
            ON inside.segment_id = spans.segment_id AND inside.tenant = spans.tenant"""
    return read_sql(
        "segments",
        walk=read_sql("prompt_walk"),
        within=within if scoped else "",
        **_PIECE_TOKENS,
    )


def _in_scope(scope: str, rows: str) -> str:
    return f"""SEMI JOIN {scope} AS o
    ON o.interaction_id = {rows}.interaction_id AND o.tenant = {rows}.tenant"""
