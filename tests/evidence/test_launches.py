"""Launches as the launcher makes them: whatever a number happens to be, kernels compile and their addresses hold."""

import pytest

from cascade_lab import runtime
from cascade_lab.evidence.compiled import in_child
from cascade_lab.evidence.launches import faults
from cascade_lab.runtime import TARGETS

pytestmark = pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")


def program(expression):
    return in_child(expression, module="tests.evidence.launch_programs")


@pytest.fixture(scope="module")
def scalars():
    """Every kernel at a covering set of numbers and switches, by Triton's front end for sm_90.

    Up to there a source can be at fault for its types, and all targets share it; the stages behind it take three times
    as long, and `bench --launches` has them for every target.
    """
    return program("scalars('sm_90')")


def test_every_kernel_compiles_whatever_a_number_is(scalars):
    """The launcher makes a constant of 1 and a 64-bit number of what is beyond 2**31."""
    assert set(scalars) == {"_attention_kernel", "_merge_pair_kernel", "_merge_many_kernel"}
    for kernel, found in scalars.items():
        assert found["faults"] == [], kernel
        assert found["calls"] > 10


def test_each_number_was_each_kind(scalars):
    """0, 1, 2, 15, 16, 17, a large odd number and beyond 2**31, through the binder and its specialisation."""
    kinds = {
        "constexpr": [1],
        "i32": [2, 15, 17, 2**31 - 1],
        "i32, 16": [0, 16],
        "i64": [2**31 + 1],
        "i64, 16": [2**31, 2**33],
    }
    floats = {"fp32": [0, 1, 2, 15, 16, 17, 2**31 - 1, 2**31, 2**31 + 1, 2**33]}
    count = 0
    for found in scalars.values():
        for name, seen in found["kinds"].items():
            assert seen == (floats if name in ("sign", "scale", "softcap") else kinds), name
            count += 1
    assert count == 26 + 14 + 13


def test_every_product_with_a_stride_is_taken_in_64_bits(scalars):
    assert {kernel: found["narrow"] for kernel, found in scalars.items()} == dict.fromkeys(scalars, [])


def test_a_described_call_launches_what_the_call_did():
    """Kernels, grids, alignment and constants of eight kinds of calls, each recorded once though made twice."""
    found = program("again()")
    assert found["described"] == 8
    assert found["again"] == found["made"]
    assert len(found["made"]) == 6 + 1 + 2
    assert {kind for one in found["made"] for kind in one[3:]} >= {
        "_attention_kernel.LATENT: True",
        "_attention_kernel.READS: True",
        "_attention_kernel.sign: fp32",
        "_attention_kernel.k_ptr: *bf16, 16",
        "_attention_kernel.stride_k_h: 1",
        "_attention_kernel.D: padded blocks",
        "_merge_pair_kernel.oa_ptr: *fp32",
    }


def test_specialisation_alone_tells_what_compiling_does():
    """Same kinds, as many kernels; of calls made twice each is needed once, and a sample has all kinds."""
    assert program("bound_and_compiled()") == {"same kinds": True, "kernels": 9, "needed": True, "covered": True}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_two_calls_become_two_kernels_that_fit(target):
    attention, merge = sorted(program(f"two({target!r})"), key=lambda one: one["kernel"])
    assert (attention["kernel"], attention["dtype"], attention["local"]) == ("attention_kernel", "bfloat16", 0)
    assert (merge["kernel"], merge["dtype"], merge["local"]) == ("merge_many_kernel", "float32", 0)
    assert (attention["constants"]["D"], merge["constants"]["D"]) == (64, 8)
    # at least one tile of keys passes through shared memory, and of a merge at most three states
    assert attention["shared"] >= attention["constants"]["BLOCK_N"] * 64 * 2 > merge["shared"]
    assert merge["shared"] <= 3 * merge["constants"]["BLOCK_R"] * (8 + 1) * 4
    assert 255 >= attention["registers"] > merge["registers"] > 8
    assert attention["faults"] == merge["faults"] == []


def test_what_does_not_fit_is_reported_with_its_call_and_the_rest_compiled():
    failed, merge = sorted(program("two('sm_90', 5500)"), key=lambda one: "error" not in one)
    assert "5500 bytes of shared memory" in failed["error"]
    assert merge["shared"] <= 5500
    assert (failed["call"]["function"], merge["kernel"]) == ("attend", "merge_many_kernel")
    assert [fault[: fault.index(":")] for fault in failed["faults"]] == ["attend bfloat16, D 64, D_v 64, packed rows 6"]


def test_a_spill_is_seen_in_what_the_assembler_made():
    free, limited = program("limited()")
    assert free["registers"] > 32 >= limited["registers"]
    assert limited["local"] > free["local"] + 64


@pytest.mark.parametrize(
    ("target", "changed", "fault"),
    [
        ("sm_80", {}, ""),
        ("sm_80", {"local": 8}, "attention_kernel bfloat16 (D=64, TREE): 8 bytes of local memory a thread"),
        ("sm_120", {"local": 8, "dtype": "float16"}, "attention_kernel float16 (D=64, TREE): 8 bytes of local memory"),
        ("sm_75", {"local": 8}, ""),
        ("sm_80", {"local": 8, "dtype": "float32"}, ""),
        ("sm_75", {"shared": 65537}, "attention_kernel bfloat16 (D=64, TREE): 65537 bytes of 65536 shared memory"),
    ],
)
def test_spills_in_half_precision_and_too_much_shared_memory_are_faults(target, changed, fault):
    constants = {"D": 64, "TREE": True, "SOFTCAP": False}
    report = {"kernel": "attention_kernel", "dtype": "bfloat16", "shared": 65536, "local": 0, "constants": constants}
    found = faults([report | changed], target)
    assert [text.startswith(fault) for text in found] == [True] * bool(fault)


@pytest.mark.parametrize("target", TARGETS)
def test_the_sample_compiles_and_fits(target):
    """The calls of tests/data/launches.jsonl; `make compiled` has all of them, for all targets."""
    found = program(f"sampled({target!r})")
    assert found["faults"] == []
    assert set(found["dtypes"]) <= {"float32", "float16", "bfloat16"}
    assert sum(found["dtypes"].values()) >= 4


def test_the_sample_has_every_kind_that_many_calls_have():
    """Of each parameter; when one is missing, `python -m tools.compile_launches --sample` makes the sample again."""
    found = program("uncovered()")
    assert found["missing"] == []
    assert found["known"] > 150
    assert found["targets"] == sorted(TARGETS)
