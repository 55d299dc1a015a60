import logging
import subprocess
import sys
from pathlib import Path

import pytest

from onlinerl.errors import ConfigError
from onlinerl.serving.rendering.family_renderer import FamilyRenderer
from onlinerl.serving.rendering.loading import load_renderer
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.families import family_text

TEMPLATES = Path(__file__).parent / "templates"


@pytest.fixture
def qwen_folder(tmp_path: Path) -> Path:
    """A model folder in the form of Qwen3."""
    family_text("qwen3").tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    template = (TEMPLATES / "chatml_with_tools.jinja").read_text()
    (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def test_a_chatml_model_gets_the_chatml_renderer(smollm2_dir: Path) -> None:
    renderer = load_renderer("auto", str(smollm2_dir))

    assert isinstance(renderer, TemplateRenderer)
    assert renderer.name(()).name == "chatml"


def test_another_template_is_used_as_it_is(qwen_folder: Path) -> None:
    (qwen_folder / "chat_template.jinja").write_text("{{ messages[0].content }}")

    assert load_renderer("auto", str(qwen_folder)).name(()).name == "chat_template"


def test_a_renderer_can_be_named(qwen_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        names = [
            load_renderer(name, str(qwen_folder)).name(()).name
            for name in ("qwen3", "chatml", "chat_template")
        ]

    assert names == ["qwen3", "chatml", "chat_template"]
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3


def test_a_family_that_differs_from_the_models_template_is_logged(
    qwen_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (qwen_folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    load_renderer("qwen3", str(qwen_folder))

    assert "differ" in caplog.text


def test_a_family_needs_no_chat_template(qwen_folder: Path) -> None:
    (qwen_folder / "chat_template.jinja").unlink()

    assert isinstance(load_renderer("qwen3", str(qwen_folder)), FamilyRenderer)
    with pytest.raises(ConfigError, match="no chat template"):
        load_renderer("auto", str(qwen_folder))


def test_an_unknown_name_is_an_error_that_lists_the_known(smollm2_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"'qwen4'.*chatml.*glm-5.*qwen3"):
        load_renderer("qwen4", str(smollm2_dir))


def test_a_name_that_does_not_fit_the_tokenizer_is_an_error(
    smollm2_dir: Path, qwen_folder: Path
) -> None:
    with pytest.raises(ConfigError, match="does not fit the tokenizer"):
        load_renderer("qwen3", str(smollm2_dir))
    family_text("llama-3").tokenizer.save(str(qwen_folder / "tokenizer.json"))
    (qwen_folder / "tokenizer_config.json").write_text('{"eos_token": "<|eot_id|>"}')
    with pytest.raises(ConfigError, match="no control token"):
        load_renderer("chatml", str(qwen_folder))


def test_rendering_needs_neither_torch_nor_transformers(qwen_folder: Path) -> None:
    """The gateway starts without the learner's environment."""
    script = (
        "import sys; from onlinerl.serving.rendering.loading import load_renderer; "
        f"load_renderer('qwen3', {str(qwen_folder)!r}); "
        "sys.exit(bool({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
