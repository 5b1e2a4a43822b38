"""A claim that holds for anything is none: every claim of every notebook is judged again with other measurements."""

import json
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from cascade_lab.book.execution import load
from cascade_lab.evidence import claims
from cascade_lab.evidence.claims import AtLeast, AtMost, gather
from tests.claim_sweep import faults, moves

CHECKOUT = Path(__file__).resolve().parents[2]
PATHS = sorted((CHECKOUT / "notebooks").glob("*.ipynb"))


def found(**tried):
    return list(faults(claims, tried))


@pytest.mark.parametrize(
    "tried",
    [
        {"measured": 12, "expected": 12},
        {"measured": 0, "expected": 0},
        {"measured": (1, (0, 2)), "expected": [1, [0, 2]]},
        {"measured": Fraction(3, 4), "expected": Fraction(3, 4)},
        {"measured": True, "expected": True},
        {"measured": ("a", "b"), "expected": ("a", "b")},
        {"measured": 1.047, "expected": 1.0473, "tol": 5e-4, "instrument": "derived"},
        {"measured": 2e-7, "expected": AtMost(1e-5), "magnitude": 1e-6},
        {"measured": (2e-7, 0.0), "expected": (0, 0), "tol": 1e-5, "magnitude": 1e-6},
        {"measured": 2e-7, "expected": AtMost(1e-3), "magnitude": 1e-6, "reason": "measured elsewhere"},
        {"measured": 0.31, "expected": AtLeast(0.005)},
        {"measured": None, "expected": AtLeast(2), "instrument": "timed"},
    ],
)
def test_a_claim_that_something_can_miss_passes(tried):
    assert found(**tried) == []


@pytest.mark.parametrize(
    ("tried", "fault"),
    [
        ({"measured": 1.0, "expected": 1, "tol": 0.2, "instrument": "derived"}, "moved by +10 %"),
        ({"measured": 1.0, "expected": 1.06, "tol": 0.07, "instrument": "derived"}, "moved by +10 %"),
        ({"measured": 1.0, "expected": 0.94, "tol": 0.07, "instrument": "derived"}, "moved by -10 %"),
        ({"measured": 0.01, "expected": 0.001, "tol": 0.02, "instrument": "derived"}, "moved by its sign"),
        ({"measured": (3.0, 0.1), "expected": (3, 0.1), "tol": 0.02, "instrument": "derived"}, "with element 1 moved"),
        ({"measured": (3, 0), "expected": (3, 0), "tol": 1, "instrument": "derived"}, "moved by one"),
        ({"measured": 2e-8, "expected": AtMost(1e-5), "magnitude": 1e-7}, "more than 100 times apart"),
        ({"measured": 0.0, "expected": AtMost(1e-5), "magnitude": 1e-7}, "more than 100 times apart"),
        ({"measured": -1.0, "expected": AtMost(1e-5), "instrument": "derived"}, "more than 100 times apart"),
        ({"measured": 1e-16, "expected": 0, "tol": 1e-12, "magnitude": 1e-15}, "more than 100 times apart"),
        ({"measured": 0.6, "expected": AtLeast(0.005)}, "more than 100 times apart"),
        ({"measured": 6e-7, "expected": AtMost(1e-5)}, "elsewhere maybe below 1e-6"),
        ({"measured": 6e-7, "expected": AtMost(1e-5), "magnitude": 1e-6}, "name a magnitude"),
        ({"measured": 2 + 6e-7, "expected": 2, "tol": 1e-5}, "elsewhere maybe off by less than 1e-6"),
        ({"measured": 0.0315, "expected": AtLeast(0.005)}, "name a magnitude"),
    ],
)
def test_a_claim_that_nothing_can_miss_is_found(tried, fault):
    messages = found(**tried)
    assert any(fault in message for message in messages), messages


def test_every_kind_of_value_is_moved_to_others():
    for value in (0, 3, 0.5, Fraction(1, 3), True, "a", float("inf")):
        others = [other for _, other in moves(value)]
        assert others
        assert all(other != value for other in others)


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_no_claim_of_a_notebook_holds_for_anything(path):
    pytest.importorskip("triton")
    alone = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "MPLBACKEND": "agg"}
    place = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(CHECKOUT / "tests" / "claim_sweep.py"), str(path)]
    run = subprocess.run(command, env=os.environ | alone | {"PYTHONPATH": place}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    swept = json.loads(run.stdout)
    assert {each["id"] for each in swept} == {claim.id for claim in gather(load(path))}
    wrong = {each["id"]: each["faults"] for each in swept if each["faults"]}
    assert wrong == {}


# Claims whose answer is no number: a list of names, a refusal.
NO_NUMBER = {"3.43", "3.44", "3.50", "3.54", "4.44", "4.45", "8.1", "8.14", "8.15"}


def test_a_reader_sees_what_was_measured():
    """A number stands in what a claim shows as measured, or the claim is one of few that have none."""
    judged = [claim for path in PATHS for claim in gather(load(path))]
    vague = {c.id for c in judged if c.measured is not None and not re.search(r"\d", c.measured)}
    assert vague == NO_NUMBER
    assert [c.id for c in judged if c.measured in ("within the bound", "beyond the bound", "equal")] == []
