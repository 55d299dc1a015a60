import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from onlinerl.deploy.gates.measure import (
    count_nonfinite,
    drift,
    measure,
    perplexity,
    probe_sequences,
    score,
    score_answer,
)
from onlinerl.deploy.gates.reference import TEXT
from onlinerl.deploy.gates.spec import GateSpec, HeldOutAnswer, Reference


class Unsure:
    """A language model that finds every one of eight tokens equally likely, or token 0 likelier."""

    def __init__(self, logit_of_zero: float = 0.0) -> None:
        self.bias = torch.tensor([logit_of_zero] + [0.0] * 7)

    def parameters(self) -> list[torch.Tensor]:
        return [self.bias]

    def __call__(self, ids: torch.Tensor) -> object:
        class Output:
            logits = self.bias.expand(*ids.shape, 8)

        return Output


def answer(*token_ids: int, temperature: float = 1.0) -> HeldOutAnswer:
    return HeldOutAnswer(
        prompt_token_ids=[1, 2, 3],
        completion_token_ids=list(token_ids),
        logprobs=[0.0] * len(token_ids),
        temperature=temperature,
        reward=None,
    )


def test_eight_equal_tokens_have_a_perplexity_of_eight() -> None:
    assert perplexity(Unsure(), [1, 2, 3, 4, 5, 6, 7], window=3) == pytest.approx(8.0)


def test_only_the_tokens_of_the_answer_are_scored_at_their_temperature() -> None:
    found = score_answer(Unsure(math.log(9.0)), answer(0, 5, temperature=0.5))

    # Logits / 0.5: 81 to 7 times 1.
    assert found.tolist() == pytest.approx([math.log(81 / 88), math.log(1 / 88)])


def test_drift_by_hand() -> None:
    candidate, champion = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])

    k3, num_tokens = drift([candidate, champion], [champion, champion])

    # r = 2: 2 - log 2 - 1; r = 1: 0.
    assert k3 == pytest.approx((1 - math.log(2)) / 2)
    assert num_tokens == 2


def test_a_weight_that_is_not_finite_is_counted() -> None:
    assert count_nonfinite(Unsure()) == 0
    assert count_nonfinite(Unsure(math.nan)) == 1
    assert count_nonfinite(Unsure(math.inf)) == 1


def test_probes_are_pieces_of_the_reference() -> None:
    assert probe_sequences(list(range(100)), count=2, length=4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert probe_sequences([7, 8], count=2, length=4) == [[7, 8]]
    assert probe_sequences([7], count=2, length=4) == []


@pytest.fixture
def spec(tiny_model_dir: Path) -> Callable[..., GateSpec]:
    def make(**changes: object) -> GateSpec:
        fields: dict[str, object] = {
            "candidate": tiny_model_dir,
            "champion": tiny_model_dir,
            "base": None,
            "answers": [answer(9, 10, 11), answer(12)],
            "reference": Reference(text=TEXT, max_tokens=256, window=128),
            "num_probes": 2,
            "probe_tokens": 16,
            "threads": 0,
        }
        return GateSpec.model_validate(fields | changes)

    return make


def test_a_version_does_not_drift_from_itself(
    spec: Callable[..., GateSpec], tiny_model_dir: Path
) -> None:
    found = measure(spec(base=tiny_model_dir))

    assert found.k3 == pytest.approx(0.0, abs=1e-9)
    assert found.num_tokens == 4
    assert found.num_nonfinite == 0
    assert found.perplexity == pytest.approx(found.base_perplexity)
    assert [each.candidate for each in found.answers] == pytest.approx(
        [each.champion for each in found.answers]
    )


def test_probes_hold_the_logprobs_of_the_weights(
    spec: Callable[..., GateSpec], tiny_model_dir: Path
) -> None:
    found = measure(spec(champion=None, answers=[]))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)

    assert found.k3 is None
    assert len(found.probes) == 2
    for probe in found.probes:
        assert probe.logprobs == pytest.approx(score(model, probe.token_ids).tolist())
