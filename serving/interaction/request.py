"""A request in the one form that the gateway works with, whatever the protocol.

`Wire.read` of a protocol makes it; renderer, router and capture know no other form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from onlinerl.rollout_store.schema import Protocol, Sampling

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call that a model made."""

    id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    """An assistant's reasoning before `content`; None when the caller did not send any."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant."""
    tool_call_id: str | None = None
    """For a tool's message: the call that it answers."""
    name: str | None = None
    """For a tool's message: the name of the tool, where the protocol has it."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    """JSON schema of the arguments."""
    strict: bool = False
    """Whether the engine enforces the schema on the arguments."""


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """Whether tools may, must or must not be called."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    """The one tool that must be called; `mode` is then `required`."""
    parallel: bool = True
    """Whether one answer may hold several calls."""


@dataclass(frozen=True, kw_only=True)
class JsonFormat:
    """The answer must be JSON."""

    schema: Mapping[str, object] | None = None
    """JSON schema of the answer; None allows any JSON object."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The messages and everything else that a chat template reads."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None
    """Whether a model that can reason shall reason; None leaves it to the template."""


@dataclass(frozen=True, kw_only=True)
class RawPrompt:
    """A prompt without a template: text, or token ids (`openai.completions`)."""

    text: str | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked request with defaults filled in."""

    protocol: Protocol
    model: str
    prompt: Conversation | RawPrompt
    sampling: Sampling
    """`max_tokens` is None where neither caller nor configuration bounds it."""
    num_choices: int = 1
    stream: bool = False
    tool_choice: ToolChoice = ToolChoice()
    format: JsonFormat | None = None
    top_logprobs: int | None = None
    """Alternatives per token that the caller wants; None when it wants no log-probabilities."""
    user: str | None = None
    """User id as the caller sent it; only its keyed hash is logged."""
    session_id: str | None = None
    """From the body (`metadata`, `previous_response_id`); a header takes precedence."""
    tags: Mapping[str, str] = field(default_factory=dict)
    include_usage: bool = True
    """Whether a stream ends with the token counts."""

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation; empty for a raw prompt."""
        return self.prompt.messages if isinstance(self.prompt, Conversation) else ()
