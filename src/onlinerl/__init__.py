"""onlinerl: a deployed LLM product becomes its own teacher.

The top-level folders of the repository import as `onlinerl.serving`, `onlinerl.ingest`,
`onlinerl.rollout_store`, `onlinerl.trainer` and `onlinerl.deploy`. This module imports nothing, so
that `onlinerl --help` is quick.
"""

__version__ = "0.1.0"
