"""Fixtures that several folders use."""

from pathlib import Path

import pytest

from tests import models


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    return models.smollm2()


@pytest.fixture(scope="session")
def tiny_model_dir() -> Path:
    return models.tiny_model()
