"""The measurements of a gate job, computed with torch in a process of its own.

All computation is in float32, so that numbers depend on the weights and not on the machine.
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
    """Measure everything that the gates, and the verification after a swap, need of a candidate."""
    candidate, tokenizer = load(spec.candidate)
    num_nonfinite = count_nonfinite(candidate)
    text = reference_tokens(tokenizer, spec.reference)
    candidate_perplexity = perplexity(candidate, text, window=spec.reference.window)
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
        answers = [_sum_logprobs(*each) for each in zip(spec.answers, theirs, ours, strict=True)]
    base_perplexity = None
    if spec.base is not None:
        base, _ = load(spec.base)
        base_perplexity = perplexity(base, text, window=spec.reference.window)
    return Measurements(
        num_nonfinite=num_nonfinite,
        k3=k3,
        num_tokens=num_tokens,
        answers=answers,
        perplexity=candidate_perplexity,
        base_perplexity=base_perplexity,
        probes=probes,
    )


def load(folder: Path) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """The model, in float32, and the tokenizer of a checkpoint folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def count_nonfinite(model: torch.nn.Module) -> int:
    """Number of weights that are infinite or not a number."""
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
    """Log-probability of every token of the answer at the temperature it was served with, nats."""
    token_ids = answer.prompt_token_ids + answer.completion_token_ids
    logprobs = score(model, token_ids, temperature=answer.temperature)
    return logprobs[len(answer.prompt_token_ids) - 1 :]


def drift(candidate: Sequence[Tensor], champion: Sequence[Tensor]) -> tuple[float, int]:
    """The distance k3 and the number of tokens that it was measured on.

    k3 is the mean over all tokens of r - log r - 1 with r = candidate / champion (Schulman 2020).
    It is never negative, and an unbiased estimate of KL(champion || candidate) in nats when the
    champion sampled the tokens.

    Args:
        candidate: Log-probabilities of the tokens of each answer under the candidate.
        champion: Those of the same tokens under the champion.
    """
    log_ratio = torch.cat(list(candidate)).double() - torch.cat(list(champion)).double()
    log_ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return float((log_ratio.exp() - log_ratio - 1).mean()), log_ratio.numel()


def _sum_logprobs(answer: HeldOutAnswer, champion: Tensor, candidate: Tensor) -> AnswerScore:
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
    """Exp of the mean negative log-probability, without the first token of each window."""
    pieces = [token_ids[start : start + window] for start in range(0, len(token_ids), window)]
    logprobs = torch.cat([score(model, piece) for piece in pieces if len(piece) > 1])
    return math.exp(min(-float(logprobs.double().mean()), 700.0))


def probe_sequences(reference: Sequence[int], *, count: int, length: int) -> list[list[int]]:
    """Up to `count` pieces of the reference text, each of `length` tokens.

    Probes are stored with the version, so they must not contain text of users.
    """
    starts = range(0, max(1, len(reference) - length), length)
    pieces = [list(reference[start : start + length]) for start in starts]
    return [ids for ids in pieces if len(ids) > 1][:count]
