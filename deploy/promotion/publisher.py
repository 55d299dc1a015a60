"""Publishes registered checkpoints for the engines: as a delta on the champion, or an anchor."""

import logging
from pathlib import Path

from onlinerl.deploy.weights.delta import (
    Manifest,
    is_published,
    plan,
    read_checkpoint,
    read_manifest,
    same_layout,
    version_folder,
    write_anchor,
    write_delta,
)
from onlinerl.errors import WeightsError
from onlinerl.registry.checkpoint_cache import CheckpointCache

logger = logging.getLogger(__name__)


class Publisher:
    """Publishes each version of a policy once.

    Args:
        root: Folder of the policy's published versions.
        policy: Name of the policy.
        checkpoints: Local copies of registered versions.
        anchor_every: Largest number of deltas in a chain; then comes another anchor.
    """

    def __init__(
        self, root: Path, *, policy: str, checkpoints: CheckpointCache, anchor_every: int
    ) -> None:
        self.root = root
        self._policy = policy
        self._checkpoints = checkpoints
        self._anchor_every = anchor_every

    def publish(self, version: int, *, champion: int | None) -> Manifest:
        """Publish a version unless it is published already; returns its manifest.

        Args:
            version: Number of the version.
            champion: The version that a delta may start from; None publishes an anchor.

        Raises:
            WeightsError: when the checkpoint is damaged or incomplete, or the number was published
                from another registry.
        """
        if is_published(self.root, version):
            return self.manifest(version)
        origin = self._checkpoints.name(version)
        weights = read_checkpoint(self._checkpoints.get(version))
        if champion is not None and champion != version and self._chain_has_room(champion):
            parent = read_checkpoint(self._checkpoints.get(champion))
            if same_layout(parent, weights):
                return write_delta(
                    self.root,
                    policy=self._policy,
                    version=version,
                    weights=weights,
                    parent_version=champion,
                    parent=parent,
                    origin=origin,
                )
        return write_anchor(
            self.root, policy=self._policy, version=version, weights=weights, origin=origin
        )

    def manifest(self, version: int) -> Manifest:
        """The manifest of a published version.

        Raises:
            WeightsError: when the version is not published, or was published from another registry.
        """
        manifest = read_manifest(self.root, version)
        # Manifests of older releases name no origin.
        if manifest.origin and manifest.origin != self._checkpoints.name(version):
            raise WeightsError(
                f"version {version} in {version_folder(self.root, version)} comes from another"
                f" registry: move {self.root} away, or go back to the registry that belongs to it"
            )
        return manifest

    def _chain_has_room(self, champion: int) -> bool:
        if not is_published(self.root, champion):
            return False
        return len(plan(self.root, target=champion, current=None)) <= self._anchor_every
