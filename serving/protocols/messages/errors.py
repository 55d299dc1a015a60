"""Anthropic's error envelope."""

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.serving.encoding.json import Body

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_THREAD = "thread"


def error_body(error: RequestRefused | EngineFailed) -> Body:
    """An error as Anthropic's clients read it."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    param = error.param if isinstance(error, RequestRefused) else None
    # This envelope has no field for the parameter, so the message names it.
    is_named = param is None or param in error.message
    message = error.message if is_named else f"{param}: {error.message}"
    body: Body = {"type": _KINDS.get(error.status, kind), "message": message}
    if param == _THREAD:
        # Anthropic's tool runner asks for a thread first; after this error it does without one.
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": [_THREAD]}
    return {"type": "error", "error": body}
