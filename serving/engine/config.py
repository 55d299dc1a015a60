"""What `onlinerl engine` can be told. Imports nothing heavy."""

import ipaddress
from typing import Literal, Self

from pydantic import Field, model_validator

from onlinerl.base_config import Config

Dtype = Literal["bfloat16", "float16", "float32", "auto"]
GrammarBackend = Literal["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"]
AdapterRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_private(host: str) -> bool:
    """Whether `host` is one address of a private network; not every address of a machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_private and not (
        address.is_unspecified or address.is_link_local or address.is_multicast
    )


class SpeculativeConfig(Config):
    """Tokens that are guessed and then checked at once; what is sampled stays exactly as likely."""

    method: Literal["off", "ngram", "draft_model"] = "off"
    """`ngram` guesses what followed the same tokens before; `draft_model` asks a small model."""

    num_tokens: int = Field(default=3, ge=1, le=32)
    """Tokens that are guessed at once."""

    draft_model: str = ""
    """Folder or Hugging Face id of the small model; it has the policy's tokenizer, and keeps its
    weights when the policy gets new ones."""

    ngram_min: int = Field(default=2, ge=1, le=64)
    """Shortest run of tokens that is looked up."""

    ngram_max: int = Field(default=4, ge=1, le=64)
    """Longest run of tokens that is looked up."""

    @model_validator(mode="after")
    def _ngrams_are_ordered(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise ValueError(
                f"ngram_min ({self.ngram_min}) must not exceed ngram_max ({self.ngram_max})"
            )
        return self

    @model_validator(mode="after")
    def _a_draft_model_is_named_where_one_is_used(self) -> Self:
        if (self.method == "draft_model") != bool(self.draft_model):
            raise ValueError(
                f"method = {self.method!r} and draft_model = {self.draft_model!r} do not fit: name "
                "a draft_model with method = 'draft_model', and none otherwise"
            )
        return self


class LoraConfig(Config):
    """Adapters beside the policy's weights: a version by name, `assistant@12`."""

    enabled: bool = False
    """Whether adapters can be loaded; costs memory and some speed even without one."""

    max_adapters: int = Field(default=2, ge=1, le=64)
    """Adapters that one batch may mix."""

    max_cached: int = Field(default=4, ge=1, le=1024)
    """Adapters kept in the host's memory."""

    max_rank: AdapterRank = 16
    """Largest rank of an adapter."""

    runtime_updates: bool = False
    """Whether adapters are loaded and unloaded while the engine serves, over its administrative
    endpoints."""

    @model_validator(mode="after")
    def _the_cache_holds_a_batch(self) -> Self:
        if self.max_cached < self.max_adapters:
            raise ValueError(
                f"max_cached ({self.max_cached}) must be at least max_adapters "
                f"({self.max_adapters})"
            )
        return self

    @model_validator(mode="after")
    def _updates_need_adapters(self) -> Self:
        if self.runtime_updates and not self.enabled:
            raise ValueError("runtime_updates = true needs enabled = true")
        return self


class EngineConfig(Config):
    """One vLLM replica.

    Its administrative endpoints ask for no key, so vLLM itself listens on loopback only. Where
    `host` is another address, a guard listens there and asks for the secret in
    `ONLINERL_ENGINE_SECRET`.
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on: loopback, or one of a private network behind the guard."""

    port: int = Field(default=8001, ge=1, le=65535)
    """Port to listen on."""

    allow_remote: bool = False
    """True accepts any `host`, such as 0.0.0.0 in a container, behind the guard and a network
    policy."""

    dtype: Dtype = "auto"
    """Type to compute in. `auto`: float32 on a CPU, where it is as fast as bfloat16 and gives the
    learner's logprobs exactly, and bfloat16 on a GPU. Weights travel as they are in the checkpoint.
    """

    max_model_len: int = Field(default=2048, ge=16)
    """Longest prompt and completion together, tokens."""

    max_num_seqs: int = Field(default=32, ge=1)
    """Requests that are decoded at once; more wait in the engine's queue."""

    prefix_caching: bool = True
    """Whether keys and values of a prompt's beginning are kept for the next prompt with the same
    beginning, of the same tenant and version."""

    block_size: int | None = Field(default=None, ge=1, le=1024)
    """Tokens that are cached or not as one; vLLM's choice when absent: 128 on a CPU, so that
    shorter beginnings are never found, 16 on most GPUs."""

    chunked_prefill: bool = True
    """Whether a long prompt is read in pieces between the tokens of other answers."""

    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens in one step of the engine, prompts included; vLLM's choice when absent."""

    max_logprobs: int = Field(default=21, ge=21, le=1024)
    """Log-probabilities that a request may ask for per token: the sampled one, and the 20 that
    clients may ask for beside it."""

    structured_outputs: GrammarBackend = "auto"
    """What keeps answers to a JSON schema or grammar."""

    compact_json: bool = False
    """Whether enforced JSON has no white space between its parts: a small model may otherwise
    write nothing else. With the backends xgrammar and guidance."""

    speculative: SpeculativeConfig = SpeculativeConfig()
    """Tokens that are guessed and then checked at once."""

    lora: LoraConfig = LoraConfig()
    """Adapters beside the policy's weights."""

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

    @property
    def is_guarded(self) -> bool:
        """Whether other machines can reach it, so that a guard stands before it."""
        return not is_loopback(self.host)

    @model_validator(mode="after")
    def _public_hosts_are_asked_for(self) -> Self:
        if self.allow_remote or is_loopback(self.host) or is_private(self.host):
            return self
        raise ValueError(
            f"host = {self.host!r} is neither loopback nor one address of a private network: use "
            "127.0.0.1 or such an address, or set allow_remote = true behind a network policy"
        )

    @model_validator(mode="after")
    def _the_backend_can_leave_out_white_space(self) -> Self:
        if self.compact_json and self.structured_outputs not in ("xgrammar", "guidance"):
            raise ValueError(
                f"compact_json = true needs structured_outputs = 'xgrammar' or 'guidance', not "
                f"{self.structured_outputs!r}"
            )
        return self

    @model_validator(mode="after")
    def _a_step_holds_what_it_must(self) -> Self:
        tokens = self.max_num_batched_tokens
        if tokens is None:
            return self
        if tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every answer gets a token in a step"
            )
        if not self.chunked_prefill and tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be at least max_model_len "
                f"({self.max_model_len}) while chunked_prefill is false"
            )
        return self
