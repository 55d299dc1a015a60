"""Writes the reference pages from the code: `make docs`; a test fails when they drift."""

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from onlinerl.rollout_store.reference.tables_page import tables_page
from onlinerl.settings import SECRETS, Settings
from tests import house

DOCS = Path(__file__).resolve().parent.parent / "docs"


def configuration_page() -> str:
    """Every key of the TOML file, from the models."""
    lines = [
        "# Configuration",
        "",
        "One TOML file, named with `--config` (default `onlinerl.toml`). Any value can be",
        "overridden with `--set section.key=value`. Unknown keys are errors. A path that is",
        "relative starts at the file's folder. This page is generated from the models by",
        "`make docs`.",
        "",
        "Secrets come from the environment only:",
        "",
        *[f"- `{name}` {meaning}." for name, meaning in SECRETS.items()],
        "",
        *_section("", Settings),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _section(prefix: str, model: type[BaseModel], *, repeats: bool = False) -> Iterator[str]:
    plain = {n: f for n, f in model.model_fields.items() if _nested(f) is None}
    if plain:
        table = f"[[{prefix}]]" if repeats else f"[{prefix}]"
        yield f"## `{table}`" if prefix else "## Top level"
        yield ""
        if model.__doc__:
            yield from [model.__doc__.strip().split("\n\n")[0].replace("\n    ", " "), ""]
        yield "| key | type | default | meaning |"
        yield "|---|---|---|---|"
        for name, field in plain.items():
            yield f"| `{name}` | {_type(field)} | {_default(field)} | {_meaning(field)} |"
        yield ""
    for name, field in model.model_fields.items():
        nested = _nested(field)
        if nested is not None:
            inner = f"{prefix}.{name}" if prefix else name
            yield from _section(inner, nested, repeats=_repeats(field))


def _repeats(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in (tuple, list)


def _nested(field: FieldInfo) -> type[BaseModel] | None:
    candidates = (field.annotation, *get_args(field.annotation))
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _type(field: FieldInfo) -> str:
    text = _type_name(field.annotation)
    bounds = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if hasattr(item, name)
    ]
    return f"`{text}`{' ' if bounds else ''}{', '.join(bounds)}".replace("|", "\\|")


def _type_name(annotation: object) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(args[0])
    if origin is Literal:
        return " / ".join(repr(arg) for arg in args)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(arg) for arg in args)
    if origin is not None:
        inner = ", ".join("…" if arg is Ellipsis else _type_name(arg) for arg in args)
        return f"{origin.__name__}[{inner}]"
    names: dict[object, str] = {NoneType: "none", str: "string", bool: "boolean", int: "integer"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Path):
        value = str(value)
    return f"`{value!r}`".replace("|", "\\|")


def _meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


PAGES = {"configuration.md": configuration_page, "tables.md": tables_page, **house.PAGES}


def main() -> None:
    """Write all pages."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
