"""Conversations as the dictionaries that chat templates read.

Every text of the caller passes through `ControlTokens`, so that none of it becomes a control token.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from onlinerl.serving.encoding.json import read_json_text, unescaped_json
from onlinerl.serving.interaction.request import Conversation, Message, Tool, ToolCall
from onlinerl.serving.parsing import hermes
from onlinerl.serving.tokens.control_tokens import ControlTokens

TemplateMessage = dict[str, object]


def tool_specs(tools: Sequence[Tool]) -> list[Mapping[str, object]]:
    """Tools in OpenAI's form, which templates and renderers read."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in tools
    ]


def hidden_specs(tools: Sequence[Tool], control: ControlTokens) -> list[Mapping[str, object]]:
    """`tool_specs` with control tokens hidden."""
    hidden = control.hide_json(tool_specs(tools))
    assert isinstance(hidden, list)
    return hidden


def native_messages(messages: Sequence[Message], control: ControlTokens) -> list[TemplateMessage]:
    """For templates that know tools, and for conversations without them."""
    return [_native(message, names, control) for message, names in _with_names(messages)]


def hermes_messages(
    conversation: Conversation, messages: Sequence[Message], control: ControlTokens
) -> list[TemplateMessage]:
    """For templates that do not know tools: system, user and assistant turns of plain text."""
    turns: list[TemplateMessage] = []
    if conversation.tools:
        first, messages = _split_system(messages)
        specs = hidden_specs(conversation.tools, control)
        turns.append({"role": "system", "content": hermes.with_tools(control.hide(first), specs)})
    for is_tool, group in groupby(messages, key=lambda message: message.role == "tool"):
        if is_tool:
            contents = [control.hide(message.content) for message in group]
            turns.append({"role": "user", "content": hermes.results(contents)})
        else:
            turns += [_hermes(message, control) for message in group]
    return turns


def arguments_object(call: ToolCall) -> object:
    """The arguments of a call, parsed; the text itself if it is not JSON."""
    try:
        return read_json_text(call.arguments)
    except ValueError:
        return call.arguments


def _split_system(messages: Sequence[Message]) -> tuple[str, Sequence[Message]]:
    if messages and messages[0].role == "system":
        return messages[0].content, messages[1:]
    return "", messages


def _hermes(message: Message, control: ControlTokens) -> TemplateMessage:
    content = control.hide(message.content)
    if message.tool_calls:
        calls = [
            (control.hide(call.name), control.hide(_arguments_text(call)))
            for call in message.tool_calls
        ]
        content = hermes.with_calls(content, calls)
    return {"role": message.role, "content": content} | _reasoning(message, control)


def _arguments_text(call: ToolCall) -> str:
    arguments = arguments_object(call)
    return arguments if isinstance(arguments, str) else unescaped_json(arguments)


def _native(message: Message, names: dict[str, str], control: ControlTokens) -> TemplateMessage:
    native: TemplateMessage = {"role": message.role, "content": control.hide(message.content)}
    if message.role == "tool":
        native["tool_call_id"] = control.hide(message.tool_call_id or "")
        name = message.name or names.get(message.tool_call_id or "")
        return native | ({"name": control.hide(name)} if name else {})
    if message.tool_calls:
        native["tool_calls"] = [
            {
                "id": control.hide(call.id),
                "type": "function",
                "function": {
                    "name": control.hide(call.name),
                    "arguments": control.hide_json(arguments_object(call)),
                },
            }
            for call in message.tool_calls
        ]
    return native | _reasoning(message, control)


def _reasoning(message: Message, control: ControlTokens) -> TemplateMessage:
    if message.role != "assistant" or message.reasoning is None:
        return {}
    return {"reasoning_content": control.hide(message.reasoning)}


def _with_names(messages: Sequence[Message]) -> list[tuple[Message, dict[str, str]]]:
    """Each message with the names of the calls before it, by their ids."""
    names: dict[str, str] = {}
    paired: list[tuple[Message, dict[str, str]]] = []
    for message in messages:
        paired.append((message, names))
        if message.tool_calls:
            names = names | {call.id: call.name for call in message.tool_calls}
    return paired
