"""Calls in the form of Hermes, read as soon as each is whole."""

from collections.abc import Iterator, Sequence

from onlinerl.serving import hermes
from onlinerl.serving.output_parser import NewId, Part, Said, new_call_id
from onlinerl.serving.request import ToolCall
from onlinerl.serving.tagged_text import Expected, Markers, TaggedSplitter, undecided


class HermesSplitter(TaggedSplitter):
    """`<tool_call>` around JSON; what comes after a call may be another one, or text."""

    def __init__(self, expected: Expected, *, new_id: NewId = new_call_id) -> None:
        super().__init__(expected, Markers(call_opens=(hermes.CALL_OPEN,)))
        self._new_id = new_id

    def _call(self) -> Iterator[Part]:
        before, marker, rest = self._held.partition(hermes.CALL_CLOSE)
        if not marker:
            self._keep_up_to(undecided(before, [hermes.CALL_CLOSE]))
            return
        gap, opening, *body = [*self._kept, before]
        written = "".join(body)
        call = hermes.read_call(written)
        if call is None and hermes.ends_inside_text(written):
            # This marker is part of an argument.
            self._keep_up_to(len(before) + len(marker))
            yield from self._call()
            return
        self._kept = []
        if call is None:
            self._state, self._held, self._after_markup = "text", rest, False
            yield Said(f"{gap}{opening}{written}{marker}")
        else:
            self._enter("text", rest)
            yield ToolCall(id=self._new_id(), name=call.name, arguments=call.arguments)

    def _read_unfinished(self, held: str) -> Sequence[Part]:
        if self._state == "call":
            return [Said(held)]
        inner = HermesSplitter(Expected(tools=True), new_id=self._new_id)
        return [*inner.push(held), *inner.end()]
