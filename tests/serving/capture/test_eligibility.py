import math
from itertools import pairwise
from typing import Any

import pytest

from onlinerl.rollout_store.schema import Completion, Sampling, VersionSpan
from onlinerl.serving.capture.eligibility import untrainable_reason
from onlinerl.serving.interaction.sampled import Sampled


def spans(*edges: int, version: str = "assistant/1") -> list[VersionSpan]:
    return [VersionSpan(version=version, start=start, end=end) for start, end in pairwise(edges)]


def completion(**changes: Any) -> Completion:
    fields: dict[str, Any] = {
        "completion_token_ids": [5, 6, 2],
        "logprobs": [-0.1, -0.2, 0.0],
        "finish_reason": "stop",
        "version_spans": spans(0, 3),
    }
    return Completion(**{**fields, **changes})


def reason(*choices: Completion, **sampling: Any) -> str | None:
    return untrainable_reason(choices, policy="assistant", sampling=Sampling(**sampling))


def test_a_whole_answer_is_trainable() -> None:
    assert reason(completion()) is None
    assert reason(completion(finish_reason="length"), temperature=0.7) is None
    assert reason(completion(finish_reason="client_disconnect")) is None
    assert reason(completion(version_spans=spans(0, 1, 3))) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"logprobs": [-0.1, -0.2]}, "3 tokens have 2 log-probabilities"),
        ({"logprobs": []}, "3 tokens have 0 log-probabilities"),
        ({"logprobs": [-0.1, math.nan, -0.1]}, "not finite"),
        ({"logprobs": [-0.1, -math.inf, -0.1]}, "not finite"),
        ({"logprobs": [-0.1, -9999.0, -0.1]}, "not finite"),
        ({"version_spans": []}, "do not tile"),
        ({"version_spans": spans(0, 2)}, "do not tile"),
        ({"version_spans": spans(1, 3)}, "do not tile"),
        ({"version_spans": spans(0, 4)}, "do not tile"),
        ({"version_spans": [*spans(0, 2), *spans(1, 3)]}, "do not tile"),
        ({"version_spans": spans(0, 3, version="default")}, "not a version of 'assistant'"),
        ({"version_spans": spans(0, 3, version="assistant/0")}, "not a version"),
        ({"version_spans": spans(0, 3, version="other/1")}, "not a version"),
        ({"finish_reason": "abort"}, "ended with abort"),
        ({"finish_reason": "error"}, "ended with error"),
        (
            {"completion_token_ids": [], "logprobs": [], "version_spans": []},
            "no token was sampled",
        ),
    ],
)
def test_what_misses_something_says_what(changes: dict[str, Any], expected: str) -> None:
    assert expected in (reason(completion(**changes)) or "")


def test_one_bad_choice_spoils_the_interaction_and_is_named() -> None:
    bad = completion(choice_index=1, logprobs=[])

    assert (reason(completion(), bad) or "").startswith("choice 1: ")


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"top_p": 0.99}, {"top_k": 1}])
def test_cut_distributions_are_untrainable(sampling: dict[str, float]) -> None:
    assert reason(completion(), **sampling) is not None


@pytest.mark.parametrize("name", ["frequency_penalty", "logit_bias", "presence_penalty"])
def test_shaped_distributions_are_untrainable(name: str) -> None:
    assert (reason(completion(), **{name: 1}) or "").startswith(name)
    assert reason(completion(), a_newer_parameter=1) is None


def test_constrained_answers_and_those_of_a_shadow_are_untrainable() -> None:
    known: dict[str, Any] = {"policy": "assistant", "sampling": Sampling()}
    masked = untrainable_reason([completion()], constrained=True, **known)
    unseen = untrainable_reason([completion()], arm="shadow", **known)
    canary = untrainable_reason([completion()], arm="canary", **known)

    assert "structured output" in (masked or "")
    assert "shown to nobody" in (unseen or "")
    assert canary is None


def test_an_unknown_finish_reason_is_an_error() -> None:
    assert Sampled(0, finish_reason="repetition").completion().finish_reason == "error"
    assert Sampled(0).completion().finish_reason == "error"
