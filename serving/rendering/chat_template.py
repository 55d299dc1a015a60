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
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from onlinerl.errors import ConfigError, RequestRefused

_SWITCHES = ("enable_thinking", "thinking")
"""Two names are in use for the one switch."""

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
        read = meta.find_undeclared_variables(environment.parse(source))
        self.reads_tools = "tools" in read
        """Whether the template itself describes tools to the model."""
        self.reads_thinking = not read.isdisjoint(_SWITCHES)
        """Whether the template can be told to let the model reason, or not."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of `messages`, by default with the beginning of an answer to them.

        Raises:
            RequestRefused: when the template does.
        """
        switch = {} if thinking is None else dict.fromkeys(_SWITCHES, thinking)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **switch,
                **self._special_tokens,
            )
        # A template that meets a value of another type than it expects raises TypeError.
        except (jinja2.TemplateError, TypeError) as error:
            raise RequestRefused(f"the chat template refuses: {error}", 400, "messages") from error


@dataclass(frozen=True, kw_only=True)
class ModelText:
    """What a model folder says about text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None where the folder has none: some families are rendered without."""
    end_ids: frozenset[int]
    """Tokens that end an answer."""


def load_model_text(source: str) -> ModelText:
    """Read a model folder, or the local or downloaded snapshot of a Hugging Face id.

    Raises:
        ConfigError: without `tokenizer.json` or end token, or with a template that is none.
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
    found = _template_source(folder, config)
    template = None if found is None else ChatTemplate(found, special_tokens=special)
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


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


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


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which prompts are not.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model says, for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012 as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The content of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
