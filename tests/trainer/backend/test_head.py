"""Scores of tokens against numbers worked by hand and against dense logits."""

import math

import pytest
import torch
from torch import Tensor

from onlinerl.trainer.backend import head
from onlinerl.trainer.backend.head import TokenScores, score_tokens


def score(
    hidden: Tensor, weight: Tensor, *, temperature: float = 1.0, base: Tensor | None = None
) -> TokenScores:
    """Hidden states are logits when `weight` is the identity."""
    return score_tokens(
        hidden,
        head=lambda x: x @ weight,
        targets_N=torch.zeros(len(hidden), dtype=torch.int64),
        temperatures_N=torch.full((len(hidden),), temperature),
        base_hidden_ND=base,
        base_head=None if base is None else (lambda x: x @ weight),
        vocabulary=weight.shape[1],
    )


def test_logprob_and_entropy_of_a_known_distribution() -> None:
    # Logits log 3 and 0: probabilities 3/4 and 1/4.
    scores = score(torch.tensor([[math.log(3.0), 0.0]]), torch.eye(2))

    assert scores.logprobs_N.tolist() == pytest.approx([math.log(0.75)])
    assert scores.entropy_N.tolist() == pytest.approx(
        [-0.75 * math.log(0.75) - 0.25 * math.log(0.25)]
    )
    assert scores.kl_N.tolist() == [0.0]


def test_the_temperature_divides_the_logits() -> None:
    # At temperature 1/2 the odds of 3 to 1 become 9 to 1.
    scores = score(torch.tensor([[math.log(3.0), 0.0]]), torch.eye(2), temperature=0.5)

    assert scores.logprobs_N.tolist() == pytest.approx([math.log(0.9)])


def test_the_kl_is_exact_over_the_vocabulary() -> None:
    hidden = torch.tensor([[math.log(3.0), 0.0]])
    base = torch.zeros(1, 2)
    scores = score(hidden, torch.eye(2), base=base)

    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert scores.kl_N.tolist() == pytest.approx([expected])


def test_the_gradient_of_the_kl_pulls_towards_the_base() -> None:
    hidden = torch.tensor([[math.log(3.0), 0.0]], requires_grad=True)
    score(hidden, torch.eye(2), base=torch.zeros(1, 2)).kl_N.sum().backward()

    # d KL / d logit_i = p_i (log(p_i / q_i) - KL).
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    expected = [0.75 * (math.log(1.5) - kl), 0.25 * (math.log(0.5) - kl)]
    assert hidden.grad is not None
    assert hidden.grad[0].tolist() == pytest.approx(expected)


def test_chunks_give_the_same_scores_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    start, weight, base = torch.randn(7, 5), torch.randn(5, 11), torch.randn(7, 5)

    def run(bound: int) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(head, "LOGITS_PER_CHUNK", bound)
        hidden = start.clone().requires_grad_()
        scores = score(hidden, weight, temperature=0.7, base=base)
        (scores.logprobs_N + scores.kl_N).sum().backward()
        assert hidden.grad is not None
        return scores.logprobs_N.detach(), hidden.grad

    for small, whole in zip(run(22), run(1 << 20), strict=True):
        torch.testing.assert_close(small, whole)
