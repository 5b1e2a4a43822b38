"""Every notebook asks three things of its reader, judges the answers, and has a solution that is true.

An exercise is a question, an empty function in a cell that ends in `check(...)`, and a folded solution. The solution's
code runs by itself, defines that function, and asserts what the text says.
"""

import ast
import re
from pathlib import Path

import pytest

from cascade_lab.book.execution import load
from tests.notebook_cases import names_set, names_taken

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
SOLUTION = re.compile(r"<details>\s*<summary>Solution</summary>\n\n(.*?)\n\n</details>", re.DOTALL)


def solutions(path):
    text = "\n".join(cell.source for cell in load(path).cells if cell.cell_type == "markdown")
    return SOLUTION.findall(text)


def asked(path):
    """Every cell with an empty function, with the text cell below it."""
    cells = load(path).cells
    pairs = zip(cells, cells[1:], strict=False)
    return [(cell, below) for cell, below in pairs if cell.cell_type == "code" and empty_function(cell.source)]


def empty_function(source):
    """The function that a cell leaves to its reader: its body is a docstring and `...`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("my_"):
            _, dots = node.body
            assert ast.get_docstring(node)
            assert dots.value.value is ...
            return node
    return None


def solved(text):
    """What the code of a solution defines, run by itself."""
    (solution,) = SOLUTION.findall(text)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", solution, re.DOTALL):
        exec(compile(block, "solution", "exec"), names)
    return names


def run_exercise(path, cell, answer):
    """Run an exercise's cell with an answer, after those cells alone whose names it needs; None leaves it empty."""
    sources = [each.source for each in load(path).cells if each.cell_type == "code"]
    needed, wanted = [], names_taken(cell.source)
    for source in reversed(sources[: sources.index(cell.source)]):
        if names_set(ast.parse(source)) & wanted:
            needed.insert(0, source)
            wanted |= names_taken(source)
    names = {"__name__": "__main__"}
    for source in needed:
        exec(compile(source, path.name, "exec"), names)
    tree = ast.parse(cell.source)
    name = empty_function(cell.source).name
    if answer is not None:
        tree.body = [node for node in tree.body if getattr(node, "name", None) != name]
        names[name] = answer
    exec(compile(tree, path.name, "exec"), names)


def other(value):
    """An answer of the same kind that is plainly not the right one."""
    if isinstance(value, (list, tuple)):
        return [other(value[0]), *value[1:]]
    if isinstance(value, bool):
        return not value
    return value + "?" if isinstance(value, str) else 2 * value + 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_has_three_exercises_whose_solutions_run(path):
    assert len(solutions(path)) == 3
    for solution in solutions(path):
        blocks = re.findall(r"```python\n(.*?)```", solution, re.DOTALL)
        assert blocks
        for block in blocks:
            assert "assert " in block
            exec(compile(block, path.name, "exec"), {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_exercise_has_an_empty_function_which_its_solution_fills(path):
    assert len(asked(path)) == 3
    for cell, below in asked(path):
        function = empty_function(cell.source)
        assert re.search(rf"^check\(\s*{function.name},", cell.source, re.MULTILINE)
        (output,) = cell.outputs
        line = f"unanswered: {function.name} returns nothing yet. Write its body, and run this cell again."
        assert output.data["text/plain"] == line
        solution = solved(below.source)[function.name].__code__
        arguments = [each.arg for each in function.args.args]
        assert list(solution.co_varnames[: solution.co_argcount]) == arguments


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_solutions_are_right_and_plainly_other_answers_are_wrong(path, capsys):
    for cell, below in asked(path):
        name = empty_function(cell.source).name
        solution = solved(below.source)[name]

        def said(answer, cell=cell):
            run_exercise(path, cell, answer)
            return capsys.readouterr().out.splitlines()[-1]

        solution.__name__ = name
        assert re.fullmatch(rf"right: {name}, in (\d+) of \1 cases\.", said(solution))
        wrong = {
            "another value": lambda *given, solution=solution: other(solution(*given)),
            "another kind": lambda *given: {"a": "dict"},
            "an exception": lambda *given: {}["no key"],
        }
        for answer in wrong.values():
            line = said(answer)
            assert line.startswith("wrong: <lambda>(")
            assert re.search(r"\. Hint: .{12,}$", line)
        assert "raised KeyError: 'no key'" in line
        for answer in (None, lambda *given: None, lambda *given: ...):
            assert said(answer).startswith("unanswered: ")
