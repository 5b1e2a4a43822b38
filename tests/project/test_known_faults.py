"""The catalogue of known faults names tests that exist and say so, and the tests name rows that exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CATALOGUE = (TESTS / "known_faults.md").read_text(encoding="utf-8")
FAULTS = {
    f"K{n}"
    for n in (
        *(1, 3, 5, 6, 8, 9, 11, 14, 16, 17, 19, 20, 22, 23, 24, 25, 28, 29, 30, 32, 33, 35, 36, 37, 38),
        *(40, 42, 43, 44, 45, 46, 47, 49, 51, 53, 54, 55, 57, 58, 61, 62, 64, 66, 67, 69, 70),
        *(71, 72, 73, 74, 77, 79, 80, 81, 82, 84, 85, 86, 90, 91, 92, 93, 94),
    )
}
FOUND_OUTSIDE = {f"F{n}" for n in range(1, 29)}
REQUIREMENTS = {f"R{n}" for n in range(1, 16)}


def docstrings(source: str, file: str) -> dict[str, str]:
    """`file::test` to the docstring of each test function of a module, "" without one."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {f"{file}::{f.name}": ast.get_docstring(f) or "" for f in functions if f.name.startswith("test_")}


def all_docstrings() -> dict[str, str]:
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        found |= docstrings(path.read_text(encoding="utf-8"), path.relative_to(TESTS).as_posix())
    return found


def rows(catalogue: str, first: str) -> list[list[str]]:
    """Cells of the table rows whose id begins with the letter `first`."""
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in catalogue.splitlines()
        if re.match(rf"\| *{first}\d+ *\|", line)
    ]


def problems(
    catalogue: str, tests: dict[str, str], faults=FAULTS, outside=FOUND_OUTSIDE, requirements=REQUIREMENTS
) -> list[str]:
    """What is wrong with a catalogue, given the docstrings of the tests that there are."""
    found = []
    for letter, expected, width in (("K", faults, 4), ("F", outside, 4), ("R", requirements, 3)):
        table = rows(catalogue, letter)
        ids = [row[0] for row in table]
        found += [f"{each}: no row" for each in sorted(expected - set(ids))]
        found += [f"{each}: more than one row" for each in sorted(set(ids)) if ids.count(each) > 1]
        found += [f"{each}: no such id" for each in sorted(set(ids) - expected)]
        for row in table:
            if len(row) != width or not all(row):
                found.append(f"{row[0]}: expected {width} cells with text in each, given {row}")
                continue
            names = re.findall(r"`([^`]+)`", row[-1])
            rest = re.sub(r"`[^`]+`", "", row[-1]).strip()
            reason = re.fullmatch(r"cannot occur: (\w+\W+){4,}\w*\W*", rest)
            if letter != "R" and not names and not reason:
                found.append(f"{row[0]}: neither a test nor a reason")
            elif (names or letter == "R") and (rest or not names):
                found.append(f"{row[0]}: expected tests and nothing else, given {row[-1]!r}")
            for name in names:
                if name not in tests:
                    found.append(f"{row[0]}: no such test: {name}")
                elif letter != "R" and not re.search(rf"\b{row[0]}\b", tests[name]):
                    found.append(f"{row[0]}: {name} does not name it")
    listed = {row[0] for letter in "KF" for row in rows(catalogue, letter)}
    for name, text in tests.items():
        for each in set(re.findall(r"\b[KF]\d+\b", text)):
            if each not in listed:
                found.append(f"{each}: named by {name}, and has no row")
    return found


def test_the_catalogue_and_the_tests_agree():
    assert problems(CATALOGUE, all_docstrings()) == []
    assert len(rows(CATALOGUE, "K")) == len(FAULTS) == 63
    assert len(rows(CATALOGUE, "F")) == len(FOUND_OUTSIDE)
    assert len(rows(CATALOGUE, "R")) == 15


def first_mention(source: str) -> str:
    """The first docstring of a test module, its own or a test's, that names a row; "" if none does."""
    tree = ast.parse(source)
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    named = (ast.get_docstring(node) or "" for node in (tree, *tests))
    return next((text for text in named if re.search(r"\b[KF]\d+\b", text)), "")


def test_a_file_that_names_a_row_says_first_where_rows_are():
    texts = {path.name: first_mention(path.read_text(encoding="utf-8")) for path in sorted(TESTS.rglob("test_*.py"))}
    assert [name for name, text in texts.items() if text and "tests/known_faults.md" not in text] == []
    assert sum(map(bool, texts.values())) > 10
    source = '"""A module."""\n\n\ndef test_a():\n    """K1: yes."""\n\n\ndef test_b():\n    """K2."""\n'
    assert first_mention(source) == "K1: yes."
    assert first_mention(source.replace("K", "Q")) == ""


GOOD = """
| id | fault | right | tests |
|---|---|---|---|
| K1 | a | b | `test_a.py::test_one` `test_a.py::test_two` |
| K22 | a | b | cannot occur: nothing here divides by anything |

| id | fault | right | tests |
|---|---|---|---|
| F3 | a | b | `test_a.py::test_two` |

| id | requirement | tests |
|---|---|---|
| R1 | a | `sub/test_b.py::test_three` |
"""
KNOWN = {"test_a.py::test_one": "K1: so.", "test_a.py::test_two": "Half of K1; F3.", "sub/test_b.py::test_three": ""}


def small(catalogue=GOOD, tests=KNOWN):
    return problems(catalogue, tests, {"K1", "K22"}, {"F3"}, {"R1"})


def test_a_good_catalogue_has_no_problem():
    assert small() == []


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("| K22 |", "| K2 |", "K22: no row"),
        ("| K22 |", "| K2 |", "K2: no such id"),
        ("| K22 |", "| K1 |", "K1: more than one row"),
        ("| F3 |", "| F4 |", "F3: no row"),
        ("| F3 |", "| F4 |", "F4: test_a.py::test_two does not name it"),
        ("| R1 | a |", "| R2 | a |", "R1: no row"),
        ("cannot occur: nothing here divides by anything", "cannot occur: no", "K22: neither a test nor a reason"),
        ("cannot occur: nothing here divides by anything", "covered elsewhere", "K22: neither a test nor a reason"),
        ("cannot occur: nothing here divides by anything", "", "K22: expected 4 cells with text in each"),
        ("| K1 | a | b |", "| K1 | a |  |", "K1: expected 4 cells with text in each"),
        ("`test_a.py::test_one`", "`test_a.py::test_on`", "K1: no such test: test_a.py::test_on"),
        ("`test_a.py::test_one`", "`sub/test_b.py::test_three`", "K1: sub/test_b.py::test_three does not name it"),
        ("`test_a.py::test_one`", "mostly `test_a.py::test_one`", "K1: expected tests and nothing else"),
        ("`sub/test_b.py::test_three`", "`test_b.py::test_three`", "R1: no such test: test_b.py::test_three"),
        ("`sub/test_b.py::test_three`", "by review", "R1: expected tests and nothing else"),
    ],
)
def test_a_broken_catalogue_is_noticed(before, after, problem):
    assert GOOD.count(before) == 1
    assert any(each.startswith(problem) for each in small(GOOD.replace(before, after)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("K2: a row that nobody wrote.", "K2: named by test_a.py::test_one, and has no row"),
        ("K11 is not K1.", "K11: named by"),
        ("K1 and F5.", "F5: named by test_a.py::test_one, and has no row"),
        ("Says nothing.", "K1: test_a.py::test_one does not name it"),
        ("K11.", "K1: test_a.py::test_one does not name it"),
    ],
)
def test_a_docstring_that_names_another_row_is_noticed(text, problem):
    assert any(each.startswith(problem) for each in small(tests=KNOWN | {"test_a.py::test_one": text}))


def test_tests_are_found_with_their_docstrings_and_helpers_are_not():
    source = 'def test_a():\n    """K1: yes."""\n\n\ndef helper():\n    """K2"""\n\n\ndef test_b(x):\n    return 1\n'
    assert docstrings(source, "test_x.py") == {"test_x.py::test_a": "K1: yes.", "test_x.py::test_b": ""}
    found = all_docstrings()
    assert found["core/test_states.py::test_two_empty_states_are_empty"].startswith("K1: ")
    assert any(name.startswith("properties/") for name in found)
