"""Tool calls in the form of Hermes, which most ChatML models write.

Tools are described in the system message. A call is `<tool_call>` around JSON with `name` and
`arguments`; a result is `<tool_response>` in a user turn. This module writes that form for models
whose own chat template cannot.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onlinerl.serving.encoding.json import read_json_text, unescaped_json

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
_RESULT_OPEN = "<tool_response>"
_RESULT_CLOSE = "</tool_response>"

_HEADER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_FOOTER = """
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

Turn = Mapping[str, str]
"""`role` and `content`."""


def with_tools(system: str, tools: Sequence[Mapping[str, object]]) -> str:
    """A system message that also describes `tools` (OpenAI's form)."""
    lines = "\n".join(unescaped_json(tool) for tool in tools)
    block = f"{_HEADER}{lines}{_FOOTER}"
    return f"{system}\n\n{block}" if system else block


def with_calls(content: str, calls: Sequence[tuple[str, str]]) -> str:
    """An assistant's text and its calls: names with the JSON text of their arguments."""
    blocks = [
        f'{CALL_OPEN}\n{{"name": {unescaped_json(name)}, "arguments": {arguments}}}\n{CALL_CLOSE}'
        for name, arguments in calls
    ]
    return "\n".join([content, *blocks] if content else blocks)


def results(contents: Sequence[str]) -> str:
    """The content of a user turn with the results of one or more calls."""
    return "\n".join(f"{_RESULT_OPEN}\n{content}\n{_RESULT_CLOSE}" for content in contents)


@dataclass(frozen=True, kw_only=True)
class WrittenCall:
    """The call that a model wrote between the markers."""

    name: str
    arguments: str
    """JSON text of an object, as the model wrote it."""


def read_call(text: str) -> WrittenCall | None:
    """The call in `text`, which stood between the markers; None if it is malformed."""
    try:
        members = _members(text.strip())
        name = read_json_text(members["name"])
        arguments = members.get("arguments", "{}")
        has_arguments = isinstance(read_json_text(arguments), dict)
    except (ValueError, KeyError, RecursionError):
        return None
    if not (isinstance(name, str) and name and has_arguments):
        return None
    return WrittenCall(name=name, arguments=arguments)


class JsonStart:
    """Follows the beginning of a JSON value to know whether it ends within one of its strings."""

    def __init__(self) -> None:
        self.inside_text = False
        self._escaped = False

    def push(self, piece: str) -> None:
        """Add the next piece of the value."""
        inside, escaped = self.inside_text, self._escaped
        for character in piece:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = inside
            elif character == '"':
                inside = not inside
        self.inside_text, self._escaped = inside, escaped


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, with their values as they were written.

    Raises:
        ValueError: `text` is not exactly one JSON object.
    """
    decoder = json.JSONDecoder()
    members: dict[str, str] = {}
    at = _expect(text, 0, "{")
    while text[at : at + 1] != "}":
        if members:
            at = _expect(text, at, ",")
        name, at = decoder.raw_decode(text, at)
        start = _expect(text, _skip_space(text, at), ":")
        _, end = decoder.raw_decode(text, start)
        if not isinstance(name, str):
            raise ValueError("the name of a member is not a string")
        members[name] = text[start:end]
        at = _skip_space(text, end)
    if at + 1 != len(text):
        raise ValueError("text after the object")
    return members


def _expect(text: str, at: int, character: str) -> int:
    """The place after `character` and the white space that follows it."""
    if text[at : at + 1] != character:
        raise ValueError(f"no {character!r} at {at}")
    return _skip_space(text, at + 1)


def _skip_space(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in " \t\r\n":
        at += 1
    return at
