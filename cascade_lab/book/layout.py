"""The map of the package: its rooms, what each holds, and which module imports which, as the sources say.

An import is an edge from a module to the module that defines what it takes: a name that a package passes on counts as
its definer's, and `package.name` counts like `from package import name`. Imports inside functions count like all
others. Nothing is imported to find out, and modules reached by a computed name are not seen: neither those that a
package loads when it is first asked for them, nor the lines that tell a type checker so.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Room:
    """A folder, or some modules beside each other that serve one purpose.

    Attributes:
        place: where in the tree it is.
        does: its purpose in a word or two.
        holds: what does it.
        may_import: rooms, or single modules by their names within the package.
    """

    place: str
    does: str
    holds: str
    may_import: tuple[str, ...]


ROOMS = {
    "files": Room("files.py", "reads and writes files", "others' files within bounds, ours put into place whole", ()),
    "core": Room(
        "*.py, backends/",
        "computes",
        "states and attention, levels and drafts, prefixes and regions, the same across ranks, and two backends",
        (),
    ),
    "hf": Room("hf.py", "runs models", "attention and paged caches for models of Hugging Face transformers", ("core",)),
    "traces": Room(
        "traces/", "replays traffic", "request traces read, replayed, summed, and made up", ("core", "files")
    ),
    "evidence": Room(
        "evidence/",
        "proves",
        "the float64 oracle, the recorder of loads, masks, compiled code, ranks, and claims",
        ("core", "files"),
    ),
    "pictures": Room(
        "pictures/", "draws", "a style, and one module of figures per notebook", ("core", "files", "traces", "evidence")
    ),
    "bench": Room(
        "bench/",
        "measures",
        "clocks and compilers on the machine at hand",
        ("core", "files", "traces", "evidence", "pictures"),
    ),
    "book": Room(
        "book/",
        "runs the notebooks",
        "execution, canonical form, and the pages of this site; it knows claims, and no attention",
        ("files", "evidence.claims"),
    ),
    "cli": Room(
        "cli.py, trace_report.py",
        "takes commands",
        "the command line, which alone knows every room",
        ("core", "hf", "files", "traces", "evidence", "pictures", "bench", "book"),
    ),
}
# what users may call, by what it serves; the names are those of each module's `__all__`
PUBLIC = {
    "Claim 1: states and attention": ("states", "attention"),
    "Claim 2: levels, drafts, and when a cascade pays": ("levels", "planning", "drafts", "trigger", "rules"),
    "Claim 3: what a prefix hit is worth": ("prefix", "applicability", "regions", "calibration"),
    "Traces": ("traces",),
    "Across ranks": ("sharding", "distributed"),
    "Models of transformers": ("hf",),
    "Cache pages, and where kernels run": ("paging", "runtime"),
    "Prove your own": ("evidence.claims", "evidence.reference", "evidence.reads"),
}
_BESIDE = {"files": "files", "cli": "cli", "__main__": "cli", "trace_report": "cli"}


def room(module: str) -> str:
    """The room of a module by its dotted name, such as "core" for "cascade_lab.paging" and for "cascade_lab" itself."""
    _, _, within = module.partition(".")
    first = within.partition(".")[0]
    return first if first in ROOMS else _BESIDE.get(first, "core")


def imports(folder: Path) -> dict[str, set[str]]:
    """Every module of a package with the modules of that package which it imports, all by dotted names.

    Args:
        folder: the package's own folder; its name is the package's.

    Raises:
        SyntaxError: a module is no Python.
    """
    trees, packages = {}, set()
    for path in sorted(folder.rglob("*.py")):
        parts = (folder.name, *path.relative_to(folder).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts = parts[:-1]
            packages.add(".".join(parts))
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        if path.stem == "__init__":
            tree.body = [node for node in tree.body if not _is_for_checkers(node)]
        trees[".".join(parts)] = tree
    taken = {module: list(_names(module, module in packages, tree)) for module, tree in trees.items()}
    # what a package takes from its modules, and so passes on: package, name -> where it comes from
    passed_on = {(package, name): (source, origin) for package in packages for name, source, origin in taken[package]}

    def definer(source: str, name: str) -> str:
        while (source, name) in passed_on:
            onward = passed_on[source, name]
            if onward == (source, name):
                break
            source, name = onward
        inner = f"{source}.{name}"
        return inner if inner in trees else source

    graph = {}
    for module, tree in trees.items():
        found = {definer(source, origin) for _, source, origin in taken[module] if source in trees}
        found |= {_deepest(name, definer) for name in _dotted(tree, folder.name)}
        graph[module] = found - {module}
    return graph


def arrows(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """For each room, the other rooms that its modules import; the package's own name and version lie in no room."""
    found = {name: set() for name in ROOMS}
    for module, targets in graph.items():
        found[room(module)] |= {room(target) for target in targets if "." in target} - {room(module)}
    return found


def allowed(module: str, target: str) -> bool:
    """Whether a module may import another by the rule of its room.

    The package itself, with its name and version, is open to all: importing any module of it loads it.
    """
    here, there, within = room(module), room(target), target.partition(".")[2]
    return not within or here == there or not {there, within}.isdisjoint(ROOMS[here].may_import)


def _is_for_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _names(module: str, is_package: bool, tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """(name here, module taken from, name there) of each `from ... import`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                steps = module.split(".")
                base = steps[: len(steps) - node.level + is_package]
                source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield alias.asname or alias.name, source, alias.name


def _dotted(tree: ast.AST, package: str) -> Iterator[str]:
    """What `import package.module` names, and each `package.name` read through such an import."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == package:
                    yield alias.name
                    bound[alias.asname or package] = alias.name if alias.asname else package
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = [node.attr]
            value = node.value
            while isinstance(value, ast.Attribute):
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in bound:
                yield ".".join([bound[value.id], *reversed(parts)])


def _deepest(name: str, definer: Callable[[str, str], str]) -> str:
    """The module in which a dotted name ends."""
    module, *parts = name.split(".")
    for part in parts:
        onward = definer(module, part)
        if onward == module:
            return module
        module = onward
    return module
