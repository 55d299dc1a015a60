"""Opens the tables that a configuration names."""

from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.settings import Settings


def open_store(settings: Settings) -> DeltaStore:
    """The tables under `[store].root`; nothing is created or read yet."""
    return DeltaStore(settings.store_root, settings.store.storage_options)
