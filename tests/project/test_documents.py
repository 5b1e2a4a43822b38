"""Every code block of the documents runs as it is shown, and what they say of versions is so."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

import cascade_lab
from cascade_lab import cli
from cascade_lab.book import runner
from cascade_lab.book.execution import load
from cascade_lab.book.parameters import bind, read_parameters

CHECKOUT = Path(__file__).resolve().parents[2]
# translations show the same blocks, which tests/book/test_editions.py holds
DOCUMENTS = sorted(path for path in CHECKOUT.glob("*.md") if not path.stem.endswith(".zh"))
BLOCKS = [
    (path.name, language, text)
    for path in DOCUMENTS
    for language, text in re.findall(
        r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
]


def lines(program):
    """The commands of all shell blocks that begin with `program`, in order."""
    shown = [
        line.split(" #")[0].split() for _, language, text in BLOCKS if language == "bash" for line in text.splitlines()
    ]
    return [words for words in shown if words and words[0] == program]


def test_every_block_is_of_a_kind_that_is_tested():
    assert {language for _, language, _ in BLOCKS} == {"python", "bash", "text"}  # the text is the map, see test_layout
    shown = sum(len(text.splitlines()) for _, language, text in BLOCKS if language == "bash")
    assert len(lines("make")) + len(lines("cascade-lab")) == shown > 5


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, language, text in BLOCKS if language == "python"])
def test_python_runs_as_shown(name, text):
    exec(compile(text, name, "exec"), {"__name__": "shown"})


@pytest.mark.parametrize("words", lines("make"), ids=" ".join)
def test_make_targets_end_in_a_command(words):
    # what the targets call is run by this suite, or is this suite; here only the wiring is looked at
    plan = subprocess.run(["make", "--dry-run", *words[1:]], cwd=CHECKOUT, capture_output=True, text=True)
    assert plan.returncode == 0, plan.stderr
    commands = [line for line in plan.stdout.splitlines() if " -m " in line]
    assert re.search(r"-m (cascade_lab|pytest|jupyterlab)\b", commands[-1])


@pytest.mark.parametrize("words", lines("cascade-lab"), ids=" ".join)
def test_commands_name_options_notebooks_and_parameters_that_exist(words):
    options = cli._parser().parse_args(words[1:])
    assert options.command == words[1]
    for path in runner.select(CHECKOUT / "notebooks", getattr(options, "names", [])):
        given = dict(getattr(options, "parameter", []))
        assert set(bind(read_parameters(load(path)), given, path.name)) == set(given)


@pytest.mark.long
def test_commands_run_in_the_order_shown(tmp_path):
    for name in ("cascade_lab", "notebooks", "figures"):
        shutil.copytree(CHECKOUT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    requests = [(1100, [1, 2, 3]), (1600, [1, 2, 4, 5]), (700, [1, 6])]
    rows = [
        {"timestamp": i, "input_length": n, "output_length": 1, "hash_ids": ids} for i, (n, ids) in enumerate(requests)
    ]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "cascade_lab"]
    installed = Path(sysconfig.get_path("scripts"), "cascade-lab")
    assert len(lines("cascade-lab")) > 3
    for words in lines("cascade-lab"):
        done = subprocess.run(
            [*command, *words[1:]],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    assert (tmp_path / "hit.svg").exists()
    if installed.exists():  # the name that the documents use leads to the same program
        assert "cascade_lab" in installed.read_text()


def test_changelog_and_citation_speak_of_this_version():
    (version,) = re.findall(r'^version = "(.+)"', (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version == cascade_lab.__version__
    newest, day = re.search(
        r"^## \[(.+?)\] - (\d{4}-\d\d-\d\d)$", (CHECKOUT / "CHANGELOG.md").read_text(), re.MULTILINE
    ).groups()
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version"} <= set(citation)
    assert [newest, day] == [citation["version"], str(citation["date-released"])]
    assert newest == version
    licence = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["license"]
    assert citation["license"] == licence == "Apache-2.0"
    assert "Apache License" in (CHECKOUT / "LICENSE").read_text()


def test_contributing_names_targets_and_files_that_exist():
    text = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    makefile = (CHECKOUT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for path in re.findall(r"`((?:tests|figures|backends|evidence)/[\w./]+)`", text):
        places = (CHECKOUT / path, CHECKOUT / "cascade_lab" / path)
        assert any(place.exists() for place in places), path
