"""onlinerl: a deployed LLM product becomes its own teacher.

The folders at the top of the repository are the architecture and import from here:
`onlinerl.serving`, `onlinerl.ingest`, `onlinerl.rollout_store`, `onlinerl.trainer`,
`onlinerl.deploy`. This module stays empty of imports so that `onlinerl --help` is quick.
"""

__version__ = "0.1.0"
