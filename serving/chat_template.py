"""A model folder's tokenizer and chat template, without transformers and the torch it brings.

The environment of the template is the one that transformers documents for chat templates.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from onlinerl.errors import ConfigError, RequestRefused

_FILES = ["*.json", "*.jinja", "*.model"]


class ChatTemplate:
    """Messages to the text of a prompt."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template = environment.from_string(source)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for an answer to `messages`.

        Raises:
            RequestRefused: when the template does.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise RequestRefused(f"the chat template refuses: {error}", 400, "messages") from error


@dataclass(frozen=True, kw_only=True)
class ModelText:
    """What a model folder says about text."""

    tokenizer: Tokenizer
    template: ChatTemplate
    end_ids: frozenset[int]
    """Tokens that end an answer."""


def load_model_text(source: str) -> ModelText:
    """Read a model folder, or the local or downloaded snapshot of a Hugging Face id.

    Raises:
        ConfigError: without `tokenizer.json`, chat template or end token.
    """
    folder = _folder(source)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"there is no tokenizer.json in {folder}: set [gateway].tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # A folder may carry what its training pipeline cut and padded to.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read(folder / "tokenizer_config.json")
    special = _special_tokens(config)
    ends = _as_list(_read(folder / "generation_config.json").get("eos_token_id"))
    if "eos_token" in special:
        ends.append(tokenizer.token_to_id(special["eos_token"]))
    end_ids = frozenset(end for end in ends if isinstance(end, int))
    if not end_ids:
        raise ConfigError(f"{folder} names no end-of-sequence token")
    template = ChatTemplate(_template_source(folder, config), special_tokens=special)
    return ModelText(tokenizer=tokenizer, template=template, end_ids=end_ids)


def _folder(source: str) -> Path:
    if not source:
        raise ConfigError("set [gateway].tokenizer or [policy].base_model")
    folder = Path(source)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=_FILES))
    except Exception as error:  # the hub's client raises what its transport does
        raise ConfigError(f"{source!r} is neither a folder nor a model to be had") from error


def _template_source(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if not isinstance(template, str):
        raise ConfigError(f"{folder} has no chat template: set [gateway].tokenizer to one that has")
    return template


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; some folders write them as objects."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [value]


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which prompts are not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model says, for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012 as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The content of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
