-- Internal: feedback as numbers. A row with `unused_because` counts nowhere.
CREATE VIEW feedback_signals AS
WITH $rules,
retracted AS (
    SELECT DISTINCT tenant, retracts AS feedback_id FROM feedback WHERE retracts IS NOT NULL
),
checked AS (
    SELECT f.feedback_id, f.tenant, f.interaction_id, f.session_id, f.choice_index, f.metric,
        f.source, f."user", f."value", f.given_at, r.rule_no,
        CASE WHEN r.threshold IS NULL THEN f."value"
            ELSE (f."value" >= r.passes_at)::INTEGER - r.threshold END AS number,
        CASE
            WHEN f."value" IS NULL AND f.demonstration IS NOT NULL THEN 'demonstration'
            WHEN f."value" IS NULL THEN 'retraction'
            WHEN r.metric IS NULL THEN 'other_metric'
            WHEN NOT isfinite(f."value") OR (r.is_bool AND f."value" NOT IN (0, 1))
                THEN 'invalid_value'
            WHEN x.feedback_id IS NOT NULL THEN 'retracted'
            WHEN f.consent <> 'train' THEN 'no_consent'
            WHEN r.source_weight = 0 THEN 'ignored_source'
        END AS unused_because
    FROM feedback AS f
    LEFT JOIN rules AS r ON r.metric = f.metric AND r.source = f.source
    LEFT JOIN retracted AS x ON x.feedback_id = f.feedback_id AND x.tenant = f.tenant
)
$influence
