"""Launches as the launcher makes them: whatever a number happens to be, kernels compile and their addresses hold."""

import pytest

from cascade_lab import runtime
from cascade_lab.evidence.compiled import in_child

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
