-- From feedback to one number per completion.
CREATE VIEW rewards AS
WITH $rules,
turns AS MATERIALIZED (SELECT row_number() OVER () AS turn_no, * FROM reward_turns),
signals AS MATERIALIZED (
    SELECT tenant, interaction_id, session_id, choice_index, rule_no, number, influence, given_at,
        row_number() OVER (ORDER BY given_at, feedback_id) AS order_no
    FROM feedback_signals WHERE unused_because IS NULL
),
moments AS (
    SELECT tenant, session_id, served_at, max(turn) AS turn FROM turns WHERE turn IS NOT NULL
    GROUP BY tenant, session_id, served_at
),
of_sessions AS (
    SELECT f.*, m.turn AS last_turn FROM signals AS f ASOF JOIN moments AS m
        ON m.session_id = f.session_id AND m.tenant = f.tenant AND m.served_at <= f.given_at
),
applied AS (
    SELECT t.turn_no, false AS of_session, 1.0::DOUBLE AS discount,
        f.rule_no, f.number, f.influence, f.given_at, f.order_no
    FROM signals AS f JOIN turns AS t
        ON t.interaction_id = f.interaction_id AND t.tenant = f.tenant
        AND (f.choice_index IS NULL OR f.choice_index = t.choice_index)
    WHERE $in_time
    UNION ALL
    SELECT t.turn_no, true, pow($session_discount, f.last_turn - t.turn),
        f.rule_no, f.number, f.influence, f.given_at, f.order_no
    FROM of_sessions AS f JOIN turns AS t
        ON t.session_id = f.session_id AND t.tenant = f.tenant AND t.turn <= f.last_turn
    WHERE $in_time
),
by_source AS (
    SELECT turn_no, of_session, rule_no,
        $aggregated_value AS "value",
        $aggregated_discount AS discount,
        count(*) AS num_feedback, sum(influence) AS influence, max(given_at) AS labelled_at,
        min(given_at) AS first_at
    FROM applied GROUP BY turn_no, of_session, rule_no
),
by_metric AS (
    SELECT s.turn_no, r.metric_no,
        any_value(r.weight)
            * sum(r.source_weight * (r.scale * s."value" + r."offset" * s.discount))
            / sum(r.source_weight) AS signal,
        sum(s.num_feedback) AS num_feedback, sum(s.influence) AS influence,
        max(s.labelled_at) AS labelled_at, min(s.first_at) FILTER (r.is_final) AS final_at
    FROM by_source AS s JOIN rules AS r USING (rule_no)
    GROUP BY s.turn_no, s.of_session, r.metric_no
)$defaults,
by_turn AS (
    SELECT turn_no, sum(signal) AS signal, sum(num_feedback)::BIGINT AS num_feedback,
        sum(influence) AS influence, max(labelled_at) AS labelled_at, min(final_at) AS final_at
    FROM $signals GROUP BY turn_no
)
SELECT t.interaction_id, t.choice_index, t.session_id, t.tenant,
    least(greatest(b.signal, $low), $high)::DOUBLE AS reward,
    coalesce(b.influence / nullif(b.num_feedback, 0), 1)::DOUBLE AS weight,
    b.num_feedback, b.labelled_at, least(b.final_at, $listed_at) AS matured_at
FROM by_turn AS b JOIN turns AS t USING (turn_no)
WHERE b.final_at IS NOT NULL OR $listed_at <= $as_of
