-- Feedback in which one user or one source has a suspiciously large share.
CREATE VIEW suspicions AS
WITH live AS (
    SELECT tenant, feedback_id, interaction_id, session_id, choice_index, metric, source, "user",
        "value", given_at, $window AS window_start
    FROM feedback_signals WHERE unused_because IS NULL
),
totals AS (
    SELECT tenant, window_start, count(*) AS num_all FROM live GROUP BY tenant, window_start
),
shares AS (
    SELECT tenant, 'user_share' AS kind, "user" AS subject, window_start, count(*) AS num_feedback,
        $user_share AS bound
    FROM live WHERE "user" IS NOT NULL GROUP BY tenant, "user", window_start
    UNION ALL
    SELECT tenant, 'source_share', source, window_start, count(*), $source_share
    FROM live GROUP BY tenant, source, window_start
),
arrivals AS (
    SELECT *, count(*) OVER (
        PARTITION BY tenant, "user" ORDER BY given_at
        RANGE BETWEEN $burst_interval PRECEDING AND CURRENT ROW
    ) AS num_in_burst
    FROM live WHERE "user" IS NOT NULL
),
duplicates AS (
    SELECT tenant, "user", window_start, count(*) AS num_feedback
    FROM live WHERE "user" IS NOT NULL
    GROUP BY tenant, "user", window_start, interaction_id, session_id, choice_index, metric, source,
        "value"
    HAVING count(*) > 1
)
SELECT s.tenant, s.kind, s.subject, s.window_start, s.num_feedback,
    s.num_feedback / t.num_all AS share, s.bound
FROM shares AS s JOIN totals AS t USING (tenant, window_start)
WHERE t.num_all >= $min_feedback AND s.num_feedback / t.num_all > s.bound
UNION ALL
SELECT tenant, 'burst', "user", window_start, max(num_in_burst), NULL, $burst_feedback
FROM arrivals WHERE num_in_burst >= $burst_feedback GROUP BY tenant, "user", window_start
UNION ALL
SELECT tenant, 'duplicate', "user", window_start, sum(num_feedback)::BIGINT, NULL, 1
FROM duplicates GROUP BY tenant, "user", window_start
