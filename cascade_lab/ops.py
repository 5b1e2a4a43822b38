"""Passes as operators: what stands between checked arguments and a backend, in a form that a compiler can keep whole.

An operator takes tensors and numbers, modifies nothing and says what it returns without running, so torch.compile,
torch.export and CUDA graphs take it as one node. Its derivative needs only the merged state of all its passes: the
weight of a key among all keys is e^(s_j - lse), whichever pass it came with, and so

    d_s_j = e^(s_j - lse) (d_o . v_j - d_o . o + d_lse)

holds pass by pass, with one o and one lse. Nothing here checks arguments: `attention` and `levels` have done that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cascade_lab import runtime
from cascade_lab.backends import Pass
from cascade_lab.backends import torch as torch_backend
from cascade_lab.states import merge_states

NO_TRITON_GRADIENT = (
    "attention has no gradient on backend='triton'; use backend='torch', torch.no_grad(), or detached inputs"
)


def run_passes(
    q: Tensor,
    passes: Sequence[Pass],
    *,
    softmax_scale: float,
    softcap: float,
    num_splits: int | None,
    out_dtype: torch.dtype,
    reads: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of all rows over the keys of all passes; partial states stay in float32 (float64 for float64 inputs).

    Compiled, this is one operator; uncompiled, a plain call.
    """
    if not torch.compiler.is_compiling():
        return _compute(q, passes, softmax_scale, softcap, num_splits, out_dtype, reads, backend)
    # the derivative on the torch backend wants o as it was before rounding
    op_dtype = out_dtype if backend == "triton" else torch.promote_types(torch.float32, q.dtype)
    options = (softmax_scale, softcap, num_splits, op_dtype, reads is not None, backend)
    if len(passes) == 1:
        one = passes[0]
        o, lse, loaded = attention_op(
            q,
            one.k_cache,
            one.v_cache,
            one.page_table,
            one.cache_seqlens,
            one.cu_seqlens_q,
            one.max_seqlen_q,
            *one.window_size,
            one.tree_mask,
            one.tail_seqlens,
            *options,
        )
    else:
        o, lse, loaded = cascade_attention_op(
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
            *options,
        )
    if reads is not None:
        reads.add_(loaded)
    return o.to(out_dtype), lse


def _compute(
    q: Tensor,
    passes: Sequence[Pass],
    softmax_scale: float,
    softcap: float,
    num_splits: int | None,
    out_dtype: torch.dtype,
    reads: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    common = dict(softmax_scale=softmax_scale, softcap=softcap, num_splits=num_splits, reads=reads)
    if backend == "triton":
        from cascade_lab.backends.triton.attention import run_passes as run_triton

        return run_triton(q, passes, out_dtype=out_dtype, **common)
    partial_dtype = out_dtype if len(passes) == 1 else torch.promote_types(torch.float32, q.dtype)
    states = [torch_backend.attention(q, **vars(one), out_dtype=partial_dtype, **common) for one in passes]
    if len(states) == 1:
        return states[0]
    o, lse = (torch.stack(parts, dim=1) for parts in zip(*states, strict=True))
    return merge_states(o, lse, out_dtype=out_dtype, backend=backend)


@torch.library.custom_op("cascade_lab::cascade_attention", mutates_args=())
def cascade_attention_op(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """o `[T, H_q, D_v]`, lse `[T, H_q]` and tokens loaded, `[H_kv]` int64 (`[0]` when they are not counted).

    One entry of each list per pass, as in `Pass`; backend is "torch" or "triton".
    """
    per_pass = (k_caches, v_caches, page_tables, cache_seqlens, cu_seqlens_q, max_seqlens_q)
    windows = zip(lefts, rights, strict=True)
    passes = [Pass(*x) for x in zip(*per_pass, windows, tree_masks, tail_seqlens, strict=True)]
    loaded = q.new_zeros(k_caches[0].shape[2] if count_reads else 0, dtype=torch.int64)
    reads = loaded if count_reads else None
    return *_compute(q, passes, softmax_scale, softcap, num_splits, out_dtype, reads, backend), loaded


@torch.library.custom_op("cascade_lab::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    left: int,
    right: int,
    tree_mask: Tensor | None,
    tail_seqlens: Tensor | None,
    softmax_scale: float,
    softcap: float,
    num_splits: int | None,
    out_dtype: torch.dtype,
    count_reads: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`cascade_attention_op` of a single pass."""
    one = Pass(
        k_cache,
        v_cache,
        page_table,
        cache_seqlens,
        cu_seqlens_q,
        max_seqlen_q,
        (left, right),
        tree_mask,
        tail_seqlens,
    )
    loaded = q.new_zeros(k_cache.shape[2] if count_reads else 0, dtype=torch.int64)
    reads = loaded if count_reads else None
    return *_compute(q, [one], softmax_scale, softcap, num_splits, out_dtype, reads, backend), loaded


def _new_state(q, k_cache, v_cache, out_dtype, count_reads, backend) -> tuple[Tensor, Tensor, Tensor]:
    runtime.require_backend(backend, q)
    T, H_q, _ = q.shape
    return (
        q.new_empty((T, H_q, v_cache.shape[3]), dtype=out_dtype),
        q.new_empty((T, H_q), dtype=torch.promote_types(torch.float32, q.dtype)),
        q.new_empty(k_cache.shape[2] if count_reads else 0, dtype=torch.int64),
    )


@attention_op.register_fake
def _(q, k_cache, v_cache, *rest):
    return _new_state(q, k_cache, v_cache, *rest[-3:])


@cascade_attention_op.register_fake
def _(q, k_caches, v_caches, *rest):
    return _new_state(q, k_caches[0], v_caches[0], *rest[-3:])


def _keep_attention(ctx, inputs, output) -> None:
    *arguments, softmax_scale, softcap, _num_splits, _out_dtype, _count_reads, backend = inputs
    if backend == "triton":
        raise RuntimeError(NO_TRITON_GRADIENT)
    q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, _, left, right, tree_mask, tail_seqlens = arguments
    ctx.save_for_backward(
        *output[:2], q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, tree_mask, tail_seqlens
    )
    ctx.constants = softmax_scale, left, right, softcap


def _attention_backward(ctx, d_o, d_lse, _d_loaded):
    needs = list(ctx.needs_input_grad[:3])
    gradients = torch_backend.attention_backward(needs, d_o, d_lse, *ctx.saved_tensors, *ctx.constants)
    gradients = (x if need else None for x, need in zip(gradients, needs, strict=True))
    return *gradients, *(None for _ in range(14))


def _keep_cascade(ctx, inputs, output) -> None:
    q, *lists, softmax_scale, softcap, _num_splits, _out_dtype, _count_reads, backend = inputs
    if backend == "triton":
        raise RuntimeError(NO_TRITON_GRADIENT)
    *tensors, _, lefts, rights, tree_masks, tail_seqlens = lists
    per_pass = (x for one in zip(*tensors, tree_masks, tail_seqlens, strict=True) for x in one)
    ctx.save_for_backward(*output[:2], q, *per_pass)
    ctx.constants = [(softmax_scale, left, right, softcap) for left, right in zip(lefts, rights, strict=True)]


def _cascade_backward(ctx, d_o, d_lse, _d_loaded):
    o, lse, q, *per_pass = ctx.saved_tensors
    need_q, need_k, need_v = ctx.needs_input_grad[0], *(any(x) for x in ctx.needs_input_grad[1:3])
    d_q, d_k, d_v = [], [], []
    for i, constants in enumerate(ctx.constants):
        arguments = (o, lse, q, *per_pass[7 * i : 7 * i + 7], *constants)
        gradients = torch_backend.attention_backward([need_q, need_k, need_v], d_o, d_lse, *arguments)
        for collected, x in zip((d_q, d_k, d_v), gradients, strict=True):
            collected.append(x)
    # None for each input, in lists of None where the input was a list of tensors
    result = [[None] * len(x) if isinstance(x, list) else None for x in ctx.needs_input_grad]
    if need_q:
        result[0] = sum(d_q)
    if need_k:
        result[1] = d_k
    if need_v:
        result[2] = d_v
    return tuple(result)


attention_op.register_autograd(_attention_backward, setup_context=_keep_attention)
cascade_attention_op.register_autograd(_cascade_backward, setup_context=_keep_cascade)
