"""Makes guessed tokens exact on a CPU.

vLLM's CPU kernel that repeats a request's temperature for each of its guesses writes to a copy of
the result. What comes back is memory that nobody wrote, and by it the logits are divided: guesses
are then checked, and logged, against another distribution than the model's.
"""

from types import ModuleType

import torch


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """One value per token from one per request.

    Args:
        x: One value per request.
        cu_num_tokens: Tokens up to the end of each request.
        num_tokens: Tokens of all requests.
        replace_from: A value that is replaced.
        replace_to: What it is replaced by.
    """
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.repeat_interleave(values, counts, output_size=num_tokens)


def repair(rejection_sampler: ModuleType) -> None:
    """Put `expand_batch_to_tokens` in the place of vLLM's.

    Raises:
        AttributeError: when vLLM has none, so that its version is looked at again.
    """
    if not hasattr(rejection_sampler, "expand_batch_to_tokens"):
        raise AttributeError("vLLM's rejection sampler has no expand_batch_to_tokens any more")
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens  # type: ignore[attr-defined]
