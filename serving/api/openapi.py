"""`/openapi.json`: every route of the gateway as an OpenAPI 3.1 document.

Bodies come from the pydantic models that check them. Parts that functions check (messages, tools,
input items) are any JSON here. Of answers only the fixed fields are described.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from onlinerl import __version__
from onlinerl.serving.api.openapi_parts import (
    ANSWERS,
    COMPONENTS,
    IDEMPOTENCY,
    QUERY,
    TERMS,
    Json,
    error,
    json_content,
    ref,
    text_content,
)
from onlinerl.serving.feedback.body import MAX_BATCH, FeedbackBody
from onlinerl.serving.protocols.chat.body import ChatBody
from onlinerl.serving.protocols.completions.body import CompletionBody
from onlinerl.serving.protocols.messages.body import CountBody, MessagesBody
from onlinerl.serving.protocols.responses.body import ResponsesBody

_BODIES: Mapping[str, type[BaseModel]] = {
    "ChatRequest": ChatBody,
    "CompletionRequest": CompletionBody,
    "MessagesRequest": MessagesBody,
    "CountTokensRequest": CountBody,
    "ResponsesRequest": ResponsesBody,
    "Feedback": FeedbackBody,
}
_REFUSALS = (400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 502, 503, 504)
"""Statuses that a request for an answer may be refused with."""


def openapi_document(*, policy: str, with_responses: bool) -> Json:
    """The document of one gateway.

    Args:
        policy: The policy that it serves.
        with_responses: Whether it serves the responses protocol.
    """
    paths = {**_answers(policy), **_feedback(), **_others()}
    if with_responses:
        paths |= _responses(policy)
    return {
        "openapi": "3.1.0",
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "info": {
            "title": "onlinerl gateway",
            "version": __version__,
            "description": "Answers the protocols of OpenAI and Anthropic, logs what it samples, "
            "and takes feedback on it.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"apiKey": []}],
        "paths": paths,
        "components": {**COMPONENTS, "schemas": {**COMPONENTS["schemas"], **_schemas(policy)}},
    }


def _schemas(policy: str) -> Json:
    """The schema of every body, and of the models in it under the body's name and their own."""
    schemas: Json = {}
    for name, model in _BODIES.items():
        template = f"#/components/schemas/{name}{{model}}"
        schema = model.model_json_schema(ref_template=template)
        inner = schema.pop("$defs", {})
        schemas |= {f"{name}{key}": value for key, value in inner.items()}
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"type": "string", "enum": [policy]}
        schemas[name] = {**schema, "title": name}
    return schemas


def _answers(policy: str) -> Json:
    messages = [{"role": "user", "content": "How do I reset my password?"}]
    return {
        "/v1/chat/completions": _sampled(
            "ChatRequest",
            {"model": policy, "messages": messages, "max_tokens": 16},
            answer="ChatCompletion",
            summary="An answer to a conversation, as OpenAI's chat completions",
        ),
        "/v1/completions": _sampled(
            "CompletionRequest",
            {"model": policy, "prompt": "Once", "max_tokens": 16},
            answer="Completion",
            summary="A continuation of a text, as OpenAI's completions",
        ),
        "/v1/messages": _sampled(
            "MessagesRequest",
            {"model": policy, "messages": messages, "max_tokens": 16},
            answer="Message",
            failure="AnthropicError",
            summary="An answer to a conversation, as Anthropic's messages",
        ),
        "/v1/messages/count_tokens": {
            "post": {
                "summary": "The length of a prompt in tokens",
                "parameters": TERMS,
                "requestBody": _body("CountTokensRequest", {"model": policy, "messages": messages}),
                "responses": {
                    "200": json_content("The count.", ref("TokenCount")),
                    **_failures((400, 401, 403, 404, 408, 413, 429, 500), "AnthropicError"),
                },
            }
        },
    }


def _responses(policy: str) -> Json:
    failures = _failures((400, 401, 404, 500, 503), "OpenAIError")
    stored = {"200": json_content("The response.", ref("Response")), **failures}
    return {
        "/v1/responses": _sampled(
            "ResponsesRequest",
            {"model": policy, "input": "Hello", "max_output_tokens": 16},
            answer="Response",
            summary="An answer to input items, as OpenAI's responses",
        ),
        "/v1/responses/{response_id}": {
            "parameters": [ref("ResponseId", kind="parameters")],
            "get": {"summary": "A stored response", "responses": stored},
            "delete": {
                "summary": "Delete a stored response",
                "responses": {"200": json_content("It was deleted.", ref("Deleted")), **failures},
            },
        },
        "/v1/responses/{response_id}/input_items": {
            "parameters": [ref("ResponseId", kind="parameters"), *QUERY],
            "get": {
                "summary": "The input items of a stored response and of those that it continues",
                "responses": {"200": json_content("A page of items.", ref("List")), **failures},
            },
        },
    }


def _feedback() -> Json:
    example = {"interaction_id": "0199", "metric": "accepted", "value": True}
    many = {"type": "array", "items": ref("Feedback"), "minItems": 1, "maxItems": MAX_BATCH}
    schema = {"anyOf": [ref("Feedback"), many]}
    examples = {"one": {"value": example}, "several": {"value": [example, example]}}
    return {
        "/v1/feedback": {
            "post": {
                "summary": "A signal about an answer or a session, or a list of them",
                "parameters": TERMS[1:],
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema, "examples": examples}},
                },
                "responses": {
                    "200": json_content("It is stored.", ref("FeedbackTaken")),
                    **_failures((400, 401, 408, 409, 413, 429, 500, 503), "OpenAIError"),
                },
            }
        }
    }


def _others() -> Json:
    ready = ref("Readiness")
    return {
        "/v1/models": {
            "get": {
                "summary": "The policy that is served",
                "responses": {
                    "200": json_content("The models.", ref("List")),
                    **_failures((401,), "OpenAIError"),
                },
            }
        },
        "/health/live": _open(
            "Whether the process runs", {"200": text_content("The process runs.")}
        ),
        "/health/ready": _open(
            "Whether requests are answered",
            {
                "200": json_content("Requests are answered.", ready),
                "503": json_content("Requests are not answered; `reason` says why.", ready),
            },
        ),
        "/metrics": _open("Counters for Prometheus", {"200": text_content("The counters.")}),
        "/version": _open(
            "Versions of the program and of the policy",
            {"200": json_content("The versions.", ref("Versions"))},
        ),
        "/openapi.json": _open(
            "This document", {"200": json_content("The document.", {"type": "object"})}
        ),
    }


def _sampled(
    body: str, example: Json, *, answer: str, summary: str, failure: str = "OpenAIError"
) -> Json:
    """A route that samples an answer, whole or streamed."""
    whole = json_content("The answer; a stream of events with `stream: true`.", ref(answer))
    whole["content"]["text/event-stream"] = {}
    return {
        "post": {
            "summary": summary,
            "parameters": [*TERMS, IDEMPOTENCY],
            "requestBody": _body(body, example),
            "responses": {
                "200": {**whole, "headers": ANSWERS},
                **_failures(_REFUSALS, failure),
            },
        }
    }


def _body(name: str, example: Json) -> Json:
    return {
        "required": True,
        "content": {"application/json": {"schema": ref(name), "example": example}},
    }


def _open(summary: str, responses: Json) -> Json:
    """A route that needs no API key."""
    return {"get": {"summary": summary, "security": [], "responses": responses}}


def _failures(statuses: Sequence[int], schema: str) -> dict[str, Any]:
    return {str(status): error(status, schema) for status in statuses}
