import hashlib

import pytest

from onlinerl.errors import ConfigError, RequestRefused
from onlinerl.serving.auth import Keyring, UserHasher, narrowed
from onlinerl.serving.config import ApiKeyConfig


def keyring() -> Keyring:
    digest = hashlib.sha256(b"secret").hexdigest()
    return Keyring([ApiKeyConfig(name="a", sha256=digest, tenant="acme", consent="train")])


def test_no_keys_is_no_gateway() -> None:
    with pytest.raises(ConfigError, match="no default key"):
        Keyring([])


def test_a_key_names_tenant_and_consent() -> None:
    caller = keyring().identify("Bearer secret")

    assert (caller.name, caller.tenant, caller.consent) == ("a", "acme", "train")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "secret", "Basic secret", "Bearer Secret"]
)
def test_anything_else_is_401(header: str | None) -> None:
    with pytest.raises(RequestRefused) as caught:
        keyring().identify(header)

    assert caught.value.status == 401


def test_the_hash_is_no_key() -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    with pytest.raises(RequestRefused):
        keyring().identify(f"Bearer {digest}")


@pytest.mark.parametrize(
    ("granted", "asked", "consent"),
    [
        ("train", None, "train"),
        ("train", "log", "log"),
        ("train", "none", "none"),
        ("log", "train", "log"),
        ("none", "train", "none"),
    ],
)
def test_a_request_can_only_narrow(granted: str, asked: str | None, consent: str) -> None:
    assert narrowed(granted, asked) == consent  # type: ignore[arg-type]


def test_an_unknown_consent_is_refused() -> None:
    with pytest.raises(RequestRefused, match="yes"):
        narrowed("train", "yes")


def test_hashes_of_users_depend_on_key_and_tenant() -> None:
    hashed = UserHasher("k").hash("ada", tenant="acme")

    assert hashed == UserHasher("k").hash("ada", tenant="acme")
    assert hashed not in (
        UserHasher("other").hash("ada", tenant="acme"),
        UserHasher("k").hash("ada", tenant="globex"),
        "ada",
    )


def test_without_a_key_no_user_is_logged() -> None:
    assert UserHasher(None).hash("ada", tenant="acme") is None
    assert UserHasher("k").hash(None, tenant="acme") is None
