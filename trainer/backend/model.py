"""The policy as a torch model: loading, trainable parameters, and the files that an engine serves.

The model computes with the weights that will be served: every trainable parameter has a float32
master that the optimizer changes, and the model holds the master rounded to the checkpoint's dtype
(bfloat16). So small updates add up, and the saved weights are those trained with, bit for bit.
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
        TrainingError: the architecture changes its logits in a way that is not supported.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    unsupported = [name for name in UNSUPPORTED_HEADS if getattr(model.config, name, None)]
    if unsupported:
        names = ", ".join(unsupported)
        raise TrainingError(f"{path}: models with {names} are not supported")
    stored: torch.dtype = model.get_output_embeddings().weight.dtype
    return model.to(device=device, dtype=dtype).eval(), stored


@dataclass(frozen=True, eq=False, kw_only=True)
class Master:
    """A trainable parameter: the optimizer owns `value`, the model computes with `parameter`."""

    name: str
    parameter: nn.Parameter
    value: Tensor
    """float32."""
    served: torch.dtype | None
    """Dtype that `parameter` rounds `value` to; None for adapters, which are merged later."""

    def publish(self) -> None:
        """Copy the rounded value into the model."""
        with torch.no_grad():
            rounded = self.value if self.served is None else self.value.to(self.served)
            self.parameter.copy_(rounded)


def masters_of(model: nn.Module, *, trainable: str, served: torch.dtype | None) -> list[Master]:
    """Freeze all parameters but those whose name matches, and make masters for the others.

    Args:
        model: Its `requires_grad` flags are set.
        trainable: Regular expression that is searched in parameter names.
        served: Dtype of the saved weights; None for adapters.

    Raises:
        TrainingError: no name matches.
    """
    pattern = re.compile(trainable)
    masters: list[Master] = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(pattern.search(name) is not None)
        if parameter.requires_grad:
            value = parameter.detach().clone().float()
            masters.append(Master(name=name, parameter=parameter, value=value, served=served))
    if not masters:
        raise TrainingError(
            f"no parameter matches trainer.trainable = {trainable!r}; "
            "set it to a regular expression that matches some names"
        )
    return masters


def save_pretrained(
    model: PretrainedModel, path: Path, *, served: torch.dtype, template: Path | None
) -> None:
    """Write a Hugging Face folder.

    Args:
        model: Adapters in it are merged.
        path: The folder; created when missing.
        served: Dtype of the written weights.
        template: Folder whose other files, such as the tokenizer, are copied; None copies none.
    """
    path.mkdir(parents=True, exist_ok=True)
    state = {name: value.to(served) for name, value in merged_state(model)}
    model.config.dtype = served
    model.save_pretrained(path, state_dict=state)
    if template is not None:
        _copy_other_files(template, path)


def merged_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by their checkpoint names, adapters merged in float32.

    Tied weights appear once, under their first name, as in a checkpoint.
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
    """Copy tokenizer, template and configuration, which are the same in every version."""
    for file in source.iterdir():
        is_weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and file.name != "checkpoint.json":
            shutil.copyfile(file, target / file.name)
