"""Makes the exact tokens that an engine gets for a request, and remembers those it answers.

The prompt of a request that continues a known turn starts with that turn's tokens, as sampled.
"""

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from onlinerl.errors import RequestRefused
from onlinerl.rollout_store.schema import Consent
from onlinerl.serving.conversations.digests import tools_digest
from onlinerl.serving.conversations.memory import Conversations, Match, Scope, Turn
from onlinerl.serving.gateway.choice import Choice
from onlinerl.serving.interaction.caller import Caller, intersect_consents
from onlinerl.serving.interaction.exchange import Exchange, Lineage
from onlinerl.serving.interaction.request import Conversation, Message, RawPrompt, Request, Tool
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.rendering.protocol import Renderer

MAX_TRIES = 3
"""Known turns that a prompt tries to extend, the longest first."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The prompt that an engine gets."""

    token_ids: Sequence[int]
    lineage: Lineage
    session_is_known: bool
    """False when the session id was made for this request."""
    scope: Scope | None = None
    """Where the answer is remembered; None for a raw prompt, whose answer is not."""
    extends: Match | None = None
    """The known turn whose tokens this prompt starts with."""


class Prompts:
    """Renders new messages and remembers served turns. It may only be used in the event loop."""

    def __init__(
        self,
        renderer: Renderer,
        conversations: Conversations,
        *,
        metrics: GatewayMetrics,
        max_model_len: int,
        new_id: Callable[[], str],
    ) -> None:
        self._renderer = renderer
        self._conversations = conversations
        self._metrics = metrics
        self._max_model_len = max_model_len
        self._new_id = new_id

    def make(
        self, request: Request, *, caller: Caller, consent: Consent, session_id: str | None
    ) -> Prompt:
        """Make the prompt of a request.

        Args:
            request: What is asked.
            caller: Who asks.
            consent: Consent that the row will be logged with.
            session_id: Session that the caller gave; without one, that of the known conversation.

        Raises:
            RequestRefused: when it is too large, or cannot be rendered.
        """
        prompt = self._render(request, caller=caller, consent=consent, session_id=session_id)
        if prompt.extends is not None:
            self._metrics.answers.extended.labels("yes").inc()
        elif any(message.role == "assistant" for message in request.messages):
            self._metrics.answers.extended.labels("no").inc()
        return prompt

    def count(self, request: Request, *, caller: Caller, session_id: str | None) -> int:
        """Number of tokens that the prompt of a request has now.

        Raises:
            RequestRefused: when it is too large, or cannot be rendered.
        """
        prompt = self._render(request, caller=caller, consent="none", session_id=session_id)
        return len(prompt.token_ids)

    def _render(
        self, request: Request, *, caller: Caller, consent: Consent, session_id: str | None
    ) -> Prompt:
        self._refuse_oversized(request)
        if isinstance(request.prompt, RawPrompt):
            ids = self._raw(request.prompt)
            return self._root(ids, session_id=session_id)
        conversation = request.prompt
        scope = _scope(request, caller=caller, session_id=session_id)
        matches = self._conversations.matches(conversation.messages, scope=scope)
        longest = next(matches, None)
        candidates = [] if longest is None else [longest, *islice(matches, MAX_TRIES - 1)]
        for match in candidates:
            rest = self._rest(conversation, match)
            # Sampled reasoning stays in the prompt, where the template might drop it, so it may not
            # fit any more.
            if rest and self._fits(request, len(match.turn.token_ids) + len(rest)):
                return Prompt(
                    token_ids=match.turn.token_ids + array("i", rest),
                    lineage=_lineage(match.turn, consent=consent),
                    session_is_known=True,
                    scope=scope,
                    extends=match,
                )
        known_session = session_id if longest is None else longest.turn.session_id
        ids = self._renderer.render(conversation)
        return self._root(ids, session_id=known_session, scope=scope)

    def remember(self, exchange: Exchange, prompt: Prompt, choice: Choice, *, logged: bool) -> None:
        """Remember an answer that reached its end, so that the next turn extends it."""
        if choice.sampled.finish_reason not in ("stop", "length", "tool_calls"):
            return
        if prompt.scope is None or not isinstance(exchange.request.prompt, Conversation):
            return
        turn = Turn(
            interaction_id=exchange.interaction_id,
            choice_index=choice.sampled.choice_index,
            session_id=exchange.lineage.session_id,
            token_ids=array("i", [*exchange.prompt_ids, *choice.sampled.token_ids]),
            thinking=exchange.request.prompt.thinking,
            consent=exchange.consent,
            is_whole=not choice.is_cut,
            is_logged=logged,
        )
        self._conversations.remember(
            [*exchange.request.messages, choice.message],
            turn,
            scope=prompt.scope,
            extends=prompt.extends,
        )

    def _raw(self, prompt: RawPrompt) -> Sequence[int]:
        ids = self._renderer.tokenize(prompt.text) if prompt.text is not None else prompt.token_ids
        if not ids:
            raise RequestRefused("prompt is empty: give at least one token", 400, "prompt")
        return ids

    def _rest(self, conversation: Conversation, match: Match) -> Sequence[int]:
        """Tokens that follow those of the known turn; empty when they cannot be determined."""
        turn = match.turn
        if not turn.is_whole or not self._has_same_prefix(conversation, match):
            return []
        return self._renderer.extend(
            conversation, num_known=match.num_messages, known_ids=turn.token_ids
        )

    def _has_same_prefix(self, conversation: Conversation, match: Match) -> bool:
        """Whether the template would now render the known turn's prompt as it did then."""
        if match.turn.thinking == conversation.thinking:
            return True
        # Sampled reasoning stays, so whether the template would write it does not matter.
        messages = [
            replace(message, reasoning=None)
            for message in conversation.messages[: match.num_messages - 1]
        ]
        known = replace(conversation, messages=tuple(messages))
        return self._renderer.is_same_prompt(known, thinking=match.turn.thinking)

    def _fits(self, request: Request, num_prompt: int) -> bool:
        """Whether the model's context has room for a prompt and its completion."""
        return num_prompt + (request.sampling.max_tokens or 1) <= self._max_model_len

    def _root(
        self, token_ids: Sequence[int], *, session_id: str | None, scope: Scope | None = None
    ) -> Prompt:
        return Prompt(
            token_ids=token_ids,
            lineage=Lineage(session_id=session_id or self._new_id()),
            session_is_known=session_id is not None,
            scope=scope,
        )

    def _refuse_oversized(self, request: Request) -> None:
        """Refuse by its bytes what cannot fit, because rendering it would block the event loop."""
        size = num_bytes(request.prompt)
        if size > self._max_model_len * self._renderer.longest_token:
            raise RequestRefused(
                f"{size} bytes exceed the {self._max_model_len} tokens of this model",
                400,
                prompt_param(request),
                "context_length_exceeded",
            )


def num_bytes(prompt: Conversation | RawPrompt) -> int:
    """UTF-8 bytes of a prompt; a token id of a raw prompt counts as one byte."""
    if isinstance(prompt, RawPrompt):
        return len((prompt.text or "").encode()) + len(prompt.token_ids)
    tools = sum(
        len(tool.name) + len(tool.description) + len(json.dumps(tool.parameters))
        for tool in prompt.tools
    )
    return tools + sum(_message_bytes(message) for message in prompt.messages)


def prompt_param(request: Request) -> str:
    """Name of the parameter that holds the prompt."""
    return "prompt" if isinstance(request.prompt, RawPrompt) else "messages"


def tools_of(request: Request) -> Sequence[Tool]:
    """The tools that are shown to the model; none for a raw prompt."""
    return request.prompt.tools if isinstance(request.prompt, Conversation) else ()


def _lineage(turn: Turn, *, consent: Consent) -> Lineage:
    # A row must be readable under its own consent, so its parent's consent may not be narrower.
    is_covered = intersect_consents(turn.consent, consent) == consent
    if not (turn.is_logged and is_covered):
        return Lineage(session_id=turn.session_id)
    return Lineage(
        session_id=turn.session_id,
        parent_id=turn.interaction_id,
        parent_choice=turn.choice_index,
        prefix_length=len(turn.token_ids),
    )


def _message_bytes(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    return calls + len(message.content.encode()) + len((message.reasoning or "").encode())


def _scope(request: Request, *, caller: Caller, session_id: str | None) -> Scope:
    return Scope(
        tenant=caller.tenant,
        user=request.user,
        session_id=session_id,
        tools=tools_digest(tools_of(request)),
    )
