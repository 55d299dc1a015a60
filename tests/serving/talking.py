"""Builders of conversations, for tests of rendering and reading."""

from pathlib import Path

from onlinerl.serving.interaction.request import Conversation, Message, Tool, ToolCall
from onlinerl.serving.rendering.chat_template import ChatTemplate, ModelText, load_model_text

WEATHER = Tool(
    name="get_weather",
    description="The weather of a city.",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
STOP = Tool(name="stop", parameters={"type": "object", "properties": {"now": {"type": "boolean"}}})


def user(content: str) -> Message:
    return Message(role="user", content=content)


def system(content: str) -> Message:
    return Message(role="system", content=content)


def assistant(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=content, tool_calls=calls, reasoning=reasoning)


def call(
    name: str = "get_weather", arguments: str = '{"city": "Paris"}', *, n: int = 0
) -> ToolCall:
    return ToolCall(id=f"functions.{name}:{n}", name=name, arguments=arguments)


def result(content: str, *, of: ToolCall) -> Message:
    return Message(role="tool", content=content, tool_call_id=of.id)


def talk(
    *messages: Message, tools: tuple[Tool, ...] = (), thinking: bool | None = None
) -> Conversation:
    return Conversation(messages=messages, tools=tools, thinking=thinking)


def chat(*contents: str) -> Conversation:
    """Turns of user and assistant."""
    return talk(*(assistant(text) if n % 2 else user(text) for n, text in enumerate(contents)))


def with_template(folder: Path, source: str) -> ModelText:
    """The tokenizer of `folder` with another chat template."""
    text = load_model_text(str(folder))
    template = ChatTemplate(source, special_tokens={})
    return ModelText(tokenizer=text.tokenizer, template=template, end_ids=text.end_ids)
