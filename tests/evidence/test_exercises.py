"""A reader's answer is judged as a claim is, and nothing that a reader can write stops the notebook."""

import linecache
from fractions import Fraction

import numpy as np
import pytest
import torch

from cascade_lab.evidence import claims
from cascade_lab.evidence.exercises import check

JUDGE = {"cases": [(8, 4), (5, 0)], "expected": [26, 15], "hint": "row t sees t keys"}


def said(capsys, answer, **judge):
    check(answer, **(JUDGE | judge))
    (line,) = capsys.readouterr().out.splitlines()
    return line


def pairs_left(n, hit):
    return sum(range(hit + 1, n + 1))


@pytest.mark.parametrize("nothing", [None, ...], ids=["no body", "dots"])
def test_a_function_that_returns_nothing_is_unanswered(nothing, capsys):
    def my_pairs(n, hit):
        return nothing

    line = "unanswered: my_pairs returns nothing yet. Write its body, and run this cell again."
    assert said(capsys, my_pairs) == line


@pytest.mark.parametrize(
    ("value", "expected", "tol"),
    [
        (26, 26, 0),
        (26.0, 26, 0),
        (Fraction(9, 2), 4.5, 0),
        (0.1 + 0.2, Fraction(3, 10), 1e-12),
        ([1, 2.5], (1, 2.5000001), 1e-6),
        (torch.tensor(0.5), 0.5, 0),
        (np.float32(0.25), 0.25, 0),
        (np.bool_(True), True, 0),
        ("late", "late", 0),
        (((1, 2), 3), [[1, 2], 3], 0),
    ],
)
def test_what_a_claim_takes_for_equal_is_right(value, expected, tol, capsys):
    line = said(capsys, lambda: value, cases=[()], expected=[expected], tol=tol)
    assert line == "right: <lambda>, in 1 of 1 cases."


@pytest.mark.parametrize(
    ("value", "expected", "fault"),
    [
        (25, 26, "25"),
        (float("nan"), 26, "nan"),
        ((3, 5), (3, 4), "(3, 5)"),
        (False, True, "False"),
        ("early", "late", "early"),
        (True, 1, "True, where a number is expected"),
        (1, True, "1, where True or False is expected"),
        ("26", 26, "26, where a number is expected"),
        (3, (3, 4), "3, where (a number, a number) is expected"),
        ((3,), (3, 4), "(3,), where (a number, a number) is expected"),
        ((3, None), (3, 4), "(3, None), where (a number, a number) is expected"),
        ({3}, "late", "{3}, where a text is expected"),
        (torch.arange(3), 3, "tensor([0, 1, 2]), where a number is expected"),
    ],
)
def test_what_a_claim_would_reject_is_wrong_and_comes_with_the_hint(value, expected, fault, capsys):
    line = said(capsys, lambda n: value, cases=[(7,)], expected=[expected])
    assert line == f"wrong: <lambda>(7) returned {fault}. Hint: row t sees t keys"


def test_every_case_is_judged_and_the_first_wrong_one_is_named(capsys):
    assert said(capsys, pairs_left) == "right: pairs_left, in 2 of 2 cases."
    line = said(capsys, lambda n, hit: 26)
    assert line == "wrong: <lambda>(5, 0) returned 26. Hint: row t sees t keys"
    line = said(capsys, lambda n, hit: 26 if hit else None)
    assert line == "wrong: <lambda>(5, 0) returned None, where a number is expected. Hint: row t sees t keys"


def test_a_tolerance_is_the_bound_of_a_claim(capsys):
    judge = {"cases": [()], "expected": [0.5]}
    assert said(capsys, lambda: 0.5 + 2**-10, tol=2**-10, **judge).startswith("right")
    assert said(capsys, lambda: 0.5 + 2**-9, tol=2**-10, **judge).startswith("wrong")


def test_what_a_function_raises_is_named_with_the_readers_own_line(capsys):
    source = "def my_pairs(n, hit):\n    return half(n) // hit\n\n\ndef half(n):\n    return n / (n - 5)\n"
    linecache.cache["cell"] = (len(source), None, source.splitlines(True), "cell")
    names = {}
    exec(compile(source, "cell", "exec"), names)
    line = "wrong: my_pairs(5, 0) raised ZeroDivisionError: division by zero, in the line `return n / (n - 5)`. "
    assert said(capsys, names["my_pairs"]) == line + "Hint: row t sees t keys"
    line = said(capsys, names["my_pairs"], cases=[(8,)], expected=[26])
    assert line.startswith("wrong: my_pairs(8) raised TypeError: my_pairs() missing 1 required positional argument")


def test_a_reader_who_stops_a_cell_stops_it():
    def endless(n, hit):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(endless, **JUDGE)


def test_an_exercise_is_no_claim(monkeypatch, capsys):
    monkeypatch.setattr(claims, "_claims_here", {})
    check(pairs_left, **JUDGE)
    assert claims._claims_here == {}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"cases": [], "expected": []}, ValueError, "cases: expected one or more"),
        ({"expected": [26]}, ValueError, "cases: expected one or more"),
        ({"hint": ""}, ValueError, "hint: expected one line of text, given ''"),
        ({"hint": "a\nb"}, ValueError, "hint: expected one line of text"),
        ({"tol": -1}, ValueError, "tol: expected a number >= 0, given -1"),
        ({"expected": [26, None]}, TypeError, r"expected\[1\]: expected bool, int"),
        ({"answer": 26}, TypeError, "answer: expected a function, given 26"),
    ],
)
def test_a_faulty_exercise_is_refused(changed, error, message):
    with pytest.raises(error, match=f"^{message}"):
        check(**({"answer": pairs_left} | JUDGE | changed))
