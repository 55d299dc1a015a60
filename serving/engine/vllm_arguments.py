"""From the configuration of an engine to vLLM's command line and environment. Pure functions."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from onlinerl.errors import ConfigError
from onlinerl.serving.engine.config import EngineConfig, SpeculativeConfig, is_loopback
from onlinerl.serving.vllm_plugin.entry_point import NAME

_OWN_OPTIONS = frozenset(
    {
        "--block-size", "--max-num-batched-tokens", "--speculative-config", "-sc", "--max-loras",
        "--max-cpu-loras", "--max-lora-rank",
    }
)  # fmt: skip
"""Options that have a key of their own in `[engine]`, whether it is set or not."""


def engine_command(
    config: EngineConfig,
    *,
    policy: str,
    base_model: str,
    on_cpu: bool,
    host: str,
    port: int,
) -> list[str]:
    """The vLLM command line.

    Args:
        config: The engine's configuration.
        policy: Name under which the model is served.
        base_model: Folder or Hugging Face id of its weights.
        on_cpu: Whether this is the CPU build of vLLM.
        host: Loopback address that vLLM itself listens on.
        port: Port that vLLM listens on: the configured one, unless a guard has that.

    Raises:
        ConfigError: when no model is named, when `host` can be reached from outside, or when
            `extra_args` sets an option that is set here.
    """
    if not base_model:
        raise ConfigError("policy.base_model is empty; name a folder or a Hugging Face id")
    if not is_loopback(host):
        raise ConfigError(f"vLLM would listen on {host!r}, and its endpoints ask for no key")
    options = {
        "--model": base_model,
        "--served-model-name": policy,
        "--host": host,
        "--port": str(port),
        "--dtype": _dtype(config, on_cpu=on_cpu),
        **_scheduler_options(config),
        **_sampling_options(config),
        **_weight_options(),
        **_speculative_options(config.speculative),
        **_lora_options(config),
    }
    switches = _switches(config)
    _check_extra_args(config.extra_args, options=_OWN_OPTIONS | options.keys(), switches=switches)
    # `vllm serve` looks up the metadata of a package named vllm, which the CPU wheel is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for option, value in options.items():
        command += [option, value]
    command += [name if on else _off(name) for name, on in switches.items()]
    return [*command, *config.extra_args]


def _switches(config: EngineConfig) -> dict[str, bool]:
    return {
        # Opens the tokens-in, tokens-out endpoint.
        "--enable-scale-out": True,
        # Reports how many tokens of a prompt the prefix cache held.
        "--enable-prompt-tokens-details": True,
        "--enforce-eager": config.enforce_eager,
        "--enable-prefix-caching": config.prefix_caching,
        "--enable-chunked-prefill": config.chunked_prefill,
        "--enable-lora": config.lora.enabled,
    }


def _sampling_options(config: EngineConfig) -> dict[str, str]:
    grammar = {
        "backend": config.structured_outputs,
        "disable_any_whitespace": config.compact_json,
    }
    return {
        "--seed": str(config.seed),
        "--max-logprobs": str(config.max_logprobs),
        # The model's own generation defaults would change the sampling without the gateway knowing.
        "--generation-config": "vllm",
        # Logprobs are logged for the distribution that was sampled from.
        "--logprobs-mode": "processed_logprobs",
        "--structured-outputs-config": json.dumps(grammar),
    }


def _weight_options() -> dict[str, str]:
    return {
        "--weight-transfer-config": json.dumps({"backend": NAME}),
        "--worker-extension-cls": "onlinerl.serving.vllm_plugin.weight_transfer.WeightWorker",
    }


def _scheduler_options(config: EngineConfig) -> dict[str, str]:
    options = {
        "--max-model-len": str(config.max_model_len),
        "--max-num-seqs": str(config.max_num_seqs),
    }
    if config.block_size is not None:
        options["--block-size"] = str(config.block_size)
    if config.max_num_batched_tokens is not None:
        options["--max-num-batched-tokens"] = str(config.max_num_batched_tokens)
    return options


def _speculative_options(config: SpeculativeConfig) -> dict[str, str]:
    if config.method == "off":
        return {}
    options: dict[str, object] = {
        "method": config.method,
        "num_speculative_tokens": config.num_tokens,
    }
    if config.method == "ngram":
        options |= {"prompt_lookup_min": config.ngram_min, "prompt_lookup_max": config.ngram_max}
    else:
        options["model"] = config.draft_model
    return {"--speculative-config": json.dumps(options)}


def _lora_options(config: EngineConfig) -> dict[str, str]:
    lora = config.lora
    if not lora.enabled:
        return {}
    return {
        "--max-loras": str(lora.max_adapters),
        "--max-cpu-loras": str(lora.max_cached),
        "--max-lora-rank": str(lora.max_rank),
    }


def _off(switch: str) -> str:
    return switch.replace("--", "--no-", 1)


def _check_extra_args(
    extra_args: Sequence[str], *, options: frozenset[str], switches: dict[str, bool]
) -> None:
    """Refuse arguments that would override `options` or `switches`: vLLM keeps the last of two.

    vLLM also reads underscores as dashes, `--option.key` as a part of an option, `--no-option` as
    its opposite, and the beginning of an option as that option.
    """
    for argument in extra_args:
        if not argument.startswith("-"):
            continue
        name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
        if switches.get(name) and "=" not in argument:
            continue  # repeating it changes nothing
        positive = name.replace("--no-", "--", 1)
        taken = [option for option in sorted({*options, *switches}) if _means(positive, option)]
        if taken:
            raise ConfigError(
                f"engine.extra_args holds {name}, but {taken[0]} is set by onlinerl: remove it, or"
                " use the key of [engine] where there is one"
            )


def _means(name: str, option: str) -> bool:
    return option.startswith(name) if name.startswith("--") else option == name


def _dtype(config: EngineConfig, *, on_cpu: bool) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if on_cpu else "bfloat16"


def engine_environment(config: EngineConfig, *, base_model: str) -> dict[str, str]:
    """The environment variables that are set for vLLM."""
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        # Opens the endpoints that swap weights. They ask for no key, so vLLM listens on loopback.
        "VLLM_SERVER_DEV_MODE": "1",
        # Always set, so that the surrounding environment cannot open the endpoint.
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if config.lora.runtime_updates else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if Path(base_model).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    if config.threads:
        variables["OMP_NUM_THREADS"] = str(config.threads)
    return variables
