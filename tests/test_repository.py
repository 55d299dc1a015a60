"""What the repository promises about itself."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from onlinerl.base_config import Config
from onlinerl.settings import Settings
from tests.reference import DOCS, PAGES

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("serving", "ingest", "trainer", "rollout_store", "deploy")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_top_level_folder_is_linked_into_the_package(folder: str) -> None:
    link = ROOT / "src" / "onlinerl" / folder

    assert link.is_symlink()
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("name", sorted(PAGES))
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


def configuration_models(model: type[BaseModel] = Settings) -> set[type[BaseModel]]:
    found = {model}
    for field in model.model_fields.values():
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, Config):
                found |= configuration_models(candidate)
    return found


def test_every_configuration_key_is_documented() -> None:
    undocumented = [
        f"{model.__name__}.{name}"
        for model in configuration_models()
        for name, field in model.model_fields.items()
        if not field.description
    ]

    assert undocumented == []


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]

    assert broken == []
