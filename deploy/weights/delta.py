"""The weights format as the rest of the system sees it: write a version, get to a version.

Gathers the names of the files beside it, which hold one idea each: `tensors` (bit patterns and
checkpoints), `encodings` (the change of one tensor), `manifest` (what a version declares),
`publish` (writing) and `chain` (reading). Imports no registry and no tensor library, because
the engine's workers import it.
"""

from onlinerl.deploy.weights.manifest import (
    Manifest,
    digest,
    is_published,
    read_manifest,
    version_folder,
)
from onlinerl.deploy.weights.replay import Step, plan, resolve, verify
from onlinerl.deploy.weights.tensors import HostTensor, Weights, bits_dtype, read_checkpoint
from onlinerl.deploy.weights.write import full_bytes, same_layout, write_anchor, write_delta

__all__ = [
    "HostTensor",
    "Manifest",
    "Step",
    "Weights",
    "bits_dtype",
    "digest",
    "full_bytes",
    "is_published",
    "plan",
    "read_checkpoint",
    "read_manifest",
    "resolve",
    "same_layout",
    "verify",
    "version_folder",
    "write_anchor",
    "write_delta",
]
