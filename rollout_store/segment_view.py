"""The views `prompts` and `segments`: whole prompts, and training sequences.

An event does not repeat the tokens that its prompt shares with its parent. `prompts` puts them
back. `segments` merges interactions whose prompt is exactly the parent's prompt and completion plus
something new, so that a conversation is one sequence and every sampled token is in exactly one
segment with mask 1.

Only completions that may be trained on are sampled tokens of a segment: `trainable`, with consent
`train` for themselves and for every interaction their prompt was built from. The walk over parents
carries lengths and ids, never tokens; tokens are read once, at the end.
"""

PROMPT_PIECES_VIEW = """
CREATE VIEW prompt_pieces AS
WITH RECURSIVE turns AS MATERIALIZED (
    SELECT interaction_id, tenant, any_value(parent_id) AS parent_id,
        any_value(parent_choice) AS parent_choice, any_value(prefix_length) AS prefix_length,
        any_value(len(prompt_token_ids)) AS num_new, bool_and(consent = 'train') AS consented
    FROM interactions GROUP BY interaction_id, tenant
),
answers AS MATERIALIZED (
    SELECT interaction_id, tenant, choice_index, len(completion_token_ids) AS num_sampled
    FROM interactions
),
walk AS (
    SELECT interaction_id, tenant, consented, num_new AS prompt_length,
        0::BIGINT AS num_before,
        [{interaction_id: interaction_id, choice_index: -1::BIGINT, start: 0::BIGINT,
          length: num_new::BIGINT}] AS pieces
    FROM turns WHERE parent_id IS NULL AND prefix_length = 0
    UNION ALL
    SELECT t.interaction_id, t.tenant, t.consented AND w.consented,
        t.prefix_length + t.num_new,
        w.prompt_length + a.num_sampled,
        list_append(
            list_transform(
                list_filter(
                    list_append(w.pieces, {interaction_id: w.interaction_id,
                        choice_index: a.choice_index, start: w.prompt_length::BIGINT,
                        length: a.num_sampled::BIGINT}),
                    lambda piece: piece.start < t.prefix_length
                ),
                lambda piece: {interaction_id: piece.interaction_id,
                    choice_index: piece.choice_index, start: piece.start,
                    length: least(piece.length, t.prefix_length - piece.start)}
            ),
            {interaction_id: t.interaction_id, choice_index: -1::BIGINT,
             start: t.prefix_length::BIGINT, length: t.num_new::BIGINT}
        )
    FROM walk AS w
    JOIN turns AS t ON t.parent_id = w.interaction_id AND t.tenant = w.tenant
    JOIN answers AS a ON a.interaction_id = w.interaction_id AND a.tenant = w.tenant
        AND a.choice_index = t.parent_choice
    WHERE t.prefix_length <= w.prompt_length + a.num_sampled
)
SELECT * FROM walk
"""
"""Internal: per resolvable prompt its pieces, in order, and how many tokens the parent gave."""

_PIECE_TOKENS = """
    SELECT interaction_id, tenant, -1 AS choice_index, any_value(prompt_token_ids) AS token_ids,
        NULL::FLOAT[] AS logprobs
    FROM interactions GROUP BY interaction_id, tenant
    UNION ALL
    SELECT interaction_id, tenant, choice_index, completion_token_ids, logprobs
    FROM interactions
"""

PROMPTS_VIEW = f"""
CREATE VIEW prompts AS
WITH tokens AS ({_PIECE_TOKENS}),
pieces AS (SELECT interaction_id, tenant, unnest(pieces) AS piece FROM prompt_pieces)
SELECT p.interaction_id, p.tenant,
    flatten(list(t.token_ids[1:p.piece.length] ORDER BY p.piece.start))::INTEGER[]
        AS full_prompt_token_ids
FROM pieces AS p JOIN tokens AS t ON t.interaction_id = p.piece.interaction_id
    AND t.tenant = p.tenant AND t.choice_index = p.piece.choice_index
GROUP BY p.interaction_id, p.tenant
"""

SEGMENTS_VIEW = f"""
CREATE VIEW segments AS
WITH RECURSIVE prompts_built AS MATERIALIZED (SELECT * FROM prompt_pieces),
eligible AS MATERIALIZED (
    SELECT i.interaction_id, i.choice_index, i.tenant, i.session_id, i.policy, i.parent_id,
        i.parent_choice, i.prefix_length, i.logprob_mode, i.sampling.temperature AS temperature,
        i.served_at, p.prompt_length, p.num_before,
        len(i.completion_token_ids)::BIGINT AS num_sampled
    FROM interactions AS i JOIN prompts_built AS p USING (interaction_id, tenant)
    WHERE i.trainable AND p.consented AND len(i.completion_token_ids) > 0
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
heads AS (
    SELECT segment_id, tenant,
        any_value(session_id) AS session_id, any_value(policy) AS policy,
        any_value(temperature) AS temperature, any_value(logprob_mode) AS logprob_mode,
        sum(num_sampled)::BIGINT AS num_sampled,
        arg_max({{interaction_id: interaction_id, choice_index: choice_index,
                  start: prompt_length::BIGINT, length: num_sampled}}, prompt_length) AS leaf,
        list({{interaction_id: interaction_id, choice_index: choice_index,
               start: prompt_length::BIGINT, "end": (prompt_length + num_sampled)::BIGINT}}
             ORDER BY prompt_length) AS spans
    FROM spans GROUP BY segment_id, tenant
),
pieces AS (
    SELECT h.segment_id, h.tenant, unnest(list_append(p.pieces, h.leaf)) AS piece
    FROM heads AS h JOIN prompts_built AS p
        ON p.interaction_id = h.leaf.interaction_id AND p.tenant = h.tenant
),
tokens AS ({_PIECE_TOKENS}),
sampled AS (
    SELECT p.segment_id, p.tenant, p.piece.start AS start, p.piece.length AS length,
        t.token_ids, t.logprobs, s.segment_id IS NOT NULL AS is_sampled
    FROM pieces AS p JOIN tokens AS t ON t.interaction_id = p.piece.interaction_id
        AND t.tenant = p.tenant AND t.choice_index = p.piece.choice_index
    LEFT JOIN spans AS s ON s.segment_id = p.segment_id AND s.tenant = p.tenant
        AND s.interaction_id = p.piece.interaction_id AND s.choice_index = p.piece.choice_index
),
sequences AS (
    SELECT segment_id, tenant,
        flatten(list(token_ids[1:length] ORDER BY start))::INTEGER[] AS token_ids,
        flatten(list(CASE WHEN is_sampled THEN logprobs[1:length]
            ELSE list_resize([]::FLOAT[], length) END ORDER BY start))::FLOAT[] AS logprobs,
        flatten(list(list_resize([]::TINYINT[], length, is_sampled::TINYINT) ORDER BY start))
            ::TINYINT[] AS loss_mask
    FROM sampled GROUP BY segment_id, tenant
)
SELECT h.segment_id, h.session_id, h.tenant, h.policy, h.temperature, h.logprob_mode,
    s.token_ids, s.logprobs, s.loss_mask, h.spans, h.num_sampled
FROM heads AS h JOIN sequences AS s USING (segment_id, tenant)
"""
