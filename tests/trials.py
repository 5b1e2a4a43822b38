"""Trials of a changed package: the cells that one notebook claim rests on, or one unit test, in a process of its own.

One process imports everything but the package itself; each trial is a fork of it that puts a copy of the package first
on its path. So a trial costs what its cells cost, and no trial can see another one's package.

Which cells a claim rests on is read from the names that cells set and use, so some ways of writing a cell break it: a
loop that does not run is taken to run; an object changed through another name (`alias = x; alias.append(1)`), or by a
function that it was given to, is taken to be unchanged; a name made by `exec`, `globals()` or an import of `*` is not
seen. Such a trial ends in a NameError or in a claim that fails on the package as it is, which
`test_a_claim_holds_on_the_unchanged_package` tells.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[1]
CLAIM = "application/vnd.cascade-lab.claim+json"
# what package, notebooks and tests import, torch on first use included
IMPORTS = ("torch", "torch._dynamo", "torch.testing", "triton.language", "triton.runtime.interpreter")
IMPORTS += ("matplotlib.pyplot", "IPython.display", "pytest")
SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# seconds after which a trial has hung; the slowest takes a few
LIMIT = 300


def cells_of_claim(notebook: Path, claim_id: str) -> list[str]:
    """Sources of the code cells that the claim rests on, its own last.

    The claim's cell is the one whose committed output carries it. A cell before it is taken if it sets or changes a
    name that is still wanted. Whoever names a function of the notebook reads what the function reads.
    """
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    made = [{out["data"][CLAIM]["id"] for out in cell["outputs"] if CLAIM in out.get("data", {})} for cell in cells]
    (target,) = (i for i, ids in enumerate(made) if claim_id in ids)
    sources = ["".join(cell["source"]) for cell in cells[: target + 1]]
    flows = [[_names(statement) for statement in _in_order(ast.parse(source).body)] for source in sources]
    functions: dict[str, set[str]] = {}
    imported: set[str] = set()
    for names in (names for flow in flows for names in flow):
        imported |= names.imports
        if names.function:
            functions.setdefault(names.function, set()).update(names.called)
    kept, wanted = [], set()
    for i in reversed(range(target + 1)):
        reads, sets, changes = set(), set(), set()
        for names in flows[i]:
            reads |= _with_functions(names.reads, functions) - sets
            sets |= names.sets
            changes |= names.changes - imported
        if i == target or (sets | changes) & wanted:
            kept.append(sources[i])
            wanted = wanted - sets | reads
    return kept[::-1]


@dataclass(frozen=True)
class _Names:
    """Names of one statement: read, set, changed in place, imported; a function it defines, and what that reads."""

    reads: set[str]
    sets: set[str]
    changes: set[str]
    imports: set[str]
    function: str
    called: set[str]


def _names(statement: ast.stmt) -> _Names:
    reads, sets = _used(statement)
    function, called = "", set()
    if isinstance(statement, ast.FunctionDef):
        function, called = statement.name, reads - sets
        reads, sets = set(), {function}
    elif isinstance(statement, ast.AugAssign):
        reads |= sets
    return _Names(
        reads=reads,
        sets=sets,
        changes={name.id for node in ast.walk(statement) if (name := _changed(node)) is not None},
        imports=sets if isinstance(statement, (ast.Import, ast.ImportFrom)) else set(),
        function=function,
        called=called,
    )


def _used(node: ast.AST) -> tuple[set[str], set[str]]:
    """Names that a node reads and that it sets; what functions and comprehensions inside it set stays in them."""
    reads, sets = set(), set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Name):
            (reads if isinstance(child.ctx, ast.Load) else sets).add(child.id)
        elif isinstance(child, ast.arg):
            sets.add(child.arg)
        elif isinstance(child, ast.alias):
            sets.add(child.asname or child.name.split(".")[0])
        else:
            inner_reads, inner_sets = _used(child)
            if isinstance(child, SCOPES):
                inner_reads -= inner_sets
                inner_sets = {child.name} if isinstance(child, ast.FunctionDef) else set()
            reads |= inner_reads
            sets |= inner_sets
    return reads, sets


def _with_functions(names: set[str], functions: Mapping[str, set[str]]) -> set[str]:
    """The names, and those that functions among them read, and functions among these."""
    found, new = set(), set(names)
    while new:
        found |= new
        new = set().union(*(functions.get(name, set()) for name in new)) - found
    return found


def _in_order(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Simple statements in the order of the text, a loop's target set before its body; a loop is taken to run."""
    for statement in statements:
        if isinstance(statement, ast.For):
            yield ast.Assign([statement.target], statement.iter)
        elif isinstance(statement, (ast.If, ast.While)):
            yield ast.Expr(statement.test)
        elif isinstance(statement, ast.With):
            for item in statement.items:
                yield ast.Assign([] if item.optional_vars is None else [item.optional_vars], item.context_expr)
        elif not isinstance(statement, ast.Try):
            yield statement
            continue
        for body in ("body", "handlers", "orelse", "finalbody"):
            for part in getattr(statement, body, []):
                yield from _in_order(part.body if isinstance(part, ast.ExceptHandler) else [part])


def _changed(node: ast.AST) -> ast.Name | None:
    """The name behind `name[...] = `, `name.x = `, or a method called for what it does to its object."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        node = node.value.func.value
    elif not (isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store)):
        return None
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node if isinstance(node, ast.Name) else None


class Outcome(NamedTuple):
    """How a trial ended.

    Attributes:
        done: ids of the claims that held, or of the tests that passed.
        error: what ended it, the message of the claim's or the test's error; empty when nothing did.
    """

    done: tuple[str, ...]
    error: str


class Trials:
    """The warm process, seen from outside; a context manager."""

    def __enter__(self) -> Trials:
        on_cpu = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        # a fork keeps the thread that called it and no other, so libraries may start none
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MPLBACKEND": "agg"}
        plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | on_cpu | alone | plain,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate(timeout=LIMIT)

    def cells(self, package: Path, folder: Path, cells: Sequence[str]) -> Outcome:
        """Run cells in `folder` on the package whose parent is `package`, until one raises."""
        return self._ask(package=str(package), folder=str(folder), cells=list(cells))

    def tests(self, package: Path, nodes: Sequence[str]) -> Outcome:
        """Run tests of this checkout on the package whose parent is `package`, until one fails."""
        return self._ask(package=str(package), folder=str(CHECKOUT), nodes=list(nodes))

    def _ask(self, **job: object) -> Outcome:
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        done, error = json.loads(self._process.stdout.readline())
        return Outcome(tuple(done), error)


def _run_cells(cells: list[str]) -> Outcome:
    judged, error = io.StringIO(), ""
    with contextlib.redirect_stdout(judged):
        names = {"__name__": "__main__"}
        try:
            for number, source in enumerate(cells):
                exec(compile(source, f"<cell {number}>", "exec"), names)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    # outside a notebook a claim prints its one line
    lines = re.finditer(r"^(\S+) holds: ", judged.getvalue(), re.MULTILINE)
    return Outcome(tuple(line[1] for line in lines), error)


def _run_tests(nodes: list[str]) -> Outcome:
    import pytest

    passed, failed = [], []

    class Watch:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.longreprtext)
            elif report.when == "call" and report.passed:
                passed.append(report.nodeid)

    options = ["-x", "-q", "-p", "no:cacheprovider", "--assert", "plain", "--rootdir", str(CHECKOUT)]
    code = pytest.main([*nodes, *options], [Watch()])
    if code == pytest.ExitCode.TESTS_FAILED:
        return Outcome(tuple(passed), f"failed: {failed[0]}")
    return Outcome(tuple(passed), "" if code == pytest.ExitCode.OK else f"pytest ended with {code}")


def _try(job: dict) -> Outcome:
    sys.path.insert(0, job["package"])
    os.chdir(job["folder"])
    import torch

    import cascade_lab

    torch.set_num_threads(1)
    # it is in memory now, so whatever is put first on the path, every `import cascade_lab...` is this copy
    assert Path(cascade_lab.__file__).parents[1] == Path(job["package"]), cascade_lab.__file__
    return _run_cells(job["cells"]) if "cells" in job else _run_tests(job["nodes"])


def _fork(job: dict) -> Outcome:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        signal.alarm(LIMIT)
        try:
            outcome = _try(job)
        except BaseException:
            outcome = Outcome((), f"not tried: {traceback.format_exc()}")
        with os.fdopen(write, "w") as pipe:
            json.dump(outcome, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Outcome((), f"not tried: ended by signal {os.WTERMSIG(status)} within {LIMIT} s")
    return Outcome(*json.loads(answer))


def _serve() -> None:
    """Answer jobs from stdin until it closes."""
    sys.path[:] = [place for place in sys.path if Path(place).resolve() not in (CHECKOUT, CHECKOUT / "tests")]
    for name in IMPORTS:
        importlib.import_module(name)
    assert "cascade_lab" not in sys.modules
    # what is here already is no garbage of a trial
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(_fork(json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve()
