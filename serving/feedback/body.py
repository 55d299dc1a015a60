"""The body of `/v1/feedback`: a signal about an answer or a session, or a list of them."""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
)

from onlinerl.errors import RequestRefused
from onlinerl.rollout_store.schema import FeedbackSource
from onlinerl.serving.wire.parameters import refusal, wrong

MAX_BATCH = 100
"""Most feedbacks in one list."""

_MAX_INDEX = 2**63 - 1
"""Largest value of the column."""


def _in_utc(given_at: datetime) -> datetime:
    try:
        return given_at.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("this time does not exist in UTC") from error


_Id = Annotated[str, StringConstraints(pattern=r"^[\w.:-]{1,64}$")]
_Target = Annotated[str, StringConstraints(min_length=1, max_length=128)]
_Tag = Annotated[str, StringConstraints(max_length=512)]
_Time = Annotated[AwareDatetime, AfterValidator(_in_utc)]


def _requires(name: str, *, but_not: str | None = None, nor: str | None = None) -> JsonValue:
    """A schema of objects that have the field `name`, and neither `but_not` nor `nor`."""
    absent: dict[str, JsonValue] = {
        other: {"type": "null"} for other in (but_not, nor) if other is not None
    }
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}, **absent}}


class FeedbackBody(BaseModel):
    """One feedback; exactly one of `interaction_id` and `session_id` is given."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        title="Feedback",
        # The checks of the event's validators, as JSON schema.
        json_schema_extra={
            "oneOf": [
                _requires("interaction_id", but_not="session_id"),
                _requires("session_id", but_not="interaction_id", nor="choice_index"),
            ],
            "anyOf": [_requires("value"), _requires("demonstration"), _requires("retracts")],
        },
    )

    feedback_id: _Id | None = None
    """Makes a retry harmless; made by the gateway when absent."""
    interaction_id: _Target | None = None
    """The answer it is about: `x-onlinerl-interaction-id`."""
    session_id: _Target | None = None
    """The session it is about: `x-onlinerl-session-id`."""
    choice_index: int | None = Field(default=None, ge=0, le=_MAX_INDEX)
    """One choice of several; every one when absent."""
    metric: str = Field(min_length=1, max_length=128)
    """Name of the judgement, e.g. `accepted`."""
    value: float | None = Field(default=None)
    """The judgement; true is 1, false is 0."""
    source: FeedbackSource = "user"
    """Who judges."""
    comment: str | None = Field(default=None, max_length=65_536)
    """Free text."""
    demonstration: str | None = Field(default=None, max_length=1_048_576)
    """The answer that should have been given."""
    retracts: _Id | None = None
    """The id of an earlier feedback that no longer counts."""
    user: str | None = Field(default=None, max_length=512)
    """Who gives it; only a keyed hash is logged."""
    given_at: _Time | None = None
    """When it was given; now when absent."""
    tags: dict[str, _Tag] = Field(default={}, max_length=64)
    """Free labels."""


def read_feedback(body: object, *, at: str = "") -> FeedbackBody:
    """A checked feedback.

    Args:
        body: Parsed JSON.
        at: Its place in a list; empty for a single one.

    Raises:
        RequestRefused: a field is wrong; the error names it.
    """
    try:
        feedback = FeedbackBody.model_validate(body)
    except ValidationError as error:
        raise refusal(error, at=at) from error
    if feedback.choice_index is not None and feedback.interaction_id is None:
        raise wrong(
            f"{at}.choice_index" if at else "choice_index",
            "needs interaction_id: a session has no choices",
        )
    return feedback


def read_list(body: list[object]) -> list[FeedbackBody]:
    """Every feedback of a list.

    Raises:
        RequestRefused: one of them is wrong, or the list is empty or too long.
    """
    if not 1 <= len(body) <= MAX_BATCH:
        raise RequestRefused(f"a list holds 1 to {MAX_BATCH} feedbacks, not {len(body)}")
    return [read_feedback(item, at=str(number)) for number, item in enumerate(body)]
