"""Parts of the OpenAPI document that come from no pydantic model: headers, answers, errors."""

from http import HTTPStatus
from typing import Any, Literal

Json = dict[str, Any]

_NULLABLE: Json = {"type": ["string", "null"]}
_OBJECT: Json = {"type": "object"}


def ref(name: str, *, kind: Literal["schemas", "parameters"] = "schemas") -> Json:
    """A reference to a component."""
    return {"$ref": f"#/components/{kind}/{name}"}


def json_content(description: str, schema: Json) -> Json:
    """A response that is JSON."""
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def text_content(description: str) -> Json:
    """A response that is plain text."""
    return {
        "description": description,
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }


def error(status: int, schema: str) -> Json:
    """A refusal in an envelope; with 429 and 503 comes a `retry-after`."""
    response = json_content(HTTPStatus(status).phrase, ref(schema))
    if status in (429, 503):
        response["headers"] = {
            "retry-after": {
                "description": "Seconds to wait.",
                "schema": {"type": "integer", "minimum": 1},
            }
        }
    return response


def _header(name: str, description: str, schema: Json) -> Json:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": schema,
    }


def _object(*required: str, **properties: Json) -> Json:
    return {"type": "object", "required": list(required), "properties": properties}


TERMS = [
    _header(
        "x-onlinerl-session-id",
        "Names the conversation or agent run.",
        {"type": "string", "pattern": r"^[A-Za-z0-9_.:-]{1,128}$"},
    ),
    _header(
        "x-onlinerl-consent",
        "Narrows the consent of the key for this request.",
        {"type": "string", "enum": ["none", "log", "train"]},
    ),
]
"""Headers of a request that say how it is logged."""

IDEMPOTENCY = _header(
    "Idempotency-Key",
    "The same key and the same request get the same answer, sampled once.",
    {"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[!-~]+$"},
)

QUERY = [
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]
"""How a list is paged."""

ANSWERS: Json = {
    name: {"description": description, "schema": {"type": "string"}}
    for name, description in {
        "x-onlinerl-interaction-id": "The id that feedback refers to.",
        "x-onlinerl-session-id": "The session of this answer.",
        "x-onlinerl-policy-version": "The version that sampled the first token; for a stream, "
        "the one that was last seen to serve.",
        "x-ratelimit-remaining-requests": "For a key with a rate of requests.",
        "x-ratelimit-remaining-tokens": "For a key with a rate of tokens.",
    }.items()
}
"""Headers of an answer."""

_ERROR = _object(
    "message", "type", message={"type": "string"}, type={"type": "string"}, param=_NULLABLE
)

COMPONENTS: Json = {
    "securitySchemes": {
        "bearer": {"type": "http", "scheme": "bearer"},
        "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    },
    "parameters": {
        "ResponseId": {
            "name": "response_id",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
    },
    "schemas": {
        "OpenAIError": _object("error", error=_ERROR),
        "AnthropicError": _object("type", "error", type={"const": "error"}, error=_ERROR),
        "ChatCompletion": _object(
            "id",
            "object",
            "created",
            "model",
            "choices",
            "usage",
            object={"const": "chat.completion"},
            choices={
                "type": "array",
                "items": _object("index", "message", "finish_reason", message=_OBJECT),
            },
        ),
        "Completion": _object(
            "id",
            "object",
            "created",
            "model",
            "choices",
            "usage",
            object={"const": "text_completion"},
            choices={"type": "array", "items": _object("index", "text", "finish_reason")},
        ),
        "Message": _object(
            "id",
            "type",
            "role",
            "model",
            "content",
            "stop_reason",
            "usage",
            type={"const": "message"},
            role={"const": "assistant"},
            content={"type": "array", "items": _object("type")},
        ),
        "Response": _object(
            "id",
            "object",
            "created_at",
            "status",
            "model",
            "output",
            object={"const": "response"},
            output={"type": "array", "items": _object("id", "type")},
        ),
        "Deleted": _object("id", "object", "deleted", deleted={"const": True}),
        "TokenCount": _object("input_tokens", input_tokens={"type": "integer", "minimum": 0}),
        "List": _object("object", "data", object={"const": "list"}, data={"type": "array"}),
        "FeedbackTaken": {
            "anyOf": [
                _object("object", "feedback_id", object={"const": "feedback"}),
                _object("object", "data", object={"const": "list"}, data={"type": "array"}),
            ]
        },
        "Readiness": _object("ready", "reason", ready={"type": "boolean"}, reason=_NULLABLE),
        "Versions": _object("version", "policy", "policy_versions"),
    },
}
"""Components of the document, without the schemas of bodies."""
