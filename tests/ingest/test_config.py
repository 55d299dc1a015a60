import importlib.util

import pytest
from pydantic import ValidationError

from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.kafka import should_check_crcs


def test_a_batch_has_to_fit_into_the_buffer() -> None:
    with pytest.raises(ValidationError, match="max_buffered_bytes"):
        IngestConfig(max_batch_bytes=2048, max_buffered_bytes=1024)


def test_checksums_are_looked_at_when_that_is_quick_or_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    without = [should_check_crcs("auto"), should_check_crcs("always"), should_check_crcs("never")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    having = [should_check_crcs("auto"), should_check_crcs("always"), should_check_crcs("never")]

    assert without == [False, True, False]
    assert having == [True, True, False]
