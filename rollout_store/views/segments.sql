-- Training sequences: chains of eligible completions in which each prompt extends the one before.
CREATE VIEW segments AS
WITH RECURSIVE rows_of AS MATERIALIZED (SELECT * FROM lengths),
$walk,
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
    -- Of several children, the first one continues the segment and the others start new ones. The
    -- ids only order equal times, so that every reader gets the same segments.
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
        arg_max({interaction_id: interaction_id, choice_index: choice_index,
                  is_prompt: false, start: prompt_length, length: num_tokens}, prompt_length)
            AS leaf,
        list({interaction_id: interaction_id, choice_index: choice_index,
               start: prompt_length, "end": prompt_length + num_tokens}
             ORDER BY prompt_length) AS spans
    FROM spans $within GROUP BY segment_id, tenant
),
pieces AS (
    SELECT h.segment_id, h.tenant, unnest(list_append(p.pieces, h.leaf)) AS piece
    FROM heads AS h JOIN prompts_built AS p
        ON p.interaction_id = h.leaf.interaction_id AND p.tenant = h.tenant
),
sampled AS (
    SELECT p.segment_id, p.tenant, p.piece.start AS start, p.piece.length AS length,
        $tokens AS token_ids, i.logprobs[1:p.piece.length] AS logprobs, $hidden AS hidden,
        s.segment_id IS NOT NULL AS is_sampled
    FROM pieces AS p $join_tokens
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
