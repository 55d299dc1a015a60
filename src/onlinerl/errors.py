"""Every error that onlinerl raises on purpose.

OnlineRLError
├── ConfigError (ValueError)              a configuration file, flag or variable is wrong
├── DependencyMissing (ImportError)       an extra is not installed
├── ServiceUnavailable (ConnectionError)  a part that was asked did not answer in time
├── LeaseHeld (RuntimeError)              somebody else is doing this work
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
