"""Levels: a computation as a list of passes over the same rows, and its two ledgers (claims 1 to 3).

A level is one pass of all T query rows over part of their keys. The states of the levels merge by log-sum-exp, so any
way of dealing the keys out to levels gives the same answer. What differs is counted by `ledger`: *pairs*, the
query-key interactions that are computed, and *reads*, which are three counts with a name each:

    distinct         cached tokens that a row sees at all: what must be read at least once       kv_tokens_unique
    per request      sum of cache_seqlens over requests with rows: a request's keys once         kv_tokens
    per row tile     keys loaded by a kernel that cuts a request's rows into tiles of block_m    tile_tokens(block_m)

Without copied pages distinct <= per row tile, and per row tile = per request where one tile holds the rows of a
request, as in verification. A cascade lowers reads per request and leaves distinct keys and pairs alone. A prefix hit
lowers pairs and leaves distinct keys and reads per request alone; reads per row tile fall with the pairs, for there are
fewer tiles. All three are loads by a multiprocessor. Which of the repeated ones the L2 cache answers, and so the DRAM
traffic, is another matter, and bytes are not time.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from cascade_lab import _checks, paging, runtime
from cascade_lab._passes import check_heads, check_pass, run_passes
from cascade_lab.backends import Call
from cascade_lab.paging import Layout
from cascade_lab.states import State

__all__ = ["Ledger", "Level", "cascade_attention", "ledger"]

# page-table entries that the ledger looks at together
SPAN_BLOCK = 1 << 22


@dataclass(frozen=True)
class Level:
    """One pass over a whole batch.

    Attributes:
        cu_seqlens_q: `[R + 1]` int32, from 0 to T. Every level of a plan partitions the same T packed rows, each in its
            own way: a shared prefix is one request of all its readers' rows, a draft branch a request of its own rows.
        page_table: `[R, max_pages]` int32, in pages of `page_size` tokens.
        cache_seqlens: `[R]` int32, tokens read per request.
        page_size: tokens per page of `page_table`; it divides the cache's own page size. 1 addresses single tokens.
        causal: rows are aligned to the bottom right of the level's keys.
        tree_mask, tail_seqlens: as in `attention`.
        name: for tables and messages.
        max_seqlen_q: at least the most rows of a request, for calls under `unchecked()`, which do not look.
    """

    cu_seqlens_q: torch.Tensor
    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    page_size: int
    causal: bool = False
    tree_mask: torch.Tensor | None = None
    tail_seqlens: torch.Tensor | None = None
    name: str = ""
    max_seqlen_q: int | None = None


def cascade_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    levels: Sequence[Level],
    *,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    num_splits: int | None = None,
    out_dtype: torch.dtype | None = None,
    reads: torch.Tensor | None = None,
    layout: Layout = "NHD",
    backend: str = "auto",
) -> State:
    """Attention of the same rows over several levels of keys, merged.

    The levels must deal each visible key to a row once: a key in two levels is counted twice. Partial states of all
    levels and all KV splits stay in float32 and go through one reduction; one level with one split needs none.

    Args:
        q: `[T, H_q, D]`, k_cache `[num_pages, page_size, H_kv, D]`, v_cache `[num_pages, page_size, H_kv, D_v]`, as in
            `attention`. A level with a finer page size sees the cache at that granularity, without a copy.
        levels: at least one `Level`.
        window_size: only (-1, -1) or None. A window moves with each row, a shared level does not.
        softmax_scale, softcap, num_splits, out_dtype, reads, layout, backend: as in `attention`; num_splits holds per
            level, and reads adds up over the levels.

    Returns:
        State `[T, H_q, D_v]`, `[T, H_q]`. Differentiable on the torch backend.

    Raises:
        TypeError, ValueError, RuntimeError: as in `attention`, with the level named.

    Two levels are the cascade of FlashInfer (Ye et al., 2024) and the shared-prefix attention of Hydragen (Juravsky et
    al., 2024, arXiv:2402.05099).
    """
    backend, k_cache, v_cache = check_heads(q, k_cache, v_cache, backend, layout)
    if window_size not in (None, (-1, -1), [-1, -1], (None, None)):
        raise ValueError(
            f"window_size: expected (-1, -1), for a window moves with each row and levels are shared by rows, "
            f"given {window_size}; run one attention() per request instead"
        )
    _check_levels(levels)
    passes = []
    for i, level in enumerate(levels):
        try:
            k, v, table = _at_granularity(k_cache, v_cache, level)
            passes.append(
                check_pass(
                    q,
                    k,
                    v,
                    table,
                    level.cache_seqlens,
                    level.cu_seqlens_q,
                    max_seqlen_q=level.max_seqlen_q,
                    causal=level.causal,
                    tree_mask=level.tree_mask,
                    tail_seqlens=level.tail_seqlens,
                )
            )
        except (TypeError, ValueError) as error:
            raise type(error)(f"levels[{i}] {level.name!r}: {error}") from None
    return run_passes(q, passes, Call(softmax_scale, softcap, num_splits, out_dtype, reads, backend))


def _check_levels(levels: Sequence[Level]) -> None:
    if not isinstance(levels, Sequence):
        raise TypeError(f"levels: expected a sequence of Level, given {type(levels).__name__}")
    if len(levels) == 0:
        raise ValueError("levels: expected at least one Level, given none")
    for i, level in enumerate(levels):
        if not isinstance(level, Level):
            raise TypeError(f"levels[{i}]: expected a Level, given {type(level).__name__}")


def _at_granularity(
    k_cache: torch.Tensor, v_cache: torch.Tensor, level: Level
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both caches as views in pages of `level.page_size` tokens, and the level's table in pages of those views.

    Pages may lie further apart than they are long, as when K and V interleave in one allocation; the view then counts
    the gap in pages too, and the table is renumbered.
    """
    coarse, fine = k_cache.shape[1], _checks.integer("page_size", level.page_size)
    if fine < 1 or coarse % fine:
        raise ValueError(f"page_size: expected a divisor of the cache's page size {coarse}, given {fine!r}")
    if fine == coarse:
        return k_cache, v_cache, level.page_table
    _checks.tensor("page_table", level.page_table)
    caches = (k_cache, v_cache)
    if len(k_cache) <= 1 or all(x.stride(0) == coarse * x.stride(1) for x in caches):
        k, v = (x.view(len(x) * coarse // fine, fine, *x.shape[2:]) for x in caches)
        return k, v, level.page_table
    # a token stride of 0 repeats one token, and no distance can be counted in it
    pitches = {x.stride(0) / x.stride(1) if x.stride(1) else 0 for x in caches}
    pitch = pitches.pop()
    if pitches or pitch % fine or pitch < coarse:
        raise ValueError(
            f"k_cache, v_cache: expected both with pages the same whole number of {fine}-token pages apart, "
            f"to be seen in pages of {fine}, given strides {k_cache.stride()} and {v_cache.stride()}"
        )
    pitch = int(pitch)
    if runtime.checks_enabled() and level.page_table.dim() == 2 and len(level.cache_seqlens) == len(level.page_table):
        paging.check_page_table(level.page_table, level.cache_seqlens, k_cache.shape[0] * coarse // fine, fine)
    pages = max(0, (k_cache.shape[0] - 1) * pitch + coarse) // fine
    k, v = (x.as_strided((pages, fine, *x.shape[2:]), (fine * x.stride(1), *x.stride()[1:])) for x in caches)
    slot = level.page_table.long() * fine
    return k, v, ((slot // coarse * pitch + slot % coarse) // fine).to(torch.int32)


@dataclass(frozen=True)
class Ledger:
    """What a plan loads and computes, in exact integers; per KV head for reads, per query head for pairs.

    Attributes:
        kv_tokens: reads per request: sum of cache_seqlens over the requests that have rows. The count of the published
            formulas R topk (L + S) and R L + R topk S.
        kv_tokens_paged: the same with each request's last page counted whole.
        kv_tokens_unique: distinct keys, as physical slots: the compulsory reads. A copied page has slots of its own.
        pairs: visible query-key pairs.
        num_q_heads, num_kv_heads: as given; their ratio is the group that shares a KV head.
        levels: the same for each level; sums but for kv_tokens_unique, where levels may share slots.
        name: of the level; empty for the plan.
    """

    kv_tokens: int
    kv_tokens_paged: int
    kv_tokens_unique: int
    pairs: int
    num_q_heads: int
    num_kv_heads: int
    levels: tuple[Ledger, ...] = ()
    name: str = ""
    _passes: tuple[PassShape, ...] = field(default=(), repr=False, compare=False)

    def tile_tokens(self, block_m: int) -> int:
        """Reads per row tile: KV tokens loaded per KV head with tiles of `block_m` packed rows (row x head of a group).

        Each tile loads the keys that some row of it sees, once. Per request that is ceil(rows x group / block_m) times
        the keys, less what lies above the diagonal when causal. It equals kv_tokens when one tile holds a request's
        rows; for many rows of a causal pass it goes with the pairs.
        """
        block_m = _checks.integer("block_m", block_m, 1)
        group = self.num_q_heads // self.num_kv_heads
        return sum(shape.tile_tokens(block_m, group) for shape in self._passes)

    def kv_bytes(self, head_dim: int, dtype: torch.dtype, head_dim_v: int | None = None) -> int:
        """kv_tokens x KV heads x (head_dim + head_dim_v) x itemsize; head_dim_v defaults to head_dim."""
        head_dim = _checks.integer("head_dim", head_dim, 1)
        head_dim_v = head_dim if head_dim_v is None else _checks.integer("head_dim_v", head_dim_v, 1)
        itemsize = _checks.dtype("dtype", dtype).itemsize
        return self.kv_tokens * self.num_kv_heads * (head_dim + head_dim_v) * itemsize


@dataclass(frozen=True)
class PassShape:
    """Rows and keys of the requests of one level that have rows, as int64 arrays: what its loads follow from."""

    rows: np.ndarray
    keys: np.ndarray
    causal: bool

    def tile_tokens(self, block_m: int, group: int) -> int:
        """As `Ledger.tile_tokens`, for `group` query heads on a KV head."""
        tiles = -(-self.rows * group // block_m)
        if not self.causal:
            # rows x keys fits 64 bits, times a group it may not
            return sum(map(operator.mul, tiles.tolist(), self.keys.tolist()))
        request = np.repeat(np.arange(len(tiles)), tiles)
        tile = np.arange(tiles.sum()) - np.repeat(tiles.cumsum() - tiles, tiles)
        rows, keys = self.rows[request], self.keys[request]
        last_row = np.minimum(rows - 1, ((tile + 1) * block_m - 1) // group)
        return int(np.clip(last_row + keys - rows + 1, 0, keys).sum())


def ledger(levels: Sequence[Level], *, num_q_heads: int = 1, num_kv_heads: int = 1) -> Ledger:
    """Count a plan's reads, three ways, and its pairs from page tables, lengths and masks; no tensor of it is run.

    Args:
        levels: the plan, as for `cascade_attention`.
        num_q_heads, num_kv_heads: for `tile_tokens` and `kv_bytes`; the first is a multiple of the second.

    Returns:
        Ledger of Python integers. A request without query rows counts in no term.

    Raises:
        TypeError, ValueError: no level, levels of different rows, lengths beyond a table, or head counts that do not
            divide.
    """
    num_q_heads, num_kv_heads = _checks.heads(num_q_heads, num_kv_heads)
    heads = dict(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)
    parts, spans = [], []
    for level in _checked_plan(levels):
        shape, span = _shape(level), _slot_spans(level)
        spans.append(span)
        parts.append(
            Ledger(
                kv_tokens=int(shape.keys.sum()),
                kv_tokens_paged=int(paging.pages_needed(shape.keys, level.page_size).sum()) * level.page_size,
                kv_tokens_unique=_size(*span),
                pairs=_pairs(level, shape),
                name=level.name,
                _passes=(shape,),
                **heads,
            )
        )
    starts, ends = (np.concatenate(x) for x in zip(*spans, strict=True))
    return Ledger(
        kv_tokens=sum(x.kv_tokens for x in parts),
        kv_tokens_paged=sum(x.kv_tokens_paged for x in parts),
        kv_tokens_unique=_size(*_united(starts, ends)),
        pairs=sum(x.pairs for x in parts),
        levels=tuple(parts),
        _passes=tuple(shape for x in parts for shape in x._passes),
        **heads,
    )


def _checked_plan(levels: Sequence[Level]) -> list[Level]:
    """Levels over the same rows whose offsets, tables and lengths agree, page sizes as Python's integers.

    Masks and page ids are not looked at.
    """
    _check_levels(levels)
    first, checked = levels[0], []
    for i, level in enumerate(levels):
        try:
            checked.append(_checked_counts(level))
            if level.cu_seqlens_q[-1] != first.cu_seqlens_q[-1]:
                raise ValueError(
                    f"cu_seqlens_q: expected the {int(first.cu_seqlens_q[-1])} rows of levels[0], "
                    f"given {int(level.cu_seqlens_q[-1])}"
                )
        except (TypeError, ValueError) as error:
            raise type(error)(f"levels[{i}] {level.name!r}: {error}") from None
    return checked


def _checked_counts(level: Level) -> Level:
    """The level, whose offsets have to rise from 0 and whose lengths the page table has to hold."""
    for name in ("cu_seqlens_q", "page_table", "cache_seqlens"):
        _checks.tensor(name, getattr(level, name))
    page_size = _checks.integer("page_size", level.page_size, 1)
    cu, keys, table = level.cu_seqlens_q.cpu(), level.cache_seqlens.cpu(), level.page_table
    if cu.dim() != 1 or len(cu) == 0 or cu[0] != 0 or (cu.diff() < 0).any():
        raise ValueError(f"cu_seqlens_q: expected offsets rising from 0, given {cu.tolist()}")
    if table.dim() != 2 or keys.shape != (len(cu) - 1,) or len(table) != len(keys):
        raise ValueError(
            f"page_table, cache_seqlens: expected [R, max_pages] and [R] for R = {len(cu) - 1} requests, "
            f"given shapes {tuple(table.shape)} and {tuple(keys.shape)}"
        )
    outside = (keys < 0) | (keys > table.shape[1] * page_size)
    if outside.any():
        r = int(outside.int().argmax())
        raise ValueError(
            f"cache_seqlens: expected 0 to {table.shape[1] * page_size} tokens ({table.shape[1]} pages of "
            f"{page_size}), given {int(keys[r])} for request {r}"
        )
    return level if type(level.page_size) is int else replace(level, page_size=page_size)


def _shape(level: Level) -> PassShape:
    rows = np.diff(level.cu_seqlens_q.cpu().numpy().astype(np.int64))
    keys = level.cache_seqlens.cpu().numpy().astype(np.int64)
    return PassShape(rows[rows > 0], keys[rows > 0], level.causal)


def _pairs(level: Level, shape: PassShape) -> int:
    rows, keys = shape.rows, shape.keys
    if level.causal:
        # the last row sees all keys, each row before it one less
        seen = np.minimum(rows, keys)
        return int((seen * keys - seen * (seen - 1) // 2).sum())
    if level.tree_mask is None:
        return int((rows * keys).sum())
    cu = level.cu_seqlens_q.cpu().numpy().astype(np.int64)
    tails = np.diff(cu) if level.tail_seqlens is None else level.tail_seqlens.cpu().numpy().astype(np.int64)
    words = np.ascontiguousarray(level.tree_mask.cpu().numpy())
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    within = np.arange(bits.shape[1]) < np.repeat(tails, np.diff(cu))[:, None]
    return int((rows * (keys - tails[np.diff(cu) > 0])).sum() + (bits & within).sum(dtype=np.int64))


def _slot_spans(level: Level) -> tuple[np.ndarray, np.ndarray]:
    """Slots [start, end) that requests with rows read, as disjoint rising spans.

    A naive plan's table repeats every prefix in every row, so rows are taken in blocks and united at once.
    """
    active = np.flatnonzero(np.diff(level.cu_seqlens_q.cpu().numpy()))
    keys = level.cache_seqlens.cpu().numpy().astype(np.int64)
    table, page_size = level.page_table.cpu().numpy(), level.page_size
    column = np.arange(table.shape[1], dtype=np.int64)
    spans = np.zeros(0, np.int64), np.zeros(0, np.int64)
    step = max(1, SPAN_BLOCK // max(1, table.shape[1]))
    for at in range(0, len(active), step):
        rows = active[at : at + step]
        left = keys[rows, None] - column * page_size
        used = left > 0
        start = table[rows][used].astype(np.int64) * page_size
        end = start + np.minimum(left[used], page_size)
        spans = _united(np.concatenate((spans[0], start)), np.concatenate((spans[1], end)))
    return spans


def _united(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The union of the intervals [start, end) as disjoint rising intervals."""
    if len(start) == 0:
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    apart = np.flatnonzero(start[1:] > reach[:-1])
    return start[np.concatenate(([0], apart + 1))], reach[np.concatenate((apart, [len(reach) - 1]))]


def _size(start: np.ndarray, end: np.ndarray) -> int:
    return int((end - start).sum())
