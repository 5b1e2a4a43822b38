"""The map of CONTRIBUTING, held to every import: rooms import downward only, and no two modules import each other."""

import graphlib
import re
from pathlib import Path

import pytest

from cascade_lab.book.layout import ROOMS, allowed, imports, room

CHECKOUT = Path(__file__).resolve().parents[2]
# what computes; it may be installed with torch, NumPy and Triton alone
ABOVE_THE_CORE = {"evidence", "pictures", "bench", "book", "cli"}


@pytest.fixture(scope="module")
def graph():
    return imports(CHECKOUT / "cascade_lab")


def forbidden(graph):
    return sorted(f"{one} imports {two}" for one, targets in graph.items() for two in targets if not allowed(one, two))


def circle(graph):
    """The modules of a circle of imports, or None; a module that imports the package it lies in closes none."""
    whole = {one: {two for two in targets if not one.startswith(f"{two}.")} for one, targets in graph.items()}
    try:
        graphlib.TopologicalSorter(whole).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_every_import_stays_within_the_rule_of_its_room(graph):
    assert len(graph) > 60
    assert {room(module) for module in graph} == set(ROOMS)
    assert forbidden(graph) == []


def test_no_modules_import_each_other(graph):
    assert circle(graph) is None


def test_the_rules_are_those_that_are_written():
    """The core knows nothing of what stands on it, the book knows claims and files alone, only the command line all."""
    assert not ABOVE_THE_CORE & set(ROOMS["core"].may_import)
    assert set(ROOMS["book"].may_import) == {"files", "evidence.claims"}
    assert ABOVE_THE_CORE.isdisjoint(ROOMS["traces"].may_import)
    assert ABOVE_THE_CORE.isdisjoint(ROOMS["evidence"].may_import)
    assert {"evidence", "core"} <= set(ROOMS["pictures"].may_import)
    assert {"pictures", "evidence", "core"} <= set(ROOMS["bench"].may_import)
    assert set(ROOMS["cli"].may_import) == set(ROOMS) - {"cli"}
    assert [name for name, one in ROOMS.items() if "bench" in one.may_import or "cli" in one.may_import] == ["cli"]


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("cascade_lab.levels", "cascade_lab.evidence.reads"),
        ("cascade_lab.backends.triton.attention", "cascade_lab.bench.gpu"),
        ("cascade_lab.book.runner", "cascade_lab.levels"),
        ("cascade_lab.book.runner", "cascade_lab.evidence.reference"),
        ("cascade_lab.evidence.tiles", "cascade_lab.pictures.prefix"),
        ("cascade_lab.pictures.merge", "cascade_lab.book.export"),
        ("cascade_lab.bench.cpu", "cascade_lab.cli"),
        ("cascade_lab.files", "cascade_lab.states"),
    ],
)
def test_an_import_against_the_rule_is_noticed(graph, module, target):
    assert target in graph or target == "cascade_lab.bench.gpu"
    assert forbidden(graph | {module: graph.get(module, set()) | {target}}) == [f"{module} imports {target}"]


def test_a_circle_is_noticed(graph):
    assert set(circle(graph | {"cascade_lab.paging": {"cascade_lab.levels"}})) >= {
        "cascade_lab.paging",
        "cascade_lab.levels",
    }


def test_contributing_opens_with_a_map_of_every_room(graph):
    text = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    before, drawn = text.split("```text\n")[:2]
    drawn = drawn.split("```")[0]
    assert re.findall(r"^## .*", before, re.M) == ["## The map"]
    assert drawn.count("\n") <= 30
    places = {place for one in ROOMS.values() for place in re.findall(r"\w+(?:/|\.py)", one.place)} - {"__main__.py"}
    assert [place for place in sorted(places) if not re.search(rf"(?<!\w){re.escape(place)}", drawn)] == []
    core = {name.split(".")[1] for name in graph if "." in name and room(name) == "core"}
    shown = {name for name in core if not name.startswith("_")}
    assert [name for name in sorted(shown) if not re.search(rf"\b{name}\b", drawn)] == []


def test_tests_lie_in_the_rooms_of_what_they_test():
    folders = {path.name for path in (CHECKOUT / "tests").iterdir() if (path / "__init__.py").exists()}
    assert folders == {"core", "evidence", "pictures", "bench", "book", "project", "properties", "browser"}
    assert list((CHECKOUT / "tests").glob("test_*.py")) == []
    for path in (CHECKOUT / "tests").rglob("*.py"):
        found = re.findall(r"^(?:from|import) (tests\.\S*\btest_\w+)", path.read_text(encoding="utf-8"), re.M)
        assert found == [], path.name
