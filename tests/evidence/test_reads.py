"""The load recorder counts what a kernel really does, stops what it must not do, and leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cascade_lab import runtime

if runtime.triton_mode() != "interpreted":
    pytest.skip("the recorder watches Triton's interpreter", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime import interpreter

from cascade_lab.backends.triton.mode import jit
from cascade_lab.evidence.reads import Launch, OutOfBounds, Program, record_loads


@jit
def sum_rows(x, out, n, stride, BLOCK: tl.constexpr):
    """Each program adds up one row in blocks of BLOCK, the last block masked."""
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * stride + cols, mask=cols < n, other=0.0)
    tl.store(out + row, tl.sum(total, 0))


@jit
def read_twice(x, out, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(out + cols, tl.load(x + cols) + tl.load(x + cols // 2))


@jit
def copy_shifted(x, out, shift, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(out + cols, tl.load(x + cols + shift))


@jit
def copy_to_shifted(x, out, shift, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(out + cols + shift, tl.load(x + cols))


@jit
def count_into(counter, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.atomic_add(counter + lanes, 1, mask=lanes < n)


@jit
def swap_once(flag, out):
    tl.store(out, tl.atomic_cas(flag, 0, 7))


@jit
def product(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(left, right))


@jit
def copy_described(x, out, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, cols], [cols, 1], [BLOCK_M, BLOCK_N])
    target = tl.make_tensor_descriptor(out, [rows, cols], [cols, 1], [BLOCK_M, BLOCK_N])
    target.store([0, 0], source.load([0, 0]))


@jit
def low_words(x, out, BLOCK: tl.constexpr):
    """Reads the low half of each int64 through an int32 pointer."""
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(x.to(tl.pointer_type(tl.int32)) + 2 * lanes))


@jit
def load_inside(pointer):
    return tl.load(pointer)


@jit
def copy_one_nested(x, out, shift):
    tl.store(out, load_inside(x + shift))


def test_masked_loop_counts_match_hand_count():
    """3 rows of 20 floats in blocks of 8: 3 x 3 x 8 lanes tried, 3 x 20 of them true."""
    x, out = torch.arange(60.0).view(3, 20), torch.empty(3)
    with record_loads(x=x, out=out) as record:
        sum_rows[(3,)](x, out, 20, 20, BLOCK=8)
    assert out.tolist() == x.sum(1).tolist()
    assert record["x"].attempted_bytes == 3 * 3 * 8 * 4
    assert record["x"].loaded_bytes == record["x"].distinct_bytes == 3 * 20 * 4
    assert record["out"].stored_bytes == record["out"].distinct_stored_bytes == 3 * 4
    assert (record.loaded_bytes, record.stored_bytes) == (240, 12)
    assert record.launches == [Launch("sum_rows", (3, 1, 1))]
    assert record["x"].rows.tolist() == [0, 1, 2]
    by_program = {program: rows.tolist() for program, rows in record["x"].rows_by_program().items()}
    assert by_program == {Program(0, (i, 0, 0)): [i] for i in range(3)}


def test_repeated_loads_are_issued_but_not_distinct():
    x, out = torch.arange(8.0), torch.empty(8)
    with record_loads(x=x, out=out) as record:
        read_twice[(1,)](x, out, BLOCK=8)
    assert (record["x"].loaded_bytes, record["x"].distinct_bytes) == (64, 32)
    assert (record["out"].loaded_bytes, record["out"].distinct_bytes) == (0, 0)


def test_fully_masked_load_is_attempted_only():
    x, out = torch.zeros(1, 8), torch.empty(1)
    with record_loads(x=x, out=out) as record:
        sum_rows[(1,)](x, out, 3, 8, BLOCK=16)
    assert (record["x"].loaded_bytes, record["x"].attempted_bytes) == (12, 64)


@pytest.mark.parametrize(("kernel", "kind"), [(copy_shifted, "load"), (copy_to_shifted, "store")])
@pytest.mark.parametrize(("shift", "place"), [(1, "0 bytes past the end of"), (-3, "12 bytes before the start of")])
def test_access_outside_every_tensor_is_stopped(kernel, kind, shift, place):
    memory = torch.full((4, 24), 5.0)
    x, out = memory[1, 8:16], memory[3, 8:16]
    before = memory.clone()
    message = f"{kind} of 4 bytes .* in kernel {kernel.fn.__name__}, program .0, 0, 0.* {place}"
    with pytest.raises(OutOfBounds, match=message), record_loads(x=x, out=out):
        kernel[(1,)](x, out, shift, BLOCK=8)
    assert torch.equal(memory, before), "the access must be stopped before it happens"


def test_violation_inside_a_device_function_keeps_its_type():
    x, out = torch.zeros(4), torch.zeros(1)
    with pytest.raises(OutOfBounds, match="past the end of x"), record_loads(x=x, out=out):
        copy_one_nested[(1,)](x, out, 400)


@pytest.mark.parametrize("shift", [4, 3, 1])
def test_gap_between_rows_of_a_view_is_outside(shift):
    """A [3, 4] view with row stride 6: columns 4 and 5 of the memory do not belong to it."""
    view, out = torch.zeros(3, 6)[:, :4], torch.zeros(4)
    with pytest.raises(OutOfBounds, match="between the elements of view"), record_loads(view=view, out=out):
        copy_shifted[(1,)](view, out, shift, BLOCK=4)


@pytest.mark.parametrize(
    "layout",
    [
        lambda: torch.arange(24.0).view(4, 6),
        lambda: torch.arange(24.0).view(6, 4).t(),
        lambda: torch.arange(48.0).view(4, 12)[:, ::2],
        lambda: torch.arange(51.0).as_strided((4, 6), (5, 7)),
    ],
    ids=["contiguous", "transposed", "every other column", "interleaved strides"],
)
def test_every_element_of_a_layout_is_found_at_its_index(layout):
    x, out = layout(), torch.empty(1)
    for i in range(4):
        for j in range(6):
            with record_loads(x=x, out=out) as record:
                copy_shifted[(1,)](x, out, i * x.stride(0) + j * x.stride(1), BLOCK=1)
            assert out.item() == x[i, j].item()
            assert record["x"].rows.tolist() == [i]


def test_interleaved_views_are_told_apart():
    memory = torch.arange(16.0).view(4, 2, 2)
    k, v, out = memory[:, 0], memory[:, 1], torch.empty(2)
    with record_loads(k=k, v=v, out=out) as record:
        copy_shifted[(1,)](v, out, 4, BLOCK=2)
    assert out.tolist() == [6.0, 7.0]
    assert (record["k"].loaded_bytes, record["v"].loaded_bytes) == (0, 8)
    assert record["v"].rows.tolist() == [1]


def test_atomics_are_counted_and_bounded():
    counter, out = torch.zeros(4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with record_loads(counter=counter, out=out) as record:
        count_into[(2,)](counter, 3, BLOCK=4)
        swap_once[(1,)](out, counter)
    assert counter.tolist() == [0, 2, 2, 0]
    assert out.item() == 7
    assert record["counter"].atomic_bytes == 2 * 3 * 8
    assert record["out"].atomic_bytes == 8
    assert record["counter"].loaded_bytes == 0
    with pytest.raises(OutOfBounds, match="atomic of 8 bytes"), record_loads(counter=counter[:2]):
        count_into[(1,)](counter, 3, BLOCK=4)


def test_matrix_products_are_counted_by_shape():
    a, b = torch.randn(16, 32), torch.randn(32, 64)
    out = torch.empty(16, 64)
    with record_loads(a=a, b=b, out=out) as record:
        product[(1,)](a, b, out, 16, 64, 32)
        product[(1,)](a, b, out, 16, 64, 32)
    assert dict(record.dots) == {(16, 64, 32): 2}
    torch.testing.assert_close(out, a @ b)


def test_tensor_descriptor_accesses_are_counted():
    """A 16 x 16 block over a 9 x 12 tensor: 108 of 256 lanes are true."""
    x, out = torch.randn(9, 12), torch.zeros(9, 12)
    with record_loads(x=x, out=out) as record:
        copy_described[(1,)](x, out, 9, 12, BLOCK_M=16, BLOCK_N=16)
    assert torch.equal(x, out)
    assert (record["x"].loaded_bytes, record["x"].attempted_bytes) == (432, 1024)
    assert record["out"].stored_bytes == 432


def test_narrow_reads_of_wide_elements_count_their_own_bytes():
    x = torch.tensor([1, 2, 3, 2**40 + 4])
    out = torch.zeros(4, dtype=torch.int32)
    with record_loads(x=x, out=out) as record:
        low_words[(1,)](x, out, BLOCK=4)
    assert out.tolist() == [1, 2, 3, 4]
    assert (record["x"].loaded_bytes, record["x"].distinct_bytes) == (16, 16)


def test_wide_reads_of_narrow_elements_are_checked_to_their_last_byte():
    x = torch.tensor([1, 0, 2, 0, 3, 0, 4, 0], dtype=torch.int32)
    out = torch.zeros(4, dtype=torch.int64)
    with record_loads(x=x, out=out) as record:
        copy_shifted[(1,)](x.view(torch.int64), out, 0, BLOCK=4)
    assert out.tolist() == [1, 2, 3, 4]
    assert record["x"].distinct_bytes == 32
    with pytest.raises(OutOfBounds), record_loads(x=x[:7], out=out):
        copy_shifted[(1,)](x.view(torch.int64), out, 0, BLOCK=4)


def test_allocations_are_known_and_poisoned():
    x = torch.ones(8)
    with record_loads(x=x) as record:
        out, kept = torch.empty(10), torch.empty_like(x)
        index = torch.empty(2, dtype=torch.int32)
        copy_shifted[(1,)](x, out, 0, BLOCK=8)
        doubled = x * 2
        copy_shifted[(1,)](doubled, kept, 0, BLOCK=8)
    assert out[:8].tolist() == [1.0] * 8
    assert out[8:].isnan().all()
    assert kept.tolist() == [2.0] * 8
    assert index.tolist() == [2**31 - 1] * 2
    written = {t.name: t.stored_bytes for t in record.allocated() if t.stored_bytes}
    assert sorted(written.values()) == [32, 32]
    assert torch.empty(3).dtype == torch.float32


def test_naming_a_view_makes_its_allocation_strict():
    x = torch.ones(8)
    with record_loads(x=x) as record:
        memory = torch.zeros(16)
        copy_shifted[(1,)](x, memory, 0, BLOCK=8)
        record.register(out=memory[:8])
        copy_shifted[(1,)](x, memory, 0, BLOCK=8)
        with pytest.raises(OutOfBounds, match="past the end of out"):
            copy_shifted[(1,)](x, memory[8:], 0, BLOCK=8)


def test_tensors_created_by_autograd_are_known():
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = torch.empty_like(x)
            copy_shifted[(1,)](x, out, 0, BLOCK=8)
            return out

        @staticmethod
        def backward(ctx, grad):
            out = torch.empty(8)
            copy_shifted[(1,)](grad.contiguous(), out, 0, BLOCK=8)
            return out

    x = torch.ones(8, requires_grad=True)
    with record_loads(x=x):
        (Copy.apply(x) * 3).sum().backward()
    assert x.grad.tolist() == [3.0] * 8


@pytest.mark.parametrize("leave", ["normally", "by an error"])
def test_interpreter_is_restored(leave):
    names = [
        "create_masked_load",
        "create_masked_store",
        "create_atomic_rmw",
        "create_atomic_cas",
        "create_dot",
    ]
    before = [getattr(interpreter.InterpreterBuilder, name) for name in [*names, "set_grid_dim"]]
    executor = interpreter.GridExecutor.__call__
    x, out = torch.zeros(4), torch.zeros(4)
    if leave == "normally":
        with record_loads(x=x, out=out):
            copy_shifted[(1,)](x, out, 0, BLOCK=4)
    else:
        with pytest.raises(ZeroDivisionError), record_loads():
            raise ZeroDivisionError
    assert [getattr(interpreter.InterpreterBuilder, name) for name in [*names, "set_grid_dim"]] == before
    assert interpreter.GridExecutor.__call__ is executor
    copy_shifted[(1,)](x, out, 0, BLOCK=4)


def test_nested_recorders_are_refused():
    with record_loads(), pytest.raises(RuntimeError, match="nested"), record_loads():
        pass
    with record_loads() as record:
        assert record.loaded_bytes == 0


def test_a_launch_that_no_recorder_watches_is_held_to_its_arguments():
    """In every test: an access beside the tensors given to a kernel fails, also inside one memory."""
    memory = torch.arange(24.0)
    x, wide = memory[8:16], torch.zeros(24)
    out = wide[8:16]
    copy_shifted[(1,)](x, out, 0, BLOCK=8)
    assert torch.equal(out, x)
    for shift, place in ((1, "past the end of argument 0"), (-1, "before the start of argument 0")):
        with pytest.raises(OutOfBounds, match=place):
            copy_shifted[(1,)](x, out, shift, BLOCK=8)
        with pytest.raises(OutOfBounds, match=place.replace("0", "1")):
            copy_to_shifted[(1,)](x, out, shift, BLOCK=8)
    assert not wide[:8].any()
    assert not wide[16:].any()
    with record_loads(x=x, out=out) as record:
        copy_shifted[(1,)](x, out, 0, BLOCK=8)
    assert record.launches == [Launch("copy_shifted", (1, 1, 1))]


def test_compiled_mode_is_refused(monkeypatch):
    monkeypatch.setattr(runtime, "triton_mode", lambda: "compiled")
    monkeypatch.setattr(runtime, "require_triton", lambda: None)
    with pytest.raises(RuntimeError, match="interpreted launches only.*TRITON_INTERPRET"), record_loads():
        pass


def test_compiled_kernel_is_refused():
    kernel = triton.runtime.jit.JITFunction(copy_shifted.fn)
    with record_loads(), pytest.raises(RuntimeError, match="copy_shifted was compiled"):
        kernel[(1,)](torch.zeros(4), torch.zeros(4), 0, BLOCK=4)


def test_names_are_unique_and_tensors_on_the_cpu():
    with record_loads(x=torch.zeros(1)) as record:
        with pytest.raises(ValueError, match="x: already registered"):
            record.register(x=torch.zeros(1))
        with pytest.raises(ValueError, match="y: .* on meta"):
            record.register(y=torch.empty(1, device="meta"))
        record.register(z=None)
    assert set(np.sort([t.name for t in record.tensors.values() if ":" not in t.name])) == {"x"}
