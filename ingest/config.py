"""What the ingest process can be told."""

from typing import Literal, Self

from pydantic import Field, model_validator

from onlinerl.base_config import Config


class IngestConfig(Config):
    """How records are gathered into commits, and how long anything is waited for."""

    mode: Literal["assign", "group"] = "assign"
    """`assign`: one process reads every partition, and a second one takes over from it.
    `group`: the partitions are shared by all processes of one consumer group."""

    group_id: str = Field(default="onlinerl-ingest", min_length=1, max_length=255)
    """The consumer group, with `mode = "group"`. It shares out partitions; offsets are never
    committed to it."""

    session_timeout_s: float = Field(default=10.0, ge=6, le=300)
    """With `mode = "group"`, how long a process may be silent before its partitions are given to
    others."""

    vocab_size: int = Field(default=0, ge=0, le=2**31 - 1)
    """Size of the vocabulary: an event with a token id that is not below it is a dead letter. 0
    when it is not known; negative ids are refused in any case."""

    check_crcs: Literal["auto", "always", "never"] = "auto"
    """Whether the checksum of each batch of the log is looked at again. `auto` does so when the
    package `crc32c` is installed; without it a check takes longer than all the rest."""

    max_batch_rows: int = Field(default=10_000, ge=1, le=1_000_000)
    """Commit a topic when this many of its records are buffered."""

    max_batch_bytes: int = Field(default=16 * 1024**2, ge=1024)
    """Commit a topic when its buffered records reach this size."""

    max_batch_age_s: float = Field(default=2.0, gt=0, le=3600)
    """Commit a topic when its oldest buffered record has waited this long."""

    max_buffered_bytes: int = Field(default=32 * 1024**2, ge=1024)
    """Stop reading while this much is buffered or being written, over all topics."""

    poll_timeout_s: float = Field(default=0.5, gt=0, le=10)
    """Longest wait for new records."""

    check_interval_s: float = Field(default=1.0, gt=0, le=60)
    """Longest time between two looks at whether the topics are still the same ones."""

    max_backoff_s: float = Field(default=5.0, gt=0, le=60)
    """Longest pause between two attempts while the broker or the store is away."""

    max_commit_s: float = Field(default=300.0, gt=0, le=3600)
    """Longest time that one commit may take; then the process ends, and the next one finds out
    whether it happened."""

    recent_ids: int = Field(default=200_000, ge=1, le=50_000_000)
    """Newest events of a table by which one that arrives again is recognised, and a prefix longer
    than its parent is found. Older repeats are stored and left out by the views."""

    health_port: int = Field(default=9101, ge=0, le=65_535)
    """Port of `/health/live`, `/health/ready` and `/metrics`; 0 switches them off."""

    health_host: str = Field(default="127.0.0.1", min_length=1)
    """Address the health port listens on."""

    @model_validator(mode="after")
    def _a_batch_fits_into_the_buffer(self) -> Self:
        if self.max_batch_bytes > self.max_buffered_bytes:
            raise ValueError(
                f"ingest.max_batch_bytes ({self.max_batch_bytes}) must not be above "
                f"max_buffered_bytes ({self.max_buffered_bytes})"
            )
        return self
