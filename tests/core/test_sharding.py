"""Who holds what: every key of every row on one rank, and ledgers of ranks that add up to the plan's."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from cascade_lab import (
    CSA,
    HCA,
    NSA,
    Chunked,
    Dense,
    DraftTree,
    Level,
    SinkWindow,
    SlidingWindow,
    TopK,
    TopKBlocks,
    VerifyBatch,
    interactions,
    ledger,
)
from cascade_lab.distributed import LocalCache
from cascade_lab.drafts import ROWS
from cascade_lab.evidence.reference import visible_keys
from cascade_lab.sharding import (
    PAGE_LAYOUTS,
    TOKEN_LAYOUTS,
    Shard,
    _check_counted_once,
    _check_replicated,
    _deal_level,
    _key_rectangles,
    _own_levels,
    held_tokens,
    imbalance,
    rank_pairs,
    ring_ledgers,
    ring_levels,
    shard_levels,
    sharded_ledgers,
    split_tokens,
)
from tests.cases import INT32_MAX, int32, offsets
from tests.verify import CHAIN, FORK, SHUFFLED, STAR

WORLDS = [1, 2, 3, 4, 7]
REGIONS = [
    Dense(),
    SlidingWindow(5),
    SinkWindow(2, 5),
    Chunked(4),
    TopK(3),
    TopKBlocks(4, 2),
    CSA(4, 2, 3),
    HCA(4, 3),
    NSA(4, 4, 8, 2, 3),
]


def decode_level(lengths: list[int], page: int, *, rows: list[int] | None = None, seed: int = 0) -> Level:
    """Requests of `rows[r]` rows (default 1) over pages in random order; entries past the lengths are out of range."""
    pages = [-(-length // page) for length in lengths]
    pool = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(lengths), max([*pages, 1]) + 1), INT32_MAX, dtype=torch.int32)
    for r, count in enumerate(pages):
        table[r, :count] = int32(pool[:count])
        pool = pool[count:]
    rows = [1] * len(lengths) if rows is None else rows
    return Level(offsets(rows), table, int32(lengths), page, name="decode")


def verify_levels(plan: str, rows: str, page: int, shared: int = 0) -> tuple[Level, ...]:
    trees = [None if parents is None else DraftTree(parents) for parents in (FORK, SHUFFLED, None, STAR, CHAIN)]
    prefixes = [shared + n for n in (13, 0, 9, 4 * page, 1)]
    return VerifyBatch(prefixes, trees, page, rows, shared_prefix_len=shared).levels(plan)


def keys_of_rows(levels, page_ids, page_size: int) -> Counter:
    """How often each row reads each slot of the whole cache, token by token."""
    found = Counter()
    for level in levels:
        cu, table = level.cu_seqlens_q.tolist(), level.page_table.tolist()
        for r, length in enumerate(level.cache_seqlens.tolist()):
            for token in range(length):
                fine = table[r][token // level.page_size] * level.page_size + token % level.page_size
                slot = int(page_ids[fine // page_size]) * page_size + fine % page_size
                found.update((row, slot) for row in range(cu[r], cu[r + 1]))
    return found


def assert_dealt_once(levels, world_size: int, layout: str, replicated=()) -> list[Shard]:
    page_size = max(level.page_size for level in levels)
    whole = keys_of_rows(levels, range(1 << 20), page_size)
    assert set(whole.values()) <= {1}
    shards = [
        shard_levels(levels, rank, world_size, layout=layout, replicated=replicated) for rank in range(world_size)
    ]
    parts = [
        keys_of_rows(_own_levels(shard, rank, world_size), shard.page_ids, page_size)
        for rank, shard in enumerate(shards)
    ]
    assert sum(parts, Counter()) == whole
    rectangles = [
        np.insert(_key_rectangles(_own_levels(shard, rank, world_size), shard.page_ids, page_size), 5, rank, axis=1)
        for rank, shard in enumerate(shards)
    ]
    _check_counted_once(np.concatenate(rectangles))
    return shards


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_key_of_a_decode_plan_is_on_one_rank(world_size, page, layout):
    lengths = [0, 1, page, page + 1, 5 * page - 1, 3, 40]
    shards = assert_dealt_once([decode_level(lengths, page, seed=page)], world_size, layout)
    assert all(len(shard.levels[0].cache_seqlens) == len(lengths) for shard in shards)


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
def test_pages_go_where_the_layout_says(layout):
    level = decode_level([43, 12], 4)  # 11 pages, the last with 3 tokens, and 3 pages
    held = [shard_levels([level], rank, 3, layout=layout) for rank in range(3)]
    tokens = [shard.levels[0].cache_seqlens.tolist() for shard in held]
    pages = level.page_table[0, :11].tolist()
    if layout == "interleaved":
        assert tokens == [[16, 4], [15, 4], [12, 4]]
        expected = [pages[0::3], pages[1::3], pages[2::3]]
    else:
        assert tokens == [[12, 4], [16, 4], [15, 4]]
        expected = [pages[:3], pages[3:7], pages[7:]]
    assert [shard.page_ids.tolist()[:-1] for shard in held] == expected
    assert [shard.page_ids.tolist()[-1] for shard in held] == level.page_table[1, :3].tolist()


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_a_growing_request_keeps_its_pages_when_interleaved(world_size):
    level = decode_level([41], 4)
    for rank in range(world_size):
        long = shard_levels([level], rank, world_size, layout="interleaved").page_ids.tolist()
        for length in range(41):
            short = shard_levels(
                [replace(level, cache_seqlens=int32([length]))], rank, world_size, layout="interleaved"
            )
            assert short.page_ids.tolist() == long[: len(short.page_ids)]


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_fewer_pages_than_ranks_leave_ranks_without_keys(world_size, layout):
    shards = assert_dealt_once([decode_level([3, 0, 4], 4)], world_size, layout)
    empty = [shard for shard in shards if len(shard.page_ids) == 0]
    assert len(empty) == (world_size - 1 if world_size > 1 else 0)
    assert all(shard.levels[0].cache_seqlens.tolist() == [0, 0, 0] for shard in empty)


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("page", "shared"), [(1, 0), (4, 0), (4, 12), (16, 32)])
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_verify_plan_is_dealt_once_and_its_ledgers_add_up(world_size, page, shared, rows, layout):
    levels = verify_levels("cascade", rows, page, shared)
    assert len(levels) == (3 if shared else 2)
    drafts = [len(levels) - 1]
    assert_dealt_once(levels, world_size, layout, drafts)
    whole = ledger(levels)
    ranks = sharded_ledgers(levels, world_size, layout=layout, replicated=drafts, bytes_sent=7)
    assert [(x.rank, x.bytes_sent) for x in ranks] == [(rank, 7) for rank in range(world_size)]
    assert sum(x.kv_tokens for x in ranks) == whole.kv_tokens
    assert sum(x.pairs for x in ranks) == whole.pairs
    each = [*range(world_size)]
    assert [x.bytes_sent for x in sharded_ledgers(levels, world_size, replicated=drafts, bytes_sent=each)] == each
    with pytest.raises(ValueError, match=f"bytes_sent: expected one count for each of {world_size} ranks, given 9"):
        sharded_ledgers(levels, world_size, bytes_sent=[1] * 9)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("plan", ["naive", "cascade", "fused"])
@pytest.mark.parametrize("rows", ROWS)
def test_a_plan_that_all_ranks_hold_is_read_once(rows, plan, world_size):
    levels = verify_levels(plan, rows, 4)
    everything = range(len(levels))
    assert_dealt_once(levels, world_size, "contiguous", everything)
    ranks = sharded_ledgers(levels, world_size, replicated=everything)
    assert sum(x.kv_tokens for x in ranks) == ledger(levels).kv_tokens
    # with a tree mask, pairs are those of the visible bits, in the rank that reads the request
    assert sum(x.pairs for x in ranks) == ledger(levels).pairs
    assert max(x.kv_tokens for x in ranks) < ledger(levels).kv_tokens


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_ledgers_of_a_decode_plan_add_up(world_size, layout):
    level = decode_level([37, 0, 16, 5, 64], 8, rows=[1, 2, 0, 3, 1])
    whole = ledger([level])
    ranks = sharded_ledgers([level], world_size, layout=layout)
    assert (
        (sum(x.kv_tokens for x in ranks), sum(x.pairs for x in ranks)) == (whole.kv_tokens, whole.pairs) == (106, 116)
    )


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
def test_a_rank_holds_copies_of_its_pages_of_the_cache(layout):
    levels = verify_levels("cascade", "node", 4)
    num_pages = 1 + int(max(level.page_table.max() * level.page_size // 4 for level in levels))
    k_cache = torch.arange(num_pages * 4 * 2 * 8, dtype=torch.float32).view(num_pages, 4, 2, 8)
    for rank in range(3):
        shard = shard_levels(levels, rank, 3, layout=layout, replicated=[1])
        cache = LocalCache.of(k_cache, -k_cache[..., :3], shard)
        assert torch.equal(cache.k_cache, k_cache[shard.page_ids])
        assert torch.equal(cache.v_cache, -k_cache[shard.page_ids][..., :3])
        heads_first = LocalCache.of(k_cache.transpose(1, 2), -k_cache[..., :3].transpose(1, 2), shard, layout="HND")
        assert torch.equal(heads_first.v_cache, cache.v_cache)
        assert torch.equal(cache.page_ids, shard.page_ids)
        assert len(set(shard.page_ids.tolist())) == len(shard.page_ids)
        assert all(int(level.page_table.max()) < len(shard.page_ids) * 4 // level.page_size for level in shard.levels)


def test_a_cache_that_is_not_the_plans_is_refused():
    shard = shard_levels([decode_level([9, 17], 4)], 0, 2)
    last = int(shard.page_ids.max())
    good = torch.zeros(last + 1, 4, 1, 8)
    LocalCache.of(good, good, shard)
    with pytest.raises(ValueError, match=r"k_cache: expected .* pages of 4, given \(\d+, 2, 1, 8\)"):
        LocalCache.of(good.view(-1, 2, 1, 8), good, shard)
    with pytest.raises(ValueError, match=f"v_cache: expected page {last} of the plan, given {last} pages"):
        LocalCache.of(good, good[:last], shard)
    with pytest.raises(TypeError, match="k_cache: expected a tensor"):
        LocalCache.of(None, good, shard)


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
def test_slots_beyond_32_bits_stay_apart(layout):
    pages = [0, 1 << 26, INT32_MAX, INT32_MAX - 1, 3]
    level = Level(offsets([1]), int32([pages]), int32([5 * 64 - 1]), 64)
    shards = [shard_levels([level], rank, 2, layout=layout) for rank in range(2)]
    slots = [
        (start, stop)
        for shard in shards
        for start, stop, *_ in _key_rectangles(shard.levels, shard.page_ids, 64).tolist()
    ]
    # slots 0 and 2^32 are the same in 32 bits
    assert sorted(slots) == sorted((page * 64, page * 64 + 64 - (page == 3)) for page in pages)
    rectangles = [
        np.insert(_key_rectangles(shard.levels, shard.page_ids, 64), 5, rank, axis=1)
        for rank, shard in enumerate(shards)
    ]
    _check_counted_once(np.concatenate(rectangles))
    # ... and so are those of one rank that holds 2^31 slots
    far = Level(offsets([1]), int32([[0, 2048]]), int32([(1 << 20) + 5]), 1 << 20)
    found = _key_rectangles([far], torch.arange(2049), 1 << 20)
    assert found[:, :2].tolist() == [[0, 1 << 20], [1 << 31, (1 << 31) + 5]]


def refused(error, match, levels, *arguments, **options):
    with pytest.raises(error, match=match):
        shard_levels(levels, *arguments, **options)


def test_levels_that_cannot_be_sharded_are_refused():
    naive, fused = verify_levels("cascade", "node", 4), verify_levels("fused", "node", 4)
    refused(ValueError, r"levels\[0\] 'fused': .*tree_mask to be sharded.*replicated", fused, 0, 2)
    refused(ValueError, r"levels\[1\] 'draft': .*pages of 4 .*given page_size=1", naive, 0, 2)
    causal = replace(decode_level([9, 4], 4), causal=True)
    refused(ValueError, r"levels\[0\] 'decode': .*causal=True", [causal], 0, 2)
    assert shard_levels([causal], 1, 2, replicated=[0]).levels[0].causal
    # 3 divides no page of 4: its keys would be cut at the wrong places
    odd = [decode_level([9, 4], 4), decode_level([2, 2], 3)]
    refused(
        ValueError, r"levels\[1\] 'decode': page_size: expected a divisor of .*4, given 3", odd, 0, 2, replicated=[1]
    )
    negative = replace(decode_level([9, 4], 4), page_table=int32([[0, 1, -1], [2, -1, -1]]))
    refused(ValueError, "page_table: expected page ids from 0 to .* given -1", [negative], 0, 1)


def test_arguments_out_of_range_are_refused():
    levels = [decode_level([9, 4], 4)]
    refused(ValueError, "rank: expected a number below world_size = 2, given 2", levels, 2, 2)
    refused(ValueError, "rank: expected a number >= 0", levels, -1, 2)
    refused(TypeError, "rank: expected an integer", levels, 0.5, 2)
    refused(ValueError, "world_size: expected a number >= 1", levels, 0, 0)
    refused(ValueError, r"layout: expected one of .* given 'zigzag'", levels, 0, 2, layout="zigzag")
    refused(ValueError, "replicated: expected indices below 1", levels, 0, 2, replicated=[1])
    refused(ValueError, r"replicated: expected each level once, given \[0, 0\]", levels, 0, 2, replicated=[0, 0])
    refused(ValueError, r"replicated\[0\]: expected a number >= 0, given -1", levels, 0, 2, replicated=[-1])
    refused(TypeError, "replicated: expected indices of levels, given '0'", levels, 0, 2, replicated="0")
    refused(TypeError, "replicated: expected indices of levels, given 0", levels, 0, 2, replicated=0)
    refused(TypeError, r"levels\[1\]: expected a Level, given int", [*levels, 3], 0, 2)
    refused(ValueError, "levels: expected at least one Level", [], 0, 2)
    beyond = [replace(levels[0], cache_seqlens=int32([9, 17]))]
    refused(ValueError, r"levels\[0\] 'decode': cache_seqlens: expected 0 to 16 .*given 17", beyond, 0, 2)
    refused(ValueError, "cu_seqlens_q: expected the 2 rows", [*levels, decode_level([1], 4)], 0, 2)
    with pytest.raises(ValueError, match="rank: expected a number below world_size = 2"):
        _deal_level(levels[0], 2, 2)
    with pytest.raises(TypeError, match="cache_seqlens: expected a tensor, given list"):
        _deal_level(replace(levels[0], cache_seqlens=[9, 4]), 0, 2)
    assert _check_replicated({2, 0}, 3) == (0, 2)


def test_a_dealt_tree_level_has_no_tail_where_it_has_no_keys():
    (fused,) = verify_levels("fused", "node", 4)
    for rank in range(2):
        dealt = _deal_level(replace(fused, tail_seqlens=None), rank, 2)
        rows = fused.cu_seqlens_q.diff().tolist()
        assert dealt.tail_seqlens.tolist() == [n if r % 2 == rank else 0 for r, n in enumerate(rows)]
        assert dealt.cache_seqlens.tolist() == [
            n if r % 2 == rank else 0 for r, n in enumerate(fused.cache_seqlens.tolist())
        ]
        assert {dealt.tail_seqlens.dtype, dealt.cache_seqlens.dtype} == {torch.int32}


def rectangle(slots: tuple[int, int], rows: tuple[int, int], level: int = 0, rank: int = 0) -> list[int]:
    return [*slots, *rows, level, rank]


@pytest.mark.parametrize(
    ("one", "other", "slot", "row"),
    [
        (rectangle((0, 4), (0, 2)), rectangle((0, 4), (0, 2), rank=1), 0, 0),
        (rectangle((8, 12), (3, 5), level=0), rectangle((8, 12), (4, 9), level=1), 8, 4),
        # overlaps inside a page: 3 tokens of one request and single tokens of another
        (rectangle((16, 19), (0, 4)), rectangle((18, 19), (2, 3), level=2, rank=3), 18, 2),
        (rectangle((16, 20), (7, 8), level=1), rectangle((14, 17), (0, 9), rank=2), 16, 7),
    ],
)
def test_a_key_counted_twice_is_refused_with_its_places(one, other, slot, row):
    apart = [rectangle((100 + 4 * i, 104 + 4 * i), (0, 9), rank=i % 3) for i in range(5)]
    for pair in ([one, other], [other, one]):
        with pytest.raises(ValueError, match=f"given slot {slot} twice for row {row}: in levels") as raised:
            _check_counted_once(np.array([*apart[:2], *pair, *apart[2:]], dtype=np.int64))
        for x in pair:
            assert f"levels[{x[4]}] on rank {x[5]}" in str(raised.value)


def test_keys_that_are_not_shared_are_not_refused():
    rectangles = [
        rectangle((0, 4), (0, 3)),
        rectangle((0, 4), (3, 5), rank=1),  # the same slots for other rows
        rectangle((4, 6), (0, 5), level=1),  # other slots of a page, same rows
        rectangle((6, 8), (0, 5), level=1, rank=1),
        rectangle((8, 9), (4, 5), rank=1),
        rectangle((8, 9), (0, 4), level=1),
    ]
    for order in (rectangles, rectangles[::-1]):
        _check_counted_once(np.array(order, dtype=np.int64))
    _check_counted_once(np.zeros((0, 6), np.int64))


def test_the_check_finds_what_a_look_at_every_slot_finds():
    generator = np.random.default_rng(5)
    verdicts = Counter()
    for _ in range(300):
        slots, rows = generator.integers(0, 12, (2, 4))
        sizes, heights = generator.integers(1, 4, (2, 4))
        columns = (slots, slots + sizes, rows, rows + heights, np.arange(4), np.arange(4))
        rectangles = np.stack(columns, axis=1)
        cells = Counter()
        for a, b, c, d, *_ in rectangles.tolist():
            cells.update((slot, row) for slot in range(a, b) for row in range(c, d))
        twice = max(cells.values()) > 1
        verdicts[twice] += 1
        if twice:
            with pytest.raises(ValueError, match="twice for row") as raised:
                _check_counted_once(rectangles)
            slot, row = re.search(r"slot (\d+) twice for row (\d+)", str(raised.value)).groups()
            assert cells[int(slot), int(row)] > 1
        else:
            _check_counted_once(rectangles)
    assert min(verdicts[True], verdicts[False]) > 50


def test_a_plan_without_rows_or_keys_has_nothing_to_compare():
    level = decode_level([9, 4, 0], 4, rows=[0, 2, 3])
    shard = shard_levels([level], 0, 1)
    assert _key_rectangles(shard.levels, shard.page_ids, 4)[:, 2:4].tolist() == [[0, 2]]
    none = replace(level, cache_seqlens=int32([0, 0, 0]))
    assert _key_rectangles([none], torch.arange(9), 4).shape == (0, 5)


@pytest.mark.parametrize("layout", TOKEN_LAYOUTS)
@pytest.mark.parametrize("world_size", range(1, 9))
def test_tokens_are_split_without_gap_or_overlap(world_size, layout):
    for n in range(61):
        shares = split_tokens(n, world_size, layout)
        assert len(shares) == world_size
        tokens = [t for share in shares for start, stop in share for t in range(start, stop)]
        assert sorted(tokens) == list(range(n))
        assert all(a[1] <= b[0] for share in shares for a, b in zip(share, share[1:], strict=False))
        assert held_tokens([n, 3], world_size, layout) == [
            sum(b - a for a, b in share + other)
            for share, other in zip(shares, split_tokens(3, world_size, layout), strict=True)
        ]
        counts = held_tokens([n], world_size, layout)
        assert max(counts) - min(counts) <= (1 if layout == "contiguous" else 2)
    # rank 0 has the first slice, and of a zigzag the last too
    share = split_tokens(60 * world_size, world_size, layout)[0]
    assert share == (((0, 60),) if layout == "contiguous" else ((0, 30), (60 * world_size - 30, 60 * world_size)))


@pytest.mark.parametrize("region", REGIONS, ids=lambda region: type(region).__name__)
@pytest.mark.parametrize("layout", TOKEN_LAYOUTS)
def test_pairs_of_ranks_are_those_of_their_rows_in_every_region(layout, region):
    for world_size in (1, 2, 3, 5):
        for n in (0, 1, 7, 24, 61):
            pairs = rank_pairs(n, world_size, layout, region)
            assert pairs == tuple(
                sum(region.visible(t + 1) for start, stop in share for t in range(start, stop))
                for share in split_tokens(n, world_size, layout)
            )
            assert sum(pairs) == region.total(n)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_equal_slices_of_a_triangle_are_unequal_work(world_size):
    W = world_size
    for c in (1, 2, 9, 10**6):
        assert imbalance(rank_pairs(W * c, W, "contiguous")) == Fraction((2 * W - 1) * c + 1, W * c + 1)
    limit = imbalance(rank_pairs(W * 10**9, W, "contiguous")) - Fraction(2 * W - 1, W)
    assert abs(limit) < Fraction(1, 10**8)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_zigzag_slices_hold_the_same_area(world_size):
    W = world_size
    for c in (1, 2, 7, 10**6):
        pairs = rank_pairs(2 * W * c, W, "zigzag")
        assert pairs == (c * c * (2 * W - 1) + c * (c + 1),) * W
        assert imbalance(pairs) == 1
    for n in range(1, 200):
        # an edge lies less than a token before i n / 2W, and token t of a slice has t pairs
        bound = 1 + Fraction((2 * W - 1) * n + 2 * W, n * (n + 1))
        assert imbalance(rank_pairs(n, W, "zigzag")) < bound
        assert imbalance(rank_pairs(n, W, "zigzag")) <= imbalance(rank_pairs(n, W, "contiguous"))


def test_imbalance_is_largest_over_mean():
    assert imbalance([3, 3, 3]) == 1
    assert imbalance([6, 0, 0]) == 3
    assert imbalance([1, 2]) == Fraction(4, 3)
    for nothing in ([], [0, 0]):
        with pytest.raises(ValueError, match="pairs: expected some work"):
            imbalance(nothing)
    for arguments, match in (((-1, 2), "n: "), ((4, 0), "world_size: "), ((4, 2, "striped"), "layout: ")):
        with pytest.raises(ValueError, match=match):
            split_tokens(*arguments)


@pytest.mark.parametrize("layout", TOKEN_LAYOUTS)
@pytest.mark.parametrize("prompts", [[8], [24, 16], [0, 1, 7, 30], [61], []])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_ring_levels_show_every_row_its_keys_once(world_size, prompts, layout):
    held = [
        [
            (b, t)
            for b, n in enumerate(prompts)
            for start, stop in split_tokens(n, world_size, layout)[rank]
            for t in range(start, stop)
        ]
        for rank in range(world_size)
    ]
    total = 0
    for rank in range(world_size):
        seen = Counter()
        for holder in range(world_size):
            plan = ring_levels(prompts, rank, holder, world_size, layout)
            assert all(level.cache_seqlens.any() for level in plan)
            for level in plan:
                cu = level.cu_seqlens_q.tolist()
                assert cu[-1] == len(held[rank])
                for r, visible in enumerate(visible_keys(level.cu_seqlens_q, level.cache_seqlens, causal=level.causal)):
                    for i, j in visible.nonzero().tolist():
                        page, offset = divmod(j, level.page_size)
                        key = int(level.page_table[r, page]) * level.page_size + offset
                        seen[held[rank][cu[r] + i], held[holder][key]] += 1
        assert seen == Counter(((b, t), (b, key)) for b, t in held[rank] for key in range(t + 1))
        total += seen.total()
    assert total == sum(interactions(n) for n in prompts)


@pytest.mark.parametrize("layout", TOKEN_LAYOUTS)
@pytest.mark.parametrize("prompts", [[8], [48, 24], [0, 1, 7, 30]])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ring_ledgers_count_pairs_reads_and_bytes(world_size, prompts, layout):
    ranks = ring_ledgers(prompts, world_size, layout=layout, bytes_per_token=10)
    assert [x.pairs for x in ranks] == [
        sum(pairs) for pairs in zip(*(rank_pairs(n, world_size, layout) for n in prompts), strict=True)
    ]
    assert sum(x.pairs for x in ranks) == sum(interactions(n) for n in prompts)
    # each slice's rows read every earlier slice and their own, once
    for rank, x in enumerate(ranks):
        assert x.kv_tokens == sum(
            stop for n in prompts for start, stop in split_tokens(n, world_size, layout)[rank] if stop > start
        )
    # keys leave a rank W - 1 times: all but what the next rank has from the start
    held = held_tokens(prompts, world_size, layout)
    assert [x.bytes_sent for x in ranks] == [
        10 * (sum(prompts) - held[(rank + 1) % world_size]) * (world_size > 1) for rank in range(world_size)
    ]


def test_ring_arguments_are_refused():
    for error, match, arguments in (
        (TypeError, "prompt_lens: expected a sequence of token counts, given int", (8, 2)),
        (TypeError, "prompt_lens: expected a sequence of token counts, given generator", ((n for n in [8]), 2)),
        (ValueError, r"prompt_lens\[0\]: expected a number >= 0, given -1", ([-1], 2)),
        (ValueError, "world_size: ", ([8], 0)),
    ):
        with pytest.raises(error, match=match):
            ring_ledgers(*arguments, bytes_per_token=1)
    with pytest.raises(ValueError, match="bytes_per_token: "):
        ring_ledgers([8], 2, bytes_per_token=-1)
    with pytest.raises(ValueError, match="layout: "):
        held_tokens([], 2, "interleaved")
    with pytest.raises(ValueError, match="holder: expected a number below"):
        ring_levels([8], 0, 2, 2)
