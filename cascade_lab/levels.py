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

The partition is the caller's to make: `shared_prefix_levels` makes one from what requests share, and `check_plan` tells
whether one that was made by hand shows each row its keys once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from cascade_lab import _checks, paging, runtime
from cascade_lab._passes import Values, check_heads, check_pass, on_host, run_passes
from cascade_lab.backends import Call, Pass
from cascade_lab.paging import Layout
from cascade_lab.regions import _floor_sum
from cascade_lab.states import State

__all__ = ["Ledger", "Level", "cascade_attention", "check_plan", "ledger", "shared_prefix_levels", "sharing_order"]

# page-table entries that the ledger looks at together, and keys of rows that `check_plan` does
SPAN_BLOCK = 1 << 22
# page-table entries up to which `cascade_attention` itself looks for keys that a row would see twice
CHEAP_ENTRIES = 1 << 18
MAX_PAGES = 2**31


@dataclass(frozen=True, eq=False)
class Level:
    """One pass over a whole batch. Two levels are equal when they are the same object: tensors are not compared.

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

    Example:
        >>> rows, pages = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([[7, 2]], dtype=torch.int32)
        >>> prefix = cl.Level(rows, pages, torch.tensor([30], dtype=torch.int32), page_size=16, name="prefix")
        >>> cl.ledger([prefix]).pairs  # 3 rows, each over 30 tokens
        90
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


torch.serialization.add_safe_globals([Level])


def cascade_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    levels: Sequence[Level],
    *,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    num_splits: int | None = None,
    out_dtype: torch.dtype | None = None,
    reads: torch.Tensor | None = None,
    layout: Layout = "NHD",
    backend: runtime.Backend = "auto",
) -> State:
    """Attention of the same rows over several levels of keys, merged.

    The levels must deal each visible key to a row once: a key in two levels is counted twice. That is refused here
    where it is cheap to see, in plans of up to 262,144 page-table entries, and so is a causal level that leaves several
    rows of a request without a key, so that they cannot differ: a shared prefix that reaches beyond the computed
    tokens. Only `check_plan` compares a plan with what its rows are to see. A plan that many layers share is checked by
    the first call, and the others may run inside `runtime.unchecked()`. Partial states of all levels and all KV
    splits stay in float32 and go through one reduction; one level with one split needs none.

    Args:
        q: `[T, H_q, D]`, k_cache `[num_pages, page_size, H_kv, D]`, v_cache `[num_pages, page_size, H_kv, D_v]`, as in
            `attention`. A level with a finer page size sees the cache at that granularity, without a copy.
        levels: at least one `Level`.
        window_size: only (-1, -1) or None. A window moves with each row, a shared level does not.
        sinks: as in `attention`; a sink enters once for each row, however many levels and splits there are.
        softmax_scale, softcap, k_scale, v_scale, num_splits, out_dtype, reads, layout, backend: as in `attention`;
            num_splits holds per level, and reads adds up over the levels.

    Returns:
        State `[T, H_q, D_v]`, `[T, H_q]`. Differentiable on the torch backend.

    Raises:
        TypeError, ValueError, RuntimeError: as in `attention`, with the level named.

    Two levels are the cascade of FlashInfer (Ye et al., 2024) and the shared-prefix attention of Hydragen (Juravsky et
    al., 2024, arXiv:2402.05099).

    Example:
        >>> q, (k, v) = torch.randn(2, 2, 8), torch.randn(2, 4, 2, 1, 8)  # 2 rows of 2 heads; 4 pages of 2 tokens
        >>> pages = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32)  # the requests share pages 0 and 1
        >>> lens, rows = torch.tensor([6, 5], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
        >>> plan = cl.shared_prefix_levels(pages, lens, rows, page_size=2)
        >>> o, lse = cl.cascade_attention(q, k, v, plan)
        >>> torch.allclose(o, cl.attention(q, k, v, pages, lens).o, atol=1e-6)
        True
    """
    call = Call(softmax_scale, softcap, num_splits, out_dtype, reads, backend, sinks, k_scale, v_scale)
    return _attend_levels(q, k_cache, v_cache, levels, call, layout, window_size=window_size)


def _attend_levels(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    levels: Sequence[Level],
    call: Call,
    layout: Layout = "NHD",
    *,
    window_size: tuple[int, int] | None = None,
    whole: bool = True,
) -> State:
    """`cascade_attention`; not `whole` is a rank's part of a plan, whose rows have other keys elsewhere."""
    passes, backend = passes_of(q, k_cache, v_cache, levels, call.backend, layout, window_size, whole)
    return run_passes(q, passes, call._replace(backend=backend))


def passes_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    levels: Sequence[Level],
    backend: str,
    layout: Layout = "NHD",
    window_size: object = None,
    whole: bool = True,
) -> tuple[list[Pass], str]:
    """The passes of a call over levels, all checked, and its backend."""
    backend, k_cache, v_cache = check_heads(q, k_cache, v_cache, backend, layout)
    if window_size not in (None, (-1, -1), [-1, -1], (None, None)):
        raise ValueError(
            f"window_size: expected (-1, -1), for a window moves with each row and levels are shared by rows, "
            f"given {window_size}; run one attention() per request instead"
        )
    _check_levels(levels)
    passes, found = [], _values(levels, q) if runtime.checks_enabled() else [None] * len(levels)
    for i, (level, values) in enumerate(zip(levels, found, strict=True)):
        try:
            k, v, table = _at_granularity(k_cache, v_cache, level)
            if values is not None and table is not level.page_table:
                values = values._replace(page_table=table.cpu())
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
                    values=values,
                )
            )
        except (TypeError, ValueError) as error:
            raise type(error)(f"levels[{i}] {level.name!r}: {error}") from None
    if whole and len(levels) > 1 and runtime.checks_enabled():
        levels = [replace(level, **values._asdict()) for level, values in zip(levels, found, strict=True)]
        _check_own_keys(levels)
        if sum(level.page_table.numel() for level in levels) <= CHEAP_ENTRIES:
            _check_apart(levels)
    return passes, backend


def _values(levels: Sequence[Level], q: torch.Tensor) -> list[Values | None]:
    """What the checks look at, on the host; nothing where a tensor is none of a level's, which they then say."""
    given = [Values(level.page_table, level.cache_seqlens, level.cu_seqlens_q, level.tail_seqlens) for level in levels]
    every = [x for values in given for x in values if x is not None]
    if not all(isinstance(x, torch.Tensor) and x.dtype == torch.int32 and x.device == q.device for x in every):
        return [None] * len(levels)
    return list(on_host(given))


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


def shared_prefix_levels(
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    computed_lens: torch.Tensor | None = None,
    page_size: int = 16,
    *,
    causal: bool = True,
    tree_mask: torch.Tensor | None = None,
    tail_seqlens: torch.Tensor | None = None,
    max_shared_levels: int | None = None,
    min_shared_tokens: int = 1,
) -> tuple[Level, ...]:
    """The plan of a batch that reads each shared prefix once for all its readers: groups, nested where they nest.

    Requests share a page when their tables name it in the same place with all pages before it. Neighbours that do make
    a group, which reads these pages as one request of all its rows; within a group those that share more make groups
    of the next level, and what is a request's own is read in the last level, with its masks. Rows are packed, so that
    only neighbours can be a group: `sharing_order` says how to order a batch.

    Args:
        page_table: `[R, max_pages]` int32, one row per request, all of its tokens.
        cache_seqlens: `[R]` int32, tokens per request, those of its rows included.
        cu_seqlens_q: `[R + 1]` int32 row offsets.
        computed_lens: `[R]` int32, tokens whose keys were in the cache before this step. Nothing beyond is shared,
            nor any token behind which a row stands, and a shared part ends with a whole page.
        page_size: tokens per page.
        causal, tree_mask, tail_seqlens: how rows see the end of their own keys, as in `attention`; a tree mask takes
            the place of `causal`.
        max_shared_levels: at most so many levels before the last, the outermost first; None for all.
        min_shared_tokens: a group that shares fewer further tokens is not formed.

    Returns:
        The shared levels from the outermost in, and the last level; this alone when nothing is shared. Each row sees
        the keys that it would see in one `attention` over the whole tables, each once.

    Raises:
        TypeError, ValueError: shapes that do not agree, lengths beyond a table, or numbers out of range.

    FlashInfer's multi-level cascade takes such levels, and vLLM's cascade attention has the rule on computed tokens.

    Example:
        >>> pages = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32)
        >>> lens, rows = torch.tensor([6, 5], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
        >>> plan = cl.shared_prefix_levels(pages, lens, rows, page_size=2)
        >>> [(level.name, level.cache_seqlens.tolist()) for level in plan]
        [('shared 0', [4]), ('own', [2, 1])]
    """
    if tree_mask is None and tail_seqlens is not None:
        raise ValueError("tail_seqlens: expected None without tree_mask, given a tensor")
    own = Level(cu_seqlens_q, page_table, cache_seqlens, page_size, name="own", tree_mask=tree_mask)
    own = replace(_checked_counts(own), causal=causal and tree_mask is None, tail_seqlens=tail_seqlens)
    page_size, device = own.page_size, page_table.device
    most = None if max_shared_levels is None else _checks.integer("max_shared_levels", max_shared_levels, 0)
    least = _checks.integer("min_shared_tokens", min_shared_tokens, 1)
    cu, lens, table = (x.cpu().numpy().astype(np.int64) for x in (cu_seqlens_q, cache_seqlens, page_table))
    rows = np.diff(cu)
    sharable = _sharable_pages(own, computed_lens)
    segments, shared = _nested_groups(table, sharable, np.flatnonzero(rows > 0), page_size, most, least)
    levels = []
    for depth, groups in enumerate(segments):
        levels.append(_group_level(groups, cu, table, page_size, f"shared {depth}", device))
    column = shared[:, None] + np.arange(max(0, table.shape[1] - int(shared.min(initial=table.shape[1]))))
    rest = np.where(rows > 0, lens - shared * page_size, 0)
    used = np.arange(column.shape[1]) < paging.pages_needed(rest, page_size)[:, None]
    pages = np.where(used, np.take_along_axis(table, np.minimum(column, max(0, table.shape[1] - 1)), 1), -1)
    pages = pages[:, : int(used.sum(1).max(initial=0))]
    last = replace(
        own,
        page_table=torch.from_numpy(pages.astype(np.int32)).to(device),
        cache_seqlens=torch.from_numpy(rest.astype(np.int32)).to(device),
        max_seqlen_q=int(rows.max(initial=0)),
    )
    return (*levels, last)


def sharing_order(
    page_table: torch.Tensor, cache_seqlens: torch.Tensor, computed_lens: torch.Tensor, page_size: int = 16
) -> torch.Tensor:
    """`[R]` int64: the requests in an order in which those that share most are neighbours.

    By their page ids, first page first, as far as they are computed. Take tables, lengths and rows in this order, and
    `shared_prefix_levels` finds every group.

    Args:
        page_table, cache_seqlens, computed_lens, page_size: as in `shared_prefix_levels`.

    Raises:
        TypeError, ValueError: as `shared_prefix_levels`.

    Example:
        >>> pages = torch.tensor([[0, 1], [2, 3], [0, 4]], dtype=torch.int32)  # requests 0 and 2 share a page
        >>> lens = torch.tensor([32, 32, 32], dtype=torch.int32)
        >>> cl.levels.sharing_order(pages, lens, lens).tolist()
        [0, 2, 1]
    """
    nothing = torch.zeros(len(page_table) + 1, dtype=torch.int32, device=page_table.device)
    level = _checked_counts(Level(nothing, page_table, cache_seqlens, page_size))
    sharable = _sharable_pages(level, computed_lens)
    table = page_table.cpu().numpy().astype(np.int64)
    table = np.where(np.arange(table.shape[1]) < sharable[:, None], table, -1)
    keys = table.T[::-1] if table.shape[1] else np.zeros((1, len(table)))
    return torch.from_numpy(np.lexsort(keys)).to(page_table.device)


def _sharable_pages(level: Level, computed_lens: torch.Tensor | None) -> np.ndarray:
    """Whole pages of each request that lie before all of its rows' own keys and are computed."""
    lens = level.cache_seqlens.cpu().numpy().astype(np.int64)
    limit = lens
    if level.tree_mask is not None and level.tail_seqlens is not None:
        limit = lens - level.tail_seqlens.cpu().numpy()
    elif level.tree_mask is not None or level.causal:
        limit = lens - np.diff(level.cu_seqlens_q.cpu().numpy())
    if computed_lens is not None:
        _checks.tensor("computed_lens", computed_lens, "[R]", (len(lens),))
        limit = np.minimum(limit, computed_lens.cpu().numpy())
    return np.maximum(limit, 0) // level.page_size


def _nested_groups(
    table: np.ndarray, sharable: np.ndarray, active: np.ndarray, page_size: int, most: int | None, least: int
) -> tuple[list[list[tuple[int, int, int, int]]], np.ndarray]:
    """Groups (first request, last request, first page, last page + 1) of each depth, and each request's shared pages.

    A group's pages are those that all its requests share and that no group around it reads already.
    """
    groups: list[list[tuple[int, int, int, int]]] = []
    shared = np.zeros(len(table), np.int64)
    # members, pages that all of them share, pages read by the groups around them, how many these are
    waiting = [(active, 0, 0, 0)]
    while waiting:
        members, same, read, depth = waiting.pop()
        end = int(sharable[members].min()) if len(members) > 1 else same
        differ = (table[members, same:end] != table[members[:1], same:end]).any(0)
        end = same + int(differ.argmax()) if differ.any() else end
        if len(members) > 1 and (end - read) * page_size >= least and (most is None or depth < most):
            groups += [[]] * (depth + 1 - len(groups))
            groups[depth] = [*groups[depth], (int(members[0]), int(members[-1]), read, end)]
            read, depth = end, depth + 1
        shared[members] = read
        if len(members) < 2 or end >= table.shape[1]:
            continue
        # neighbours that also have the next page in common
        page = np.where(sharable[members] > end, table[members, end], -1 - np.arange(len(members)))
        cuts = np.flatnonzero(np.diff(page)) + 1
        waiting += [(run, end, read, depth) for run in np.split(members, cuts) if len(run) > 1]
    return groups, shared


def _group_level(groups, cu: np.ndarray, table: np.ndarray, page_size: int, name: str, device) -> Level:
    """The rows of each group over its pages; rows between groups are requests without keys."""
    offsets, lengths, tables = [0], [], []
    for first, last, start, end in sorted(groups):
        if cu[first] > offsets[-1]:
            offsets.append(int(cu[first]))
            lengths.append(0)
            tables.append(table[first, :0])
        offsets.append(int(cu[last + 1]))
        lengths.append((end - start) * page_size)
        tables.append(table[first, start:end])
    if offsets[-1] < cu[-1]:
        offsets.append(int(cu[-1]))
        lengths.append(0)
        tables.append(table[0, :0])
    pages = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for row, ids in zip(pages, tables, strict=True):
        row[: len(ids)] = ids
    tensors = (np.asarray(offsets, np.int32), pages, np.asarray(lengths, np.int32))
    cu_seqlens_q, page_table, cache_seqlens = (torch.from_numpy(x).to(device) for x in tensors)
    most = max(np.diff(offsets).tolist())
    return Level(cu_seqlens_q, page_table, cache_seqlens, page_size, name=name, max_seqlen_q=most)


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

    Example:
        >>> batch = cl.VerifyBatch([1000], [cl.DraftTree.branches(4, 5)], rows="branch")
        >>> counts = cl.ledger(batch.levels("cascade"), num_q_heads=8, num_kv_heads=2)
        >>> counts.kv_tokens, counts.pairs  # 1000 + 4 x 5, and 4 x (5 x 1000 + 15)
        (1020, 20060)
        >>> [(level.name, level.kv_tokens) for level in counts.levels]
        [('prefix', 1000), ('draft', 20)]
        >>> counts.kv_bytes(128, torch.bfloat16)  # 1020 tokens x 2 heads x 256 numbers x 2 bytes
        1044480
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
        """kv_tokens x KV heads x (head_dim + head_dim_v) x itemsize; head_dim_v defaults to head_dim.

        dtype is the cache's: float8 counts one byte an element.
        """
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
        return sum(_causal_tile_tokens(*one, block_m, group) * times for one, times in self._kinds())

    def _kinds(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Each (rows, keys) of a request, and how many requests are so."""
        kinds, times = np.unique(np.stack((self.rows, self.keys)), axis=1, return_counts=True)
        return zip(zip(*kinds.tolist(), strict=True), times.tolist(), strict=True)


def _causal_tile_tokens(rows: int, keys: int, block_m: int, group: int) -> int:
    """Keys that the row tiles of a causal request load, each up to the diagonal of its last row.

    The last tile sees all keys, and the i-th one before it, i = 1, 2, ..., its floor((i block_m - 1) / group) + 1 rows
    and the keys before them, keys - rows in number, which may be negative.
    """
    tiles, behind = -(-rows * group // block_m), keys - rows + 1
    # the first tile that sees a key
    first = 1 if behind >= 0 else -((behind * group - 1) // block_m)
    count = tiles - first
    if count <= 0:
        return keys
    return keys + _floor_sum(count, block_m, first * block_m - 1 + behind * group, group)


def ledger(levels: Sequence[Level], *, num_q_heads: int = 1, num_kv_heads: int = 1) -> Ledger:
    """Count a plan's reads, three ways, and its pairs from page tables, lengths and masks; no tensor of it is run.

    Args:
        levels: the plan, as for `cascade_attention`.
        num_q_heads, num_kv_heads: for `tile_tokens` and `kv_bytes`; the first is a multiple of the second.

    Returns:
        Ledger of Python integers. A request without query rows counts in no term.

    Raises:
        TypeError, ValueError: levels that `cascade_attention` refuses over any cache, also inside `unchecked()`; head
            counts that do not divide.

    Example:
        >>> batch = cl.VerifyBatch([2000], [cl.DraftTree.branches(4, 5)], rows="branch")
        >>> {plan: cl.ledger(batch.levels(plan)).kv_tokens for plan in cl.drafts.PLANS}
        {'naive': 8020, 'cascade': 2020, 'fused': 2020}
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


def check_plan(levels: Sequence[Level], whole: Level | None = None) -> None:
    """Refuse a plan in which a row sees a key twice, or other keys than it is to see.

    Exact, key by key and mask by mask, in time that grows with the pairs of the plan: for a test, or for the first of
    many calls, not for each.

    Args:
        levels: the plan, as for `cascade_attention`.
        whole: one level that shows every row exactly what the plan is to show it, such as all tokens of each request,
            causal, in the cache's own pages. Keys are compared by slot, so copied pages are other keys. When absent,
            keys in two levels and causal rows that cannot differ are looked for, and missing ones cannot be known.

    Raises:
        TypeError, ValueError: as `ledger`; a key that a row sees twice, one that `whole` does not show it, as when a
            shared level reaches beyond the computed tokens, or one that no level shows it, with row, level and slot.

    Example:
        >>> batch = cl.VerifyBatch([20], [cl.DraftTree.chain(3)])
        >>> plan, (whole,) = batch.levels("cascade"), batch.levels("fused")
        >>> cl.check_plan(plan, whole)
        >>> cl.check_plan([*plan, plan[0]])
        Traceback (most recent call last):
            ...
        ValueError: levels: expected each key of a row once, given slot 0 twice for row 0: ...
    """
    given = [*levels, whole] if isinstance(levels, Sequence) and whole is not None else levels
    checked = _checked_plan(given)
    plan = checked if whole is None else checked[:-1]
    if not plan:
        raise ValueError("levels: expected at least one Level, given none")
    tables = [_slots_of(level) for level in checked]
    num_slots = max([1, *(int(slots.max()) + 1 for slots, _ in tables if slots.size)])
    cost = np.zeros(int(plan[0].cu_seqlens_q[-1]), np.int64)
    for level, (_, keys) in zip(checked, tables, strict=True):
        cost += np.repeat(keys, np.diff(level.cu_seqlens_q.cpu().numpy()))
    block = cost.cumsum() // SPAN_BLOCK
    for start in np.flatnonzero(np.diff(block, prepend=-1)):
        rows = int(start), int(np.searchsorted(block, block[start], side="right"))
        seen = [_seen(level, *table, rows, num_slots) for level, table in zip(checked, tables, strict=True)]
        _check_seen(plan, seen[: len(plan)], seen[-1] if whole is not None else None, num_slots)
    if whole is None:
        _check_own_keys(plan)


def _check_seen(plan: Sequence[Level], seen: Sequence[np.ndarray], expected, num_slots: int) -> None:
    """Compare what the levels show, each a sorted array of row * num_slots + slot, with one another and `expected`."""

    def holders(key: int) -> list[str]:
        return [f"levels[{i}] {plan[i].name!r}" for i, keys in enumerate(seen) for x in (keys == key).nonzero()[0]]

    every = np.sort(np.concatenate(seen))
    twice = every[1:][every[1:] == every[:-1]]
    if len(twice):
        row, slot = divmod(int(twice[0]), num_slots)
        one, other, *_ = holders(twice[0])
        raise ValueError(
            f"levels: expected each key of a row once, given slot {slot} twice for row {row}: in {one} and in {other}"
        )
    if expected is None:
        return
    foreign = np.setdiff1d(every, expected, assume_unique=True)
    if len(foreign):
        row, slot = divmod(int(foreign[0]), num_slots)
        raise ValueError(
            f"{holders(foreign[0])[0]}: expected keys that whole shows row {row}, given slot {slot}, which it does not "
            f"({len(foreign)} such keys of rows)"
        )
    missing = np.setdiff1d(expected, every, assume_unique=True)
    if len(missing):
        row, slot = divmod(int(missing[0]), num_slots)
        raise ValueError(
            f"levels: expected every key that whole shows row {row}, given none at slot {slot} "
            f"({len(missing)} such keys of rows)"
        )


def _slots_of(level: Level) -> tuple[np.ndarray, np.ndarray]:
    """`[R, longest]` int64 slots of the tokens of requests with rows, arbitrary behind a length, and their lengths."""
    keys = level.cache_seqlens.cpu().numpy().astype(np.int64)
    keys = np.where(np.diff(level.cu_seqlens_q.cpu().numpy()) > 0, keys, 0)
    table, token = level.page_table.cpu().numpy().astype(np.int64), np.arange(keys.max(initial=0))
    slots = table[:, token // level.page_size] * level.page_size + token % level.page_size
    return np.where(token < keys[:, None], slots, 0), keys


def _seen(level: Level, slots: np.ndarray, keys: np.ndarray, rows: tuple[int, int], num_slots: int) -> np.ndarray:
    """row * num_slots + slot of every key that these rows see in the level, sorted."""
    cu = level.cu_seqlens_q.cpu().numpy().astype(np.int64)
    row = np.arange(*rows)
    request = np.searchsorted(cu, row, side="right") - 1
    longest = int(keys[request].max(initial=0))
    token = np.arange(longest)
    visible = token < keys[request, None]
    if level.causal:
        visible &= token <= (row - cu[request + 1] + keys[request])[:, None]
    if level.tree_mask is not None:
        tails = np.diff(cu) if level.tail_seqlens is None else level.tail_seqlens.cpu().numpy().astype(np.int64)
        words = np.ascontiguousarray(level.tree_mask[slice(*rows)].cpu().numpy())
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(bool)
        bit = token - (keys - tails)[request, None]
        visible &= (bit < 0) | np.take_along_axis(bits, np.clip(bit, 0, bits.shape[1] - 1), 1)
    return np.sort((row[:, None] * num_slots + slots[request, :longest])[visible])


def _check_own_keys(levels: Sequence[Level]) -> None:
    """Refuse a causal level that leaves two rows of a request without a key, so that both see the same keys.

    One row may be left so: its own key then ends an earlier level.
    """
    counts = [(x.cu_seqlens_q.cpu().numpy().astype(np.int64), x.cache_seqlens.cpu().numpy()) for x in levels]
    for i, (level, (cu, keys)) in enumerate(zip(levels, counts, strict=True)):
        blind = np.diff(cu) - keys if level.causal else np.zeros(0)
        for r in np.flatnonzero(blind >= 2):
            others, told_apart = 0, False
            for j, (other, (offsets, lengths)) in enumerate(zip(levels, counts, strict=True)):
                if j != i:
                    first, second = np.searchsorted(offsets, [cu[r], cu[r] + 1], side="right") - 1
                    masked = other.causal or other.tree_mask is not None
                    told_apart |= first != second or bool(masked and lengths[first])
                    others += int(lengths[first])
            if others and not told_apart:
                raise ValueError(
                    f"levels[{i}] {level.name!r}: expected at least {cu[r + 1] - cu[r] - 1} keys for the "
                    f"{cu[r + 1] - cu[r]} causal rows of request {r}, given {keys[r]}: its first {blind[r]} rows see "
                    f"the same keys, some of them behind a row; a shared prefix has to end before the rows' own keys"
                )


def _check_apart(levels: Sequence[Level]) -> None:
    """Refuse a slot that some row sees in two levels. Levels of different slots, the usual case, need one sort."""
    spans = [_slot_spans(level) for level in levels]
    starts, ends = (np.concatenate(x) for x in zip(*spans, strict=True))
    if _size(*_united(starts, ends)) == sum(_size(*span) for span in spans):
        return
    rectangles = _rectangles(levels)
    clash = _first_clash(rectangles)
    if clash is None:
        return
    slot, (*_, one), (_, _, row, _, other) = clash
    if any(level.causal or level.tree_mask is not None for level in (levels[one], levels[other])):
        # masks may deal out keys that both levels hold
        if int(((rectangles[:, 1] - rectangles[:, 0]) * (rectangles[:, 3] - rectangles[:, 2])).sum()) <= SPAN_BLOCK:
            check_plan(levels)
        return
    raise ValueError(
        f"levels: expected each key of a row once, given slot {slot} twice for row {row}: in levels[{one}] "
        f"{levels[one].name!r} and in levels[{other}] {levels[other].name!r}"
    )


def _rectangles(levels: Sequence[Level]) -> np.ndarray:
    """What the rows of `levels` read: `[n, 5]` int64 of slot start, slot stop, row start, row stop, level."""
    parts = [np.zeros((0, 5), np.int64)]
    for i, level in enumerate(levels):
        cu = level.cu_seqlens_q.cpu().numpy().astype(np.int64)
        table = level.page_table.cpu().numpy().astype(np.int64)
        left = level.cache_seqlens.cpu().numpy().astype(np.int64)[:, None]
        left = left - np.arange(table.shape[1]) * level.page_size
        request, column = np.nonzero((left > 0) & (np.diff(cu) > 0)[:, None])
        start = table[request, column] * level.page_size
        stop = start + np.minimum(left[request, column], level.page_size)
        parts.append(np.stack((start, stop, cu[request], cu[request + 1], np.full_like(start, i)), axis=1))
    return np.concatenate(parts)


def _first_clash(rectangles: np.ndarray) -> tuple[int, np.ndarray, np.ndarray] | None:
    """A slot that two rectangles give to one row, and these two, the one with later rows behind; None if there is none.

    Args:
        rectangles: `[n, 4 or more]` int64 of slot start, slot stop, row start, row stop, and what tells them apart.
    """
    start, stop = rectangles[:, 0], rectangles[:, 1]
    edges = np.unique(np.concatenate((start, stop)))
    first, last = np.searchsorted(edges, start), np.searchsorted(edges, stop)
    # one entry for each stretch between edges that a rectangle covers
    origin = np.repeat(np.arange(len(rectangles)), last - first)
    stretch = np.arange(len(origin)) - np.repeat((last - first).cumsum() - (last - first) - first, last - first)
    order = np.lexsort((rectangles[origin, 2], stretch))
    origin, stretch = origin[order], stretch[order]
    rows_meet = rectangles[origin[1:], 2] < rectangles[origin[:-1], 3]
    clash = np.flatnonzero((stretch[1:] == stretch[:-1]) & rows_meet)
    if not len(clash):
        return None
    at = clash[0]
    return int(edges[stretch[at]]), rectangles[origin[at]], rectangles[origin[at + 1]]


def _checked_plan(levels: Sequence[Level]) -> list[Level]:
    """Levels that `cascade_attention` takes over some cache, over the same rows; page sizes as Python's integers."""
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
    """The level, checked as for a call on as many rows as it has and a cache of as many pages as int32 can name."""
    page_size = _checks.integer("page_size", level.page_size, 1)
    cu = _checks.tensor("cu_seqlens_q", level.cu_seqlens_q, "[R + 1]")
    if len(cu) == 0 or cu[-1] < 0:
        raise ValueError(f"cu_seqlens_q: expected offsets rising from 0, given {cu.tolist()}")
    # shapes without memory
    q = torch.empty(1, 1, 1, device=cu.device).expand(int(cu[-1]), 1, 1)
    cache = torch.empty(1, 1, 1, 1, device=cu.device).expand(MAX_PAGES, page_size, 1, 1)
    with runtime.checked():
        check_pass(
            q,
            cache,
            cache,
            level.page_table,
            level.cache_seqlens,
            cu,
            max_seqlen_q=level.max_seqlen_q,
            causal=level.causal,
            tree_mask=level.tree_mask,
            tail_seqlens=level.tail_seqlens,
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
