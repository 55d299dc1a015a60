import json
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
from typing_extensions import override

from onlinerl.errors import ConfigError, ServiceUnavailable
from onlinerl.ingest.dead_letters.command import run_list, run_replay
from onlinerl.ingest.dead_letters.replay import (
    DeadLetter,
    Resender,
    Selection,
    find_dead_letters,
    replay,
)
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.schema import FEEDBACK_TOPIC, INTERACTIONS_TOPIC
from tests.events import NOON, interaction
from tests.ingest.sorted import edited
from tests.ingest.world import World, make_world


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Three dead letters: one unreadable, one with an unknown token id, one of feedback."""
    world = make_world(tmp_path)
    world.send_raw(b"{")
    world.send(interaction("too large", prompt_token_ids=[70_000]))
    world.send_raw(b"[", topic=FEEDBACK_TOPIC)
    world.vocab_size = 50_000
    world.ingest()
    return world


class MemoryResender(Resender):
    """Puts records back into the world's log; fails at the n-th call when told to."""

    def __init__(self, world: World, *, fails_at: int = 0) -> None:
        self.world = world
        self.calls = count(1)
        self.fails_at = fails_at

    @override
    def send(self, records: Sequence[tuple[str, bytes | None, bytes]]) -> None:
        if next(self.calls) == self.fails_at:
            raise ServiceUnavailable("the broker is away")
        for topic, key, value in records:
            self.world.log.produce(topic, value, key=key)


def letters(world: World, **selection: object) -> list[DeadLetter]:
    chosen = Selection(**selection)  # type: ignore[arg-type]  # overrides of any field
    return sorted(find_dead_letters(world.store, chosen), key=lambda letter: letter.reason)


def bring_back(world: World, **selection: object) -> int:
    return replay(
        world.store,
        iter(letters(world, **selection)),
        resender=MemoryResender(world),
        actor="me",
        now=lambda: NOON,
    )


def kinds(found: list[DeadLetter]) -> list[str]:
    return [letter.reason.split(":")[0] for letter in found]


def test_letters_are_found_by_reason_topic_time_and_id(world: World) -> None:
    all_of_them = letters(world)
    chosen = all_of_them[1].digest[:10]

    assert kinds(all_of_them) == ["not_json", "not_json", "vocabulary"]
    assert kinds(letters(world, reason="vocabulary")) == ["vocabulary"]
    assert [one.payload for one in letters(world, topic=FEEDBACK_TOPIC)] == [b"["]
    assert letters(world, digest=chosen) == [all_of_them[1]]
    assert len(letters(world, since=NOON)) == 3
    assert letters(world, since=NOON + timedelta(seconds=1)) == []


def test_after_a_fix_a_replayed_letter_is_stored_like_any_event(world: World) -> None:
    world.vocab_size = 100_000
    sent = bring_back(world, reason="vocabulary")
    world.ingest()

    assert sent == 1
    assert world.column("interactions", "interaction_id") == ["too large"]
    assert world.counts("dead_letters", "topic") == {INTERACTIONS_TOPIC: 2, FEEDBACK_TOPIC: 1}


def test_a_letter_is_replayed_once_however_often_it_is_asked_for(world: World) -> None:
    assert [bring_back(world, reason="vocabulary") for _ in range(2)] == [1, 0]
    assert [one.is_replayed for one in letters(world, with_replayed=True)] == [False, False, True]


def test_a_letter_that_is_still_broken_is_another_letter(world: World) -> None:
    before = letters(world)
    bring_back(world, reason="vocabulary")
    world.ingest()
    after = letters(world, reason="vocabulary")

    assert len(after) == 1
    assert after[0].digest not in {letter.digest for letter in before}
    assert after[0].payload == before[2].payload


def test_a_replay_of_what_was_stored_meanwhile_stores_nothing_new(world: World) -> None:
    world.vocab_size = 100_000
    world.send(interaction("too large", prompt_token_ids=[70_000]))
    world.ingest()
    bring_back(world, reason="vocabulary")
    world.ingest()

    assert world.counts("interactions", "interaction_id") == {"too large": 1}


def test_what_was_sent_before_the_broker_went_away_is_recorded(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    for number in range(501):
        world.send_raw(b"poison %d" % number)
    world.ingest()
    with pytest.raises(ServiceUnavailable):
        replay(
            world.store,
            find_dead_letters(world.store, Selection()),
            resender=MemoryResender(world, fails_at=2),
            actor="me",
            now=lambda: NOON,
        )

    assert len(letters(world)) == 1
    assert world.column("audit", "actor") == ["me"]


def test_the_list_shows_the_newest_and_never_what_they_contain(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.send_raw(edited(consent="my secret", interaction_id="SECRET"))
    world.ingest()
    run_list(world.store, Selection(), limit=50, format="json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    run_list(world.store, Selection(), limit=2)
    shown = capsys.readouterr().out

    assert len(lines) == 4
    assert {line["replayed"] for line in lines} == {False}
    assert "secret" not in (json.dumps(lines) + shown).lower()
    assert shown.count(INTERACTIONS_TOPIC) + shown.count(FEEDBACK_TOPIC) == 2


def test_a_replay_without_a_selection_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="--all"):
        run_replay(
            world.store,
            Selection(),
            broker=BrokerConfig(),
            everything=False,
            dry_run=False,
            actor="me",
        )


def test_a_dry_run_counts_and_sends_nothing(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run_replay(
        world.store,
        Selection(),
        broker=BrokerConfig(),
        everything=True,
        dry_run=True,
        actor="me",
    )

    assert capsys.readouterr().out.startswith("3 dead letters")
    assert world.column("audit", "actor") == []
