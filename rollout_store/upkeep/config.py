"""The configuration of `onlinerl maintain`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from onlinerl.base_config import Config

Kept = Literal["interactions", "feedback", "dead_letters"]


class MaintenanceConfig(Config):
    """Upkeep of the tables: compaction, checkpoints, cleaning of the log, vacuum.

    Versions that a snapshot or a running cycle holds stay readable.
    """

    interval_s: float = Field(default=600.0, gt=0, le=86_400)
    """Seconds between two passes."""

    target_file_bytes: int = Field(default=128 * 1024**2, ge=1024, le=4 * 1024**3)
    """Files smaller than this are merged into files of about this size."""

    min_small_files: int = Field(default=8, ge=2, le=100_000)
    """A partition is compacted when it has this many files below `target_file_bytes`."""

    retention_hours: int = Field(default=24, ge=1, le=24 * 365)
    """Hours for which a file stays that no version needs any more. Set it longer than the longest
    read and the longest write."""

    log_retention_hours: int = Field(default=24 * 30, ge=1, le=24 * 3650)
    """Hours for which every version of a table can be read; held versions stay longer."""

    checkpoint_every: int = Field(default=20, ge=1, le=10_000)
    """Commits of a table after which a checkpoint of its log is written."""

    lease_ttl_s: float = Field(default=900.0, ge=1, le=86_400)
    """Seconds after which another process may take over from a silent one."""

    health_port: int = Field(default=9104, ge=0, le=65_535)
    """Port of `/health/live`, `/health/ready` and `/metrics`; 0 disables them."""

    health_host: str = Field(default="127.0.0.1", min_length=1)
    """Address the health port listens on."""


class TenantRetention(Config):
    """Days for which the rows of one tenant are kept, where they differ from the others."""

    tenant: str = Field(min_length=1, max_length=256)
    """The tenant."""

    interactions: int | None = Field(default=None, ge=1, le=36_500)
    """Days for `interactions`; the same as for other tenants when absent."""

    feedback: int | None = Field(default=None, ge=1, le=36_500)
    """Days for `feedback`; the same as for other tenants when absent."""


class RetentionConfig(Config):
    """For how many days rows are kept after they were stored.

    The files of deleted rows are removed `[maintenance].retention_hours` later. A snapshot with
    rows whose retention has ended is marked and cannot be read any more.
    """

    interactions: int | None = Field(default=None, ge=1, le=36_500)
    """Days for `interactions`; they are kept forever when absent."""

    feedback: int | None = Field(default=None, ge=1, le=36_500)
    """Days for `feedback`; it is kept forever when absent."""

    dead_letters: int | None = Field(default=None, ge=1, le=36_500)
    """Days for `dead_letters`, of all tenants; they are kept forever when absent."""

    tenants: tuple[TenantRetention, ...] = ()
    """Tenants with a shorter or longer retention."""

    @model_validator(mode="after")
    def _tenants_differ(self) -> Self:
        names = [each.tenant for each in self.tenants]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"retention.tenants names {', '.join(repeated)} more than once")
        return self
