"""Measures a candidate without stopping the controller: one job in a child process at a time."""

import contextlib
import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from onlinerl.deploy.config import DeployConfig
from onlinerl.deploy.gates.reference import TEXT
from onlinerl.deploy.gates.spec import GateSpec, HeldOutAnswer, Measurements, Reference
from onlinerl.deploy.gates.verdicts import (
    GateResult,
    ScoredAnswer,
    drift_gate,
    finite_gate,
    perplexity_gate,
    reward_gate,
)
from onlinerl.deploy.replicas.fleet import Probe
from onlinerl.errors import ConfigError, PromotionFailed, WeightsError
from onlinerl.process.parent_death import on_parent_death
from onlinerl.registry.checkpoint_cache import CheckpointCache

logger = logging.getLogger(__name__)

_PROBES = TypeAdapter(list[Probe])


class GateJob(Protocol):
    """A measurement that runs."""

    def poll(self) -> bool:
        """Whether it ended well; raises PromotionFailed when it ended badly."""
        ...

    def cancel(self) -> None:
        """End it now."""
        ...


class ChildJob:
    """`python -m onlinerl.deploy.gates.job` with its output in a log file."""

    def __init__(self, spec_file: Path, out_file: Path, *, timeout_s: float) -> None:
        self._log = out_file.with_suffix(".log")
        self._deadline = time.monotonic() + timeout_s
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "onlinerl.deploy.gates.job"]
            self._child = subprocess.Popen(
                [*command, str(spec_file), str(out_file)],
                stdout=log,
                stderr=log,
                # A second controller measures anew; two at once would write one file.
                preexec_fn=on_parent_death(signal.SIGKILL),
            )

    def poll(self) -> bool:
        """As the process ends, or the time is over."""
        code = self._child.poll()
        if code is None and time.monotonic() > self._deadline:
            self.cancel()
            raise PromotionFailed(f"the gate job took too long; see {self._log}")
        if code:
            tail = self._log.read_text(errors="replace")[-500:]
            raise PromotionFailed(f"the gate job ended with {code}; see {self._log}: {tail}")
        return code == 0

    def cancel(self) -> None:
        """Kill it."""
        self._child.kill()
        self._child.wait(timeout=10)


StartJob = Callable[[Path, Path], GateJob]
"""Starts a job from the file of its spec to the file of its measurements."""


class Examiner:
    """Results by candidate and champion, kept on disk.

        examine() -> None (started) -> None (runs) -> results, from then on at once

    A spec holds what users said, so it is on disk only until its job has read it. What is kept are
    numbers, and probes of the reference text.

    Args:
        folder: Where measurements are kept.
        checkpoints: Local copies of registered versions.
        answers: The held-out answers of now; called when a job is made up.
        config: Bounds of the gates.
        start: How a job is started.
    """

    def __init__(
        self,
        folder: Path,
        *,
        checkpoints: CheckpointCache,
        answers: Callable[[], list[HeldOutAnswer]],
        config: DeployConfig,
        start: StartJob | None = None,
    ) -> None:
        self._folder = folder
        self._checkpoints = checkpoints
        self._answers = answers
        self._config = config
        self._start = start or self._start_child
        self._job: tuple[Path, GateJob] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job runs; examining another version now would end it."""
        return self._job is not None

    def examine(self, version: int, *, champion: int | None) -> list[GateResult] | None:
        """What the gates say, or None while the job runs.

        Raises:
            PromotionFailed: when the job failed; calling again starts it anew.
            WeightsError: when a checkpoint is damaged.
        """
        out_file = self._out_file(version, champion)
        if not out_file.exists() and not self._ran(version, champion, out_file):
            return None
        try:
            found = Measurements.model_validate_json(out_file.read_bytes())
        except ValidationError as error:
            out_file.unlink()
            raise PromotionFailed(f"the gate job wrote what cannot be read: {error}") from error
        self._keep(version, found)
        return self._verdicts(found)

    def probes(self, version: int) -> list[Probe]:
        """What the weights of a version were measured to say; empty when they never were."""
        file = self._probes_file(version)
        return _PROBES.validate_json(file.read_bytes()) if file.exists() else []

    def keep_only(self, versions: Iterable[int]) -> None:
        """Drop the copies of checkpoints that no coming job needs."""
        kept = set(versions)
        with contextlib.suppress(WeightsError):  # somebody deleted version 1
            kept |= set() if self._base_file().exists() else {1}
        self._checkpoints.keep_only(kept)

    def cancel(self) -> None:
        """End a job that runs, e.g. because the controller stops."""
        if self._job is not None:
            self._job[1].cancel()
            self._job = None
        self._forget_specs()

    def _forget_specs(self) -> None:
        """Of jobs that ended before they read theirs, also under a controller that died."""
        for spec_file in self._folder.glob("*.spec"):
            spec_file.unlink(missing_ok=True)

    def _ran(self, version: int, champion: int | None, out_file: Path) -> bool:
        if self._job is not None and self._job[0] != out_file:
            self.cancel()
        if self._job is None:
            self._job = (out_file, self._started(version, champion, out_file))
            return False
        try:
            ended = self._job[1].poll()
        except PromotionFailed:
            self._job = None
            raise
        if ended:
            self._job = None
        return ended

    def _started(self, version: int, champion: int | None, out_file: Path) -> GateJob:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._forget_specs()
        spec_file = out_file.with_suffix(".spec")
        _write_private(spec_file, self._spec(version, champion).model_dump_json())
        logger.info("gates measure", extra={"version": version, "champion": champion})
        return self._start(spec_file, out_file)

    def _start_child(self, spec_file: Path, out_file: Path) -> GateJob:
        return ChildJob(spec_file, out_file, timeout_s=self._config.gates.timeout_s)

    def _spec(self, version: int, champion: int | None) -> GateSpec:
        known = self._base_file().exists() or champion is None
        return GateSpec(
            candidate=self._checkpoints.get(version),
            champion=None if champion is None else self._checkpoints.get(champion),
            base=None if known else self._checkpoints.get(1),
            answers=self._answers() if champion is not None else [],
            reference=self._reference(),
            num_probes=self._config.probe.num_sequences,
            probe_tokens=self._config.probe.max_tokens,
            threads=self._config.gates.threads,
        )

    def _reference(self) -> Reference:
        gate = self._config.gates.perplexity
        try:
            text = TEXT if gate.reference is None else gate.reference.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"deploy.gates.perplexity.reference: {error}") from error
        return Reference(text=text, max_tokens=gate.max_tokens, window=gate.window)

    def _keep(self, version: int, found: Measurements) -> None:
        _write(self._probes_file(version), _PROBES.dump_json(found.probes))
        base = found.perplexity if version == 1 else found.base_perplexity
        if base is not None:
            _write(self._base_file(), repr(base).encode())

    def _verdicts(self, found: Measurements) -> list[GateResult]:
        gates = self._config.gates
        base = float(self._base_file().read_text())
        answers = [ScoredAnswer(**answer.model_dump()) for answer in found.answers]
        return [
            finite_gate(num_nonfinite=found.num_nonfinite),
            drift_gate(k3=found.k3, num_tokens=found.num_tokens, config=gates.drift),
            reward_gate(answers, gates.reward),
            perplexity_gate(candidate=found.perplexity, base=base, config=gates.perplexity),
        ]

    def _out_file(self, version: int, champion: int | None) -> Path:
        """By reference text as well: perplexities of two texts cannot be compared."""
        names = [self._checkpoints.name(each) for each in (version, champion) if each is not None]
        return self._folder / f"{'-over-'.join(names)}-{self._reference_key()}.json"

    def _probes_file(self, version: int) -> Path:
        return self._folder / f"{self._checkpoints.name(version)}.probes"

    def _base_file(self) -> Path:
        """By reference text: a new text needs a new measurement of version 1."""
        return self._folder / f"{self._checkpoints.name(1)}-{self._reference_key()}.perplexity"

    def _reference_key(self) -> str:
        return hashlib.sha256(self._reference().model_dump_json().encode()).hexdigest()[:16]


def _write_private(file: Path, text: str) -> None:
    """Readable by nobody else from its first byte on."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)


def _write(file: Path, data: bytes) -> None:
    partial = file.with_name(f"{file.name}.partial")
    partial.write_bytes(data)
    partial.rename(file)
