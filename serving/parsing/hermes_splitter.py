"""Reads calls in the form of Hermes, each as soon as it is whole."""

from collections.abc import Iterator, Sequence

from onlinerl.serving.interaction.request import ToolCall
from onlinerl.serving.parsing import hermes
from onlinerl.serving.parsing.output_parser import NewId, Part, TextPart, new_call_id
from onlinerl.serving.parsing.tagged_text import (
    AnswerFeatures,
    Markers,
    Split,
    State,
    TaggedSplitter,
    tail_start,
)

_SLICE = 4096
"""Number of characters of a draft that are read at once."""


class HermesSplitter(TaggedSplitter):
    """The `Splitter` for `<tool_call>` around JSON; after a call comes another one, or text."""

    def __init__(self, features: AnswerFeatures, *, new_id: NewId = new_call_id) -> None:
        super().__init__(features, Markers(call_opens=(hermes.CALL_OPEN,)))
        self._new_id = new_id
        self._json = hermes.JsonStart()
        """Follows the body of the open call."""

    def _open_call(self, state: State, split: Split) -> None:
        super()._open_call(state, split)
        self._json = hermes.JsonStart()

    def _read_call(self) -> Iterator[Part]:
        close = hermes.CALL_CLOSE
        while True:
            end = self._held.find(close)
            if end < 0:
                self._keep(tail_start(self._held, [close]))
                return
            self._keep(end)
            if not self._json.inside_text:
                break
            # The marker stands within an argument.
            self._keep(len(close))
        gap, opening, *body = self._kept
        written, rest = "".join(body), self._held.removeprefix(close)
        call = hermes.read_call(written)
        self._kept = []
        if call is None:
            self._state, self._held, self._after_markup = "text", rest, False
            yield TextPart(f"{gap}{opening}{written}{close}")
        else:
            self._enter("text", rest)
            yield ToolCall(id=self._new_id(), name=call.name, arguments=call.arguments)

    def _keep(self, end: int) -> None:
        self._json.push(self._held[:end])
        self._keep_up_to(end)

    def _read_unfinished(self, held: str) -> Sequence[Part]:
        if self._state == "call":
            return [TextPart(held)]
        inner = HermesSplitter(AnswerFeatures(tools=True), new_id=self._new_id)
        # In slices: otherwise every marker would cost a copy of all text after it.
        slices = [held[at : at + _SLICE] for at in range(0, len(held), _SLICE)]
        return [*(part for piece in slices for part in inner.push(piece)), *inner.end()]
