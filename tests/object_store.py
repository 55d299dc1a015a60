"""A local S3 server in its own process, for tests of the object store."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.brokers import free_port

_START_TIMEOUT_S = 60.0
_KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}


@dataclass(frozen=True)
class Bucket:
    """An empty bucket."""

    root: str
    """`s3://…` of a folder in it."""
    storage_options: dict[str, str]


@contextmanager
def s3_bucket() -> Iterator[Bucket]:
    """A bucket on a server that lives as long as the block."""
    port = free_port()
    # Not in this process: delta-rs holds the interpreter's lock while it waits for an answer.
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        endpoint = f"http://127.0.0.1:{port}"
        _create_bucket(endpoint, "rollouts", until=time.monotonic() + _START_TIMEOUT_S)
        yield Bucket(
            root="s3://rollouts/a folder/store",
            storage_options={
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": _KEYS["aws_access_key_id"],
                "AWS_SECRET_ACCESS_KEY": _KEYS["aws_secret_access_key"],
            },
        )
    finally:
        server.kill()
        server.wait(timeout=10)


def _create_bucket(endpoint: str, name: str, *, until: float) -> None:
    quick = Config(connect_timeout=2, read_timeout=10, retries={"max_attempts": 0})
    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", config=quick, **_KEYS
    )
    while True:
        try:
            client.create_bucket(Bucket=name)
        except (BotoCoreError, ClientError):
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
        else:
            return
