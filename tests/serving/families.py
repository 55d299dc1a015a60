"""Renderers of the families of `renderers`, over small tokenizers with their control tokens."""

# ruff: noqa: RUF001 the markers are spelled with these characters

from functools import cache

from onlinerl.serving.rendering.chat_template import ChatTemplate, ModelText
from onlinerl.serving.rendering.families import family_names
from onlinerl.serving.rendering.family_renderer import FamilyRenderer
from tests.serving.small_tokenizers import small_tokenizer

_QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_QWEN_MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>")
_GLM = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "<|endoftext|>",
)
_GLM_MARKS = (*_QWEN_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
    ),
    *("<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
_DEEPSEEK_4 = (
    *("｜DSML｜", "<think>", "</think>", "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>"),
    *("<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>"),
)
_KIMI = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "[EOS]"),
)
_MEDIA = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
_GEMMA = (
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>"),
    *("<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *("<|image>", "<|image|>", "<image|>", '<|"|>'),
)
_HY = (
    *(f"<｜hy_{name}:opensource｜>" for name in ("begin_of_sentence", "eos", "User", "Assistant")),
    "<｜reasoning_mode:opensource｜>",
    "<tool_sep:opensource>",
    *(
        f"<{slash}{name}:opensource>"
        for name in ("think", "tool_calls", "tool_call", "arg_key", "arg_value")
        for slash in ("", "/")
    ),
    *(
        f"<{slash}{name}:opensource>"
        for name in ("tool_responses", "tool_response")
        for slash in ("", "/")
    ),
)
_INKLING = (
    *(f"<|message_{role}|>" for role in ("user", "model", "system", "tool")),
    *(f"<|content_{kind}|>" for kind in ("text", "thinking", "image", "audio_input", "xml")),
    *("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"),
    *("<|content_model_end_sampling|>", "<|end_message|>", "<|audio_end|>"),
    *("<|unused_200054|>", "<|unused_200053|>", "<|endoftext|>"),
)
_LAGUNA_MARKS = (
    *("<think>", "</think>", "<assistant>", "</assistant>", "<tool_call>", "</tool_call>"),
)
_MINIMAX = ("]~!b[", "]~b]", "[e~[")
_MINIMAX_MARKS = ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")
_LLAMA = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|end_of_text|>", "<|eom_id|>"),
)
_HARMONY = (
    *("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>"),
    "<|constrain|>",
)

CONTROL_AND_MARKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "qwen3": (_QWEN, _QWEN_MARKS),
    "prime-qwen3": (_QWEN, _QWEN_MARKS),
    **dict.fromkeys(("qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"), (_QWEN + _VISION, _QWEN_MARKS)),
    **dict.fromkeys(
        ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), (_QWEN + _VISION, _QWEN_MARKS)
    ),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), (_GLM, _GLM_MARKS)),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), (_DEEPSEEK, ())),
    "deepseek-v4": (_DEEPSEEK + _DEEPSEEK_4, ()),
    "kimi-k2": (_KIMI, ()),
    "kimi-k2.5": (_KIMI + _MEDIA, ()),
    "gemma4": (_GEMMA, ()),
    "hy3": (_HY, ()),
    "inkling": (_INKLING, ()),
    **dict.fromkeys(
        ("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"),
        (("〈|EOS|〉",), _LAGUNA_MARKS),
    ),
    "minimax-m2": (_MINIMAX, _MINIMAX_MARKS),
    "llama-3": (_LLAMA, ()),
    "gpt-oss": (_HARMONY, ()),
}

FAMILIES = tuple(name for name in family_names() if name != "gpt-oss")
"""gpt-oss fetches its vocabulary from the network when it starts."""


def family_text(name: str, template: str | None = None) -> ModelText:
    """A tokenizer with the tokens of a family; its only end of text is the family's."""
    control, marks = CONTROL_AND_MARKS[name]
    return ModelText(
        tokenizer=small_tokenizer(control, plain=marks),
        template=None if template is None else ChatTemplate(template, special_tokens={}),
        end_ids=frozenset(),
    )


@cache
def family_renderer(name: str) -> FamilyRenderer:
    """The renderer of a family, made once."""
    return FamilyRenderer(name, family_text(name), source="")
