-- Internal: the completions of the trees in scope, without their tokens.
CREATE VIEW lengths AS
SELECT interaction_id, choice_index, tenant, session_id, policy, parent_id, parent_choice,
    prefix_length, logprob_mode, sampling.temperature AS temperature, served_at, trainable,
    consent = 'train' AS consented, len(prompt_token_ids)::BIGINT AS num_new,
    len(completion_token_ids)::BIGINT AS num_tokens,
    (len(completion_token_ids) - CASE WHEN coalesce(len(mask_spans), 0) = 0 THEN 0 ELSE
        list_sum(masked_tokens(completion_token_ids, mask_spans)) END)::BIGINT AS num_sampled
FROM interactions $within
