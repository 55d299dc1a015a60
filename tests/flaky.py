"""`python -m tests.flaky RECORD FAILED...`: judge tests that failed in a run and then passed alone.

Each FAILED is a copy of pytest's `lastfailed` file. Each test that it names is printed as FLAKY and
added to the record. A test that the record names already fails the run: it was flaky before
and nobody mended it. Whoever mends a test takes its line out of the record.
"""

import json
import sys
from pathlib import Path


def flaky_again(failed: list[str], *, record: Path) -> list[str]:
    """The tests of `failed` that the record names; the others are added to it."""
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    known = {line for line in lines if line and not line.startswith("#")}
    new = [name for name in failed if name not in known]
    if new:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text("".join(f"{line}\n" for line in [*lines, *new]), encoding="utf-8")
    return [name for name in failed if name in known]


def main(arguments: list[str]) -> int:
    """1 when a test was flaky before, else 0."""
    record, *reports = map(Path, arguments)
    failed = sorted({name for report in reports for name in json.loads(report.read_text())})
    again = flaky_again(failed, record=record)
    for name in failed:
        sys.stdout.write(f"FLAKY{' again' if name in again else ''}: {name}\n")
    if again:
        sys.stdout.write(f"these tests were flaky before ({record}): mend them\n")
    return 1 if again else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
