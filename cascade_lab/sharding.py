"""Who holds what when a context is shared out to ranks: pages of a cached plan, tokens of a prompt, and their ledgers.

A plan's keys are dealt out so that each row still sees each of its keys once, on one rank; the ranks' states then merge
as any levels' do (claim 1). Reads and pairs of the ranks add up to the plan's own. A prompt's rows are not alike: row t
has t pairs, so equal slices are unequal work (claim 3). With 2W slices, rank r taking r and 2W - 1 - r, each pair of
slices holds the same area:

    c (r c) + c (2W - 1 - r) c + 2 c (c + 1)/2 = c^2 (2W - 1) + c (c + 1),    c = N / 2W, whatever r.

Nothing here communicates: `distributed` runs these plans.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np
import torch

from cascade_lab import _checks, paging
from cascade_lab.levels import Ledger, Level, _checked_plan, _first_clash, _rectangles, ledger
from cascade_lab.regions import Dense, Region

__all__ = [
    "PAGE_LAYOUTS",
    "RankLedger",
    "Shard",
    "TOKEN_LAYOUTS",
    "held_rows",
    "held_tokens",
    "imbalance",
    "rank_pairs",
    "ring_ledgers",
    "ring_levels",
    "shard_levels",
    "sharded_ledgers",
    "split_tokens",
]

PageLayout = Literal["contiguous", "interleaved"]
TokenLayout = Literal["contiguous", "zigzag"]
PAGE_LAYOUTS: tuple[PageLayout, ...] = ("contiguous", "interleaved")
"""How `shard_levels` deals pages to ranks: in runs, or in turns."""
TOKEN_LAYOUTS: tuple[TokenLayout, ...] = ("contiguous", "zigzag")
"""How `split_tokens` deals a prompt to ranks: in runs, or each rank an early and a late slice."""

Slices = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's part of a plan.

    Attributes:
        levels: the plan over this rank's own pages; every rank has as many, over the same rows.
        page_ids: `[num_pages]` int64, for each page of this rank's cache the page of the whole cache that it holds:
            `k_cache[page_ids]` is the rank's cache.
        replicated: the levels that every rank holds whole, by index. Their requests are dealt out to be read once.

    Example:
        >>> batch = cl.VerifyBatch([64], [cl.DraftTree.branches(2, 3)])
        >>> shard = cl.sharding.shard_levels(batch.levels("cascade"), rank=0, world_size=2, replicated=[1])
        >>> shard.page_size, shard.page_ids.tolist()  # half of the prefix, and the drafts
        (16, [0, 1, 4])
    """

    levels: tuple[Level, ...]
    page_ids: torch.Tensor
    replicated: tuple[int, ...] = ()

    @property
    def page_size(self) -> int:
        """Tokens in a page of the cache: the largest page of the levels."""
        return max((level.page_size for level in self.levels), default=1)


torch.serialization.add_safe_globals([Shard])


def shard_levels(
    levels: Sequence[Level],
    rank: int,
    world_size: int,
    *,
    layout: PageLayout = "contiguous",
    replicated: Collection[int] = (),
) -> Shard:
    """Deal the pages of a plan out to ranks, by their place in each request.

    Page j of a request's n pages goes to rank r with r n // W <= j < (r + 1) n // W ("contiguous"), or to rank j mod W
    ("interleaved"), so a growing request keeps its pages where they are.

    Args:
        levels: the whole plan, in pages of the whole cache. Sharded levels have one page size, the cache's own, and
            neither a causal nor a tree mask: rows are aligned to the end of keys that another rank may hold.
        rank, world_size: this rank and the number of ranks.
        layout: "contiguous" or "interleaved".
        replicated: indices of levels that every rank holds whole, such as drafts; any page size that divides the
            cache's, any mask.

    Raises:
        TypeError, ValueError: an argument out of range, or a level that cannot be sharded.

    Example:
        >>> batch = cl.VerifyBatch([64], [cl.DraftTree.branches(2, 3)])
        >>> shards = [cl.sharding.shard_levels(batch.levels("cascade"), r, 2, replicated=[1]) for r in range(2)]
        >>> [shard.levels[0].cache_seqlens.tolist() for shard in shards]  # of the prefix of 64
        [[32], [32]]
    """
    rank, world_size = _check_rank(rank, world_size)
    _check_layout(layout, PAGE_LAYOUTS)
    levels = _checked_plan(levels)
    replicated = _check_replicated(replicated, len(levels))
    page_size = max(level.page_size for level in levels)
    parts, kept = [], []
    for i, level in enumerate(levels):
        if i in replicated:
            if page_size % level.page_size:
                raise ValueError(
                    f"levels[{i}] {level.name!r}: page_size: expected a divisor of the largest, {page_size}, "
                    f"given {level.page_size}"
                )
            coarse = _pages_read(level) * level.page_size // page_size
            parts.append(level)
        else:
            if level.causal or level.tree_mask is not None or level.page_size != page_size:
                raise ValueError(
                    f"levels[{i}] {level.name!r}: expected a level in pages of {page_size} without causal or tree_mask "
                    f"to be sharded, given page_size={level.page_size}, causal={level.causal}, "
                    f"{'a' if level.tree_mask is not None else 'no'} tree_mask; split its rows' own keys off into a "
                    f"level of their own and name that in replicated"
                )
            parts.append(_own_pages(level, rank, world_size, layout))
            coarse = _pages_read(parts[-1])
        kept.append(coarse)
    page_ids, first = np.unique(np.concatenate(kept), return_index=True)
    page_ids = page_ids[np.argsort(first)]  # in the order of the requests, so that a request's pages lie together
    return Shard(
        tuple(_renumber(level, page_ids, page_size) for level in parts), torch.from_numpy(page_ids), tuple(replicated)
    )


def _deal_level(level: Level, rank: int, world_size: int) -> Level:
    """This rank's part of a level that every rank holds: the keys of request i are read on rank i mod W alone.

    Raises:
        TypeError, ValueError: a rank outside the group, or a level whose offsets or lengths are no tensors.
    """
    rank, world_size = _check_rank(rank, world_size)
    for name in ("cu_seqlens_q", "cache_seqlens"):
        _checks.tensor(name, getattr(level, name))
    requests = len(level.cache_seqlens)
    own = torch.arange(requests, device=level.cache_seqlens.device) % world_size == rank
    tails = level.tail_seqlens
    if level.tree_mask is not None:
        tails = level.cu_seqlens_q.diff().to(torch.int32) if tails is None else tails
        tails = torch.where(own, tails, 0)
    return replace(level, cache_seqlens=torch.where(own, level.cache_seqlens, 0), tail_seqlens=tails)


def split_tokens(n: int, world_size: int, layout: TokenLayout = "zigzag") -> tuple[Slices, ...]:
    """The half-open slices [start, stop) of a prompt's n tokens that each rank holds, rising.

    "contiguous": rank r has [r n // W, (r + 1) n // W). "zigzag": of 2W such slices rank r has r and 2W - 1 - r,
    the split of *The Llama 3 herd of models* (2024), arXiv:2407.21783.

    Raises:
        TypeError, ValueError: n or world_size that is no integer or too small, or an unknown layout.

    Example:
        >>> cl.sharding.split_tokens(8, 2)
        (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    """
    n, world_size = _checks.integer("n", n, 0), _checks.integer("world_size", world_size, 1)
    _check_layout(layout, TOKEN_LAYOUTS)
    count = world_size if layout == "contiguous" else 2 * world_size
    slices = [(i * n // count, (i + 1) * n // count) for i in range(count)]
    if layout == "contiguous":
        return tuple((piece,) for piece in slices)
    return tuple((slices[r], slices[-1 - r]) for r in range(world_size))


def rank_pairs(
    n: int, world_size: int, layout: TokenLayout = "zigzag", region: Region | None = None
) -> tuple[int, ...]:
    """Exact pairs of each rank's rows: the sum of F(stop) - F(start) over its slices, F the region's total.

    Args:
        n, world_size, layout: as in `split_tokens`.
        region: visible region of the rows; dense causal when absent.

    Raises:
        TypeError, ValueError: as `split_tokens`.

    Example:
        >>> cl.sharding.rank_pairs(8, 2, "contiguous"), cl.sharding.rank_pairs(8, 2, "zigzag")
        ((10, 26), (18, 18))
    """
    region = Dense() if region is None else region
    shares = split_tokens(n, world_size, layout)
    return tuple(sum(region.total(stop) - region.total(start) for start, stop in slices) for slices in shares)


def imbalance(pairs: Sequence[int]) -> Fraction:
    """Largest share over mean share, exact: 1 is balanced, W is everything on one rank.

    Raises:
        TypeError, ValueError: counts that are no integers >= 0, no rank, or no work at all.

    Example:
        >>> cl.sharding.imbalance(cl.sharding.rank_pairs(8, 2, "contiguous")), cl.sharding.imbalance([18, 18])
        (Fraction(13, 9), Fraction(1, 1))
    """
    pairs = _checks.integer_list("pairs", pairs)
    if not sum(pairs):
        raise ValueError(f"pairs: expected some work on at least one rank, given {pairs}")
    return Fraction(max(pairs) * len(pairs), sum(pairs))


def ring_levels(
    prompt_lens: Sequence[int], rank: int, holder: int, world_size: int, layout: TokenLayout = "zigzag"
) -> tuple[Level, ...]:
    """The passes of one rank's rows over the keys that `holder` holds, as levels over the holder's packed tokens.

    Rows and keys are packed by request, then by slice. A slice sees an earlier slice whole and itself causally, so
    pairs are those of the prompt whatever the order in which holders come by. The page size is the greatest that
    divides all slices, so the holder's `[tokens, H_kv, D]` keys are viewed as pages, not copied.

    Args:
        prompt_lens: tokens per request, the same on every rank.
        rank, holder: whose rows, over whose keys.
        world_size, layout: as in `split_tokens`.

    Returns:
        Levels that have something to read; none when all of the holder's tokens come later.

    Raises:
        TypeError, ValueError: a rank outside the group, or as `split_tokens`.

    Example:
        >>> plan = cl.sharding.ring_levels([8], rank=0, holder=1, world_size=2)
        >>> [(level.name, level.cache_seqlens.tolist()) for level in plan]
        [('slice 0 of rank 1', [0, 2]), ('slice 1 of rank 1', [0, 2])]
    """
    rank, world_size = _check_rank(rank, world_size)
    holder, _ = _check_rank(holder, world_size, "holder")
    prompt_lens = _checks.integer_list("prompt_lens", prompt_lens)
    shares = [split_tokens(n, world_size, layout) for n in prompt_lens]
    rows = [share[rank] for share in shares]
    cu = _offsets([stop - start for slices in rows for start, stop in slices])
    keys = [share[holder] for share in shares]
    starts = _offsets([stop - start for slices in keys for start, stop in slices])
    page_size = math.gcd(*(stop - start for slices in keys for start, stop in slices)) or 1
    width = len(split_tokens(0, world_size, layout)[0])
    seen = [[] for _ in range(width + 1)]  # per slice of the holder, then the slices' own triangles
    for b, slices in enumerate(rows):
        for own in slices:
            for v, other in enumerate(keys[b]):
                seen[v].append((starts[b * width + v], other[1] - other[0] if other[1] <= own[0] else 0))
            same = [v for v, other in enumerate(keys[b]) if other == own]
            v = same[0] if same else 0
            seen[width].append((starts[b * width + v], own[1] - own[0] if same else 0))
    levels = []
    for v, reads in enumerate(seen):
        lengths = [length for _, length in reads]
        if any(lengths):
            column = np.arange(max(lengths) // page_size)
            table = np.array([start for start, _ in reads])[:, None] // page_size + column
            table = np.where(column < np.array(lengths)[:, None] // page_size, table, -1)
            levels.append(
                Level(
                    torch.tensor(cu, dtype=torch.int32, device="cpu"),
                    torch.from_numpy(table).to(torch.int32),
                    torch.tensor(lengths, dtype=torch.int32, device="cpu"),
                    page_size,
                    causal=v == width,
                    name="own slices" if v == width else f"slice {v} of rank {holder}",
                    max_seqlen_q=max(np.diff(cu).tolist(), default=0),
                )
            )
    return tuple(levels)


@dataclass(frozen=True)
class RankLedger:
    """What one rank loads, computes and sends, in exact integers.

    Attributes:
        rank: in the group; the ledgers of all ranks come as one list.
        kv_tokens: tokens loaded per KV head, and pairs: per query head; as in `Ledger`, of this rank's levels.
        bytes_sent: payload that this rank puts on the wire, headers of the transport not counted.

    Example:
        >>> first, second = cl.sharding.ring_ledgers([8], 2, bytes_per_token=100)
        >>> (first.kv_tokens, first.pairs), (second.kv_tokens, second.pairs)
        ((10, 18), (10, 18))
    """

    rank: int
    kv_tokens: int
    pairs: int
    bytes_sent: int


def sharded_ledgers(
    levels: Sequence[Level],
    world_size: int,
    *,
    layout: PageLayout = "contiguous",
    replicated: Collection[int] = (),
    bytes_sent: int | Sequence[int] = 0,
) -> list[RankLedger]:
    """The ledger of each rank of a sharded plan; kv_tokens and pairs add up to `ledger(levels)`.

    Args:
        levels, world_size, layout, replicated: as in `shard_levels`.
        bytes_sent: for the merge, by every rank alike or one count for each, from `distributed.merge_bytes`.

    Raises:
        TypeError, ValueError: as `shard_levels`, or bytes_sent of other than world_size ranks.

    Example:
        >>> plan = cl.VerifyBatch([64], [cl.DraftTree.branches(2, 3)]).levels("cascade")
        >>> [one.kv_tokens for one in cl.sharding.sharded_ledgers(plan, 2, replicated=[1])], cl.ledger(plan).kv_tokens
        ([38, 38], 76)
    """
    world_size = _checks.integer("world_size", world_size, 1)
    if isinstance(bytes_sent, Sequence):
        sent = _checks.integer_list("bytes_sent", bytes_sent)
    else:
        sent = [_checks.integer("bytes_sent", bytes_sent, 0)] * world_size
    if len(sent) != world_size:
        raise ValueError(f"bytes_sent: expected one count for each of {world_size} ranks, given {len(sent)}")
    ledgers = []
    for rank in range(world_size):
        shard = shard_levels(levels, rank, world_size, layout=layout, replicated=replicated)
        counts = ledger(_own_levels(shard, rank, world_size))
        ledgers.append(RankLedger(rank, counts.kv_tokens, counts.pairs, sent[rank]))
    return ledgers


def ring_ledgers(
    prompt_lens: Sequence[int], world_size: int, *, layout: TokenLayout = "zigzag", bytes_per_token: int
) -> list[RankLedger]:
    """The ledger of each rank of a prefill whose keys pass round; pairs add up to the prompts' interactions.

    A slice's rows read all earlier slices, so kv_tokens add up to those of the same slices on one rank, and not to the
    prompt's length.

    Args:
        prompt_lens, world_size, layout: as in `ring_levels`.
        bytes_per_token: of keys and values on the wire, H_kv (D + D_v) itemsize.

    Raises:
        TypeError, ValueError: as `held_tokens`, or a negative bytes_per_token.

    Example:
        >>> ledgers = cl.sharding.ring_ledgers([8], 2, bytes_per_token=100)
        >>> [one.pairs for one in ledgers], sum(one.pairs for one in ledgers) == cl.interactions(8)
        ([18, 18], True)
    """
    bytes_per_token = _checks.integer("bytes_per_token", bytes_per_token, 0)
    world_size = _checks.integer("world_size", world_size, 1)
    held = held_tokens(prompt_lens, world_size, layout)
    ledgers = []
    for rank in range(world_size):
        plans = [ring_levels(prompt_lens, rank, holder, world_size, layout) for holder in range(world_size)]
        counts: list[Ledger] = [ledger(plan) for plan in plans if plan]
        # it hands on everything but what its successor already has
        passed_on = sum(held) - held[(rank + 1) % world_size] if world_size > 1 else 0
        ledgers.append(
            RankLedger(
                rank, sum(x.kv_tokens for x in counts), sum(x.pairs for x in counts), passed_on * bytes_per_token
            )
        )
    return ledgers


def _own_levels(shard: Shard, rank: int, world_size: int) -> list[Level]:
    """The levels that a rank really reads: sharded ones as they are, replicated ones dealt out."""
    return [
        _deal_level(level, rank, world_size) if i in shard.replicated else level for i, level in enumerate(shard.levels)
    ]


def held_rows(prompt_lens: Sequence[int], rank: int, world_size: int, layout: TokenLayout = "zigzag") -> torch.Tensor:
    """Where the tokens that a rank holds stand among all prompts packed one after another, `[tokens]` int64.

    `q[held_rows(...)]` are the rank's rows in the order that `ring_levels` and `distributed.ring_attention` expect.

    Raises:
        TypeError, ValueError: a rank outside the group, or as `split_tokens`.

    Example:
        >>> cl.sharding.held_rows([8], rank=0, world_size=2).tolist()
        [0, 1, 6, 7]
    """
    rank, world_size = _check_rank(rank, world_size)
    prompt_lens = _checks.integer_list("prompt_lens", prompt_lens)
    starts = _offsets(prompt_lens)
    shares = [split_tokens(n, world_size, layout)[rank] for n in prompt_lens]
    runs = [
        torch.arange(at + start, at + stop, device="cpu")
        for at, slices in zip(starts, shares, strict=False)
        for start, stop in slices
    ]
    return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64, device="cpu")


def held_tokens(prompt_lens: Sequence[int], world_size: int, layout: TokenLayout = "zigzag") -> list[int]:
    """Tokens that each rank holds of all prompts.

    Raises:
        TypeError, ValueError: prompt_lens that is no sequence of counts, no rank, or an unknown layout.

    Example:
        >>> cl.sharding.held_tokens([8, 6], world_size=2)
        [7, 7]
    """
    if not isinstance(prompt_lens, Sequence):
        raise TypeError(f"prompt_lens: expected a sequence of token counts, given {type(prompt_lens).__name__}")
    world_size, prompt_lens = (
        _checks.integer("world_size", world_size, 1),
        _checks.integer_list("prompt_lens", prompt_lens),
    )
    _check_layout(layout, TOKEN_LAYOUTS)
    shares = [split_tokens(n, world_size, layout) for n in prompt_lens]
    return [sum(stop - start for share in shares for start, stop in share[rank]) for rank in range(world_size)]


def _check_replicated(replicated: Collection[int], num_levels: int) -> tuple[int, ...]:
    """The indices, sorted.

    Raises:
        TypeError, ValueError: not a collection of different indices of levels.
    """
    if isinstance(replicated, str) or not isinstance(replicated, Collection):
        raise TypeError(f"replicated: expected indices of levels, given {replicated!r}")
    indices = sorted(_checks.integer_list("replicated", replicated))
    if indices and indices[-1] >= num_levels:
        raise ValueError(f"replicated: expected indices below {num_levels}, the number of levels, given {indices[-1]}")
    if len(set(indices)) != len(indices):
        raise ValueError(f"replicated: expected each level once, given {indices}")
    return tuple(indices)


def _key_rectangles(levels: Sequence[Level], page_ids: torch.Tensor, page_size: int) -> np.ndarray:
    """What the rows of `levels` read: `[n, 5]` int64 of slot start, slot stop, row start, row stop, level.

    Slots are of the whole cache, page_ids x page_size + offset, so the keys of different ranks can be compared.
    """
    ids = page_ids.cpu().numpy().astype(np.int64)
    rectangles = _rectangles(levels)
    local = rectangles[:, 0]
    moved = ids[local // page_size] * page_size + local % page_size - local
    rectangles[:, :2] += moved[:, None]
    return rectangles


def _check_counted_once(rectangles: np.ndarray) -> None:
    """Refuse a plan in which a row reads a slot twice, be it on one rank or on two.

    A key that a level's mask hides counts as read.

    Args:
        rectangles: `[n, 6]` int64, those of `_key_rectangles` and the rank as a last column, of all ranks.

    Raises:
        ValueError: naming the slot, the row, and the two places that count it.
    """
    clash = _first_clash(rectangles)
    if clash is not None:
        slot, one, other = clash
        raise ValueError(
            f"levels: expected each key of a row once over all ranks, given slot {slot} twice for row {other[2]}: "
            f"in levels[{one[4]}] on rank {one[5]} and in levels[{other[4]}] on rank {other[5]}"
        )


def _own_pages(level: Level, rank: int, world_size: int, layout: PageLayout) -> Level:
    """The level over the pages that `rank` owns, still in pages of the whole cache."""
    keys = level.cache_seqlens.cpu().numpy().astype(np.int64)
    table = level.page_table.cpu().numpy()
    pages = paging.pages_needed(keys, level.page_size)
    column = np.arange(table.shape[1])
    if layout == "interleaved":
        own = (column % world_size == rank) & (column < pages[:, None])
    else:
        own = (column >= (rank * pages // world_size)[:, None]) & (column < ((rank + 1) * pages // world_size)[:, None])
    tokens = np.where(own, np.minimum(keys[:, None] - column * level.page_size, level.page_size), 0).sum(1)
    counts = own.sum(1)
    mine = np.full((len(table), counts.max(initial=0)), -1, np.int32)
    mine[np.arange(mine.shape[1]) < counts[:, None]] = table[own]
    device = level.page_table.device
    return replace(
        level,
        page_table=torch.from_numpy(mine).to(device),
        cache_seqlens=torch.from_numpy(tokens.astype(np.int32)).to(device),
    )


def _pages_read(level: Level) -> np.ndarray:
    """Page ids that the level's lengths cover, request after request, int64."""
    table = level.page_table.cpu().numpy()
    pages = paging.pages_needed(level.cache_seqlens.cpu().numpy().astype(np.int64), level.page_size)
    return table[np.arange(table.shape[1]) < pages[:, None]].astype(np.int64)


def _renumber(level: Level, page_ids: np.ndarray, page_size: int) -> Level:
    """The level in pages of a cache that holds `page_ids`; entries past the lengths become -1."""
    table = level.page_table.cpu().numpy().astype(np.int64)
    pages = paging.pages_needed(level.cache_seqlens.cpu().numpy().astype(np.int64), level.page_size)
    used = np.arange(table.shape[1]) < pages[:, None]
    parts = page_size // level.page_size
    order = np.argsort(page_ids)
    place = order[np.searchsorted(page_ids[order], table[used] // parts)]
    local = np.full_like(table, -1)
    local[used] = place * parts + table[used] % parts
    return replace(level, page_table=torch.from_numpy(local.astype(np.int32)).to(level.page_table.device))


def _offsets(lengths: Sequence[int]) -> list[int]:
    return np.concatenate(([0], np.cumsum(np.array(lengths, np.int64)))).tolist()


def _check_rank(rank: int, world_size: int, name: str = "rank") -> tuple[int, int]:
    """A number of ranks >= 1, and a rank below it."""
    world_size, rank = _checks.integer("world_size", world_size, 1), _checks.integer(name, rank, 0)
    if rank >= world_size:
        raise ValueError(f"{name}: expected a number below world_size = {world_size}, given {rank}")
    return rank, world_size


def _check_layout(layout: str, known: tuple[str, ...]) -> None:
    if layout not in known:
        raise ValueError(f"layout: expected one of {known}, given {layout!r}")
