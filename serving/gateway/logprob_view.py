"""Log-probabilities in the form that a caller asked for: with text and alternatives."""

import math
from collections.abc import Callable, Sequence

from onlinerl.rollout_store.trainability import LOGPROB_FLOOR
from onlinerl.serving.interaction.engine import TopLogprob
from onlinerl.serving.interaction.pieces import TokenLogprob

TokenText = Callable[[int], tuple[str, bytes]]
"""The text and the bytes of a token."""


class LogprobView:
    """Makes what is shown of the log-probability of every sampled token.

    Args:
        token_text: Gives the text and the bytes of a token.
        num_top: Largest number of alternatives at every place.
    """

    def __init__(self, token_text: TokenText, *, num_top: int) -> None:
        self._token_text = token_text
        self._num_top = num_top

    def of(self, token_id: int, logprob: float, alternatives: Sequence[TopLogprob]) -> TokenLogprob:
        """One sampled token, with at most `num_top` of its alternatives."""
        top = [
            self._shown(each.token_id, each.logprob, ()) for each in alternatives[: self._num_top]
        ]
        return self._shown(token_id, logprob, top)

    def _shown(self, token_id: int, logprob: float, top: Sequence[TokenLogprob]) -> TokenLogprob:
        text, token_bytes = self._token_text(token_id)
        # JSON has neither NaN nor infinity; OpenAI sends this number for a probability near 0.
        shown = logprob if math.isfinite(logprob) else LOGPROB_FLOOR
        return TokenLogprob(text=text, token_bytes=token_bytes, logprob=shown, top=top)
