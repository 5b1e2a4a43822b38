"""What stands between a public call and its passes: the checks of arguments, and a list of passes run as one state.

`attention` has one pass and `cascade_attention` one for each level. A pass says which rows read which keys and is
checked by itself; the options of a call hold for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cascade_lab import _checks, ops, paging, runtime
from cascade_lab.backends import Call, Pass
from cascade_lab.backends.triton.config import MAX_HEAD_DIM
from cascade_lab.states import State

INPUT_DTYPES = {"triton": (torch.float32, torch.float16, torch.bfloat16)}
INPUT_DTYPES["torch"] = (*INPUT_DTYPES["triton"], torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_SPLITS = 1024
NO_LIMIT = 1 << 30
FLOAT32 = torch.finfo(torch.float32)
INT32, INT64 = (torch.int32,), (torch.int64,)


class Values(NamedTuple):
    """The int32 tensors of a pass whose numbers the checks look at."""

    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    tail_seqlens: torch.Tensor | None


def on_host(passes: Sequence[Values]) -> list[Values]:
    """The same numbers on the CPU, by one copy for all passes: a device is waited for once."""
    given = [x for values in passes for x in values if x is not None]
    if all(x.is_cpu for x in given):
        return list(passes)
    copy = torch.cat([x.reshape(-1) for x in given]).cpu()
    parts = iter(part.view(x.shape) for part, x in zip(copy.split([x.numel() for x in given]), given, strict=True))
    return [Values(*(None if x is None else next(parts) for x in values)) for values in passes]


def run_passes(q: torch.Tensor, passes: Sequence[Pass], call: Call) -> State:
    """Check what all passes share, run them over the same rows and merge their states; partials stay in float32."""
    return State(*ops.dispatch(q, passes, check_call(q, passes, call)))


def check_call(q: torch.Tensor, passes: Sequence[Pass], call: Call) -> Call:
    """The options of a call, checked and filled in."""
    backend = call.backend
    scale = q.shape[-1] ** -0.5 if call.softmax_scale is None else _in_float32("softmax_scale", call.softmax_scale)
    softcap = _in_float32("softcap", call.softcap)
    if softcap < 0:
        raise ValueError(f"softcap: expected a number >= 0 (0 is off), given {softcap}")
    num_splits, out_dtype, reads = call.num_splits, call.out_dtype, call.reads
    if num_splits is not None:
        num_splits = _checks.integer("num_splits", num_splits, 1, MAX_SPLITS)
    out_dtype = q.dtype if out_dtype is None else out_dtype
    if out_dtype not in INPUT_DTYPES[backend]:
        allowed = _checks.dtype_names(INPUT_DTYPES[backend])
        raise TypeError(f"out_dtype: expected {allowed} on backend {backend!r}, given {out_dtype}")
    k_cache, v_cache = passes[0].k_cache, passes[0].v_cache
    if reads is not None:
        _checks.tensor("reads", reads, "a contiguous [H_kv]", (k_cache.shape[2],), dtypes=INT64, like=("q", q))
        if not reads.is_contiguous():
            raise ValueError(f"reads: expected a contiguous [H_kv], given strides {reads.stride()}")
    sinks = None if call.sinks is None else _check_sinks(call.sinks, q, backend)
    k_scale, v_scale = (_check_scale(name, getattr(call, name), q, k_cache.shape[2]) for name in ("k_scale", "v_scale"))
    if torch.is_grad_enabled():
        _check_gradients(backend, q, k_cache, v_cache, sinks, k_scale, v_scale)
    return Call(scale, softcap, num_splits, out_dtype, reads, backend, sinks, k_scale, v_scale)


def check_heads(q, k_cache, v_cache, backend: str, layout: str = "NHD") -> tuple[str, torch.Tensor, torch.Tensor]:
    """q, k_cache and v_cache: rank, dtype, device, unit last stride, head counts and dims.

    Returns the backend, and both caches as views `[num_pages, page_size, H_kv, D]`, whatever their layout.
    """
    _checks.tensor("q", q)
    backend = runtime._pick_backend(backend, q)
    dtypes = INPUT_DTYPES[backend]
    k_cache, v_cache = paging.as_nhd("k_cache", k_cache, layout), paging.as_nhd("v_cache", v_cache, layout, "D_v")
    shapes = (
        ("q", q, "[T, H_q, D]"),
        ("k_cache", k_cache, "[num_pages, page_size, H_kv, D]"),
        ("v_cache", v_cache, "[num_pages, page_size, H_kv, D_v]"),
    )
    like = ("q", q)
    for name, x, dims in shapes:
        _checks.tensor(name, x, dims, like=like)
        if x.dtype not in dtypes and (x is q or x.dtype not in FLOAT8):
            allowed = _checks.dtype_names(dtypes)
            raise TypeError(f"{name}: expected {allowed} on backend {backend!r}, given {x.dtype}")
        if x.dtype != q.dtype and x.dtype not in FLOAT8:
            raise TypeError(f"{name}: expected dtype {q.dtype} as q, or {_checks.dtype_names(FLOAT8)}, given {x.dtype}")
        if x.is_meta:
            raise ValueError(f"{name}: expected a tensor with data, given device {x.device}")
        _checks.unit_stride(name, x)
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache: expected dtype {k_cache.dtype} as k_cache, given {v_cache.dtype}")
    runtime.refuse_transforms("attention")
    runtime.refuse_forward_mode("attention", q, k_cache, v_cache)
    _, H_q, D = q.shape
    H_kv = k_cache.shape[2]
    if k_cache.shape[-1] != D or D < 1:
        raise ValueError(f"k_cache: expected head dim {D} >= 1 as q, given {tuple(k_cache.shape)}")
    if v_cache.shape[:3] != k_cache.shape[:3] or v_cache.shape[-1] < 1:
        raise ValueError(
            f"v_cache: expected [num_pages, page_size, H_kv] = {tuple(k_cache.shape[:3])} as k_cache and D_v >= 1, "
            f"given {tuple(v_cache.shape)}"
        )
    if backend == "triton":
        for name, dim, x in (("q", "D", q), ("v_cache", "D_v", v_cache)):
            if x.shape[-1] > MAX_HEAD_DIM:
                raise ValueError(
                    f"{name}: expected {dim} of at most {MAX_HEAD_DIM} on backend 'triton', given {x.shape[-1]}"
                )
    if k_cache.shape[1] < 1:
        raise ValueError(f"k_cache: expected a page_size >= 1, given {tuple(k_cache.shape)}")
    if H_kv < 1 or H_q < 1 or H_q % H_kv:
        page_size = k_cache.shape[1]
        other = paging.LAYOUTS[1 - paging.LAYOUTS.index(layout)]
        raise ValueError(
            f"q: expected H_q to be a positive multiple of H_kv = {H_kv}, given H_q = {H_q}"
            + (f"; the caches fit layout={other!r} with H_kv = {page_size}" if H_q and H_q % page_size == 0 else "")
        )
    return backend, k_cache, v_cache


def check_pass(
    q,
    k_cache,
    v_cache,
    page_table,
    cache_seqlens,
    cu_seqlens_q,
    *,
    max_seqlen_q=None,
    causal=False,
    tree_mask=None,
    tail_seqlens=None,
    window_size=(-1, -1),
    values: Values | None = None,
) -> Pass:
    """Check the arguments that say which rows read which keys, and fill in the absent ones.

    Their numbers are looked at on the host, in `values` where those are there already.
    """
    T, like = q.shape[0], ("q", q)
    _checks.tensor("page_table", page_table, "[R, max_pages]", dtypes=INT32, like=like)
    R = page_table.shape[0]
    _checks.tensor("cache_seqlens", cache_seqlens, "[R]", (R,), dtypes=INT32, like=like)
    if max_seqlen_q is not None:
        max_seqlen_q = min(_checks.integer("max_seqlen_q", max_seqlen_q, 0), max(1, T))
    if cu_seqlens_q is None:
        if R != T:
            raise ValueError(
                f"cu_seqlens_q: expected row offsets, or None with one row per request (T = R), "
                f"given None with T = {T} rows and R = {R} requests"
            )
        cu_seqlens_q = torch.arange(T + 1, dtype=torch.int32, device=q.device)
        max_seqlen_q = max(1, max_seqlen_q or 1)
    _checks.tensor("cu_seqlens_q", cu_seqlens_q, "[R + 1]", (R + 1,), dtypes=INT32, like=like)
    window_size = _check_window(window_size, causal)
    _check_tree(tree_mask, tail_seqlens, window_size, causal, like, R)
    if runtime.checks_enabled():
        if values is None:
            (values,) = on_host([Values(page_table, cache_seqlens, cu_seqlens_q, tail_seqlens)])
        longest = _check_rows(values.cu_seqlens_q, T, max_seqlen_q)
        max_seqlen_q = longest if max_seqlen_q is None else max_seqlen_q
        paging.check_page_table(values.page_table, values.cache_seqlens, k_cache.shape[0], k_cache.shape[1])
        _check_tail(tree_mask, values.tail_seqlens, values.cu_seqlens_q, values.cache_seqlens)
    elif max_seqlen_q is None:
        max_seqlen_q = T
    return Pass(
        k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, window_size, tree_mask, tail_seqlens
    )


def _check_sinks(sinks, q, backend: str) -> torch.Tensor:
    _checks.tensor("sinks", sinks, "[H_q]", (q.shape[1],), like=("q", q))
    if sinks.dtype not in INPUT_DTYPES[backend]:
        allowed = _checks.dtype_names(INPUT_DTYPES[backend])
        raise TypeError(f"sinks: expected {allowed} on backend {backend!r}, given {sinks.dtype}")
    return sinks


def _check_scale(name: str, scale, q, num_kv_heads: int) -> torch.Tensor | None:
    """A scale as contiguous float32 `[H_kv]`: a number or a tensor without dims holds for all heads."""
    if scale is None:
        return None
    if isinstance(scale, torch.Tensor):
        _checks.tensor(name, scale, dtypes=(torch.float32,), like=("q", q))
        if scale.dim() and scale.shape != (num_kv_heads,):
            raise ValueError(f"{name}: expected a number, [] or [H_kv] = [{num_kv_heads}], given {tuple(scale.shape)}")
        if runtime.checks_enabled() and not ((scale > 0) & (scale < math.inf)).all():
            raise ValueError(f"{name}: expected finite numbers > 0, given {scale.tolist()}")
        return scale.expand(num_kv_heads).contiguous()
    if not _in_float32(name, scale) > 0:
        raise ValueError(f"{name}: expected a number > 0, given {scale}")
    return torch.full((num_kv_heads,), float(scale), dtype=torch.float32, device=q.device)


def _check_gradients(backend: str, q, k_cache, v_cache, sinks, k_scale, v_scale) -> None:
    """Refuse a gradient that no backend, or not this one, can give."""
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if x is not None and x.requires_grad:
            raise RuntimeError(f"{name}: attention has no gradient of it; use torch.no_grad(), or a detached tensor")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.requires_grad and x.dtype in FLOAT8:
            raise RuntimeError(f"{name}: attention has no gradient of a cache in {x.dtype}; detach it")
    inputs = (q, k_cache, v_cache) if sinks is None else (q, k_cache, v_cache, sinks)
    if backend == "triton" and any(x.requires_grad for x in inputs):
        raise RuntimeError(ops.NO_TRITON_GRADIENT)


def _in_float32(name: str, x) -> float:
    _checks.number(name, x)
    if not (x == 0 or FLOAT32.tiny <= abs(x) <= FLOAT32.max):
        raise ValueError(f"{name}: expected a finite number in float32's normal range, given {x}")
    return float(x)


def _check_window(window_size, causal) -> tuple[int, int]:
    """(left, right) with causal folded in as right = 0."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected a bool, given {type(causal).__name__} {causal!r}")
    left, right = _pair(window_size)
    # More than any request holds, and int32 positions stay in range when it is added to them.
    left, right = (min(_checks.integer("window_size", x, -1), NO_LIMIT) for x in (left, right))
    return left, 0 if causal else right


def _pair(window_size) -> tuple:
    if window_size is None:
        return -1, -1
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: expected (left, right) or None, given {_checks.shown(window_size)}")
    return tuple(-1 if x is None else x for x in window_size)


def _check_tree(tree_mask, tail_seqlens, window_size, causal, like, num_requests: int) -> None:
    if tree_mask is None:
        if tail_seqlens is not None:
            raise ValueError("tail_seqlens: expected None without tree_mask, given a tensor")
        return
    _checks.tensor("tree_mask", tree_mask, "[T, words]", dtypes=INT64, like=like)
    if tree_mask.shape[0] != like[1].shape[0]:
        T = like[1].shape[0]
        raise ValueError(f"tree_mask: expected [T, words] with T = {T}, given {tuple(tree_mask.shape)}")
    if window_size != (-1, -1):
        given = "causal=True" if causal else f"window_size={window_size}"
        raise ValueError(f"tree_mask: expected neither causal nor window_size beside it, given {given}")
    if tail_seqlens is not None:
        _checks.tensor("tail_seqlens", tail_seqlens, "[R]", (num_requests,), dtypes=INT32, like=like)


def _check_rows(cu_seqlens_q, T: int, max_seqlen_q: int | None) -> int:
    """Row offsets run from 0 to T without falling; returns the most rows of a request. Reads values back."""
    offsets = cu_seqlens_q.tolist()
    lengths = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
    if offsets[0] != 0 or offsets[-1] != T or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens_q: expected offsets rising from 0 to T = {T}, given {_short(offsets)}")
    longest = max(lengths, default=0)
    if max_seqlen_q is not None and max_seqlen_q < longest:
        raise ValueError(f"max_seqlen_q: expected at least {longest}, the longest request, given {max_seqlen_q}")
    return longest


def _check_tail(tree_mask, tail_seqlens, cu_seqlens_q, cache_seqlens) -> None:
    """A tail fits its keys, and the mask has a bit for each tail key. Reads values back."""
    if tree_mask is None or len(cache_seqlens) == 0:
        return
    rows = cu_seqlens_q.diff()
    tail = rows if tail_seqlens is None else tail_seqlens
    limit = torch.clamp(cache_seqlens, max=64 * tree_mask.shape[1])
    wrong = (rows > 0) & ((tail < 0) | (tail > limit))
    if wrong.any():
        r = int(wrong.nonzero()[0])
        raise ValueError(
            f"tail_seqlens: expected 0 to {int(cache_seqlens[r])} keys and at most {64 * tree_mask.shape[1]} mask bits "
            f"for request {r}, given {int(tail[r])}" + (" (its query rows)" if tail_seqlens is None else "")
        )


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"
