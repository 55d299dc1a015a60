import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from onlinerl.deploy.promotion.commands import Commands, RollbackCommand, show_status
from onlinerl.deploy.registry.requests import OperatorReply, OperatorRequest, open_request
from onlinerl.deploy.replicas.engine_control import MemoryEngineControl
from onlinerl.errors import ConfigError, PromotionFailed, ServiceUnavailable
from onlinerl.registry.memory_registry import MemoryRegistry
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease


class AnsweringRegistry(MemoryRegistry):
    """Answers each request as soon as it is left."""

    verdict = "promoted"

    def set_tags(self, version: int, tags: object) -> None:
        assert isinstance(tags, dict)
        super().set_tags(version, tags)
        if asked := tags.get("promote.request"):
            self.tags[version]["promote.result"] = self.answer(asked)

    def set_model_tag(self, key: str, value: str) -> None:
        super().set_model_tag(key, value)
        if key == "rollback.request":
            self.of_model["rollback.result"] = self.answer(value)

    def answer(self, asked: str) -> str:
        request = OperatorRequest.model_validate_json(asked)
        return OperatorReply.model_validate(
            {"id": request.id, "verdict": self.verdict, "reason": f"asked by {request.actor}"}
        ).model_dump_json()


@pytest.fixture
def registry(tmp_path: Path) -> AnsweringRegistry:
    made = AnsweringRegistry()
    made.add(tmp_path, candidate=False)
    made.add(tmp_path)
    return made


def controller_lease(folder: Path) -> Lease:
    store = DeltaStore(str(folder / "store"))
    store.create()
    return Lease(store, name="deploy assistant", ttl_s=60.0, hint=folder / "controller.lease")


def commands(registry: MemoryRegistry, lease: Lease, *, timeout_s: float = 5.0) -> Commands:
    console = Console(file=io.StringIO())
    return Commands(registry, lease=lease, timeout_s=timeout_s, poll_s=0.01, console=console)


def test_promote_approves_the_candidate_and_waits(
    registry: AnsweringRegistry, tmp_path: Path
) -> None:
    with controller_lease(tmp_path):
        assert commands(registry, controller_lease(tmp_path)).promote(None, actor="ada") == 0

    assert registry.tags[2]["review"] == "approved"
    assert "promote.request" in registry.tags[2]


def test_a_refusal_is_an_error_with_its_reason(registry: AnsweringRegistry, tmp_path: Path) -> None:
    registry.verdict = "refused"
    with controller_lease(tmp_path), pytest.raises(PromotionFailed, match="refused: asked by ada"):
        commands(registry, controller_lease(tmp_path)).promote(2, actor="ada")


def test_rollback_waits_for_its_own_answer(registry: AnsweringRegistry, tmp_path: Path) -> None:
    registry.verdict = "rolled back"
    registry.of_model["rollback.result"] = OperatorReply(
        id="old", verdict="failed", reason="of another request"
    ).model_dump_json()
    with controller_lease(tmp_path):
        command = RollbackCommand(1, actor="ada", reason="worse")
        assert commands(registry, controller_lease(tmp_path)).roll_back(command) == 0


def test_without_a_controller_nothing_is_asked(registry: AnsweringRegistry, tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailable, match="onlinerl deploy"):
        commands(registry, controller_lease(tmp_path)).promote(2, actor="ada")
    assert "promote.request" not in registry.tags[2]


def test_a_version_that_does_not_exist_is_named(
    registry: AnsweringRegistry, tmp_path: Path
) -> None:
    with controller_lease(tmp_path), pytest.raises(ConfigError, match="no version 9"):
        commands(registry, controller_lease(tmp_path)).promote(9, actor="ada")


def test_the_wait_for_an_answer_is_bounded(tmp_path: Path) -> None:
    silent = MemoryRegistry()
    silent.add(tmp_path)
    with (
        controller_lease(tmp_path),
        pytest.raises(ServiceUnavailable, match="did not answer within"),
    ):
        commands(silent, controller_lease(tmp_path), timeout_s=0.05).promote(1, actor="ada")


@pytest.mark.parametrize("tag", [None, "nonsense", "{}"])
def test_a_tag_that_cannot_be_read_is_no_request(tag: str | None) -> None:
    assert open_request(tag, None) is None


def test_an_answered_request_is_not_open() -> None:
    asked = OperatorRequest(id="a", version=1, actor="ada").model_dump_json()
    other = OperatorReply(id="b", verdict="failed", reason="").model_dump_json()
    its_own = OperatorReply(id="a", verdict="failed", reason="").model_dump_json()

    assert open_request(asked, other) is not None
    assert open_request(asked, its_own) is None


def test_in_a_file_no_cell_of_the_status_is_folded(
    registry: AnsweringRegistry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.set_tags(2, {f"gate.{name}": "passed" for name in ("finite", "drift", "reward")})
    registry.set_tags(2, {"parent_version": "1", "gate.perplexity": "passed", "verdict": "refused"})
    engine = MemoryEngineControl("http://engine-of-the-second-rack.example.org:8001")
    engine.set_stamp("assistant-for-the-support-desk/1")
    with controller_lease(tmp_path):
        show_status(registry, [engine], controller=controller_lease(tmp_path).holder())

    lines = capsys.readouterr().out.splitlines()
    assert any("candidate" in line and "refused" in line and "pending" in line for line in lines)
    assert any(engine.name in line and engine.stamp() in line for line in lines)
    assert lines[-1].startswith(f"controller: process {os.getpid()} on ")


def test_status_shows_versions_and_engines(registry: AnsweringRegistry) -> None:
    registry.aliases["champion"] = 1
    engine = MemoryEngineControl("http://127.0.0.1:8001")
    engine.set_stamp("assistant/1")
    away = MemoryEngineControl("http://127.0.0.1:8002")
    away.faults["stamp"] = ServiceUnavailable("no answer")
    out = io.StringIO()

    code = show_status(
        registry, [engine, away], controller=None, console=Console(file=out, width=160)
    )

    assert code == 0
    assert "champion" in out.getvalue()
    assert "assistant/1" in out.getvalue()
    assert "away (no answer)" in out.getvalue()
    engine.set_stamp("default")
    assert show_status(registry, [engine], controller=None, console=Console(file=out)) == 1
