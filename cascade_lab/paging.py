"""Page tables: which cached tokens a request reads.

A cache is `[num_pages, page_size, H_kv, D]`. Row r of a page table names the pages of request r in order, and exactly
its first `cache_seqlens[r]` tokens are read: token n lies in page `page_table[r, n // page_size]` at offset
`n % page_size`. A page is the unit of addressing, a token the unit of meaning; entries past the length hold anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cascade_lab import _checks

__all__ = [
    "branch_capacity",
    "build_page_table",
    "check_page_table",
    "dense_page_table",
    "page_table_from_csr",
    "page_table_to_csr",
    "pages_needed",
    "shared_prefix_len",
    "split_kv_cache",
    "token_slots",
]


def pages_needed(length: int | torch.Tensor | np.ndarray, page_size: int) -> int | torch.Tensor | np.ndarray:
    """Pages that hold `length` tokens: ceil(length / page_size), 0 for length 0; elementwise for a tensor or array.

    Raises:
        TypeError, ValueError: a length that is no integer >= 0 (elements are not looked at), a page size below 1.
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
        TypeError, ValueError: lengths or a first page that are no integers >= 0, or a page size that is none >= 1.
    """
    page_size = _checks.integer("page_size", page_size, 1)
    first_page = _checks.integer("first_page", first_page, 0)
    pages = pages_needed(torch.tensor(_checks.integer_list("lengths", lengths), dtype=torch.int64), page_size)
    column = torch.arange(int(pages.max()) if len(pages) else 0)
    table = first_page + (pages.cumsum(0) - pages)[:, None] + column
    return torch.where(column < pages[:, None], table, -1).to(torch.int32)


def dense_page_table(batch: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """Page table `[R, 1]` int32 that reads a dense `[R, L, H_kv, D]` tensor as a cache of one page per request.

    Raises:
        TypeError, ValueError: a batch that is no integer >= 0.
    """
    batch = _checks.integer("batch", batch, 0)
    return torch.arange(batch, dtype=torch.int32, device=device)[:, None]


def token_slots(page_table: torch.Tensor, row: int, length: int, page_size: int) -> torch.Tensor:
    """Flat slots `page * page_size + offset` of the first `length` tokens of one row, `[length]` int64.

    Raises:
        TypeError, ValueError: no such row, a page size below 1, or a row that names too few pages for `length`.
    """
    page_size, length = _checks.integer("page_size", page_size, 1), _checks.integer("length", length)
    _checks.tensor("page_table", page_table, "[R, max_pages]")
    row = _checks.integer("row", row, 0, len(page_table) - 1)
    if not 0 <= length <= page_table.shape[1] * page_size:
        raise ValueError(
            f"length: expected 0 to {page_table.shape[1] * page_size} tokens for {page_table.shape[1]} pages "
            f"of {page_size}, given {length}"
        )
    token = torch.arange(length, device=page_table.device)
    return page_table[row].long()[token // page_size] * page_size + token % page_size


def branch_capacity(prefix_len: int, branches: int, steps: int, page_size: int) -> int:
    """Slots from the last whole prefix page on, when every branch owns the pages of its tail and its `steps` tokens.

    branches x ceil((prefix_len mod page_size + steps) / page_size) x page_size: the tail is the part of the prefix that
    does not fill a page, and one branch may own its original.

    Raises:
        TypeError, ValueError: numbers that are no integers >= 0, or a page size that is none >= 1.
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
    """
    page_size = _checks.integer("page_size", page_size, 1)
    check_page_table(page_table, cache_seqlens, torch.iinfo(torch.int32).max, page_size)
    pages = pages_needed(cache_seqlens, page_size)
    used = torch.arange(page_table.shape[1], device=page_table.device) < pages[:, None]
    indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
    last = torch.where(pages > 0, cache_seqlens - (pages - 1) * page_size, 0)
    return indptr, page_table[used], last.to(torch.int32)


def split_kv_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(k_cache, v_cache) as views of FlashInfer's NHD cache `[num_pages, 2, page_size, H_kv, D]`. No copy.

    Raises:
        TypeError, ValueError: no tensor, another rank, or a second dim that is not 2.
    """
    _checks.tensor("kv_cache", kv_cache)
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
        raise ValueError(f"kv_cache: expected [num_pages, 2, page_size, H_kv, D], given shape {tuple(kv_cache.shape)}")
    return kv_cache[:, 0], kv_cache[:, 1]


def check_page_table(page_table: torch.Tensor, cache_seqlens: torch.Tensor, num_pages: int, page_size: int) -> None:
    """Raise ValueError unless every length fits its row and every page that is read exists. Reads the values back."""
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
    wrong = used & ((page_table < 0) | (page_table >= num_pages))
    if wrong.any():
        r, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"page_table: expected page ids from 0 to {num_pages - 1}, given {int(page_table[r, column])} "
            f"for request {r}, page {column}"
        )
