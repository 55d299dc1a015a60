"""Files and folders that appear whole or not at all, and that outlast a loss of power.

One rule for all of them: write beside the target under a temporary name, fsync the content, rename,
fsync the folder. A rename without the last step can be undone by a crash of the machine.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, data: bytes | str, *, private: bool = False) -> None:
    """Make `data` the content of `path` in one step; a reader finds the old content or the new one.

    Use it for every small file that another process, or a later start, reads. One writer at a time:
    two at once would share the temporary name `.NAME.tmp`.

    Args:
        path: The file; its folder exists.
        data: Bytes, or text that is written as UTF-8.
        private: Whether only the owner may read the file, from its first byte on. Otherwise the
            process's umask decides.

    Raises:
        OSError: the file could not be written; `path` is as it was before.
    """
    staging = path.with_name(f".{path.name}.tmp")
    # What a killed process left may have another mode, so it is never written into.
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
    """A folder to fill that becomes `target` when the block ends without an error.

    Use it for what is read as one thing, such as a checkpoint. After an error `target` is as it was
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
