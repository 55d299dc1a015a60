"""OpenAI's error envelope."""

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.serving.encoding.json import Body, to_json
from onlinerl.serving.encoding.sse import event

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(error: RequestRefused | EngineFailed) -> Body:
    """An error as OpenAI's clients read it."""
    refusal = error if isinstance(error, RequestRefused) else None
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": _KINDS.get(error.status, kind),
            "param": refusal.param if refusal is not None else None,
            "code": refusal.code if refusal is not None else "engine_failed",
        }
    }


def error_event(failure: EngineFailed) -> bytes:
    """The event that ends a broken stream: OpenAI's clients raise what stands under `error`."""
    return event(to_json(error_body(failure)))
