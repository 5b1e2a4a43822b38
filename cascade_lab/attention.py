"""One attention pass: packed query rows read a paged KV cache and return a state.

For row t of request r, over the visible keys j among the first cache_seqlens[r] tokens of its pages:

    s_j = softmax_scale * q_t . k_j,    lse_t = log sum_j e^s_j,    o_t = sum_j e^(s_j - lse_t) v_j.

Rows are aligned to the bottom right: row i of Q over K keys stands at key position i + K - Q. The loops are in
`backends`; merging passes is the business of `states` and `levels`.
"""

from __future__ import annotations

import torch

from cascade_lab._passes import check_heads, check_pass, run_passes
from cascade_lab.backends import Call
from cascade_lab.paging import Layout
from cascade_lab.runtime import Backend
from cascade_lab.states import State

__all__ = ["attention"]


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
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    num_splits: int | None = None,
    out_dtype: torch.dtype | None = None,
    reads: torch.Tensor | None = None,
    layout: Layout = "NHD",
    backend: Backend = "auto",
) -> State:
    """Attention of packed, ragged query rows over a paged KV cache, as a mergeable state.

    Args:
        q: `[T, H_q, D]` float32, float16 or bfloat16 (float64 on the torch backend), unit last stride. T rows packed by
            request; query head h reads KV head h // (H_q / H_kv). D and D_v are at most 1024 on the Triton backend.
        k_cache: `[num_pages, page_size, H_kv, D]`, or as `layout` says; any strides with unit last stride. Dtype of q,
            or float8_e4m3fn or float8_e5m2, which are read as one byte an element and multiplied in the dtype of q,
            which holds them exactly.
        v_cache: `[num_pages, page_size, H_kv, D_v]`, dtype of k_cache; D_v may differ from D, and v may be a view of k.
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
        sinks: `[H_q]` float32, float16 or bfloat16 (float64 on the torch backend), one more term of the softmax per
            query head, that no value belongs to: lse' = log(e^lse + e^sink), o' = e^(lse - lse') o. A sink is compared
            with scaled and capped scores. The state that is returned includes it: see below.
        k_scale, v_scale: what an element of each cache stands for is its value times this: a number > 0, or a float32
            tensor of them, `[]` or `[H_kv]`. k_scale goes into the scores, before softcap, and v_scale into o.
        num_splits: parts into which the keys are cut (split-KV); None chooses from shapes. Never changes the result
            beyond rounding. The torch backend walks the keys in one loop and takes the number as checked but unused.
        out_dtype: dtype of o; default that of q. lse is float32 (float64 for float64 inputs) in every case.
        reads: `[H_kv]` int64; the pass adds the number of K rows it loads per KV head (V rows are as many), once for
            each row tile that loads them. This is the ledger's `tile_tokens` of the launch's block_m.
        layout: "NHD", or "HND" for caches `[num_pages, H_kv, page_size, D]`, read where they lie. The wrong one is
            refused where H_q is no multiple of what would be H_kv; a cache with page_size = H_kv looks like either.
        backend: "auto" (Triton for CUDA tensors, torch for CPU tensors), "triton" or "torch".

    Returns:
        State, o `[T, H_q, D_v]` and lse `[T, H_q]`. A row without visible keys has o = 0 and lse = -inf.
        Differentiable in q, k_cache, v_cache and sinks on the torch backend; not in caches of float8, nor in scales.

    Raises:
        TypeError: wrong type or dtype. ValueError: wrong rank, shape, device, stride or value. Nothing has run then.
        RuntimeError: a gradient is required on the Triton backend, or the backend cannot run here.

    Memory that no query row needs is not read and may hold anything. Among the keys that are read, NaN or infinity in K
    harms only the rows that see that key. In V it also makes NaN, on the Triton backend, of rows that do not see the
    key but share a tile with one that does, for a weight of 0 times NaN is NaN; the torch backend keeps such rows
    apart. Scores may be as large as 2.3e38 after scaling: exponents are taken in base 2, which float32 holds so far.
    Values are added up before they are divided: an element of v may be as large as 3.4e38 / K for K keys of equal
    scores, and beyond that o is infinite while lse is right.

    torch.autocast changes nothing. torch.set_float32_matmul_precision does, for float32 on the torch backend: with
    "high" or "medium" a device that can multiplies in TF32 or bfloat16, and scores are off by up to 2^-8 of the product
    of the lengths of q and k. Forward-mode derivatives and torch.func are refused.

    A call with sinks equals `merge_state` of the call without and the state of no value (o = 0, lse = sink); -inf and
    +inf are then no sink, and a row without visible keys has o = 0 and lse = sink. So where states of several calls
    are merged, over parts of the keys or over ranks, exactly one call takes the sinks. Sinks that a model learns, one
    logit per head, are gpt-oss's (OpenAI, 2025); that a softmax needs somewhere to put what no key should get was found
    by StreamingLLM (Xiao et al., 2023, arXiv:2309.17453). Scales per tensor or per KV head are those of vLLM's
    quantized KV cache and of FlashInfer.

    Under torch.compile a call is one operator, and checks that read values are skipped as in `runtime.unchecked()`.

    Names and alignment follow flash-attention; splitting keys follows Flash-Decoding (Dao et al., 2023).

    Example:
        >>> k, v = torch.randn(2, 4, 2, 1, 8)  # 4 pages of 2 tokens, 1 KV head, head dim 8
        >>> q = torch.randn(3, 2, 8)  # 3 rows of 2 query heads
        >>> pages = torch.tensor([[3, 0], [1, -1]], dtype=torch.int32)
        >>> lens = torch.tensor([4, 2], dtype=torch.int32)  # keys of each request
        >>> rows = torch.tensor([0, 2, 3], dtype=torch.int32)  # the first 2 rows are of request 0
        >>> o, lse = cl.attention(q, k, v, pages, lens, cu_seqlens_q=rows, causal=True)
        >>> o.shape, lse.shape
        (torch.Size([3, 2, 8]), torch.Size([3, 2]))
        >>> weights = (q[2] @ k[1, :, 0].T * 8**-0.5).softmax(-1)  # row 2 sees both keys in page 1
        >>> torch.allclose(o[2], weights @ v[1, :, 0], atol=1e-6)
        True
    """
    backend, k_cache, v_cache = check_heads(q, k_cache, v_cache, backend, layout)
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
    options = softmax_scale, softcap, num_splits, out_dtype, reads, backend, sinks, k_scale, v_scale
    return run_passes(q, [only], Call(*options))
