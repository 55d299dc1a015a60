"""What a registry of one policy can do; the trainer and deploy each have a protocol of their own.

The protocols name the verbs that the trainer and deploy need. A registry implements this class, and
with it both protocols.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from onlinerl.errors import ServiceUnavailable, WeightsError
from onlinerl.registry.version import CANDIDATE, CHAMPION, RegisteredVersion


class PolicyRegistry(ABC):
    """Versions, aliases and tags of one policy. Every method may raise ServiceUnavailable."""

    def __init__(self, policy: str) -> None:
        self.policy = policy

    @abstractmethod
    def check(self) -> None:
        """Raise ServiceUnavailable when the registry does not answer in time."""

    @abstractmethod
    def versions(self) -> Sequence[RegisteredVersion]:
        """All versions, oldest first."""

    @abstractmethod
    def version(self, number: int) -> RegisteredVersion | None:
        """One version; None when there is no such number."""

    @abstractmethod
    def version_of(self, cycle_id: str) -> int | None:
        """The latest version with the tag `cycle` of this value."""

    @abstractmethod
    def alias(self, name: str) -> int | None:
        """The version that an alias points to."""

    @abstractmethod
    def set_alias(self, name: str, version: int) -> None:
        """Move an alias; the last writer wins."""

    @abstractmethod
    def set_tags(self, version: int, tags: Mapping[str, str]) -> None:
        """Add or replace tags of a version."""

    @abstractmethod
    def describe(self, version: int, description: str) -> None:
        """Replace the description of a version, which is shown as Markdown."""

    @abstractmethod
    def model_tags(self) -> Mapping[str, str]:
        """Tags of the registered model as a whole; empty when there is no such model yet."""

    @abstractmethod
    def set_model_tag(self, key: str, value: str) -> None:
        """Add or replace a tag of the registered model."""

    @abstractmethod
    def download(self, version: int, target: Path) -> None:
        """Copy the checkpoint of a version into `target`, a folder that is empty or missing.

        The files are not verified.

        Raises:
            WeightsError: the registry answers, and has no such checkpoint.
        """

    @abstractmethod
    def register_base(self, checkpoint: Path) -> int:
        """Register a checkpoint folder of the base model; creates the registered model."""

    @abstractmethod
    def create_version(
        self, *, run_id: str, artifact_path: str, tags: Mapping[str, str], description: str
    ) -> int:
        """Register an artifact folder of a run, with all tags in the same request."""

    @abstractmethod
    def log_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the run that made a version; a version without a run keeps none."""

    def champion(self) -> int:
        """The version that serves.

        Raises:
            ServiceUnavailable: there is none yet.
        """
        version = self.alias(CHAMPION)
        if version is None:
            raise ServiceUnavailable(
                f"the registered model {self.policy!r} has no champion yet; "
                "`onlinerl deploy` registers the base model as version 1"
            )
        return version

    def undecided(self) -> int | None:
        """The candidate, while it has no verdict."""
        version = self.alias(CANDIDATE)
        return None if version is None or self.is_decided(version) else version

    def is_decided(self, version: int) -> bool:
        """Whether the deploy controller has given its verdict on a version.

        Raises:
            WeightsError: there is no such version.
        """
        record = self.version(version)
        if record is None:
            raise WeightsError(f"the registry has no version {version}")
        return record.verdict is not None

    def set_candidate(self, version: int) -> None:
        """Offer a version to the deploy controller."""
        self.set_alias(CANDIDATE, version)
