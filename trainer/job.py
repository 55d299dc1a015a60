"""The training process of the schedule: `python -m onlinerl.trainer.job SETTINGS.json`.

It is a process of its own, so that a cycle's memory is freed when it ends, and a crash of torch
does not end the schedule.
"""

import logging
import sys
from pathlib import Path

from onlinerl.errors import LeaseHeld, OnlineRLError, TooFewRows, TrainingError
from onlinerl.process import logs
from onlinerl.trainer.schedule.exit_codes import (
    EXIT_FAILED,
    EXIT_LEASE_HELD,
    EXIT_NOTHING_TO_DO,
)

logger = logging.getLogger("onlinerl.trainer.job")


def main(arguments: list[str]) -> int:
    """Run one cycle with the settings in the JSON file `arguments[0]`; returns the exit code."""
    from onlinerl.settings import Settings
    from onlinerl.trainer.main import run_train

    logs.configure("info")
    settings = Settings.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        return run_train(settings)
    except TooFewRows as error:
        logger.info("nothing to do: %s", error)
        return EXIT_NOTHING_TO_DO
    except LeaseHeld as error:
        logger.warning("%s", error)
        return EXIT_LEASE_HELD
    except TrainingError as error:
        logger.error("the cycle failed: %s", error)
        return EXIT_FAILED
    except OnlineRLError as error:
        logger.error("%s", error)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
