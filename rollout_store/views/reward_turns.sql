-- Internal: completions without their tokens, and the place of each in its session. The answer of a
-- shadow has no turn: no user saw it, so feedback on the session does not judge it. Turns are
-- ordered by time; ids only order equal times, so that every reader gets the same order.
CREATE VIEW reward_turns AS
SELECT interaction_id, choice_index, tenant, session_id, served_at,
    CASE WHEN arm <> 'shadow' THEN dense_rank() OVER (
        PARTITION BY tenant, session_id, arm = 'shadow' ORDER BY served_at, interaction_id
    ) END AS turn
FROM interactions
