"""What users may call is said in one place per module, its `__all__`; all that shows names to users agrees with it."""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cascade_lab
from cascade_lab import evidence
from cascade_lab.book.layout import PUBLIC, imports, room

CHECKOUT = Path(__file__).resolve().parents[2]
MODULES = [name for names in PUBLIC.values() for name in names]


def module(name):
    return importlib.import_module(f"cascade_lab.{name}")


def seen_by_a_checker(source):
    """What a type checker finds in a module of a typed package: name -> (module, name) that it stands for.

    As PEP 484 and the typing specification have it: names defined there, imported names that `__all__` lists or that
    are imported under their own name by `as`, and of `if TYPE_CHECKING` the first branch alone.
    """
    body = []
    for node in ast.parse(source).body:
        checked = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        body += node.body if checked else [node]
    listed = next((ast.literal_eval(node.value) for node in body if assigned(node) == "__all__"), [])
    found = {}
    for node in body:
        if isinstance(node, ast.ImportFrom):
            found |= {
                a.asname or a.name: (node.module, a.name) for a in node.names if a.asname == a.name or a.name in listed
            }
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = None
        elif assigned(node):
            found[assigned(node)] = None
    return found


def assigned(node):
    return node.targets[0].id if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else None


def undeclared(source, public):
    """Names that code takes from public modules, in imports or through their names, although they are not public."""
    aliases, found = {}, set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in public:
            found |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name not in public[node.module]}
        if isinstance(node, ast.ImportFrom):
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        if isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            home = aliases.get(node.value.id)
            if home in public and node.attr not in public[home]:
                found.add(f"{home}.{node.attr}")
    return found


NAMES = {f"cascade_lab.{name}": set(module(name).__all__) for name in MODULES}
NAMES["cascade_lab"] = set(dir(cascade_lab))


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_lists_names_that_it_has_and_describes(name):
    here = module(name)
    assert len(here.__all__) == len(set(here.__all__)) > 0
    for one in here.__all__:
        assert not one.startswith("_"), one
        thing = getattr(here, one)
        if inspect.isclass(thing) or inspect.isroutine(thing):
            assert thing.__module__.startswith(here.__name__), one
            assert inspect.getdoc(thing), one


def test_what_the_package_lists_are_its_modules_and_what_these_list():
    homes = {}
    for name in MODULES:
        for one in module(name).__all__:
            homes.setdefault(one, getattr(module(name), one))
    for name in cascade_lab.__all__:
        thing = getattr(cascade_lab, name)
        assert thing is (module(name) if inspect.ismodule(thing) else homes[name]), name


def test_public_modules_are_those_of_the_reference():
    """`attention` alone is hidden by the function of that name; it has its page all the same."""
    named = {name for name in dir(cascade_lab) if inspect.ismodule(getattr(cascade_lab, name))} - {"evidence"}
    assert named | {"attention"} | {f"evidence.{name}" for name in dir(evidence)} == set(MODULES)
    rooms = ("core", "hf", "traces")
    listing = {name for name in imports(CHECKOUT / "cascade_lab") if room(name) in rooms and name.count(".") == 1}
    listing = {name.split(".")[1] for name in listing if hasattr(importlib.import_module(name), "__all__")}
    assert listing == {name for name in MODULES if "." not in name}


def test_a_type_checker_sees_what_is_there():
    for package in (cascade_lab, evidence):
        seen = seen_by_a_checker(Path(package.__file__).read_text(encoding="utf-8"))
        names = {name for name in seen if not name.startswith("_")} | ({"__version__"} & set(seen))
        assert names == set(dir(package)), package.__name__
        assert "__getattr__" not in seen, "with it in sight, a checker takes any name"
        for name, origin in seen.items():
            if origin:
                home = importlib.import_module(origin[0])
                assert getattr(package, name) is getattr(home, origin[1]), name
    assert (CHECKOUT / "cascade_lab" / "py.typed").is_file()
    assert list((CHECKOUT / "cascade_lab").rglob("*.pyi")) == []


def test_a_name_that_a_checker_does_not_see_is_noticed():
    source = "from typing import TYPE_CHECKING\nfrom a import b, c\nfrom d import e as e\n__all__ = ['b']\n"
    source += "if TYPE_CHECKING:\n    from f import g as g, h\nelse:\n    def __getattr__(name): ...\n"
    assert seen_by_a_checker(source) == {"b": ("a", "b"), "e": ("d", "e"), "__all__": None, "g": ("f", "g")}
    assert "__getattr__" in seen_by_a_checker("def __getattr__(name): ...")


def test_modules_are_loaded_when_asked_for():
    code = """
import sys
import cascade_lab as cl

def loaded():
    return {name for name in sys.modules if name.startswith("cascade_lab.")}

first = loaded()
from cascade_lab import *
assert loaded() == first, loaded() - first
print(*sorted(name.partition(".")[2] for name in first if name.count(".") == 1))
late = [name for name in dir(cl) if name not in vars(cl)]
print(*late)
for name in late:
    module = getattr(cl, name)
    assert module is sys.modules[f"cascade_lab.{name}"] is getattr(cl, name), name
assert not {"cascade_lab.evidence.reads", "matplotlib", "transformers"} & set(sys.modules)
assert cl.evidence.reads.record_loads
assert callable(cl.attention) and callable(cl.ledger)
for holder, name in ((cl, "nothing"), (cl, "pictures"), (cl.evidence, "tiles")):
    try:
        getattr(holder, name)
    except AttributeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CHECKOUT, check=False)
    assert done.returncode == 0, done.stderr
    first, late, *errors = done.stdout.splitlines()
    assert not {"evidence", "distributed", "sharding", "traces", "rules", "pictures", "files"} & set(first.split())
    assert set(late.split()) == {"distributed", "evidence", "hf", "rules", "sharding", "traces"}
    assert errors == [
        "module 'cascade_lab' has no attribute 'nothing'",
        "module 'cascade_lab' has no attribute 'pictures'",
        "module 'cascade_lab.evidence' has no attribute 'tiles'",
    ]


def test_notebooks_and_documents_use_public_names_alone():
    found = {}
    for path in sorted((CHECKOUT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        found[path.name] = undeclared(source, NAMES)
    for name in ("README.md", "CONTRIBUTING.md", "REUSE.md", "SHEET.md"):
        blocks = re.findall(r"```python\n(.*?)```", (CHECKOUT / name).read_text(encoding="utf-8"), re.DOTALL)
        found[name] = set().union(*(undeclared(block, NAMES) for block in blocks))
    assert {name: names for name, names in found.items() if names} == {}
    assert len(found) >= 8


def test_a_use_of_plumbing_is_noticed():
    source = (
        "import cascade_lab as cl\nfrom cascade_lab import sharding\nfrom cascade_lab.levels import ledger, _hidden\n"
    )
    source += "cl.ops.run; sharding.Shard; sharding._check_rank; cl.levels"
    assert undeclared(source, NAMES) == {
        "cascade_lab.levels._hidden",
        "cascade_lab.ops",
        "cascade_lab.sharding._check_rank",
    }


def test_every_module_is_documented_or_plumbing():
    """A new module of the core is either in the reference, or has no `__all__` and is named here."""
    core = {
        info.name for info in pkgutil.iter_modules(cascade_lab.__path__) if room(f"cascade_lab.{info.name}") == "core"
    }
    public = {name for name in core if not name.startswith("_")}
    assert public - set(MODULES) == {"backends", "ops"}
