"""The policy as a torch model: loading, what may move, and the files an engine serves.

Weights are computed with as they will be served: every parameter that moves has a float32 master
that the optimizer changes, and the model itself holds the master rounded to the checkpoint's dtype
(bfloat16). So small updates add up, and what was trained is, bit for bit, what is saved.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlinerl.errors import TrainingError

PretrainedModel = Any
"""A `transformers.PreTrainedModel` or a peft wrapper: libraries without types of their own."""

UNSUPPORTED_HEADS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Config keys of models whose logits are not simply the head of the last hidden state."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def load_model(
    path: str, *, device: torch.device, dtype: torch.dtype
) -> tuple[PretrainedModel, torch.dtype]:
    """A Hugging Face causal language model in `dtype`, and the dtype it is stored in.

    Raises:
        TrainingError: for an architecture whose logits this trainer would compute wrongly.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    odd = [name for name in UNSUPPORTED_HEADS if getattr(model.config, name, None)]
    if odd:
        raise TrainingError(f"{path}: models with {', '.join(odd)} are not supported")
    stored: torch.dtype = model.get_output_embeddings().weight.dtype
    return model.to(device=device, dtype=dtype).eval(), stored


@dataclass(frozen=True, eq=False, kw_only=True)
class Master:
    """A parameter that moves: the optimizer owns `value`, the model computes with `parameter`."""

    name: str
    parameter: nn.Parameter
    value: Tensor
    """float32."""
    served: torch.dtype | None
    """`parameter` holds `value` rounded to this; None for adapters, which are merged later."""

    def publish(self) -> None:
        """Let the model compute with the rounded value."""
        with torch.no_grad():
            rounded = self.value if self.served is None else self.value.to(self.served)
            self.parameter.copy_(rounded)


def masters_of(model: nn.Module, *, trainable: str, served: torch.dtype | None) -> list[Master]:
    """Freeze all parameters but those whose name matches, and give these their masters.

    Raises:
        TrainingError: when nothing matches.
    """
    pattern = re.compile(trainable)
    masters: list[Master] = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(pattern.search(name) is not None)
        if parameter.requires_grad:
            value = parameter.detach().clone().float()
            masters.append(Master(name=name, parameter=parameter, value=value, served=served))
    if not masters:
        raise TrainingError(f"no parameter matches trainer.trainable = {trainable!r}")
    return masters


def save_pretrained(
    model: PretrainedModel, path: Path, *, served: torch.dtype, template: Path | None
) -> None:
    """Write weights in `served` under the checkpoint's own names, with all else from `template`."""
    path.mkdir(parents=True, exist_ok=True)
    state = {name: value.to(served) for name, value in merged_state(model)}
    model.config.dtype = served
    model.save_pretrained(path, state_dict=state)
    if template is not None:
        _copy_other_files(template, path)


def merged_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by their checkpoint names, adapters merged in float32.

    Of tied weights only the first name is given, as a checkpoint holds it.
    """
    seen: set[int] = set()
    deltas = {
        f"{name}.weight": module for name, module in model.named_modules() if _is_lora(module)
    }
    for name, value in model.state_dict().items():
        if ".lora_" in name or value.data_ptr() in seen:
            continue
        seen.add(value.data_ptr())
        plain = name.replace(".base_layer.", ".")
        if plain in deltas:
            yield plain, value.float() + deltas[plain].get_delta_weight("default").float()
        else:
            yield plain, value


def _is_lora(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "get_delta_weight")


def _copy_other_files(source: Path, target: Path) -> None:
    """Tokenizer, template and configuration travel unchanged from version to version."""
    for file in source.iterdir():
        is_weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and file.name != "checkpoint.json":
            shutil.copyfile(file, target / file.name)
