-- Common table expressions over `rows_of`: `walk` has, per prompt whose ancestors are all in the
-- tables, its pieces in order. `num_before` counts the tokens that come from the parent.
-- The walk over parents carries lengths and ids, never tokens.
turns AS MATERIALIZED (
    SELECT interaction_id, tenant, any_value(parent_id) AS parent_id,
        any_value(parent_choice) AS parent_choice, any_value(prefix_length) AS prefix_length,
        any_value(num_new) AS num_new, bool_and(consented) AS consented,
        min(choice_index) AS holder
    FROM rows_of GROUP BY interaction_id, tenant
),
walk AS (
    SELECT interaction_id, tenant, consented, num_new AS prompt_length,
        0::BIGINT AS num_before,
        [{interaction_id: interaction_id, choice_index: holder, is_prompt: true, start: 0::BIGINT,
          length: num_new}] AS pieces
    FROM turns WHERE parent_id IS NULL AND prefix_length = 0
    UNION ALL
    SELECT t.interaction_id, t.tenant, t.consented AND w.consented,
        t.prefix_length + t.num_new,
        w.prompt_length + a.num_tokens,
        list_append(
            list_transform(
                list_filter(
                    list_append(w.pieces, {interaction_id: w.interaction_id,
                        choice_index: a.choice_index, is_prompt: false, start: w.prompt_length,
                        length: a.num_tokens}),
                    lambda piece: piece.start < t.prefix_length
                ),
                lambda piece: {interaction_id: piece.interaction_id,
                    choice_index: piece.choice_index, is_prompt: piece.is_prompt,
                    start: piece.start, length: least(piece.length, t.prefix_length - piece.start)}
            ),
            {interaction_id: t.interaction_id, choice_index: t.holder, is_prompt: true,
             start: t.prefix_length, length: t.num_new}
        )
    FROM walk AS w
    JOIN turns AS t ON t.parent_id = w.interaction_id AND t.tenant = w.tenant
    JOIN rows_of AS a ON a.interaction_id = w.interaction_id AND a.tenant = w.tenant
        AND a.choice_index = t.parent_choice
    WHERE t.prefix_length <= w.prompt_length + a.num_tokens
)
