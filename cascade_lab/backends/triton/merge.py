"""Merge of attention states: lse = log sum_s e^lse_s and o = sum_s e^(lse_s - lse) o_s, one pass over the states.

A program owns whole rows (one query, one head, all D_v columns), so it has read everything that it overwrites and the
output may alias an input. A row whose lse says "empty" is never loaded: nothing in its o can reach the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cascade_lab import runtime
from cascade_lab.backends.triton.mode import jit, run_kernel

NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))
STAGES = tl.constexpr(3)


@jit
def round_to(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Cast float32 `x` to `dtype`, to nearest even; spelled out for bfloat16, which the interpreter truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@jit
def _absorb(b_acc, b_max, b_sum, b_o, b_lse):
    """Fold one state into the running (acc, max, sum); the final o is acc / sum, the final lse is max + log(sum)."""
    new_max = tl.maximum(b_max, b_lse, propagate_nan=tl.PropagateNan.ALL)
    shift = tl.where(new_max == NEG_INF, 0.0, new_max)
    keep = tl.exp(b_max - shift)
    weight = tl.exp(b_lse - shift)
    return b_acc * keep + b_o * weight, new_max, b_sum * keep + weight


@jit
def _load_state(o_ptr, lse_ptr, o_o, o_lse, m_row, m_d):
    """Load lse [BLOCK_R, 1] with +inf read as empty, and o [BLOCK_R, BLOCK_D] of the rows that are not empty.

    A column beside o's columns, so that one load of lse serves both the mask of o and its weight.
    """
    b_lse = tl.load(lse_ptr + o_lse, mask=m_row, other=NEG_INF)
    b_lse = tl.where(b_lse == POS_INF, NEG_INF, b_lse)
    b_o = tl.load(o_ptr + o_o, mask=(b_lse != NEG_INF) & m_d, other=0.0)
    return b_o.to(tl.float32), b_lse


@jit
def _store_state(o_ptr, lse_ptr, o_o, o_lse, m_row, m_d, b_acc, b_max, b_sum, INTERPRETED: tl.constexpr):
    """Normalise and store; a row without keys is written as o = 0, lse = -inf."""
    empty = b_max == NEG_INF
    b_o = b_acc / tl.where(empty, 1.0, b_sum)
    b_lse = tl.where(empty, NEG_INF, b_max + tl.log(tl.where(empty, 1.0, b_sum)))
    tl.store(o_ptr + o_o, round_to(b_o, o_ptr.dtype.element_ty, INTERPRETED), mask=m_row & m_d)
    tl.store(lse_ptr + o_lse, b_lse, mask=m_row)


@jit
def _merge_pair_kernel(
    oa_ptr, lsea_ptr, ob_ptr, lseb_ptr, o_ptr, lse_ptr,
    num_rows, H,
    stride_oa_t, stride_oa_h, stride_la_t, stride_la_h,
    stride_ob_t, stride_ob_h, stride_lb_t, stride_lb_h,
    stride_o_t, stride_o_h, stride_l_t, stride_l_h,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # [BLOCK_R, 1] rows (t, h), [1, BLOCK_D] columns
    o_row = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_row = o_row < num_rows
    m_d = o_d < D
    i_t = o_row // H
    i_h = o_row % H

    o_oa = (i_t * stride_oa_t + i_h * stride_oa_h) + o_d
    o_ob = (i_t * stride_ob_t + i_h * stride_ob_h) + o_d
    b_oa, b_lsea = _load_state(oa_ptr, lsea_ptr, o_oa, i_t * stride_la_t + i_h * stride_la_h, m_row, m_d)
    b_ob, b_lseb = _load_state(ob_ptr, lseb_ptr, o_ob, i_t * stride_lb_t + i_h * stride_lb_h, m_row, m_d)

    # lse = log(e^lse_a + e^lse_b), the larger exponent factored out
    b_max = tl.maximum(b_lsea, b_lseb, propagate_nan=tl.PropagateNan.ALL)
    shift = tl.where(b_max == NEG_INF, 0.0, b_max)
    w_a = tl.exp(b_lsea - shift)
    w_b = tl.exp(b_lseb - shift)
    b_acc = w_a * b_oa + w_b * b_ob
    o_o = (i_t * stride_o_t + i_h * stride_o_h) + o_d
    o_lse = i_t * stride_l_t + i_h * stride_l_h
    _store_state(o_ptr, lse_ptr, o_o, o_lse, m_row, m_d, b_acc, b_max, w_a + w_b, INTERPRETED)


@jit
def _merge_many_kernel(
    os_ptr, lses_ptr, o_ptr, lse_ptr,
    num_rows, S, H,
    stride_os_t, stride_os_s, stride_os_h, stride_ls_t, stride_ls_s, stride_ls_h,
    stride_o_t, stride_o_h, stride_l_t, stride_l_h,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # [BLOCK_R, 1] rows (t, h), [1, BLOCK_D] columns
    o_row = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_row = o_row < num_rows
    m_d = o_d < D
    i_t = o_row // H
    i_h = o_row % H

    b_max = tl.full([BLOCK_R, 1], NEG_INF, tl.float32)
    b_sum = tl.zeros([BLOCK_R, 1], tl.float32)
    b_acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    o_os = (i_t * stride_os_t + i_h * stride_os_h) + o_d
    o_ls = i_t * stride_ls_t + i_h * stride_ls_h
    # the loads of several states are in flight at once
    for _ in tl.range(S, num_stages=STAGES):
        b_o, b_lse = _load_state(os_ptr, lses_ptr, o_os, o_ls, m_row, m_d)
        b_acc, b_max, b_sum = _absorb(b_acc, b_max, b_sum, b_o, b_lse)
        o_os += stride_os_s
        o_ls += stride_ls_s
    o_o = (i_t * stride_o_t + i_h * stride_o_h) + o_d
    o_lse = i_t * stride_l_t + i_h * stride_l_h
    _store_state(o_ptr, lse_ptr, o_o, o_lse, m_row, m_d, b_acc, b_max, b_sum, INTERPRETED)


def _launch(kernel, rows: int, D: int, itemsize: int, *args) -> None:
    """Rows x columns of a program fill 4 warps with 16-byte accesses; the interpreter pays per program: more rows."""
    interpreted = runtime.triton_mode() == "interpreted"
    block_d = triton.next_power_of_2(D)
    block_r = max(1, (16384 if interpreted else 4 * 32 * 16 // itemsize) // block_d)
    grid = (triton.cdiv(rows, block_r),)
    sizes = dict(D=D, BLOCK_R=block_r, BLOCK_D=block_d)
    run_kernel(kernel, grid, *args, **sizes, INTERPRETED=interpreted, num_warps=4)


def merge_pair(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write the merge of two states into (o [T, H_q, D], lse [T, H_q]); any strides with unit last stride in o."""
    T, H, D = o_a.shape
    if T * H == 0:
        return
    strides = [s for x in (o_a, lse_a, o_b, lse_b, o, lse) for s in x.stride()[:2]]
    itemsize = min(o_a.element_size(), o_b.element_size())
    _launch(_merge_pair_kernel, T * H, D, itemsize, o_a, lse_a, o_b, lse_b, o, lse, T * H, H, *strides)


def merge_many(os: torch.Tensor, lses: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Write the merge of os [T, S, H_q, D], lses [T, S, H_q] into (o [T, H_q, D], lse [T, H_q]); S may be 0."""
    T, S, H, D = os.shape
    if T * H == 0:
        return
    strides = [s for x in (os, lses) for s in x.stride()[:3]] + [s for x in (o, lse) for s in x.stride()[:2]]
    _launch(_merge_many_kernel, T * H, D, os.element_size(), os, lses, o, lse, T * H, S, H, *strides)
