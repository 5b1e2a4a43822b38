"""The check can fail: a wrong sign in a kernel makes notebook 01's claims fail, and the run with them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
NOTEBOOK = "01_lse_splitting"
KERNELS = "cascade_lab/backends/triton"
MUTATIONS = {
    "the merge adds the maximum instead of subtracting it": (
        f"{KERNELS}/merge.py",
        "w_b = tl.exp(b_lseb - shift)",
        "w_b = tl.exp(b_lseb + shift)",
    ),
    "the attention pass never rescales what it has summed": (
        f"{KERNELS}/attention.py",
        "keep = tl.exp2(b_max - shift)",
        "keep = tl.exp2(tl.zeros_like(b_max))",
    ),
}


def mutate(path, before, after):
    """Replace the one occurrence; a pattern that is gone or repeated would test nothing."""
    source = path.read_text()
    assert source.count(before) == 1, f"{path.name}: {source.count(before)} occurrences of {before!r}"
    path.write_text(source.replace(before, after))


def run_notebook(place):
    """Run notebook 01 on the copy of the package in `place`."""
    command = [sys.executable, "-m", "cascade_lab", "run", NOTEBOOK]
    command += ["--notebooks", str(CHECKOUT / "notebooks"), "--output", str(place / "build")]
    on_cpu = {"PYTHONPATH": str(place), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=place, env=os.environ | on_cpu, capture_output=True, text=True, timeout=600)


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(CHECKOUT / "cascade_lab", tmp_path / "cascade_lab", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_unchanged_copy_passes(copied):
    found = run_notebook(copied)
    assert (found.returncode, found.stderr) == (0, "")
    assert (copied / "build" / f"{NOTEBOOK}.ipynb").exists()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_fails_a_claim_and_the_run(name, copied):
    path, before, after = MUTATIONS[name]
    mutate(copied / path, before, after)
    found = run_notebook(copied)
    assert found.returncode == 1
    assert re.match(rf"{NOTEBOOK}\.ipynb, cell \d+: AssertionError: claim \S+ fails: ", found.stderr), found.stderr
    assert not (copied / "build" / f"{NOTEBOOK}.ipynb").exists()
    assert (copied / "build" / "failed" / f"{NOTEBOOK}.ipynb").exists()


def test_a_pattern_that_is_gone_is_an_error(tmp_path):
    (tmp_path / "kernel.py").write_text("a = 1\na = 1\n")
    for pattern in ("b = 1", "a = 1"):
        with pytest.raises(AssertionError, match="occurrences"):
            mutate(tmp_path / "kernel.py", pattern, "")
