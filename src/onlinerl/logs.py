"""Logging of every process: one line an event, its values at the end as `key=value`."""

import logging
import sys

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


def _quoted(value: object) -> str:
    text = str(value)
    return repr(text) if not text or any(char.isspace() for char in text) else text


def configure(level: str) -> None:
    """Log to standard error from now on; what was configured before is replaced."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, lowest in NOISY.items():
        logging.getLogger(name).setLevel(max(lowest, logging.getLevelName(level.upper())))
