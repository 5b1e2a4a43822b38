"""The folded solutions in the notebooks are true: their code runs by itself and asserts what the text says."""

import re
from pathlib import Path

import pytest

from cascade_lab.book.execution import load

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def solutions(path):
    text = "\n".join(cell.source for cell in load(path).cells if cell.cell_type == "markdown")
    return re.findall(r"<details>\s*<summary>Solution</summary>\n\n(.*?)\n\n</details>", text, re.DOTALL)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_has_three_exercises_whose_solutions_run(path):
    assert len(solutions(path)) == 3
    for solution in solutions(path):
        blocks = re.findall(r"```python\n(.*?)```", solution, re.DOTALL)
        assert blocks
        for block in blocks:
            assert "assert " in block
            exec(compile(block, path.name, "exec"), {})
