import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from onlinerl.deploy.config import DeployConfig, DriftGateConfig, GatesConfig, PerplexityGateConfig
from onlinerl.deploy.gates.examiner import Examiner, GateJob
from onlinerl.deploy.gates.spec import AnswerScore, GateSpec, HeldOutAnswer, Measurements
from onlinerl.deploy.promotion.controller import Controller, HeldLease
from onlinerl.deploy.promotion.decisions import Decisions
from onlinerl.deploy.promotion.journal import MemoryJournal
from onlinerl.deploy.promotion.publisher import Publisher
from onlinerl.deploy.registry.requests import OperatorRequest
from onlinerl.deploy.replicas.engine_control import MemoryEngineControl, WorkerStatus
from onlinerl.deploy.replicas.fleet import Fleet, Probe
from onlinerl.deploy.weights.delta import HostTensor, read_checkpoint, read_manifest
from onlinerl.errors import LeaseHeld, PromotionFailed, ServiceUnavailable, WeightsError
from onlinerl.registry.checkpoint_cache import CheckpointCache
from onlinerl.registry.memory_registry import MemoryRegistry
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease
from tests.deploy.builders import equal, nudged, weights, write_checkpoint


class Killed(BaseException):
    """The controller's process dies here."""


@dataclass
class Job:
    """A gate job with given measurements that ends at the second poll, as a real one takes time."""

    out_file: Path
    found: Measurements
    polls: int = 0

    def poll(self) -> bool:
        self.polls += 1
        if self.polls < 2:
            return False
        self.out_file.write_text(self.found.model_dump_json())
        return True

    def cancel(self) -> None:
        self.polls = -1


def measured(*, k3: float | None = 0.01, perplexity: float = 10.0) -> Measurements:
    return Measurements(
        num_nonfinite=0,
        k3=k3,
        num_tokens=0 if k3 is None else 1000,
        answers=[AnswerScore(behaviour=-1, champion=-1, candidate=-1, reward=1.0)] * 2,
        perplexity=perplexity,
        base_perplexity=None,
        probes=[Probe(token_ids=[1, 2], logprobs=[0.0])],
    )


@dataclass
class MemoryLease:
    """Held until its number of further questions is used up."""

    checks_left: int = 1_000_000
    confirmations_left: int = 1_000_000

    def check(self) -> None:
        self.checks_left -= 1
        if self.checks_left < 0:
            raise LeaseHeld("lost the lease: it was not renewed")

    def confirm(self) -> None:
        self.confirmations_left -= 1
        if self.confirmations_left < 0:
            raise LeaseHeld("lost the lease: it was taken by somebody else")


@dataclass
class World:
    """A controller and everything around it, in memory and in one folder."""

    folder: Path
    config: DeployConfig = field(default_factory=DeployConfig)
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    engine: MemoryEngineControl = field(default_factory=MemoryEngineControl)
    found: dict[int, Measurements] = field(default_factory=dict)
    specs: list[GateSpec] = field(default_factory=list)
    tensors: dict[int, dict[str, HostTensor]] = field(default_factory=dict)
    lease: HeldLease = field(default_factory=MemoryLease)
    controller: Controller = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A new controller process over the same world."""
        checkpoints = CheckpointCache(self.folder / "checkpoints", self.registry)
        publisher = Publisher(
            self.folder / "weights",
            policy="assistant",
            checkpoints=checkpoints,
            anchor_every=self.config.anchor_every,
        )
        self.controller = Controller(
            self.registry,
            fleet=Fleet(
                [self.engine],
                policy="assistant",
                root=publisher.root,
                config=self.config,
                sleep=lambda _: None,
            ),
            examiner=Examiner(
                self.folder / "gates",
                checkpoints=checkpoints,
                answers=list[HeldOutAnswer],
                config=self.config,
                start=self.start_job,
            ),
            publisher=publisher,
            decisions=Decisions(
                self.registry,
                self.journal,
                policy="assistant",
                now=lambda: datetime(2026, 11, 30, tzinfo=UTC),
            ),
            config=self.config,
            register_base=lambda: self.add(candidate=False),
            lease=self.lease,
        )

    def start_job(self, spec_file: Path, out_file: Path) -> GateJob:
        spec = GateSpec.model_validate_json(spec_file.read_bytes())
        self.specs.append(spec)
        version = int(spec.candidate.name[1:7])
        return Job(out_file, self.found.get(version, measured()))

    def add(self, *, candidate: bool = True, found: Measurements | None = None) -> int:
        """Register a version as the trainer does."""
        number = len(self.registry.folders) + 1
        tensors = nudged(weights(), seed=number)
        folder = write_checkpoint(self.folder / "artifacts" / f"{number}", tensors)
        assert self.registry.add(folder, candidate=candidate) == number
        self.tensors[number] = tensors
        self.found[number] = found or measured()
        return number

    def tick(self, times: int = 4) -> None:
        for _ in range(times):
            try:
                self.controller.tick()
            except (PromotionFailed, ServiceUnavailable):
                continue

    def actions(self) -> list[tuple[str, int]]:
        return [(row.action, row.version) for row in self.journal.promotions.values()]


class Digests(dict[int | None, str]):
    """The true digest of every published version, as an honest engine computes it."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def get(self, version: int | None, default: object = None) -> str:
        assert version is not None
        return read_manifest(self._root, version).digest()


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.engine.digests = Digests(tmp_path / "weights")
    return made


@pytest.fixture
def serving(world: World) -> World:
    """Version 1 serves."""
    world.tick()
    assert world.registry.aliases["champion"] == 1
    return world


def test_the_base_model_becomes_version_1_and_serves(world: World) -> None:
    world.tick()

    assert world.registry.aliases == {"champion": 1}
    assert world.registry.tags[1]["verdict"] == "promoted"
    assert world.engine.stamp() == "assistant/1"
    assert read_manifest(world.folder / "weights", 1).kind == "anchor"
    assert world.actions() == [("bootstrap", 1)]
    assert world.controller.status is None


def test_a_candidate_that_passes_is_published_as_a_delta_and_serves(serving: World) -> None:
    serving.add()
    serving.tick()

    manifest = read_manifest(serving.folder / "weights", 2)
    row = list(serving.journal.promotions.values())[-1]
    assert (manifest.kind, manifest.parent_version) == ("delta", 1)
    assert serving.engine.stamp() == "assistant/2"
    assert serving.registry.aliases["champion"] == 2
    assert serving.registry.tags[2]["verdict"] == "promoted"
    assert serving.registry.tags[2]["promoted_from"] == "1"
    assert serving.registry.tags[2]["gate.drift"] == "passed"
    assert "| drift | passed |" in serving.registry.descriptions[2]
    assert (row.action, row.from_version, row.delta_bytes) == ("promote", 1, manifest.num_bytes)
    assert serving.registry.metrics[2]["deploy.delta_bytes"] == manifest.num_bytes


def test_a_candidate_that_fails_a_gate_never_serves(serving: World) -> None:
    serving.add(found=measured(perplexity=12.5))
    serving.tick()

    assert serving.registry.tags[2]["verdict"] == "refused"
    assert serving.registry.tags[2]["review"] == "not needed"
    assert serving.registry.tags[2]["gate.perplexity"] == "failed"
    assert serving.registry.aliases["champion"] == 1
    assert not (serving.folder / "weights" / "v000002").exists()
    assert serving.engine.stamp() == "assistant/1"
    assert serving.actions()[-1] == ("refuse", 2)


def test_with_review_required_a_person_decides(tmp_path: Path) -> None:
    world = World(tmp_path, config=DeployConfig(review="required"))
    world.engine.digests = Digests(tmp_path / "weights")
    world.tick()
    world.add()
    world.tick()
    assert world.registry.aliases["champion"] == 1
    assert "verdict" not in world.registry.tags[2]

    world.registry.set_tags(2, {"review": "approved"})
    world.tick()

    assert world.registry.aliases["champion"] == 2


def test_a_version_rejected_in_review_is_refused(serving: World) -> None:
    serving.add()
    serving.registry.set_tags(2, {"review": "rejected"})
    serving.tick()

    assert serving.registry.tags[2]["verdict"] == "refused"
    assert serving.registry.aliases["champion"] == 1


def test_a_version_whose_swap_keeps_failing_is_given_up_and_the_old_one_serves(
    serving: World,
) -> None:
    serving.add()
    serving.engine.faults["apply"] = WeightsError("no")
    serving.tick(8)

    assert serving.registry.tags[2]["verdict"] == "failed"
    assert serving.registry.aliases["champion"] == 1
    assert serving.engine.stamp() == "assistant/1"
    assert serving.actions()[-1] == ("fail", 2)


def test_a_damaged_checkpoint_never_serves(serving: World) -> None:
    number = serving.add()
    file = serving.registry.folders[number] / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # one bit of one weight
    serving.tick(8)

    assert serving.registry.tags[2]["verdict"] == "failed"
    assert serving.engine.stamp() == "assistant/1"


def test_a_restarted_engine_gets_the_champion_while_a_candidate_is_measured(
    serving: World,
) -> None:
    serving.add()
    serving.controller.tick()  # the job starts
    serving.engine.restart()

    serving.controller.tick()

    assert serving.engine.stamp() == "assistant/1"


@pytest.mark.parametrize(
    "target", [None, 1], ids=["to the version before", "to a version by number"]
)
def test_rollback_serves_an_earlier_version_and_forward_works_again(
    serving: World, target: int | None
) -> None:
    serving.add()
    serving.tick()
    ask_rollback(serving, target)
    serving.tick(1)

    answer = json.loads(serving.registry.of_model["rollback.result"])
    assert answer["verdict"] == "rolled back"
    assert serving.registry.aliases["champion"] == 1
    assert serving.engine.stamp() == "assistant/1"
    assert serving.actions()[-1] == ("rollback", 1)
    assert len(serving.journal.audits) == 1

    ask_promote(serving, 2)
    serving.tick()
    assert serving.registry.aliases["champion"] == 2
    assert serving.engine.stamp() == "assistant/2"


def test_rollback_to_a_version_that_never_served_is_refused(serving: World) -> None:
    serving.add()
    serving.engine.faults["apply"] = WeightsError("no")
    serving.tick(8)  # published, but given up
    serving.engine.faults.clear()
    ask_rollback(serving, 2)
    serving.tick(1)

    answer = json.loads(serving.registry.of_model["rollback.result"])
    assert answer["verdict"] == "failed"
    assert "never served" in answer["reason"]
    assert serving.registry.aliases["champion"] == 1
    assert serving.engine.stamp() == "assistant/1"


def test_a_promote_request_is_measured_and_answered(serving: World) -> None:
    serving.add(found=measured(k3=5.0))
    serving.tick()
    ask_promote(serving, 2)
    serving.tick()

    answer = json.loads(serving.registry.tags[2]["promote.result"])
    assert answer["verdict"] == "refused"
    assert "drift" in answer["reason"]
    assert serving.engine.stamp() == "assistant/1"


def test_anchors_come_back_at_the_configured_distance(tmp_path: Path) -> None:
    world = World(tmp_path, config=DeployConfig(anchor_every=2))
    world.engine.digests = Digests(tmp_path / "weights")
    world.tick()
    for _ in range(4):
        world.add()
        world.tick()

    kinds = [read_manifest(tmp_path / "weights", version).kind for version in range(1, 6)]
    assert kinds == ["anchor", "delta", "delta", "anchor", "delta"]


def test_a_candidate_whose_logprobs_are_not_numbers_is_refused(serving: World) -> None:
    nothing = measured(k3=math.nan, perplexity=math.nan).model_copy(
        update={
            "num_nonfinite": 3,
            "probes": [Probe(token_ids=[1, 2, 3], logprobs=[math.nan, -math.inf])],
        }
    )
    serving.add(found=nothing)
    serving.tick()

    assert serving.registry.tags[2]["verdict"] == "refused"
    assert serving.registry.tags[2]["gate.finite"] == "failed"
    assert serving.engine.stamp() == "assistant/1"
    kept = next((serving.folder / "gates").glob("v000002-*.probes"))
    assert kept.read_bytes() == b'[{"token_ids":[1,2,3],"logprobs":[NaN,-Infinity]}]'


def test_measurements_that_cannot_be_read_are_made_again(serving: World) -> None:
    serving.add()
    serving.tick(1)
    spec = next((serving.folder / "gates").glob("v000002-*.spec"))
    spec.with_suffix(".json").write_text("{")
    serving.tick(1)
    assert not spec.with_suffix(".json").exists()
    serving.tick()

    assert serving.registry.tags[2]["verdict"] == "promoted"


def test_a_champion_that_cannot_be_seeded_does_not_block_a_rollback(serving: World) -> None:
    serving.add()
    serving.tick()
    serving.engine.restart()
    serving.engine.scores[2] = [-9.0]  # this engine computes version 2 wrongly
    serving.tick()
    assert serving.engine.stamp() == "unknown"
    assert "could not be seeded" in str(serving.controller.status)
    ask_rollback(serving, 1)
    serving.tick(1)

    assert json.loads(serving.registry.of_model["rollback.result"])["verdict"] == "rolled back"
    assert serving.engine.stamp() == "assistant/1"
    assert serving.controller.status is None


def test_a_replica_that_cannot_be_seeded_does_not_hold_up_candidates(serving: World) -> None:
    bad = MemoryEngineControl("memory:1")
    bad.faults["staging"] = WeightsError("its disk is full")
    serving.controller._fleet.replicas = [serving.engine, bad]
    serving.add(found=measured(perplexity=99.0))
    serving.tick()

    assert serving.registry.tags[2]["verdict"] == "refused"
    assert "memory:1 could not be seeded" in str(serving.controller.status)


def test_another_reference_text_is_measured_anew(tmp_path: Path) -> None:
    world = World(tmp_path, config=DeployConfig(review="required"))
    world.engine.digests = Digests(tmp_path / "weights")
    world.tick()
    world.add()
    world.tick()  # measured, and waits for a person
    assert (len(world.specs), world.specs[-1].base) == (2, None)
    gates = GatesConfig(perplexity=PerplexityGateConfig(max_tokens=64))
    world.config = DeployConfig(gates=gates)
    world.found[2] = world.found[2].model_copy(update={"base_perplexity": 10.0})
    world.restart()
    world.tick()

    assert world.specs[-1].base is not None
    assert world.registry.tags[2]["verdict"] == "promoted"


def test_a_checkpoint_that_is_gone_ends_in_a_verdict(serving: World) -> None:
    serving.add()
    shutil.rmtree(serving.registry.folders[2])
    serving.tick(8)

    assert serving.registry.tags[2]["verdict"] == "failed"


def test_a_newer_candidate_supersedes_those_that_wait(tmp_path: Path) -> None:
    world = World(tmp_path, config=DeployConfig(review="required"))
    world.engine.digests = Digests(tmp_path / "weights")
    world.tick()
    world.add()
    world.tick()
    world.add()
    world.tick()

    assert world.registry.tags[2]["verdict"] == "refused"
    assert world.actions()[-1] == ("refuse", 2)
    reasons = [row.reason for row in world.journal.promotions.values()]
    assert reasons[-1] == "superseded by version 3"
    assert "verdict" not in world.registry.tags[3]


def test_an_approved_version_comes_before_a_newer_candidate(serving: World) -> None:
    serving.add()
    serving.registry.set_tags(2, {"review": "approved"})
    serving.add()
    serving.tick(8)

    assert serving.actions()[1:] == [("promote", 2), ("promote", 3)]
    assert [spec.champion and spec.champion.name[:7] for spec in serving.specs] == [
        None, "v000001", "v000002",
    ]  # fmt: skip


@pytest.mark.parametrize("by", ["approval", "request"])
def test_a_candidate_without_evidence_on_drift_waits_for_a_person(serving: World, by: str) -> None:
    serving.add(found=measured(k3=None))
    serving.tick(6)

    assert serving.registry.aliases["champion"] == 1
    assert "verdict" not in serving.registry.tags[2]
    assert serving.registry.tags[2]["review"] == "pending"
    assert "Waits for a person" in serving.registry.descriptions[2]
    assert "0 held-out tokens" in serving.registry.descriptions[2]

    if by == "approval":
        serving.registry.set_tags(2, {"review": "approved"})
    else:
        ask_promote(serving, 2)
    serving.tick()
    assert serving.registry.aliases["champion"] == 2


def test_a_disabled_drift_gate_needs_no_approval(tmp_path: Path) -> None:
    gates = GatesConfig(drift=DriftGateConfig(enabled=False))
    world = World(tmp_path, config=DeployConfig(gates=gates))
    world.engine.digests = Digests(tmp_path / "weights")
    world.tick()
    world.add(found=measured(k3=None))
    world.tick()

    assert world.registry.aliases["champion"] == 2
    assert world.registry.tags[2]["review"] == "not needed"


def test_a_candidate_of_a_version_that_was_rolled_back_is_refused(serving: World) -> None:
    serving.add()
    serving.tick()
    ask_rollback(serving, 1)
    serving.tick(1)
    serving.add()
    serving.registry.set_tags(3, {"parent_version": "2"})
    serving.tick()

    assert serving.registry.tags[3]["verdict"] == "refused"
    reasons = [row.reason for row in serving.journal.promotions.values()]
    assert reasons[-1] == "its parent was rolled back: version 2"


def test_a_rollback_holds_when_the_promotion_before_it_was_never_answered(
    serving: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.add()
    ask_promote(serving, 2)
    serving.tick(1)
    monkeypatch.setattr(serving.journal, "audit", killing(serving.journal.audit, after=False))
    with pytest.raises(Killed):
        tick_on(serving.controller)
    monkeypatch.undo()
    assert serving.registry.aliases["champion"] == 2
    ask_rollback(serving, 1)
    serving.restart()
    serving.tick()

    assert serving.registry.aliases["champion"] == 1
    assert serving.engine.stamp() == "assistant/1"
    assert json.loads(serving.registry.tags[2]["promote.result"])["verdict"] == "promoted"
    assert serving.actions() == [("bootstrap", 1), ("promote", 2), ("rollback", 1)]


def test_a_promote_request_beside_a_rollback_request_is_met_after_it(serving: World) -> None:
    serving.add()
    serving.tick()
    ask_rollback(serving, 1)
    ask_promote(serving, 2)
    serving.tick()

    assert serving.actions()[-2:] == [("rollback", 1), ("promote", 2)]
    assert serving.registry.aliases["champion"] == 2
    assert json.loads(serving.registry.tags[2]["promote.result"])["verdict"] == "promoted"


def test_a_rollback_writes_weights_that_were_moved_away(serving: World) -> None:
    serving.add()
    serving.tick()
    shutil.rmtree(serving.folder / "weights")
    ask_rollback(serving, 1)
    serving.tick(2)

    assert serving.registry.aliases["champion"] == 1
    assert serving.engine.stamp() == "assistant/1"


def test_a_version_that_serves_again_is_no_longer_marked_as_rolled_back(serving: World) -> None:
    serving.add()
    serving.tick()
    ask_rollback(serving, 1)
    serving.tick(1)
    ask_promote(serving, 2)
    serving.tick()
    serving.add()
    serving.registry.set_tags(3, {"parent_version": "2"})
    serving.tick()

    assert serving.registry.tags[3]["verdict"] == "promoted"


def test_another_registry_reuses_neither_checkpoints_nor_measurements(serving: World) -> None:
    serving.add(found=measured(perplexity=99.0))
    serving.tick()
    assert serving.registry.tags[2]["verdict"] == "refused"
    other = nudged(weights(), seed=77)
    serving.registry.folders[2] = write_checkpoint(serving.folder / "elsewhere" / "2", other)
    serving.registry.tags[2] = {"review": "pending"}
    serving.found[2] = measured()
    serving.tick()

    assert serving.registry.tags[2]["verdict"] == "promoted"
    assert len(serving.specs) == 3
    assert equal(dict(read_checkpoint(serving.specs[-1].candidate)), other)


def test_weights_that_another_registry_published_never_serve_under_its_number(
    serving: World,
) -> None:
    serving.add()
    serving.tick()
    other = nudged(weights(), seed=77)
    serving.registry.folders[2] = write_checkpoint(serving.folder / "elsewhere" / "2", other)
    serving.registry.tags[2] = {}
    serving.registry.set_alias("champion", 1)
    serving.tick(12)

    assert serving.registry.aliases["champion"] == 1
    assert serving.engine.stamp() == "assistant/1"
    assert serving.registry.tags[2]["verdict"] == "failed"
    reasons = [row.reason for row in serving.journal.promotions.values()]
    assert "comes from another registry: move" in reasons[-1]


class NeverEnds:
    def poll(self) -> bool:
        return False

    def cancel(self) -> None:
        pass


def test_answers_of_users_are_on_disk_only_until_the_gate_job_has_read_them(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    for number in (1, 2):
        folder = write_checkpoint(tmp_path / f"{number}", nudged(weights(), seed=number))
        registry.add(folder, candidate=False)
    answer = HeldOutAnswer(
        prompt_token_ids=[1], completion_token_ids=[2], logprobs=[-1.0], temperature=1.0, reward=1.0
    )
    started: list[Path] = []

    def start(spec_file: Path, _: Path) -> GateJob:
        assert spec_file.stat().st_mode & 0o077 == 0
        assert GateSpec.model_validate_json(spec_file.read_bytes()).answers == [answer]
        started.append(spec_file)
        return NeverEnds()

    def examiner() -> Examiner:
        return Examiner(
            tmp_path / "gates",
            checkpoints=CheckpointCache(tmp_path / "checkpoints", registry),
            answers=lambda: [answer],
            config=DeployConfig(),
            start=start,
        )

    cancelled = examiner()
    cancelled.examine(2, champion=1)
    cancelled.cancel()
    after_cancel = started[0].exists()
    examiner().examine(2, champion=1)  # this controller is killed before its job has read
    left_behind = started[1].exists()
    examiner().examine(1, champion=2)

    assert (after_cancel, left_behind, started[1].exists()) == (False, True, False)
    assert [file.name for file in (tmp_path / "gates").glob("*.spec")] == [started[2].name]


def test_local_checkpoints_stay_few(serving: World) -> None:
    for _ in range(5):
        serving.add()
        serving.tick()

    kept = sorted(each.name[:7] for each in (serving.folder / "checkpoints").iterdir())
    assert kept == ["v000005", "v000006"]


INSIDE_APPLY = ("update", "finish")
STEPS = (
    "stage", "pause", "apply", "update", "finish", "resume", "checksum", "logprobs", "promotion",
    "log_metrics", "arms", "set_alias", "set_tags",
)  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_controller_killed_at_any_step_comes_to_the_same_end(
    serving: World, step: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.add()
    for _ in range(2):
        serving.controller.tick()
    owner = (
        next(
            each
            for each in (serving.engine, serving.registry, serving.journal)
            if hasattr(each, step)
        )
        if step not in INSIDE_APPLY
        else None
    )
    if owner is None:
        serving.engine.faults[step] = Killed()
    else:
        monkeypatch.setattr(owner, step, killing(getattr(owner, step), after=after))
    with pytest.raises(Killed):
        tick_on(serving.controller)
    monkeypatch.undo()
    serving.engine.faults.clear()

    serving.restart()
    serving.engine.calls.clear()
    serving.tick()

    if step in ("checksum", "logprobs", "promotion", "arms", "set_alias"):  # it served already
        assert "pause" not in serving.engine.calls  # forward, not back and forth
    assert serving.registry.aliases["champion"] == 2
    assert serving.registry.tags[2]["verdict"] == "promoted"
    assert serving.engine.stamp() == "assistant/2"
    assert serving.engine.status()[0].version == 2
    assert not serving.engine.is_paused()
    assert serving.actions() == [("bootstrap", 1), ("promote", 2)]
    assert champions(serving)[-1] == 2


def champions(world: World) -> list[int]:
    """Versions recorded as the champion without canary or shadow, in order."""
    return [row.version for (row,) in world.journal.decisions if row.arm == "champion"]


def test_a_new_champion_ends_every_canary(serving: World) -> None:
    serving.add()
    serving.tick()
    ask_rollback(serving, None)
    serving.tick(1)
    ask_promote(serving, 2)
    serving.tick()

    assert champions(serving) == [1, 2, 1, 2]


def tick_on(controller: Controller) -> None:
    for _ in range(3):
        controller.tick()


def killing(call: Callable[..., object], *, after: bool) -> Callable[..., object]:
    def killed(*args: object, **kwargs: object) -> object:
        if after:
            call(*args, **kwargs)
        raise Killed

    return killed


def ask_promote(world: World, version: int) -> None:
    request = OperatorRequest(id=f"p{version}", version=version, actor="ada")
    world.registry.set_tags(version, {"promote.request": request.model_dump_json()})


def ask_rollback(world: World, version: int | None) -> None:
    request = OperatorRequest(id="r1", version=version, actor="ada", reason="worse")
    world.registry.set_model_tag("rollback.request", request.model_dump_json())


def run_passes(world: World) -> None:
    """Run passes until nothing changes any more, or the lease is lost."""
    for _ in range(6):
        world.controller.tick()


@pytest.mark.parametrize(
    ("asks", "lease", "was_swapped"),
    [
        ("promote", MemoryLease(checks_left=0), False),
        ("promote", MemoryLease(confirmations_left=0), False),
        ("promote", MemoryLease(confirmations_left=1), True),
        ("rollback", MemoryLease(checks_left=0), False),
        ("rollback", MemoryLease(checks_left=1), False),
        ("rollback", MemoryLease(confirmations_left=0), True),
    ],
)
def test_a_controller_that_lost_its_lease_decides_nothing(
    serving: World, asks: str, lease: MemoryLease, was_swapped: bool
) -> None:
    serving.add()
    if asks == "rollback":
        run_passes(serving)
        ask_rollback(serving, 1)
    champion, actions = serving.registry.aliases["champion"], serving.actions()
    stamp = serving.engine.stamp()
    serving.lease = lease
    serving.restart()

    with pytest.raises(LeaseHeld):
        run_passes(serving)

    assert serving.registry.aliases["champion"] == champion
    assert serving.actions() == actions
    assert (serving.engine.stamp() != stamp) == was_swapped


def test_a_controller_that_lost_its_lease_seeds_no_engine(serving: World) -> None:
    serving.engine.set_stamp("default")
    serving.engine._status = WorkerStatus(state="idle")
    serving.lease = MemoryLease(checks_left=1)
    serving.restart()

    with pytest.raises(LeaseHeld):
        run_passes(serving)
    assert serving.engine.stamp() == "default"


@pytest.mark.parametrize("asks", ["promote", "rollback"])
def test_of_two_controllers_on_two_machines_only_the_one_with_the_lease_decides(
    tmp_path: Path, asks: str
) -> None:
    """The first is frozen in the middle of a swap, and wakes up after the second took over."""
    store = DeltaStore(str(tmp_path / "store"))
    store.create()
    first = Lease(store, name="deploy assistant", ttl_s=300.0)
    second = Lease(store, name="deploy assistant", ttl_s=300.0, clock=lambda: time.time() + 301)
    world = World(tmp_path, lease=first.take())
    world.engine.digests = Digests(tmp_path / "weights")
    run_passes(world)
    world.add()
    if asks == "rollback":
        run_passes(world)
        ask_rollback(world, 1)
    champion, actions = world.registry.aliases["champion"], world.actions()

    class Freezing(MemoryEngineControl):
        def resume(self) -> None:
            super().resume()
            if not second.fence:
                second.take()

    world.engine.__class__ = Freezing
    with pytest.raises(LeaseHeld, match="taken by somebody else, whose fence is 2"):
        run_passes(world)
    assert world.registry.aliases["champion"] == champion
    assert world.actions() == actions

    world.lease = second
    world.restart()
    run_passes(world)
    assert world.registry.aliases["champion"] == (2 if asks == "promote" else 1)
    assert len(world.actions()) == len(actions) + 1
