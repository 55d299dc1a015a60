"""What the gates measure on, read from real tables."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from onlinerl.deploy.config import GatesConfig
from onlinerl.deploy.gates.evidence import heldout_answers
from onlinerl.deploy.gates.spec import HeldOutAnswer
from onlinerl.errors import ConfigError
from onlinerl.rollout_store.config import MetricConfig, RewardsConfig
from onlinerl.rollout_store.holdout import is_heldout
from onlinerl.rollout_store.schema import FeedbackEvent, InteractionRow, Sampling
from onlinerl.rollout_store.snapshots.named import create_snapshot
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table
from tests.events import NOON, after, completion, feedback, feedback_row, interaction
from tests.events import interaction_rows as rows_of

FRACTION = 0.5
HELD_OUT, TRAINED_ON = (
    next(name for name in (f"s{n}" for n in range(99)) if is_heldout(name, fraction=0.5) is wanted)
    for wanted in (True, False)
)


def answered(token: int, **changes: object) -> list[InteractionRow]:
    """A held-out answer of one token, which is how the tests tell answers apart."""
    fields: dict[str, object] = {"session_id": HELD_OUT, "choices": [completion([token])]}
    return rows_of(interaction(f"i{token}", **(fields | changes)))


def read(
    folder: Path,
    *rows: list[InteractionRow],
    rated: tuple[FeedbackEvent, ...] = (),
    now: datetime = NOON + timedelta(hours=1),
    max_rows: int = 100,
) -> list[HeldOutAnswer]:
    store = DeltaStore(str(folder / "store"))
    store.create()
    store.append("interactions", to_table([row for each in rows for row in each]))
    if rated:
        store.append("feedback", to_table([feedback_row(event) for event in rated]))
    return heldout_answers(
        store,
        rewards=RewardsConfig(metrics=(MetricConfig(name="accepted"),)),
        policy="assistant",
        heldout_fraction=FRACTION,
        gates=GatesConfig(max_rows=max_rows, max_age_s=86_400),
        now=now,
    )


def tokens(found: list[HeldOutAnswer]) -> list[int]:
    return [answer.completion_token_ids[0] for answer in found]


def test_an_answer_comes_as_it_was_served_with_its_reward(tmp_path: Path) -> None:
    rated = feedback(interaction_id="i7", value=1.0)

    (found,) = read(tmp_path, answered(7), rated=(rated,))

    assert found.prompt_token_ids == [1, 2, 3]
    assert (found.completion_token_ids, found.logprobs) == ([7], [-0.5])
    assert found.temperature == 0.7
    assert found.reward == 1.0


def test_only_sessions_that_are_never_trained_on(tmp_path: Path) -> None:
    assert tokens(read(tmp_path, answered(7), answered(8, session_id=TRAINED_ON))) == [7]


def test_only_what_could_be_trained_on(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        answered(7),
        answered(10, consent="log"),
        answered(11, trainable=False, untrainable_reason="no logprobs"),
        answered(12, sampling=Sampling(temperature=0.0)),
        answered(16, sampling=Sampling(top_p=0.9)),
        answered(17, sampling=Sampling(top_k=20)),
        answered(18, arm="shadow"),
        answered(13, policy="another"),
        answered(14, served_at=after(-2 * 24 * 60)),
        answered(15, choices=[completion([])]),
    )

    assert tokens(found) == [7]


@pytest.mark.parametrize("withheld", [8, 9, None])
def test_an_answer_needs_the_consent_of_every_turn_before_it(
    tmp_path: Path, withheld: int | None
) -> None:
    first = answered(8, consent="log" if withheld == 8 else "train")
    second = answered(
        9,
        parent_id="i8",
        prefix_length=4,
        prompt_token_ids=[5],
        served_at=after(1),
        consent="log" if withheld == 9 else "train",
    )

    found = read(tmp_path, first, second)

    assert tokens(found) == {8: [], 9: [8], None: [9, 8]}[withheld]
    if withheld is None:
        assert found[0].prompt_token_ids == [1, 2, 3, 8, 5]


def test_rated_answers_come_first_then_the_newest(tmp_path: Path) -> None:
    rated = feedback(interaction_id="i7")
    rows = [
        answered(7, served_at=after(1)),
        answered(8, served_at=after(2)),
        answered(9, served_at=after(3)),
    ]

    assert tokens(read(tmp_path, *rows, rated=(rated,), max_rows=2)) == [7, 9]


def test_a_snapshot_gives_the_same_answers_whatever_comes_later(tmp_path: Path) -> None:
    store = DeltaStore(str(tmp_path / "store"))
    store.create()
    store.append("interactions", to_table(answered(7)))
    create_snapshot(store, "june", actor="ann", reason="", at=NOON + timedelta(hours=1))
    store.append("interactions", to_table(answered(8)))

    def scored(snapshot: str, *, days: int = 0) -> list[int]:
        found = heldout_answers(
            store,
            rewards=RewardsConfig(),
            policy="assistant",
            heldout_fraction=FRACTION,
            gates=GatesConfig(max_age_s=86_400, snapshot=snapshot),
            now=NOON + timedelta(days=days, hours=2),
        )
        return sorted(tokens(found))

    assert scored("") == [7, 8]
    assert scored("june") == [7]
    assert scored("june", days=9) == [7], "its rows do not age"
    assert scored("", days=9) == []
    with pytest.raises(ConfigError, match="no snapshot 'july'"):
        scored("july")


def test_empty_tables_are_no_evidence(tmp_path: Path) -> None:
    store = DeltaStore(str(tmp_path / "store"))
    store.create()

    found = heldout_answers(
        store,
        rewards=RewardsConfig(),
        policy="assistant",
        heldout_fraction=FRACTION,
        gates=GatesConfig(),
    )
    assert found == []
