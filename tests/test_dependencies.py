"""Every package that the code imports is declared for the folder that imports it."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.house import FOLDERS, ROOT

EXTRAS = {"rollout_store": "store"} | {
    name: name for name in ("serving", "ingest", "trainer", "deploy")
}
BROUGHT_ALONG = {"vllm", "torch", "pydantic_core"}
"""`serving/vllm_plugin` runs inside vLLM, which comes from requirements/ and brings torch. pydantic
pins the version of its core."""


def imported(folder: Path) -> Iterator[str]:
    """Top-level names that the modules below a folder import, late imports included."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module.split(".")[0]


def declared(extra: str) -> set[str]:
    """Names of the distributions that an extra installs, those of its own extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = set()
    for requirement in (*project["dependencies"], *project["optional-dependencies"][extra]):
        if requirement.startswith("onlinerl["):
            for inner in requirement[len("onlinerl[") : -1].split(","):
                names |= declared(inner)
        else:
            names.add(normalize(re.split(r"[<>=!~\[; ]", requirement)[0]))
    return names


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_imported_package_is_declared(folder: str) -> None:
    extra = EXTRAS[folder]
    distributions = packages_distributions()
    known = declared(extra)
    foreign = set(imported(ROOT / folder)) - sys.stdlib_module_names - {"onlinerl"} - BROUGHT_ALONG

    missing = {
        name
        for name in foreign
        if known.isdisjoint(normalize(each) for each in distributions.get(name, [name]))
    }
    assert missing == set()
