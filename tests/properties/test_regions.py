"""Closed forms of regions, hits and tiles against counting, over parameters of any size."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cascade_lab import ledger
from cascade_lab.evidence.masks import keys_seen
from cascade_lab.prefix import (
    effective_hit,
    executed_tiles,
    interactions,
    linear_remaining,
    prefix_hit_levels,
    remaining,
    remaining_scattered,
    tile_remaining,
)
from cascade_lab.regions import (
    CSA,
    HCA,
    NSA,
    Chunked,
    Compressed,
    Dense,
    Mixture,
    Region,
    SinkWindow,
    SlidingWindow,
    TopK,
    TopKBlocks,
)
from tests.properties.budget import cases

few = st.integers(1, 12)
# lengths whose sums lie on either side of 64 bits, for windows and for the dense triangle
near = st.integers(2**59, 2**62) | st.integers(2**30, 2**33)
huge = st.integers(1, 2**70)


def regions(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[Region]:
    """Every region that has a mask, with parameters from `sizes`."""
    zero = st.just(0) | sizes
    return st.one_of(
        st.just(Dense()),
        st.builds(SlidingWindow, sizes),
        st.builds(SinkWindow, zero, sizes),
        st.builds(Chunked, sizes),
        st.builds(TopK, sizes),
        st.builds(TopKBlocks, sizes, sizes),
        st.builds(Compressed, sizes),
        st.builds(CSA, sizes, sizes, sizes),
        st.builds(HCA, sizes, sizes),
        st.builds(NSA, sizes, sizes, sizes, sizes, sizes),
    )


def mixtures(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[Mixture]:
    layers = st.lists(st.tuples(sizes, regions(sizes)), min_size=1, max_size=3)
    return st.builds(lambda parts: Mixture(tuple(parts)), layers)


def hits(longest: int, shortest: int = 1) -> st.SearchStrategy[tuple[int, int]]:
    """(n, hit) with 0 <= hit <= n."""
    return st.integers(shortest, longest).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


@cases(300)
@given(regions(few), st.integers(1, 40), st.integers(0, 3))
def test_regions_count_the_marks_of_their_masks(region, n, seed):
    seen = keys_seen(region, n, seed=seed)
    assert [region.visible(t) for t in range(1, n + 1)] == seen
    assert [region.total(m) for m in range(n + 1)] == [sum(seen[:m]) for m in range(n + 1)]


@cases(200)
@given(regions(huge) | mixtures(huge), huge)
def test_a_total_of_any_size_grows_by_what_the_next_row_sees(region, n):
    assert region.total(n) - region.total(n - 1) == region.visible(n)
    assert region.total(0) == 0


@cases(200)
@given(
    regions(few) | regions(huge) | mixtures(few) | mixtures(huge),
    st.lists(st.integers(1, 50) | near | st.integers(1, 2**62), min_size=1, max_size=4),
)
def test_arrays_are_counted_as_integers_are(region, lengths):
    """Also where a sum passes 64 bits, and whatever the parameters are."""
    counted = region.total(np.array(lengths))
    assert [int(x) for x in counted] == [region.total(n) for n in lengths]
    assert [int(x) for x in region.visible(np.array(lengths))] == [region.visible(n) for n in lengths]


@cases(150)
@given(regions(few) | mixtures(few), hits(40))
def test_what_remains_is_the_rows_after_the_hit(region, lengths):
    n, hit = lengths
    seen = [region.visible(t) for t in range(1, n + 1)]
    if sum(seen) == 0:
        return
    left = region.remaining(n, hit)
    assert left == Fraction(sum(seen[hit:]), sum(seen))
    (averaged,) = region.remaining(np.array([n]), np.array([hit]))
    assert averaged == float(left)
    if 0 < hit < n and left < 1:
        assert math.isclose(Fraction(hit, n) ** region.exponent(n, hit), 1 - left, rel_tol=1e-9)


@cases(150)
@given(hits(60), st.lists(st.integers(0, 60), max_size=4))
def test_interactions_are_pairs_and_add_up_over_chunks(lengths, cuts):
    n, hit = lengths
    assert interactions(n, hit) == sum(1 for row in range(hit, n) for key in range(n) if key <= row)
    ends = sorted({hit, n, *(c for c in cuts if hit <= c <= n)})
    assert sum(interactions(b, a) for a, b in zip(ends, ends[1:], strict=False)) == interactions(n, hit)
    assert remaining(n, hit) * interactions(n) == interactions(n, hit)
    assert linear_remaining(n, hit) == Fraction(n - hit, n)


@cases(100)
@given(hits(2**80))
def test_fractions_of_long_prompts_stay_exact_and_in_order(lengths):
    n, hit = lengths
    left = remaining(n, hit)
    assert left == Fraction(interactions(n, hit), interactions(n)) == Dense().remaining(n, hit)
    # between the linear law and the limit, which it misses by h (1 - h) / (n + 1)
    ratio = Fraction(hit, n)
    assert 0 <= linear_remaining(n, hit) <= left <= 1 - ratio * ratio <= 1
    assert 1 - ratio * ratio - left == ratio * (1 - ratio) / (n + 1)


@cases(150)
@given(st.data())
def test_scattered_tokens_save_their_own_rows(data):
    n = data.draw(st.integers(1, 40))
    run = st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda ends: tuple(sorted(ends)))
    runs = data.draw(st.lists(run, max_size=5))
    cached = {token for start, stop in runs for token in range(start, stop)}
    left = sum(token + 1 for token in range(n) if token not in cached)
    assert remaining_scattered(n, runs) == Fraction(left, n * (n + 1) // 2)


@cases(150)
@given(st.integers(0, 80), st.integers(1, 80), st.integers(1, 20))
def test_a_hit_is_the_most_whole_pages_that_leave_a_token(cached, n, page):
    usable = [hit for hit in range(0, cached + 1, page) if hit < n]
    assert effective_hit(cached, n, page) == max(usable)
    whole = n // page * page
    kept = [hit for hit in usable if hit <= max(0, whole - page)]
    assert effective_hit(cached, n, page, rule="never the last page") == max(kept)


@cases(200)
@given(hits(60), st.integers(1, 24), st.integers(1, 24), st.integers(1, 5), st.none() | st.integers(1, 70))
def test_tiles_are_those_that_hold_a_visible_pair(lengths, block_m, block_n, group, window):
    """Key tiles from the first key that a tile's first row sees to the last key that its last row sees."""
    n, hit = lengths

    def tiles(hit: int) -> int:
        rows = [t for t in range(hit, n) for _ in range(group)]
        total = 0
        for start in range(0, len(rows), block_m):
            first, last = rows[start], rows[start : start + block_m][-1]
            behind = 0 if window is None else max(0, first - window + 1)
            total += last // block_n - behind // block_n + 1
        return total

    assert executed_tiles(n, hit, block_m, block_n, group, window=window) == tiles(hit)
    assert tile_remaining(n, hit, block_m, block_n, group, window=window) == Fraction(tiles(hit), tiles(0))


@cases(100)
@given(st.lists(hits(40, shortest=1), max_size=4), st.integers(1, 9))
def test_levels_after_a_hit_read_everything_and_compute_what_is_left(requests, page):
    """N tokens are read whatever the hit; pairs fall to the interactions; rectangle and triangle share both out."""
    lengths, found = [n for n, _ in requests], [hit for _, hit in requests]
    whole = ledger(prefix_hit_levels(lengths, found, page))
    split = ledger(prefix_hit_levels(lengths, found, page, split=True))
    pairs = sum(interactions(n, hit) for n, hit in requests)
    reads = sum(n for n, hit in requests if hit < n)
    assert whole.pairs == split.pairs == pairs
    assert whole.kv_tokens == split.kv_tokens == whole.kv_tokens_unique == split.kv_tokens_unique == reads
    rectangle, triangle = split.levels
    assert rectangle.pairs == sum((n - hit) * hit for n, hit in requests)
    assert triangle.pairs == sum(interactions(n - hit) for n, hit in requests)
