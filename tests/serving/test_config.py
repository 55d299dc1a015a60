import subprocess
import sys

import pytest
from pydantic import ValidationError

from onlinerl.serving.config import ApiKeyConfig, GatewayConfig, SpoolConfig

A, B = "a" * 64, "b" * 64


def key(name: str, sha256: str) -> ApiKeyConfig:
    return ApiKeyConfig(name=name, sha256=sha256)


def test_consent_is_log_when_a_key_says_nothing() -> None:
    assert key("a", A).consent == "log"


@pytest.mark.parametrize(
    ("keys", "field"),
    [((key("a", A), key("a", B)), "name"), ((key("a", A), key("b", A)), "sha256")],
)
def test_keys_must_differ(keys: tuple[ApiKeyConfig, ...], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        GatewayConfig(api_keys=keys)


@pytest.mark.parametrize("sha256", ["secret", "A" * 64, "a" * 63])
def test_a_key_is_given_by_its_hash(sha256: str) -> None:
    with pytest.raises(ValidationError):
        key("a", sha256)


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:8001", ""])
def test_engines_are_http_addresses(url: str) -> None:
    with pytest.raises(ValidationError, match="http"):
        GatewayConfig(engines=(url,))


def test_a_segment_must_fit_the_spool() -> None:
    with pytest.raises(ValidationError, match="segment_bytes"):
        SpoolConfig(max_bytes=64 * 1024, segment_bytes=64 * 1024 + 1)


def test_reading_the_configuration_imports_nothing_heavy() -> None:
    code = (
        "import sys, onlinerl.serving.config\n"
        "heavy = {'aiohttp', 'kafka', 'numpy', 'starlette', 'tokenizers', 'torch', 'uvicorn'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
