"""What the deploy controller needs of the model registry, and the tags that only deploy uses."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from onlinerl.registry.checkpoint_cache import CheckpointSource
from onlinerl.registry.version import RegisteredVersion

NOT_NEEDED = "not needed"
"""Value of the tag `review` when the gates were enough."""
ROLLED_BACK = "rolled_back"
"""Why a version that served was taken back; empty once it serves again."""
PROMOTED_FROM = "promoted_from"
"""The champion before this version."""
PROMOTE_REQUEST, PROMOTE_RESULT = "promote.request", "promote.result"
"""JSON of an `OperatorRequest` on a version, and of its `OperatorReply`."""
PROMOTED_BY = "promoted_by"
"""The request that made a version champion, so that a reply that a crash prevented is sent."""
ROLLBACK_REQUEST, ROLLBACK_RESULT = "rollback.request", "rollback.result"
"""JSON of an `OperatorRequest` on the registered model, and of its `OperatorReply`."""


class Registry(CheckpointSource, Protocol):
    """Versions of one policy; `onlinerl.registry.policy_registry` implements it.

    Every method may raise ServiceUnavailable.
    """

    def check(self) -> None:
        """Raise ServiceUnavailable when the registry does not answer in time."""
        ...

    def versions(self) -> Sequence[RegisteredVersion]:
        """All versions, oldest first."""
        ...

    def alias(self, name: str) -> int | None:
        """The version that an alias points to."""
        ...

    def set_alias(self, name: str, version: int) -> None:
        """Move an alias."""
        ...

    def set_tags(self, version: int, tags: Mapping[str, str]) -> None:
        """Add or replace tags of a version."""
        ...

    def describe(self, version: int, description: str) -> None:
        """Replace the description of a version, which is shown as Markdown."""
        ...

    def model_tags(self) -> Mapping[str, str]:
        """Tags of the registered model as a whole; empty when there is no such model yet."""
        ...

    def set_model_tag(self, key: str, value: str) -> None:
        """Add or replace a tag of the registered model."""
        ...

    def register_base(self, checkpoint: Path) -> int:
        """Register a checkpoint folder of the base model; creates the registered model."""
        ...

    def log_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the run that made a version."""
        ...
