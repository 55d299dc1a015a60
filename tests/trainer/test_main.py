"""`onlinerl train` around a cycle."""

from pathlib import Path

import pytest

from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.config import PolicyConfig
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.settings import Settings
from onlinerl.trainer import main


def test_a_registry_that_fails_in_mid_cycle_is_an_error_that_says_what_happens_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ServiceUnavailable("API request failed with 503")

    DeltaStore(str(tmp_path / "store")).create()
    monkeypatch.setattr(main, "real_parts", lambda settings, database: None)
    monkeypatch.setattr(main, "run_cycle", fail)

    with pytest.raises(ServiceUnavailable, match="503; the next cycle repeats this window"):
        main.run_train(Settings(data_dir=tmp_path, policy=PolicyConfig(name="assistant")))
