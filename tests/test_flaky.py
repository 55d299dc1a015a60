import json
from pathlib import Path

import pytest

from tests.flaky import main


def judge(folder: Path, *failed: str) -> int:
    report = folder / "fast.json"
    report.write_text(json.dumps(dict.fromkeys(failed, True)))
    return main([str(folder / "flaky.txt"), str(report)])


def test_a_test_is_tolerated_once_and_then_fails_until_its_line_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "flaky.txt"
    record.write_text("# flaky tests\n")

    assert judge(tmp_path, "tests/a.py::test_x", "tests/a.py::test_y[1]") == 0
    assert record.read_text() == "# flaky tests\ntests/a.py::test_x\ntests/a.py::test_y[1]\n"
    assert judge(tmp_path, "tests/a.py::test_z") == 0
    capsys.readouterr()
    assert judge(tmp_path, "tests/a.py::test_x", "tests/a.py::test_new") == 1
    assert capsys.readouterr().out.splitlines()[:2] == [
        "FLAKY: tests/a.py::test_new",
        "FLAKY again: tests/a.py::test_x",
    ]
    record.write_text(record.read_text().replace("tests/a.py::test_x\n", ""))
    assert judge(tmp_path, "tests/a.py::test_x") == 0


def test_a_record_that_does_not_exist_begins(tmp_path: Path) -> None:
    assert judge(tmp_path, "tests/a.py::test_x") == 0
    assert (tmp_path / "flaky.txt").read_text() == "tests/a.py::test_x\n"
