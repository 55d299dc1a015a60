"""Server-sent events, read and written as bytes.

Reading lines of text would be wrong: `splitlines` also splits at U+2028, U+2029 and U+0085, which
JSON may hold, and a UTF-8 character may arrive in two pieces.
"""

from collections.abc import Iterator

DONE = b"[DONE]"


class EventFramer:
    """Takes bytes as they arrive and gives the `data` of each whole event.

    Args:
        max_bytes: Largest size of an unfinished event.
    """

    def __init__(self, *, max_bytes: int = 64 * 2**20) -> None:
        self._held = bytearray()
        self._max_bytes = max_bytes

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The events that `piece` completes.

        Raises:
            ValueError: an event is larger than `max_bytes`.
        """
        held = self._held
        # The end of an event lies in the new piece or in the three bytes before it. Searching only
        # there keeps a large event in many pieces from being searched once for every piece.
        start = max(len(held) - 3, 0)
        held += piece
        if b"\n\n" in held[start:] or b"\n\r\n" in held[start:]:
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
    """One event with `data`, which must hold no line break."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """One event of the type `name`; `data` must hold no line break."""
    return b"event: " + name.encode("ascii") + b"\n" + event(data)
