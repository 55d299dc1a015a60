"""What the views and their columns are, for `docs/tables.md`; a test fails when they drift."""

VIEWS_ABOUT = {
    "rewards": "One row per completion that has feedback of a configured metric, in `[rewards]`. "
    "What has no row is unlabelled, which is not a reward of 0. Feedback counts only on "
    "interactions and sessions of its own `tenant`. See [rewards.md](rewards.md).",
    "sessions": "One row per conversation or agent run, without what a shadow answered.",
    "prompts": "The whole prompt of an interaction, with the tokens it shares with its parent. An "
    "interaction whose parent is not in the tables has no row.",
    "segments": "Training sequences. Interactions whose prompt is exactly the parent's prompt and "
    "completion plus something new are merged, if policy, session, temperature and logprob mode "
    "are the same. Every sampled token is in exactly one segment with mask 1. Only completions "
    "count that are `trainable` and whose own and all earlier interactions in the prompt have "
    "consent `train`.",
    "feedback_use": "Every feedback and what became of it. `outcome` is one of `counts`, "
    "`retracted`, `other_metric`, `invalid_value`, `ignored_source`, `no_consent`, `no_target`, "
    "`too_late`, `retraction`, `demonstration`; see [rewards.md](rewards.md).",
    "demonstrations": "Answers that should have been given, with the prompts they answer, where "
    "all of it may be learned from. One on a session is about the last turn before it.",
    "suspicions": "Feedback that looks like somebody's own: one row per tenant, kind, subject and "
    "window of `[rewards.suspicion].window_s`. `kind` is `user_share`, `source_share`, `burst` or "
    "`duplicate`.",
}
"""What a view is."""


VIEW_COLUMNS = {
    "rewards": {
        "interaction_id": "The interaction.",
        "choice_index": "The completion of it.",
        "session_id": "Its session.",
        "tenant": "Its tenant.",
        "reward": "Clipped sum over metrics.",
        "weight": "Influence of the row in training, 0 to 1; less than 1 where a user is capped.",
        "num_feedback": "Signals that count; 0 where only a default does.",
        "labelled_at": "When the newest of them was given; null when there is none.",
        "matured_at": "When it was first listed: a final signal came, or waiting ended.",
    },
    "sessions": {
        "session_id": "Unique within a tenant.",
        "tenant": "Whose session it is.",
        "num_interactions": "Requests.",
        "num_completions": "Answers; more than requests where one asked for several.",
        "num_tokens": "Sampled tokens.",
        "first_at": "First `served_at`.",
        "last_at": "Last `served_at`.",
        "num_labelled": "Completions that have a reward.",
        "reward": "Mean reward of those; null when there is none.",
    },
    "prompts": {
        "interaction_id": "The interaction.",
        "tenant": "Its tenant.",
        "session_id": "Its session.",
        "consented": "Whether everything in the prompt may be learned from.",
        "full_prompt_token_ids": "Every token that was in the prompt, in order.",
        "masked": "1 where scrubbing hides the token: never show it as text.",
    },
    "segments": {
        "segment_id": "First completion, `interaction_id:choice_index`; stays as it grows.",
        "session_id": "Session of all of it.",
        "tenant": "Tenant of all of it.",
        "policy": "Policy of all of it.",
        "temperature": "At which all of it was sampled.",
        "logprob_mode": "Of all its logprobs.",
        "token_ids": "Prompts and completions, as the last interaction saw them.",
        "logprobs": "Of the served distribution; null where `loss_mask` is 0.",
        "loss_mask": "1 where the policy sampled the token and scrubbing did not mask it.",
        "masked": "1 where scrubbing hides the token: never show it as text.",
        "spans": "Which tokens are whose, in order; `end` is exclusive.",
        "num_sampled": "Tokens with mask 1.",
    },
    "feedback_use": {
        "feedback_id": "The feedback.",
        "tenant": "Whose API key gave it.",
        "interaction_id": "What it is about, or null.",
        "session_id": "What it is about, or null.",
        "choice_index": "One choice of several; all when null.",
        "metric": "What was judged.",
        "source": "Who judged.",
        "user": "Keyed hash of the caller's user id.",
        "value": "As it was given.",
        "given_at": "When, UTC.",
        "outcome": "What became of it.",
        "delay_s": "Seconds since the last turn it is about was served; null without one.",
        "influence": "Share of its weight that `[rewards].user_cap` leaves; 1 without a cap.",
    },
    "demonstrations": {
        "feedback_id": "The feedback that holds it.",
        "interaction_id": "The request it answers.",
        "session_id": "Session of the request.",
        "tenant": "Tenant of both.",
        "metric": "Metric of the feedback.",
        "source": "Who gave it.",
        "given_at": "When, UTC.",
        "demonstration": "The answer, as text.",
        "full_prompt_token_ids": "Every token of the prompt, in order.",
        "masked": "1 where scrubbing hides the token of the prompt.",
    },
    "suspicions": {
        "tenant": "Whose feedback.",
        "kind": "What is odd.",
        "subject": "The user's hash, or the source.",
        "window_start": "When the window began, UTC.",
        "num_feedback": "Of the subject in the window; the longest burst; all that is repeated.",
        "share": "Of all feedback of the tenant in the window; null for bursts and duplicates.",
        "bound": "What was exceeded.",
    },
}
"""What a column of a view is; those of tables are documented in the row models."""
