"""Slows a real engine down on demand, so that what a test does falls into a running answer.

A tiny model samples a thousand tokens before a busy test process has read ten.
"""

import contextlib
import os
import time
from pathlib import Path

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

PACE_FILE = "ONLINERL_TEST_PACE"
"""Environment variable with the path of a file; while that exists, each step takes as long as the
number of seconds in it."""


class Pace(LogitsProcessor):
    """Changes no logit."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._file = Path(os.environ[PACE_FILE])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Wait while the file is there."""
        with contextlib.suppress(FileNotFoundError):
            time.sleep(float(self._file.read_text()))
        return logits

    def is_argmax_invariant(self) -> bool:
        """False, so that greedy steps wait too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keeps no state."""
