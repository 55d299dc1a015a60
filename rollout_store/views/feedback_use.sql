-- Every feedback, whether it counts, and how late it came.
CREATE VIEW feedback_use AS
WITH targets AS (
    SELECT f.tenant, f.feedback_id, f.given_at, t.served_at, $in_time AS in_time
    FROM feedback_signals AS f JOIN reward_turns AS t
        ON t.interaction_id = f.interaction_id AND t.tenant = f.tenant
        AND (f.choice_index IS NULL OR f.choice_index = t.choice_index)
    UNION ALL
    SELECT f.tenant, f.feedback_id, f.given_at, t.served_at, $in_time
    FROM feedback_signals AS f JOIN reward_turns AS t
        ON t.session_id = f.session_id AND t.tenant = f.tenant AND t.served_at <= f.given_at
        AND t.turn IS NOT NULL
),
reached AS (
    SELECT tenant, feedback_id, bool_or(in_time) AS in_time,
        (epoch_us(any_value(given_at)) - epoch_us(max(served_at))) / 1e6 AS delay_s
    FROM targets GROUP BY tenant, feedback_id
)
SELECT s.feedback_id, s.tenant, s.interaction_id, s.session_id, s.choice_index, s.metric, s.source,
    s."user", s."value", s.given_at,
    coalesce(s.unused_because, CASE WHEN r.in_time IS NULL THEN 'no_target'
        WHEN NOT r.in_time THEN 'too_late' ELSE 'counts' END) AS outcome,
    r.delay_s, s.influence
FROM feedback_signals AS s LEFT JOIN reached AS r USING (tenant, feedback_id)
