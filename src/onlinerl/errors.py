"""Every error that onlinerl raises on purpose.

OnlineRLError
├── ConfigError (ValueError)              a configuration file, flag or variable is wrong
├── DependencyMissing (ImportError)       an extra is not installed
├── ServiceUnavailable (ConnectionError)  a part that was asked did not answer in time
├── LeaseHeld (RuntimeError)              somebody else is doing this work
├── RequestRefused (ValueError)           a caller's request cannot be served as it is
├── EngineFailed (RuntimeError)           an engine refused or broke off an answer
│   └── EngineUnreachable                 nothing listens where an engine should be
├── InvalidEvent (ValueError)             a logged record breaks the event contract
├── StoreConflict (RuntimeError)          another writer committed the same offsets first
├── CommitStuck (TimeoutError)            a commit did not end in time
├── SpoolFull (OSError)                   the gateway's spool reached its bound
├── TooFewRows (RuntimeError)             a cycle has not enough labelled rows to learn from
├── TrainingError (RuntimeError)          an update cannot be computed from this data
├── WeightsError (RuntimeError)           a weights folder is incomplete, corrupt or does not fit
└── PromotionFailed (RuntimeError)        a version could not be put into every replica
"""

from collections.abc import Mapping


class OnlineRLError(Exception):
    """Base of all; the command line prints its message without a traceback and exits with 1."""


class ConfigError(OnlineRLError, ValueError):
    """Raised while configuration is read. The message names the key, its value and the remedy."""


class DependencyMissing(OnlineRLError, ImportError):
    """Raised at the edge of a command whose extra is not installed; the message names the extra."""


class ServiceUnavailable(OnlineRLError, ConnectionError):
    """Raised when a broker, registry or engine does not answer within its timeout."""


class LeaseHeld(OnlineRLError, RuntimeError):
    """Raised when a lease is taken; the message says who holds it and since when."""


class RequestRefused(OnlineRLError, ValueError):
    """Raised for a request that the gateway answers with an error in its protocol's envelope.

    `headers` go out with it, e.g. when to come back.
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
    """Raised for a record that breaks the event contract; ingest turns it into a dead letter."""


class StoreConflict(OnlineRLError, RuntimeError):
    """Raised when a commit lost to another writer of the same offsets; the caller stops."""


class CommitStuck(OnlineRLError, TimeoutError):
    """Raised when a commit takes longer than ingest waits; the process ends and starts anew."""


class SpoolFull(OnlineRLError, OSError):
    """Raised by the spool at its bound; the gateway counts the event as lost and serves on."""


class TooFewRows(OnlineRLError, RuntimeError):
    """Raised when a window holds fewer labelled rows than configured; the schedule waits."""


class TrainingError(OnlineRLError, RuntimeError):
    """Raised for a batch that no update can be computed from, e.g. without a trainable token."""


class WeightsError(OnlineRLError, RuntimeError):
    """Raised for a weights folder without READY, with a wrong checksum, base, shape or dtype."""


class PromotionFailed(OnlineRLError, RuntimeError):
    """Raised when stage, commit or verify failed on a replica; says what serves now."""
