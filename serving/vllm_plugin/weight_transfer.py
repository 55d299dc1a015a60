"""New weights for a running vLLM worker: staged while it serves, applied while it is paused.

vLLM drives it over HTTP:

    POST /collective_rpc {"method": "stage_weights", "args": ["{...}"]}   serving goes on
    POST /pause?mode=keep                                                requests freeze
    POST /start_weight_update
    POST /update_weights {"update_info": {"version": 12}}                the staged version goes in
    POST /finish_weight_update {"weight_version": "assistant/12"}        the version id moves
    POST /resume                                                         requests go on

The id moves only in `finish_weight_update`, and an update that fails puts the old weights back.
When even that fails the worker is *broken*: it says so in `weights_status` and takes no more.
"""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from onlinerl.deploy.weights.delta import HostTensor, Weights, read_checkpoint
from onlinerl.errors import WeightsError
from onlinerl.serving.vllm_plugin.cpu_seeds import leave_generators_alone
from onlinerl.serving.vllm_plugin.cpu_speculation import repair
from onlinerl.serving.vllm_plugin.weight_stage import StagedVersion, StageRequest, WeightStage

logger = logging.getLogger(__name__)

if current_platform.is_cpu():
    # Every worker imports this file, for the sake of `WeightWorker`.
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    leave_generators_alone(GPUModelRunner)
    repair(rejection_sampler)

_TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which staged version goes in."""

    version: int


class OnlineRLWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Applies a staged version to the model of one worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.stage = WeightStage(read_checkpoint(_checkpoint_folder(self.model_config)))
        self.broken: str | None = None
        self._load: Callable[[torch.nn.Module, ModelConfig, StagedVersion, Weights], None] = (
            load_on_cpu if current_platform.is_cpu() else load_patches
        )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect: versions are files."""

    def start_weight_update(self) -> None:
        """Refuse when the weights of this worker are not known any more."""
        if self.broken is not None:
            raise WeightsError(f"this worker is broken and has to be restarted: {self.broken}")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Put the staged version in; when that fails put the old one back and raise."""
        old = self.stage.weights
        try:
            self.stage.apply(
                update_info.version,
                lambda staged: self._load(self.model, self.model_config, staged, old),
            )
        except WeightsError:
            raise
        except Exception as error:
            self._restore(old)
            raise WeightsError(
                f"version {update_info.version} could not be applied, the weights before it are"
                f" back: {error}"
            ) from error

    def finish_weight_update(self) -> None:
        """The version is final; vLLM moves the version id after this returns."""
        self.stage.settle()

    def shutdown(self) -> None:
        """Nothing to close: the background thread is a daemon and only reads files."""

    def revert(self) -> None:
        """Take back a version that was applied here but not finished, e.g. on another worker."""
        if (old := self.stage.undo()) is not None:
            self._restore(old)
            self.stage.revert()

    def _restore(self, weights: Weights) -> None:
        try:
            load_all(self.model, self.model_config, weights)
        except Exception as error:
            self.broken = f"the old weights could not be put back: {error}"
            logger.exception("worker is broken")
            raise WeightsError(self.broken) from error


class WeightWorker:
    """Methods that vLLM's worker gets through `--worker-extension-cls`, for `/collective_rpc`.

    Arguments and results are JSON, as the endpoint demands.
    """

    weight_transfer_engine: OnlineRLWeightTransfer | None
    _weight_update_active: bool

    def stage_weights(self, request: str) -> dict[str, object]:
        """Start to fetch, verify and decode the version in a `StageRequest`."""
        self._weights().stage.stage(StageRequest.model_validate_json(request))
        return self.weights_status()

    def weights_status(self) -> dict[str, object]:
        """Which version is in, which is staged, and what went wrong."""
        engine = self._weights()
        return engine.stage.status() | {"broken": engine.broken}

    def checksum_weights(self) -> dict[str, object]:
        """Start to hash the host copy of what serves; `weights_status` has the digest."""
        self._weights().stage.start_checksum()
        return self.weights_status()

    def revert_weights(self) -> dict[str, object]:
        """Leave an update that was begun and not finished; the engine must be paused."""
        self._weights().revert()
        self._weight_update_active = False
        return self.weights_status()

    def _weights(self) -> OnlineRLWeightTransfer:
        if not isinstance(engine := self.weight_transfer_engine, OnlineRLWeightTransfer):
            raise WeightsError('start the engine with --weight-transfer-config backend "onlinerl"')
        return engine


def load_on_cpu(
    model: torch.nn.Module, model_config: ModelConfig, staged: StagedVersion, old: Weights
) -> None:
    """Reload the model from the host copy, or leave it alone when no bit differs.

    vLLM packs linear weights for the CPU's kernels and empties the parameters, so there is nothing
    that a patch could be written into.
    """
    if staged.changed:
        load_all(model, model_config, staged.weights)


def load_all(model: torch.nn.Module, model_config: ModelConfig, weights: Weights) -> None:
    """Replace every weight of the model, on any platform."""
    initialize_layerwise_reload(model)
    try:
        model.load_weights((name, as_torch(tensor)) for name, tensor in weights.items())
    finally:
        # Also after a failure: it puts each layer's tensors back where the model expects them.
        finalize_layerwise_reload(model, model_config)
    _repack_tied_head(model)


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Pack the head again when it shares its weight with the embedding.

    It was packed for the CPU's kernels at start, and the reload, which sees the weight only as the
    embedding's, leaves that copy as it was.
    """
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if current_platform.is_cpu() and method is not None:
        method.process_weights_after_loading(head)


def load_patches(
    model: torch.nn.Module, model_config: ModelConfig, staged: StagedVersion, old: Weights
) -> None:
    """Write only the changed elements, in place, through the model's own loader.

    Not run on a GPU yet. vLLM marks unchanged elements with NaN and asks for sparse patches only,
    so a set of weights that the model was not loaded from goes in as a whole instead.
    """
    if not staged.changed:
        return
    if old.keys() != staged.weights.keys():
        load_all(model, model_config, staged.weights)
        return
    device = next(model.parameters()).device
    load_checkpoint_weight_patches(
        model,
        [
            _patch(name, old[name], staged.weights[name], device)
            for name in staged.weights
            if name in staged.changed
        ],
        validate_unique_indices=False,
    )


def _patch(
    name: str, old: HostTensor, new: HostTensor, device: torch.device
) -> CheckpointWeightPatch:
    positions = np.flatnonzero(old.bits != new.bits)
    return CheckpointWeightPatch(
        name=name,
        shape=new.shape,
        dtype=_TORCH_DTYPES[new.dtype],
        values=as_torch(HostTensor(new.dtype, positions.shape, new.bits[positions])).to(device),
        indices=torch.from_numpy(positions).to(device),
    )


def as_torch(tensor: HostTensor) -> torch.Tensor:
    """The same memory as a torch tensor; only to be read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(tensor.bits.view(f"<i{tensor.bits.dtype.itemsize}"))
    return flat.view(_TORCH_DTYPES[tensor.dtype]).view(tensor.shape)


def _checkpoint_folder(model_config: ModelConfig) -> Path:
    """Where the weights that vLLM loaded lie: a folder, or the local snapshot of a Hub id."""
    name = str(model_config.model)
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=model_config.revision, local_files_only=True))
