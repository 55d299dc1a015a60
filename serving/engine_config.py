"""What `onlinerl engine` can be told. Imports nothing heavy."""

import ipaddress
from typing import Literal, Self

from pydantic import Field, model_validator

from onlinerl.base_config import Config

Dtype = Literal["bfloat16", "float16", "float32", "auto"]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class EngineConfig(Config):
    """One vLLM replica. Its administrative endpoints ask for no key, so it stays on loopback."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on."""

    port: int = Field(default=8001, ge=1, le=65535)
    """Port to listen on."""

    allow_remote: bool = False
    """True accepts a `host` that other machines can reach; only behind a network policy."""

    dtype: Dtype = "auto"
    """Type to compute in. `auto`: float32 on a CPU, where it is as fast as bfloat16 and gives the
    learner's logprobs exactly, and bfloat16 on a GPU. Weights travel as they are in the checkpoint.
    """

    max_model_len: int = Field(default=2048, ge=16)
    """Longest prompt and completion together, tokens."""

    max_num_seqs: int = Field(default=32, ge=1)
    """Requests that are decoded at once; more wait in the engine's queue."""

    enforce_eager: bool = True
    """True starts in a third of the time on a CPU; False compiles the model first."""

    kv_cache_gib: int = Field(default=1, ge=1)
    """Memory of the key-value cache on a CPU, GiB; a GPU takes vLLM's own share."""

    seed: int = Field(default=0, ge=0)
    """Seed of the engine's sampler for requests that bring none."""

    threads: int = Field(default=0, ge=0)
    """CPU threads of the model; 0 leaves the choice to vLLM."""

    extra_args: tuple[str, ...] = ()
    """More arguments for vLLM, as on its command line: `["--tensor-parallel-size", "2"]`."""

    stop_timeout_s: float = Field(default=20.0, gt=0)
    """Time that the engine gets to stop by itself before it is killed, seconds."""

    @model_validator(mode="after")
    def _remote_hosts_are_asked_for(self) -> Self:
        if not self.allow_remote and not is_loopback(self.host):
            raise ValueError(
                f"host = {self.host!r} can be reached from other machines, and the engine's "
                "administrative endpoints ask for no key: use 127.0.0.1, or set allow_remote = true"
                " behind a network policy"
            )
        return self
