"""The picture and the rooms of docs/architecture.md, drawn from the import contracts.

The contracts of pyproject.toml say which rooms there are and what is above what; the first line of
a room's `__init__` says what it is. `make docs` writes both into the page.
"""

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("serving", "ingest", "trainer", "deploy", "rollout_store")
PICTURE = "architecture.svg"
PAGE = "architecture.md"

_BOX_W, _BOX_H, _GAP, _PAD, _TITLE_H = 104, 24, 6, 8, 30
_ROOMS_PER_ROW = 5
_COLOURS = {
    "serving": "#dbeafe",
    "ingest": "#dcfce7",
    "trainer": "#fef3c7",
    "deploy": "#fce7f3",
    "rollout_store": "#ede9fe",
    "src/onlinerl": "#f1f5f9",
}
_TITLE = (
    "A band is a layer: what stands in it imports only what stands below. Dashed: another process."
)
_BETWEEN = (
    "every folder imports rollout_store, the contract; serving also imports deploy.weights; "
    "deploy may import all"
)


@dataclass(frozen=True)
class House:
    """The layers of one package, the highest first; a layer is the names of its rooms and files."""

    name: str
    layers: tuple[tuple[str, ...], ...]
    apart: tuple[str, ...] = ()
    """Rooms beside the layers: they run in another process."""

    @property
    def bands(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """The layers, then what is apart; a layer of many rooms is drawn in several rows."""
        layers = (*self.layers, *([self.apart] if self.apart else []))
        return tuple(
            tuple(layer[at : at + _ROOMS_PER_ROW] for at in range(0, len(layer), _ROOMS_PER_ROW))
            for layer in layers
        )

    @property
    def num_columns(self) -> int:
        """Rooms of the longest row."""
        return max(len(row) for band in self.bands for row in band)


def houses() -> dict[str, House]:
    """Every package with a contract of layers, by name."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = {}
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] != "layers":
            continue
        name = contract["containers"][0].removeprefix("onlinerl.")
        layers = tuple(tuple(re.split(r"\s*[|:]\s*", layer)) for layer in contract["layers"])
        found[name] = House(name, layers, tuple(contract.get("exhaustive_ignores", ())))
    return found


def picture() -> str:
    """All packages as an SVG. A band is a layer; imports go down only, also between packages."""
    found = houses()
    above, below = _around(found["onlinerl"])
    store = found["rollout_store"]
    total = sum(_size(found[name])[0] for name in FOLDERS[:-1]) + 2 * _PAD * len(FOLDERS[:-1])
    shapes = [_text(total // 2, 26, _TITLE, size=14)]
    y = 40 + _draw(above, x=(total - _size(above)[0]) // 2, y=40, into=shapes) + 2 * _PAD
    x, tallest = _PAD, 0
    for name in FOLDERS[:-1]:
        tallest = max(tallest, _draw(found[name], x=x, y=y, into=shapes))
        x += _size(found[name])[0] + 2 * _PAD
    y += tallest + 24
    shapes.append(_text(total // 2, y, _BETWEEN, size=12))
    y += 12
    y += _draw(store, x=(total - _size(store)[0]) // 2, y=y, into=shapes) + 2 * _PAD
    y += _draw(below, x=(total - _size(below)[0]) // 2, y=y, into=shapes) + _PAD
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{y}" '
        f'viewBox="0 0 {total} {y}" font-family="sans-serif">'
    )
    return "\n".join(
        [head, f'<rect width="{total}" height="{y}" fill="white"/>', *shapes, "</svg>", ""]
    )


def _around(package: House) -> tuple[House, House]:
    """What stands above the folders in `src/onlinerl`, and what they all may import."""
    level = next(i for i, layer in enumerate(package.layers) if FOLDERS[0] in layer)
    beside = tuple(name for name in package.layers[level] if name not in FOLDERS)
    above = (*package.layers[:level], beside)
    return House("src/onlinerl", above), House("src/onlinerl", package.layers[level + 1 :])


def _size(house: House) -> tuple[int, int]:
    num_rows = sum(len(band) for band in house.bands)
    width = house.num_columns * (_BOX_W + _GAP) + _GAP + 2 * _PAD
    height = num_rows * (_BOX_H + _GAP) + len(house.bands) * 2 * _GAP
    return width, height + _TITLE_H + _PAD


def _draw(house: House, *, x: int, y: int, into: list[str]) -> int:
    """Draw one package; its height."""
    width, height = _size(house)
    into.append(_rect(x, y, width, height, fill=_COLOURS[house.name], stroke="#64748b"))
    into.append(_text(x + width // 2, y + 20, f"{house.name}/", size=15, weight="bold"))
    y += _TITLE_H
    for band in house.bands:
        is_apart = bool(house.apart) and band == house.bands[-1]
        band_h = len(band) * (_BOX_H + _GAP) + _GAP
        into.append(
            _rect(x + _PAD, y, width - 2 * _PAD, band_h, fill="#ffffff99", is_dashed=is_apart)
        )
        for number, row in enumerate(band):
            left = x + (width - len(row) * (_BOX_W + _GAP) + _GAP) // 2
            top = y + _GAP + number * (_BOX_H + _GAP)
            for place, room in enumerate(row):
                box_x = left + place * (_BOX_W + _GAP)
                into.append(_rect(box_x, top, _BOX_W, _BOX_H, fill="white"))
                into.append(_text(box_x + _BOX_W // 2, top + 16, room, size=12))
        y += band_h + _GAP
    return height


def _rect(
    x: int,
    y: int,
    width: int,
    height: int,
    *,
    fill: str,
    stroke: str = "#94a3b8",
    is_dashed: bool = False,
) -> str:
    dashes = ' stroke-dasharray="4 3"' if is_dashed else ""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" '
        f'stroke="{stroke}"{dashes}/>'
    )


def _text(x: int, y: int, words: str, *, size: int, weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="middle" '
        f'fill="#0f172a">{escape(words)}</text>'
    )


def rooms() -> str:
    """A table of every room: where it is, and what it is."""
    found = houses()
    lines: list[str] = []
    for folder in (*FOLDERS, "onlinerl"):
        root = ROOT / ("src/onlinerl" if folder == "onlinerl" else folder)
        lines += [f"### `{root.relative_to(ROOT)}/`", "", "| room | what it is |", "|---|---|"]
        house = found[folder]
        for room in (name for layer in (*house.layers, house.apart) for name in layer):
            if room in FOLDERS:
                continue
            lines += [f"| `{path}` | {what} |" for path, what in _described(root, room)]
        lines.append("")
    return "\n".join(lines)


def _described(root: Path, room: str) -> Iterator[tuple[str, str]]:
    """The room and the rooms within it, each with the first line of its docstring."""
    folder = root / room
    if not folder.is_dir():
        yield f"{room}.py", first_line(folder.with_suffix(".py"))
        return
    yield f"{room}/", first_line(folder / "__init__.py")
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield f"{room}/{inner.name}/", first_line(inner / "__init__.py")


def first_line(file: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n", 1)[0].split()).replace("|", "\\|")


def page() -> str:
    """docs/architecture.md with its generated part made anew."""
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    begin, end = "<!-- rooms: begin -->\n", "<!-- rooms: end -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{rooms()}\n{end}{after}"


def named_functions() -> Iterator[tuple[Path, str]]:
    """Every `path.py:name` of the page, as a file and the name that it should define."""
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    for path, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", text):
        yield ROOT / path, name


def defines(file: Path, name: str) -> bool:
    """Whether a module defines a function, class or method of this dotted name."""
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next((n for n in body if isinstance(n, kinds) and n.name == part), None)
        if node is None:
            return False
        body = node.body
    return True


PAGES: dict[str, Callable[[], str]] = {PICTURE: picture, PAGE: page}
