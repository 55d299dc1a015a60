"""A model folder's tokenizer and chat template, without transformers and torch.

The template gets the environment that transformers documents for chat templates.
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
"""Templates use either name for the switch of reasoning."""

_FILES = ["*.json", "*.jinja", "*.model"]


class ChatTemplate:
    """A chat template: messages to the text of a prompt.

    Raises:
        jinja2.TemplateSyntaxError: `source` is no template.
    """

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
        variables = meta.find_undeclared_variables(environment.parse(source))
        self.reads_tools = "tools" in variables
        """Whether the template itself describes tools to the model."""
        self.reads_thinking = not variables.isdisjoint(_SWITCHES)
        """Whether the template has a switch for reasoning."""

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
            RequestRefused: the template refuses the messages.
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
        # Templates raise TypeError for values of a type that they do not expect.
        except (jinja2.TemplateError, TypeError) as error:
            raise RequestRefused(f"the chat template refuses: {error}", 400, "messages") from error


@dataclass(frozen=True, kw_only=True)
class ModelText:
    """Tokenizer, chat template and end tokens of a model folder."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None if the folder has none; some families are rendered without."""
    end_ids: frozenset[int]
    """Tokens that end an answer."""


def load_model_text(source: str) -> ModelText:
    """Read a model folder, or download the text files of a Hugging Face id and read those.

    Raises:
        ConfigError: the model cannot be downloaded, has no `tokenizer.json` or no end token, or its
            chat template is broken.
    """
    folder = _folder(source)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"there is no tokenizer.json in {folder}: set [gateway].tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The file may hold truncation and padding of a training pipeline.
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
    template_source = _template_source(folder, config)
    try:
        template = (
            None
            if template_source is None
            else ChatTemplate(template_source, special_tokens=special)
        )
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template of {folder} cannot be parsed: {error}") from error
    return ModelText(tokenizer=tokenizer, template=template, end_ids=end_ids)


def _folder(source: str) -> Path:
    if not source:
        raise ConfigError("set [gateway].tokenizer or [policy].base_model")
    folder = Path(source)
    if folder.is_dir():
        return folder
    return _download(source)


def _download(model_id: str) -> Path:
    """The snapshot of a model's text files; cached files count when the Hub is not reachable.

    Raises:
        ConfigError: the model does not exist, may not be read, or could not be fetched or stored.
    """
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model_id, allow_patterns=_FILES))
    except (HFValidationError, HTTPError, OSError) as error:
        why = _download_fault(error)
        raise ConfigError(f"cannot load the model {model_id!r}: {why}") from error


def _download_fault(error: Exception) -> str:
    from httpx2 import HTTPError
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "its owner has to grant access first, and HF_TOKEN has to hold your token"
    if isinstance(error, errors.HFValidationError | errors.RepositoryNotFoundError):
        return (
            "it is neither a local folder nor a model on the Hugging Face Hub that you may read: "
            "check the name, or set HF_TOKEN for a private model"
        )
    if isinstance(error, errors.HfHubHTTPError):
        if error.response.status_code in (401, 403):
            return "the Hugging Face Hub does not allow it: check HF_TOKEN"
        return f"the Hugging Face Hub answered with an error ({error}): try again later"
    if isinstance(
        error, errors.LocalEntryNotFoundError | HTTPError | ConnectionError | TimeoutError
    ):
        return (
            "it is no local folder, the Hugging Face Hub cannot be reached, and its files are not "
            "in the local cache"
        )
    return f"its files cannot be stored: {error}"


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        templates = {entry["name"]: entry["template"] for entry in template}
        template = templates.get("default")
    return template if isinstance(template, str) else None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which some folders write as objects."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in tokens.items()
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
    # Jinja's own filter escapes HTML, but prompts are not HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's turns for training; here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012 as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The content of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
