"""`make` sets the environment up when it is missing or stale, and does nothing twice."""

import os
import re
import shlex
import shutil
import subprocess
import venv
import zipfile
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
        call.errors = done.stderr
        return done.returncode, calls.read_text().replace(str(call.place), "PLACE").splitlines()

    call.place = place
    return call


INSTALL = "-m pip install --no-user --target  --root / --prefix PLACE/.venv --quiet --disable-pip-version-check"
INSTALL += " -c constraints.txt -e .[dev]"


def test_the_environment_is_made_once(make):
    assert make("venv") == (0, ["venv", INSTALL])
    assert make("venv") == (0, [])
    os.utime(make.place / "pyproject.toml")
    assert make("venv") == (0, [])
    assert make("run") == (0, ["-m cascade_lab run"])
    assert make() == (0, ["-m cascade_lab run"])


def test_a_cpu_build_of_torch_is_installed_first_on_demand(make):
    """F20 of tests/known_faults.md; uv knows where the CPU builds are, and pip then finds torch installed."""
    uv = "-m uv pip install --torch-backend cpu --quiet -c constraints.txt torch"
    assert make("venv", "TORCH=cpu") == (0, ["venv", INSTALL.replace("-e .[dev]", "uv"), uv, INSTALL])
    assert make("run", "TORCH=cpu") == (0, ["-m cascade_lab run"])
    assert make("run", TORCH="cpu") == (0, ["-m cascade_lab run"])
    (make.place / ".venv" / "state").unlink()
    assert make("venv", TORCH="cpu") == (0, ["venv", INSTALL])


def test_a_target_is_named_on_the_command_line_of_make_alone(make):
    make("venv")
    assert make("run", "TARGET=sm_90") == (0, ["-m cascade_lab run --target sm_90"])
    assert make("run", TARGET="x86_64") == (0, ["-m cascade_lab run"])
    assert make("lab") == (0, ["-m jupyterlab notebooks"])
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


def test_a_dollar_in_the_path_is_not_expanded(make):
    """F27 of tests/known_faults.md; the variable has a value, which must not turn up."""
    make.place = make.place.rename(make.place.with_name("a $name $(name) `name` b"))
    assert make("run", name="other") == (0, ["venv", INSTALL, "-m cascade_lab run"])
    assert make("run", name="other") == (0, ["-m cascade_lab run"])
    state = (make.place / ".venv" / "state").read_text()
    assert state.splitlines()[0].endswith("/a $name $(name) `name` b")


@pytest.mark.parametrize("version", ["3.9.2", "3.10.14", "2.7.18", "(3.9", "4.0"])
def test_an_older_python_is_named_before_anything_is_made(version, make):
    """F16 of tests/known_faults.md."""
    assert make("run", VERSION=version) == (2, [])
    assert not (make.place / ".venv").exists()
    python = make.place.parent / "python"
    line = f"Python 3.11 or newer is needed, {python} is {version}: make PYTHON=python3.12 takes another"
    assert line in make.errors.splitlines()


@pytest.mark.parametrize("version", ["3.11.0", "3.12.7", "3.14.0rc1", "3.20.1"])
def test_a_newer_python_is_taken(version, make):
    assert make("venv", VERSION=version) == (0, ["venv", INSTALL])


@pytest.mark.parametrize("section", ["install", "global"])
@pytest.mark.parametrize("by", ["variables", "configuration"])
def test_a_reader_s_own_pip_settings_do_not_redirect_the_installation(section, by, tmp_path):
    """F17 of tests/known_faults.md: real pip, which installs a package of nothing without an index."""
    wheel = tmp_path / "nothing-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nothing.py", "")
        archive.writestr("nothing-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: nothing\nVersion: 1\n")
        archive.writestr("nothing-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("nothing-1.dist-info/RECORD", "")
    venv.create(tmp_path / "venv", with_pip=True)
    settings = {
        "user": "true",
        "target": str(tmp_path / "t"),
        "prefix": str(tmp_path / "p"),
        "root": str(tmp_path / "r"),
    }
    makefile = (CHECKOUT / "Makefile").read_text()
    command = re.search(r"^PIP = \$\(PY\) (-m pip install .*?) --quiet", makefile, re.MULTILINE)[1]
    for name, value in settings.items():
        configuration = tmp_path / "pip.conf"
        configuration.write_text(f"[{section}]\n{name} = {value}\n" if by == "configuration" else "")
        variables = {f"PIP_{name.upper()}": value} if by == "variables" else {}
        environment = os.environ | {"PIP_CONFIG_FILE": str(configuration), "PIP_NO_INDEX": "1"} | variables
        arguments = [*shlex.split(command.replace("$(VENV)", "venv")), "--force-reinstall", str(wheel)]
        arguments = [each.replace("$$PWD", str(tmp_path)) for each in arguments]
        python = tmp_path / "venv" / "bin" / "python"
        subprocess.run([python, *arguments], env=environment, check=True, timeout=HANGS_S, capture_output=True)
        (found,) = (tmp_path / "venv").rglob("nothing.py")
        subprocess.run([python, "-m", "pip", "uninstall", "-y", "nothing"], check=True, capture_output=True)
        assert not found.exists()
        assert not any((tmp_path / each).exists() for each in "tpr")
