-- One row per session.
CREATE VIEW sessions AS
SELECT i.session_id, i.tenant,
    count(DISTINCT i.interaction_id) AS num_interactions,
    count(*) AS num_completions,
    sum(len(i.completion_token_ids))::BIGINT AS num_tokens,
    min(i.served_at) AS first_at,
    max(i.served_at) AS last_at,
    count(r.reward) AS num_labelled,
    avg(r.reward) AS reward
FROM interactions AS i
LEFT JOIN rewards AS r ON r.interaction_id = i.interaction_id
    AND r.choice_index = i.choice_index AND r.tenant = i.tenant
WHERE i.arm <> 'shadow'
GROUP BY i.session_id, i.tenant
