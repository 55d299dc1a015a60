"""The errors that onlinerl raises on purpose, one class per cause.

OnlineRLError
├── ConfigError (ValueError)              a configuration file, flag or variable is wrong
├── DependencyMissing (ImportError)       an extra is not installed
├── ServiceUnavailable (ConnectionError)  a broker, registry, engine or table did not answer
├── LeaseHeld (RuntimeError)              another process holds the lease for this work
├── RequestRefused (ValueError)           a caller's request cannot be served as it is
├── EngineFailed (RuntimeError)           an answer of an engine could not be had
│   ├── EngineUnreachable                 no connection to the engine could be opened
│   ├── EngineDisconnected                the connection broke
│   ├── EngineTimeout                     the engine did not answer in time
│   ├── EngineProtocolError               the engine's answer cannot be used
│   ├── EngineAborted                     the engine ended an answer before it was complete
│   ├── EngineUnavailable                 the engine says that it cannot serve now
│   ├── EngineRefused                     the engine refused the request
│   ├── AnswerCutOff                      the gateway ended an answer before the engine did
│   └── GatewayFault                      the gateway failed on a fault of its own
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
    """Base of everything that keeps an answer from its caller once an engine was asked.

    Raise one of the causes below, and catch causes. Callers get `status`.
    """

    status = 502

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class EngineUnreachable(EngineFailed):
    """No connection to the engine could be opened, so nothing was sampled.

    `is_late`: the connection was not refused, but not accepted in time; the machine may be busy.
    """

    status = 503

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late


class EngineDisconnected(EngineFailed):
    """The connection to the engine broke before the answer was complete."""

    status = 503


class EngineTimeout(EngineFailed):
    """The engine did not answer in time."""

    status = 504


class EngineProtocolError(EngineFailed):
    """The engine's answer could not be read, or is none that the gateway can use."""

    status = 502


class EngineAborted(EngineFailed):
    """The engine ended an answer before it was complete."""

    status = 502


class EngineUnavailable(EngineFailed):
    """The engine answered that it cannot serve now (503)."""

    status = 503


class EngineRefused(EngineFailed):
    """The engine refused the request; its status is passed on to the caller."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        # All of them, so that the error can be pickled.
        self.args = (message, status)
        self.status = status


class AnswerCutOff(EngineFailed):
    """The gateway ended an answer before the engine did, for example because it stops."""

    status = 503


class GatewayFault(EngineFailed):
    """The gateway failed on a fault of its own while it handled an engine's answer."""

    status = 500


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
