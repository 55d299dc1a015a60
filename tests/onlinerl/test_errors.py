import pickle

import pytest

from onlinerl.errors import (
    AnswerCutOff,
    EngineAborted,
    EngineDisconnected,
    EngineFailed,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    EngineUnreachable,
    GatewayFault,
    OnlineRLError,
    RequestRefused,
)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineUnreachable("m", is_late=True), 503),
        (EngineDisconnected("m"), 503),
        (EngineTimeout("m"), 504),
        (EngineProtocolError("m"), 502),
        (EngineAborted("m"), 502),
        (EngineUnavailable("m"), 503),
        (EngineRefused("m", 429), 429),
        (AnswerCutOff("m"), 503),
        (GatewayFault("m"), 500),
    ],
)
def test_engine_failures_keep_status_and_message_when_pickled(
    error: EngineFailed, status: int
) -> None:
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert (str(copy), copy.message, copy.status) == ("m", "m", status)
    assert copy.__dict__ == error.__dict__


def test_refused_request_keeps_everything_when_pickled() -> None:
    error = RequestRefused("m", 429, "model", "code", {"retry-after": "1"})

    copy = pickle.loads(pickle.dumps(error))

    assert (str(copy), copy.__dict__) == ("m", error.__dict__)


def _subclasses(error: type[Exception]) -> list[type[Exception]]:
    return [error, *(each for below in error.__subclasses__() for each in _subclasses(below))]


def test_every_error_is_in_the_tree_of_the_module() -> None:
    from onlinerl import errors

    own = [error for error in _subclasses(OnlineRLError) if error.__module__ == errors.__name__]
    assert errors.__doc__ is not None
    assert [error.__name__ for error in own if error.__name__ not in errors.__doc__] == []
