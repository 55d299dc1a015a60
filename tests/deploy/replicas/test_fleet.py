import math
from pathlib import Path

import pytest

from onlinerl.deploy.config import DeployConfig
from onlinerl.deploy.replicas.engine_control import UNKNOWN, MemoryEngineControl, WorkerStatus
from onlinerl.deploy.replicas.fleet import Expectation, Fleet, Probe, stamp_for
from onlinerl.errors import PromotionFailed, ServiceUnavailable, WeightsError

CONFIG = DeployConfig()


def replica(name: str = "memory:0") -> MemoryEngineControl:
    made = MemoryEngineControl(name)
    made.digests = {1: "digest-1", 2: "digest-2"}
    made.scores = {1: [-1.0, -1.0], 2: [-2.0, -2.0]}
    return made


def fleet(*replicas: MemoryEngineControl) -> Fleet:
    return Fleet(
        replicas, policy="assistant", root=Path("weights"), config=CONFIG, sleep=lambda _: None
    )


def expect(version: int, *, score: float | None = None) -> Expectation:
    logprob = -float(version) if score is None else score
    return Expectation(
        version, f"digest-{version}", [Probe(token_ids=[5, 6, 7], logprobs=[logprob, logprob])]
    )


def on_version_1(*replicas: MemoryEngineControl) -> Fleet:
    ready = fleet(*replicas)
    ready.swap(expect(1), fallback=None)
    for each in replicas:
        each.calls.clear()
    return ready


def changes(of: MemoryEngineControl) -> list[str]:
    return [call for call in of.calls if call not in ("status", "stamp")]


def worker(version: int | None, **fields: object) -> WorkerStatus:
    return WorkerStatus.model_validate({"state": "idle", "version": version} | fields)


@pytest.mark.parametrize(
    ("workers", "stamp", "expected"),
    [
        pytest.param([worker(2)], "assistant/2", "assistant/2", id="right"),
        pytest.param([worker(2), worker(2)], "assistant/1", "assistant/2", id="old id"),
        pytest.param([worker(2)], "default", "assistant/2", id="no id yet"),
        pytest.param([worker(2), worker(1)], "assistant/2", UNKNOWN, id="workers disagree"),
        pytest.param([worker(2), worker(None)], "assistant/2", UNKNOWN, id="one was restarted"),
        pytest.param([worker(2, settled=False)], "assistant/1", UNKNOWN, id="not settled"),
        pytest.param([worker(2, broken="no")], "assistant/2", UNKNOWN, id="broken"),
        pytest.param([worker(2)], UNKNOWN, UNKNOWN, id="withdrawn"),
        pytest.param([worker(None)], UNKNOWN, UNKNOWN, id="withdrawn and restarted"),
        pytest.param([worker(None)], "default", "default", id="start checkpoint"),
        pytest.param([worker(None)], "assistant/3", UNKNOWN, id="labelled start checkpoint"),
        pytest.param([worker(None)], "assistant-b/3", "assistant-b/3", id="another policy's label"),
        pytest.param([], "assistant/2", UNKNOWN, id="no worker"),
    ],
)
def test_the_version_id_follows_the_weights(
    workers: list[WorkerStatus], stamp: str, expected: str
) -> None:
    assert stamp_for(workers, stamp, policy="assistant") == expected


def test_a_swap_stages_pauses_applies_resumes_and_verifies() -> None:
    engine = replica()

    report = fleet(engine).swap(expect(1), fallback=None)

    assert changes(engine) == [
        "stage", "pause", "apply", "update", "finish", "resume", "checksum", "logprobs",
    ]  # fmt: skip
    assert engine.stamp() == "assistant/1"
    assert not engine.is_paused()
    assert report.mean_abs_diff == 0.0


def test_all_replicas_stage_before_one_commits() -> None:
    one, other = replica("one"), replica("other")
    ready = on_version_1(one, other)
    other.faults["staging"] = WeightsError("corrupt file")

    with pytest.raises(PromotionFailed, match=r"nothing was changed: corrupt file"):
        ready.swap(expect(2), fallback=1)

    assert "pause" not in one.calls + other.calls
    assert one.stamp() == other.stamp() == "assistant/1"


@pytest.mark.parametrize("step", ["pause", "apply", "finish"])
def test_a_failed_commit_keeps_the_old_weights_and_the_old_id(step: str) -> None:
    engine = replica()
    ready = on_version_1(engine)
    engine.faults[step] = WeightsError("no")

    with pytest.raises(PromotionFailed, match="could not be committed"):
        ready.swap(expect(2), fallback=1)

    assert engine.stamp() == "assistant/1"
    assert engine.status()[0].version == 1
    assert not engine.is_paused()


def test_one_replica_that_fails_does_not_hold_up_the_others() -> None:
    good, bad = replica("good"), replica("bad")
    ready = on_version_1(good, bad)
    bad.faults["apply"] = WeightsError("no")

    ready.swap(expect(2), fallback=1)

    assert (good.stamp(), bad.stamp()) == ("assistant/2", "assistant/1")
    assert [each.name for each in ready.not_on(2)] == ["bad"]
    del bad.faults["apply"]
    ready.swap(expect(2), fallback=1)
    assert bad.stamp() == "assistant/2"


def test_wrong_logprobs_take_the_version_back() -> None:
    engine = replica()
    ready = on_version_1(engine)

    with pytest.raises(PromotionFailed, match="differ by"):
        ready.swap(expect(2, score=-2.1), fallback=1)

    assert engine.stamp() == "assistant/1"
    assert engine.status()[0].version == 1


def test_one_wrong_replica_is_not_hidden_by_many_right_ones() -> None:
    engines = [replica(f"memory:{number}") for number in range(8)]
    ready = on_version_1(*engines)
    # Above the bound of 0.01 nats by itself, below it on average over all eight.
    engines[5].scores[2] = [-2.07, -2.07]

    with pytest.raises(PromotionFailed, match=r"memory:5 differ by 0\.07"):
        ready.swap(expect(2), fallback=1)
    assert {each.stamp() for each in engines} == {"assistant/1"}


def test_the_report_names_the_worst_replica() -> None:
    engines = [replica(f"memory:{number}") for number in range(2)]
    ready = on_version_1(*engines)
    engines[1].scores[2] = [-2.002, -2.006]

    report = ready.swap(expect(2), fallback=1)

    assert report.mean_abs_diff == pytest.approx(0.004)
    assert report.max_abs_diff == pytest.approx(0.006)


def test_logprobs_that_are_not_numbers_take_the_version_back() -> None:
    engine = replica()
    ready = on_version_1(engine)
    engine.scores[2] = [math.nan, -2.0]

    with pytest.raises(PromotionFailed):
        ready.swap(expect(2), fallback=1)
    assert engine.stamp() == "assistant/1"


def test_a_wrong_checksum_takes_the_version_back() -> None:
    engine = replica()
    ready = on_version_1(engine)
    engine.digests[2] = "another"

    with pytest.raises(PromotionFailed, match="checksum another"):
        ready.swap(expect(2), fallback=1)
    assert engine.stamp() == "assistant/1"


def test_an_engine_without_a_fallback_is_withdrawn() -> None:
    engine = replica()
    ready = on_version_1(engine)
    engine.digests[2] = "another"

    with pytest.raises(PromotionFailed):
        ready.swap(expect(2), fallback=None)
    assert engine.stamp() == UNKNOWN
    assert ready.not_on(2) == [engine]  # polled again, and settled on version 2
    assert engine.stamp() == UNKNOWN


def test_a_withdrawn_engine_serves_again_only_after_its_verification() -> None:
    engine = replica()
    ready = on_version_1(engine)
    engine.digests[2] = "another"
    with pytest.raises(PromotionFailed):
        ready.swap(expect(2), fallback=None)
    during: list[str] = []
    engine.digests = {1: "another", 2: "another"}
    engine.scores = Watched(engine, during)

    with pytest.raises(PromotionFailed):
        ready.swap(expect(1), fallback=None)
    assert engine.stamp() == UNKNOWN
    engine.digests[1] = "digest-1"
    ready.swap(expect(1), fallback=None)

    assert during == [UNKNOWN]  # while it was being verified
    assert engine.stamp() == "assistant/1"


class Watched(dict[int | None, list[float]]):
    """Right logprobs, and the stamp under which they were asked for."""

    def __init__(self, engine: MemoryEngineControl, stamps: list[str]) -> None:
        super().__init__()
        self._engine, self._stamps = engine, stamps

    def get(self, version: int | None, default: object = None) -> list[float]:
        self._stamps.append(self._engine.stamp())
        return [-1.0, -1.0]


def test_an_engine_that_held_a_refused_version_before_returns_too() -> None:
    early, late = replica("early"), replica("late")
    ready = on_version_1(early, late)
    ready.swap(expect(2), fallback=1, only=[early])  # the controller died after this
    late.digests[2] = "another"

    with pytest.raises(PromotionFailed):
        ready.swap(expect(2), fallback=1)

    assert early.stamp() == late.stamp() == "assistant/1"


def test_an_engine_that_is_away_does_not_withdraw_the_others() -> None:
    here, away = replica("here"), replica("away")
    ready = on_version_1(here, away)
    away.faults["checksum"] = ServiceUnavailable("away")
    here.digests[2] = "another"
    stage, calls = away.stage, list[int]()

    def stage_once(root: Path, version: int) -> None:
        calls.append(version)
        if len(calls) > 1:
            raise ServiceUnavailable("away")
        stage(root, version)

    away.stage = stage_once  # type: ignore[method-assign]
    with pytest.raises(PromotionFailed):
        ready.swap(expect(2), fallback=1)

    assert (here.stamp(), away.stamp()) == ("assistant/1", UNKNOWN)


def test_an_engine_on_the_version_is_verified_without_a_pause() -> None:
    engine = replica()
    ready = on_version_1(engine)

    ready.swap(expect(1), fallback=None)

    assert changes(engine) == ["checksum", "logprobs"]


def test_an_engine_left_paused_by_a_dead_controller_resumes_under_the_id_of_its_weights() -> None:
    engine = replica()
    ready = on_version_1(engine)
    engine.stage(Path("weights"), 2)
    engine.pause()
    engine.faults["finish"] = WeightsError("the controller died here")
    with pytest.raises(WeightsError):
        engine.apply(2, "assistant/2")
    del engine.faults["finish"]

    assert ready.not_on(1) == []
    assert engine.stamp() == "assistant/1"
    assert engine.status()[0].version == 1
    assert not engine.is_paused()


def test_new_weights_under_an_old_id_get_their_own_id() -> None:
    engine = replica()
    ready = on_version_1(engine)
    engine.set_stamp("assistant/7")

    ready.reachable()

    assert engine.stamp() == "assistant/1"


def test_a_restarted_engine_is_seeded_again() -> None:
    engine = replica()
    ready = on_version_1(engine)
    engine.restart()

    assert ready.not_on(1) == [engine]
    ready.swap(expect(1), fallback=None)
    assert engine.stamp() == "assistant/1"


def test_a_version_id_on_the_start_checkpoint_is_not_trusted() -> None:
    engine = replica()
    engine.set_stamp("assistant/3")

    fleet(engine).reachable()

    assert engine.stamp() == UNKNOWN


def test_an_engine_that_does_not_answer_is_left_alone() -> None:
    here, away = replica("here"), replica("away")
    away.faults["status"] = ServiceUnavailable("away")

    fleet(here, away).swap(expect(1), fallback=None)

    assert here.stamp() == "assistant/1"
    assert "stage" not in away.calls


def test_a_swap_without_any_engine_raises_service_unavailable() -> None:
    away = replica()
    away.faults["status"] = ServiceUnavailable("away")

    with pytest.raises(ServiceUnavailable, match="no engine answers"):
        fleet(away).swap(expect(1), fallback=None)
