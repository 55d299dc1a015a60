"""Descriptions of the views and their columns for `docs/tables.md`; a test finds missing ones."""

from onlinerl.rollout_store.views.feedback import OUTCOMES

VIEWS_ABOUT = {
    "rewards": "One row per completion with feedback of a metric that `[rewards]` names. A "
    "completion without a row is unlabelled, which is not a reward of 0. Feedback counts only on "
    "interactions and sessions of its own `tenant`. See [rewards.md](rewards.md).",
    "sessions": "One row per conversation or agent run, without the answers of a shadow.",
    "prompts": "The whole prompt of an interaction, including the tokens that it shares with its "
    "parent. An interaction whose parent is not in the tables has no row.",
    "segments": "Training sequences. Interactions whose prompt is exactly the parent's prompt and "
    "completion plus new tokens are merged, if policy, session, temperature and logprob mode are "
    "the same. Every sampled token is in exactly one segment with mask 1. A completion counts only "
    "if it is `trainable` and if it and every interaction in its prompt have consent `train`.",
    "feedback_use": "Every feedback, and whether it counts. See [rewards.md](rewards.md).",
    "demonstrations": "Answers that should have been given, with their prompts, if all of it may "
    "be trained on. A demonstration on a session belongs to the last turn before it.",
    "suspicions": "Feedback that looks manipulated by one user or one source: one row "
    "per tenant, kind, subject and window of `[rewards.suspicion].window_s`. `kind` is "
    "`user_share`, `source_share`, `burst` or `duplicate`.",
}
"""The description of each view."""


VIEW_COLUMNS = {
    "rewards": {
        "interaction_id": "Interaction of the completion.",
        "choice_index": "Index of the completion in the interaction.",
        "session_id": "Session of the interaction.",
        "tenant": "Tenant of the interaction.",
        "reward": "Clipped sum over metrics.",
        "weight": "Weight of the row in training, 0 to 1; below 1 if the cap limits a user.",
        "num_feedback": "Number of feedback that counts; 0 if only a default counts.",
        "labelled_at": "Time of the newest such feedback, UTC; null without feedback.",
        "matured_at": "Time at which the reward was first listed, UTC.",
    },
    "sessions": {
        "session_id": "Unique within a tenant.",
        "tenant": "Tenant of the session.",
        "num_interactions": "Number of requests.",
        "num_completions": "Number of completions; a request may have several.",
        "num_tokens": "Number of sampled tokens.",
        "first_at": "First `served_at`.",
        "last_at": "Last `served_at`.",
        "num_labelled": "Number of completions with a reward.",
        "reward": "Mean reward of these completions; null if there are none.",
    },
    "prompts": {
        "interaction_id": "Interaction of the prompt.",
        "tenant": "Tenant of the interaction.",
        "session_id": "Session of the interaction.",
        "consented": "Whether everything in the prompt may be trained on.",
        "full_prompt_token_ids": "Every token of the prompt, in order.",
        "masked": "1 where scrubbing hides the token: never show it as text.",
    },
    "segments": {
        "segment_id": "First completion, `interaction_id:choice_index`; constant while it grows.",
        "session_id": "Session of the whole segment.",
        "tenant": "Tenant of the whole segment.",
        "policy": "Policy of the whole segment.",
        "temperature": "Temperature of the whole segment.",
        "logprob_mode": "Logprob mode of the whole segment.",
        "token_ids": "Prompts and completions, as the last interaction contains them.",
        "logprobs": "Logprobs under the served distribution; null where `loss_mask` is 0.",
        "loss_mask": "1 where the policy sampled the token and scrubbing did not mask it.",
        "masked": "1 where scrubbing hides the token: never show it as text.",
        "spans": "Tokens of each completion, in order; `end` is exclusive.",
        "num_sampled": "Number of tokens with mask 1.",
    },
    "feedback_use": {
        "feedback_id": "Id of the feedback.",
        "tenant": "Tenant of the API key that was used.",
        "interaction_id": "Interaction that was judged, or null.",
        "session_id": "Session that was judged, or null.",
        "choice_index": "Completion that was judged; all completions when null.",
        "metric": "Name of the metric.",
        "source": "Kind of judge.",
        "user": "Keyed hash of the caller's user id.",
        "value": "The value as it was given.",
        "given_at": "Time at which the gateway received it, UTC.",
        "outcome": " ".join(f"`{name}`: {text}" for name, text in OUTCOMES.items()),
        "delay_s": "Seconds since the last turn that was judged was served; null without a turn.",
        "influence": "Share of its weight that `[rewards].user_cap` leaves; 1 without a cap.",
    },
    "demonstrations": {
        "feedback_id": "Id of the feedback that contains the demonstration.",
        "interaction_id": "Interaction that it answers.",
        "session_id": "Session of the interaction.",
        "tenant": "Tenant of the feedback and the interaction.",
        "metric": "Metric of the feedback.",
        "source": "Kind of judge.",
        "given_at": "Time at which the gateway received it, UTC.",
        "demonstration": "The answer, as text.",
        "full_prompt_token_ids": "Every token of the prompt, in order.",
        "masked": "1 where scrubbing hides the token of the prompt.",
    },
    "suspicions": {
        "tenant": "Tenant of the feedback.",
        "kind": "Kind of suspicion.",
        "subject": "The user's hash, or the source.",
        "window_start": "Start of the window, UTC.",
        "num_feedback": "Feedback of the subject in the window, in its longest burst, or repeated.",
        "share": "Share in the tenant's feedback in the window; null for bursts and duplicates.",
        "bound": "The bound that was exceeded.",
    },
}
"""The description of each column of a view; columns of tables are described in the row models."""
