import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.serving.encoding.sse import EventFramer, event


def test_events_come_out_whole_whatever_the_pieces() -> None:
    framer = EventFramer()

    assert list(framer.feed(b'data: {"a"')) == []
    assert list(framer.feed(b": 1}\n\ndata: [DO")) == [b'{"a": 1}']
    assert list(framer.feed(b"NE]\n\n")) == [b"[DONE]"]


def test_carriage_returns_and_comments_are_fine() -> None:
    assert list(EventFramer().feed(b": ping\r\n\r\nevent: x\r\ndata:y\r\n\r\n")) == [b"y"]


def test_an_endless_event_is_refused() -> None:
    framer = EventFramer(max_bytes=10)

    with pytest.raises(ValueError, match="larger than 10"):
        list(framer.feed(b"data: 0123456789"))


@given(
    texts=st.lists(st.text(), max_size=4),
    size=st.integers(min_value=1, max_value=7),
    separator=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
)
def test_line_separators_inside_json_split_nothing(
    texts: list[str], size: int, separator: bytes
) -> None:
    texts = [*texts, "\u2028 \u2029 \x85"]
    wire = b"".join(
        event(json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")).replace(
            b"\n\n", separator
        )
        for text in texts
    )
    framer = EventFramer()
    pieces = [wire[at : at + size] for at in range(0, len(wire), size)]
    found = [json.loads(data) for piece in pieces for data in framer.feed(piece)]

    assert found == texts


def test_mixed_line_ends_in_any_pieces_end_an_event() -> None:
    wire = b"data: a\n\r\ndata: b\r\n\ndata: c\r\n\r\n"
    for size in range(1, len(wire) + 1):
        framer = EventFramer()
        pieces = [wire[at : at + size] for at in range(0, len(wire), size)]

        assert [data for piece in pieces for data in framer.feed(piece)] == [b"a", b"b", b"c"]


def test_an_event_that_comes_in_many_pieces_is_whole() -> None:
    text = b"x" * 300_000
    framer = EventFramer()
    wire = event(text)
    found = [data for at in range(0, len(wire), 1000) for data in framer.feed(wire[at : at + 1000])]

    assert found == [text]
