"""What a person asks of the controller, as a tag, and what it answers."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError


class Request(BaseModel):
    """A wish to promote or to roll back."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    """Ties the answer to the question."""
    version: int | None = None
    """None: the version before the champion."""
    actor: str
    reason: str = ""


class Answer(BaseModel):
    """The controller's last word on a request."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    verdict: Literal["promoted", "rolled back", "refused", "failed", "waits for review"]
    reason: str


def open_request(request: str | None, answer: str | None) -> Request | None:
    """The request in a tag, when there is one that has no answer yet; nonsense is none."""
    if request is None:
        return None
    try:
        asked = Request.model_validate_json(request)
    except ValidationError:
        return None
    answered = read_answer(answer)
    return None if answered is not None and answered.id == asked.id else asked


def read_answer(answer: str | None) -> Answer | None:
    """The answer in a tag."""
    if answer is None:
        return None
    try:
        return Answer.model_validate_json(answer)
    except ValidationError:
        return None
