"""Type checkers see what a user calls: a program without faults passes, and each mistake is told on its line."""

import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cascade_lab.book.layout import PUBLIC

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
PROGRAM, MISTAKES = HERE / "user_script.py", HERE / "user_typos.py"
MODULES = [name for names in PUBLIC.values() for name in names]


def mypy(folder):
    """Lines with errors in each file, by mypy in strict mode."""
    command = ["-m", "mypy", "--strict", "--follow-imports=silent", f"--cache-dir={folder}", "--no-color-output"]
    done = python(*command, "--config-file=", str(PROGRAM), str(MISTAKES))
    assert done.returncode in (0, 1), done.stderr or done.stdout
    found = re.findall(r"^(.+?):(\d+): error: ", done.stdout, re.MULTILINE)
    return {path: {int(line) for name, line in found if Path(name).name == path.name} for path in (PROGRAM, MISTAKES)}


def pyright(folder):
    """The same by pyright, as basedpyright brings it: with Node and all files in its wheels, so without network."""
    settings = {
        "include": [str(PROGRAM), str(MISTAKES)],
        "extraPaths": [str(CHECKOUT)],
        "typeCheckingMode": "standard",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    done = python("-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder))
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 2
    found = [
        (x["file"], x["range"]["start"]["line"] + 1) for x in report["generalDiagnostics"] if x["severity"] == "error"
    ]
    return {path: {line for name, line in found if Path(name).name == path.name} for path in (PROGRAM, MISTAKES)}


def python(*words):
    environment = os.environ | {"MYPYPATH": str(CHECKOUT), "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("checker", "package"),
    [(pyright, "basedpyright"), pytest.param(mypy, "mypy", marks=pytest.mark.long)],
    ids=["pyright", "mypy"],
)
def test_a_program_is_clean_and_every_mistake_is_told_on_its_line(checker, package, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    found = checker(tmp_path)
    lines = MISTAKES.read_text(encoding="utf-8").splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong: " in line}
    assert len(wrong) > 15
    assert found == {PROGRAM: set(), MISTAKES: wrong}


def test_the_program_runs():
    done = python(str(PROGRAM))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["naive", "cascade", "fused", "True", "20"]
    assert "'reused': 2048.0" in lines[3]
    assert 60 <= len(PROGRAM.read_text(encoding="utf-8").splitlines()) <= 70


def callables(name):
    """What users call of a module, with the methods and properties of its classes."""
    here = importlib.import_module(f"cascade_lab.{name}")
    for one in here.__all__:
        thing = getattr(here, one)
        if inspect.isroutine(thing):
            yield one, thing
        elif inspect.isclass(thing):
            for part, value in vars(thing).items():
                value = (
                    getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)
                )
                if inspect.isfunction(value) and value.__module__.startswith("cascade_lab") and part[0] != "_":
                    yield f"{one}.{part}", value
            if "__init__" in vars(thing) and thing.__init__.__module__.startswith("cascade_lab"):
                yield f"{one}.__init__", thing.__init__


@pytest.mark.parametrize("name", MODULES)
def test_every_argument_and_every_answer_has_a_type(name):
    bare = []
    for one, call in callables(name):
        signature = inspect.signature(call)
        names = [x.name for x in signature.parameters.values() if x.annotation is inspect.Parameter.empty]
        bare += [f"{one}: {x}" for x in names if x not in ("self", "cls", "ctx")]
        if signature.return_annotation is inspect.Signature.empty and not one.endswith("__init__"):
            bare.append(one)
    assert bare == []


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("basedpyright") is None, reason="basedpyright is not installed")
def test_every_name_of_a_public_module_has_a_declared_type():
    """As pyright judges a typed package from outside: no annotation is missing, so nothing is left to be inferred."""
    command = ["-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    report = json.loads(python(*command, "--verifytypes", "cascade_lab", "--ignoreexternal").stdout)
    symbols = report["typeCompleteness"]["symbols"]
    public = tuple(f"cascade_lab.{name}." for name in MODULES)
    ours = [one for one in symbols if one["name"].startswith(public)]
    assert len(ours) > 300
    told = [(one["name"], each["message"]) for one in ours for each in one["diagnostics"]]
    assert [(name, message) for name, message in told if "missing" in message] == []
