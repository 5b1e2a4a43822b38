"""Page tables: which cached tokens a request reads.

A cache is `[num_pages, page_size, H_kv, D]`. Row r of a page table names the pages of request r in order, and exactly
its first `cache_seqlens[r]` tokens are read: token n lies in page `page_table[r, n // page_size]` at offset
`n % page_size`. A page is the unit of addressing, a token the unit of meaning; entries past the length hold anything.

A layout says which dims of a cache are the tokens of a page and the KV heads: "NHD" `[num_pages, page_size, H_kv, D]`
or "HND" `[num_pages, H_kv, page_size, D]`. Where a function takes one, both are views of the same memory to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import numpy as np
import torch

from cascade_lab import _checks, runtime

__all__ = [
    "LAYOUTS",
    "branch_capacity",
    "build_page_table",
    "check_page_table",
    "dense_page_table",
    "move",
    "page_table_from_csr",
    "page_table_to_csr",
    "pages_needed",
    "ragged_kv",
    "read",
    "shared_prefix_len",
    "split_kv_cache",
    "token_slots",
    "write",
]

Layout = Literal["NHD", "HND"]
LAYOUTS: tuple[Layout, ...] = ("NHD", "HND")
"""Orders of a cache's dims: tokens of a page before KV heads, or behind them."""
Lengths = Sequence[int] | np.ndarray | torch.Tensor


@overload
def pages_needed(length: int, page_size: int) -> int: ...
@overload
def pages_needed(length: torch.Tensor, page_size: int) -> torch.Tensor: ...
@overload
def pages_needed(length: np.ndarray, page_size: int) -> np.ndarray: ...
def pages_needed(length: int | torch.Tensor | np.ndarray, page_size: int) -> int | torch.Tensor | np.ndarray:
    """Pages that hold `length` tokens: ceil(length / page_size), 0 for length 0; elementwise for a tensor or array.

    Raises:
        TypeError, ValueError: a length that is no integer >= 0 (elements are not looked at), a page size below 1.

    Example:
        >>> cl.paging.pages_needed(33, 16), cl.paging.pages_needed(torch.tensor([0, 16, 17]), 16).tolist()
        (3, [0, 1, 2])
    """
    page_size = _checks.integer("page_size", page_size, 1)
    if not isinstance(length, (torch.Tensor, np.ndarray)) or not length.ndim:
        length = _checks.integer("length", length, 0)
    elif not _holds_integers(length):
        raise TypeError(f"length: expected integers, given {_checks.shown(length)}")
    return _pages(length, page_size)


def _holds_integers(x: torch.Tensor | np.ndarray) -> bool:
    if isinstance(x, np.ndarray):
        return x.dtype.kind in "iu"
    return not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool)


def _pages(length, page_size: int):
    return (length + page_size - 1) // page_size


def build_page_table(lengths: Sequence[int], page_size: int, *, first_page: int = 0) -> torch.Tensor:
    """Page table giving each request its own consecutive pages, requests one after another.

    Args:
        lengths: tokens per request.
        page_size: tokens per page.
        first_page: id of the first page handed out.

    Returns:
        `[R, max_pages]` int32; entries that no token needs are -1.

    Raises:
        TypeError, ValueError: lengths or a first page that are no integers >= 0, or a page size that is none >= 1; or
            page ids beyond int32.

    Example:
        >>> cl.paging.build_page_table([33, 10], 16).tolist()
        [[0, 1, 2], [3, -1, -1]]
    """
    page_size = _checks.integer("page_size", page_size, 1)
    first_page = _checks.integer("first_page", first_page, 0)
    needed = [-(-length // page_size) for length in _checks.integer_list("lengths", lengths)]
    if first_page + sum(needed) > 2**31:
        raise ValueError(
            f"lengths: expected page ids below 2**31, given {sum(needed)} pages from first_page = {first_page} on"
        )
    pages = torch.tensor(needed, dtype=torch.int64, device="cpu")
    column = torch.arange(int(pages.max()) if len(pages) else 0, device="cpu")
    table = first_page + (pages.cumsum(0) - pages)[:, None] + column
    return torch.where(column < pages[:, None], table, -1).to(torch.int32)


def dense_page_table(batch: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """Page table `[R, 1]` int32 that reads a dense `[R, L, H_kv, D]` tensor as a cache of one page per request.

    Raises:
        TypeError, ValueError: a batch that is no integer >= 0.

    Example:
        >>> cl.paging.dense_page_table(3).tolist()
        [[0], [1], [2]]
    """
    batch = _checks.integer("batch", batch, 0)
    return torch.arange(batch, dtype=torch.int32, device=device)[:, None]


def ragged_kv(
    k: torch.Tensor, v: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k_cache, v_cache, page_table, cache_seqlens) of keys that are packed by request, without pages. No copy.

    The caches are the same memory in pages of one token, so `attention(q, *ragged_kv(k, v, cu_seqlens_k),
    cu_seqlens_q=...)` is flash-attention's call with `cu_seqlens_k`.

    Args:
        k: `[T_k, H_kv, D]`, any strides.
        v: `[T_k, H_kv, D_v]`, likewise.
        cu_seqlens_k: `[R + 1]` int32 offsets of the requests' keys, rising from 0 to T_k.

    Raises:
        TypeError, ValueError: other shapes, dtypes or devices, or offsets that do not rise from 0 to T_k.

    Example:
        >>> q, k, v = torch.randn(2, 2, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 8)  # 3 keys, and then 2
        >>> cu = torch.tensor([0, 3, 5], dtype=torch.int32)
        >>> cl.attention(q, *cl.paging.ragged_kv(k, v, cu)).o.shape
        torch.Size([2, 2, 8])
    """
    _checks.tensor("k", k, "[T_k, H_kv, D]")
    _checks.tensor("v", v, "[T_k, H_kv, D_v]", like=("k", k))
    _checks.tensor("cu_seqlens_k", cu_seqlens_k, "[R + 1]", dtypes=(torch.int32,), like=("k", k))
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v: expected [T_k, H_kv] = {tuple(k.shape[:2])} as k, given shape {tuple(v.shape)}")
    lens = cu_seqlens_k.diff()
    rising = len(cu_seqlens_k) and cu_seqlens_k[0] == 0 and cu_seqlens_k[-1] == len(k) and not (lens < 0).any()
    if not rising:
        raise ValueError(
            f"cu_seqlens_k: expected offsets rising from 0 to T_k = {len(k)}, given {_checks.shown(cu_seqlens_k)} "
            f"{cu_seqlens_k.tolist()[:8]}"
        )
    column = torch.arange(int(lens.max()) if len(lens) else 0, dtype=torch.int32, device=k.device)
    table = torch.where(column < lens[:, None], cu_seqlens_k[:-1, None] + column, -1)
    return k[:, None], v[:, None], table, lens


@overload
def token_slots(
    page_table: torch.Tensor, lens: Lengths, /, page_size: int, *, starts: Lengths | None = None
) -> torch.Tensor: ...
@overload
def token_slots(page_table: torch.Tensor, row: int, length: int, page_size: int) -> torch.Tensor: ...
def token_slots(
    page_table: torch.Tensor,
    row: int | Lengths,
    length: int | None = None,
    page_size: int | None = None,
    *,
    starts: Lengths | None = None,
) -> torch.Tensor:
    """Flat slots `page * page_size + offset` of tokens, int64 on the table's device.

    `token_slots(page_table, lens, page_size)` has those of all rows, request after request, `[sum of lens]`: the order
    of packed keys, which `write` takes. With `starts` a row has its tokens from starts[r] to lens[r] alone, as the new
    ones behind a prefix. `token_slots(page_table, row, length, page_size)` has the first `length` tokens of one row.

    Args:
        page_table: `[R, max_pages]` int32.
        row: a row, or `lens`: tokens per row.
        length: tokens of that row, or the page size where `lens` is given.
        page_size: tokens per page.
        starts: first token per row, 0 when absent; only beside `lens`.

    Raises:
        TypeError, ValueError: no such row, a page size below 1, or a row that names too few pages for its length.

    Example:
        >>> table = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)
        >>> cl.paging.token_slots(table, [5, 3], 4).tolist()  # pages of 4 tokens
        [8, 9, 10, 11, 0, 4, 5, 6]
        >>> cl.paging.token_slots(table, [5, 3], 4, starts=[3, 0]).tolist()
        [11, 0, 4, 5, 6]
    """
    _checks.tensor("page_table", page_table, "[R, max_pages]")
    if length is None or page_size is None:
        page_size = length if page_size is None else page_size
        return _batch_slots(page_table, row, _checks.integer("page_size", page_size, 1), starts)
    if starts is not None:
        raise ValueError("starts: expected None for a single row, given starts")
    page_size, length = _checks.integer("page_size", page_size, 1), _checks.integer("length", length)
    row = _checks.integer("row", row, 0, len(page_table) - 1)
    if not 0 <= length <= page_table.shape[1] * page_size:
        raise ValueError(
            f"length: expected 0 to {page_table.shape[1] * page_size} tokens for {page_table.shape[1]} pages "
            f"of {page_size}, given {length}"
        )
    token = torch.arange(length, device=page_table.device)
    return page_table[row].long()[token // page_size] * page_size + token % page_size


def _batch_slots(page_table: torch.Tensor, lens: Lengths, page_size: int, starts: Lengths | None) -> torch.Tensor:
    device, capacity = page_table.device, page_table.shape[1] * page_size
    ends = torch.tensor(_checks.integer_list("lens", lens), dtype=torch.int64, device=device)
    if len(ends) != len(page_table):
        raise ValueError(f"lens: expected one per row of page_table ({len(page_table)}), given {len(ends)}")
    if (ends > capacity).any():
        r = int((ends > capacity).nonzero()[0])
        raise ValueError(
            f"lens: expected at most {capacity} tokens ({page_table.shape[1]} pages of {page_size}), "
            f"given {int(ends[r])} for row {r}"
        )
    first = torch.zeros_like(ends)
    if starts is not None:
        first = torch.tensor(_checks.integer_list("starts", starts), dtype=torch.int64, device=device)
        if len(first) != len(ends) or (first > ends).any():
            raise ValueError(f"starts: expected one per row, at most lens, given {first.tolist()[:8]}")
    counts = ends - first
    row = torch.repeat_interleave(torch.arange(len(ends), device=device), counts)
    # the place of a token among the packed ones, less that of its row's first, and on from the row's start
    token = torch.arange(len(row), device=device) + (first - counts.cumsum(0) + counts)[row]
    return page_table.long()[row, token // page_size] * page_size + token % page_size


def write(cache: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, *, layout: Layout = "NHD") -> None:
    """Write token states into a cache in place, whatever its strides: the slots' places hold `x` afterwards.

    Args:
        cache: `[num_pages, page_size, H_kv, D]`, or `[num_pages, H_kv, page_size, D]` for layout "HND". K or V of a
            split or interleaved cache, slices and transposed views are written where they lie.
        slots: `[n]` int64 or int32, page * page_size + offset, none twice.
        x: `[n, H_kv, D]`, dtype of cache.
        layout: "NHD" or "HND", how the dims of `cache` are ordered; x is the same for both.

    Raises:
        TypeError, ValueError: wrong rank, shape, dtype, device or layout; a slot outside the cache or named twice; a
            cache that holds several tokens in one place (an expanded tensor), which no write can fill. Values of slots
            are not looked at under `runtime.unchecked()`.
        RuntimeError: a leaf that requires a gradient, which PyTorch lets nobody change in place.

    Differentiable in `x`, as PyTorch's own indexed assignment is.

    Example:
        >>> cache = torch.zeros(2, 2, 1, 1)  # 2 pages of 2 tokens
        >>> cl.paging.write(cache, torch.tensor([3, 0]), torch.tensor([7.0, 5.0]).view(2, 1, 1))
        >>> cache.flatten().tolist()
        [5.0, 0.0, 0.0, 7.0]
    """
    cache = as_nhd("cache", cache, layout)
    page_size = cache.shape[1]
    _check_slots("slots", slots, cache)
    _checks.tensor("x", x, "[n, H_kv, D]", like=("cache", cache))
    if x.dtype != cache.dtype:
        raise TypeError(f"x: expected dtype {cache.dtype} as cache, given {x.dtype}")
    if x.shape != (len(slots), *cache.shape[2:]):
        swapped = x.shape == (len(slots), cache.shape[1], cache.shape[3])
        other = LAYOUTS[1 - LAYOUTS.index(layout)]
        raise ValueError(
            f"x: expected [n, H_kv, D] = {[len(slots), *cache.shape[2:]]} for {len(slots)} slots of a cache in layout "
            f"{layout!r}, given shape {tuple(x.shape)}" + (f"; it fits layout={other!r}" if swapped else "")
        )
    if cache.requires_grad and cache.is_leaf and torch.is_grad_enabled():
        raise RuntimeError("cache: expected a tensor that may change in place, given a leaf that requires a gradient")
    _check_own_places("cache", cache)
    if runtime.checks_enabled() and len(slots.unique()) < len(slots):
        value, times = slots.unique(return_counts=True)
        raise ValueError(f"slots: expected each slot once, given {int(value[times > 1][0])} more than once")
    slots = slots.long()
    cache[slots // page_size, slots % page_size] = x


def read(cache: torch.Tensor, slots: torch.Tensor, *, layout: Layout = "NHD") -> torch.Tensor:
    """The token states at these slots, a copy `[n, H_kv, D]`; the inverse of `write`.

    Args:
        cache, slots, layout: as in `write`; a slot may be named more than once.

    Raises:
        TypeError, ValueError: as in `write`.

    Example:
        >>> cache = torch.arange(4.0).view(2, 2, 1, 1)  # 2 pages of 2 tokens
        >>> cl.paging.read(cache, torch.tensor([3, 0])).flatten().tolist()
        [3.0, 0.0]
    """
    cache = as_nhd("cache", cache, layout)
    _check_slots("slots", slots, cache)
    slots = slots.long()
    return cache[slots // cache.shape[1], slots % cache.shape[1]]


def move(cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, *, layout: Layout = "NHD") -> None:
    """Copy token states from slots `src` to slots `dst` of one cache, in place; all are read before one is written.

    So a slot may be a source and a destination, as when an accepted path closes up behind its prefix.

    Args:
        cache, layout: as in `write`.
        src, dst: `[n]` int64 or int32; no destination twice.

    Raises:
        TypeError, ValueError, RuntimeError: as in `write`, or numbers of sources and destinations that differ.

    Example:
        >>> cache = torch.arange(4.0).view(2, 2, 1, 1)  # 2 pages of 2 tokens
        >>> cl.paging.move(cache, torch.tensor([3, 0]), torch.tensor([0, 1]))
        >>> cache.flatten().tolist()
        [3.0, 0.0, 2.0, 3.0]
    """
    for name, slots in (("src", src), ("dst", dst)):
        _checks.tensor(name, slots, "[n]")
    if len(src) != len(dst):
        raise ValueError(f"dst: expected one per source ({len(src)}), given {len(dst)}")
    write(cache, dst, read(cache, src, layout=layout), layout=layout)


def as_nhd(name: str, cache: torch.Tensor, layout: str, width: str = "D") -> torch.Tensor:
    """A cache as its view `[num_pages, page_size, H_kv, width]`."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, given {layout!r}")
    dims = "page_size, H_kv" if layout == "NHD" else "H_kv, page_size"
    _checks.tensor(name, cache, f"[num_pages, {dims}, {width}]")
    return cache if layout == "NHD" else cache.transpose(1, 2)


def _check_slots(name: str, slots: torch.Tensor, cache: torch.Tensor) -> None:
    _checks.tensor(name, slots, "[n]", dtypes=(torch.int64, torch.int32), like=("cache", cache))
    capacity = cache.shape[0] * cache.shape[1]
    if runtime.checks_enabled() and ((slots < 0) | (slots >= capacity)).any():
        wrong = slots[(slots < 0) | (slots >= capacity)]
        raise ValueError(
            f"{name}: expected slots from 0 to {capacity - 1} ({cache.shape[0]} pages of {cache.shape[1]}), "
            f"given {int(wrong[0])}"
        )


def _check_own_places(name: str, x: torch.Tensor) -> None:
    """Refuse a view in which two elements may share a place: sorted by stride, each dim steps over all finer ones."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= reach:
            raise ValueError(
                f"{name}: expected a place of its own for every element, given shape {tuple(x.shape)} with strides "
                f"{x.stride()}"
            )
        reach += stride * (size - 1)


def branch_capacity(prefix_len: int, branches: int, steps: int, page_size: int) -> int:
    """Slots from the last whole prefix page on, when every branch owns the pages of its tail and its `steps` tokens.

    branches x ceil((prefix_len mod page_size + steps) / page_size) x page_size: the tail is the part of the prefix that
    does not fill a page, and one branch may own its original.

    Raises:
        TypeError, ValueError: numbers that are no integers >= 0, or a page size that is none >= 1.

    Example:
        >>> cl.paging.branch_capacity(100, branches=4, steps=5, page_size=16)  # 4 x ceil((4 + 5) / 16) x 16
        64
    """
    page_size = _checks.integer("page_size", page_size, 1)
    given = (("prefix_len", prefix_len), ("branches", branches), ("steps", steps))
    prefix_len, branches, steps = (_checks.integer(name, n, 0) for name, n in given)
    return branches * pages_needed(prefix_len % page_size + steps, page_size) * page_size


def shared_prefix_len(
    page_table: torch.Tensor, cache_seqlens: torch.Tensor, computed_lens: torch.Tensor, page_size: int
) -> int:
    """Tokens at the start that all requests demonstrably read from the same pages.

    The longest run of equal page ids over all rows, at most the smallest computed length, floored to whole pages.
    Equality of ids is the only proof: a reference counter cannot tell who holds a reference.

    Args:
        page_table: `[R, max_pages]` int32.
        cache_seqlens: `[R]` int32, tokens in each row.
        computed_lens: `[R]` int32, tokens whose keys are already in the cache.
        page_size: tokens per page.

    Raises:
        TypeError, ValueError: other shapes, or a page size that is no integer >= 1.

    Example:
        >>> pages = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32)
        >>> lens, computed = torch.tensor([40, 44], dtype=torch.int32), torch.tensor([36, 40], dtype=torch.int32)
        >>> cl.paging.shared_prefix_len(pages, lens, computed, 16)
        32
    """
    page_size = _checks.integer("page_size", page_size, 1)
    for name, x in (("page_table", page_table), ("cache_seqlens", cache_seqlens), ("computed_lens", computed_lens)):
        _checks.tensor(name, x)
    if page_table.dim() != 2 or not page_table.shape[0] == len(cache_seqlens) == len(computed_lens):
        raise ValueError(
            f"page_table, cache_seqlens, computed_lens: expected [R, max_pages], [R], [R], given "
            f"{tuple(page_table.shape)}, {tuple(cache_seqlens.shape)}, {tuple(computed_lens.shape)}"
        )
    if page_table.shape[0] == 0:
        return 0
    limit = int(torch.minimum(cache_seqlens, computed_lens).min())
    same = (page_table == page_table[0]).all(0)[: max(limit, 0) // page_size]
    return int(same.long().cumprod(0).sum()) * page_size


def page_table_from_csr(
    indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page table and lengths from FlashInfer's paged-KV arrays.

    Args:
        indptr: `[R + 1]` int32 offsets into `indices`, rising from 0.
        indices: `[indptr[-1]]` int32 page ids, request after request.
        last_page_len: `[R]` int32 tokens in each request's last page, 1 to page_size; 0 for a request without pages.
        page_size: tokens per page.

    Returns:
        (`[R, max_pages]` int32 padded by -1, `[R]` int32 cache_seqlens = (pages - 1) x page_size + last_page_len).

    Raises:
        TypeError, ValueError: offsets that do not rise from 0 to len(indices), a last_page_len outside its range, or a
            page size that is no integer >= 1.

    Example:
        >>> indptr, indices = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([5, 1, 4], dtype=torch.int32)
        >>> table, lens = cl.paging.page_table_from_csr(indptr, indices, torch.tensor([3, 16], dtype=torch.int32), 16)
        >>> table.tolist(), lens.tolist()
        ([[5, 1], [4, -1]], [19, 16])
    """
    page_size = _checks.integer("page_size", page_size, 1)
    for name, x in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
        _checks.tensor(name, x)
    pages = indptr.diff()
    if indptr.dim() != 1 or len(indptr) == 0 or indptr[0] != 0 or indptr[-1] != len(indices) or (pages < 0).any():
        raise ValueError(
            f"indptr: expected offsets rising from 0 to len(indices) = {len(indices)}, given {indptr.tolist()}"
        )
    if last_page_len.shape != pages.shape:
        raise ValueError(f"last_page_len: expected shape {tuple(pages.shape)}, given {tuple(last_page_len.shape)}")
    wrong = torch.where(pages == 0, last_page_len != 0, (last_page_len < 1) | (last_page_len > page_size))
    if wrong.any():
        r = int(wrong.nonzero()[0])
        expected = f"1 to {page_size}" if pages[r] else "0 for a request without pages"
        raise ValueError(f"last_page_len: expected {expected}, given {int(last_page_len[r])} for request {r}")
    used = torch.arange(int(pages.max()) if len(pages) else 0, device=pages.device) < pages[:, None]
    table = torch.full(used.shape, -1, dtype=torch.int32, device=pages.device)
    table[used] = indices.to(torch.int32)
    return table, (torch.clamp(pages - 1, min=0) * page_size + last_page_len).to(torch.int32)


def page_table_to_csr(
    page_table: torch.Tensor, cache_seqlens: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashInfer's (indptr, indices, last_page_len), all int32, from a page table; inverse of `page_table_from_csr`.

    Raises:
        TypeError, ValueError: a length that its row cannot hold, or a page size that is no integer >= 1.

    Example:
        >>> table, lens = torch.tensor([[5, 1], [4, -1]], dtype=torch.int32), torch.tensor([19, 16], dtype=torch.int32)
        >>> [x.tolist() for x in cl.paging.page_table_to_csr(table, lens, 16)]
        [[0, 2, 3], [5, 1, 4], [3, 16]]
    """
    page_size = _checks.integer("page_size", page_size, 1)
    check_page_table(page_table, cache_seqlens, torch.iinfo(torch.int32).max, page_size)
    pages = pages_needed(cache_seqlens, page_size)
    used = torch.arange(page_table.shape[1], device=page_table.device) < pages[:, None]
    indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
    last = torch.where(pages > 0, cache_seqlens - (pages - 1) * page_size, 0)
    return indptr, page_table[used], last.to(torch.int32)


def split_kv_cache(
    kv_cache: torch.Tensor, *, layout: Layout = "NHD", num_kv_heads: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(k_cache, v_cache) in this package's order of dims, as views of FlashInfer's cache of both. No copy.

    Args:
        kv_cache: `[num_pages, 2, page_size, H_kv, D]` for layout "NHD", `[num_pages, 2, H_kv, page_size, D]` for "HND".
        layout: which of them. The shape alone does not tell.
        num_kv_heads: H_kv, to refuse a cache whose dims are in the other order.

    Returns:
        Two views `[num_pages, page_size, H_kv, D]`, for either layout.

    Raises:
        TypeError, ValueError: no tensor, another rank or layout, a second dim that is not 2, or other than num_kv_heads
            heads.

    Example:
        >>> k, v = cl.paging.split_kv_cache(torch.zeros(4, 2, 8, 16, 64), layout="HND", num_kv_heads=8)
        >>> k.shape
        torch.Size([4, 16, 8, 64])
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, given {layout!r}")
    dims = "[num_pages, 2, page_size, H_kv, D]" if layout == "NHD" else "[num_pages, 2, H_kv, page_size, D]"
    _checks.tensor("kv_cache", kv_cache)
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
        raise ValueError(f"kv_cache: expected {dims}, given shape {tuple(kv_cache.shape)}")
    k_cache, v_cache = (as_nhd("kv_cache", kv_cache[:, i], layout) for i in range(2))
    heads = k_cache.shape[2]
    if num_kv_heads is not None and heads != _checks.integer("num_kv_heads", num_kv_heads, 1):
        fits = f"; it fits layout={LAYOUTS[1 - LAYOUTS.index(layout)]!r}" if k_cache.shape[1] == num_kv_heads else ""
        raise ValueError(
            f"kv_cache: expected {dims} with H_kv = {num_kv_heads}, given shape {tuple(kv_cache.shape)}{fits}"
        )
    return k_cache, v_cache


def check_page_table(page_table: torch.Tensor, cache_seqlens: torch.Tensor, num_pages: int, page_size: int) -> None:
    """Raise ValueError unless every length fits its row and every page that is read exists. Reads the values back.

    Example:
        >>> table, lens = torch.tensor([[0, 9]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
        >>> cl.paging.check_page_table(table, lens, num_pages=8, page_size=16)
        Traceback (most recent call last):
            ...
        ValueError: page_table: expected page ids from 0 to 7, given 9 for request 0, page 1
    """
    page_size = _checks.integer("page_size", page_size, 1)
    num_pages = _checks.integer("num_pages", num_pages, 0)
    capacity = page_table.shape[1] * page_size
    wrong = (cache_seqlens < 0) | (cache_seqlens > capacity)
    if wrong.any():
        r = int(wrong.nonzero()[0])
        raise ValueError(
            f"cache_seqlens: expected 0 to {capacity} tokens ({page_table.shape[1]} pages of {page_size}), "
            f"given {int(cache_seqlens[r])} for request {r}"
        )
    pages = _pages(cache_seqlens.long(), page_size)
    used = torch.arange(page_table.shape[1], device=page_table.device) < pages[:, None]
    # the last page, for int32 holds no 2**31 to compare with
    wrong = used & ((page_table < 0) | (page_table > min(num_pages, 2**31) - 1))
    if wrong.any():
        r, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"page_table: expected page ids from 0 to {num_pages - 1}, given {int(page_table[r, column])} "
            f"for request {r}, page {column}"
        )
