"""Values are at the end of the line, and percent signs in values are not format specifiers."""

import logging

from onlinerl.process.logs import KeyValueFormatter


def format_record(message: str, *args: object, **extra: object) -> str:
    record = logging.getLogger("x").makeRecord(
        "x", logging.INFO, "f", 1, message, args, None, extra=extra
    )
    return KeyValueFormatter("%(levelname)s %(message)s").format(record)


def test_values_follow_the_message() -> None:
    assert format_record("decided", version=2, reason="it passed") == (
        "INFO decided version=2 reason='it passed'"
    )


def test_without_values_the_line_is_plain() -> None:
    assert format_record("at %s", "port") == "INFO at port"


def test_percent_signs_stay() -> None:
    assert format_record("100%% of %d", 3, share="5%") == "INFO 100% of 3 share=5%"
