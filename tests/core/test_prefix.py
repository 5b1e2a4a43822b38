"""Claim 3: exact areas against sums written out, levels against the oracle, tiles against a counting kernel."""

import random
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton.language as tl

import cascade_lab as cl
from cascade_lab.applicability import Case, check_applicability
from cascade_lab.backends.triton import attention as kernels
from cascade_lab.backends.triton.config import Tile
from cascade_lab.backends.triton.mode import jit
from cascade_lab.calibration import FEATURES
from cascade_lab.evidence.reference import assert_state_close, visible_keys
from cascade_lab.prefix import (
    TTFT_TERMS,
    effective_hit,
    executed_tiles,
    hand_over,
    interactions,
    linear_remaining,
    prefix_hit_levels,
    remaining,
    remaining_limit,
    remaining_scattered,
    scale_breakdown,
    tile_remaining,
    uniform_scaling_errors,
)
from cascade_lab.regions import CSA, Dense, SlidingWindow
from tests.cases import attention_case

NAN, INF = float("nan"), float("inf")


def pairs_row_by_row(n: int, hit: int) -> int:
    """Row t of the suffix sees keys 1..t."""
    return sum(range(hit + 1, n + 1))


def test_interactions_equal_the_mask_written_out():
    for n in range(26):
        for hit in range(n + 1):
            mask = visible_keys(torch.tensor([0, n - hit]), torch.tensor([n]), causal=True)[0]
            assert interactions(n, hit) == int(mask.sum())


def test_arrays_are_taken_element_by_element():
    n, hit = np.array([[8, 30000], [1, 7]]), np.array([4, 0])
    wide = np.broadcast_to(hit, n.shape)
    pairs = list(zip(n.ravel().tolist(), wide.ravel().tolist(), strict=True))
    pairs = [(a, min(a, b)) for a, b in pairs]
    hit = np.array([b for _, b in pairs]).reshape(n.shape)
    for function in (interactions, remaining, linear_remaining):
        found = function(n, hit)
        assert isinstance(found, np.ndarray)
        assert found.shape == n.shape
        assert found.ravel().tolist() == [float(function(a, b)) for a, b in pairs]
    assert interactions(np.array([8, 5])).tolist() == [36, 15]
    assert interactions(9, np.array([0, 4, 9])).tolist() == [interactions(9, h) for h in (0, 4, 9)]
    assert remaining(np.array([8, 16], np.uint8), 4).tolist() == [float(remaining(8, 4)), float(remaining(16, 4))]
    assert linear_remaining(np.array([8, 200], np.uint8), np.array([8, 100])).tolist() == [0.0, 0.5]
    h = np.array([[0.0, 0.5], [0.25, 1.0]])
    assert remaining_limit(h).tolist() == [[1.0, 0.75], [0.9375, 0.0]]


def test_arrays_whose_sums_pass_64_bits_stay_exact():
    n = np.array([2**62, 5])
    assert interactions(n, np.array([3, 5])).tolist() == [2**61 * (2**62 + 1) - 6, 0]
    assert interactions(2**62, np.array([3])).tolist() == [2**61 * (2**62 + 1) - 6]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: interactions(np.array([8, 3]), np.array([4, 4])), ValueError, "hit: expected at most n = 3, given 4"),
        (lambda: remaining(np.array([8, 3]), np.array([1, 2, 3])), ValueError, r"n \(2,\), given \(3,\)"),
        (lambda: interactions(np.array([8.0]), 4), TypeError, "n: expected integers, given an array of float64"),
        (lambda: linear_remaining(8, np.array([True])), TypeError, "hit: expected integers, given an array of bool"),
        (lambda: remaining(np.array([8, 0]), 0), ValueError, "n: expected numbers >= 1, given 0"),
        (lambda: remaining_limit(np.array([0.5, 1.5])), ValueError, r"h: expected numbers in \[0, 1\], given 1.5"),
        (lambda: remaining_limit(np.array([np.nan])), ValueError, r"h: expected numbers in \[0, 1\], given nan"),
        (lambda: remaining_limit(np.array(["0.5"])), TypeError, "h: expected numbers, given an array"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_interactions_equal_row_sums_up_to_600():
    for n in (1, 2, 127, 128, 129, 600):
        assert [interactions(n, hit) for hit in range(n + 1)] == [pairs_row_by_row(n, hit) for hit in range(n + 1)]


def test_the_eight_by_eight_triangle_cut_at_four():
    assert (interactions(8), interactions(8, 4)) == (36, 26)
    assert remaining(8, 4) == Fraction(26, 36)
    assert remaining_limit(4 / 8) == 0.75
    assert linear_remaining(8, 4) == Fraction(1, 2)


def test_convention_is_exact_not_the_square_nor_its_half():
    """K61 (tests/known_faults.md): N = 4 has 10 pairs, its full square 16, half of it 8."""
    assert interactions(4) == 10
    assert 4 * 4 == 16
    assert 4 * 4 / 2 == 8


def test_a_chunk_on_a_prefix_is_a_rectangle_and_a_triangle():
    """K57: a chunk of 8192 tokens on as many cached ones."""
    assert interactions(16384, 8192) == 8192 * 8192 + 8192 * 8193 // 2 == 100_667_392
    assert interactions(8192) == 33_558_528


def test_requests_are_summed_after_squaring():
    """K58: two prefills of 100 tokens are not one of 200."""
    assert interactions(100) + interactions(100) == 10_100
    assert interactions(200) == 20_100


def test_any_chunking_has_the_same_area():
    """Cuts of one prefill into chunks, each on the prefix that the chunks before it made."""
    draw = random.Random(0)
    for n, hit in ((1, 0), (2, 1), (600, 0), (600, 599), (123_456_789, 98_765_432), (10**15, 7)):
        for _ in range(20):
            cuts = sorted({hit, n, *(draw.randint(hit, n) for _ in range(draw.randint(0, 9)))})
            assert sum(interactions(b, a) for a, b in zip(cuts, cuts[1:], strict=False)) == interactions(n, hit)


def test_big_lengths_are_exact():
    n = 10**12
    assert interactions(n) == 500000000000500000000000
    assert interactions(n, n - 1) == n
    assert remaining(n, n // 2) == 1 - Fraction(n // 2 * (n // 2 + 1), n * (n + 1))
    assert interactions(torch.tensor(10**12).numpy()[()]) == 500000000000500000000000


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_numpy_lengths_do_not_wrap_around(kind):
    n, hit = 2**31 - 2, 2**30
    assert cl.interactions(kind(n), kind(hit)) == cl.interactions(n, hit)
    assert cl.remaining(kind(n), kind(hit)) == cl.remaining(n, hit)
    assert cl.remaining_scattered(kind(n), [(kind(3), kind(hit))]) == cl.remaining_scattered(n, [(3, hit)])
    assert cl.remaining_scattered(n, np.array([[3, hit], [hit, n]], kind)) == cl.remaining_scattered(n, [(3, n)])
    sizes = dict(block_m=128, block_n=64, group=4)
    wrapped = {name: kind(size) for name, size in sizes.items()}
    for window in (None, 4096):
        given = None if window is None else kind(window)
        found = executed_tiles(kind(n), kind(hit), **wrapped, window=given)
        assert found == executed_tiles(n, hit, **sizes, window=window)
    terms = cl.hand_over(kind(hit), kind(n), kind(16), kv_bytes_per_token=kind(2**20), cache_present=False)
    assert terms.kv_load_bytes == hit * 2**20
    assert type(cl.effective_hit(kind(hit), kind(n), kind(16))) is int


def test_limit_is_reached_like_one_over_n():
    """Exactly: remaining = 1 - h^2 + h (h - 1) / (n + 1) + ..., so the gap is h (1 - h) / (n + 1)."""
    for n in (8, 600, 10**6):
        for hit in (1, n // 3, n // 2, n - 1):
            h = Fraction(hit, n)
            assert (1 - h * h) - remaining(n, hit) == h * (1 - h) / (n + 1)


def test_whole_prompt_is_matched_first_and_the_rest_chunked():
    """K64: identical prompts, chunks of 8192: the reuse is the whole prompt but its last page, not one chunk."""
    for n in (16_384, 122_880):
        hit = effective_hit(n, n, 16)
        assert hit == n - 16
        chunks = [*range(hit, n, 8192), n]
        assert sum(interactions(b, a) for a, b in zip(chunks, chunks[1:], strict=False)) == interactions(n, hit)
        assert float(remaining(n, 8192)) > 0.7


@pytest.mark.parametrize(
    ("cached", "n", "page", "rule", "expected"),
    [
        (32, 32, 16, "whole pages", 16),
        (33, 33, 16, "whole pages", 32),
        (16, 16, 16, "whole pages", 0),
        (10**9, 33, 16, "whole pages", 32),
        (15, 100, 16, "whole pages", 0),
        (0, 1, 1, "whole pages", 0),
        (1, 1, 1, "whole pages", 0),
        (7, 8, 1, "whole pages", 7),
        (10**15, 10**15, 64, "whole pages", 10**15 - 64),
        (1024, 1024, 448, "whole pages", 896),
        (1024, 1024, 448, "never the last page", 448),
        (400, 1024, 448, "never the last page", 0),
        (1024, 447, 448, "never the last page", 0),
        (10**6, 64 * 10, 64, "never the last page", 64 * 9),
    ],
)
def test_effective_hit(cached, n, page, rule, expected):
    """K62, K69: whole pages, at most n - 1 tokens; one engine never reuses the page that ends the prompt."""
    assert effective_hit(cached, n, page, rule=rule) == expected


def test_effective_hit_always_leaves_a_token_and_whole_pages():
    """K62: work is left at every hit."""
    for page in (1, 3, 16):
        for n in range(1, 70):
            hits = [effective_hit(cached, n, page) for cached in range(n + 3)]
            assert all(hit <= n - 1 and hit % page == 0 for hit in hits)
            assert hits == sorted(hits)
            assert interactions(n, hits[-1]) >= n


def test_pages_cost_half_a_page_on_average():
    """K69: pages of 64 lose 31.5 tokens; what was cached and what is reused are two numbers."""
    lost = [cached - effective_hit(cached, 10**6, 64) for cached in range(640, 640 + 64)]
    assert Fraction(sum(lost), len(lost)) == Fraction(63, 2)
    terms = hand_over(1000, 1024, 64)
    assert (terms.effective_hit, terms.linear_scale) == (960, Fraction(64, 1024))
    assert linear_remaining(1024, 1000) == Fraction(24, 1024)


def test_hit_ratios_name_their_weighting():
    """K66, K67: 3,000 of 3,100 tokens reused is 0.968; (1000, 0) and (100, 90) are 0.082 by token, 0.45 by request."""
    assert float(1 - linear_remaining(3100, 3000)) == pytest.approx(0.96774, abs=5e-6)
    requests = [(1000, 0), (100, 90)]
    by_token = Fraction(sum(hit for _, hit in requests), sum(n for n, _ in requests))
    by_request = sum(1 - linear_remaining(n, hit) for n, hit in requests) / 2
    assert (round(float(by_token), 5), by_request) == (0.08182, Fraction(9, 20))
    left = Fraction(sum(interactions(n, hit) for n, hit in requests), sum(interactions(n) for n, _ in requests))
    assert left == Fraction(500_500 + 5050 - 4095, 505_550)
    assert remaining_limit(by_request) < 0.8 < 0.99 < left


def test_scattered_hits_depend_on_where_they_lie():
    """Half of 8192 tokens cached: as a prefix, every second block of 64, the middle, the suffix."""
    n = 8192
    cases = {
        0.750: [(0, 4096)],
        0.504: [(start, start + 64) for start in range(0, n, 128)],
        0.500: [(2048, 6144)],
        0.250: [(4096, n)],
    }
    for expected, intervals in cases.items():
        assert sum(stop - start for start, stop in intervals) == n // 2
        assert round(float(remaining_scattered(n, intervals)), 3) == expected


def test_scattered_hits_equal_row_sums():
    draw = random.Random(1)
    for _ in range(200):
        n = draw.randint(1, 80)
        intervals = [sorted((draw.randint(0, n), draw.randint(0, n))) for _ in range(draw.randint(0, 4))]
        cached = {token for start, stop in intervals for token in range(start, stop)}
        left = sum(token + 1 for token in range(n) if token not in cached)
        assert remaining_scattered(n, intervals) == Fraction(left, n * (n + 1) // 2)
        hit = draw.randint(0, n)
        assert remaining_scattered(n, [(0, hit)]) == remaining(n, hit)


def prefill(prompts, hits, device, **options):
    """Suffix rows over whole prompts in a poisoned cache."""
    rows = [n - hit for n, hit in zip(prompts, hits, strict=True)]
    return attention_case(rows, list(prompts), causal=True, device=device, **options)


@pytest.mark.parametrize(
    ("prompts", "hits", "page"),
    [([37, 20, 9], [16, 7, 0], 4), ([33, 5], [32, 4], 16), ([12, 40, 3], [12, 24, 3], 8), ([50, 18], [17, 5], 1)],
)
@pytest.mark.parametrize("split", [False, True], ids=["one level", "rectangle and triangle"])
def test_prefix_hit_levels_are_one_attention_call(prompts, hits, page, split, backend, device, loads):
    case = prefill(prompts, hits, device, page=page)
    levels = prefix_hit_levels(prompts, hits, page, split=split, page_table=case.page_table)
    reads = torch.zeros(2, dtype=torch.int64, device=device)
    state = cl.cascade_attention(case.q, case.k_cache, case.v_cache, levels, reads=reads, backend=backend)
    expected = case.reference()
    assert_state_close(state, expected, plain=case.reference(torch.float32), cu_seqlens_q=case.cu_seqlens_q)
    counted = cl.ledger(levels)
    assert counted.pairs == sum(interactions(n, hit) for n, hit in zip(prompts, hits, strict=True))
    active = [n for n, hit in zip(prompts, hits, strict=True) if hit < n]
    assert counted.kv_tokens == counted.kv_tokens_unique == sum(active)
    if backend == "torch" or max(n - hit for n, hit in zip(prompts, hits, strict=True)) * 2 <= 64:
        assert reads.tolist() == [counted.kv_tokens] * 2


def test_a_hit_moves_pairs_and_leaves_reads():
    prompts = [4096, 640, 100]
    none, half = prefix_hit_levels(prompts, [0, 0, 0]), prefix_hit_levels(prompts, [2048, 320, 48], split=True)
    before, after = cl.ledger(none), cl.ledger(half)
    assert before.kv_tokens == after.kv_tokens == sum(prompts)
    assert before.pairs == sum(interactions(n) for n in prompts)
    rectangle, triangle = after.levels
    assert rectangle.pairs == 2048 * 2048 + 320 * 320 + 48 * 52
    assert triangle.pairs == sum(interactions(m) for m in (2048, 320, 52))
    assert after.pairs == rectangle.pairs + triangle.pairs
    assert Fraction(after.pairs, before.pairs) == Fraction(
        *[sum(x) for x in ((6292480, 153760, 3874), (8390656, 205120, 5050))]
    )


def test_levels_without_a_page_table_use_consecutive_pages():
    (level,) = prefix_hit_levels([20, 3], [8, 0], 8)
    assert level.page_table.tolist() == [[0, 1, 2], [3, -1, -1]]
    assert level.cu_seqlens_q.tolist() == [0, 12, 15]
    rectangle, triangle = prefix_hit_levels([20, 3], [12, 2], 8, split=True)
    assert (rectangle.page_size, triangle.page_size) == (8, 2)
    assert rectangle.cache_seqlens.tolist() == [12, 2]
    assert triangle.page_table.tolist() == [[6, 7, 8, 9] + [-1] * 8, [13] + [-1] * 11]


# BLOCK_M, BLOCK_N, query heads per KV head, prompts, hits
TILINGS = [
    (16, 16, 1, [96, 33], [48, 0]),
    (16, 32, 2, [70, 20], [31, 19]),
    (64, 16, 4, [130, 17], [1, 16]),
    (32, 64, 3, [200, 65], [100, 0]),
    (16, 16, 8, [40, 41], [38, 40]),
    (128, 32, 1, [300, 129], [44, 128]),
    (32, 16, 5, [64, 1], [16, 0]),
]


def counting_case(prompts, hits, group, device):
    """Query rows of zeros: all scores are 0, so a row's lse is the logarithm of the keys that it saw."""
    case = prefill(prompts, hits, device, heads=(group, 1), dim=32)
    case.q.zero_()
    return case


def run_counted(monkeypatch, case, block_m, block_n, **options):
    monkeypatch.setattr(kernels, "tile_for", lambda *_: Tile(block_m, block_n, 4, 1))
    return cl.attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.cache_seqlens,
        cu_seqlens_q=case.cu_seqlens_q,
        causal=True,
        backend="triton",
        **options,
    )


def keys_seen(state) -> list[int]:
    """Keys per query row, from the kernel's own lse; every head sees the same."""
    counts = state.lse.double().exp()
    assert (counts - counts.round()).abs().max() < 1e-3
    assert (counts.round() == counts[:, :1].round()).all()
    return counts[:, 0].round().long().tolist()


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize(("block_m", "block_n", "group", "prompts", "hits"), TILINGS)
def test_kernel_executes_the_tiles_of_the_closed_form(
    block_m, block_n, group, prompts, hits, backend, device, loads, monkeypatch
):
    case = counting_case(prompts, hits, group, device)
    state = run_counted(monkeypatch, case, block_m, block_n)
    assert sum(keys_seen(state)) == sum(interactions(n, hit) for n, hit in zip(prompts, hits, strict=True))
    if loads is not None:
        expected = sum(executed_tiles(n, h, block_m, block_n, group) for n, h in zip(prompts, hits, strict=True))
        # two products per tile: q k^T and p v, the head dim being 32
        assert loads.dots.total() == 2 * expected
        assert all({m, n, k} == {block_m, block_n, 32} and m == block_m for m, n, k in loads.dots)


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize("window", [1, 20, 500])
@pytest.mark.parametrize(("block_m", "block_n", "group", "prompts", "hits"), TILINGS[1:5])
def test_windowed_kernel_executes_the_window(
    block_m, block_n, group, prompts, hits, window, backend, device, loads, monkeypatch
):
    region, requests = SlidingWindow(window), list(zip(prompts, hits, strict=True))
    case = counting_case(prompts, hits, group, device)
    state = run_counted(monkeypatch, case, block_m, block_n, window_size=(window - 1, 0))
    assert keys_seen(state) == [region.visible(t) for n, hit in requests for t in range(hit + 1, n + 1)]
    assert sum(keys_seen(state)) == sum(region.total(n) - region.total(hit) for n, hit in requests)
    if loads is not None:
        expected = sum(executed_tiles(n, h, block_m, block_n, group, window=window) for n, h in requests)
        assert loads.dots.total() == 2 * expected


def tiles_one_by_one(n, hit, block_m, block_n, group, window):
    """Row tile by row tile: the key tiles from the first to the last key that one of its rows sees."""
    count, rows = 0, (n - hit) * group
    for start in range(0, rows, block_m):
        positions = [hit + m // group for m in range(start, min(start + block_m, rows))]
        first = 0 if window is None else max(0, positions[0] - window + 1)
        count += positions[-1] // block_n - first // block_n + 1
    return count


@pytest.mark.parametrize("window", [None, 1, 7, 50, 1000])
def test_executed_tiles_equal_a_walk_over_row_tiles(window):
    draw = random.Random(2)
    for _ in range(400):
        n = draw.randint(1, 200)
        shape = n, draw.randint(0, n), draw.choice((1, 3, 16, 50)), draw.choice((1, 5, 16, 64)), draw.randint(1, 7)
        assert executed_tiles(*shape, window=window) == tiles_one_by_one(*shape, window)


def test_tiles_of_size_one_are_pairs():
    for n, hit in ((1, 0), (50, 20), (10**15, 10**14)):
        assert executed_tiles(n, hit, 1, 1) == interactions(n, hit)
        assert executed_tiles(n, hit, 1, 1, window=9) == SlidingWindow(9).total(n) - SlidingWindow(9).total(hit)
    assert executed_tiles(10**18, 0, 128, 128) == (10**18 // 128) * (10**18 // 128 + 1) // 2


@pytest.mark.parametrize("size", [16, 128])
def test_square_tiles_deviate_as_derived(size):
    """n = c B and hit = a B make (c(c+1) - a(a+1)) / 2 tiles, -h B / ((1+h)(n+B)) from 1 - h^2."""
    for c in (1, 2, 9, 64):
        for a in range(c + 1):
            n, h = c * size, Fraction(a, c)
            assert executed_tiles(n, a * size, size, size) == (c * (c + 1) - a * (a + 1)) // 2
            assert executed_tiles(n, a * size, 4 * size, size, 4) == (c * (c + 1) - a * (a + 1)) // 2
            if a < c:
                deviation = tile_remaining(n, a * size, size, size) / (1 - h * h) - 1
                assert deviation == -h * size / ((1 + h) * (n + size))
                assert abs(deviation) < Fraction(size, 2 * (n + size))


@pytest.mark.parametrize(
    ("n", "expected"), [(1024, (-2.2, -3.7, -4.8)), (2048, (-1.2, -2.0, -2.5)), (8192, (-0.3, -0.5, -0.7))]
)
def test_published_tile_deviations(n, expected):
    found = [tile_remaining(n, n * q // 4, 128, 128) / (1 - Fraction(q, 4) ** 2) - 1 for q in (1, 2, 3)]
    assert tuple(round(100 * float(x), 1) for x in found) == expected


def test_five_percent_rule():
    """Beyond 5% only for n < B (20 h / (1 + h) - 1): never from 9 B on, and at h = 1/2 below 17 B / 3."""
    size, beyond = 128, []
    for c in range(1, 40):
        for a in range(1, c):
            h = Fraction(a, c)
            deviation = abs(tile_remaining(c * size, a * size, size, size) / (1 - h * h) - 1)
            assert (deviation > Fraction(1, 20)) == (c < 20 * h / (1 + h) - 1)
            beyond += [(c, h)] if deviation > Fraction(1, 20) else []
    assert max(c for c, _ in beyond) == 8
    assert max(c for c, h in beyond if h == Fraction(1, 2)) == 4


@pytest.mark.parametrize(
    ("new", "expected"),
    [(16, (8.0, 2.0, 1.0)), (129, (2.0, 1.25, 1.13)), (200, (1.30, 1.13, 1.05)), (1000, (1.05, 1.04, 1.02))],
)
def test_suffixes_that_do_not_fill_their_row_tiles(new, expected):
    """Executed over visible pairs at n = 8192, 128 packed rows per tile and key tiles of 1, for groups of 1, 4, 8."""
    n = 8192
    for group, ratio in zip((1, 4, 8), expected, strict=True):
        executed = Fraction(executed_tiles(n, n - new, 128, 1, group) * 128, group)
        padded = -(-new * group // 128) * 128
        assert float(executed / interactions(n, n - new)) == pytest.approx(padded / (new * group), rel=0.01)
        assert float(executed / interactions(n, n - new)) == pytest.approx(ratio, rel=0.02)


@jit
def masked_everywhere(q_ptr, k_ptr, seen_ptr, N, hit, D: tl.constexpr, BLOCK: tl.constexpr):
    """Counts the visible keys of each suffix row, computing every key tile and masking the scores afterwards."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    b_q = tl.load(q_ptr + rows[:, None] * D + d, mask=rows[:, None] < N - hit, other=0.0)
    seen = tl.zeros([BLOCK], tl.int32)
    for start in range(0, N, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        b_k = tl.load(k_ptr + keys[:, None] * D + d, mask=keys[:, None] < N, other=0.0)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        visible = (keys[None, :] <= hit + rows[:, None]) & (keys[None, :] < N)
        seen += tl.sum((visible & (scores == 0.0)).to(tl.int32), 1)
    tl.store(seen_ptr + rows, seen, mask=rows < N - hit)


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize(("n", "hit"), [(128, 0), (128, 64), (128, 96), (120, 30)])
def test_masking_without_skipping_is_a_rectangle(n, hit, backend, device, loads):
    """The visible pairs are those of the triangle's law, the executed tiles fall as 1 - h."""
    size, new = 16, n - hit
    q, k = torch.zeros(new, 32, device=device), torch.ones(n, 32, device=device)
    seen = torch.empty(new, dtype=torch.int32, device=device)
    masked_everywhere[(-(-new // size),)](q, k, seen, n, hit, D=32, BLOCK=size)
    assert int(seen.sum()) == interactions(n, hit)
    if loads is not None:
        rectangle = -(-new // size) * -(-n // size)
        assert dict(loads.dots) == {(size, size, 32): rectangle}
        assert rectangle > executed_tiles(n, hit, size, size) or new <= size
        if n == 128:
            assert Fraction(rectangle, 64) == linear_remaining(n, hit)


BREAKDOWN = {"projections and FFN": 60.0, "attention core": 30.0, "launches": 8.0, "load": 2.0, "window layers": 10.0}
KINDS = {
    "projections and FFN": "linear",
    "attention core": "interaction",
    "launches": "fixed",
    "load": "transfer",
    "window layers": ("other", SlidingWindow(64).remaining(1024, 512)),
}


def test_breakdown_is_scaled_bucket_by_bucket():
    scaled = scale_breakdown(BREAKDOWN, KINDS, 1024, 512)
    assert scaled["projections and FFN"] == 30.0
    assert scaled["attention core"] == pytest.approx(30 * (1 - 512 * 513 / (1024 * 1025)), rel=1e-15)
    assert (scaled["launches"], scaled["load"]) == (8.0, 2.0)
    assert scaled["window layers"] == pytest.approx(10 * 512 * 64 / (1024 * 64 - 64 * 63 / 2), rel=1e-15)
    assert scaled["total"] == pytest.approx(sum(v for k, v in scaled.items() if k != "total"), rel=1e-15)
    assert list(scaled) == [*BREAKDOWN, "total"]


def test_breakdown_takes_numbers_of_any_kind():
    costs = {"core": np.float32(2), "ffn": np.int64(3), "load": Fraction(1, 2), "window": 4}
    kinds = {"core": "interaction", "ffn": "linear", "load": "transfer", "window": ("other", np.float32(0.25))}
    scaled = cl.scale_breakdown(costs, kinds, 3, 1)
    assert scaled == pytest.approx({"core": 5 / 3, "ffn": 2.0, "load": 0.5, "window": 1.0, "total": 31 / 6})
    assert {type(cost) for cost in scaled.values()} == {float}
    assert cl.remaining_limit(np.float32(0.5)) == 0.75


def test_fixed_part_remains_at_the_highest_hits():
    """K70: h = 0.9459 with fixed, linear and quadratic parts: nowhere near a speed-up of 1 / (1 - h)."""
    kinds = {"fixed": "fixed", "linear": "linear", "quadratic": "interaction"}
    parts = {"fixed": 10.0, "linear": 70.0, "quadratic": 20.0}
    n, hit = 10_000, 9459
    total = scale_breakdown(parts, kinds, n, hit)["total"]
    assert total == pytest.approx(10 + 70 * 0.0541 + 20 * float(remaining(n, hit)))
    assert 100 / total < 7 < 18 < 1 / (1 - 0.9459)
    assert scale_breakdown(parts, kinds, n, n)["total"] == 10.0


def test_uniform_scaling_is_wrong_on_a_mixed_prefill():
    parts, kinds = {"linear": 50.0, "core": 50.0}, {"linear": "linear", "core": "interaction"}
    errors = uniform_scaling_errors(parts, kinds, 10**6, 5 * 10**5)
    assert errors["bucketed"] == {"total": pytest.approx(62.5, rel=1e-5), "relative error": 0.0}
    assert errors["uniform 1-h"] == {"total": 50.0, "relative error": pytest.approx(-0.2, rel=1e-4)}
    assert errors["uniform 1-h^2"] == {"total": 75.0, "relative error": pytest.approx(0.2, rel=1e-4)}


def test_published_bucket_model_of_a_long_prompt():
    """Mooncake, 128K tokens at 95%: -92.2% by buckets (causal a = 2, b = 22), -95.0% by 1 - h, -90.3% by 1 - h^2."""
    n, width = 131_072, 8192
    parts = {"attention": 2 * n * n * width, "projections and FFN": 22 * n * width * width}
    kinds = {"attention": "interaction", "projections and FFN": "linear"}
    errors = uniform_scaling_errors(parts, kinds, n, n * 95 // 100)
    saved = {rule: round(100 * (1 - entry["total"] / sum(parts.values())), 1) for rule, entry in errors.items()}
    assert saved == {"bucketed": 92.2, "uniform 1-h": 95.0, "uniform 1-h^2": 90.2}


@pytest.mark.parametrize(
    ("breakdown", "kinds", "message"),
    [
        ({}, {}, "breakdown: .*none"),
        ({"a": 1.0}, {}, "kinds.'a'.: .*None"),
        ({"a": 1.0}, {"a": "quadratic"}, "kinds.'a'.: .*'quadratic'"),
        ({"a": 1.0}, {"a": "linear", "b": "fixed"}, "kinds: .*'b'"),
        ({"a": 1.0, "total": 1.0}, {"a": "linear", "total": "fixed"}, "total"),
        ({"qkv + core": 1.0}, {"qkv + core": ("linear", "interaction")}, "projections fall as 1 - h and interactions"),
        ({"layer": 1.0}, {"layer": "mixed"}, "no one factor is right"),
        ({"a": 1.0}, {"a": "other"}, "'other', factor"),
        ({"a": 1.0}, {"a": ("other", NAN)}, "nan"),
        ({"a": 1.0}, {"a": ("other", -0.5)}, "-0.5"),
        ({"a": 1.0}, {"a": ("linear", 0.5)}, "0.5"),
        ({"a": -1.0}, {"a": "linear"}, "breakdown.'a'.: .*-1.0"),
        ({"a": NAN}, {"a": "linear"}, "breakdown.'a'.: .*nan"),
        ({"a": INF}, {"a": "linear"}, "breakdown.'a'.: .*inf"),
    ],
)
def test_bad_breakdowns_are_refused(breakdown, kinds, message):
    with pytest.raises(ValueError, match=message):
        scale_breakdown(breakdown, kinds, 8, 4)


@pytest.mark.parametrize(
    ("breakdown", "kinds", "message"),
    [
        ({"a": 1.0}, {"a": ("other", "half")}, "half"),
        ({"a": True}, {"a": "linear"}, "breakdown.'a'.: .*True"),
    ],
)
def test_costs_and_factors_that_are_no_numbers_are_refused(breakdown, kinds, message):
    with pytest.raises(TypeError, match=message):
        scale_breakdown(breakdown, kinds, 8, 4)


def test_hand_over_names_its_terms():
    terms = hand_over(
        1000, 1024, 16, replay_tokens=92, expands_latents=True, kv_bytes_per_token=70_272, cache_present=False
    )
    assert asdict(terms) == {
        "effective_hit": 900,
        "interaction_scale": remaining(1024, 900),
        "linear_scale": Fraction(124, 1024),
        "computed_tokens": 124,
        "replay_tokens": 92,
        "re_expansion_tokens": 900,
        "kv_load_bytes": 992 * 70_272,
    }
    named = {term: field for term, field in TTFT_TERMS.items() if field}
    assert named == {
        "dense causal interactions": "interaction_scale",
        "FFN and projections": "linear_scale",
        "KV load": "kv_load_bytes",
    }
    assert set(named.values()) < set(asdict(terms))
    brought = {"fixed costs", "transfer", "overlap of transfer and compute", "decode chip-time"}
    assert TTFT_TERMS.keys() - named.keys() == brought
    plain = hand_over(1024, 1024, 16, rule="never the last page")
    assert (plain.effective_hit, plain.kv_load_bytes, plain.re_expansion_tokens) == (1008, 0, 0)


def test_replay_never_exceeds_the_hit():
    """Zero-caching of V4 Pro at 32K and h = 0.9: h_eff = 0.66; a short hit is replayed whole."""
    n = 32_768
    terms = hand_over(n * 9 // 10, n, replay_tokens=128 * 61)
    assert round(terms.effective_hit / n, 2) == 0.66
    short = hand_over(5000, n, replay_tokens=128 * 61)
    assert (short.effective_hit, short.replay_tokens, short.computed_tokens) == (0, 5000, n)
    assert (short.interaction_scale, short.linear_scale) == (1, 1)


def kernel_samples(a=1e-9, gamma=0.0, law="triangle"):
    """Times of a made-up kernel over prefixes and new tokens, without noise."""
    pairs = FEATURES[law]
    return [
        (L, x, 1e-6 + gamma * L + a * pairs(L, x)) for L in (0, 512, 1024, 2048, 4096) for x in (512, 1024, 2048, 4096)
    ]


def good_case(**changes):
    case = {
        "n": 4096,
        "cached_blocks": [True] * 32 + [False] * 32,
        "block_size": 64,
        "kinds": {"core": "interaction", "ffn": "linear"},
        "samples": kernel_samples(),
    }
    return case | changes


def findings(**changes):
    return {finding.condition: finding for finding in check_applicability(good_case(**changes))}


CONDITIONS = [
    "contiguous prefix",
    "dense causal region",
    "interaction bucket only",
    "calibrated kernel",
    "cache present",
]


def test_all_five_conditions_can_hold():
    found = check_applicability(good_case())
    assert [finding.condition for finding in found] == CONDITIONS
    assert all(finding.holds and finding.penalty == 0 for finding in found)
    assert check_applicability(Case(**good_case())) == found


def test_scattered_blocks_fail_with_their_area():
    found = findings(cached_blocks=[True, False] * 32)["contiguous prefix"]
    assert not found.holds
    assert found.penalty == float(remaining(4096, 64) - remaining(4096, 2048))
    late = findings(cached_blocks=[False] * 32 + [True] * 32)["contiguous prefix"]
    assert not late.holds
    assert late.penalty == float(1 - remaining(4096, 2048))


def test_a_whole_or_an_absent_cache_is_contiguous():
    assert findings(cached_blocks=[True] * 64)["contiguous prefix"].holds
    assert findings(cached_blocks=[False] * 64)["contiguous prefix"].holds


def test_other_regions_fail_with_their_difference():
    found = findings(region=SlidingWindow(128))["dense causal region"]
    assert not found.holds
    assert found.penalty == float(SlidingWindow(128).remaining(4096, 2048) - remaining(4096, 2048)) < -0.2
    assert findings(region=SlidingWindow(4096))["dense causal region"].holds
    assert not findings(region=CSA(4, 512, 128))["dense causal region"].holds
    assert findings(region=Dense())["dense causal region"].holds


def test_mixed_buckets_fail_by_the_gap_between_the_laws():
    for kind in (("interaction", "linear"), "mixed"):
        found = findings(kinds={"layer": kind, "rest": "fixed"})["interaction bucket only"]
        assert not found.holds
        assert found.penalty == float(linear_remaining(4096, 2048) - remaining(4096, 2048))
        assert "layer" in found.detail


def test_uncalibrated_kernels_fail_with_what_they_do_instead():
    none = findings(samples=())["calibrated kernel"]
    assert (none.holds, none.penalty) == (False, None)
    for law, a, left in (("new tokens squared", 1e-9, 0.25), ("rectangle", 1e-9, 0.5), ("new tokens", 1e-6, 0.5)):
        found = findings(samples=kernel_samples(a, law=law))["calibrated kernel"]
        assert not found.holds
        assert found.penalty == pytest.approx(left - 0.75, abs=0.02), law


def test_a_fit_that_describes_nothing_gives_no_penalty():
    draw = random.Random(3)
    noise = [(L, x, t * draw.choice((0.2, 5.0))) for L, x, t in kernel_samples()]
    found = findings(samples=noise)["calibrated kernel"]
    assert (found.holds, found.penalty) == (False, None)


def test_absent_cache_fails_with_its_bytes():
    found = findings(cache_present=False, kv_bytes_per_token=1152)["cache present"]
    assert (found.holds, found.penalty, found.unit) == (False, 2048 * 1152, "bytes")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({}, "case: .*given"),
        ({"n": 64}, "case: .* given no 'cached_blocks'"),
        (good_case(n=0), "n: .*given 0"),
        (good_case(block_size=0), "block_size: .*given 0"),
        (good_case(cached_blocks=[True] * 65), "cached_blocks: .*given 65"),
        (good_case(cached_blocks=[]), "cached_blocks: .*given 0"),
        (good_case(tolerence=0.1), "case: .*'tolerence'"),
        (good_case(tolerance=NAN), "tolerance: .*given nan"),
        (good_case(kv_bytes_per_token=-5), "kv_bytes_per_token: .*given -5"),
        (good_case(kinds={"a": "cubic"}), "kinds.'a'.: .*'cubic'"),
        (good_case(samples=[(0, 1, NAN)] * 9), "samples: .*nan"),
        (good_case(samples=[(0, x, 1.0) for x in range(1, 20)]), "samples: .*prefix"),
    ],
)
def test_bad_cases_are_refused(case, message):
    with pytest.raises(ValueError, match=message):
        check_applicability(case)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (good_case(n=4096.0), "n: .*4096.0"),
        (good_case(cached_blocks=5), "cached_blocks: .*given 5"),
        (None, "case: .*given None"),
        (good_case(region="dense"), "region: .*given 'dense'"),
    ],
)
def test_cases_of_another_kind_are_refused(case, message):
    with pytest.raises(TypeError, match=message):
        check_applicability(case)


NARROW = torch.tensor([[1, 2]], dtype=torch.int32)
BAD_LENGTHS = [(4, 5, "5"), (4, -1, "-1"), (-1, 0, "-1"), (4.0, 1, "4.0"), (4, 1.0, "1.0"), (True, 0, "True")]
BAD_LENGTHS += [(4, NAN, "nan"), (NAN, 1, "nan"), ("4", 1, "'4'"), (4, None, "None"), (4, INF, "inf")]


@pytest.mark.parametrize(("n", "hit", "value"), BAD_LENGTHS)
@pytest.mark.parametrize(
    "call",
    [
        interactions,
        remaining,
        linear_remaining,
        lambda n, hit: scale_breakdown({"a": 1.0}, {"a": "linear"}, n, hit),
        lambda n, hit: prefix_hit_levels([8, n], [4, hit]),
        lambda n, hit: executed_tiles(n, hit, 16, 16),
        lambda n, hit: tile_remaining(n, hit, 16, 16),
    ],
    ids=["interactions", "remaining", "linear", "breakdown", "levels", "tiles", "tile fraction"],
)
def test_bad_lengths_are_refused_with_their_value(call, n, hit, value):
    error = ValueError if type(n) is type(hit) is int else TypeError
    with pytest.raises(error, match=f"given (at most )?{value}"):
        call(n, hit)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: remaining(0, 0), "n: .*given 0"),
        (lambda: cl.remaining_scattered(5, [3]), "intervals: .*given 3"),
        (lambda: cl.remaining_scattered(5, [(1, 2, 3)]), r"intervals: .*given \(1, 2, 3\)"),
        (lambda: scale_breakdown({"a": 1.0}, {"a": ()}, 2, 1), r"kinds\['a'\]: .*given \(\)"),
        (lambda: prefix_hit_levels([40], [20], 16, split=True, page_table=NARROW), r"page_table: .*\[1, at least 3\]"),
        (lambda: remaining_limit(1.01), "h: .*given 1.01"),
        (lambda: remaining_limit(-0.5), "h: .*given -0.5"),
        (lambda: remaining_limit(NAN), "h: .*given nan"),
        (lambda: effective_hit(-1, 8), "cached_tokens: .*given -1"),
        (lambda: effective_hit(4, 0), "n: .*given 0"),
        (lambda: effective_hit(4, 8, 0), "page_size: .*given 0"),
        (lambda: effective_hit(4, 8, rule="some pages"), "rule: .*'some pages'"),
        (lambda: remaining_scattered(8, [(3, 9)]), r"intervals: .*\[3, 9\)"),
        (lambda: remaining_scattered(8, [(5, 3)]), r"intervals: .*\[5, 3\)"),
        (lambda: remaining_scattered(8, [(-1, 3)]), "intervals: .*given -1"),
        (lambda: remaining_scattered(0, []), "n: .*given 0"),
        (lambda: prefix_hit_levels([8], [4, 2]), "hits: .*given 2"),
        (lambda: hand_over(4, 8, replay_tokens=-1), "replay_tokens: .*given -1"),
        (lambda: executed_tiles(8, 4, 0, 16), "block_m: .*given 0"),
        (lambda: executed_tiles(8, 4, 16, 16, 0), "group: .*given 0"),
        (lambda: executed_tiles(8, 4, 16, 16, window=0), "window: .*given 0"),
    ],
)
def test_bad_arguments_are_refused_with_their_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: remaining_limit(True), "h: .*given True"),
        (lambda: remaining_limit("0.5"), "h: .*given '0.5'"),
        (lambda: effective_hit(4.5, 8), "cached_tokens: .*given 4.5"),
        (lambda: executed_tiles(8, 4, 16, 2.0), "block_n: .*given 2.0"),
    ],
)
def test_arguments_of_another_kind_are_refused_with_their_value(call, message):
    with pytest.raises(TypeError, match=message):
        call()
