"""The page about the architecture says what the contracts and the code say."""

import tomllib

import pytest

from tests import house
from tests.house import FOLDERS, ROOT, defines, first_line, houses, named_functions


@pytest.mark.parametrize("folder", [*FOLDERS, "onlinerl"])
def test_a_contract_names_every_room_of_a_folder(folder: str) -> None:
    root = ROOT / ("src/onlinerl" if folder == "onlinerl" else folder)
    there = {
        path.name if path.is_dir() else path.stem
        for path in root.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    known = houses()[folder]

    assert {room for layer in (*known.layers, known.apart) for room in layer} == there - {
        "__init__"
    }


def test_every_contract_of_layers_is_exhaustive() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layered = [c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]

    assert len(layered) == len(FOLDERS) + 1
    assert all(contract["exhaustive"] for contract in layered)


def test_every_room_says_what_it_is() -> None:
    silent = [
        str(file.relative_to(ROOT))
        for folder in (*FOLDERS, "src/onlinerl")
        for file in (ROOT / folder).glob("**/__init__.py")
        if not first_line(file).endswith(".")
    ]

    assert silent == []


def test_the_trip_names_functions_that_exist() -> None:
    named = list(named_functions())

    assert len(named) >= 20
    assert [f"{file.name}:{name}" for file, name in named if not defines(file, name)] == []


def test_a_function_that_is_gone_is_noticed() -> None:
    assert defines(ROOT / "tests" / "house.py", "House.bands")
    assert not defines(ROOT / "tests" / "house.py", "House.gone")


def test_the_picture_shows_every_room() -> None:
    drawn = house.picture()

    for known in houses().values():
        for layer in (*known.layers, known.apart):
            for room in layer:
                if room not in FOLDERS:
                    assert f">{room}</text>" in drawn
