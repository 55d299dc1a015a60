"""The format of published weights. Import its names from here.

A published version is a folder below the weights root of its policy:

- An *anchor* holds the full weights.
- A *delta* holds only what changed since its *parent* version, bit for bit, and an *inverse*: the
  payload that turns its weights back into those of the parent.
- A *chain* is an anchor and the deltas that descend from it, with no version missing in between.
  `resolve` gets from one version of a chain to another by inverses up to their common ancestor and
  deltas down from there; without such a path it starts from the anchor.
- `READY` is written last. A folder without it is no version.

    write_anchor(root, policy="assistant", version=1, weights=read_checkpoint(first))
    write_delta(root, policy="assistant", version=2, weights=new, parent_version=1, parent=old)
    new = resolve(root, target=2, current=1, base=old)

The modules beside this one: `tensors` (tensors as bit patterns, checkpoints), `encodings` (the
change of one tensor), `manifest` (the description of a version), `write` (publishing a version)
and `replay` (getting to a version). None of them imports a tensor library or another part of
onlinerl but its errors and file helpers, because the workers of an engine import them.
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
