-- Whole prompts: the pieces of each prompt with their tokens, joined in order.
CREATE VIEW prompts AS
WITH built AS (SELECT p.* FROM prompt_pieces AS p $within),
pieces AS (SELECT interaction_id, tenant, unnest(pieces) AS piece FROM built),
filled AS (
    SELECT p.interaction_id, p.tenant, p.piece.start AS start, $tokens AS token_ids,
        $hidden AS hidden
    FROM pieces AS p $join_tokens
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
