"""Logging of every process: one line an event, its values at the end as `key=value`."""

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
    # Warns at every look that a cycle is still running, which is what it is for.
    "apscheduler": logging.ERROR,
}
"""Loggers of others whose lower levels are one line per request or look, which hides ours."""

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class KeyValueFormatter(logging.Formatter):
    """Appends what was given as `extra=`; the message itself stays a constant to search for."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, followed by the traceback where there is one."""
        values = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if not values:
            return super().format(record)
        named = " ".join(f"{key}={_quoted(value)}" for key, value in values.items())
        copy = logging.makeLogRecord(vars(record))
        copy.msg, copy.args = f"{record.getMessage()} {named}", None
        return super().format(copy)


class ContentFreeFormatter(KeyValueFormatter):
    """For a process that handles what users say: the message of an unexpected error may quote it.

    Errors of ours and of the operating system keep theirs; of any other only type and place are
    told, and of no error what caused it.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, followed by what may be told of an error."""
        copy = logging.makeLogRecord(vars(record))
        # Another handler may have left its own form of the error there.
        copy.exc_text = None
        return super().format(copy)

    def formatException(self, ei: ErrorInfo) -> str:  # noqa: N802 the name is logging's
        """Stack and type, with the message where it is ours."""
        kind, error, trace = ei
        if kind is None:
            return ""
        told = f": {error}" if isinstance(error, OnlineRLError | OSError) else ""
        return "".join(traceback.format_tb(trace)) + f"{kind.__qualname__}{told}"


def _quoted(value: object) -> str:
    text = str(value)
    return repr(text) if not text or any(char.isspace() for char in text) else text


def configure(level: str) -> None:
    """Log to standard error from now on; what was configured before is replaced."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter(_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, lowest in NOISY.items():
        logging.getLogger(name).setLevel(max(lowest, logging.getLevelName(level.upper())))


def keep_content_out() -> None:
    """Format every record without the messages of unexpected errors from now on."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(ContentFreeFormatter(_FORMAT))
