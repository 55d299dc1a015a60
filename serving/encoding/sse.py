"""Server-sent events, framed on bytes.

Never on text lines: `splitlines` also splits on U+2028, U+2029 and U+0085, which JSON may hold,
and a UTF-8 character may arrive in two pieces.
"""

from collections.abc import Iterator

DONE = b"[DONE]"


class EventFramer:
    """Bytes in, the `data` of whole events out. Holds at most `max_bytes` of an unfinished one."""

    def __init__(self, *, max_bytes: int = 64 * 2**20) -> None:
        self._held = bytearray()
        self._max_bytes = max_bytes

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The events that `piece` completes.

        Raises:
            ValueError: when an event is larger than the bound.
        """
        held = self._held
        # Only what is new can hold the end of an event, save the last three bytes before it: a
        # large event that comes in many pieces is then looked through once, not once a piece.
        seen = max(len(held) - 3, 0)
        held += piece
        if b"\n\n" in held[seen:] or b"\n\r\n" in held[seen:]:
            *events, rest = bytes(held).replace(b"\r\n", b"\n").split(b"\n\n")
            self._held = bytearray(rest)
        else:
            events = []
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


def named_event(name: str, data: bytes) -> bytes:
    """One event of the type `name`; `data` holds no line break."""
    return b"event: " + name.encode("ascii") + b"\n" + event(data)
