"""Reads held-out answers, on which the gates measure, from the tables.

Their sessions are never trained on, but the same rules hold as for training data: consent, also of
the turns before, alignment of tokens, and sampling.
"""

from datetime import UTC, datetime, timedelta

from onlinerl.deploy.config import GatesConfig
from onlinerl.deploy.gates.spec import HeldOutAnswer
from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.holdout import is_heldout_sql
from onlinerl.rollout_store.snapshots.named import readable
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.views.connection import connect
from onlinerl.rollout_store.views.scope import Scope


def heldout_answers(
    store: DeltaStore,
    *,
    rewards: RewardsConfig,
    policy: str,
    heldout_fraction: float,
    gates: GatesConfig,
    now: datetime | None = None,
) -> list[HeldOutAnswer]:
    """The held-out answers to measure on: rated before unrated ones, each newest first.

    Args:
        store: The tables.
        rewards: Rules that derive rewards from feedback.
        policy: Name of the policy that served the answers.
        heldout_fraction: Share of sessions that are held out of training.
        gates: Bounds on number and age of the answers, and the snapshot to read, if any.
        now: Time from which the age counts, UTC; None takes the current time.

    Raises:
        ConfigError: when `gates.snapshot` names no snapshot that can be read.
        ServiceUnavailable: when the tables cannot be read.
    """
    now, versions = now or datetime.now(UTC), None
    if gates.snapshot:
        held = readable(store, gates.snapshot, at=now)
        now, versions = held.acted_at, held.versions
    oldest = now - timedelta(seconds=gates.max_age_s)
    scope = Scope(since=oldest, policy=policy)
    connection = connect(store, rewards=rewards, versions=versions, as_of=now, scope=scope)
    try:
        rows = connection.execute(
            f"""
            SELECT p.full_prompt_token_ids, i.completion_token_ids, i.logprobs,
                   i.sampling.temperature, r.reward
            FROM interactions AS i
            JOIN prompts AS p USING (interaction_id, tenant)
            JOIN prompt_pieces AS h USING (interaction_id, tenant)
            LEFT JOIN rewards AS r USING (interaction_id, choice_index, tenant)
            WHERE {is_heldout_sql("i.session_id", fraction=heldout_fraction)}
              AND i.policy = ? AND i.trainable AND h.consented
              AND i.logprob_mode = 'processed' AND i.sampling.temperature > 0
              AND i.served_at >= ? AND len(i.completion_token_ids) > 0
            ORDER BY r.reward IS NULL, i.served_at DESC, i.interaction_id
            LIMIT ?
            """,
            [policy, oldest, gates.max_rows],
        ).fetchall()
    finally:
        connection.close()
    return [
        HeldOutAnswer(
            prompt_token_ids=prompt,
            completion_token_ids=completion,
            logprobs=logprobs,
            temperature=temperature,
            reward=reward,
        )
        for prompt, completion, logprobs, temperature, reward in rows
    ]
