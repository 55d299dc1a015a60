"""Grammars that make an engine write valid calls: vLLM's `structured_outputs`.

A structural tag holds the call markup of a family as text, and the JSON schema of a tool in place
of its arguments. The engine masks every token that would violate it. After the calls, only the end
of the answer is allowed.
"""

# ruff: noqa: RUF001 the markers are spelled with these characters

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from onlinerl.errors import RequestRefused
from onlinerl.serving.encoding.json import unescaped_json
from onlinerl.serving.interaction.request import Tool, ToolChoice

Format = Mapping[str, object]
"""A part of a structural tag."""

Tokens = Mapping[str, int]
"""Texts that are one token, with their ids."""

_MAX_SPACE = 8
"""Most white space in a row within arguments; without a bound a weak model may never stop."""


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How a family writes calls; `{name}` is the name of the tool, `{json_name}` its JSON text."""

    begin: str
    end: str
    trigger: str = "<tool_call>"
    """Text that only calls begin with, in families without a section."""
    style: Literal["json", "qwen_xml", "glm_xml", "minimax_xml"] = "json"
    """How arguments are written, by xgrammar's names."""
    numbered: str = ""
    """Text after the number of the call, in families that number calls after `begin`."""
    section: tuple[str, str] = ("", "")
    """Texts before and after all calls."""
    separator: str = "\n"
    """Text between two calls."""
    single: bool = False
    """Whether an answer holds at most one call."""


HERMES = CallForm(begin='<tool_call>\n{{"name": {json_name}, "arguments": ', end="}}\n</tool_call>")
_FUNCTION_XML = CallForm(
    begin="<tool_call>\n<function={name}>\n",
    end="\n</function>\n</tool_call>",
    style="qwen_xml",
)
_GLM_45 = CallForm(begin="<tool_call>{name}\n", end="\n</tool_call>", style="glm_xml")
_GLM_5 = CallForm(begin="<tool_call>{name}", end="</tool_call>", style="glm_xml", separator="")
_DEEPSEEK = CallForm(
    begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
_KIMI = CallForm(
    begin="<|tool_call_begin|>functions.{name}:",
    numbered="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    separator="",
)

_FORMS: Mapping[str, CallForm] = {
    "qwen3": HERMES,
    "qwen3-vl": HERMES,
    **dict.fromkeys(("qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3"), _FUNCTION_XML),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), _FUNCTION_XML),
    **dict.fromkeys(("glm-4.5", "laguna-xs.2", "laguna-m.1"), _GLM_45),
    **dict.fromkeys(("glm-5", "glm-5.1", "glm-5.3", "laguna-xs-2.1", "laguna-s-2.1"), _GLM_5),
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "kimi-k2": _KIMI,
    "kimi-k2.5": _KIMI,
    "minimax-m2": CallForm(
        begin='<invoke name="{name}">\n',
        end="</invoke>\n",
        style="minimax_xml",
        section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        separator="",
    ),
    "llama-3": CallForm(
        begin='{{"name": {json_name}, "parameters": ',
        end="}}",
        trigger='{"name": ',
        separator="",
        single=True,
    ),
}


def family_grammar(
    family: str, tools: Sequence[Tool], choice: ToolChoice, *, tokens: Tokens
) -> Mapping[str, object] | None:
    """A grammar for calls in the markup of a family; None if nothing is forced.

    Raises:
        RequestRefused: a call is forced, but the family's markup has no grammar here.
    """
    form = _FORMS.get(family)
    if form is not None:
        return call_grammar(form, tools, choice, tokens=tokens)
    if _offered(tools, choice) is None:
        return None
    forced = choice.mode == "required"
    raise RequestRefused(
        f"calls of the family {family} cannot be enforced: "
        + ("use tool_choice auto or none" if forced else "leave out strict"),
        param="tool_choice" if forced else "tools",
    )


def call_grammar(
    form: CallForm, tools: Sequence[Tool], choice: ToolChoice, *, tokens: Tokens
) -> Mapping[str, object] | None:
    """A grammar for calls in one form; None if nothing is forced.

    Args:
        form: How calls are written.
        tools: The tools of the request.
        choice: Whether and which of them must be called.
        tokens: Texts that are one token, with their ids. A marker among them is forced as that
            token, because parsers do not read it when other tokens spell it.

    Raises:
        RequestRefused: the tool that must be called is not among `tools`.
    """
    offered = _offered(tools, choice)
    if offered is None:
        return None
    first_only = form.single or not choice.parallel
    tags = [_call(form, tool, tokens) for tool in offered]
    opening, closing = form.section
    if opening:
        calls = _list(tags, form.separator, first_only=first_only)
        tags = [_tag([*_literal(opening, tokens), calls, *_literal(closing, tokens)])]
        first_only = True
    if choice.mode == "required":
        calls = _list(tags, form.separator, first_only=first_only)
    else:
        calls = _within_text(tags, opening.strip() or form.trigger, tokens, first_only=first_only)
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": calls})}


def _offered(tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool] | None:
    """The tools that may be called under a grammar; None if no grammar is needed."""
    if choice.mode == "none" or not tools:
        return None
    if choice.mode == "auto":
        # Tools that are not strict take any object as arguments.
        loose = [tool if tool.strict else replace(tool, parameters={}) for tool in tools]
        return loose if any(tool.strict for tool in tools) else None
    offered = [tool for tool in tools if choice.name in (None, tool.name)]
    if not offered:
        raise RequestRefused(
            f"tool_choice names {choice.name!r}, which is not among the tools", 400, "tool_choice"
        )
    return offered


def _list(tags: Sequence[Format], separator: str, *, first_only: bool) -> Format:
    """One or more of `tags` and nothing else."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": first_only,
    }


def _within_text(
    tags: Sequence[Format], trigger: str, tokens: Tokens, *, first_only: bool
) -> Format:
    """Free text with `tags` in it; text that begins with `trigger` must be one of them."""
    by_token = trigger in tokens
    triggers: Format = (
        {"type": "token_triggered_tags", "trigger_tokens": [tokens[trigger]]}
        if by_token
        else {"type": "triggered_tags", "triggers": [trigger]}
    )
    return {**triggers, "tags": tags, "at_least_one": False, "stop_after_first": first_only}


def _call(form: CallForm, tool: Tool, tokens: Tokens) -> Format:
    names = {"name": tool.name, "json_name": unescaped_json(tool.name)}
    arguments: list[Format] = [
        {
            "type": "json_schema",
            "json_schema": dict(tool.parameters) or {"type": "object"},
            "style": form.style,
            "max_whitespace_cnt": _MAX_SPACE,
        }
    ]
    if form.numbered:
        number: Format = {"type": "regex", "pattern": "[0-9]"}
        arguments = [number, *_literal(form.numbered, tokens), *arguments]
    return _tag(
        [
            *_literal(form.begin.format(**names), tokens),
            *arguments,
            *_literal(form.end.format(**names), tokens),
        ]
    )


def _literal(text: str, tokens: Tokens) -> list[Format]:
    """A format that forces `text`: as tokens where it spells tokens, as characters elsewhere."""
    names = sorted(tokens, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, names))})" if names else r"(?!)")
    return [
        {"type": "token", "token": tokens[piece]}
        if piece in tokens
        else {"type": "const_string", "value": piece}
        for piece in pattern.split(text)
        if piece
    ]


def _tag(parts: Sequence[Format]) -> Format:
    """The parts in order, as a tag: the first is its beginning, the last its end."""
    first, *content, last = parts
    return {
        "type": "tag",
        "begin": first.get("value", first),
        "content": {"type": "sequence", "elements": content},
        "end": last.get("value", last),
    }
