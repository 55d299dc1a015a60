"""Configuration of the ingest process."""

from typing import Literal, Self

from pydantic import Field, model_validator

from onlinerl.base_config import Config


class IngestConfig(Config):
    """How ingest collects records into commits, and how long it waits."""

    mode: Literal["assign", "group"] = "assign"
    """`assign`: one process reads all partitions, and a second one takes over from it. `group`: the
    processes of one consumer group share the partitions."""

    group_id: str = Field(default="onlinerl-ingest", min_length=1, max_length=255)
    """The consumer group, with `mode = "group"`. It only distributes partitions: offsets are never
    committed to it."""

    session_timeout_s: float = Field(default=10.0, ge=6, le=300)
    """With `mode = "group"`, seconds that a process may be silent before others get its
    partitions."""

    vocab_size: int = Field(default=0, ge=0, le=2**31 - 1)
    """Size of the vocabulary. An event with a token id from this size on becomes a dead letter, as
    does one with a negative id. 0 when the size is not known."""

    check_crcs: Literal["auto", "always", "never"] = "auto"
    """Whether to verify the checksum of each batch of the log. `auto` does so when the package
    `crc32c` is installed: without it the check takes longer than all other work."""

    max_batch_rows: int = Field(default=10_000, ge=1, le=1_000_000)
    """Commit the records of a topic when this many are buffered."""

    max_batch_bytes: int = Field(default=16 * 1024**2, ge=1024)
    """Commit the records of a topic when they reach this size."""

    max_batch_age_s: float = Field(default=2.0, gt=0, le=3600)
    """Commit the records of a topic when the oldest has waited this many seconds."""

    max_buffered_bytes: int = Field(default=32 * 1024**2, ge=1024)
    """Stop reading while this many bytes are buffered or being written, over all topics."""

    poll_timeout_s: float = Field(default=0.5, gt=0, le=10)
    """Longest wait for new records, in seconds."""

    check_interval_s: float = Field(default=1.0, gt=0, le=60)
    """Longest time between two checks that the topics were not created anew, in seconds."""

    max_backoff_s: float = Field(default=5.0, gt=0, le=60)
    """Longest wait between two attempts while the broker or the store is away, in seconds."""

    max_commit_s: float = Field(default=300.0, gt=0, le=3600)
    """Longest time that one commit may take, in seconds. Then the process ends, and the next one
    finds out whether the commit happened."""

    recent_ids: int = Field(default=200_000, ge=1, le=50_000_000)
    """Number of newest events per table by which ingest recognises repeats and checks prefixes
    against their parents. Repeats of older events are stored, and the views leave them out."""

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
