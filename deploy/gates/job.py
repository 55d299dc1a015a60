"""`python -m onlinerl.deploy.gates.job SPEC OUT`: measure a candidate in a process of its own.

A candidate that makes torch run out of memory takes this process with it, not the controller.
"""

import os
import sys
from pathlib import Path

from onlinerl.deploy.gates.spec import GateSpec


def main(arguments: list[str]) -> int:
    """Read and remove the spec, measure, write the answer under a temporary name and rename it.

    The spec goes at once: it holds what users said, and what is kept of that is in the tables only.
    """
    spec_file, out_file = Path(arguments[0]), Path(arguments[1])
    spec = GateSpec.model_validate_json(spec_file.read_bytes())
    spec_file.unlink()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # checkpoints are folders
    os.nice(10)  # serving comes first
    import torch

    from onlinerl.deploy.gates.measure import measure

    if spec.threads:
        torch.set_num_threads(spec.threads)
    measurements = measure(spec)
    partial = out_file.with_suffix(".partial")
    partial.write_text(measurements.model_dump_json(), encoding="utf-8")
    partial.rename(out_file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
