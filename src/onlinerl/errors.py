"""The errors that onlinerl raises on purpose, one class per cause.

OnlineRLError
├── ConfigError (ValueError)              a configuration file, flag or variable is wrong
├── DependencyMissing (ImportError)       an extra is not installed
├── ServiceUnavailable (ConnectionError)  a broker, registry, engine or table did not answer
├── LeaseHeld (RuntimeError)              another process holds the lease for this work
├── RequestRefused (ValueError)           a caller's request cannot be served as it is
├── EngineFailed (RuntimeError)           an engine refused or broke off an answer
│   └── EngineUnreachable                 nothing listens where an engine should be
├── InvalidEvent (ValueError)             a logged record breaks the event contract
├── StoreConflict (RuntimeError)          another writer committed the same offsets first
├── CommitStuck (TimeoutError)            a commit to the tables did not end in time
├── SpoolFull (OSError)                   the gateway's spool reached its bound
├── TooFewRows (RuntimeError)             a window has too few labelled rows to learn from
├── TrainingError (RuntimeError)          an update cannot be computed from this data
├── WeightsError (RuntimeError)           a weights folder is incomplete, corrupt or does not fit
└── PromotionFailed (RuntimeError)        a version could not be put into every replica
"""

from collections.abc import Mapping


class OnlineRLError(Exception):
    """Base class. The command line prints its message without a traceback and exits with 1."""


class ConfigError(OnlineRLError, ValueError):
    """A configuration file, flag or variable is wrong; the message names it and the remedy."""


class DependencyMissing(OnlineRLError, ImportError):
    """A package is not installed; the message names the extra that installs it."""


class ServiceUnavailable(OnlineRLError, ConnectionError):
    """A broker, registry, engine or object store did not answer within its timeout."""


class LeaseHeld(OnlineRLError, RuntimeError):
    """Another process holds the lease, or took it over; the message says which lease it is."""


class RequestRefused(OnlineRLError, ValueError):
    """A request cannot be served; the gateway answers with an error in the caller's protocol.

    Args:
        message: What is wrong with the request, for the caller.
        status: HTTP status of the answer.
        param: Name of the parameter that is wrong, if it is one.
        code: Machine-readable cause, e.g. `model_not_found`.
        headers: Headers of the answer, e.g. `retry-after`.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, status, param, code, headers)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def __str__(self) -> str:
        return self.message


class EngineFailed(OnlineRLError, RuntimeError):
    """Raised when an engine refuses or breaks off an answer; the gateway passes `status` on."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message, status)
        self.message = message
        self.status = status

    def __str__(self) -> str:
        return self.message


class EngineUnreachable(EngineFailed):
    """Raised when no connection to an engine can be opened: nothing was sampled, ask another.

    `is_late`: it was not refused, only not taken in time, which may say that a machine is busy.
    """

    def __init__(self, message: str, status: int = 503, *, is_late: bool = False) -> None:
        super().__init__(message, status)
        self.is_late = is_late


class InvalidEvent(OnlineRLError, ValueError):
    """A record breaks the event contract; ingest stores it as a dead letter."""


class StoreConflict(OnlineRLError, RuntimeError):
    """Another writer committed the same offsets first; the process that lost must stop."""


class CommitStuck(OnlineRLError, TimeoutError):
    """A commit takes longer than `ingest.max_commit_s`; the process ends and is restarted."""


class SpoolFull(OnlineRLError, OSError):
    """The spool reached its bound; the gateway counts the event as lost and goes on serving."""


class TooFewRows(OnlineRLError, RuntimeError):
    """A window holds fewer than `trainer.min_labelled_rows`; the schedule waits for more."""


class TrainingError(OnlineRLError, RuntimeError):
    """No update can be computed from a batch, e.g. because it has no trainable token."""


class WeightsError(OnlineRLError, RuntimeError):
    """A weights folder lacks READY, or has a wrong checksum, base, shape or dtype."""


class PromotionFailed(OnlineRLError, RuntimeError):
    """Stage, commit or proof failed on a replica; the message says which version serves now."""
