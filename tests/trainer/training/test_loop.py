"""The loop over optimizer steps, with a backend that has no model."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from onlinerl.errors import TrainingError
from onlinerl.trainer.backend.batches import normalise
from onlinerl.trainer.backend.protocol import MemoryBackend
from onlinerl.trainer.config import TrainerConfig
from onlinerl.trainer.rollouts.data import Datum
from onlinerl.trainer.rollouts.rows import RowKey
from onlinerl.trainer.training.loop import History, check_there_is_a_signal, train
from tests.trainer.builders import datum


def steps_of(count: int, *, advantage: float = 1.0) -> list[list[Datum]]:
    return [normalise([datum(seed=n, advantage=advantage)]) for n in range(count)]


def run(
    backend: MemoryBackend,
    steps: Sequence[Sequence[Datum]],
    *,
    fresh: frozenset[RowKey] = frozenset(),
    **config: float,
) -> History:
    return train(
        backend,
        steps,
        config=TrainerConfig.model_validate({"kl_coef": 0.0} | config),
        fresh=fresh,
        on_step=lambda number, metrics: None,
    )


def test_every_step_is_taken_while_the_policy_is_near() -> None:
    backend = MemoryBackend(drift=0.001)
    history = run(backend, steps_of(4))

    assert history.stopped is None
    assert len(backend.steps) == len(history.steps) == history.num_planned == 4
    assert history.first_log_ratio == pytest.approx(np.zeros(4))
    assert history.last_log_ratio == pytest.approx(np.full(4, 0.003))


@pytest.mark.parametrize(
    ("bounds", "word"),
    [({"stop_k3": 0.05}, "k3"), ({"stop_k3": 10.0, "stop_ess": 0.99}, "ESS")],
)
def test_a_cycle_stops_before_the_step_that_is_out_of_bounds(
    bounds: dict[str, float], word: str
) -> None:
    # After two steps log r = +-0.8: k3 = 0.26 on average and the ratios differ.
    backend = MemoryBackend(drift=0.4)
    up, down = steps_of(5), steps_of(5, advantage=-1.0)
    mixed = [[*step, *other] for step, other in zip(up, down, strict=True)]
    history = run(backend, mixed, fresh=frozenset(), **bounds)

    assert history.stopped is not None
    assert word in history.stopped
    assert len(backend.steps) == 1
    assert len(history.steps) == 2
    assert "grad_norm" not in history.steps[-1]


def test_the_first_step_is_not_stopped_by_rows_of_older_policies() -> None:
    history = run(MemoryBackend(), steps_of(1), stop_k3=1e-9)

    assert history.stopped is None


def test_the_learning_rate_warms_up() -> None:
    backend = MemoryBackend(drift=0.0)
    run(backend, steps_of(4), learning_rate=3.0e-4, warmup_steps=2)

    rates = [step.learning_rate for step in backend.steps]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 3e-4])


def test_a_window_without_a_trainable_token_is_an_error() -> None:
    plain = datum()
    mask = np.zeros_like(plain.loss_fn_inputs.mask)
    empty = replace(plain, loss_fn_inputs=replace(plain.loss_fn_inputs, mask=mask))

    with pytest.raises(TrainingError, match="no trainable token"):
        check_there_is_a_signal([[empty]])


def test_a_window_without_an_advantage_is_an_error() -> None:
    with pytest.raises(TrainingError, match="every advantage"):
        check_there_is_a_signal(steps_of(2, advantage=0.0))


class WrongWeights(MemoryBackend):
    """Its first logprobs are 0.2 away from what was logged."""

    def _logprobs(self, datum: Datum) -> np.ndarray:
        return super()._logprobs(datum) + 0.2


def test_an_engine_that_served_other_weights_fails_the_cycle() -> None:
    backend = WrongWeights()

    with pytest.raises(TrainingError, match=r"mean \|log r\| of 0.200 .* other weights"):
        run(backend, steps_of(2), fresh=frozenset({("i0000", 0)}), max_engine_gap=0.1)
    assert backend.steps == []


def test_rows_of_older_versions_may_be_far_before_the_first_step() -> None:
    history = run(WrongWeights(), steps_of(2), max_engine_gap=0.1, stop_k3=1.0)

    assert history.stopped is None
    assert "engine_gap" not in history.steps[0]
