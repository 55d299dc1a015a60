"""Events of an erased person that are still in the log are not stored again."""

import threading
from pathlib import Path

import pytest

from onlinerl.ingest.committing.writer import TableWriter
from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.log import MemoryLog
from onlinerl.ingest.loop.ingester import Ingester
from onlinerl.ingest.scrubbing.screening import Screening
from onlinerl.rollout_store.erasure.erase import Erasure
from onlinerl.rollout_store.erasure.erased import ErasedSet
from onlinerl.rollout_store.erasure.state import StateFile
from onlinerl.rollout_store.event_log import ALL_TOPICS
from tests.events import NOON, feedback, interaction
from tests.ingest.world import World, make_world
from tests.rollout_store.people import hash_of, some_id

ADA = {"acme": hash_of("ada")}


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = make_world(tmp_path)
    send_all(world)
    return world


def send_all(world: World) -> None:
    """Send every event of this test once."""
    world.send(interaction(some_id("ada"), user=ADA["acme"], session_id="s-ada", served_at=NOON))
    world.send(interaction(some_id("mate"), session_id="s-ada", served_at=NOON))
    world.send(interaction(some_id("bob"), user=hash_of("bob"), session_id="s-bob"))
    world.send(feedback("about-ada", interaction_id=some_id("ada")))
    world.send(feedback("about-bob", interaction_id=some_id("bob")))
    world.send_raw(b'{"tenant": "acme", "session_id": "s-ada"}')


def ingest(world: World) -> None:
    writer = TableWriter(
        world.store,
        recent_ids=1000,
        now=lambda: NOON,
        screen=Screening(ErasedSet(world.store), scrubber=None),
    )
    config = IngestConfig(max_batch_rows=2, check_interval_s=0.001)
    Ingester(lambda: world.log, writer=writer, config=config).run(threading.Event(), once=True)


def erase(world: World, folder: Path) -> None:
    state_file = StateFile(folder / "erasures", users=sorted(ADA.items()))
    Erasure(store=world.store, state_file=state_file, actor="me", settle_s=0).run(ADA)


def test_events_shipped_again_to_an_empty_broker_bring_no_erased_person_back(
    world: World, tmp_path: Path
) -> None:
    ingest(world)
    erase(world, tmp_path)
    world.log = MemoryLog(ALL_TOPICS, partitions=1, max_poll_records=4)
    send_all(world)

    ingest(world)

    assert world.column("interactions", "interaction_id") == [some_id("bob")]
    assert world.column("feedback", "feedback_id") == ["about-bob"]
    assert world.column("dead_letters", "payload") == []


def test_a_person_erased_before_ingest_read_anything_is_never_stored(
    world: World, tmp_path: Path
) -> None:
    erase(world, tmp_path)

    ingest(world)

    assert world.column("interactions", "interaction_id") == [some_id("bob")]
    assert world.column("dead_letters", "payload") == []
