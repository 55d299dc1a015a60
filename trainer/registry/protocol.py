"""What a cycle needs of the model registry."""

from collections.abc import Mapping
from typing import Protocol

from onlinerl.registry.checkpoint_cache import CheckpointSource


class ModelRegistry(CheckpointSource, Protocol):
    """Versions of one policy; `onlinerl.registry.policy_registry` implements it.

    Every method may raise ServiceUnavailable.
    """

    def check(self) -> None:
        """Raise ServiceUnavailable when the registry does not answer in time."""
        ...

    def champion(self) -> int:
        """The version that serves; raises ServiceUnavailable when there is none yet."""
        ...

    def undecided(self) -> int | None:
        """The candidate, while it has no verdict."""
        ...

    def is_decided(self, version: int) -> bool:
        """Whether the deploy controller has given its verdict on a version."""
        ...

    def version_of(self, cycle_id: str) -> int | None:
        """The version that a cycle registered; None when it has not come that far."""
        ...

    def create_version(
        self, *, run_id: str, artifact_path: str, tags: Mapping[str, str], description: str
    ) -> int:
        """Register an artifact folder of a run, with all its tags, and return the new number."""
        ...

    def set_candidate(self, version: int) -> None:
        """Offer a version to the deploy controller."""
        ...
