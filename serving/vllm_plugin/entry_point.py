"""Entry point that vLLM loads in each of its processes, more than once in some.

Left out: anything heavy. vLLM calls this in the API server too, where nothing of it is used.
"""

import contextlib

NAME = "onlinerl"
"""The backend in `--weight-transfer-config`."""


def register() -> None:
    """Make our weight transfer known, and on a CPU wait in its way; calling it again is harmless.

    Raises:
        AttributeError: vLLM waits in another way than the one that is patched.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    with contextlib.suppress(ValueError):  # it refuses a name that it knows
        WeightTransferEngineFactory.register_engine(
            NAME, "onlinerl.serving.vllm_plugin.weight_transfer", "OnlineRLWeightTransfer"
        )
    if current_platform.is_cpu():
        from vllm.distributed.device_communicators import shm_broadcast

        from onlinerl.serving.vllm_plugin.cpu_waiting import wait_with_pauses

        wait_with_pauses(shm_broadcast)
