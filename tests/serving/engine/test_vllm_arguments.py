import json
from pathlib import Path
from typing import Any

import pytest

from onlinerl.errors import ConfigError
from onlinerl.serving.engine.config import EngineConfig
from onlinerl.serving.engine.vllm_arguments import engine_command, engine_environment


def command(
    *,
    on_cpu: bool = True,
    base_model: str = "/models/m",
    host: str = "127.0.0.1",
    port: int = 8001,
    **options: object,
) -> list[str]:
    config = EngineConfig.model_validate(options)
    return engine_command(
        config, policy="assistant", base_model=base_model, on_cpu=on_cpu, host=host, port=port
    )


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_the_engine_serves_the_policy_under_its_name_with_our_weight_transfer() -> None:
    arguments = command(port=8123)

    assert arguments[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert option(arguments, "--model") == "/models/m"
    assert option(arguments, "--served-model-name") == "assistant"
    assert option(arguments, "--port") == "8123"
    assert option(arguments, "--weight-transfer-config") == '{"backend": "onlinerl"}'
    assert option(arguments, "--worker-extension-cls").endswith("weight_transfer.WeightWorker")


def test_logged_logprobs_are_those_of_the_sampled_distribution() -> None:
    assert option(command(), "--logprobs-mode") == "processed_logprobs"


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "expected"),
    [
        ("auto", True, "float32"),
        ("auto", False, "bfloat16"),
        ("bfloat16", True, "bfloat16"),
        ("float16", False, "float16"),
    ],
)
def test_dtype_follows_the_machine_unless_told(dtype: str, on_cpu: bool, expected: str) -> None:
    assert option(command(dtype=dtype, on_cpu=on_cpu), "--dtype") == expected


@pytest.mark.parametrize(
    ("options", "switch"),
    [
        ({}, "--enable-prefix-caching"),
        ({"prefix_caching": False}, "--no-enable-prefix-caching"),
        ({}, "--enable-chunked-prefill"),
        ({"chunked_prefill": False}, "--no-enable-chunked-prefill"),
        ({}, "--enforce-eager"),
        ({"enforce_eager": False}, "--no-enforce-eager"),
        ({}, "--no-enable-lora"),
        ({"lora": {"enabled": True}}, "--enable-lora"),
        ({}, "--enable-scale-out"),
        ({}, "--enable-prompt-tokens-details"),
    ],
)
def test_what_is_on_or_off_is_said_either_way(options: dict[str, Any], switch: str) -> None:
    arguments = command(**options)

    assert arguments.count(switch) == 1
    opposite = switch.replace("--no-", "--") if "--no-" in switch else switch.replace("--", "--no-")
    assert opposite not in arguments


def test_sizes_are_vllms_choice_unless_told() -> None:
    plain = command()
    told = command(max_num_batched_tokens=512, block_size=32, max_logprobs=30)

    assert "--max-num-batched-tokens" not in plain
    assert "--block-size" not in plain
    assert option(plain, "--max-logprobs") == "21"
    assert option(told, "--max-num-batched-tokens") == "512"
    assert option(told, "--block-size") == "32"
    assert option(told, "--max-logprobs") == "30"


def test_speculation_is_off_by_ngram_or_by_a_draft_model() -> None:
    ngram = {"method": "ngram", "num_tokens": 5, "ngram_min": 1, "ngram_max": 3}
    draft = {"method": "draft_model", "draft_model": "/models/small"}

    assert "--speculative-config" not in command()
    assert json.loads(option(command(speculative=ngram), "--speculative-config")) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
    assert json.loads(option(command(speculative=draft), "--speculative-config")) == {
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "model": "/models/small",
    }


def test_the_grammar_backend_is_passed_on() -> None:
    arguments = command(structured_outputs="guidance", compact_json=True)

    assert json.loads(option(arguments, "--structured-outputs-config")) == {
        "backend": "guidance",
        "disable_any_whitespace": True,
    }


def test_adapters_are_bounded_and_loaded_at_run_time_only_when_told() -> None:
    lora = {"enabled": True, "max_adapters": 3, "max_cached": 9, "max_rank": 32}
    arguments = command(lora=lora)
    closed = engine_environment(EngineConfig.model_validate({"lora": lora}), base_model="m")
    opened = engine_environment(
        EngineConfig.model_validate({"lora": lora | {"runtime_updates": True}}), base_model="m"
    )

    assert option(arguments, "--max-loras") == "3"
    assert option(arguments, "--max-cpu-loras") == "9"
    assert option(arguments, "--max-lora-rank") == "32"
    assert "--max-loras" not in command()
    # Said in any case: a variable that is there must not open the endpoint.
    assert closed["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"
    assert opened["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tensor-parallel-size", "2"],
        ["-tp", "2"],
        ["--model-impl", "vllm"],
        ["--enforce-eager", "--enable-scale-out"],
        ["--stream-interval", "-1"],
    ],
)
def test_extra_arguments_are_passed_on(arguments: list[str]) -> None:
    assert command(extra_args=arguments)[-len(arguments) :] == arguments


@pytest.mark.parametrize(
    ("argument", "option"),
    [
        ("--host", "--host"),
        ("--host=0.0.0.0", "--host"),
        ("--hos", "--host"),
        ("--logprobs_mode", "--logprobs-mode"),
        ("--logprobs-m=raw_logprobs", "--logprobs-mode"),
        ("--weight-transfer-config.backend", "--weight-transfer-config"),
        ("--no-enable-scale-out", "--enable-scale-out"),
        ("--no-enforce-eager", "--enforce-eager"),
        ("--no-enable-prefix-caching", "--enable-prefix-caching"),
        ("--enable-lora", "--enable-lora"),
        ("--speculative-config", "--speculative-config"),
        ("-sc", "-sc"),
        ("--max-lora-rank", "--max-lora-rank"),
        ("--block_size", "--block-size"),
        ("--seed", "--seed"),
    ],
)
def test_extra_arguments_override_nothing(argument: str, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"extra_args holds {argument[:5]}.*{option} is set"):
        command(extra_args=["--tensor-parallel-size", "2", argument, "x"])


def test_vllm_itself_listens_on_loopback_and_nowhere_else() -> None:
    assert option(command(host="127.0.0.1"), "--host") == "127.0.0.1"
    for host in ("0.0.0.0", "10.0.0.1", "engine.internal", "::"):
        with pytest.raises(ConfigError, match="ask for no key"):
            command(host=host)


def test_a_missing_model_is_said_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"policy\.base_model"):
        command(base_model="")


def test_only_a_local_folder_is_offline(tmp_path: Path) -> None:
    local = engine_environment(EngineConfig(), base_model=str(tmp_path))
    remote = engine_environment(EngineConfig(threads=3), base_model="org/model")

    assert local["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in remote
    assert remote["OMP_NUM_THREADS"] == "3"
    assert remote["VLLM_SERVER_DEV_MODE"] == "1"
