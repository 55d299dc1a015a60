"""What the gates measure, with torch: runs in a process of its own, next to serving.

Computes in float32: the weights are what they are, and the numbers do not depend on the machine.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onlinerl.deploy.gates.spec import AnswerScore, GateSpec, HeldOutAnswer, Measurements, Reference
from onlinerl.deploy.replicas.fleet import Probe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MAX_LOG_RATIO = 20.0


def measure(spec: GateSpec) -> Measurements:
    """Everything that the gates and the proof after the swap need of a candidate."""
    candidate, tokenizer = load(spec.candidate)
    num_nonfinite = count_nonfinite(candidate)
    text = reference_tokens(tokenizer, spec.reference)
    perplexity_ = perplexity(candidate, text, window=spec.reference.window)
    probe_ids = probe_sequences(text, count=spec.num_probes, length=spec.probe_tokens)
    probes = [Probe(token_ids=ids, logprobs=score(candidate, ids).tolist()) for ids in probe_ids]
    ours = [score_answer(candidate, answer) for answer in spec.answers]
    del candidate
    k3, num_tokens, answers = None, 0, list[AnswerScore]()
    if spec.champion is not None and spec.answers:
        champion, _ = load(spec.champion)
        theirs = [score_answer(champion, answer) for answer in spec.answers]
        del champion
        k3, num_tokens = drift(ours, theirs)
        answers = [_summed(*each) for each in zip(spec.answers, theirs, ours, strict=True)]
    base_perplexity = None
    if spec.base is not None:
        base, _ = load(spec.base)
        base_perplexity = perplexity(base, text, window=spec.reference.window)
    return Measurements(
        num_nonfinite=num_nonfinite,
        k3=k3,
        num_tokens=num_tokens,
        answers=answers,
        perplexity=perplexity_,
        base_perplexity=base_perplexity,
        probes=probes,
    )


def load(folder: Path) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Model and tokenizer of a checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def count_nonfinite(model: torch.nn.Module) -> int:
    """Weights that are infinite or not a number."""
    return sum(int((~torch.isfinite(weight)).sum()) for weight in model.parameters())


def score(
    model: "PreTrainedModel", token_ids: Sequence[int], *, temperature: float = 1.0
) -> Tensor:
    """Log-probability of every token after the first, nats."""
    ids = torch.tensor(token_ids)
    with torch.inference_mode():
        logits = model(ids[None]).logits[0, :-1].float() / temperature
    all_logprobs = logits.log_softmax(dim=-1)
    return all_logprobs.gather(1, ids[1:, None])[:, 0]


def score_answer(model: "PreTrainedModel", answer: HeldOutAnswer) -> Tensor:
    """Log-probabilities of the answer's tokens at the temperature it was served with."""
    token_ids = answer.prompt_token_ids + answer.completion_token_ids
    logprobs = score(model, token_ids, temperature=answer.temperature)
    return logprobs[len(answer.prompt_token_ids) - 1 :]


def drift(candidate: Sequence[Tensor], champion: Sequence[Tensor]) -> tuple[float, int]:
    """k3 = mean over all tokens of r - log r - 1, r = candidate / champion (Schulman 2020).

    Unbiased for KL(champion || candidate) when the champion sampled the tokens, and never negative.
    """
    log_ratio = torch.cat(list(candidate)).double() - torch.cat(list(champion)).double()
    log_ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return float((log_ratio.exp() - log_ratio - 1).mean()), log_ratio.numel()


def _summed(answer: HeldOutAnswer, champion: Tensor, candidate: Tensor) -> AnswerScore:
    return AnswerScore(
        behaviour=math.fsum(answer.logprobs),
        champion=float(champion.double().sum()),
        candidate=float(candidate.double().sum()),
        reward=answer.reward,
    )


def reference_tokens(tokenizer: "PreTrainedTokenizerBase", reference: Reference) -> list[int]:
    """The first `max_tokens` of the reference text."""
    token_ids: list[int] = tokenizer(reference.text, add_special_tokens=False).input_ids
    return token_ids[: reference.max_tokens]


def perplexity(model: "PreTrainedModel", token_ids: Sequence[int], *, window: int) -> float:
    """Exp of the mean negative log-probability; the first token of each window is not scored."""
    pieces = [token_ids[start : start + window] for start in range(0, len(token_ids), window)]
    logprobs = torch.cat([score(model, piece) for piece in pieces if len(piece) > 1])
    return math.exp(min(-float(logprobs.double().mean()), 700.0))


def probe_sequences(reference: Sequence[int], *, count: int, length: int) -> list[list[int]]:
    """Pieces of the reference: probes are kept with the version, so they quote no user."""
    starts = range(0, max(1, len(reference) - length), length)
    pieces = [list(reference[start : start + length]) for start in starts]
    return [ids for ids in pieces if len(ids) > 1][:count]
