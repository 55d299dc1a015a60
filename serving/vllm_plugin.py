"""Entry point that vLLM loads in each of its processes: makes our weight transfer known.

Left out: anything heavy. vLLM calls this in the API server too, where the class is never used.
"""

NAME = "onlinerl"
"""The backend in `--weight-transfer-config`."""


def register() -> None:
    """Register the weight transfer engine; calling it again does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            NAME, "onlinerl.serving.weight_transfer", "OnlineRLWeightTransfer"
        )
    except ValueError:
        # vLLM loads plugins more than once in a process and refuses a name it knows.
        return
