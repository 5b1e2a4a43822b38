"""The driver without a device: Triton's launch path as on a card, up to the launch."""

import re

import pytest

from cascade_lab import runtime
from cascade_lab.evidence.compiled import in_child
from cascade_lab.evidence.driver import fake_device, target_of

pytestmark = pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")

STAGES = {"nvidia": {"ttir", "ttgir", "llir", "ptx", "cubin"}, "amd": {"ttir", "ttgir", "llir", "amdgcn", "hsaco"}}


def program(expression):
    return in_child(expression, module="tests.evidence.driver_programs")


def test_a_call_is_compiled_for_the_target_and_recorded():
    """Two requests of 3 and 1 rows of 4 heads on 2 KV heads, in two splits: one pass, one merge, each call."""
    found = program("recorded('sm_90', 'gfx942')")
    for target, stages in (("sm_90", STAGES["nvidia"]), ("gfx942", STAGES["amd"])):
        attention, merge = found[target][:2]
        assert found[target][2:] == [attention, merge]
        assert found[f"('{target}', 'kernels')"] == 2, "the second call compiles nothing"
        assert (attention["name"], merge["name"]) == ("_attention_kernel", "_merge_many_kernel")
        assert (attention["grid"], merge["grid"][1:]) == ([2, 2, 2], [1, 1])
        assert stages <= set(attention["stages"])
        assert stages <= set(merge["stages"])
        assert 0 < attention["shared"] <= runtime.TARGETS[target].shared_bytes
        assert attention["target"] == merge["target"] == target
        assert attention["values"] == {"page_size": 4, "num_splits": 2, "BLOCK_M": 16}
        assert merge["values"] == {"S": 2, "H": 4}
        assert attention["tensors"]["q_ptr"] == [4, 4, 32]
        assert attention["tensors"]["o_ptr"] == [4, 2, 4, 32]
        # one row tile per request: a constant as the launcher makes them, beside those declared
        assert {"tiles_per_request", "stride_table_page", "D", "BLOCK_N"} <= set(attention["constants"])
        assert not {"page_size", "num_splits", "q_ptr"} & set(attention["constants"])
        types = attention["types"]
        assert (types["q_ptr"], types["lengths_ptr"], types["scale"], types["page_size"]) == (
            *("*bf16", "*i32", "fp32", "i32"),
        )


def test_a_function_takes_the_place_of_the_launch():
    assert program("handed_over()") == {"o": [3.0], "lse": [1.0], "recorded": 0}


def test_contexts_nest_and_end():
    found = program("contexts()")
    assert found["before"] == found["after"] == [None, True]
    assert found["outer"] == found["back"] == found["still outer"] == found["after an exception"] == ["sm_80", False]
    assert found["inner"] == ["gfx942", False]
    assert found["launches"] == [["sm_80"] * 2, ["gfx942"] * 2]
    assert found["unknown inside"].startswith("ValueError: target")
    for when in ("refused before", "refused after"):
        assert found[when].startswith("RuntimeError: backend='triton' on cpu tensors")


def test_what_is_not_known_is_refused_by_name():
    found = program("refused()")
    for name in ("sm_70", "h100", ""):
        assert found[name] == f"ValueError: target: expected one of {', '.join(runtime.TARGETS)}, given {name!r}"
    assert found["a number"] == "TypeError: target: expected a name or a Target, given int"
    assert found["elsewhere"].startswith("RuntimeError: backend='triton' takes CPU tensors while sm_90 is pretended")
    assert found["elsewhere"].endswith("on meta")
    assert found["launches"] == 0


def test_a_kernel_beyond_the_shared_memory_is_refused_before_its_launch():
    """By the package, against the limit of the device that is pretended; need and limit are named in bytes."""
    found = program("too_large()")
    assert found["said"].startswith("ValueError: head_dim: ")
    assert "the 2048 bytes of shared memory" in found["said"]
    assert re.search(r"smallest tile needs \d+ bytes$", found["said"])
    assert (found["launches"], found["enough"]) == (0, 2)


# D, D_v, V is a view of K
WIDTHS = {64: (64, 64, False), 128: (128, 128, False), 192: (192, 128, False), 256: (256, 256, False)}
WIDTHS[576] = (576, 512, True)


def work(target, head_dim, rows, dtype):
    return {"target": target, "widths": WIDTHS[head_dim], "rows": rows, "dtype": dtype}


def test_launches_that_99_and_64_kib_did_not_hold_compile_and_fit():
    """Decode and prefill of head dim 256 and latent attention on sm_86; few rows, and no bfloat16, on sm_75."""
    half, none = "bfloat16", "float16"
    works = [work("sm_86", 256, 16, half), work("sm_86", 256, 64, half), work("sm_86", 576, 32, half)]
    works += [work("sm_75", 64, 16, none), work("sm_75", 128, 128, none), work("sm_75", 576, 16, none)]
    *found, refused = program(f"fits({[*works, work('sm_75', 64, 16, half)]})")
    for one in found:
        assert one["said"] == "no error"
        assert one["taken"] == one["tile"]
        assert 0 < one["shared"] <= one["need"] <= one["limit"]
        assert one["local"] == 0, "nothing spills"
    assert [one["tile"] for one in found] == [
        *([16, 32, 5], [64, 32, 3], [32, 16, 5], [16, 32, 1], [64, 16, 1], [8, 16, 1])
    ]
    assert refused["said"].startswith("TypeError: dtype of q: expected float16 or float32 on sm_75")
    assert refused["launches"] == 0


def test_the_ledger_has_what_fewer_rows_load():
    """A T4 holds 64 rows of head dim 128, so 128 rows load their 300 keys twice there."""
    assert program("reads_of_rows('sm_75', 'sm_90')") == {"sm_75": [64, 64, 600], "sm_90": [128, 128, 300]}


CONVERTING = ("sm_89", "sm_90", "sm_100", "sm_120")


def check_float8(target, works, spills=False):
    """Types of the machine's where it converts them, bytes elsewhere; within the bound, and no spill but where told."""
    found = program(f"fits({works})")
    for one in found:
        work, half = one["work"], one["work"]["dtype"] == "float16"
        assert one["said"] == "no error", one
        native = {"float8_e4m3fn": "*fp8e4nv", "float8_e5m2": "*fp8e5" if half else "*u8"}[work["cache_dtype"]]
        assert one["keys"] == (native if target in CONVERTING else "*u8"), one
        assert one["shared"] <= one["need"] <= one["limit"], one
        assert one["taken"] == one["tile"]
        if not spills and target not in ("sm_75", "gfx942"):
            assert one["local"] == 0, one


@pytest.mark.parametrize("target", ["sm_86", "sm_89", "sm_100", "sm_120"])
def test_a_launch_on_caches_of_float8_compiles_and_fits(target):
    check_float8(target, [work(target, 128, 16, "bfloat16") | {"cache_dtype": "float8_e4m3fn"}])


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_86", *CONVERTING, "gfx942"])
def test_every_kind_of_float8_compiles_and_fits_on_every_target(target):
    """Converting keys takes registers that large tiles and long heads have not: some of these spill."""
    rows = {64: (16, 128), 128: (16, 64, 128)}
    if target not in ("sm_75", "gfx942"):
        rows |= {192: (16, 64), 256: (16, 64), 576: (16, 32)}
    works = [
        work(target, head_dim, m, dtype) | {"cache_dtype": cache_dtype}
        for head_dim in rows
        for m in rows[head_dim]
        for dtype, cache_dtype in (("float16", "float8_e4m3fn"), ("bfloat16", "float8_e5m2"))
        if target != "sm_75" or dtype == "float16"
    ]
    check_float8(target, works, spills=True)


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_the_bound_holds_on_every_target_and_nothing_spills(target):
    """Every row in half precision, and of float32 the sizes that notebooks use; a T4 too."""
    half = "float16" if target == "sm_75" else "bfloat16"
    rows = {64: (16, 32, 64, 128), 128: (16, 32, 64, 128), 192: (16, 64), 256: (16, 32, 64), 576: (16, 32)}
    works = [work(target, head_dim, m, half) for head_dim in rows for m in rows[head_dim]]
    works += [work(target, 64, m, "float32") for m in rows[64]]
    works += [work(target, head_dim, 16, "float32") for head_dim in (128, 256, 576)]
    for one in program(f"fits({works})"):
        assert one["said"] == "no error", one
        assert one["shared"] <= one["need"] <= one["limit"], one
        assert one["taken"] == one["tile"]
        assert one["local"] == 0, one


def test_an_interpreted_process_is_told_how_to_start():
    if runtime.triton_mode() != "interpreted":
        pytest.skip("kernels are compiled in this process")
    with pytest.raises(RuntimeError, match=f"start Python with {runtime.SWITCH}=0"), fake_device("sm_90"):
        pass
    assert runtime.pretended_target() is None


def test_targets_carry_the_limits_of_their_cards():
    kib = {name: target.shared_bytes / 1024 for name, target in runtime.TARGETS.items()}
    assert kib == {
        **{"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99},
        "gfx942": 64,
    }
    assert target_of("sm_86") is target_of(target_of("sm_86"))
