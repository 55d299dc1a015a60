from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from onlinerl.serving.vllm_plugin.cpu_seeds import leave_generators_alone


class Generator:
    """As torch's on a CPU."""

    def get_offset(self) -> int:
        raise RuntimeError("CPU Generator does not use offset")


@dataclass
class Batch:
    num_reqs: int
    generators: dict[int, Generator] = field(default_factory=dict)


class Runner:
    """The step of vLLM's model runner that sets generators back."""

    def __init__(self, discarded: list[bool], seeded: list[int], *, fails: bool = False) -> None:
        self.input_batch = Batch(len(discarded), {index: Generator() for index in seeded})
        self.discard_request_mask = SimpleNamespace(np=np.array([*discarded, True]))
        self.seen: list[int] = []
        self._fails = fails

    def _bookkeeping_sync(self, result: str, *, flag: bool = False) -> tuple[str, bool]:
        batch = self.input_batch
        for index in np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0]:
            generator = batch.generators.get(int(index))
            if generator is not None:
                generator.get_offset()
        self.seen = sorted(batch.generators)
        if self._fails:
            raise ValueError("out of memory")
        return result, flag


@pytest.fixture
def runner() -> type[Runner]:
    class Patched(Runner):
        pass

    leave_generators_alone(Patched)
    return Patched


def test_without_the_patch_a_seeded_prompt_in_pieces_ends_the_worker() -> None:
    with pytest.raises(RuntimeError, match="does not use offset"):
        Runner([True], [0])._bookkeeping_sync("x")


def test_a_seeded_prompt_in_pieces_goes_on_and_keeps_its_generator(runner: type[Runner]) -> None:
    one = runner([False, True, True], [0, 1])
    before = dict(one.input_batch.generators)

    assert one._bookkeeping_sync("x", flag=True) == ("x", True)
    assert one.seen == [0]
    assert one.input_batch.generators == before


def test_generators_are_back_also_after_a_failure(runner: type[Runner]) -> None:
    one = runner([True], [0], fails=True)

    with pytest.raises(ValueError, match="out of memory"):
        one._bookkeeping_sync("x")
    assert list(one.input_batch.generators) == [0]


def test_patching_twice_patches_once(runner: type[Runner]) -> None:
    once = runner._bookkeeping_sync
    leave_generators_alone(runner)

    assert runner._bookkeeping_sync is once


def test_another_vllm_is_noticed() -> None:
    with pytest.raises(AttributeError):
        leave_generators_alone(SimpleNamespace())
