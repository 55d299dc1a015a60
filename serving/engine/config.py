"""Configuration of `onlinerl engine`. Imports nothing heavy."""

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
    """Whether `host` is one address of a private network; 0.0.0.0 is not."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_private and not (
        address.is_unspecified or address.is_link_local or address.is_multicast
    )


class SpeculativeConfig(Config):
    """Speculative decoding: tokens are guessed, then checked at once; no probability changes."""

    method: Literal["off", "ngram", "draft_model"] = "off"
    """`ngram` guesses the tokens that followed the same tokens before; `draft_model` asks a small
    model."""

    num_tokens: int = Field(default=3, ge=1, le=32)
    """Number of tokens guessed at once."""

    draft_model: str = ""
    """Folder or Hugging Face id of the small model. It must have the tokenizer of the policy, and
    its weights never change."""

    ngram_min: int = Field(default=2, ge=1, le=64)
    """Shortest sequence that is looked up, in tokens."""

    ngram_max: int = Field(default=4, ge=1, le=64)
    """Longest sequence that is looked up, in tokens."""

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
    """LoRA adapters beside the policy's weights; each is served by name, e.g. `assistant@12`."""

    enabled: bool = False
    """Whether adapters can be loaded. It costs memory and some speed even without an adapter."""

    max_adapters: int = Field(default=2, ge=1, le=64)
    """Largest number of adapters in one batch."""

    max_cached: int = Field(default=4, ge=1, le=1024)
    """Number of adapters kept in the memory of the host."""

    max_rank: AdapterRank = 16
    """Largest rank of an adapter."""

    runtime_updates: bool = False
    """Whether the administrative endpoints can load and unload adapters while the engine serves."""

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

    The administrative endpoints of vLLM require no key, so vLLM itself listens on loopback only. If
    `host` is another address, a guard listens there and requires the secret in
    `ONLINERL_ENGINE_SECRET`.
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on: loopback, or one of a private network behind the guard."""

    port: int = Field(default=8001, ge=1, le=65535)
    """Port to listen on."""

    allow_remote: bool = False
    """Whether any `host` is accepted, e.g. 0.0.0.0 in a container. The guard still stands before
    the engine; add a network policy."""

    dtype: Dtype = "auto"
    """Type of the computation. `auto` is bfloat16 on a GPU and float32 on a CPU, where float32 is
    about as fast and matches the logprobs of the learner. Checkpoint and deltas keep their own
    type."""

    max_model_len: int = Field(default=2048, ge=16)
    """Largest number of tokens of prompt and completion."""

    max_num_seqs: int = Field(default=32, ge=1)
    """Largest number of requests decoded at once; more wait in the queue of the engine."""

    prefix_caching: bool = True
    """Whether keys and values of a prompt are cached for the next prompt with the same beginning,
    tenant and version."""

    block_size: int | None = Field(default=None, ge=1, le=1024)
    """Number of tokens in a block of the cache; a shorter beginning is never found in it. vLLM's
    choice when absent: 128 on a CPU, 16 on most GPUs."""

    chunked_prefill: bool = True
    """Whether a long prompt is processed in pieces, between the tokens of other answers."""

    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens in one step of the engine, prompts included; vLLM's choice when
    absent."""

    max_logprobs: int = Field(default=21, ge=21, le=1024)
    """Largest number of logprobs per token in a request: that of the sampled token, and the 20 that
    clients may ask for."""

    structured_outputs: GrammarBackend = "auto"
    """Library of vLLM that makes answers follow a JSON schema or grammar."""

    compact_json: bool = False
    """Whether enforced JSON has no white space between its parts, since a small model may otherwise
    write nothing but white space. Needs the backend xgrammar or guidance."""

    speculative: SpeculativeConfig = SpeculativeConfig()
    """Speculative decoding."""

    lora: LoraConfig = LoraConfig()
    """LoRA adapters beside the policy's weights."""

    enforce_eager: bool = True
    """Whether the model runs without being compiled first, which starts in a third of the time on a
    CPU."""

    kv_cache_gib: int = Field(default=1, ge=1)
    """Memory of the key-value cache on a CPU, in GiB. On a GPU vLLM takes its default share."""

    seed: int = Field(default=0, ge=0)
    """Seed of the sampler for requests that have none."""

    threads: int = Field(default=0, ge=0)
    """CPU threads of the model; 0 leaves the choice to vLLM."""

    extra_args: tuple[str, ...] = ()
    """More arguments of the vLLM command line, e.g. `["--tensor-parallel-size", "2"]`."""

    stop_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds that the engine gets to stop before it is killed."""

    @property
    def is_guarded(self) -> bool:
        """Whether other machines can reach the engine, so that it runs behind a guard."""
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
