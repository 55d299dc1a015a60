"""Configuration of `onlinerl ingest`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from onlinerl.base_config import Config


class IngestConfig(Config):
    """How records are gathered into commits, and the timeouts of the ingest process."""

    mode: Literal["assign", "group"] = "assign"
    """`assign`: one process reads every partition; a second process takes over when it is started.
    `group`: all processes of one consumer group share the partitions."""

    group_id: str = Field(default="onlinerl-ingest", min_length=1, max_length=255)
    """Name of the consumer group, with `mode = "group"`. The group only shares out partitions; no
    offsets are committed to it."""

    session_timeout_s: float = Field(default=10.0, ge=6, le=300)
    """With `mode = "group"`, seconds of silence after which the partitions of a process go to
    others."""

    vocab_size: int = Field(default=0, ge=0, le=2**31 - 1)
    """Number of tokens in the vocabulary. An event with a token id of this or more becomes a dead
    letter; 0 checks only that ids are not negative."""

    check_crcs: Literal["auto", "always", "never"] = "auto"
    """Whether the checksum of each batch of the log is verified. `auto` does so when the package
    `crc32c` is installed; without it verification takes longer than everything else."""

    max_batch_rows: int = Field(default=10_000, ge=1, le=1_000_000)
    """Buffered records of a topic at which they are committed."""

    max_batch_bytes: int = Field(default=16 * 1024**2, ge=1024)
    """Size of the buffered records of a topic, in bytes, at which they are committed."""

    max_batch_age_s: float = Field(default=2.0, gt=0, le=3600)
    """Seconds after which a buffered record is committed, however few there are."""

    max_buffered_bytes: int = Field(default=32 * 1024**2, ge=1024)
    """Bytes, buffered or being written over all topics, at which reading stops."""

    poll_timeout_s: float = Field(default=0.5, gt=0, le=10)
    """Longest wait for new records, in seconds."""

    check_interval_s: float = Field(default=1.0, gt=0, le=60)
    """Longest time, in seconds, between two checks that the topics were not deleted and created
    again."""

    max_backoff_s: float = Field(default=5.0, gt=0, le=60)
    """Longest pause, in seconds, between two attempts while the broker or the store is away."""

    max_commit_s: float = Field(default=300.0, gt=0, le=3600)
    """Longest time that one commit may take, in seconds. After it the process ends, and the next
    one finds out whether the commit happened."""

    recent_ids: int = Field(default=200_000, ge=1, le=50_000_000)
    """Number of the newest events of a table that are remembered, to recognise an event that
    arrives again and a prefix that is longer than its parent. Repeats of older events are stored,
    and the views leave them out."""

    health_port: int = Field(default=9101, ge=0, le=65_535)
    """Port of `/health/live`, `/health/ready` and `/metrics`; 0 switches them off."""

    health_host: str = Field(default="127.0.0.1", min_length=1)
    """Address that the health port listens on."""

    @model_validator(mode="after")
    def _a_batch_fits_into_the_buffer(self) -> Self:
        if self.max_batch_bytes > self.max_buffered_bytes:
            raise ValueError(
                f"ingest.max_batch_bytes ({self.max_batch_bytes}) must not be above "
                f"max_buffered_bytes ({self.max_buffered_bytes})"
            )
        return self
