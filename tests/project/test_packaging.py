"""What a user installs: the built wheel on its own, the declared versions, and the files that create environments."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import cascade_lab

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
ALONE = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}


def run(*command, cwd, **environment):
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=ALONE | environment, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source") / "cascade_lab"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    shutil.copytree(CHECKOUT / "cascade_lab", source / "cascade_lab", ignore=shutil.ignore_patterns("__pycache__"))
    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", source, cwd=source.parent)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Python of a fresh environment that holds the wheel; dependencies are lent by this environment."""
    place = tmp_path_factory.mktemp("fresh")
    venv.create(place, with_pip=False, symlinks=os.name == "posix")
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel]
    done = run(*pip, cwd=place)
    assert done.returncode == 0, done.stderr
    paths = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place)
    lenders = [path for path in sys.path if path.rstrip("/").endswith("-packages")]
    # A plain path line lends packages without processing this environment's own .pth files, so the checkout stays out.
    (Path(paths.stdout.strip()) / "lent.pth").write_text("\n".join(lenders) + "\n")
    return python


def test_the_wheel_holds_every_file_of_the_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (CHECKOUT / "cascade_lab").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {"__init__.py", "py.typed", "page.html.j2", "explorer.js"} <= {path.name for path in files}
    assert {path.relative_to(CHECKOUT).as_posix() for path in files} <= names
    assert {name.split("/")[0] for name in names} == {"cascade_lab", f"cascade_lab-{PROJECT['version']}.dist-info"}


def test_the_installed_wheel_imports_merges_and_answers_commands(installed, tmp_path):
    code = """if True:
        import json, math, pathlib, torch, cascade_lab
        o = torch.tensor([[[0.0]], [[2.0]]])
        lse = torch.tensor([[0.0], [0.0]])
        o, lse = cascade_lab.merge_state(o, lse, o + 2, lse)
        print(json.dumps([cascade_lab.__file__, o.flatten().tolist(), (lse - math.log(2)).abs().max().item() < 1e-6]))
    """
    found = run(installed, "-c", code, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    where, merged, shifted = json.loads(found.stdout)
    assert Path(where).is_relative_to(installed.parents[1])
    assert (merged, shifted) == ([1.0, 3.0], True)
    command = run(installed.parent / "cascade-lab", "--help", cwd=tmp_path)
    assert command.returncode == 0
    assert "usage: cascade-lab" in command.stdout
    empty = run(installed.parent / "cascade-lab", "claims", "--output", tmp_path, cwd=tmp_path)
    assert (empty.returncode, empty.stdout) == (1, "")
    assert "no claims" in empty.stderr
    module = run(installed, "-m", "cascade_lab", "--version", cwd=tmp_path)
    assert module.stdout == f"cascade-lab {PROJECT['version']}\n"


def test_the_package_imports_and_computes_without_triton_and_without_gpu(tmp_path):
    """K43 (tests/known_faults.md): importing needs neither, and the torch backend works without both."""
    code = """if True:
        import sys
        sys.modules["triton"] = None
        import torch, cascade_lab
        assert cascade_lab.runtime.triton_mode() == "absent"
        zero = torch.zeros(1, 1)
        print(cascade_lab.merge_state(torch.ones(1, 1, 1), zero, torch.zeros(1, 1, 1), zero).o.item())
        try:
            cascade_lab.merge_state(torch.ones(1, 1, 1), zero, torch.zeros(1, 1, 1), zero, backend="triton")
        except RuntimeError as error:
            print(error)
    """
    hidden = {"PYTHONPATH": str(CHECKOUT), "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    found = run(sys.executable, "-c", code, cwd=tmp_path, **hidden)
    assert found.returncode == 0, found.stderr
    result, message = found.stdout.splitlines()
    assert result == "0.5"
    assert "triton" in message
    assert found.stderr == ""


def test_importing_the_package_imports_nothing_of_the_notebook_tools(tmp_path):
    code = "import sys, cascade_lab, cascade_lab.cli; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    found = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(CHECKOUT))
    assert found.returncode == 0, found.stderr
    heavy = {"triton", "matplotlib", "papermill", "nbformat", "nbconvert", "nbclient", "IPython", "jupyter_client"}
    assert not heavy & set(found.stdout.split())


def pins():
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    return {Requirement(line).name.lower(): Requirement(line) for line in lines if line and not line.startswith("#")}


def test_every_direct_dependency_is_pinned_inside_its_range():
    declared = [*PROJECT["dependencies"], *sum(PROJECT["optional-dependencies"].values(), [])]
    for requirement in map(Requirement, declared):
        if requirement.name == PROJECT["name"]:
            continue
        pin = pins()[requirement.name.lower()]
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert requirement.specifier.contains(exact.version), requirement


def imported(path):
    """Names of the packages that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def test_whatever_is_imported_is_declared():
    """What only comes along with a dependency may be gone with its next version."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    declared = {Requirement(line).name.lower() for each in lists for line in each}
    peers = {"flash_attn", "flash_attn_interface", "flashinfer", "vllm"}  # measured against where a machine has them
    files = [path for folder in ("cascade_lab", "tests", "tools") for path in (CHECKOUT / folder).rglob("*.py")]
    names = {name for path in files for name in imported(path)} - set(sys.stdlib_module_names) - peers
    owners = packages_distributions()
    strangers = {
        name for name in names if not {x.lower().replace("_", "-") for x in owners.get(name, [name])} & declared
    }
    assert {"torch", "bs4", "zmq"} <= names
    assert strangers <= {"cascade_lab", "tests", "tools"}


def test_the_versions_that_run_are_the_tested_set():
    """K46, K74: Triton and NumPy, pytest and nbval run as the pairs that were tested together."""
    names = ["torch", "numpy", "papermill", "nbval", "pytest", *(["triton"] if sys.platform == "linux" else [])]
    ours = {name: version(name).split("+")[0] for name in names}
    assert {name: str(pins()[name].specifier) for name in ours} == {name: f"=={each}" for name, each in ours.items()}


def test_version_is_stated_once_for_package_and_project():
    assert cascade_lab.__version__ == PROJECT["version"]


def pip_section():
    """The pip lines of environment.yml, as conda hands them to pip."""
    text = (CHECKOUT / "environment.yml").read_text()
    section = re.search(r"^  - pip:\n((?:      - .*\n)+)", text, re.MULTILINE)
    return [line.removeprefix("      - ") for line in section[1].splitlines()]


@pytest.mark.long
def test_the_pip_section_of_the_conda_environment_resolves():
    """conda writes the section into a requirements file beside environment.yml and lets pip install it."""
    lines = pip_section()
    assert lines == ["-c constraints.txt", "-e .[dev]"]
    requirements = CHECKOUT / f".pip-section-{os.getpid()}.txt"
    requirements.write_text("\n".join(lines) + "\n")
    try:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-r", requirements.name]
        found = run(*command, cwd=CHECKOUT)
    finally:
        requirements.unlink()
    if found.returncode and re.search(r"NewConnectionError|Temporary failure in name|ReadTimeout", found.stderr):
        pytest.skip("no package registry can be reached from here")
    assert found.returncode == 0, found.stderr


def test_ci_runs_make_test_all():
    """F20 of tests/known_faults.md: where it runs elsewhere, with the small build of torch."""
    workflow = (CHECKOUT / ".github" / "workflows" / "ci.yml").read_text()
    assert 'python: ["3.11", "3.12"]' in workflow
    tested = [name for name in PROJECT["classifiers"] if name.startswith("Programming Language :: Python :: 3.")]
    assert tested == [f"Programming Language :: Python :: {version}" for version in ("3.11", "3.12")]
    commands = ["make test-all TORCH=cpu", "make site browser-test"]
    assert re.findall(r"run: (make .*)$", workflow, re.MULTILINE) == commands
    assert "path: build/site/\n" in workflow
    assert re.findall(r"make .*$", (CHECKOUT / ".ci" / "run").read_text(), re.MULTILINE) == ["make test-all"]
    assert os.access(CHECKOUT / ".ci" / "run", os.X_OK)


@pytest.mark.long
def test_kernel_tests_are_collected_without_the_notebook_tools():
    """A machine with a GPU may have torch, Triton, NumPy, matplotlib and pytest alone."""
    code = """if True:
        import importlib.machinery, sys
        tools = "hypothesis nbformat papermill nbclient nbconvert jupyter_client IPython bs4 yaml".split()
        class Hiding(importlib.machinery.PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                return None if name.partition(".")[0] in tools else super().find_spec(name, path, target)
        sys.meta_path = [Hiding if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
        import pytest
        sys.exit(pytest.main(["-m", "gpu", "tests", "--collect-only", "-q", "-p", "no:cacheprovider"]))
    """
    found = run(sys.executable, "-c", code, cwd=CHECKOUT, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "test_gpu.py" in found.stdout


@pytest.mark.parametrize("settings", [["core.autocrlf=true"], ["core.autocrlf=true", "core.eol=crlf"]])
def test_line_ends_are_the_same_in_every_checkout(settings, tmp_path):
    """F15 of tests/known_faults.md: cloned as git does on Windows, and a picture that holds both line ends."""
    source = tmp_path / "source"
    source.mkdir()
    kept = {
        "run": b"#!/bin/sh\nset -eu\n",
        "a.ipynb": b"{\n}\n",
        "a.svg": b"<svg>\n</svg>\n",
        "a.png": b"\x89PNG\r\n\n\r",
    }
    for name, content in kept.items():
        (source / name).write_bytes(content)
    shutil.copy(CHECKOUT / ".gitattributes", source)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *(part for each in settings for part in ("-c", each))]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], cwd=source, check=True, capture_output=True)
    subprocess.run([*git, "clone", "-q", "source", "copy"], cwd=tmp_path, check=True, capture_output=True)
    assert {name: (tmp_path / "copy" / name).read_bytes() for name in kept} == kept
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout
    texts = [CHECKOUT / name for name in tracked.split("\0") if name and not name.endswith((".png", ".pdf", ".gz"))]
    assert [path.name for path in texts if b"\r\n" in path.read_bytes()] == []
