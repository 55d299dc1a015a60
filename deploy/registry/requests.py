"""What an operator asks of the controller, and what it replies; both are JSON in tags."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError


class OperatorRequest(BaseModel):
    """A request to promote a version, or to roll back to one."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    """The reply names it."""
    version: int | None = None
    """None: the version before the champion."""
    actor: str
    """Who asks."""
    reason: str = ""


class OperatorReply(BaseModel):
    """The controller's final reply to a request."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    """Id of the request that this answers."""
    verdict: Literal["promoted", "rolled back", "refused", "failed", "waits for review"]
    reason: str


def open_request(request: str | None, reply: str | None) -> OperatorRequest | None:
    """The request that has no reply yet.

    Args:
        request: Value of the request's tag; one that cannot be parsed counts as no request.
        reply: Value of the reply's tag.
    """
    if request is None:
        return None
    try:
        parsed = OperatorRequest.model_validate_json(request)
    except ValidationError:
        return None
    last = read_reply(reply)
    return None if last is not None and last.id == parsed.id else parsed


def read_reply(reply: str | None) -> OperatorReply | None:
    """The reply in a tag; None when the tag is absent or cannot be parsed."""
    if reply is None:
        return None
    try:
        return OperatorReply.model_validate_json(reply)
    except ValidationError:
        return None
