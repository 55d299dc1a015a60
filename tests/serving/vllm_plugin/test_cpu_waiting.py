import inspect
from types import ModuleType, SimpleNamespace

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

from onlinerl.serving.vllm_plugin import entry_point as vllm_plugin
from onlinerl.serving.vllm_plugin.cpu_waiting import pause, wait_with_pauses


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM for GPUs may wait as it likes")
def test_the_plugin_makes_vllm_wait_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)
    vllm_plugin.register()
    vllm_plugin.register()

    assert shm_broadcast.sched_yield is pause
    # The name is looked up where it waits, each time.
    assert "sched_yield()" in inspect.getsource(shm_broadcast.SpinCondition.wait)


def test_a_vllm_that_waits_in_another_way_is_an_error() -> None:
    with pytest.raises(AttributeError):
        wait_with_pauses(SimpleNamespace())  # type: ignore[arg-type]


def test_nothing_else_is_touched() -> None:
    module = ModuleType("shm_broadcast")
    module.sched_yield, module.other = print, len  # type: ignore[attr-defined]
    wait_with_pauses(module)

    assert module.other is len
