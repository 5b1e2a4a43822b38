"""What the kernels are written with: only what both modes of every supported Triton know."""

import ast
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from cascade_lab import runtime
from cascade_lab.backends.triton.config import tiles

SOURCES = sorted((Path(__file__).resolve().parents[2] / "cascade_lab" / "backends" / "triton").glob("*.py"))
# in the interpreter and in the compiler from Triton 3.6 to 3.9
KNOWN = {
    *("abs", "arange", "atomic_add", "cast", "constexpr", "dot", "exp", "exp2", "full", "load", "log", "log2", "max"),
    *("maximum", "minimum", "program_id", "range", "static_assert", "store", "sum", "trans", "where", "zeros"),
    *("zeros_like", "PropagateNan", "float32", "float16", "bfloat16", "int16", "int32", "int64", "uint32", "uint64"),
}


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_kernels_use_no_library_or_vendor_function(path):
    """K55 (tests/known_faults.md): math functions move between versions, and some are unknown to the interpreter."""
    names = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in names if isinstance(node.value, ast.Name) and node.value.id == "tl"}
    assert used <= KNOWN
    assert not any("libdevice" in ast.dump(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Import))


def test_every_product_states_its_precision():
    """K44: a compiler's default for float32 is TF32, and the interpreter, always exact, would not show it."""
    calls = [node for path in SOURCES for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    products = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "dot"]
    assert len(products) >= 3
    for call in products:
        stated = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert stated == {"input_precision": "ieee"}, f"line {call.lineno}"


def test_vendor_launch_options_stay_with_their_vendor():
    """K55: a register limit is an option of one vendor's compiler."""
    for head_dim in (64, 128, 256, 576):
        assert all(tile.max_registers is None for tile in tiles("gfx942", head_dim))


@pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_array_lies_beside_a_kernel(path):
    """K46: the interpreter of some versions trips over arrays among the names of a kernel's module."""
    name = ".".join(("cascade_lab", "backends", "triton", *([path.stem] if path.stem != "__init__" else [])))
    names = vars(importlib.import_module(name))
    assert [key for key, value in names.items() if isinstance(value, (np.ndarray, torch.Tensor))] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_kernel_stores_a_masked_scalar(path):
    """K47: every store is to a block; what a program adds once goes through an atomic without a mask."""
    for node in ast.walk(tree_of(path)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        masked = any(keyword.arg == "mask" for keyword in node.keywords)
        if node.func.attr == "store":
            assert masked, f"line {node.lineno}: a store of a block, with its mask"
        if node.func.attr == "atomic_add":
            assert not masked, f"line {node.lineno}: an atomic of one element, without a mask"


def test_rows_beyond_the_end_are_not_stored():
    """K47 for blocks: a tile with one row of sixteen writes that row alone."""
    if runtime.triton_mode() != "interpreted":
        pytest.skip("looks at memory that the interpreter writes")
    from cascade_lab.backends.triton.merge import merge_pair

    o, lse = torch.randn(1, 1, 8), torch.zeros(1, 1)
    out, out_lse = torch.full((4, 1, 8), 7.0), torch.full((4, 1), 7.0)
    merge_pair(o, lse, o, lse, out[1:2], out_lse[1:2])
    assert out[[0, 2, 3]].eq(7).all()
    assert out_lse[[0, 2, 3]].eq(7).all()
    torch.testing.assert_close(out[1:2], o)
