"""Where exported rows go: one JSONL file, or a folder that Hugging Face `datasets` loads.

Rows are written as they come. What is being written has another name until it is whole, so that a
reader never finds half of it; what fails is taken away again.
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

from onlinerl.errors import ConfigError

_ROWS_PER_FILE = 100_000
_WRITTEN = ("train.jsonl", "train.jsonl.partial", "README.md", "data")
"""What the writers put into a folder."""


class RowWriter(Protocol):
    """Takes rows until it is closed; after an error it leaves nothing that looks whole."""

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
    """The folder, made if need be; an error leaves it as it was.

    Raises:
        ConfigError: something is in it already.
    """
    is_new = not out.exists()
    if not is_new and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not an empty folder; name a new one with --out")
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        _take_away(out, is_new=is_new)
        raise


def _take_away(out: Path, *, is_new: bool) -> None:
    """Only what the writers made, by its names: others may have put something beside it."""
    for path in (out / name for name in _WRITTEN):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if is_new:
        with contextlib.suppress(OSError):  # it holds something of somebody else
            out.rmdir()


class JsonlWriter:
    """`train.jsonl`, one JSON object a line, UTF-8."""

    def __init__(self, out: Path) -> None:
        self._whole = out / "train.jsonl"
        self._partial = out / "train.jsonl.partial"
        self._file = self._partial.open("w", encoding="utf-8")

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows."""
        self._file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if error is None:
            self._partial.replace(self._whole)


class DatasetWriter:
    """`data/train-NNNNN.parquet` and a `README.md` that names them, for `load_dataset(folder)`.

    Args:
        out: An empty folder.
        schema: Of every row.
        card: Text of the README after its front matter.
    """

    def __init__(self, out: Path, *, schema: pa.Schema, card: str) -> None:
        self._out = out
        self._schema = schema
        self._card = card
        self._folder = out / "data"
        self._folder.mkdir()
        self._number = -1
        self._room = 0
        self._file: parquet.ParquetWriter | None = None

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows, in a new file when the last one is full."""
        if not rows:
            return
        if self._file is None or self._room <= 0:
            self._next_file()
        assert self._file is not None
        self._file.write_table(pa.Table.from_pylist(list(rows), self._schema))
        self._room -= len(rows)

    def __enter__(self) -> Self:
        return self

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
            # Last: without it the folder is no dataset yet.
            (self._out / "README.md").write_text(_FRONT_MATTER + self._card, encoding="utf-8")

    def _next_file(self) -> None:
        self._end_file()
        self._number += 1
        self._room = _ROWS_PER_FILE
        self._file = parquet.ParquetWriter(
            self._folder / f"train-{self._number:05d}.parquet.partial",
            self._schema,
            compression="zstd",
        )

    def _end_file(self) -> None:
        if self._file is None:
            return
        self._file.close()
        partial = self._folder / f"train-{self._number:05d}.parquet.partial"
        partial.replace(partial.with_suffix(""))
        self._file = None


_FRONT_MATTER = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

"""
