"""The engine that the integration tests share: it takes half a minute to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers import free_port
from tests.integration.engines import Engine, engine


@pytest.fixture(scope="session")
def shared_engine(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """`onlinerl engine` on the tiny model; its stamp and weights are what the last test left.

    The modules that use it run on one worker; see `tests/conftest.py`.
    """
    with engine(
        tmp_path_factory.mktemp("engine"), model=tiny_model_dir, port=free_port()
    ) as running:
        yield running
