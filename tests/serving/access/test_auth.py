import hashlib

import pytest

from onlinerl.errors import ConfigError, RequestRefused
from onlinerl.rollout_store.user_hash import UserHasher
from onlinerl.serving.access.auth import Keyring
from onlinerl.serving.config import ApiKeyConfig
from onlinerl.serving.interaction.caller import narrow_consent


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


def test_the_header_of_anthropic_names_a_key_too() -> None:
    assert keyring().identify(None, "secret").name == "a"
    assert keyring().identify("Bearer secret", "anything").name == "a"


@pytest.mark.parametrize(
    ("authorization", "api_key"),
    [(None, ""), (None, "Secret"), ("Bearer wrong", "secret"), ("Basic x", "secret")],
)
def test_a_wrong_authorization_is_not_made_good_by_another_header(
    authorization: str | None, api_key: str
) -> None:
    with pytest.raises(RequestRefused):
        keyring().identify(authorization, api_key)


def test_an_empty_key_is_never_known() -> None:
    digest = hashlib.sha256(b"").hexdigest()
    ring = Keyring([ApiKeyConfig(name="a", sha256=digest)])
    for header in (None, "", "Bearer", "Bearer "):
        with pytest.raises(RequestRefused):
            ring.identify(header, "")


def test_keys_are_replaced_as_a_whole() -> None:
    ring = keyring()
    ring.replace([ApiKeyConfig(name="b", sha256=hashlib.sha256(b"other").hexdigest())])

    assert ring.identify("Bearer other").name == "b"
    with pytest.raises(RequestRefused):
        ring.identify("Bearer secret")
    ring.replace([])
    with pytest.raises(RequestRefused):
        ring.identify("Bearer other")


@pytest.mark.parametrize(("name", "digest"), [("a", "b" * 64), ("b", "a" * 64)])
def test_two_keys_of_one_name_or_hash_are_refused_and_change_nothing(
    name: str, digest: str
) -> None:
    ring = keyring()
    keys = [ApiKeyConfig(name="a", sha256="a" * 64), ApiKeyConfig(name=name, sha256=digest)]
    with pytest.raises(ConfigError, match="two API keys have"):
        ring.replace(keys)

    assert ring.identify("Bearer secret").name == "a"


def test_a_key_may_be_bound_to_policies() -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    key = ApiKeyConfig(name="a", sha256=digest, policies=("assistant",))
    caller = Keyring([key]).identify("Bearer secret")
    caller.check_policy("assistant")
    with pytest.raises(RequestRefused) as caught:
        caller.check_policy("other")

    assert (caught.value.status, caught.value.param) == (403, "model")
    keyring().identify("Bearer secret").check_policy("other")


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
    assert narrow_consent(granted, asked) == consent  # type: ignore[arg-type]


def test_an_unknown_consent_is_refused() -> None:
    with pytest.raises(RequestRefused, match="yes"):
        narrow_consent("train", "yes")


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
