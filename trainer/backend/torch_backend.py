"""The local TrainingBackend: one process, torch, all weights or a LoRA adapter.

Shape suffixes: B = sequences of a micro-batch, T = positions (right-padded), N = sampled positions,
D = hidden width, R = rows.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from onlinerl.errors import TrainingError
from onlinerl.trainer.backend.batches import micro_batches
from onlinerl.trainer.backend.collate import Batch, split_by_sequence
from onlinerl.trainer.backend.head import TokenScores, score_tokens
from onlinerl.trainer.backend.model import PretrainedModel, load_model, masters_of, save_pretrained
from onlinerl.trainer.backend.protocol import AdamParams, ForwardBackward, TrainingBackend
from onlinerl.trainer.config import TrainerConfig
from onlinerl.trainer.losses.filters import rows_to_keep
from onlinerl.trainer.losses.policy import log_ratio, policy_terms
from onlinerl.trainer.losses.spec import LossSpec
from onlinerl.trainer.rollouts.data import Datum, num_sampled

logger = logging.getLogger(__name__)

ADAM_BETAS = (0.9, 0.95)
ADAM_EPS = 1e-8


class TorchBackend(TrainingBackend):
    """A TrainingBackend over one Hugging Face model in this process.

    Float32 masters and Adam's moments live within a cycle: the next one starts from the weights as
    they were saved, rounded to the parent's dtype, and with moments of 0.

    Args:
        parent: Folder of the weights to start from.
        base: Folder or id of the base model, for the KL; None loads none.
        config: What to train and how; only its compute and adapter fields are read.
        seed: Initialises the adapter.
    """

    def __init__(self, parent: Path, *, base: str | None, config: TrainerConfig, seed: int) -> None:
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self._device = _device(config.device)
        self._compute = _compute_dtype(config.compute_dtype, device=self._device)
        self._max_tokens = config.micro_batch_tokens
        self._parent = parent
        # Weights stay float32 in memory; on a GPU autocast computes in bfloat16.
        self._model, self._served = load_model(
            str(parent), device=self._device, dtype=torch.float32
        )
        self._base = self._load_base(base)
        self._peft = _add_adapter(self._model, config=config, seed=seed)
        pattern = config.trainable if self._peft is None else r"\.lora_"
        served = self._served if self._peft is None else None
        self._masters = masters_of(self._model, trainable=pattern, served=served)
        self._optimizer = torch.optim.AdamW(
            [master.value for master in self._masters], betas=ADAM_BETAS, eps=ADAM_EPS
        )

    @override
    def forward_backward(self, data: Sequence[Datum], *, loss: LossSpec) -> ForwardBackward:
        if num_sampled(data) == 0:
            raise TrainingError("no trainable token in the batch: nothing to learn from")
        if loss.kl_coef > 0 and self._base is None:
            raise TrainingError(
                "kl_coef is above 0 but the backend was given no base model; set it to 0"
            )
        totals: dict[str, float] = {}
        logprobs: list[NDArray[np.float64]] = [np.empty(0)] * len(data)
        for indices in micro_batches(data, max_tokens=self._max_tokens):
            chunk = [data[index] for index in indices]
            metrics, found = self._micro_step(chunk, loss=loss)
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value
            for index, values in zip(indices, found, strict=True):
                logprobs[index] = values
        return ForwardBackward(metrics=totals, logprobs=logprobs)

    @override
    def optim_step(self, params: AdamParams) -> dict[str, float]:
        for master in self._masters:
            gradient = master.parameter.grad
            master.value.grad = None if gradient is None else gradient.float()
            master.parameter.grad = None
        norm = nn.utils.clip_grad_norm_(
            [master.value for master in self._masters], params.grad_clip, error_if_nonfinite=False
        )
        if not torch.isfinite(norm):
            raise TrainingError(f"the gradient norm is {norm.item()}")
        for group in self._optimizer.param_groups:
            group["lr"], group["weight_decay"] = params.learning_rate, params.weight_decay
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for master in self._masters:
            master.publish()
        return {"grad_norm": float(norm)}

    @override
    def save_state(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        # The float32 masters: saved weights would lose updates below bfloat16's resolution.
        masters = {master.name: master.value for master in self._masters}
        torch.save(
            {"masters": masters, "optimizer": self._optimizer.state_dict()}, path / "state.pt"
        )

    def load_state(self, path: Path) -> None:
        """Continue where a backend over the same model called `save_state`.

        Raises:
            TrainingError: the state belongs to other parameters.
        """
        state = torch.load(path / "state.pt", weights_only=True, map_location=self._device)
        if set(state["masters"]) != {master.name for master in self._masters}:
            raise TrainingError(
                f"{path} holds the state of other parameters than this model trains"
            )
        for master in self._masters:
            master.value.copy_(state["masters"][master.name])
            master.publish()
        self._optimizer.load_state_dict(state["optimizer"])

    @override
    def save_weights(self, path: Path) -> None:
        if self._peft is not None:  # the adapter is merged below; this copy is for reference
            self._peft.save_pretrained(str(path / "adapter"))
        save_pretrained(self._model, path, served=self._served, template=self._parent)

    def _load_base(self, base: str | None) -> PretrainedModel | None:
        if base is None:
            return None
        model, _ = load_model(base, device=self._device, dtype=self._compute)
        return model.requires_grad_(requires_grad=False)

    def _micro_step(
        self, chunk: Sequence[Datum], *, loss: LossSpec
    ) -> tuple[dict[str, float], list[NDArray[np.float64]]]:
        batch = Batch.of(chunk, device=self._device)
        scores = self._scores(batch)
        log_ratio_N = log_ratio(scores.logprobs_N.detach(), batch.behavior_N)
        keep_N = rows_to_keep(loss, log_ratio_N=log_ratio_N, rows_N=batch.rows_N)[batch.rows_N]
        terms_N, used_N = policy_terms(
            loss,
            logprobs_N=scores.logprobs_N,
            behavior_N=batch.behavior_N,
            advantages_N=batch.advantages_N,
            rows_N=batch.rows_N,
        )
        # torch.where instead of a product: a dropped row may hold values that overflowed.
        kept_terms_N = torch.where(keep_N, terms_N, torch.zeros_like(terms_N))
        policy = (kept_terms_N * batch.weights_N).sum()
        kl = (scores.kl_N * batch.weights_N).sum()
        total = policy + loss.kl_coef * kl
        if not torch.isfinite(total):
            raise TrainingError(f"the loss is not finite: policy {policy.item()}, KL {kl.item()}")
        total.backward()
        metrics = {
            "loss/policy": policy.item(),
            "loss/kl": loss.kl_coef * kl.item(),
            "kl_base": kl.item(),
            "entropy": (scores.entropy_N * batch.weights_N).sum().item(),
            "masked_share": ((~(keep_N & used_N)) * batch.weights_N).sum().item(),
        }
        return metrics, split_by_sequence(scores.logprobs_N.detach(), mask_BT=batch.mask_BT)

    def _scores(self, batch: Batch) -> TokenScores:
        base_ND = None
        if self._base is not None:
            with torch.no_grad():
                base_ND = self._hidden(self._base, batch)
        with torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._compute == torch.bfloat16
        ):
            return score_tokens(
                self._hidden(self._model, batch),
                head=self._model.get_output_embeddings(),
                targets_N=batch.targets_N,
                temperatures_N=batch.temperatures_N,
                base_hidden_ND=base_ND,
                base_head=None if self._base is None else self._base.get_output_embeddings(),
                vocabulary=self._model.config.vocab_size,
            )

    def _hidden(self, model: PretrainedModel, batch: Batch) -> Tensor:
        # No attention mask: under a causal mask right padding is never attended to.
        output = model.get_decoder()(input_ids=batch.tokens_BT, use_cache=False)
        hidden: Tensor = output.last_hidden_state[batch.mask_BT]
        return hidden


def _add_adapter(
    model: PretrainedModel, *, config: TrainerConfig, seed: int
) -> PretrainedModel | None:
    """Put LoRA layers into `model` in place.

    Returns:
        The wrapper that can save the adapter; None when none is configured.
    """
    if config.adapter == "none":
        return None
    from peft import LoraConfig, get_peft_model

    targets = config.lora_targets
    torch.manual_seed(seed)
    return get_peft_model(
        model,
        LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_dropout=0.0,
            target_modules="all-linear" if targets == ("all-linear",) else list(targets),
            task_type="CAUSAL_LM",
        ),
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _compute_dtype(name: str, *, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if name == "float32" else torch.bfloat16
