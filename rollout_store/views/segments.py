"""The views `prompts` and `segments`: whole prompts, and training sequences.

An event does not repeat the tokens that its prompt shares with its parent. `prompts` puts them
back. `segments` merges interactions whose prompt is exactly the parent's prompt and completion plus
something new, so that a conversation is one sequence and every sampled token is in exactly one
segment with mask 1.

Only completions that may be trained on are sampled tokens of a segment: `trainable`, with consent
`train` for themselves and for every interaction their prompt was built from. Tokens that scrubbing
masked stay where they are, with mask 0. The walk over parents carries lengths and ids, never
tokens; tokens are read once, at the end.
"""

_MASKED = """list_transform(range(len({tokens})), lambda place: (len(list_filter({spans},
            lambda span: span.start <= place AND place < span."end")) > 0)::TINYINT)"""

MASK_MACROS = f"""
CREATE MACRO masked_tokens(tokens, spans) AS
    CASE WHEN coalesce(len(spans), 0) = 0 THEN list_resize([]::TINYINT[], len(tokens), 0::TINYINT)
    ELSE {_MASKED.format(tokens="tokens", spans="spans")} END
"""
"""Internal: per token 1 where scrubbing hides it."""


def lengths_view(*, scoped: bool) -> str:
    """`CREATE VIEW` for `lengths`, internal: completions of the trees in scope without tokens."""
    within = """SEMI JOIN scope_trees AS o
    ON o.interaction_id = interactions.interaction_id AND o.tenant = interactions.tenant"""
    return f"""
CREATE VIEW lengths AS
SELECT interaction_id, choice_index, tenant, session_id, policy, parent_id, parent_choice,
    prefix_length, logprob_mode, sampling.temperature AS temperature, served_at, trainable,
    consent = 'train' AS consented, len(prompt_token_ids)::BIGINT AS num_new,
    len(completion_token_ids)::BIGINT AS num_tokens,
    (len(completion_token_ids) - CASE WHEN coalesce(len(mask_spans), 0) = 0 THEN 0 ELSE
        list_sum(masked_tokens(completion_token_ids, mask_spans)) END)::BIGINT AS num_sampled
FROM interactions {within if scoped else ""}
"""


_PIECES = """turns AS MATERIALIZED (
    SELECT interaction_id, tenant, any_value(parent_id) AS parent_id,
        any_value(parent_choice) AS parent_choice, any_value(prefix_length) AS prefix_length,
        any_value(num_new) AS num_new, bool_and(consented) AS consented,
        min(choice_index) AS holder
    FROM rows_of GROUP BY interaction_id, tenant
),
walk AS (
    SELECT interaction_id, tenant, consented, num_new AS prompt_length,
        0::BIGINT AS num_before,
        [{interaction_id: interaction_id, choice_index: holder, is_prompt: true, start: 0::BIGINT,
          length: num_new}] AS pieces
    FROM turns WHERE parent_id IS NULL AND prefix_length = 0
    UNION ALL
    SELECT t.interaction_id, t.tenant, t.consented AND w.consented,
        t.prefix_length + t.num_new,
        w.prompt_length + a.num_tokens,
        list_append(
            list_transform(
                list_filter(
                    list_append(w.pieces, {interaction_id: w.interaction_id,
                        choice_index: a.choice_index, is_prompt: false, start: w.prompt_length,
                        length: a.num_tokens}),
                    lambda piece: piece.start < t.prefix_length
                ),
                lambda piece: {interaction_id: piece.interaction_id,
                    choice_index: piece.choice_index, is_prompt: piece.is_prompt,
                    start: piece.start, length: least(piece.length, t.prefix_length - piece.start)}
            ),
            {interaction_id: t.interaction_id, choice_index: t.holder, is_prompt: true,
             start: t.prefix_length, length: t.num_new}
        )
    FROM walk AS w
    JOIN turns AS t ON t.parent_id = w.interaction_id AND t.tenant = w.tenant
    JOIN rows_of AS a ON a.interaction_id = w.interaction_id AND a.tenant = w.tenant
        AND a.choice_index = t.parent_choice
    WHERE t.prefix_length <= w.prompt_length + a.num_tokens
)"""
"""Per resolvable prompt its pieces, in order, and how many tokens the parent gave."""

PROMPT_PIECES_VIEW = f"""
CREATE VIEW prompt_pieces AS
WITH RECURSIVE rows_of AS MATERIALIZED (SELECT * FROM lengths),
{_PIECES}
SELECT * FROM walk
"""
"""Internal."""

_JOIN_TOKENS = """JOIN interactions AS i ON i.interaction_id = p.piece.interaction_id
        AND i.tenant = p.tenant AND i.choice_index = p.piece.choice_index"""
_TOKENS = """(CASE WHEN p.piece.is_prompt THEN i.prompt_token_ids
            ELSE i.completion_token_ids END)[1:p.piece.length]"""
_HIDDEN = "(CASE WHEN p.piece.is_prompt THEN i.prompt_mask_spans ELSE i.mask_spans END)"

_SCOPED = """SEMI JOIN scope_ids AS o
    ON o.interaction_id = {0}.interaction_id AND o.tenant = {0}.tenant"""


def prompts_view(*, scoped: bool) -> str:
    """`CREATE VIEW` for `prompts`; where `scoped`, of the interactions in `scope_ids` only."""
    return f"""
CREATE VIEW prompts AS
WITH built AS (SELECT p.* FROM prompt_pieces AS p {_SCOPED.format("p") if scoped else ""}),
pieces AS (SELECT interaction_id, tenant, unnest(pieces) AS piece FROM built),
filled AS (
    SELECT p.interaction_id, p.tenant, p.piece.start AS start, {_TOKENS} AS token_ids,
        {_HIDDEN} AS hidden
    FROM pieces AS p {_JOIN_TOKENS}
),
whole AS (
    SELECT interaction_id, tenant,
        flatten(list(token_ids ORDER BY start))::INTEGER[] AS full_prompt_token_ids,
        flatten(list(masked_tokens(token_ids, hidden) ORDER BY start))::TINYINT[] AS masked
    FROM filled GROUP BY interaction_id, tenant
),
sessions_of AS (
    SELECT interaction_id, tenant, any_value(session_id) AS session_id
    FROM lengths GROUP BY interaction_id, tenant
)
SELECT w.interaction_id, w.tenant, s.session_id, b.consented, w.full_prompt_token_ids, w.masked
FROM whole AS w JOIN built AS b USING (interaction_id, tenant)
JOIN sessions_of AS s USING (interaction_id, tenant)
"""


def segments_view(*, scoped: bool) -> str:
    """`CREATE VIEW` for `segments`; where `scoped`, those with a completion in `scope_ids`."""
    within = f"""
        SEMI JOIN (SELECT DISTINCT s.segment_id, s.tenant FROM spans AS s {_SCOPED.format("s")})
            AS inside ON inside.segment_id = spans.segment_id AND inside.tenant = spans.tenant"""
    return f"""
CREATE VIEW segments AS
WITH RECURSIVE rows_of AS MATERIALIZED (SELECT * FROM lengths),
{_PIECES},
prompts_built AS MATERIALIZED (SELECT * FROM walk),
eligible AS MATERIALIZED (
    SELECT i.interaction_id, i.choice_index, i.tenant, i.session_id, i.policy, i.parent_id,
        i.parent_choice, i.prefix_length, i.logprob_mode, i.temperature, i.served_at,
        p.prompt_length, p.num_before, i.num_tokens, i.num_sampled
    FROM rows_of AS i JOIN prompts_built AS p USING (interaction_id, tenant)
    WHERE i.trainable AND p.consented AND i.num_sampled > 0
),
extensions AS MATERIALIZED (
    SELECT child.interaction_id, child.choice_index, child.tenant,
        parent.interaction_id AS parent_id, parent.choice_index AS parent_choice
    FROM eligible AS child JOIN eligible AS parent
        ON child.parent_id = parent.interaction_id AND child.tenant = parent.tenant
        AND child.parent_choice = parent.choice_index
    WHERE child.prefix_length = child.num_before AND child.session_id = parent.session_id
        AND child.policy = parent.policy AND child.logprob_mode = parent.logprob_mode
        AND child.temperature = parent.temperature
    QUALIFY row_number() OVER (
        PARTITION BY parent.interaction_id, parent.choice_index, parent.tenant
        ORDER BY child.served_at, child.interaction_id, child.choice_index
    ) = 1
),
members AS (
    SELECT e.interaction_id || ':' || e.choice_index AS segment_id, e.interaction_id,
        e.choice_index, e.tenant
    FROM eligible AS e ANTI JOIN extensions AS x ON x.interaction_id = e.interaction_id
        AND x.choice_index = e.choice_index AND x.tenant = e.tenant
    UNION ALL
    SELECT m.segment_id, x.interaction_id, x.choice_index, x.tenant
    FROM members AS m JOIN extensions AS x ON x.parent_id = m.interaction_id
        AND x.parent_choice = m.choice_index AND x.tenant = m.tenant
),
spans AS MATERIALIZED (
    SELECT m.segment_id, e.* FROM members AS m
    JOIN eligible AS e USING (interaction_id, choice_index, tenant)
),
heads AS MATERIALIZED (
    SELECT segment_id, tenant,
        any_value(session_id) AS session_id, any_value(policy) AS policy,
        any_value(temperature) AS temperature, any_value(logprob_mode) AS logprob_mode,
        sum(num_sampled)::BIGINT AS num_sampled,
        arg_max({{interaction_id: interaction_id, choice_index: choice_index,
                  is_prompt: false, start: prompt_length, length: num_tokens}}, prompt_length)
            AS leaf,
        list({{interaction_id: interaction_id, choice_index: choice_index,
               start: prompt_length, "end": prompt_length + num_tokens}}
             ORDER BY prompt_length) AS spans
    FROM spans {within if scoped else ""} GROUP BY segment_id, tenant
),
pieces AS (
    SELECT h.segment_id, h.tenant, unnest(list_append(p.pieces, h.leaf)) AS piece
    FROM heads AS h JOIN prompts_built AS p
        ON p.interaction_id = h.leaf.interaction_id AND p.tenant = h.tenant
),
sampled AS (
    SELECT p.segment_id, p.tenant, p.piece.start AS start, p.piece.length AS length,
        {_TOKENS} AS token_ids, i.logprobs[1:p.piece.length] AS logprobs, {_HIDDEN} AS hidden,
        s.segment_id IS NOT NULL AS is_sampled
    FROM pieces AS p {_JOIN_TOKENS}
    LEFT JOIN spans AS s ON s.segment_id = p.segment_id AND s.tenant = p.tenant
        AND s.interaction_id = p.piece.interaction_id AND s.choice_index = p.piece.choice_index
        AND NOT p.piece.is_prompt
),
sequences AS (
    SELECT segment_id, tenant,
        flatten(list(token_ids ORDER BY start))::INTEGER[] AS token_ids,
        flatten(list(CASE WHEN is_sampled THEN logprobs
            ELSE list_resize([]::FLOAT[], length) END ORDER BY start))::FLOAT[] AS logprobs,
        flatten(list(list_resize([]::TINYINT[], length, is_sampled::TINYINT) ORDER BY start))
            ::TINYINT[] AS sampled,
        flatten(list(masked_tokens(token_ids, hidden) ORDER BY start))::TINYINT[] AS masked,
        bool_or(coalesce(len(hidden), 0) > 0) AS hides
    FROM sampled GROUP BY segment_id, tenant
)
SELECT h.segment_id, h.session_id, h.tenant, h.policy, h.temperature, h.logprob_mode,
    s.token_ids,
    CASE WHEN hides THEN list_transform(s.logprobs, lambda logprob, place:
        CASE WHEN s.masked[place] = 0 THEN logprob END) ELSE s.logprobs END AS logprobs,
    CASE WHEN hides THEN list_transform(s.sampled, lambda bit, place:
        CASE WHEN s.masked[place] = 0 THEN bit ELSE 0::TINYINT END) ELSE s.sampled END AS loss_mask,
    s.masked, h.spans, h.num_sampled
FROM heads AS h JOIN sequences AS s USING (segment_id, tenant)
"""
