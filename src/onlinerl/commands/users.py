"""Finds the hashes that stand for a person in the tables."""

import os

from onlinerl.commands.keys import known_keys
from onlinerl.errors import ConfigError
from onlinerl.rollout_store.erasure.scope import known_tenants
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.user_hash import UserHasher
from onlinerl.secret_names import USER_HASH_KEY
from onlinerl.settings import Settings


def user_hashes(
    settings: Settings, store: DeltaStore, *, user: str, tenant: str | None
) -> dict[str, str]:
    """Hash of a person by tenant, since the same person has another hash in every tenant.

    Args:
        settings: The configuration, whose API keys name tenants.
        store: The tables, whose rows name tenants.
        user: The id that the product sends for the person.
        tenant: The only tenant to look at; None means every tenant of the keys and the tables.

    Raises:
        ConfigError: the key that the gateway hashes with is not set, or there are no tables.
    """
    hasher = open_user_hasher()
    if not store.exists("interactions"):
        raise ConfigError(
            f"there are no tables under {store.root}; set [store].root to where they are"
        )
    tenants = {tenant} if tenant is not None else _tenants(settings, store)
    hashes = {name: hasher.hash(user, tenant=name) for name in sorted(tenants)}
    return {name: hashed for name, hashed in hashes.items() if hashed is not None}


def open_user_hasher() -> UserHasher:
    """The hasher with the key from the environment.

    Raises:
        ConfigError: the environment has no key.
    """
    key = os.environ.get(USER_HASH_KEY)
    if not key:
        raise ConfigError(
            f"{USER_HASH_KEY} is not set; set it to the value that the gateway has, because the "
            "tables hold user ids only as hashes under that key"
        )
    return UserHasher(key)


def _tenants(settings: Settings, store: DeltaStore) -> set[str]:
    keys = [key for source in known_keys(settings, os.environ).values() for key in source]
    return known_tenants(store) | {key.tenant for key in keys}
