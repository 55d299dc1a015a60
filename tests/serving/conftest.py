from pathlib import Path

import pytest

from onlinerl.serving.chat_template import load_model_text
from onlinerl.serving.renderer import TemplateRenderer


@pytest.fixture(scope="session")
def renderer(smollm2_dir: Path) -> TemplateRenderer:
    return TemplateRenderer(load_model_text(str(smollm2_dir)))
