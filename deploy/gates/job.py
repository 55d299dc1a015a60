"""`python -m onlinerl.deploy.gates.job SPEC OUT`: measure a candidate in a process of its own.

A candidate that makes torch run out of memory ends this process and not the controller.
"""

import os
import sys
from pathlib import Path

from onlinerl.deploy.gates.spec import GateSpec
from onlinerl.process.files import replace_file


def main(arguments: list[str]) -> int:
    """Read the spec and delete it, measure, and write the measurements in one step.

    The spec is deleted first because it contains answers that users received, which may be stored
    in the tables only.
    """
    spec_file, out_file = Path(arguments[0]), Path(arguments[1])
    spec = GateSpec.model_validate_json(spec_file.read_bytes())
    spec_file.unlink()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # checkpoints are local folders
    os.nice(10)  # serving comes first
    import torch

    from onlinerl.deploy.gates.measure import measure

    if spec.threads:
        torch.set_num_threads(spec.threads)
    replace_file(out_file, measure(spec).model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
