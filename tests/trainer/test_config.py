"""Configuration of the trainer."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from onlinerl.trainer.config import ScheduleConfig, TrainerConfig
from onlinerl.trainer.losses.spec import LossSpec


def test_importing_it_loads_nothing_heavy() -> None:
    script = (
        "import sys, onlinerl.trainer.config; "
        "print(sorted({'torch', 'mlflow', 'numpy', 'duckdb', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )

    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("model", [TrainerConfig, ScheduleConfig])
def test_every_field_is_documented(model: type[TrainerConfig]) -> None:
    assert all(field.description for field in model.model_fields.values())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"min_labelled_rows": 9, "max_rows": 8}, "must not exceed"),
        ({"trainable": "("}, "not a regular expression"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"filters": ["k4"]}, "filters"),
        ({"ratio_cap": 0.5}, "ratio_cap"),
        ({"lerning_rate": 1}, "lerning_rate"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        TrainerConfig.model_validate(changes)


def test_bounds_that_are_not_set_are_the_published_ones() -> None:
    ppo = LossSpec.from_config(TrainerConfig(loss="ppo"))
    mine = LossSpec.from_config(TrainerConfig(loss="icepop", ratio_low=0.25))

    assert (ppo.ratio_low, ppo.ratio_high) == (0.8, 1.2)
    assert (mine.ratio_low, mine.ratio_high) == (0.25, 5.0)


def test_the_default_is_truncated_importance_sampling_with_filters() -> None:
    spec = LossSpec.from_config(TrainerConfig())

    assert (spec.name, spec.ratio_cap, spec.filters) == ("tis", 2.0, ("k3", "veto"))
