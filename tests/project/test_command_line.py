"""The command line: help a newcomer can work from, and an exit status that can be trusted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cascade_lab
from cascade_lab import cli
from tests.limits import HANGS_S

CHECKOUT = Path(cascade_lab.__file__).resolve().parents[1]
COMMANDS = ("run", "refresh", "check", "claims", "edition", "bench", "trace")
NOTEBOOK = {
    "cells": [
        {
            "cell_type": "code",
            "id": "a",
            "metadata": {"tags": ["parameters"]},
            "source": "rows: int = 3\ncausal: bool = True",
            "outputs": [],
            "execution_count": None,
        }
    ],
    "metadata": {},
    "nbformat": 4,
    "nbformat_minor": 5,
}


@pytest.fixture
def place(tmp_path):
    """A folder with one notebook and the claims of an earlier run."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_small.ipynb").write_text(json.dumps(NOTEBOOK))
    (tmp_path / "build").mkdir()
    record = {
        "id": "1.1",
        "notebook": "01_small",
        "statement": "rows are read once " * 8,
        "instrument": "counted",
        "expected": 4096,
        "measured": 4096,
        "verdict": "holds",
    }
    (tmp_path / "build" / "claims.json").write_text(json.dumps([record]))
    return tmp_path


def run_module(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-m", "cascade_lab", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)} | environment,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )


def test_no_command_is_wrong_usage_and_shows_every_command(capsys):
    assert cli.main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"    {command} " in shown for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    assert f"usage: cascade-lab {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "02"], "'02' is no notebook; the notebooks are 01_small"),
        (["run", "-p", "row", "4"], "unknown parameter 'row'; its parameters are rows: int = 3, causal: bool = True"),
        (["run", "-p", "rows", "4.5"], "parameter 'rows': expected int, given '4.5'"),
        (["run", "-p", "causal", "maybe"], "parameter 'causal': expected bool, given 'maybe'"),
        (["run", "-p", "rows", "1", "-p", "rows", "2"], "'rows' is given twice"),
        (["run", "--notebooks", "nowhere"], "no such folder: nowhere"),
        (["check", "03"], "'03' is no notebook"),
        (["refresh", "03"], "'03' is no notebook"),
    ],
)
def test_wrong_usage_is_status_2_with_one_message_and_no_effect(arguments, message, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    before = sorted((path, path.stat().st_mtime_ns) for path in place.rglob("*"))
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"cascade-lab {arguments[0]}: ")
    assert message in error
    assert sorted((path, path.stat().st_mtime_ns) for path in place.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments", [["walk"], ["run", "-p", "rows"], ["run", "--timeout", "0"], ["run", "--timeout", "x"]]
)
def test_unknown_commands_and_options_are_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: cascade-lab" in capsys.readouterr().err


def test_claims_prints_one_line_per_claim_when_piped(place):
    found = run_module("claims", cwd=place / "notebooks", COLUMNS="60")
    header, rule, claim = found.stdout.splitlines()
    assert header.split() == ["id", "statement", "instrument", "expected", "measured", "verdict"]
    assert set(rule) == {"-", " "}
    assert claim.split()[-3:] == ["4096", "4096", "holds"]
    assert (found.returncode, found.stderr) == (0, "")


def test_claims_says_when_there_are_none_and_fails_on_failed_ones(place, capsys):
    path = place / "build" / "claims.json"
    options = ["claims", "--output", str(place / "build")]
    path.write_text(path.read_text().replace('"holds"', '"fails"'))
    assert cli.main(options) == 1
    assert capsys.readouterr().out.split()[-1] == "fails"
    path.write_text("[{}]")
    assert cli.main(options) == 2
    assert "is damaged" in capsys.readouterr().err
    path.unlink()
    assert cli.main(options) == 1
    assert "cascade-lab run" in capsys.readouterr().err


WITHOUT_NOTEBOOK_TOOLS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from cascade_lab.cli import main
for arguments in {commands!r}:
    try:
        status = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    print("status", status, *arguments)
"""
COMMANDS_WITHOUT = {"--version": 0, "claims": 0, "bench --help": 0, "run --help": 0, "run": 1}


def test_without_notebook_tools_only_what_needs_them_fails(place):
    names = ("papermill", "nbformat", "nbclient", "nbconvert", "IPython", "ipykernel", "jupyter_client", "matplotlib")
    commands = [line.split() for line in COMMANDS_WITHOUT]
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_NOTEBOOK_TOOLS.format(names=names, commands=commands)],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert found.returncode == 0, found.stderr
    ended = [line for line in found.stdout.splitlines() if line.startswith("status ")]
    assert ended == [f"status {status} {line}" for line, status in COMMANDS_WITHOUT.items()]
    assert found.stderr.count("\n") == 1
    assert found.stderr.startswith("cascade-lab run: ")
    assert "pip install 'cascade-lab[notebooks]'" in found.stderr
