"""`make` sets the environment up when it is missing or stale, and does nothing twice."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.limits import HANGS_S

CHECKOUT = Path(__file__).resolve().parents[2]
# Stands for every Python: notes its calls, makes a copy of itself as .venv/bin/python, installs nothing.
STAND_IN = """#!/bin/sh
case "$*" in
*" venv "*) echo venv >> "$CALLS"; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
*"pip install"*) echo "$*" >> "$CALLS"; exit "${PIP_STATUS:-0}" ;;
"-c "|*"pip --version"*) ;;
*"import os, sys"*) echo "${VERSION:-3.11.0} base $PWD" ;;
*) echo "$*" >> "$CALLS" ;;
esac
"""


@pytest.fixture
def make(tmp_path):
    place = tmp_path / "a checkout"
    place.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(CHECKOUT / name, place)
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def call(*targets, **environment):
        calls.write_text("")
        variables = os.environ | {"CALLS": str(calls), "MAKEFLAGS": ""} | environment
        command = ["make", "-C", str(call.place), *targets, f"PYTHON={python}"]
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S)
        return done.returncode, calls.read_text().splitlines()

    call.place = place
    return call


INSTALL = "-m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[dev]"


def test_the_environment_is_made_once(make):
    assert make("venv") == (0, ["venv", INSTALL])
    assert make("venv") == (0, [])
    os.utime(make.place / "pyproject.toml")
    assert make("venv") == (0, [])
    assert make("run") == (0, ["-m cascade_lab run"])
    assert make() == (0, ["-m cascade_lab run"])


def test_a_target_is_named_on_the_command_line_of_make_alone(make):
    make("venv")
    assert make("run", "TARGET=sm_90") == (0, ["-m cascade_lab run --target sm_90"])
    assert make("run", TARGET="x86_64") == (0, ["-m cascade_lab run"])
    assert make("modes") == (0, ["-m cascade_lab modes"])
    assert make("compiled", TARGETS="x86_64", SLICE="1/2") == (0, ["-m tools.compile_launches"])
    parts = ("TARGETS=sm_80,sm_90", "SLICE=2/8")
    assert make("compiled", *parts) == (0, ["-m tools.compile_launches --targets sm_80,sm_90 --slice 2/8"])


def test_other_declarations_update_it_and_another_interpreter_replaces_it(make):
    make("venv")
    with (make.place / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert make("venv") == (0, [INSTALL])
    assert make("venv", VERSION="3.12.0") == (0, ["venv", INSTALL])
    (make.place / ".venv" / "bin" / "python").unlink()
    assert make("venv", VERSION="3.12.0") == (0, ["venv", INSTALL])
    assert make("venv", VERSION="3.12.0") == (0, [])


def test_a_failed_installation_fails_and_is_tried_again(make):
    status, calls = make("run", PIP_STATUS="1")
    assert (status, calls) == (2, ["venv", INSTALL])
    status, calls = make("run")
    assert (status, calls[-2:]) == (0, [INSTALL, "-m cascade_lab run"])


LINT = ["-m ruff check .", "-m ruff format --check ."]


@pytest.mark.parametrize(
    ("target", "tests", "check"),
    [
        ("test", r"-m pytest tests .* -m not long", "check --no-run"),
        ("test-all", "-m pytest tests (?!.*long).*", "check"),
    ],
)
def test_each_tier_runs_every_check_in_order_and_stops_at_the_first_failure(target, tests, check, make):
    make("venv")
    status, calls = make(target)
    assert status == 0
    lint, (suite, form, outputs) = calls[:2], calls[2:]
    assert lint == LINT
    assert re.fullmatch(tests, suite)
    assert form == f"-m cascade_lab {check}"
    assert outputs.startswith("-m pytest notebooks --nbval --nbval-current-env")
    failing = STAND_IN.replace('*) echo "$*" >> "$CALLS" ;;', '*) echo "$*" >> "$CALLS"; exit 1 ;;')
    (make.place / ".venv" / "bin" / "python").write_text(failing)
    status, calls = make(target)
    assert status != 0
    assert [call[:13] for call in calls] == ["-m ruff check"]


def test_a_path_that_setuptools_cannot_use_is_named_before_anything_is_made(make):
    make.place = make.place.rename(make.place.with_name("a {checkout}"))
    done = make("run")
    assert done == (2, [])
    assert not (make.place / ".venv").exists()
