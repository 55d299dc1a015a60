"""Local copies of registered checkpoints."""

from pathlib import Path

import pytest

from onlinerl.errors import WeightsError
from onlinerl.registry.checkpoint import write_manifest
from onlinerl.registry.checkpoint_cache import CheckpointCache
from onlinerl.registry.memory_registry import MemoryRegistry


class CountingRegistry(MemoryRegistry):
    """A registry that counts downloads."""

    num_downloads = 0

    def download(self, version: int, target: Path) -> None:
        self.num_downloads += 1
        super().download(version, target)


@pytest.fixture
def registry(tmp_path: Path) -> CountingRegistry:
    """Three versions, with the number of each in its file."""
    registry = CountingRegistry()
    for number in (1, 2, 3):
        folder = tmp_path / "registered" / str(number)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(str(number))
        write_manifest(folder, policy="assistant")
        registry.add(folder)
    return registry


@pytest.fixture
def cache(tmp_path: Path, registry: CountingRegistry) -> CheckpointCache:
    return CheckpointCache(tmp_path / "cache", registry)


def test_a_version_is_downloaded_once(cache: CheckpointCache, registry: CountingRegistry) -> None:
    first, second = cache.get(2), cache.get(2, verify_again=True)

    assert first == second
    assert (first / "model.safetensors").read_text() == "2"
    assert registry.num_downloads == 1


def test_the_same_number_of_another_registry_is_another_copy(
    cache: CheckpointCache, registry: CountingRegistry, tmp_path: Path
) -> None:
    before = cache.get(1)
    registry.folders[1] = registry.folders[3]

    after = cache.get(1)

    assert before != after
    assert (after / "model.safetensors").read_text() == "3"


def test_a_damaged_copy_is_replaced_where_it_is_verified_again(
    cache: CheckpointCache, registry: CountingRegistry
) -> None:
    (cache.get(1) / "model.safetensors").write_text("damaged")
    (cache.get(1) / "extra").write_text("")

    assert (cache.get(1) / "model.safetensors").read_text() == "damaged"
    assert (cache.get(1, verify_again=True) / "model.safetensors").read_text() == "1"
    assert not (cache.get(1) / "extra").exists()
    assert registry.num_downloads == 2


def test_what_does_not_match_its_manifest_leaves_no_copy(
    cache: CheckpointCache, registry: CountingRegistry, tmp_path: Path
) -> None:
    (registry.folders[1] / "model.safetensors").write_text("changed")

    with pytest.raises(WeightsError, match=r"model.safetensors: sha256"):
        cache.get(1)
    with pytest.raises(WeightsError, match="no version 9"):
        cache.get(9)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_newest_copies_stay_and_the_one_in_use(cache: CheckpointCache, tmp_path: Path) -> None:
    copies = [cache.get(number) for number in (1, 2, 3)]
    (tmp_path / "cache" / "v000003-00000000.tmp").mkdir()
    (tmp_path / "cache" / "v000002").mkdir()
    cache.keep_newest(1, besides=copies[0])

    assert sorted((tmp_path / "cache").iterdir()) == [copies[0], copies[2]]


def test_only_the_versions_that_are_named_stay(cache: CheckpointCache, tmp_path: Path) -> None:
    copies = [cache.get(number) for number in (1, 2, 3)]
    cache.keep_only([2])

    assert list((tmp_path / "cache").iterdir()) == [copies[1]]
