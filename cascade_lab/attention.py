"""One attention pass: packed query rows read a paged KV cache and return a state.

For row t of request r, over the visible keys j among the first cache_seqlens[r] tokens of its pages:

    s_j = softmax_scale * q_t . k_j,    lse_t = log sum_j e^s_j,    o_t = sum_j e^(s_j - lse_t) v_j.

Rows are aligned to the bottom right: row i of Q over K keys stands at key position i + K - Q. This module checks the
arguments and picks a backend; the loops are in `backends`, and merging passes is the business of `states` and `levels`.
"""

from __future__ import annotations

import numbers

import torch

from cascade_lab import ops, paging, runtime
from cascade_lab.backends import Pass
from cascade_lab.states import State

__all__ = ["attention"]

INPUT_DTYPES = {"triton": (torch.float32, torch.float16, torch.bfloat16)}
INPUT_DTYPES["torch"] = (*INPUT_DTYPES["triton"], torch.float64)
MAX_SPLITS = 1024
NO_LIMIT = 1 << 30
FLOAT32 = torch.finfo(torch.float32)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    tree_mask: torch.Tensor | None = None,
    tail_seqlens: torch.Tensor | None = None,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    num_splits: int | None = None,
    out_dtype: torch.dtype | None = None,
    reads: torch.Tensor | None = None,
    backend: str = "auto",
) -> State:
    """Attention of packed, ragged query rows over a paged KV cache, as a mergeable state.

    Args:
        q: `[T, H_q, D]` float32, float16 or bfloat16 (float64 on the torch backend), unit last stride. T rows packed by
            request; query head h reads KV head h // (H_q / H_kv).
        k_cache: `[num_pages, page_size, H_kv, D]`, dtype of q, any strides with unit last stride.
        v_cache: `[num_pages, page_size, H_kv, D_v]`, likewise; D_v may differ from D, and v may be a view of k.
        page_table: `[R, max_pages]` int32. Only the pages of the first cache_seqlens[r] tokens are looked at.
        cache_seqlens: `[R]` int32, tokens read per request, newly written ones included.
        cu_seqlens_q: `[R + 1]` int32 row offsets from 0 to T; None means one row per request (T = R).
        max_seqlen_q: at least the largest number of rows of a request; computed when absent (T while compiling).
        softmax_scale: factor on the scores, 0 or a number that float32 holds as normal; None means D ** -0.5.
        causal: row i sees keys up to its own position (window right = 0).
        tree_mask: `[T, words]` int64. Bit b (word b // 64, bit b % 64) of a row lets it see key b of the tail, the last
            tail_seqlens[r] keys; all earlier keys are visible. Not together with causal or window_size.
        tail_seqlens: `[R]` int32 for tree_mask; default the number of query rows of each request.
        window_size: (left, right) keys visible beside the row's own position; -1 is no limit. None is (-1, -1).
        softcap: c > 0 replaces s by c tanh(s / c).
        num_splits: parts into which the keys are cut (split-KV); None chooses from shapes. Never changes the result
            beyond rounding. The torch backend walks the keys in one loop and takes the number as checked but unused.
        out_dtype: dtype of o; default that of q. lse is float32 (float64 for float64 inputs) in every case.
        reads: `[H_kv]` int64; the pass adds the number of K rows it loads per KV head (V rows are as many), once for
            each row tile that loads them. This is the ledger's `tile_tokens` of the launch's block_m.
        backend: "auto" (Triton for CUDA tensors, torch for CPU tensors), "triton" or "torch".

    Returns:
        State, o `[T, H_q, D_v]` and lse `[T, H_q]`. A row without visible keys has o = 0 and lse = -inf.
        Differentiable in q, k_cache, v_cache on the torch backend.

    Raises:
        TypeError: wrong type or dtype. ValueError: wrong rank, shape, device, stride or value. Nothing has run then.
        RuntimeError: a gradient is required on the Triton backend, or the backend cannot run here.

    Memory that no query row needs is not read and may hold anything. Among the keys that are read, NaN or infinity in K
    harms only the rows that see that key. In V it also makes NaN, on the Triton backend, of rows that do not see the
    key but share a tile with one that does, for a weight of 0 times NaN is NaN; the torch backend keeps such rows
    apart. Scores may be as large as 2.3e38 after scaling: exponents are taken in base 2, which float32 holds so far.

    Under torch.compile a call is one operator, and checks that read values are skipped as in `runtime.unchecked()`.

    Names and alignment follow flash-attention; splitting keys follows Flash-Decoding (Dao et al., 2023).
    """
    runtime.check_is_tensor("q", q)
    backend = runtime.pick_backend(backend, q)
    check_heads(q, k_cache, v_cache, backend)
    only = check_pass(
        q,
        k_cache,
        v_cache,
        page_table,
        cache_seqlens,
        cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        causal=causal,
        tree_mask=tree_mask,
        tail_seqlens=tail_seqlens,
        window_size=window_size,
    )
    return run_passes(
        q,
        [only],
        softmax_scale=softmax_scale,
        softcap=softcap,
        num_splits=num_splits,
        out_dtype=out_dtype,
        reads=reads,
        backend=backend,
    )


def run_passes(
    q: torch.Tensor, passes: list[Pass], *, softmax_scale, softcap, num_splits, out_dtype, reads, backend: str
) -> State:
    """Check what all passes share, run them over the same rows and merge their states; partials stay in float32."""
    softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else _check_float("softmax_scale", softmax_scale)
    softcap = _check_float("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap: expected a number >= 0 (0 is off), given {softcap}")
    if num_splits is not None:
        num_splits = _check_int("num_splits", num_splits, 1, MAX_SPLITS)
    out_dtype = q.dtype if out_dtype is None else out_dtype
    if out_dtype not in INPUT_DTYPES[backend]:
        allowed = _names(INPUT_DTYPES[backend])
        raise TypeError(f"out_dtype: expected one of {allowed} on backend {backend!r}, given {out_dtype}")
    k_cache, v_cache = passes[0].k_cache, passes[0].v_cache
    _check_reads(reads, k_cache.shape[2], q)
    if backend == "triton" and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_cache, v_cache)):
        raise RuntimeError(ops.NO_TRITON_GRADIENT)
    return State(
        *ops.run_passes(
            q,
            passes,
            softmax_scale=softmax_scale,
            softcap=softcap,
            num_splits=num_splits,
            out_dtype=out_dtype,
            reads=reads,
            backend=backend,
        )
    )


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
) -> Pass:
    """Check the arguments that say which rows read which keys, and fill in the absent ones."""
    T = q.shape[0]
    num_requests = _check_index("page_table", page_table, 2, q).shape[0]
    _check_index("cache_seqlens", cache_seqlens, 1, q, num_requests, "[R]")
    if max_seqlen_q is not None:
        max_seqlen_q = min(_check_int("max_seqlen_q", max_seqlen_q, 0), max(1, T))
    if cu_seqlens_q is None:
        if num_requests != T:
            raise ValueError(
                f"cu_seqlens_q: expected row offsets, or None with one row per request (T = R), "
                f"given None with T = {T} rows and R = {num_requests} requests"
            )
        cu_seqlens_q = torch.arange(T + 1, dtype=torch.int32, device=q.device)
        max_seqlen_q = max(1, max_seqlen_q or 1)
    _check_index("cu_seqlens_q", cu_seqlens_q, 1, q, num_requests + 1, "[R + 1]")
    window_size = _check_window(window_size, causal)
    _check_tree(tree_mask, tail_seqlens, window_size, causal, q, num_requests)
    if runtime.checks_enabled():
        longest = _check_rows(cu_seqlens_q, T, max_seqlen_q)
        max_seqlen_q = longest if max_seqlen_q is None else max_seqlen_q
        paging.check_page_table(page_table, cache_seqlens, k_cache.shape[0], k_cache.shape[1])
        _check_tail(tree_mask, tail_seqlens, cu_seqlens_q, cache_seqlens)
    elif max_seqlen_q is None:
        max_seqlen_q = T
    return Pass(
        k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, window_size, tree_mask, tail_seqlens
    )


def _names(dtypes) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_heads(q, k_cache, v_cache, backend: str) -> None:
    """q, k_cache and v_cache: rank, dtype, device, unit last stride, head counts and head dims."""
    dtypes = INPUT_DTYPES[backend]
    layouts = {
        "q": (q, "[T, H_q, D]"),
        "k_cache": (k_cache, "[num_pages, page_size, H_kv, D]"),
        "v_cache": (v_cache, "[num_pages, page_size, H_kv, D_v]"),
    }
    for name, (x, layout) in layouts.items():
        runtime.check_is_tensor(name, x)
        if x.dim() != layout.count(",") + 1:
            raise ValueError(f"{name}: expected {layout}, given rank {x.dim()} with shape {tuple(x.shape)}")
        if x.dtype not in dtypes:
            raise TypeError(f"{name}: expected one of {_names(dtypes)} on backend {backend!r}, given {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {q.dtype} as q, given {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} as q, given {x.device}")
        if x.is_meta:
            raise ValueError(f"{name}: expected a tensor with data, given device {x.device}")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{name}: expected unit stride in the last dim, given strides {x.stride()}")
    _, H_q, D = q.shape
    H_kv = k_cache.shape[2]
    if k_cache.shape[-1] != D or D < 1:
        raise ValueError(f"k_cache: expected head dim {D} >= 1 as q, given {tuple(k_cache.shape)}")
    if v_cache.shape[:3] != k_cache.shape[:3] or v_cache.shape[-1] < 1:
        raise ValueError(
            f"v_cache: expected [num_pages, page_size, H_kv] = {tuple(k_cache.shape[:3])} as k_cache and D_v >= 1, "
            f"given {tuple(v_cache.shape)}"
        )
    if k_cache.shape[1] < 1:
        raise ValueError(f"k_cache: expected a page_size >= 1, given {tuple(k_cache.shape)}")
    if H_kv < 1 or H_q < 1 or H_q % H_kv:
        raise ValueError(f"q: expected H_q to be a positive multiple of H_kv = {H_kv}, given H_q = {H_q}")


def _check_index(name: str, x, rank: int, q: torch.Tensor, length: int | None = None, layout: str = "") -> torch.Tensor:
    """An index tensor: int32, on q's device, of this rank and (if given) this length."""
    runtime.check_is_tensor(name, x)
    if x.dtype != torch.int32:
        raise TypeError(f"{name}: expected int32, given {x.dtype}")
    if x.dim() != rank or (length is not None and x.shape[0] != length):
        expected = f"{layout} = [{length}]" if length is not None else f"rank {rank}"
        raise ValueError(f"{name}: expected {expected}, given shape {tuple(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} as q, given {x.device}")
    return x


def _check_int(name: str, x, low: int, high: int | None = None) -> int:
    if isinstance(x, bool) or not (isinstance(x, int) or hasattr(x, "__index__")):
        raise TypeError(f"{name}: expected an integer, given {type(x).__name__} {x!r}")
    if not isinstance(x, int):
        x = x.__index__()
    if x < low or (high is not None and x > high):
        bounds = f">= {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: expected an integer {bounds}, given {x}")
    return x


def _check_float(name: str, x) -> float:
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name}: expected a number, given {type(x).__name__} {x!r}")
    if not (x == 0 or FLOAT32.tiny <= abs(x) <= FLOAT32.max):
        raise ValueError(f"{name}: expected a finite number in float32's normal range, given {x}")
    return float(x)


def _check_window(window_size, causal) -> tuple[int, int]:
    """(left, right) with causal folded in as right = 0."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected a bool, given {type(causal).__name__} {causal!r}")
    left, right = _pair(window_size)
    # More than any request holds, and int32 positions stay in range when it is added to them.
    left, right = (min(_check_int("window_size", x, -1), NO_LIMIT) for x in (left, right))
    return left, 0 if causal else right


def _pair(window_size) -> tuple:
    if window_size is None:
        return -1, -1
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: expected (left, right) or None, given {window_size!r}")
    return tuple(-1 if x is None else x for x in window_size)


def _check_tree(tree_mask, tail_seqlens, window_size, causal, q, num_requests) -> None:
    if tree_mask is None:
        if tail_seqlens is not None:
            raise ValueError("tail_seqlens: expected None without tree_mask, given a tensor")
        return
    runtime.check_is_tensor("tree_mask", tree_mask)
    if tree_mask.dtype != torch.int64:
        raise TypeError(f"tree_mask: expected int64, given {tree_mask.dtype}")
    if tree_mask.dim() != 2 or tree_mask.shape[0] != q.shape[0]:
        raise ValueError(f"tree_mask: expected [T, words] with T = {q.shape[0]}, given {tuple(tree_mask.shape)}")
    if tree_mask.device != q.device:
        raise ValueError(f"tree_mask: expected device {q.device} as q, given {tree_mask.device}")
    if window_size != (-1, -1):
        given = "causal=True" if causal else f"window_size={window_size}"
        raise ValueError(f"tree_mask: expected neither causal nor window_size beside it, given {given}")
    if tail_seqlens is not None:
        _check_index("tail_seqlens", tail_seqlens, 1, q, num_requests, "[R]")


def _check_reads(reads, num_kv_heads: int, q: torch.Tensor) -> None:
    if reads is None:
        return
    runtime.check_is_tensor("reads", reads)
    if reads.dtype != torch.int64:
        raise TypeError(f"reads: expected int64, given {reads.dtype}")
    if reads.shape != (num_kv_heads,) or not reads.is_contiguous():
        raise ValueError(f"reads: expected a contiguous [H_kv] = [{num_kv_heads}], given shape {tuple(reads.shape)}")
    if reads.device != q.device:
        raise ValueError(f"reads: expected device {q.device} as q, given {reads.device}")


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
