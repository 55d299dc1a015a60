"""Under which hashes a person was logged."""

import os
from typing import TYPE_CHECKING

from onlinerl.commands.keys import known_keys
from onlinerl.errors import ConfigError
from onlinerl.rollout_store.erasure.person_ids import known_tenants
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.user_hash import UserHasher
from onlinerl.secret_names import USER_HASH_KEY

if TYPE_CHECKING:
    from onlinerl.settings import Settings


def hashes_of(
    settings: "Settings", store: DeltaStore, *, user: str, tenant: str | None
) -> dict[str, str]:
    """The hash under which a person was logged, by tenant: every known one, or the one given.

    Raises:
        ConfigError: the key that the gateway hashes with is not set, or there are no tables.
    """
    hasher = user_hasher()
    if not store.exists("interactions"):
        raise ConfigError(f"there are no tables under {store.root}; [store].root says where")
    tenants = {tenant} if tenant is not None else _tenants(settings, store)
    hashes = {name: hasher.hash(user, tenant=name) for name in sorted(tenants)}
    return {name: hashed for name, hashed in hashes.items() if hashed is not None}


def user_hasher() -> UserHasher:
    """The hasher with the key of the environment.

    Raises:
        ConfigError: there is no key.
    """
    key = os.environ.get(USER_HASH_KEY)
    if not key:
        raise ConfigError(
            f"{USER_HASH_KEY} is not set: users are known only by a hash under the gateway's key"
        )
    return UserHasher(key)


def _tenants(settings: "Settings", store: DeltaStore) -> set[str]:
    keys = [key for some in known_keys(settings, os.environ).values() for key in some]
    return known_tenants(store) | {key.tenant for key in keys}
