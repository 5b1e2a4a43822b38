"""The map page: rooms of the package as a picture, and each module with what it imports, drawn from the sources.

A room stands above the rooms that it imports. Each imported room has a line of its own beside the rooms, which ends in
it; a dot where the line passes another room says that this one imports it.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cascade_lab.book import markdown
from cascade_lab.book.export import render
from cascade_lab.book.layout import ROOMS, Room, arrows, imports, room

BOX, STEP, HEIGHT, LANE = 222, 58, 44, 20


@dataclass(frozen=True)
class Line:
    """The line of one room: the room it ends in, and those that import it, all by their numbers from the top."""

    x: int
    end: int
    dots: tuple[int, ...]


@dataclass(frozen=True)
class Module:
    """One module: its name within the package, its first sentence as HTML, and the modules it imports."""

    name: str
    text: str
    imports: tuple[str, ...]


@dataclass(frozen=True)
class Shown:
    """One room with its modules, and the names of the rooms that these import."""

    name: str
    room: Room
    modules: tuple[Module, ...]
    imports: tuple[str, ...]


def page(package: Path, navigation: Sequence[tuple[str, str, str]], documented: Collection[str]) -> str:
    """The page of a package.

    Args:
        package: its folder.
        navigation: as for a notebook's page.
        documented: modules, named within the package, that have a page in the API reference.

    Raises:
        graphlib.CycleError: rooms import each other.
    """
    graph = imports(package)
    found = arrows(graph)
    order = from_the_top(found)
    rooms = [Shown(name, ROOMS[name], _modules(package, graph, name), _in_order(found[name], order)) for name in order]
    return render(
        "map.html.j2",
        title="Map of the package",
        rooms=rooms,
        lines=lines(order, found),
        size={"box": BOX, "step": STEP, "height": HEIGHT, "lane": LANE},
        documented=documented,
        navigation=navigation,
        root="",
        here="map.html",
    )


def from_the_top(found: Mapping[str, set[str]]) -> list[str]:
    """Rooms, each before those that it imports."""
    sorter = graphlib.TopologicalSorter({name: found[name] for name in ROOMS})
    return list(sorter.static_order())[::-1]


def lines(order: Sequence[str], found: Mapping[str, set[str]]) -> list[Line]:
    """A line for each room that another imports, the deepest room's outermost."""
    drawn = []
    for end, name in enumerate(order):
        dots = tuple(number for number, other in enumerate(order) if name in found[other])
        if dots:
            drawn.append(Line(BOX + LANE * (len(drawn) + 1), end, dots))
    return drawn


def _modules(package: Path, graph: Mapping[str, set[str]], name: str) -> tuple[Module, ...]:
    shown = []
    for module in sorted(graph):
        within = module.partition(".")[2]
        if room(module) != name:
            continue
        place = package.joinpath(*within.split(".")) if within else package
        source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        first = " ".join(text.split("\n\n")[0].split()).rstrip(":")
        targets = sorted(target.partition(".")[2] or package.name for target in graph[module])
        shown.append(Module(within or package.name, markdown.to_html(first), tuple(targets)))
    return tuple(shown)


def _in_order(names: Collection[str], order: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in order if name in names)
