import os
from pathlib import Path

import pytest

from onlinerl.process.files import replace_file, replaced_folder


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_file_is_replaced_and_no_temporary_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("old")
    replace_file(path, "néw")

    assert path.read_bytes() == "néw".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_file_is_readable_by_its_owner_only_whatever_was_there_before(
    tmp_path: Path,
) -> None:
    path = tmp_path / "spec.json"
    path.write_text("old")
    path.chmod(0o644)
    left_by_a_kill = tmp_path / ".spec.json.tmp"
    left_by_a_kill.write_text("half")
    left_by_a_kill.chmod(0o644)
    replace_file(path, b"secret", private=True)

    assert mode_of(path) == 0o600
    assert path.read_bytes() == b"secret"
    assert list(tmp_path.iterdir()) == [path]


def test_the_umask_sets_the_mode_of_other_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "a", b"")
    finally:
        os.umask(before)

    assert mode_of(tmp_path / "a") == 0o640


def test_a_failed_write_leaves_the_old_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cursor"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_flushed_before_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []

    def fsync(descriptor: int) -> None:
        flushed.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(tmp_path / "a", b"1")

    assert flushed == [str(tmp_path / ".a.tmp"), str(tmp_path)]


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "v1"
    with replaced_folder(target) as folder:
        (folder / "weights").write_text("1")

        assert not target.exists()

    assert [path.name for path in target.iterdir()] == ["weights"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_fill_leaves_the_old_folder_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "v1"
    target.mkdir()
    (target / "weights").write_text("old")

    def fill() -> None:
        with replaced_folder(target) as folder:
            (folder / "weights").write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fill()

    assert (target / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
