"""Writes exported rows: one JSONL file, or a folder that Hugging Face `datasets` loads.

Rows are written as a stream. A file is written under a temporary name and renamed when it is
complete, so that a reader never finds half a file. The files of a failed export are removed.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import pyarrow as pa
from pyarrow import parquet
from typing_extensions import override

from onlinerl.errors import ConfigError
from onlinerl.process.files import flush, replace_file

_ROWS_PER_FILE = 100_000
_OWN_NAMES = ("train.jsonl", "train.jsonl.partial", "README.md", "data")
"""The names that the writers create in a folder."""
_FRONT_MATTER = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

"""


class RowWriter(Protocol):
    """Takes rows until the end of its `with` block; after an error no file looks complete."""

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """Create the folder if it is missing; an error in the block restores its earlier state.

    Raises:
        ConfigError: `out` is a file or a folder that is not empty.
    """
    is_new = not out.exists()
    if not is_new and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not an empty folder; name a new one with --out")
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        _remove_own_files(out, is_new=is_new)
        raise


def _remove_own_files(out: Path, *, is_new: bool) -> None:
    """Remove what the writers made, by name: others may have put files into the folder."""
    for path in (out / name for name in _OWN_NAMES):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if is_new:
        with contextlib.suppress(OSError):  # it holds files of somebody else
            out.rmdir()


def _complete(partial: Path, target: Path) -> None:
    """Give a completely written file its final name; it is on the disk when this returns."""
    flush(partial)
    partial.replace(target)
    flush(target.parent)


class JsonlWriter(RowWriter):
    """Writes `train.jsonl`: one JSON object per line, in UTF-8.

    Args:
        out: An empty folder.
    """

    def __init__(self, out: Path) -> None:
        self._target = out / "train.jsonl"
        self._partial = out / "train.jsonl.partial"
        self._file = self._partial.open("w", encoding="utf-8")

    @override
    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if error is None:
            _complete(self._partial, self._target)


class DatasetWriter(RowWriter):
    """Writes `data/train-NNNNN.parquet` and a `README.md` that lists them.

    `datasets.load_dataset(folder)` reads the result.

    Args:
        out: An empty folder.
        schema: Columns of every row.
        card: Text of the README after its front matter.
    """

    def __init__(self, out: Path, *, schema: pa.Schema, card: str) -> None:
        self._out = out
        self._schema = schema
        self._card = card
        self._folder = out / "data"
        self._folder.mkdir()
        self._number = -1
        self._rows_left = 0
        self._file: parquet.ParquetWriter | None = None

    @override
    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        if self._file is None or self._rows_left <= 0:
            self._next_file()
        assert self._file is not None
        self._file.write_table(pa.Table.from_pylist(list(rows), self._schema))
        self._rows_left -= len(rows)

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is None:
            self._next_file()  # a dataset without rows still has columns
        self._end_file()
        if error is None:
            # The README comes last: the folder is no dataset without it.
            replace_file(self._out / "README.md", _FRONT_MATTER + self._card)

    def _next_file(self) -> None:
        self._end_file()
        self._number += 1
        self._rows_left = _ROWS_PER_FILE
        self._file = parquet.ParquetWriter(self._partial, self._schema, compression="zstd")

    def _end_file(self) -> None:
        if self._file is None:
            return
        self._file.close()
        _complete(self._partial, self._partial.with_suffix(""))
        self._file = None

    @property
    def _partial(self) -> Path:
        return self._folder / f"train-{self._number:05d}.parquet.partial"
