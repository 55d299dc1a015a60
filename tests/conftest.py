"""Fixtures that several folders use, and which tests share a worker."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from onlinerl.process.logs import KeyValueFormatter
from tests import models

pytest_plugins = ["tests.tiers"]

# No test asserts a time, so neither does a property: a busy machine is no counterexample.
hypothesis.settings.register_profile("onlinerl", deadline=None)
hypothesis.settings.load_profile("onlinerl")

SHARE_THE_ENGINE = (
    "test_clients_chat.py",
    "test_clients_messages.py",
    "test_clients_responses.py",
    "test_gateway_engine.py",
    "test_weight_swap.py",
    "test_tool_grammar_engine.py",
)


class FileScheduling(LoadScopeScheduling):
    """A file is run by one worker, and so are all the files that share the engine.

    xdist's own way to say so, the mark `xdist_group`, is not honoured with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "engine" if file.endswith(SHARE_THE_ENGINE) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    """Called where several workers are asked for."""
    return FileScheduling(config, log)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    return models.smollm2()


@pytest.fixture(scope="session")
def tiny_model_dir() -> Path:
    return models.tiny_model()


@pytest.fixture(autouse=True)
def umask_as_before() -> Iterator[None]:
    """A command run within a test closes its files to others, and so would this process be."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def no_log_to_a_closed_stream() -> Iterator[None]:
    """A command run within a test logs to the standard error of that test, which ends with it."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in root.handlers[:]:
        if isinstance(handler.formatter, KeyValueFormatter):
            root.removeHandler(handler)
    root.setLevel(level)
