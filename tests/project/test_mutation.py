"""The checks can fail: each mutant of the package fails a notebook claim and a unit test, and a claim fails its run."""

import compileall
import functools
import os
import py_compile
import re
import shutil
import subprocess
import sys

import pytest

from tests.mutants import MUTANTS, Mutant
from tests.trials import CHECKOUT, Outcome, Trials, cells_of_claim

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="trials are forks of one process")

NOTEBOOKS = CHECKOUT / "notebooks"
# one mistake for each notebook; the others are left to `make test-all`
QUICK = [
    mutant
    for mutant in MUTANTS
    if mutant.mistake
    in (
        "lse left in base 2",
        "siblings visible in the tree mask",
        "a row does not see itself",
        "band of a window one key narrow",
        "a request hits the blocks it brings",
        "a merge's way back left out of the bytes sent",
        "tokens one place late in their page",
        "reads of every layer counted on the first",
    )
]


def claims(mutants):
    return list(dict.fromkeys(mutant.claim for mutant in mutants))


def nodes(mutants):
    return list(dict.fromkeys(f"tests/{mutant.node}" for mutant in mutants))


each_mutant = pytest.mark.parametrize(
    "mutant",
    [pytest.param(mutant, marks=[] if mutant in QUICK else pytest.mark.long) for mutant in MUTANTS],
    ids=[mutant.mistake for mutant in MUTANTS],
)


@pytest.fixture(scope="module")
def trials():
    with Trials() as warm:
        yield warm


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with the package as it is and its bytecode, which goes by content: a mutated file is compiled anew."""
    folder = tmp_path_factory.mktemp("original")
    shutil.copytree(CHECKOUT / "cascade_lab", folder / "cascade_lab", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return folder


@pytest.fixture(scope="module")
def unchanged(trials, original):
    """Outcome of a claim's cells on the package as it is; claims of one cell share it."""
    outcomes: dict[tuple[str, ...], Outcome] = {}

    def outcome(cells: tuple[str, ...]) -> Outcome:
        if cells not in outcomes:
            outcomes[cells] = trials.cells(original, NOTEBOOKS, cells)
        return outcomes[cells]

    return outcome


@pytest.fixture
def copied(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copied")


@functools.cache
def cells(claim: str) -> tuple[str, ...]:
    (notebook,) = NOTEBOOKS.glob(f"{int(claim.split('.')[0]):02d}_*.ipynb")
    return tuple(cells_of_claim(notebook, claim))


def test_a_mistake_of_every_notebook_is_tried_each_time():
    numbers = [str(int(path.stem[:2])) for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    assert [mutant.claim.partition(".")[0] for mutant in QUICK] == numbers


@pytest.mark.parametrize(
    "claim",
    [pytest.param(claim, marks=[] if claim in claims(QUICK) else pytest.mark.long) for claim in claims(MUTANTS)],
)
def test_a_claim_holds_on_the_unchanged_package(claim, unchanged):
    found = unchanged(cells(claim))
    assert found.error == ""
    assert claim in found.done


@pytest.mark.parametrize("mutants", [QUICK, pytest.param(MUTANTS, marks=pytest.mark.long)], ids=["quick", "all"])
def test_the_unit_tests_pass_on_the_unchanged_package(mutants, trials, original):
    found = trials.tests(original, nodes(mutants))
    assert found.error == ""
    assert sorted(found.done) == sorted(nodes(mutants))


@each_mutant
def test_a_claim_fails_on_the_mutant(mutant: Mutant, copied, trials):
    mutant.apply(copied / "cascade_lab")
    found = trials.cells(copied, NOTEBOOKS, cells(mutant.claim))
    assert found.error.startswith(f"AssertionError: claim {mutant.claim} fails: "), found.error or "no claim fails"


@each_mutant
def test_a_unit_test_fails_on_the_mutant(mutant: Mutant, copied, trials):
    mutant.apply(copied / "cascade_lab")
    found = trials.tests(copied, [f"tests/{mutant.node}"])
    assert found.error.startswith("failed: "), found.error or "the test passes"
    assert found.done == ()


@pytest.mark.long
def test_a_failing_claim_fails_the_run_and_its_output_is_no_result(copied):
    (mutant,) = (mutant for mutant in MUTANTS if mutant.mistake == "a row does not see itself")
    mutant.apply(copied / "cascade_lab")
    command = [sys.executable, "-m", "cascade_lab", "run", "03_prefix_hit_area"]
    command += ["--notebooks", str(NOTEBOOKS), "--output", str(copied / "build")]
    on_cpu = {
        "PYTHONPATH": str(copied),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }
    found = subprocess.run(command, cwd=copied, env=os.environ | on_cpu, capture_output=True, text=True, timeout=600)
    assert found.returncode == 1
    line = r"03_prefix_hit_area\.ipynb, cell \d+: AssertionError: claim 3\.2 fails: "
    assert re.match(line, found.stderr), found.stderr
    assert not (copied / "build" / "03_prefix_hit_area.ipynb").exists()
    assert (copied / "build" / "failed" / "03_prefix_hit_area.ipynb").exists()


def test_a_mutation_that_hits_no_place_or_two_is_an_error(tmp_path):
    (tmp_path / "kernel.py").write_text("a = 1\na = 1\n")
    for before, found in (("b = 1", 0), ("a = 1", 2)):
        mutant = Mutant("", "kernel.py", before, "", "", "")
        with pytest.raises(AssertionError, match=f"expected one occurrence of '{before}', found {found}"):
            mutant.apply(tmp_path)


def test_a_trial_tells_a_failed_test_from_one_that_is_not_there(trials, original):
    found = trials.tests(original, ["tests/core/test_states.py::test_that_nobody_wrote"])
    assert found == Outcome((), "pytest ended with 4")


def test_a_trial_that_hangs_or_dies_is_no_failed_claim(trials, original):
    found = trials.cells(original, NOTEBOOKS, ["import os, signal", "os.kill(os.getpid(), signal.SIGKILL)"])
    assert found == Outcome((), "not tried: ended by signal 9 within 300 s")
