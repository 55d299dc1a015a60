"""Writes files and folders that appear whole or not at all and that survive a loss of power.

The content is written beside the target under a temporary name and fsynced; then it is renamed and
its folder is fsynced. Without the last step a crash of the machine could undo the rename.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, data: bytes | str, *, private: bool = False) -> None:
    """Make `data` the content of `path` in one step; a reader finds the old content or the new one.

    Use it for every small file that another process, or a later start, reads. There must be one
    writer at a time, because two would share the temporary name `.NAME.tmp`.

    Args:
        path: The file, in a folder that exists.
        data: Bytes, or text to write as UTF-8.
        private: Whether only the owner may read the file, from its first byte on. Otherwise the
            umask of the process decides.

    Raises:
        OSError: the file could not be written; `path` is as it was before.
    """
    staging = path.with_name(f".{path.name}.tmp")
    # A file that a killed process left may have another mode, so it is not reused.
    staging.unlink(missing_ok=True)
    mode = 0o600 if private else 0o666
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    flush(path.parent)


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `target` when the block ends without an error.

    Use it for files that belong together, such as a checkpoint. An error leaves `target` as it was
    before. A crash between removing an old `target` and the rename leaves no `target`, never a
    partial one.
    """
    staging = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        for path in staging.rglob("*"):
            flush(path)
        flush(staging)
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    flush(target.parent)


def flush(path: Path) -> None:
    """Fsync a file, or a folder whose entries changed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
