"""The cases are as many as stated, all of them run, the same ones every time, and a failure says how to repeat it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import budget
from tests.properties.budget import STATED_CASES, cases

THIS = Path(__file__)
HERE = THIS.parent
CHECKOUT = HERE.parents[1]


def stated() -> dict[str, int]:
    """Property to its number of cases, over all files of this folder."""
    found = {}
    for path in sorted(HERE.glob("test_*.py")):
        module = importlib.import_module(f"tests.properties.{path.stem}")
        for name, test in vars(module).items():
            if name.startswith("test_") and hasattr(test, "stated_cases") and test.__module__ == module.__name__:
                found[f"{path.stem}.{name}"] = test.stated_cases
    return found


def test_the_stated_number_of_cases_is_the_sum_of_all_properties():
    counts = stated()
    assert sum(counts.values()) == STATED_CASES >= 2000
    # and none is missed: every file but this one has nothing else
    written = [re.findall(r"^@cases\(", path.read_text(), re.M) for path in HERE.glob("test_*.py") if path != THIS]
    assert len(counts) == sum(map(len, written))


def test_a_property_fails_when_fewer_cases_ran_than_it_states(monkeypatch):
    monkeypatch.setattr(budget, "EXAMPLES", STATED_CASES)  # as in `make test`, whatever `make fuzz` was told
    tried = []

    @cases(40)
    @given(st.integers(0, 4))
    def small(n):
        tried.append(n)

    with pytest.raises(AssertionError, match="only 5 of 40 cases could be drawn"):
        small()
    assert sorted(tried) == list(range(5))

    @cases(40)
    @given(st.integers())
    def large(n):
        tried.append(n)

    tried.clear()
    large()
    large()
    assert len(tried) >= 80
    assert tried[: len(tried) // 2] == tried[len(tried) // 2 :]


SUITE = """
from hypothesis import given, strategies as st
from tests.properties.budget import cases

@cases(100)
@given(st.integers(0, 10**6))
def test_true(n):
    with open("drawn", "a") as file:
        file.write(f"{n}\\n")

@cases(100)
@given(st.integers(0, 10**6))
def test_false(n):
    assert n < 300_000
"""


def run_suite(place: Path, **environment: str) -> tuple[str, list[int]]:
    (place / "test_suite.py").write_text(SUITE)
    (place / "conftest.py").write_text("from tests.properties.conftest import pytest_runtest_makereport\n")
    (place / "drawn").unlink(missing_ok=True)
    inherited = {name: x for name, x in os.environ.items() if not name.startswith(("FUZZ_", "PYTEST_"))}
    plugins = ["-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "test_suite.py"]
    done = subprocess.run(
        command,
        cwd=place,
        env=inherited | {"PYTHONPATH": str(CHECKOUT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, [int(n) for n in (place / "drawn").read_text().split()]


def test_a_seed_fixes_the_cases_and_a_failure_prints_what_repeats_it(tmp_path):
    first, drawn = run_suite(tmp_path, FUZZ_SEED="7", FUZZ_EXAMPLES=str(2 * STATED_CASES))
    assert f"make fuzz SEED=7 EXAMPLES={2 * STATED_CASES} TESTS=test_suite.py::test_false" in first
    assert "n=300" in first
    assert len(drawn) == 200
    _, same = run_suite(tmp_path, FUZZ_SEED="7", FUZZ_EXAMPLES=str(2 * STATED_CASES))
    assert same == drawn
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "conftest.py",
        "drawn",
        "test_suite.py",
    ]


def test_the_fuzz_target_prints_the_seed_it_takes(tmp_path):
    """With a stand-in for Python: a given seed is passed on, without one a new one is drawn each time."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "seed=$FUZZ_SEED examples=$FUZZ_EXAMPLES $*"\n')
    python.chmod(0o755)

    def fuzz(*variables: str) -> list[str]:
        command = ["make", "-s", "-o", "venv", "-C", str(CHECKOUT), "fuzz", f"PY={python}", *variables]
        environment = {k: v for k, v in os.environ.items() if k not in ("SEED", "EXAMPLES", "TESTS", "MAKEFLAGS")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    shown, call = fuzz("SEED=5", "EXAMPLES=100", "TESTS=tests/properties/test_merge.py")
    assert shown == "make fuzz SEED=5 EXAMPLES=100 TESTS=tests/properties/test_merge.py"
    assert call.startswith("seed=5 examples=100 -m pytest tests/properties/test_merge.py ")
    seeds = set()
    for _ in range(3):
        shown, call = fuzz()
        taken = re.fullmatch(r"make fuzz SEED=(\d+) EXAMPLES=(\d+) TESTS=tests/properties", shown)
        assert call.startswith(f"seed={taken[1]} examples={taken[2]} -m pytest tests/properties ")
        assert int(taken[2]) >= 10 * STATED_CASES
        seeds.add(taken[1])
    assert len(seeds) > 1
