"""A reader goes back: after a notebook has run whole, every cell can be run again, for no name changes its meaning.

A name that a cell takes from another one is set by that one cell alone. So what a cell finds is the same whether the
cells below it have run or not, and running it again gives what it gave.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cascade_lab.book.execution import load
from cascade_lab.evidence.claims import gather
from tests.notebook_cases import names_set, names_taken

CHECKOUT = Path(__file__).resolve().parents[2]
PATHS = sorted((CHECKOUT / "notebooks").glob("*.ipynb"))


def sources(path):
    return [cell.source for cell in load(path).cells if cell.cell_type == "code"]


def changing(cells: list[str]) -> dict[str, list[int]]:
    """Names that some cell takes from the notebook although several cells set them, with the numbers of those cells."""
    set_by: dict[str, list[int]] = {}
    for number, source in enumerate(cells, 1):
        for name in names_set(ast.parse(source)):
            set_by.setdefault(name, []).append(number)
    wanted = set().union(*map(names_taken, cells))
    return {name: numbers for name, numbers in sorted(set_by.items()) if name in wanted and len(numbers) > 1}


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (["n = 1", "m = n", "k = m"], {}),
        (["n = 1", "m = n", "n = 2"], {"n": [1, 3]}),
        (["n = 1", "n += 1", "print(n)"], {"n": [1, 2]}),
        (["n = 1\nprint(n)", "n = 2\nprint(n)"], {}),
        (["def f():\n    return n", "n = 1\nf()", "n = 2"], {"n": [2, 3]}),
        (["n = 1\ndef f():\n    return n", "n = 2", "f()"], {"n": [1, 2]}),
        (["for n in range(3):\n    print(n)", "for n in range(4):\n    print(n)"], {}),
        (["for n in range(3):\n    print(n)", "n = 5", "print(n)"], {"n": [1, 2]}),
        (["x = [n for n in range(3)]", "n = 5", "print(n)"], {}),
        (["with open('a') as f:\n    f.read()", "f = 2", "print(f)"], {"f": [1, 2]}),
        (["f = lambda n: n + a", "a = 1", "a = 2"], {"a": [2, 3]}),
        (["import numpy as n", "import torch as n", "n.ones"], {"n": [1, 2]}),
        (["if True:\n    n = 1\n    print(n)", "n = 2"], {}),
    ],
)
def test_a_name_that_several_cells_set_and_one_takes_is_found(cells, found):
    assert changing(cells) == found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_no_name_changes_its_meaning_between_cells(path):
    """F19 of tests/known_faults.md, for every order of cells."""
    assert changing(sources(path)) == {}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_claims_are_numbered_in_the_order_in_which_they_are_read(path):
    """1.1, 1.2, ... without gaps; claims that share a number have suffixes and stand together."""
    ids = [claim.id for claim in gather(load(path))]
    chapter = str(int(path.stem[:2]))
    numbers = [re.fullmatch(rf"{chapter}\.(\d+)(-[\w-]+)?", id) for id in ids]
    assert all(numbers), ids
    order = [int(match[1]) for match in numbers]
    steps = [after - before for before, after in zip(order, order[1:], strict=False)]
    interleaved = {match[1] for match in numbers if match[2]}
    wrong = [
        id
        for id, step in zip(ids[1:], steps, strict=True)
        if step != 1 and id.split(".")[1].split("-")[0] not in interleaved
    ]
    assert order[0] == 1
    assert sorted(set(order)) == list(range(1, max(order) + 1))
    assert wrong == []


RERUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
from cascade_lab.evidence.claims import _claims_here
cells = json.load(open(sys.argv[1]))
shell = InteractiveShell.instance(colors="nocolor", history_load_length=0)
shell.history_manager.enabled = False
for number in [*range(len(cells)), *reversed(range(len(cells)))]:
    done = shell.run_cell(cells[number])
    if done.error_before_exec or done.error_in_exec:
        sys.exit(f"cell {number + 1}: {done.error_before_exec or done.error_in_exec!r}")
print(json.dumps({id: claim.verdict for id, claim in _claims_here.items()}), file=sys.stderr)
"""


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_cell_can_be_run_again_after_all_have_run(path, tmp_path):
    """F19 of tests/known_faults.md: from the last cell up to the first, so each meets what all below it have left."""
    (tmp_path / "cells.json").write_text(json.dumps(sources(path)))
    here = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    place = {"PYTHONPATH": here, "IPYTHONDIR": str(tmp_path), "MPLBACKEND": "agg"}
    command = [sys.executable, "-c", RERUN, str(tmp_path / "cells.json")]
    done = subprocess.run(command, cwd=path.parent, env=os.environ | place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts = json.loads(done.stderr.strip().splitlines()[-1])
    assert set(verdicts) == {claim.id for claim in gather(load(path))}
    assert set(verdicts.values()) <= {"holds", "not measured here"}
