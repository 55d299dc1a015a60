"""The sampling parameters that an engine gets, and the grammar that it has to enforce."""

from collections.abc import Mapping
from dataclasses import replace

from onlinerl.errors import RequestRefused
from onlinerl.rollout_store.schema import Sampling
from onlinerl.rollout_store.trainability import SHAPING
from onlinerl.serving.interaction.request import Conversation, JsonFormat, Request
from onlinerl.serving.rendering.protocol import Renderer

Grammar = Mapping[str, object]
"""vLLM's `structured_outputs`."""


def resolve_request(request: Request) -> Request:
    """The request as it is rendered.

    Tools that may not be called are not shown to the model. A required format or call is enforced
    from the first token, so the model does not reason before it.

    Raises:
        RequestRefused: when the request also asks for reasoning.
    """
    prompt = request.prompt
    if not isinstance(prompt, Conversation):
        return request
    if request.tool_choice.mode == "none":
        prompt = replace(prompt, tools=())
    param = _enforced_param(request)
    if param is not None:
        if prompt.thinking:
            raise RequestRefused(
                f"{param} is enforced from the first token, which leaves no room for reasoning: "
                "leave one of the two out",
                400,
                param,
                "unsupported_parameter",
            )
        prompt = replace(prompt, thinking=False)
    return request if prompt is request.prompt else replace(request, prompt=prompt)


def grammar_of(request: Request, renderer: Renderer) -> Grammar | None:
    """The grammar of a request that was resolved; None when the engine samples freely.

    Raises:
        RequestRefused: for a format together with tools, or when no grammar describes the calls of
            this model's family.
    """
    tools = request.prompt.tools if isinstance(request.prompt, Conversation) else ()
    if request.format is None:
        return renderer.tool_grammar(tools, request.tool_choice) if tools else None
    if tools:
        raise RequestRefused(
            "response_format leaves no room for a call: leave out tools, or set tool_choice to "
            "none",
            400,
            "response_format",
            "unsupported_parameter",
        )
    return _format_grammar(request.format)


def engine_parameters(
    sampling: Sampling, *, choice_index: int, end_ids: frozenset[int], grammar: Grammar | None
) -> dict[str, object]:
    """VLLM's SamplingParams for one choice; the others keep their defaults."""
    parameters: dict[str, object] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": sorted(end_ids),
        # The engine needs the text only to find stop strings.
        "detokenize": bool(sampling.stop),
    }
    extra = sampling.model_extra or {}
    parameters |= {name: extra[name] for name in SHAPING if name in extra}
    if sampling.stop:
        parameters["stop"] = sampling.stop
    if sampling.seed is not None:
        parameters["seed"] = sampling.seed + choice_index
    if grammar is not None:
        parameters["structured_outputs"] = dict(grammar)
    return parameters


def _enforced_param(request: Request) -> str | None:
    """The parameter that fixes how the answer begins."""
    if request.format is not None:
        return "response_format"
    return "tool_choice" if request.tool_choice.mode == "required" else None


def _format_grammar(form: JsonFormat) -> Grammar:
    return {"json_object": True} if form.schema is None else {"json": dict(form.schema)}
