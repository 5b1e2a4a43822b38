"""The package's kernels, compiled for sm_80 and sm_90 and executed: right, in order, and reading what the ledger says.

Every bug of `seeded_bugs` is noticed by the detector named there. What no check can notice is listed there too, as
survivors, each with its reason: changes that leave every value and every order intact.
"""

import os
import subprocess
import sys

import pytest

from cascade_lab import runtime
from cascade_lab.evidence.compiled import in_child
from cascade_lab.evidence.ptx import EXECUTED, executed
from tests.evidence.seeded_bugs import BUGS, SURVIVORS

pytestmark = pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")
long = pytest.mark.long

# of every detector at least one bug, of every kernel and target too
QUICK = (
    "the wait for copies dropped", "the loop's first barrier dropped", "a barrier passed by some",
    "keys prefetched past the end", "pages prefetched past the end", "a store 8 bytes on",
    "a store's predicate dropped", "two registers of A swapped",
    "products not waited for", "products behind a proxy", "another swizzle in a descriptor",
)  # fmt: skip
BYTES = 64 * 2 * 2 * 2  # of a token: K and V of two heads of 64 in half precision


def program(expression):
    return in_child(expression, module="tests.evidence.ptx_programs")


def wrong(found):
    return {name: said for name, said in found.items() if said not in (None, "no error", True)}


@pytest.mark.parametrize("target", [pytest.param("sm_80", marks=long), *(t for t in EXECUTED if t != "sm_80")])
def test_kernels_of_the_table_equal_the_oracle(target):
    """A sample of tiles, masks, layouts and dtypes, at twice the torch backend's error, with every check on."""
    found = program(f"table({target!r})")
    assert len(found) == 6
    assert wrong(found) == {}


@long
@pytest.mark.parametrize("target", EXECUTED)
def test_every_row_of_the_table_and_odd_shapes_equal_the_oracle(target):
    found = program(f"table({target!r}, whole=True)")
    assert len(found) == 29 + 9 + 4 + 6
    assert wrong(found) == {}


@pytest.mark.parametrize(
    ("target", "names"),
    [("sm_80", ["splits", "empty", "small head"]), *(pytest.param(target, [], marks=long) for target in EXECUTED)],
)
def test_masks_windows_splits_and_layouts_equal_the_oracle(target, names):
    """477 = 300 + 177 tokens per KV head are counted by 4 programs: 2 requests x 2 heads."""
    found = program(f"options({target!r}, {names})")
    assert found.pop("reads") == {"counted": [477, 477], "atomics": 4}
    assert len(found) == (len(names) or 9)
    assert wrong(found) == {}


@pytest.mark.parametrize("target", [pytest.param("sm_80", marks=long), "sm_90"])
def test_sinks_and_float8_caches_equal_the_oracle(target):
    """K91 (tests/known_faults.md): every code too, by instructions of sm_90 and by integer operations on sm_80."""
    found = program(f"sinks_and_float8({target!r})")
    assert len(found) == 2 * (2 + 3)
    assert wrong(found) == {}


@pytest.mark.parametrize(
    ("target", "dtypes"),
    [
        ("sm_90", ["bfloat16"]),
        *(pytest.param(target, ["float32", "bfloat16", "float16"], marks=long) for target in EXECUTED),
    ],
)
def test_merges_equal_the_oracle_with_empty_infinite_and_nan_states(target, dtypes):
    found = program(f"merges({target!r}, {dtypes})")
    assert len(found) == len(dtypes) * 3 * 3
    assert wrong(found) == {}


def test_a_plan_reads_the_sectors_that_the_ledger_counts():
    """Two prefixes of 6 and 4 pages, 4 branches of 4 rows: 4 (96 + 64) + 2 x 16 tokens naive, 160 + 32 shared."""
    found = program("sectors('sm_80', [96, 64])")
    tokens = {"naive": 4 * 160 + 2 * 16, "cascade": 160 + 2 * 16, "fused": 160 + 2 * 16}
    for plan, count in tokens.items():
        assert found[plan] == {"sectors": count * BYTES // 32, "bytes": count * BYTES, "tokens": count}
    assert found["wavefronts"] == found["phases"] > 0, "no bank conflict"
    assert max(found["in flight"]) >= 2, "copies run ahead of the products"
    assert found["unfinished"] == 0


@long
@pytest.mark.parametrize("target", EXECUTED)
def test_ragged_plans_read_the_ledger_too_and_narrow_rows_whole_sectors(target):
    """Lengths that fill no page change nothing; a row of 72 halves, 144 bytes, touches 5 sectors and fills 4.5."""
    found = program(f"sectors({target!r}, [2000, 501])")
    for plan in ("naive", "cascade", "fused"):
        assert found[plan]["sectors"] * 32 == found[plan]["bytes"] == found[plan]["tokens"] * BYTES
    assert found["naive"]["tokens"] / found["fused"]["tokens"] > 3.9
    found = program(f"sectors({target!r}, [100, 77], dim=72)")
    for plan in ("naive", "cascade", "fused"):
        assert found[plan]["sectors"] == found[plan]["tokens"] * 4 * 5


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=long)])
def test_every_opcode_of_the_kernels_is_modelled(whole):
    """Where a new Triton emits something new, it is listed here first."""
    found = program(f"unknown_opcodes(whole={whole})")
    assert {target: found[target]["unknown"] for target in EXECUTED} == {target: [] for target in EXECUTED}
    heads = {target: {opcode.split(".")[0] for opcode in found[target]["opcodes"]} for target in EXECUTED}
    assert {"mma", "ldmatrix", "cp", "shfl", "bar", "fma"} <= heads["sm_80"] & heads["sm_90"]
    assert {"wgmma", "fence"} <= heads["sm_90"] - heads["sm_80"]


def noticed(bugs):
    found = program(f"seeded({[bug.name for bug in bugs]})")
    clean = {key: said for key, said in found.items() if key.startswith("(")}
    assert wrong(clean) == {}, "the code as compiled passes"
    return {bug.name: found[bug.name].split(":")[0] for bug in bugs}


def test_seeded_bugs_are_noticed_by_the_detector_of_their_kind():
    bugs = [bug for bug in BUGS if bug.name in QUICK]
    assert len(bugs) == len(QUICK)
    assert {bug.detector for bug in bugs} == {bug.detector for bug in BUGS}
    assert noticed(bugs) == {bug.name: bug.detector for bug in bugs}


@long
def test_every_seeded_bug_is_noticed_and_survivors_are_equivalent():
    every = [*BUGS, *SURVIVORS.values()]
    assert len(BUGS) >= 30
    assert len({bug.name for bug in every}) == len(every)
    assert {bug.target for bug in BUGS} == set(EXECUTED)
    assert noticed(every) == {bug.name: bug.detector for bug in every}


def test_what_cannot_be_executed_is_refused_and_nothing_of_it_runs():
    found = program("refused()")
    for name, known in (("sm_86", ", which is compiled for but not executed"), ("sm_70", "")):
        assert found[name] == f"ValueError: target: expected one of sm_80, sm_90, given {name!r}{known}"
    assert found["a number"] == "TypeError: target: expected a name or a Target, given int"
    assert found["elsewhere"].startswith("RuntimeError: backend='triton' takes CPU tensors")
    assert found["mask"] == "TypeError: never_read: expected a bool mask, given torch.float32"
    assert found["opcode"] == "Unsupported: _merge_pair_kernel: not modelled: popc.b32"
    assert (found["runs"], found["out"]) == (0, 0)
    assert found["no executor"].startswith("RuntimeError: CASCADE_LAB_TARGET is set, and nothing here executes")
    assert found["both modes"].startswith(
        "RuntimeError: CASCADE_LAB_TARGET executes compiled code, but TRITON_INTERPRET=1"
    )
    assert found["environment sm_120"].startswith("ValueError: target: expected one of sm_80, sm_90, given 'sm_120'")
    assert found["environment h100"].startswith("ValueError: CASCADE_LAB_TARGET: expected one of sm_75, sm_80")


def test_an_interpreted_process_is_told_how_to_start():
    if runtime.triton_mode() != "interpreted":
        pytest.skip("kernels are compiled in this process")
    with pytest.raises(RuntimeError, match=f"start Python with {runtime.SWITCH}=0"), executed("sm_90"):
        pass
    assert runtime.triton_mode() == "interpreted"


SCRIPT = """
import torch
from cascade_lab import merge_state, runtime
import cascade_lab.evidence
o, lse = torch.full((3, 2, 16), 2.0), torch.zeros(3, 2)
state = merge_state(o, lse, o, lse, backend="triton")
print(runtime.triton_mode(), runtime.device(), runtime.device_reason(), runtime.provenance()["triton mode"], sep="; ")
print(state.o.unique().tolist(), round(float(state.lse.mean()), 4))
"""


def test_a_process_started_for_a_target_executes_every_call():
    """As a notebook does: the environment names the target, and importing the evidence brings the executor."""
    environment = {k: v for k, v in os.environ.items() if k != runtime.SWITCH} | {runtime.TARGET: "sm_90"}
    environment["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    mode, values = done.stdout.splitlines()
    assert mode == "executed; cpu; code compiled for sm_90 is executed on the CPU; executed for sm_90"
    assert values == "[2.0] 0.6931"


def test_a_plan_launches_what_the_call_does_for_other_tensors():
    """Bit for bit, in as many launches; a query that is aligned otherwise or negated goes the way of a call."""
    found = program("plans('sm_90')")
    assert [
        found.pop(f"{name}, {kind}negative") for name in ("naive", "cascade", "fused") for kind in ("", "planned ")
    ] == ([True] * 6)
    assert {name: each for name, each in found.items() if "misaligned" in name} == {
        f"{name}, misaligned": True for name in ("naive", "cascade", "fused")
    }
    for name, launches in (("naive", 1), ("cascade", 3), ("fused", 1)):
        for seed in (0, 1):
            same, planned, called = found[f"{name}, {seed}"]
            assert same
            assert planned == called == launches
