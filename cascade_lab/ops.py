"""Passes as an operator: what stands between checked arguments and a backend, in a form that a compiler can keep whole.

An operator takes tensors and numbers, modifies nothing and says what it returns without running, so torch.compile,
torch.export and CUDA graphs take it as one node. Its derivative needs only the merged state of all its passes: the
weight of a key among all keys is e^(s_j - lse), whichever pass it came with, and so

    d_s_j = e^(s_j - lse) (d_o . v_j - d_o . o + d_lse)

holds pass by pass, with one o and one lse. A sink is a weight of the same kind without a value. Nothing here checks
arguments: `attention` and `cascade_attention` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cascade_lab import runtime
from cascade_lab.backends import Call, Pass
from cascade_lab.backends import torch as torch_backend

NO_TRITON_GRADIENT = (
    "attention has no gradient on backend='triton'; use backend='torch', torch.no_grad(), or detached inputs"
)


def dispatch(q: Tensor, passes: Sequence[Pass], call: Call) -> tuple[Tensor, Tensor]:
    """(o, lse) of all rows over the keys of all passes; partial states stay in float32 (float64 for float64 inputs).

    Traced, this is one operator; otherwise a plain call of the backend.
    """
    if not runtime.is_traced():
        return _attend(q, passes, call)
    scale, softcap, num_splits, out_dtype, reads, backend, sinks, k_scale, v_scale = call
    # the derivative on the torch backend wants o as it was before rounding
    op_dtype = out_dtype if backend == "triton" else torch.promote_types(torch.float32, q.dtype)
    o, lse, loaded = attention_op(
        q,
        [one.k_cache for one in passes],
        [one.v_cache for one in passes],
        [one.page_table for one in passes],
        [one.cache_seqlens for one in passes],
        [one.cu_seqlens_q for one in passes],
        [one.max_seqlen_q for one in passes],
        [one.window_size[0] for one in passes],
        [one.window_size[1] for one in passes],
        [one.tree_mask for one in passes],
        [one.tail_seqlens for one in passes],
        scale,
        softcap,
        num_splits,
        op_dtype,
        reads is not None,
        backend,
        sinks,
        k_scale,
        v_scale,
    )
    if reads is not None:
        reads.add_(loaded)
    return o.to(out_dtype), lse


def _attend(q: Tensor, passes: Sequence[Pass], call: Call) -> tuple[Tensor, Tensor]:
    # a kernel reads memory, which a view may hold negated, and so does torch where it copies half precision to float32
    if q.is_neg() or any(one.k_cache.is_neg() or one.v_cache.is_neg() for one in passes):
        q = q.resolve_neg()
        passes = [replace(one, k_cache=one.k_cache.resolve_neg(), v_cache=one.v_cache.resolve_neg()) for one in passes]
    if call.backend == "torch":
        return torch_backend.attend(q, passes, call)
    from cascade_lab.backends.triton import attention as triton_backend

    state = triton_backend.attend(q, passes, call)
    if call.reads is not None:
        runtime.count_write(call.reads)
    return state


@torch.library.custom_op("cascade_lab::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    page_tables: list[Tensor],
    cache_seqlens: list[Tensor],
    cu_seqlens_q: list[Tensor],
    max_seqlens_q: list[int],
    lefts: list[int],
    rights: list[int],
    tree_masks: list[Tensor | None],
    tail_seqlens: list[Tensor | None],
    softmax_scale: float,
    softcap: float,
    num_splits: int | None,
    out_dtype: torch.dtype,
    count_reads: bool,
    backend: str,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """o `[T, H_q, D_v]`, lse `[T, H_q]` and tokens loaded, `[H_kv]` int64 (`[0]` when they are not counted).

    One entry of each list per pass, as in `Pass`; backend is "torch" or "triton".
    """
    per_pass = (k_caches, v_caches, page_tables, cache_seqlens, cu_seqlens_q, max_seqlens_q)
    windows = zip(lefts, rights, strict=True)
    passes = [Pass(*x) for x in zip(*per_pass, windows, tree_masks, tail_seqlens, strict=True)]
    loaded = q.new_zeros(k_caches[0].shape[2] if count_reads else 0, dtype=torch.int64)
    reads = loaded if count_reads else None
    call = Call(softmax_scale, softcap, num_splits, out_dtype, reads, backend, sinks, k_scale, v_scale)
    return *_attend(q, passes, call), loaded


@attention_op.register_fake
def _(q, k_caches, v_caches, *rest):
    *_, out_dtype, count_reads, backend, _sinks, _k_scale, _v_scale = rest
    runtime._require_backend(backend, q)
    T, H_q, _ = q.shape
    return (
        q.new_empty((T, H_q, v_caches[0].shape[3]), dtype=out_dtype),
        q.new_empty((T, H_q), dtype=torch.promote_types(torch.float32, q.dtype)),
        q.new_empty(k_caches[0].shape[2] if count_reads else 0, dtype=torch.int64),
    )


def _keep_passes(ctx, inputs, output) -> None:
    q, *lists, softmax_scale, softcap, _num_splits, _out_dtype, _count_reads, backend, sinks, k_scale, v_scale = inputs
    if backend == "triton":
        raise RuntimeError(NO_TRITON_GRADIENT)
    *tensors, _, lefts, rights, tree_masks, tail_seqlens = lists
    per_pass = (x for one in zip(*tensors, tree_masks, tail_seqlens, strict=True) for x in one)
    ctx.save_for_backward(*output[:2], q, sinks, k_scale, v_scale, *per_pass)
    ctx.constants = [(left, right, softmax_scale, softcap) for left, right in zip(lefts, rights, strict=True)]


def _passes_backward(ctx, d_o, d_lse, _d_loaded):
    o, lse, q, sinks, k_scale, v_scale, *per_pass = ctx.saved_tensors
    scales = k_scale, v_scale
    # None for each input, in lists of None where the input was a list of tensors
    result = [[None] * len(x) if isinstance(x, list) else None for x in ctx.needs_input_grad]
    needs = [ctx.needs_input_grad[0], *(any(x) for x in ctx.needs_input_grad[1:3])]
    gradients = [
        torch_backend.attention_backward(
            needs, d_o, d_lse, o, lse, q, *per_pass[7 * i : 7 * i + 7], *scales, *constants
        )
        for i, constants in enumerate(ctx.constants)
    ]
    for i, (need, parts) in enumerate(zip(needs, zip(*gradients, strict=True), strict=True)):
        if need:
            result[i] = sum(parts) if i == 0 else list(parts)
    if ctx.needs_input_grad[-3]:
        result[-3] = _sinks_backward(d_o, d_lse, o, lse, sinks)
    return tuple(result)


def _sinks_backward(d_o, d_lse, o, lse, sinks) -> Tensor:
    """sum over rows of e^(sink - lse) (d_lse - d_o . o): what a key without value would get."""
    absent = sinks.isinf() | (lse == -torch.inf)
    weight = torch.where(absent, 0.0, torch.exp(sinks.to(lse.dtype) - torch.where(absent, 0.0, lse)))
    return (weight * (d_lse - (d_o * o).sum(-1))).sum(0).to(sinks.dtype)


attention_op.register_autograd(_passes_backward, setup_context=_keep_passes)
