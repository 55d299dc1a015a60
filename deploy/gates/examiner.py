"""Measures candidates in a child process, one at a time, while the controller goes on."""

import hashlib
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter, ValidationError
from typing_extensions import override

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
from onlinerl.process.files import replace_file
from onlinerl.process.parent_death import on_parent_death
from onlinerl.registry.checkpoint_cache import CheckpointCache

logger = logging.getLogger(__name__)

_PROBES = TypeAdapter(list[Probe])


class GateJob(Protocol):
    """A running measurement of one candidate."""

    def poll(self) -> bool:
        """Whether it has written its measurements.

        Raises:
            PromotionFailed: when it failed or took too long.
        """
        ...

    def cancel(self) -> None:
        """End it now."""
        ...


class ChildJob(GateJob):
    """A process of `python -m onlinerl.deploy.gates.job`, with its output in a log file.

    Args:
        spec_file: JSON of a `GateSpec`; the process removes it once it was read.
        out_file: Receives the JSON of the `Measurements`; the log file is beside it.
        timeout_s: The process is killed after this time, seconds.
    """

    def __init__(self, spec_file: Path, out_file: Path, *, timeout_s: float) -> None:
        self._log = out_file.with_suffix(".log")
        self._deadline = time.monotonic() + timeout_s
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "onlinerl.deploy.gates.job"]
            self._child = subprocess.Popen(
                [*command, str(spec_file), str(out_file)],
                stdout=log,
                stderr=log,
                # The next controller starts its own job, and two must not write one file.
                preexec_fn=on_parent_death(signal.SIGKILL),
            )

    @override
    def poll(self) -> bool:
        code = self._child.poll()
        if code is None and time.monotonic() > self._deadline:
            self.cancel()
            raise PromotionFailed(
                f"the gate job ran longer than deploy.gates.timeout_s and was stopped;"
                f" see {self._log}"
            )
        if code:
            tail = self._log.read_text(errors="replace")[-500:]
            raise PromotionFailed(
                f"the gate job ended with exit code {code}; see {self._log}: {tail}"
            )
        return code == 0

    @override
    def cancel(self) -> None:
        self._child.kill()
        self._child.wait(timeout=10)


StartJob = Callable[[Path, Path], GateJob]
"""Starts a job, given the file with its spec and the file for its measurements."""


class Examiner:
    """Judges a candidate against a champion; measurements are stored and reused.

        examine() -> None (job started) -> None (job runs) -> results, from then on at once

    A spec contains answers that users received, so it is on disk only until its job has read it.
    The stored measurements contain only numbers, and probes made of the reference text.

    Args:
        folder: Folder for measurements.
        checkpoints: Local copies of registered versions.
        answers: Returns the held-out answers to measure on; called when a job starts.
        config: Bounds of the gates and of the probes.
        start: Starts a job; None starts a `ChildJob`.
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
        """Whether a job runs. Examining another version would cancel it."""
        return self._job is not None

    def examine(self, version: int, *, champion: int | None) -> list[GateResult] | None:
        """The results of the gates, or None while the job runs; call it again then.

        Args:
            version: The version to judge.
            champion: The version to compare it with; None for the first version.

        Raises:
            PromotionFailed: when the job failed; the next call starts a new one.
            WeightsError: when a checkpoint is damaged.
            ConfigError: when the reference text cannot be read.
        """
        out_file = self._out_file(version, champion)
        if not out_file.exists() and not self._advance_job(version, champion, out_file):
            return None
        try:
            measurements = Measurements.model_validate_json(out_file.read_bytes())
        except ValidationError as error:
            out_file.unlink()
            raise PromotionFailed(
                f"the measurements of the gate job cannot be read, it runs again: {error}"
            ) from error
        self._store_probes(version, measurements)
        return self._judge(measurements)

    def probes(self, version: int) -> list[Probe]:
        """Logprobs that the weights of a version give; empty when it was never measured."""
        file = self._probes_file(version)
        return _PROBES.validate_json(file.read_bytes()) if file.exists() else []

    def keep_only(self, versions: Iterable[int]) -> None:
        """Delete local copies of checkpoints, except those of `versions`.

        The copy of version 1 stays until its perplexity was measured.
        """
        needed = set(versions)
        try:
            if not self._base_file().exists():
                needed.add(1)
        except WeightsError as error:
            logger.warning("the perplexity of version 1 cannot be looked up: %s", error)
        self._checkpoints.keep_only(needed)

    def cancel(self) -> None:
        """End the job that runs, if any, e.g. because the controller stops."""
        if self._job is not None:
            self._job[1].cancel()
            self._job = None
        self._delete_specs()

    def _delete_specs(self) -> None:
        """Delete specs that no job has read, also those of a controller that died."""
        for pattern in ("*.spec", ".*.spec.tmp"):  # the second while one is being written
            for spec_file in self._folder.glob(pattern):
                spec_file.unlink(missing_ok=True)

    def _advance_job(self, version: int, champion: int | None, out_file: Path) -> bool:
        """Start or poll the job that writes `out_file`; whether it has written it."""
        if self._job is not None and self._job[0] != out_file:
            self.cancel()
        if self._job is None:
            self._job = (out_file, self._start_job(version, champion, out_file))
            return False
        try:
            has_ended = self._job[1].poll()
        except PromotionFailed:
            self._job = None
            raise
        if has_ended:
            self._job = None
        return has_ended

    def _start_job(self, version: int, champion: int | None, out_file: Path) -> GateJob:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._delete_specs()
        spec_file = out_file.with_suffix(".spec")
        spec = self._spec(version, champion).model_dump_json()
        replace_file(spec_file, spec, private=True)
        logger.info("gates measure", extra={"version": version, "champion": champion})
        return self._start(spec_file, out_file)

    def _start_child(self, spec_file: Path, out_file: Path) -> GateJob:
        return ChildJob(spec_file, out_file, timeout_s=self._config.gates.timeout_s)

    def _spec(self, version: int, champion: int | None) -> GateSpec:
        needs_base = champion is not None and not self._base_file().exists()
        return GateSpec(
            candidate=self._checkpoints.get(version),
            champion=None if champion is None else self._checkpoints.get(champion),
            base=self._checkpoints.get(1) if needs_base else None,
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
            raise ConfigError(
                f"deploy.gates.perplexity.reference must name a readable UTF-8 text file: {error}"
            ) from error
        return Reference(text=text, max_tokens=gate.max_tokens, window=gate.window)

    def _store_probes(self, version: int, measurements: Measurements) -> None:
        """Store the probes of the version, and the perplexity of version 1 when it is known."""
        replace_file(self._probes_file(version), _PROBES.dump_json(measurements.probes))
        base = measurements.perplexity if version == 1 else measurements.base_perplexity
        if base is not None:
            replace_file(self._base_file(), repr(base))

    def _judge(self, measurements: Measurements) -> list[GateResult]:
        gates = self._config.gates
        base = float(self._base_file().read_text())
        answers = [ScoredAnswer(**answer.model_dump()) for answer in measurements.answers]
        return [
            finite_gate(num_nonfinite=measurements.num_nonfinite),
            drift_gate(k3=measurements.k3, num_tokens=measurements.num_tokens, config=gates.drift),
            reward_gate(answers, gates.reward),
            perplexity_gate(candidate=measurements.perplexity, base=base, config=gates.perplexity),
        ]

    def _out_file(self, version: int, champion: int | None) -> Path:
        """File of the measurements, one per reference text, because perplexities depend on it."""
        names = [self._checkpoints.name(each) for each in (version, champion) if each is not None]
        return self._folder / f"{'-over-'.join(names)}-{self._reference_key()}.json"

    def _probes_file(self, version: int) -> Path:
        return self._folder / f"{self._checkpoints.name(version)}.probes"

    def _base_file(self) -> Path:
        """File of the perplexity of version 1 on the reference text."""
        return self._folder / f"{self._checkpoints.name(1)}-{self._reference_key()}.perplexity"

    def _reference_key(self) -> str:
        return hashlib.sha256(self._reference().model_dump_json().encode()).hexdigest()[:16]
