import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from onlinerl.errors import EngineProtocolError, EngineRefused, EngineUnavailable
from onlinerl.rollout_store.schema import VersionSpan
from onlinerl.serving.config import LimitsConfig, SamplingDefaults
from onlinerl.serving.rendering.chat_template import ChatTemplate, load_model_text
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.world import (
    KEY,
    LOG_KEY,
    OTHER_KEY,
    USER,
    Caller,
    World,
    ask,
    body,
    make_world,
    rendered,
    speak,
)

pytestmark = pytest.mark.asyncio


@pytest.fixture
async def world(renderer: TemplateRenderer) -> World:
    return await started(make_world(renderer))


async def started(world: World) -> World:
    for replica in world.gateway.pool.replicas:
        await world.gateway.pool.look(replica)
    return world


# What is served is what is logged


async def test_logged_ids_decode_to_what_was_received(world: World) -> None:
    caller = await ask(world)

    (event,) = world.interactions
    (choice,) = event.choices
    message = caller.json["choices"][0]["message"]
    assert message["content"] == "Click the link."
    assert world.renderer.decode(choice.completion_token_ids) == "Click the link."
    assert choice.logprobs == [-0.5] * len(choice.completion_token_ids)
    assert choice.version_spans == [
        VersionSpan(version="assistant/1", start=0, end=len(choice.completion_token_ids))
    ]
    assert event.prompt_token_ids == rendered(world.renderer, USER)
    assert (event.trainable, event.untrainable_reason) == (True, None)


async def test_usage_counts_the_logged_tokens(world: World) -> None:
    usage = (await ask(world)).json["usage"]

    (event,) = world.interactions
    assert usage["prompt_tokens"] == len(event.prompt_token_ids)
    assert usage["completion_tokens"] == len(event.choices[0].completion_token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_streamed_and_whole_answers_are_the_same(world: World) -> None:
    whole = await ask(world)
    streamed = await ask(world, body(stream=True))

    assert streamed.text == whole.json["choices"][0]["message"]["content"]
    one, two = world.interactions
    assert one.choices == two.choices
    assert (one.streamed, two.streamed) == (False, True)


async def test_the_headers_name_what_is_logged(world: World) -> None:
    caller = await ask(world, body(stream=True))

    (event,) = world.interactions
    assert caller.headers["x-onlinerl-interaction-id"] == event.interaction_id
    assert caller.headers["x-onlinerl-session-id"] == event.session_id
    assert caller.headers["x-onlinerl-policy-version"] == "assistant/1"


async def test_an_answer_cut_by_max_tokens_says_length(world: World) -> None:
    caller = await ask(world, body(max_tokens=2))

    assert caller.json["choices"][0]["finish_reason"] == "length"
    (event,) = world.interactions
    assert event.choices[0].finish_reason == "length"
    assert len(event.choices[0].completion_token_ids) == 2
    assert event.sampling.max_tokens == 2


async def test_every_choice_is_served_and_logged(renderer: TemplateRenderer) -> None:
    world = await started(make_world(renderer, speak(renderer, "One"), speak(renderer, "Two!")))
    caller = await ask(world, body(n=2, seed=7))

    texts = {choice["message"]["content"] for choice in caller.json["choices"]}
    assert texts == {"One", "Two!"}
    (event,) = world.interactions
    assert [choice.choice_index for choice in event.choices] == [0, 1]
    num_sampled = sum(len(choice.completion_token_ids) for choice in event.choices)
    assert caller.json["usage"]["completion_tokens"] == num_sampled
    assert [request.sampling["seed"] for request in world.engine.requests] == [7, 8]


# Streams


async def test_usage_comes_last_and_only_when_asked_for(world: World) -> None:
    without = await ask(world, body(stream=True))
    asked = await ask(world, body(stream=True, stream_options={"include_usage": True}))

    assert all("usage" not in event for event in without.events[:-1])
    *chunks, usage, done = asked.events
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 5)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


async def test_a_stream_opens_with_the_role_and_ends_with_the_reason(world: World) -> None:
    events = (await ask(world, body(stream=True))).events

    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-2]]
    assert reasons == [None] * len(reasons)


async def test_text_arrives_while_the_engine_goes_on(world: World) -> None:
    world.engine.hold_at = 2
    caller = Caller(world.app, json_body=body(stream=True))
    await caller.until(b"Click")

    assert not caller.complete
    world.engine.release.set()
    await caller.done()
    assert caller.text == "Click the link."


async def test_multi_byte_characters_come_whole_in_a_stream(renderer: TemplateRenderer) -> None:
    world = await started(make_world(renderer, speak(renderer, "Ja 🙂 é!")))
    caller = await ask(world, body(stream=True))

    assert caller.text == "Ja 🙂 é!"
    assert b"\\ufffd" not in caller.received


# Stop strings


async def test_text_ends_before_a_stop_string_and_its_tokens_are_kept(
    renderer: TemplateRenderer,
) -> None:
    world = await started(make_world(renderer, speak(renderer, "Yes.\nUser: and then")))
    whole = await ask(world, body(stop=["\nUser:"]))
    streamed = await ask(world, body(stop="\nUser:", stream=True))

    choice = whole.json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Yes.", "stop")
    assert streamed.text == "Yes."
    for event in world.interactions:
        (logged,) = event.choices
        assert world.renderer.decode(logged.completion_token_ids) == "Yes.\nUser:"
        assert logged.finish_reason == "stop"
        assert len(logged.logprobs) == len(logged.completion_token_ids)
        assert event.trainable
    # The engine did not look for the string here: it was told to stop.
    assert len(world.engine.aborted) == 2


async def test_tokens_after_a_stop_string_in_one_chunk_are_not_kept(
    renderer: TemplateRenderer,
) -> None:
    world = await started(make_world(renderer, speak(renderer, "Yes. END more text")))
    world.engine.tokens_per_chunk = 100
    await ask(world, body(stop=["END"]))

    (event,) = world.interactions
    (choice,) = event.choices
    assert world.renderer.decode(choice.completion_token_ids) == "Yes. END"
    assert choice.version_spans[-1].end == len(choice.completion_token_ids)
    assert event.trainable


async def test_a_turn_after_a_stop_string_starts_anew_in_the_same_session(
    renderer: TemplateRenderer,
) -> None:
    world = await started(make_world(renderer, speak(renderer, "Yes. END more")))
    reply = (await ask(world, body(stop="END"))).json["choices"][0]["message"]
    messages = [*USER, reply, {"role": "user", "content": "Sure?"}]
    await ask(world, body(messages=messages))

    one, two = world.interactions
    assert (two.session_id, two.parent_id, two.prefix_length) == (one.session_id, None, 0)
    assert "END" not in world.renderer.decode(two.prompt_token_ids)


# Versions


async def test_an_answer_that_lives_through_a_swap_has_two_spans(world: World) -> None:
    world.engine.hold_at = 3
    caller = Caller(world.app, json_body=body(stream=True))
    await caller.until(b" link")
    world.engine.version = "assistant/2"
    world.engine.release.set()
    await caller.done()

    (event,) = world.interactions
    versions = [(span.version, span.start, span.end) for span in event.choices[0].version_spans]
    assert versions == [("assistant/1", 0, 3), ("assistant/2", 3, 5)]
    assert event.trainable
    assert world.gateway.pool.versions() == ["assistant/2"]


async def test_the_choice_that_ends_last_tells_what_the_engine_serves(
    renderer: TemplateRenderer,
) -> None:
    long, short = speak(renderer, "Click the link."), speak(renderer, "Click")
    world = await started(make_world(renderer, long, short))
    world.engine.hold_at = 3
    caller = Caller(world.app, json_body=body(n=2, stream=True))
    await caller.until(b" link")
    async with asyncio.timeout(60):
        while not world.engine.closed:
            await asyncio.sleep(0.001)
    world.engine.version = "assistant/2"
    world.engine.release.set()
    await caller.done()
    await world.ended()

    last = [choice.version_spans[-1].version for choice in world.interactions[0].choices]
    assert last == ["assistant/2", "assistant/1"]
    assert world.gateway.pool.versions() == ["assistant/2"]


async def test_the_prefix_cache_is_salted_by_tenant_and_version(world: World) -> None:
    await ask(world, key=KEY)
    await ask(world, key=OTHER_KEY)
    world.gateway.pool.note_version(world.gateway.pool.replicas[0], "assistant/2")
    await ask(world, key=KEY)

    salts = [request.cache_salt for request in world.engine.requests]
    # vLLM refuses salts that are long or hold one of these.
    assert all(len(salt) <= 128 and not set(salt) & set("@/\\\0") for salt in salts)
    assert len(set(salts)) == 3


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([VersionSpan(version="default", start=0, end=5)], "'default' is not a version"),
        ([VersionSpan(version="assistant/1", start=0, end=3)], "do not tile"),
        ([], "do not tile"),
    ],
)
async def test_wrong_spans_are_logged_as_untrainable(
    world: World, spans: list[VersionSpan], reason: str
) -> None:
    world.engine.spans = spans
    await ask(world)

    (event,) = world.interactions
    assert not event.trainable
    assert reason in (event.untrainable_reason or "")


# Conversations


async def test_a_second_turn_extends_the_exact_tokens_of_the_first(world: World) -> None:
    first = await ask(world)
    reply = first.json["choices"][0]["message"]
    messages = [*USER, reply, {"role": "user", "content": "Which link?"}]
    second = await ask(world, body(messages=messages))

    one, two = world.interactions
    known = [*one.prompt_token_ids, *one.choices[0].completion_token_ids]
    assert (two.parent_id, two.parent_choice) == (one.interaction_id, 0)
    assert two.prefix_length == len(known)
    assert two.session_id == one.session_id == second.headers["x-onlinerl-session-id"]
    sent = list(world.engine.requests[1].token_ids)
    assert sent == known + two.prompt_token_ids
    assert sent == rendered(world.renderer, messages)
    assert second.json["usage"]["prompt_tokens"] == len(sent)


async def test_extension_keeps_tokens_that_rendering_would_change(
    renderer: TemplateRenderer,
) -> None:
    odd = [*renderer.tokenize("Yes"), 198, 198, 2]
    world = await started(make_world(renderer, odd))
    reply = (await ask(world)).json["choices"][0]["message"]
    await ask(world, body(messages=[*USER, reply, {"role": "user", "content": "Sure?"}]))

    _, two = world.interactions
    sent = list(world.engine.requests[1].token_ids)
    assert sent[two.prefix_length - len(odd) : two.prefix_length] == odd


async def test_a_template_that_rewrites_history_keeps_the_session(smollm2_dir: Path) -> None:
    text = load_model_text(str(smollm2_dir))
    shorten = "{% for m in messages %}<|im_start|>{{ m.content[:4] }}<|im_end|>\n{% endfor %}"
    template = ChatTemplate(shorten, special_tokens={})
    world = await started(make_world(TemplateRenderer(replace(text, template=template))))
    reply = (await ask(world)).json["choices"][0]["message"]
    await ask(world, body(messages=[*USER, reply, {"role": "user", "content": "Which?"}]))

    one, two = world.interactions
    assert (two.session_id, two.parent_id, two.prefix_length) == (one.session_id, None, 0)
    assert two.prompt_token_ids == list(world.engine.requests[1].token_ids)


async def test_another_tenant_never_extends_a_conversation(world: World) -> None:
    reply = (await ask(world)).json["choices"][0]["message"]
    messages = [*USER, reply, {"role": "user", "content": "Which link?"}]
    await ask(world, body(messages=messages), key=OTHER_KEY)

    one, two = world.interactions
    assert two.parent_id is None
    assert two.session_id != one.session_id
    assert (one.tenant, two.tenant) == ("acme", "globex")


async def test_a_named_session_only_extends_itself(world: World) -> None:
    named = {"x-onlinerl-session-id": "run-1"}
    reply = (await ask(world, headers=named)).json["choices"][0]["message"]
    messages = [*USER, reply, {"role": "user", "content": "Which link?"}]
    await ask(world, body(messages=messages), headers={"x-onlinerl-session-id": "run-2"})
    await ask(world, body(messages=messages), headers=named)

    one, other, same = world.interactions
    assert (one.session_id, other.session_id, same.session_id) == ("run-1", "run-2", "run-1")
    assert (other.parent_id, same.parent_id) == (None, one.interaction_id)


async def test_a_changed_history_starts_anew(world: World) -> None:
    await ask(world)
    edited = {"role": "assistant", "content": "Click the LINK."}
    await ask(world, body(messages=[*USER, edited, {"role": "user", "content": "Which?"}]))

    assert world.interactions[1].parent_id is None
    assert world.interactions[1].prefix_length == 0


async def test_a_row_never_leans_on_one_of_narrower_consent(world: World) -> None:
    reply = (await ask(world, key=LOG_KEY)).json["choices"][0]["message"]
    messages = [*USER, reply, {"role": "user", "content": "Which link?"}]
    await ask(world, body(messages=messages), key=KEY)

    one, two = world.interactions
    assert (one.consent, two.consent) == ("log", "train")
    assert (two.parent_id, two.prefix_length) == (None, 0)
    assert two.prompt_token_ids == list(world.engine.requests[1].token_ids)


async def test_a_row_never_leans_on_one_that_was_lost(world: World) -> None:
    world.sink.full = True
    reply = (await ask(world)).json["choices"][0]["message"]
    world.sink.full = False
    await ask(world, body(messages=[*USER, reply, {"role": "user", "content": "Which?"}]))

    (event,) = world.interactions
    assert (event.parent_id, event.prefix_length) == (None, 0)
    assert world.count("onlinerl_gateway_events_lost_total", reason="spool_full") == 1


# Consent, users, tags


async def test_consent_is_narrowed_and_never_widened(world: World) -> None:
    await ask(world, key=LOG_KEY, headers={"x-onlinerl-consent": "train"})
    await ask(world, key=KEY, headers={"x-onlinerl-consent": "log"})

    assert [event.consent for event in world.interactions] == ["log", "log"]


async def test_without_consent_nothing_is_logged_and_the_answer_is_counted(world: World) -> None:
    caller = await ask(world, headers={"x-onlinerl-consent": "none"})

    assert caller.status == 200
    assert world.sink.records == []
    assert world.count("onlinerl_gateway_withheld_total") == 1


async def test_users_are_logged_as_a_hash(world: World) -> None:
    await ask(world, body(user="ada@example.org", metadata={"plan": "pro"}))
    await ask(world, body(user="ada@example.org"), key=OTHER_KEY)

    one, two = world.interactions
    assert one.user
    assert "ada" not in world.sink.records[0].value.decode()
    assert one.user != two.user
    assert one.tags == {"plan": "pro"}


async def test_a_full_spool_serves_on(world: World) -> None:
    world.sink.full = True
    caller = await ask(world)

    assert caller.json["choices"][0]["message"]["content"] == "Click the link."


# What cannot be learned from


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"temperature": 0}, "greedy"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 20}, "top_k"),
    ],
)
async def test_sampling_that_has_no_ratio_is_untrainable(
    world: World, changes: dict[str, float], reason: str
) -> None:
    await ask(world, body(**changes))

    (event,) = world.interactions
    assert not event.trainable
    assert reason in (event.untrainable_reason or "")


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), -9999.0])
async def test_odd_logprobs_are_kept_and_untrainable(world: World, logprob: float) -> None:
    world.engine.logprob = logprob
    await ask(world)

    (event,) = world.interactions
    assert not event.trainable
    assert str(event.choices[0].logprobs[0]) == str(logprob)


async def test_missing_logprobs_are_not_padded(world: World) -> None:
    world.engine.with_logprobs = False
    await ask(world)

    (event,) = world.interactions
    assert event.choices[0].logprobs == []
    assert event.untrainable_reason == "choice 0: 5 tokens have 0 log-probabilities"


async def test_configured_defaults_are_used_and_logged(renderer: TemplateRenderer) -> None:
    defaults = SamplingDefaults(temperature=0.7, max_tokens=3)
    world = await started(make_world(renderer, sampling=defaults))
    await ask(world)

    (event,) = world.interactions
    assert (event.sampling.temperature, event.sampling.max_tokens) == (0.7, 3)
    assert world.engine.requests[0].sampling["temperature"] == 0.7


# Faults of an engine


async def test_an_error_before_the_first_byte_keeps_its_status(world: World) -> None:
    world.engine.failure = EngineRefused("too long", 400)
    for stream in (False, True):
        caller = await ask(world, body(stream=stream))

        assert caller.status == 400
        assert caller.json["error"]["message"] == "too long"
    assert world.interactions == []


async def test_an_error_after_the_first_byte_ends_the_stream_with_an_event(world: World) -> None:
    world.engine.hold_at = 3
    caller = Caller(world.app, json_body=body(stream=True))
    await caller.until(b" link")
    world.engine.failure = EngineProtocolError("died")
    await caller.done()

    assert caller.status == 200
    assert caller.complete
    assert caller.events[-1]["error"]["message"] == "died"
    (event,) = world.interactions
    assert event.choices[0].finish_reason == "error"
    assert len(event.choices[0].completion_token_ids) == 3
    assert not event.trainable


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_by_the_engine_is_never_a_stop(world: World, stream: bool) -> None:
    world.engine.finish = "abort"
    caller = await ask(world, body(stream=stream))

    assert b'"finish_reason":"stop"' not in caller.received
    assert b'"error"' in caller.received
    (event,) = world.interactions
    assert event.choices[0].finish_reason == "abort"
    assert not event.trainable


async def test_without_an_engine_the_answer_is_503(world: World) -> None:
    world.engine.failure = EngineUnavailable("down")
    await world.gateway.pool.look(world.gateway.pool.replicas[0])
    caller = await ask(world)

    assert caller.status == 503
    assert caller.headers["retry-after"] == "1"


# Callers that go away


async def left(world: World, caller: Caller) -> None:
    caller.leave()
    await caller.done()
    await world.ended()


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_in_the_middle_stops_the_engine_and_logs_what_was_sampled(
    world: World, stream: bool
) -> None:
    world.engine.hold_at = 3
    caller = Caller(world.app, json_body=body(stream=stream))
    async with asyncio.timeout(60):
        while not world.engine.requests:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
    await left(world, caller)

    (event,) = world.interactions
    (choice,) = event.choices
    assert choice.finish_reason == "client_disconnect"
    assert choice.completion_token_ids == world.answers[0][:3]
    assert choice.version_spans == [VersionSpan(version="assistant/1", start=0, end=3)]
    assert event.trainable
    assert world.engine.aborted == [f"{event.interaction_id}-0"]
    assert world.gateway.num_in_flight == 0


async def test_leaving_before_the_first_byte_is_logged_too(world: World) -> None:
    world.engine.hold_at = 0
    caller = Caller(world.app, json_body=body(stream=True))
    async with asyncio.timeout(60):
        while not world.engine.requests:
            await asyncio.sleep(0.001)
    await left(world, caller)

    assert caller.status is None
    (event,) = world.interactions
    assert event.choices[0].finish_reason == "client_disconnect"
    assert event.untrainable_reason == "choice 0: no token was sampled"
    assert world.engine.closed == world.engine.aborted


async def test_an_engine_that_does_not_end_an_aborted_answer_is_cut_off(world: World) -> None:
    world.engine.hold_at = 3

    async def deaf(request_id: str) -> None:
        del request_id

    world.engine.abort = deaf  # type: ignore[method-assign]
    caller = Caller(world.app, json_body=body(stream=True))
    await caller.until(b"Click")
    await left(world, caller)

    (event,) = world.interactions
    assert event.choices[0].finish_reason == "client_disconnect"
    assert len(event.choices[0].completion_token_ids) == 3
    assert "do not tile" in (event.untrainable_reason or "")
    assert len(world.engine.closed) == 1


async def test_a_slot_is_free_again_after_its_caller_left(renderer: TemplateRenderer) -> None:
    world = await started(make_world(renderer, limits=LimitsConfig(max_in_flight=1)))
    world.engine.hold_at = 2
    caller = Caller(world.app, json_body=body(stream=True))
    await caller.until(b"Click")
    refused = await ask(world)
    await left(world, caller)
    world.engine.hold_at = None
    served = await ask(world)

    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert served.status == 200


async def test_closing_waits_for_answers_and_logs_those_it_cuts_off(world: World) -> None:
    world.engine.hold_at = 2
    caller = Caller(world.app, json_body=body(stream=True))
    await caller.until(b"Click")
    await world.gateway.close()
    await caller.done()

    (event,) = world.interactions
    assert event.choices[0].finish_reason == "error"
    assert caller.events[-1]["error"]["code"] == "engine_failed"


# Refusals


@pytest.mark.parametrize(
    ("key", "status"), [(None, 401), ("", 401), ("wrong", 401), (KEY + "x", 401), (KEY, 200)]
)
async def test_only_known_keys_are_served(world: World, key: str | None, status: int) -> None:
    caller = await ask(world, key=key)

    assert caller.status == status
    assert (world.interactions == []) == (status == 401)


@pytest.mark.parametrize(
    "path",
    ["/pause", "/resume", "/update_weights", "/collective_rpc", "/inference/v1/generate",
     "/v1/load_lora_adapter", "/health", "/docs"],
)  # fmt: skip
async def test_nothing_of_the_engine_is_reachable(world: World, path: str) -> None:
    caller = await ask(world, path=path)

    assert caller.status == 404
    assert caller.json["error"]["type"] == "invalid_request_error"
    assert world.engine.requests == []


async def test_another_model_is_not_found(world: World) -> None:
    caller = await ask(world, body(model="gpt-5"))

    assert caller.status == 404
    assert caller.json["error"]["param"] == "model"
    assert caller.json["error"]["code"] == "model_not_found"


async def test_a_large_body_is_refused(renderer: TemplateRenderer) -> None:
    world = await started(make_world(renderer, limits=LimitsConfig(max_body_bytes=1024)))
    long = [{"role": "user", "content": "x" * 2000}]

    assert (await ask(world, body(messages=long))).status == 413


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"model": NaN}', b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_object_is_refused(world: World, raw: bytes) -> None:
    caller = await Caller(world.app, raw=raw).done()

    assert caller.status == 400
    assert caller.json["error"]["type"] == "invalid_request_error"


async def test_a_prompt_over_the_context_is_refused(renderer: TemplateRenderer) -> None:
    world = await started(make_world(renderer, max_model_len=48))
    fits = await ask(world)
    long = await ask(world, body(max_tokens=40))

    assert fits.status == 200
    num_prompt = len(rendered(world.renderer, USER))
    assert world.interactions[0].sampling.max_tokens == 48 - num_prompt
    assert (long.status, long.json["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_rendered(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(*_: object) -> list[int]:
        raise AssertionError("rendered")

    monkeypatch.setattr(TemplateRenderer, "render", render)
    world = await started(make_world(renderer, max_model_len=48))
    half = "x" * (24 * renderer.longest_token)
    long = [{"role": role, "content": half} for role in ("user", "assistant", "user")]
    caller = await ask(world, body(messages=long))

    assert caller.status == 400
    assert caller.json["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback"])
@pytest.mark.parametrize("raw", [rb'{"user": "\ud800"}', rb'{"\udc00": 1}'])
async def test_a_lone_surrogate_is_refused(world: World, path: str, raw: bytes) -> None:
    caller = await Caller(world.app, path=path, raw=raw).done()

    assert caller.status == 400
    assert "surrogates not allowed" in caller.json["error"]["message"]


@pytest.mark.parametrize(
    "raw", [b'{"user": "\xed\xa0\x80"}', b'{"user": "\xff"}', '{"user": "a"}'.encode("utf-16")]
)
async def test_a_body_that_is_not_utf_8_is_refused(world: World, raw: bytes) -> None:
    caller = await Caller(world.app, raw=raw).done()

    assert caller.status == 400
    assert "'utf-8' codec can't decode" in caller.json["error"]["message"]


async def test_a_body_that_is_nested_too_deeply_is_refused(world: World) -> None:
    schema: dict[str, object] = {"<|im_end|>": 1}
    for _ in range(300):
        schema = {"properties": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    caller = await ask(world, body(tools=[tool]))

    assert caller.status == 400
    assert "nested deeper than 128 levels" in caller.json["error"]["message"]


async def test_a_session_id_must_be_plain(world: World) -> None:
    caller = await ask(world, headers={"x-onlinerl-session-id": "a b"})

    assert caller.status == 400
