"""The local backend on a tiny model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from onlinerl.errors import TrainingError
from onlinerl.trainer.backend.protocol import AdamParams
from onlinerl.trainer.backend.torch_backend import TorchBackend
from onlinerl.trainer.config import TrainerConfig
from onlinerl.trainer.losses.spec import LossSpec
from onlinerl.trainer.rollouts.data import Datum
from tests.trainer.builders import datum

PLAIN = LossSpec()


def backend(model: Path, *, base: Path | None = None, **config: object) -> TorchBackend:
    settings = {"device": "cpu", "compute_dtype": "float32"} | config
    return TorchBackend(
        model,
        base=None if base is None else str(base),
        config=TrainerConfig.model_validate(settings),
        seed=0,
    )


def gradients(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in backend._model.named_parameters()
        if parameter.grad is not None
    }


def some_data() -> list[Datum]:
    return [
        datum(3, 4, seed=1, weight=0.1, temperature=0.7),
        datum(6, 9, seed=2, weight=0.05, advantage=-0.5),
        datum(2, 1, seed=3, weight=0.2),
        datum(1, 7, seed=4, weight=0.02, advantage=2.0),
    ]


def test_logprobs_are_those_of_transformers_at_the_rows_temperature(tiny_model_dir: Path) -> None:
    data = some_data()
    found = backend(tiny_model_dir).forward_backward(data, loss=PLAIN).logprobs

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    for item, logprobs in zip(data, found, strict=True):
        inputs = item.loss_fn_inputs
        with torch.no_grad():
            logits = model(torch.from_numpy(item.model_input)[None]).logits[0]
        scaled = logits / torch.from_numpy(inputs.temperatures)[:, None]
        dense = torch.log_softmax(scaled, dim=1)[
            torch.arange(item.num_tokens), torch.from_numpy(inputs.target_tokens)
        ]
        assert logprobs == pytest.approx(dense.numpy()[inputs.mask], abs=1e-4)


def test_gradients_of_chunks_add_up_to_the_gradient_of_the_whole(tiny_model_dir: Path) -> None:
    whole = backend(tiny_model_dir, base=tiny_model_dir, micro_batch_tokens=4096)
    chunks = backend(tiny_model_dir, base=tiny_model_dir, micro_batch_tokens=16)
    spec = LossSpec(kl_coef=0.1)

    one = whole.forward_backward(some_data(), loss=spec)
    other = chunks.forward_backward(some_data(), loss=spec)

    assert other.metrics == pytest.approx(one.metrics, rel=1e-4, abs=1e-6)
    expected = gradients(whole)
    for name, gradient in gradients(chunks).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


def test_two_calls_before_a_step_add_up_as_well(tiny_model_dir: Path) -> None:
    together, apart = backend(tiny_model_dir), backend(tiny_model_dir)
    together.forward_backward(some_data(), loss=PLAIN)
    for item in some_data():
        apart.forward_backward([item], loss=PLAIN)

    expected = gradients(together)
    for name, gradient in gradients(apart).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("poison", [-np.inf, np.nan])
def test_what_is_off_the_mask_never_enters_the_loss(tiny_model_dir: Path, poison: float) -> None:
    clean, poisoned = backend(tiny_model_dir), backend(tiny_model_dir)

    one = clean.forward_backward([datum(off_mask=0.0), datum(1, 1, seed=1)], loss=PLAIN)
    other = poisoned.forward_backward([datum(off_mask=poison), datum(1, 1, seed=1)], loss=PLAIN)

    assert other.metrics == one.metrics
    expected = gradients(clean)
    for name, gradient in gradients(poisoned).items():
        assert torch.equal(gradient, expected[name])


def test_padding_leaves_the_logprobs_unchanged(tiny_model_dir: Path) -> None:
    short, long = datum(2, 3, seed=1), datum(20, 30, seed=2)
    tested = backend(tiny_model_dir)

    (alone,) = tested.forward_backward([short], loss=PLAIN).logprobs
    beside, _ = tested.forward_backward([short, long], loss=PLAIN).logprobs

    assert beside == pytest.approx(alone, abs=1e-4)


def test_a_batch_without_a_trainable_token_is_an_error(tiny_model_dir: Path) -> None:
    with pytest.raises(TrainingError, match="no trainable token"):
        backend(tiny_model_dir).forward_backward([], loss=PLAIN)


def test_a_kl_without_a_base_is_an_error(tiny_model_dir: Path) -> None:
    with pytest.raises(TrainingError, match="no base model"):
        backend(tiny_model_dir).forward_backward([datum()], loss=LossSpec(kl_coef=0.1))


def test_the_kl_to_oneself_is_zero_and_grows_with_a_step(tiny_model_dir: Path) -> None:
    tested = backend(tiny_model_dir, base=tiny_model_dir)
    spec = LossSpec(kl_coef=0.1)

    first = tested.forward_backward([datum()], loss=spec).metrics["kl_base"]
    tested.optim_step(AdamParams(learning_rate=1e-2))
    second = tested.forward_backward([datum()], loss=spec).metrics["kl_base"]

    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > 1e-3


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_step_makes_a_token_likelier_in_the_direction_of_its_advantage(
    tiny_model_dir: Path, advantage: float
) -> None:
    tested = backend(tiny_model_dir)
    data = [datum(advantage=advantage, weight=0.25)]

    before = tested.forward_backward(data, loss=PLAIN).logprobs[0].mean()
    tested.optim_step(AdamParams(learning_rate=1e-3))
    after = tested.forward_backward(data, loss=PLAIN).logprobs[0].mean()

    assert (after - before) * advantage > 0.01


def test_a_filtered_row_gives_no_policy_gradient_and_stays_in_the_denominator(
    tiny_model_dir: Path,
) -> None:
    # Logged logprobs are -2 and the random model's are near -11: every k3 is far above 0.01.
    tested = backend(tiny_model_dir)
    spec = LossSpec(filters=("k3",), k3_max=0.01)

    metrics = tested.forward_backward([datum(weight=0.25)], loss=spec).metrics

    assert metrics["loss/policy"] == 0.0
    assert metrics["masked_share"] == pytest.approx(1.0)
    assert all(not gradient.any() for gradient in gradients(tested).values())


def test_saved_weights_are_bit_for_bit_what_was_computed_with(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    tested = backend(tiny_model_dir)
    for _ in range(3):
        tested.forward_backward([datum()], loss=PLAIN)
        tested.optim_step(AdamParams(learning_rate=1e-3))
    tested.save_weights(tmp_path / "saved")

    again = backend(tmp_path / "saved")
    (one,) = tested.forward_backward([datum()], loss=PLAIN).logprobs
    (other,) = again.forward_backward([datum()], loss=PLAIN).logprobs

    assert np.array_equal(one, other)


def test_steps_below_bfloat16s_resolution_add_up(tiny_model_dir: Path, tmp_path: Path) -> None:
    # One step of 2e-4 moves few weights of size 0.2 by a bfloat16 step of 1e-3; ten of them do.
    tested = backend(tiny_model_dir)
    changed = []
    for step in range(10):
        tested.forward_backward([datum(num_sampled=40)], loss=PLAIN)
        tested.optim_step(AdamParams(learning_rate=2e-4))
        tested.save_weights(tmp_path / str(step))
        changed.append(_share_changed(tmp_path / str(step), tiny_model_dir))

    assert changed[0] < 0.5 * changed[-1]


def test_only_parameters_that_match_may_move(tiny_model_dir: Path, tmp_path: Path) -> None:
    tested = backend(tiny_model_dir, trainable=r"layers\.1\.mlp")
    tested.forward_backward([datum()], loss=PLAIN)
    tested.optim_step(AdamParams(learning_rate=1e-2))
    tested.save_weights(tmp_path)

    new, old = (load_file(path / "model.safetensors") for path in (tmp_path, tiny_model_dir))
    moved = {name for name in old if not torch.equal(new[name], old[name])}
    assert moved == {f"model.layers.1.mlp.{part}_proj.weight" for part in ("up", "down", "gate")}


def test_a_pattern_that_matches_nothing_is_an_error(tiny_model_dir: Path) -> None:
    with pytest.raises(TrainingError, match="no parameter matches"):
        backend(tiny_model_dir, trainable="nothing")


def test_an_untrained_adapter_leaves_every_bit_of_the_weights(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    backend(tiny_model_dir, adapter="lora", lora_rank=4).save_weights(tmp_path)

    assert _share_changed(tmp_path, tiny_model_dir) == 0


def test_an_adapter_is_merged_when_saved_and_kept_beside(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    tested = backend(tiny_model_dir, adapter="lora", lora_rank=4)
    for _ in range(3):
        tested.forward_backward([datum()], loss=PLAIN)
        tested.optim_step(AdamParams(learning_rate=1e-2))
    tested.save_weights(tmp_path)

    (trained,) = tested.forward_backward([datum()], loss=PLAIN).logprobs
    (merged,) = backend(tmp_path).forward_backward([datum()], loss=PLAIN).logprobs
    assert merged == pytest.approx(trained, abs=0.1)
    # Nearly all of the tiny model is its embedding, which has no adapter.
    assert _share_changed(tmp_path, tiny_model_dir) > 0.01
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_the_same_seed_trains_the_same_adapter(tiny_model_dir: Path) -> None:
    def trained() -> list[float]:
        tested = backend(tiny_model_dir, adapter="lora", lora_rank=4)
        tested.forward_backward([datum()], loss=PLAIN)
        tested.optim_step(AdamParams(learning_rate=1e-2))
        (found,) = tested.forward_backward([datum()], loss=PLAIN).logprobs
        return [float(value) for value in found]

    assert trained() == trained()


def test_a_saved_state_goes_on_as_if_nothing_had_happened(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    def step(tested: TorchBackend) -> None:
        tested.forward_backward([datum()], loss=PLAIN)
        tested.optim_step(AdamParams(learning_rate=1e-3))

    first = backend(tiny_model_dir)
    step(first)
    first.save_state(tmp_path)
    step(first)
    second = backend(tiny_model_dir)
    second.load_state(tmp_path)
    step(second)

    (one,) = first.forward_backward([datum()], loss=PLAIN).logprobs
    (other,) = second.forward_backward([datum()], loss=PLAIN).logprobs
    assert np.array_equal(one, other)


def test_the_state_of_other_parameters_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    backend(tiny_model_dir, trainable="mlp").save_state(tmp_path)

    with pytest.raises(TrainingError, match="other parameters"):
        backend(tiny_model_dir).load_state(tmp_path)


def test_a_gradient_is_clipped_and_its_norm_reported(tiny_model_dir: Path) -> None:
    tested = backend(tiny_model_dir)
    tested.forward_backward([datum(weight=100.0)], loss=PLAIN)
    norm = tested.optim_step(AdamParams(learning_rate=1e-3, grad_clip=1.0))["grad_norm"]

    assert norm > 1.0


def _share_changed(new: Path, old: Path) -> float:
    one, other = (load_file(path / "model.safetensors") for path in (new, old))
    assert one.keys() == other.keys()
    changed = sum(int((one[name] != other[name]).sum()) for name in one)
    return changed / sum(int(value.numel()) for value in one.values())
