"""Configures logging: one line per event, with its values at the end as `key=value`."""

import logging
import sys
import traceback
from types import TracebackType

from onlinerl.errors import OnlineRLError

ErrorInfo = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)

NOISY = {
    "kafka": logging.WARNING,
    "aiohttp.access": logging.WARNING,
    "httpx": logging.WARNING,
    "matplotlib": logging.WARNING,
    "urllib3": logging.WARNING,
    # Warns at every check that the cycle before is still running, which is expected.
    "apscheduler": logging.ERROR,
}
"""Lowest level of loggers of libraries that would otherwise log a line per request or check."""

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class KeyValueFormatter(logging.Formatter):
    """Appends the values of `extra=` to the message, which stays a constant to search for."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the line, followed by the traceback of an error."""
        values = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if not values:
            return super().format(record)
        pairs = " ".join(f"{key}={_quote(value)}" for key, value in values.items())
        copy = logging.makeLogRecord(vars(record))
        copy.msg, copy.args = f"{record.getMessage()} {pairs}", None
        return super().format(copy)


class ContentFreeFormatter(KeyValueFormatter):
    """Keeps user content out of the log of a process that handles it.

    The message of an unexpected error may quote content. Only our own errors and those of the
    operating system keep their message; other errors are logged by type and stack alone, and the
    causes of an error are left out.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format the line, followed by the stack and type of an error."""
        copy = logging.makeLogRecord(vars(record))
        # Another handler may have cached its own text of the error there.
        copy.exc_text = None
        return super().format(copy)

    def formatException(self, ei: ErrorInfo) -> str:  # noqa: N802 the name is logging's
        """Format stack and type, with the message of our own and the system's errors."""
        kind, error, trace = ei
        if kind is None:
            return ""
        message = f": {error}" if isinstance(error, OnlineRLError | OSError) else ""
        return "".join(traceback.format_tb(trace)) + f"{kind.__qualname__}{message}"


def _quote(value: object) -> str:
    text = str(value)
    return repr(text) if not text or any(char.isspace() for char in text) else text


def configure(level: str) -> None:
    """Log to standard error from now on, in place of what was configured before.

    Args:
        level: `debug`, `info`, `warning` or `error`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter(_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, lowest in NOISY.items():
        logging.getLogger(name).setLevel(max(lowest, logging.getLevelName(level.upper())))


def keep_content_out() -> None:
    """Use `ContentFreeFormatter` for every record from now on."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(ContentFreeFormatter(_FORMAT))
