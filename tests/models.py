"""Models for tests: the demo's SmolLM2, and a tiny random Llama with the same tokenizer."""

import os
import shutil
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = REPOSITORY / ".cache"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted once per checkout."""
    from examples.support_desk.model import MODEL_NAME, prepare

    return prepare(CACHE / MODEL_NAME)


def tiny_model() -> Path:
    """A random 3 M-parameter Llama that speaks SmolLM2's tokens; built once per checkout."""
    target = CACHE / "tiny-llama"
    if not (target / "model.safetensors").exists():
        staging = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        make_tiny_model(staging, tokenizer_from=smollm2())
        try:
            staging.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(staging)
    return target


def make_tiny_model(path: Path, *, tokenizer_from: Path, seed: int = 0) -> Path:
    """Write a random Llama of 2 layers, 64 wide, tied embeddings, bf16, to `path`."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        # Large enough that sampling is not uniform over the vocabulary.
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
