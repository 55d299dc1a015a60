-- Answers that should have been given, with their prompts.
CREATE VIEW demonstrations AS
WITH given AS (
    SELECT f.* FROM feedback AS f
    WHERE f.demonstration IS NOT NULL AND (f.consent IS NULL OR f.consent = 'train')
        AND NOT EXISTS (
            SELECT 1 FROM feedback AS r WHERE r.retracts = f.feedback_id AND r.tenant = f.tenant
        )
),
targets AS (
    SELECT f.feedback_id, f.tenant, f.interaction_id
    FROM given AS f WHERE f.interaction_id IS NOT NULL
    UNION ALL
    SELECT f.feedback_id, f.tenant, arg_max(i.interaction_id, (i.served_at, i.interaction_id))
    FROM given AS f JOIN reward_turns AS i
        ON i.session_id = f.session_id AND i.tenant = f.tenant AND i.served_at <= f.given_at
        AND i.turn IS NOT NULL
    GROUP BY f.feedback_id, f.tenant
)
SELECT f.feedback_id, t.interaction_id, p.session_id, f.tenant, f.metric, f.source, f.given_at,
    f.demonstration, p.full_prompt_token_ids, p.masked
FROM targets AS t JOIN given AS f USING (feedback_id, tenant)
JOIN prompts AS p ON p.interaction_id = t.interaction_id AND p.tenant = t.tenant
WHERE p.consented
