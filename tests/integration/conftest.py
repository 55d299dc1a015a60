"""The engine that the integration tests share: it takes half a minute to start."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.brokers import free_port
from tests.integration.engines import Engine, engine
from tests.integration.gateway_service import Service, gateway_service


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


@pytest.fixture
async def service(
    shared_engine: Engine, tiny_model_dir: Path, tmp_path: Path
) -> AsyncIterator[Service]:
    """A gateway before the shared engine."""
    async with gateway_service(
        shared_engine.url, model_dir=tiny_model_dir, folder=tmp_path
    ) as running:
        yield running
