"""Server-sent events, framed on bytes.

Never on text lines: `splitlines` also splits on U+2028, U+2029 and U+0085, which JSON may hold,
and a UTF-8 character may arrive in two pieces.
"""

from collections.abc import Iterator

DONE = b"[DONE]"


class EventFramer:
    """Bytes in, the `data` of whole events out. Holds at most `max_bytes` of an unfinished one."""

    def __init__(self, *, max_bytes: int = 64 * 2**20) -> None:
        self._held = b""
        self._max_bytes = max_bytes

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The events that `piece` completes.

        Raises:
            ValueError: when an event is larger than the bound.
        """
        # The held part may end in a lone \r: join first, then normalise.
        held = (self._held + piece).replace(b"\r\n", b"\n")
        *events, self._held = held.split(b"\n\n")
        if len(self._held) > self._max_bytes:
            raise ValueError(f"an event is larger than {self._max_bytes} bytes")
        for event in events:
            data = [_value(line) for line in event.split(b"\n") if line.startswith(b"data:")]
            if data:
                yield b"\n".join(data)


def _value(line: bytes) -> bytes:
    value = line.removeprefix(b"data:")
    return value.removeprefix(b" ")


def event(data: bytes) -> bytes:
    """One event that carries `data`, which holds no line break."""
    return b"data: " + data + b"\n\n"
