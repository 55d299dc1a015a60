import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.errors import EngineFailed, EngineProtocolError, EngineUnavailable
from onlinerl.rollout_store.schema import VersionSpan
from onlinerl.serving.engine_client.completions_api import (
    adapters,
    error_message,
    merge_chunks,
    parse_chunk,
    weight_version,
)
from onlinerl.serving.interaction.engine import Chunk, TopLogprob

# As vLLM 0.32 wrote them.
TOKEN = (
    b'{"request_id":"generate-tokens-9d96","usage":null,"output_mode":"tokens","choices":[{"index":'
    b'0,"finish_reason":null,"stop_reason":null,"token_ids":[15101],"routed_experts":null,'
    b'"sampling_mask":null,"weight_versions":null,"logprobs":{"content":[{"token_id":15101,'
    b'"logprob":-8.444,"rank":540,"top_logprobs":[{"token_id":15101,"logprob":-8.444,"rank":540},'
    b'{"token_id":45870,"logprob":-4.297,"rank":1},{"token_id":16460,"logprob":-5.425,"rank":2}]}]}'
    b"}]}"
)
LAST = (
    b'{"request_id":"generate-tokens-9d96","usage":null,"output_mode":"tokens","choices":[{"index":'
    b'0,"finish_reason":"length","stop_reason":null,"token_ids":[38179],"routed_experts":null,'
    b'"sampling_mask":null,"weight_versions":[{"version":"assistant/3","start":0,"end":12}],'
    b'"logprobs":{"content":[{"token_id":38179,"logprob":-9.556,"rank":2830,"top_logprobs":[]}]}}]}'
)
USAGE = (
    b'{"request_id":"generate-tokens-9d96","usage":{"prompt_tokens":180,"total_tokens":192,'
    b'"completion_tokens":12,"prompt_tokens_details":{"cached_tokens":128}},"output_mode":"tokens",'
    b'"choices":[]}'
)


def test_a_token_and_the_end_of_an_answer_are_read_as_vllm_writes_them() -> None:
    token, last, usage = parse_chunk(TOKEN), parse_chunk(LAST), parse_chunk(USAGE)

    assert (token.token_ids, token.logprobs, token.finish_reason) == ([15101], [-8.444], None)
    assert (last.token_ids, last.finish_reason) == ([38179], "length")
    assert last.version_spans == [VersionSpan(version="assistant/3", start=0, end=12)]
    assert (usage.token_ids, usage.num_cached_tokens) == ((), 128)


def test_alternatives_are_the_most_likely_by_rank_and_none_where_not_asked_for() -> None:
    asked, not_asked = parse_chunk(TOKEN, num_top=2), parse_chunk(TOKEN)

    assert asked.top_logprobs == [
        [TopLogprob(token_id=45870, logprob=-4.297), TopLogprob(token_id=16460, logprob=-5.425)]
    ]
    assert not_asked.top_logprobs == ()


def test_a_sampled_token_among_the_most_likely_is_told_once() -> None:
    top = [{"token_id": 7, "logprob": -0.2, "rank": 2}, {"token_id": 8, "logprob": -0.1, "rank": 1}]
    entry = {"token_id": 7, "logprob": -0.2, "rank": 2, "top_logprobs": top}
    choice = {"token_ids": [7], "logprobs": {"content": [entry]}}
    chunk = parse_chunk(json.dumps({"choices": [choice]}).encode(), num_top=2)

    assert [each.token_id for each in chunk.top_logprobs[0]] == [8, 7]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([{"token_id": 5, "logprob": -1.0}, {"token_id": 6, "logprob": -2.0}], [-1.0, -2.0]),
        ([{"token_id": 5, "logprob": -1.0}], [-1.0]),
        ([{"token_id": 5, "logprob": None}, {"token_id": 7, "logprob": -2.0}], [math.nan] * 2),
        (None, []),
    ],
    ids=["whole", "short", "null and of another token", "none"],
)
def test_logprobs_are_taken_as_they_are(content: Any, expected: list[float]) -> None:
    choice = {"token_ids": [5, 6], "logprobs": {"content": content}}
    chunk = parse_chunk(json.dumps({"choices": [choice]}).encode())

    assert str(chunk.logprobs) == str(expected)


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"choices": ["x"]}',
        b'{"choices": [{"token_ids": ["x"]}]}',
        b'{"choices": [{"token_ids": [1.5]}]}',
        b'{"choices": [{"token_ids": [1], "logprobs": {"content": [3]}}]}',
        b'{"choices": [{"finish_reason": "stop", "weight_versions": [{"version": 1}]}]}',
    ],
)
def test_what_is_no_chunk_is_an_engine_failure(data: bytes) -> None:
    with pytest.raises(EngineProtocolError, match="could not parse"):
        parse_chunk(data)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["choices", "token_ids", "logprobs", "content", "usage", "error"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_chunk_or_an_engine_failure(value: object) -> None:
    try:
        parse_chunk(json.dumps(value).encode(), num_top=2)
    except EngineFailed:
        return


def test_an_error_event_keeps_message_and_status() -> None:
    with pytest.raises(EngineUnavailable, match="boom") as caught:
        parse_chunk(b'{"error": {"message": "boom", "code": 503}}')
    assert caught.value.status == 503


@pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b"{", b'{"weight_version": null}'])
def test_an_engine_that_tells_no_version_has_failed(body: bytes) -> None:
    with pytest.raises(EngineProtocolError, match="weight version"):
        weight_version(body)


def test_adapters_are_the_models_beside_the_base() -> None:
    body = b'{"data": [{"id": "assistant"}, {"id": "assistant@12", "parent": "assistant"}]}'

    assert adapters(body, base="assistant") == {"assistant@12"}
    with pytest.raises(EngineProtocolError, match="no models"):
        adapters(b'{"data": null}', base="assistant")


def test_a_refusal_without_words_is_told_by_its_status() -> None:
    assert error_message(b'{"error": {"message": "too long"}}', status=400) == "too long"
    assert error_message(b'{"detail": "not found"}', status=404) == "not found"
    assert error_message(b"<html>", status=502) == "the engine answered 502"


def test_chunks_that_came_at_once_are_one_where_every_token_has_its_own_entries() -> None:
    top = [TopLogprob(token_id=9, logprob=-3.0)]
    one = Chunk(token_ids=[1, 2], logprobs=[-1.0, -2.0], top_logprobs=[top, []])
    two = Chunk(token_ids=[3], logprobs=[-3.0], top_logprobs=[top])
    short = Chunk(token_ids=[4], logprobs=[])

    assert merge_chunks([one, two]) == [
        Chunk(token_ids=[1, 2, 3], logprobs=[-1.0, -2.0, -3.0], top_logprobs=[top, [], top])
    ]
    # Joined, the logprob of the last token would be taken for that of the one before it.
    assert merge_chunks([short, two]) == [short, two]
    assert merge_chunks([one]) == [one]
    assert merge_chunks([]) == []
