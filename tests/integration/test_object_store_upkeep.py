"""Snapshots, upkeep, retention and erasure in a bucket of a real S3 server, as in a folder."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyarrow import fs, parquet

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.snapshots.named import create_snapshot, readable
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.files import TableFiles
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.rollout_store.upkeep.config import MaintenanceConfig, RetentionConfig
from onlinerl.rollout_store.upkeep.tables import TableUpkeep, maintain
from tests.object_store import Bucket, s3_bucket
from tests.rollout_store.people import People, hash_of, some_id

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with s3_bucket() as bucket:
        yield bucket


@pytest.fixture
def people(bucket: Bucket, tmp_path: Path) -> People:
    people = People(tmp_path)
    people.store = DeltaStore(f"{bucket.root}/{tmp_path.name}", bucket.storage_options)
    people.store.create()
    return people


def now() -> datetime:
    return datetime.now(UTC)


def in_two_months() -> datetime:
    return now() + timedelta(days=60)


def upkeep(
    people: People,
    config: MaintenanceConfig,
    clock: Callable[[], datetime],
    retention: RetentionConfig | None = None,
) -> list[TableUpkeep]:
    """One pass."""
    kept = retention or RetentionConfig()
    return list(maintain(people.store, config=config, retention=kept, actor="me", now=clock))


def files_that_hold(bucket: Bucket, people: People, *needles: str) -> list[str]:
    """Objects with a needle anywhere, read without any of the code under test."""
    options = bucket.storage_options
    s3 = fs.S3FileSystem(
        access_key=options["AWS_ACCESS_KEY_ID"],
        secret_key=options["AWS_SECRET_ACCESS_KEY"],
        region=options["AWS_REGION"],
        endpoint_override=options["AWS_ENDPOINT_URL"],
        scheme="http",
    )
    root = people.store.root.removeprefix("s3://")
    found = []
    for info in s3.get_file_info(fs.FileSelector(root, recursive=True)):
        if info.type != fs.FileType.File:
            continue
        with s3.open_input_file(info.path) as opened:
            content = opened.read().decode("latin-1")
        if info.path.endswith(".parquet"):
            content += str(parquet.read_table(info.path, filesystem=s3).to_pylist())
        if any(needle in content for needle in needles):
            found.append(info.path)
    return found


def test_upkeep_compacts_and_vacuums_and_a_held_version_stays(people: People) -> None:
    for number in range(6):
        people.says(f"i{number}", user="bob", session="s")
    held = create_snapshot(people.store, "june", actor="me", reason="", at=now())
    people.says("late", user="bob", session="s")
    config = MaintenanceConfig(min_small_files=2, checkpoint_every=1)

    for passed in (upkeep(people, config, now), upkeep(people, config, in_two_months)):
        assert [done.trouble for done in passed] == [None] * 8

    versions = readable(people.store, "june", at=now()).versions
    assert versions == held.versions
    assert people.store.dataset("interactions", version=versions["interactions"]).count_rows() == 6
    assert len(people.column("interactions", "interaction_id")) == 7
    assert len(people.store.delta("interactions").file_uris()) == 1
    assert len([f for f in TableFiles(people.store, "interactions").all() if not f.is_log]) == 8


def test_rows_that_are_due_are_deleted_and_their_snapshot_is_marked(people: People) -> None:
    people.says("old", user="bob", session="s")
    create_snapshot(people.store, "june", actor="me", reason="", at=now())
    people.stored_at = now()
    new = people.says("new", user="bob", session="s")
    retention = RetentionConfig(interactions=30)

    upkeep(people, MaintenanceConfig(), now, retention)

    assert people.column("interactions", "interaction_id") == [new]
    with pytest.raises(ConfigError, match="reached their retention"):
        readable(people.store, "june", at=now())


def test_a_person_is_erased_from_the_bucket_by_the_command(
    bucket: Bucket, people: People, tmp_path: Path
) -> None:
    ada = people.says("ada-1", user="ada", session="s-ada")
    mate = people.says("mate-1", user=None, session="s-ada")
    bob = people.says("bob-1", user="bob", session="s-bob")
    people.judges("about-ada", interaction_id=ada)
    create_snapshot(people.store, "june", actor="me", reason="", at=now())
    needles = (ada, mate, hash_of("ada"))
    assert files_that_hold(bucket, people, *needles)
    config = tmp_path / "onlinerl.toml"
    options = "".join(f'{name} = "{value}"\n' for name, value in bucket.storage_options.items())
    config.write_text(
        f'data_dir = "."\n[policy]\nbase_model = "m"\n[store]\nroot = "{people.store.root}"\n'
        f"[store.storage_options]\n{options}"
        f'[registry]\ntracking_uri = "sqlite:///{tmp_path}/mlflow.db"\n'
    )

    arguments = ["erase", "--user", "ada", "--format", "json", "--config", str(config)]
    ended = subprocess.run(
        [sys.executable, "-m", "onlinerl.cli", *arguments],
        timeout=300,
        check=False,
        capture_output=True,
        env=os.environ | {"ONLINERL_USER_HASH_KEY": "pepper"},
    )

    assert ended.returncode == 0, ended.stderr[-2000:]
    report = json.loads(ended.stdout)
    assert report["rows_deleted"] == {"feedback": 1, "interactions": 2}
    assert report["snapshots_marked"] == ["june"]
    assert files_that_hold(bucket, people, *needles) == []
    assert people.column("interactions", "interaction_id") == [bob]
    assert some_id("bob-1") == bob
    with Lease(people.store, name="maintain", ttl_s=60):
        pass
