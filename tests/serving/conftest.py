from dataclasses import replace
from pathlib import Path

import pytest

from onlinerl.serving.rendering.chat_template import ChatTemplate, load_model_text
from onlinerl.serving.rendering.template_renderer import TemplateRenderer

REASONING_CHATML = (
    "{# an answer may begin with <think> #}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def renderer(smollm2_dir: Path) -> TemplateRenderer:
    return TemplateRenderer(load_model_text(str(smollm2_dir)))


@pytest.fixture(scope="session")
def chatml(smollm2_dir: Path) -> TemplateRenderer:
    """Reads calls in the form of Hermes, and reasoning between `<think>` and `</think>`."""
    template = ChatTemplate(REASONING_CHATML, special_tokens={})
    text = replace(load_model_text(str(smollm2_dir)), template=template)
    return TemplateRenderer(text, kind="chatml")
