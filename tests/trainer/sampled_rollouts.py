"""Interactions that a model really sampled, with the logprobs of what it was sampled from."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from onlinerl.rollout_store.schema import FeedbackRow, InteractionRow, Sampling
from tests.trainer.builders import feedback, interaction


def sample_interactions(
    model_dir: Path, *, count: int, length: int = 12, temperature: float = 0.7, **changes: object
) -> list[InteractionRow]:
    """`count` completions of prompts of different lengths."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        prompt = torch.randint(3, 1000, (3 + number % 5,), generator=generator).tolist()
        tokens, logprobs = _sample(
            model, prompt, length=length, temperature=temperature, generator=generator
        )
        rows.append(
            interaction(
                number,
                prompt_token_ids=prompt,
                completion_token_ids=tokens,
                logprobs=logprobs,
                sampling=Sampling(temperature=temperature),
                **changes,
            )
        )
    return rows


def prefer_even_tokens(rows: list[InteractionRow]) -> list[FeedbackRow]:
    """A preference that a policy can learn: the first token of the answer is even."""
    return [feedback(row, value=float(row.completion_token_ids[0] % 2 == 0)) for row in rows]


def _sample(
    model: torch.nn.Module,
    prompt: list[int],
    *,
    length: int,
    temperature: float,
    generator: torch.Generator,
) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(length):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1].float()
        log_probabilities = torch.log_softmax(logits / temperature, dim=0)
        token = int(torch.multinomial(log_probabilities.exp(), 1, generator=generator))
        tokens.append(token)
        logprobs.append(float(log_probabilities[token]))
    return tokens, logprobs
