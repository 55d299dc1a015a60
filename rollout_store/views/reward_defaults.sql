-- Common table expressions for metrics with a default: silence on a turn counts as that default.
, $silent,
all_signals AS (
    SELECT turn_no, signal, num_feedback, influence, labelled_at, final_at FROM by_metric
    UNION ALL
    SELECT t.turn_no, s.signal, 0, 0.0, NULL, NULL
    FROM turns AS t CROSS JOIN silent AS s
    ANTI JOIN by_metric AS b ON b.turn_no = t.turn_no AND b.metric_no = s.metric_no
    WHERE t.turn IS NOT NULL
)
