"""`onlinerl erase` killed again and again, beside ingest that appends and upkeep that waits."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from kafka import KafkaProducer
from pyarrow import parquet

from onlinerl.rollout_store.event_log import ensure_topics
from onlinerl.rollout_store.schema import FEEDBACK_TOPIC, INTERACTIONS_TOPIC
from onlinerl.rollout_store.snapshots.named import create_snapshot, snapshots
from tests.brokers import tansu
from tests.events import feedback, interaction
from tests.integration.ingest_pipeline import COMMAND, Pipeline, wait_until
from tests.rollout_store.people import hash_of, some_id

pytestmark = pytest.mark.integration

ADA = hash_of("ada")
NUM_ROUNDS = 60
CONFIGURATION = """
[maintenance]
interval_s = 0.2
min_small_files = 2
lease_ttl_s = 3
checkpoint_every = 5
health_port = 0
[registry]
tracking_uri = "sqlite:///mlflow.db"
"""


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    with tansu(tmp_path) as broker:
        pipeline = Pipeline(tmp_path, broker, more=CONFIGURATION)
        create_registry(tmp_path)
        yield pipeline
        pipeline.stop()


def create_registry(folder: Path) -> None:
    """As its server does: MLflow does not outlive a kill while it creates its tables."""
    create = "import mlflow; mlflow.MlflowClient('sqlite:///mlflow.db').search_registered_models()"
    subprocess.run([sys.executable, "-c", create], cwd=folder, check=True, timeout=120)


def events_of(number: int, *, at: datetime) -> Iterator[tuple[str, str]]:
    """Ada, somebody in her session, Bob, Bob going on from Ada, and a word about each."""
    ada, bob = some_id(f"ada-{number}"), some_id(f"bob-{number}")
    said = [
        interaction(ada, user=ADA, session_id="s-ada", served_at=at),
        interaction(some_id(f"mate-{number}"), session_id="s-ada", served_at=at),
        interaction(bob, user=hash_of("bob"), session_id="s-bob", served_at=at),
        interaction(
            some_id(f"heir-{number}"),
            user=hash_of("bob"),
            session_id="s-heir",
            parent_id=ada,
            prefix_length=5,
            served_at=at,
        ),
    ]
    judged = [
        feedback(f"by-ada-{number}", interaction_id=bob, user=ADA, given_at=at),
        feedback(f"about-ada-{number}", interaction_id=ada, given_at=at),
        feedback(f"about-bob-{number}", interaction_id=bob, given_at=at),
    ]
    yield from ((INTERACTIONS_TOPIC, event.model_dump_json()) for event in said)
    yield from ((FEEDBACK_TOPIC, event.model_dump_json()) for event in judged)


def traces(pipeline: Pipeline) -> list[str]:
    """Files under the data folder with anything of Ada's, read by none of the code under test."""
    names = ("ada", "mate", "heir")
    ids = [some_id(f"{name}-{n}") for name in names for n in range(NUM_ROUNDS)]
    needles = [ADA, "s-ada", *ids]
    found = []
    for path in (pipeline.folder / "data of it").rglob("*"):
        if not path.is_file():
            continue
        content = path.read_bytes().decode("latin-1")
        if path.suffix == ".parquet":
            content += str(parquet.read_table(path).to_pylist())
        if any(needle in content for needle in needles):
            found.append(str(path.relative_to(pipeline.folder)))
    return found


def start(pipeline: Pipeline, *arguments: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--config", str(pipeline.config)],
        stdout=subprocess.PIPE if "json" in arguments else subprocess.DEVNULL,
        env=os.environ | {"ONLINERL_USER_HASH_KEY": "pepper"},
        cwd=pipeline.folder,
    )
    pipeline.processes.append(process)
    return process


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.slow
def test_killed_again_and_again_beside_ingest_and_upkeep_it_leaves_nothing(
    pipeline: Pipeline,
) -> None:
    ensure_topics(pipeline.settings)
    producer = KafkaProducer(bootstrap_servers=pipeline.broker.bootstrap, linger_ms=5)
    served_at = datetime.now(UTC)

    def send(numbers: range, *, pause_s: float) -> None:
        for number in numbers:
            for topic, event in events_of(number, at=served_at):
                producer.send(topic, event.encode(), key=b"s")
            producer.flush(30)
            time.sleep(pause_s)

    pipeline.start()
    start(pipeline, "maintain")
    send(range(20), pause_s=0.0)
    wait_until(lambda: pipeline.num_rows() == 80, "the first rows are stored")
    create_snapshot(pipeline.store, "june", actor="me", reason="", at=datetime.now(UTC))
    plan = start(pipeline, "erase", "--user", "ada", "--dry-run", "--format", "json")
    assert json.loads(plan.communicate(timeout=120)[0])["would_erase"][0]["interactions"] == 60
    sending = in_background(lambda: send(range(20, NUM_ROUNDS), pause_s=0.2))
    chance = random.Random(5)
    for _ in range(4):
        erase = start(pipeline, "erase", "--user", "ada")
        time.sleep(chance.uniform(2.0, 6.0))
        erase.send_signal(signal.SIGKILL)
        erase.wait(timeout=60)
    sending.join(timeout=120)
    wait_until(
        lambda: pipeline.stored("interactions", "interaction_id")[some_id("bob-59")] == 1,
        "all of Bob's rows are stored",
    )

    erase = start(pipeline, "erase", "--user", "ada", "--format", "json")
    report = json.loads(erase.communicate(timeout=300)[0])

    assert erase.returncode == 0
    assert report["traces_left"] == 0
    # By the erasure, or by upkeep between two of its lives.
    (june,) = (each for each in snapshots(pipeline.store) if each.name == "june")
    assert june.action == "mark"
    assert traces(pipeline) == []
    bobs = {some_id(f"bob-{n}"): 1 for n in range(NUM_ROUNDS)}
    assert pipeline.stored("interactions", "interaction_id") == bobs
    assert set(pipeline.stored("feedback", "feedback_id")) == {
        f"about-bob-{n}" for n in range(NUM_ROUNDS)
    }

    # The broker comes back empty and is sent all of it again.
    producer.close(5)
    pipeline.broker.restart()
    ensure_topics(pipeline.settings)
    producer = KafkaProducer(bootstrap_servers=pipeline.broker.bootstrap, linger_ms=5)
    send(range(NUM_ROUNDS), pause_s=0.0)
    last = interaction(some_id("last"), user=hash_of("bob"), session_id="s-bob")
    producer.send(INTERACTIONS_TOPIC, last.model_dump_json().encode(), key=b"s").get(30)
    producer.close(5)
    wait_until(
        lambda: pipeline.stored("interactions", "interaction_id")[some_id("last")] == 1,
        "what was sent again is read",
    )
    assert traces(pipeline) == []
    assert pipeline.num_rows() == NUM_ROUNDS + 1
