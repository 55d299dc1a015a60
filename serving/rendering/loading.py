"""Picks the renderer of a model, by `[gateway].renderer`."""

import logging
from collections.abc import Callable

from onlinerl.errors import ConfigError
from onlinerl.serving.interaction.request import Conversation, Message
from onlinerl.serving.rendering.chat_template import ModelText, load_model_text
from onlinerl.serving.rendering.families import detect_family, family_names
from onlinerl.serving.rendering.family_renderer import FamilyRenderer
from onlinerl.serving.rendering.protocol import Renderer
from onlinerl.serving.rendering.template_renderer import TemplateRenderer

logger = logging.getLogger(__name__)

_CHATML_START = "<|im_start|>"


def load_renderer(
    name: str, source: str, *, on_parse_failure: Callable[[], None] = lambda: None
) -> Renderer:
    """The renderer called `name` for a model folder or Hugging Face id.

    Args:
        name: `auto`, `chatml`, `chat_template` or a family of `renderers`.
        source: The folder or id with tokenizer and chat template.
        on_parse_failure: Called for each answer whose calls a family's parser cannot read.

    Raises:
        ConfigError: the name is unknown, the renderer does not fit the model, or the model's files
            cannot be read.
    """
    text = load_model_text(source)
    chosen = _detect(text, source) if name == "auto" else name
    renderer = _make(chosen, text, source, on_parse_failure=on_parse_failure)
    logger.info("renderer", extra={"renderer": chosen, "asked": name, "model": source})
    return renderer


def _make(
    name: str, text: ModelText, source: str, *, on_parse_failure: Callable[[], None]
) -> Renderer:
    if name == "chatml":
        return TemplateRenderer(text, kind="chatml")
    if name == "chat_template":
        return TemplateRenderer(text, kind="chat_template")
    if name in family_names():
        family = FamilyRenderer(name, text, source=source, on_parse_failure=on_parse_failure)
        _warn_if_different(family, text, name=name)
        return family
    raise ConfigError(
        f"[gateway].renderer is {name!r}: use auto, chatml, chat_template or one of "
        f"{', '.join(family_names())}"
    )


def _detect(text: ModelText, source: str) -> str:
    family = detect_family(source)
    if family is not None:
        return family
    if text.template is not None and _CHATML_START in text.template.source:
        return "chatml"
    return "chat_template"


def _warn_if_different(family: FamilyRenderer, text: ModelText, *, name: str) -> None:
    """Warn if the model's own template renders other prompts than the family: a fine-tune may."""
    if text.template is None:
        return
    probe = Conversation(messages=(Message(role="user", content="x"),))
    rendered = text.template.render([{"role": "user", "content": "x"}])
    if family.render(probe) != family.tokenize(rendered):
        logger.warning(
            "prompts of the family differ from those of the model's chat template",
            extra={"renderer": name},
        )
