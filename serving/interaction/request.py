"""What a caller asks for, whatever the protocol: the one form that the gateway works with.

Protocols translate into it (`Wire.read`); renderer, router and capture know nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from onlinerl.rollout_store.schema import Protocol, Sampling

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that a model made."""

    id: str
    name: str
    arguments: str
    """JSON text, as it was written."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    """What an assistant thought before `content`; None when the caller does not say."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    tool_call_id: str | None = None
    """Of a tool: the call that it answers."""
    name: str | None = None
    """Of a tool: its name, where the protocol says it."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    """JSON schema of the arguments."""
    strict: bool = False
    """Whether arguments must obey the schema; the engine then enforces it."""


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """Whether tools may, must or must not be called."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    """The one tool that must be called; then `mode` is required."""
    parallel: bool = True
    """Whether one answer may hold several calls."""


@dataclass(frozen=True, kw_only=True)
class JsonFormat:
    """The answer must be JSON."""

    schema: Mapping[str, object] | None = None
    """JSON schema that it obeys; any JSON object when None."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What is rendered: the messages and everything else that a template reads."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None
    """Whether a model that can reason should; None leaves it to its template."""


@dataclass(frozen=True, kw_only=True)
class RawPrompt:
    """A prompt that is not rendered: text, or token ids (`openai.completions`)."""

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
    """Alternatives per token that the caller wants to see; None when it wants no logprobs."""
    user: str | None = None
    """As the caller named them; only a keyed hash is logged."""
    session_id: str | None = None
    """From the body (`metadata`, `previous_response_id`); a header overrules it."""
    tags: Mapping[str, str] = field(default_factory=dict)
    include_usage: bool = True
    """Whether a stream ends with the counts."""

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation; empty for a raw prompt."""
        return self.prompt.messages if isinstance(self.prompt, Conversation) else ()
