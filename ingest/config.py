"""What the ingest process can be told."""

from pydantic import Field

from onlinerl.base_config import Config


class IngestConfig(Config):
    """How records are gathered into commits, and how long anything is waited for."""

    max_batch_rows: int = Field(default=5_000, ge=1, le=1_000_000)
    """Commit a partition when this many of its records are buffered."""

    max_batch_bytes: int = Field(default=64 * 1024**2, ge=1024)
    """Commit a partition when its buffered records reach this size."""

    max_batch_age_s: float = Field(default=2.0, gt=0, le=3600)
    """Commit a partition when its oldest buffered record has waited this long."""

    poll_timeout_s: float = Field(default=0.5, gt=0, le=10)
    """Longest wait for new records."""

    check_interval_s: float = Field(default=1.0, gt=0, le=60)
    """Longest time between two looks at whether the topics are still the same ones."""

    max_backoff_s: float = Field(default=5.0, gt=0, le=60)
    """Longest pause between two attempts while the broker or the store is away."""

    recent_ids: int = Field(default=200_000, ge=1, le=50_000_000)
    """Newest ids of a table by which an event that arrives again is recognised. Older repeats are
    stored and left out by the views."""

    health_port: int = Field(default=9101, ge=0, le=65_535)
    """Port of `/health/live`, `/health/ready` and `/metrics`; 0 switches them off."""

    health_host: str = Field(default="127.0.0.1", min_length=1)
    """Address the health port listens on."""
