import pytest
from pydantic import ValidationError

from onlinerl.serving.engine.config import (
    EngineConfig,
    LoraConfig,
    SpeculativeConfig,
    is_loopback,
    is_private,
)


@pytest.mark.parametrize(
    ("host", "loopback", "private"),
    [
        ("localhost", True, False),
        ("127.0.0.1", True, True),
        ("::1", True, True),
        ("10.1.2.3", False, True),
        ("192.168.1.9", False, True),
        ("172.16.0.1", False, True),
        ("fd00::1", False, True),
        ("172.32.0.1", False, False),
        ("8.8.8.8", False, False),
        ("2606:4700::1", False, False),
        # Every address of the machine, public ones included.
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("169.254.1.1", False, False),
        ("engine.internal", False, False),
        ("", False, False),
    ],
)
def test_which_hosts_are_loopback_or_private(host: str, loopback: bool, private: bool) -> None:
    assert (is_loopback(host), is_private(host)) == (loopback, private)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_an_engine_on_loopback_needs_no_guard(host: str) -> None:
    assert not EngineConfig(host=host).is_guarded


@pytest.mark.parametrize("host", ["10.1.2.3", "192.168.1.9"])
def test_an_engine_in_a_private_network_is_guarded(host: str) -> None:
    assert EngineConfig(host=host).is_guarded


@pytest.mark.parametrize("host", ["0.0.0.0", "8.8.8.8", "engine.internal", "::"])
def test_a_public_host_is_refused_unless_asked_for_and_then_guarded(host: str) -> None:
    with pytest.raises(ValidationError, match="neither loopback nor one address of a private"):
        EngineConfig(host=host)
    assert EngineConfig(host=host, allow_remote=True).is_guarded


def test_a_step_holds_a_token_of_every_answer() -> None:
    with pytest.raises(ValidationError, match=r"max_num_seqs \(32\)"):
        EngineConfig(max_num_batched_tokens=31)
    assert EngineConfig(max_num_batched_tokens=32).max_num_batched_tokens == 32


def test_without_chunked_prefill_a_step_holds_the_longest_prompt() -> None:
    with pytest.raises(ValidationError, match=r"max_model_len \(2048\)"):
        EngineConfig(max_num_batched_tokens=2047, chunked_prefill=False)
    assert EngineConfig(max_num_batched_tokens=2048, chunked_prefill=False).chunked_prefill is False


def test_white_space_is_left_out_by_backends_that_can() -> None:
    with pytest.raises(ValidationError, match="not 'auto'"):
        EngineConfig(compact_json=True)
    assert EngineConfig(compact_json=True, structured_outputs="guidance").compact_json


def test_twenty_alternatives_and_the_sampled_token_fit() -> None:
    with pytest.raises(ValidationError):
        EngineConfig(max_logprobs=20)
    assert EngineConfig().max_logprobs == 21


@pytest.mark.parametrize(
    "options",
    [
        {"method": "draft_model"},
        {"method": "ngram", "draft_model": "/models/small"},
        {"method": "off", "draft_model": "/models/small"},
        {"method": "ngram", "ngram_min": 5, "ngram_max": 4},
        {"method": "ngram", "num_tokens": 0},
        {"method": "magic"},
    ],
)
def test_speculation_that_cannot_work_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SpeculativeConfig.model_validate(options)


@pytest.mark.parametrize(
    "options",
    [
        {"enabled": True, "max_adapters": 5, "max_cached": 4},
        {"runtime_updates": True},
        {"enabled": True, "max_rank": 17},
    ],
)
def test_adapters_that_cannot_work_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LoraConfig.model_validate(options)
