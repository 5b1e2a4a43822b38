"""Closed forms of the visible regions against masks written out key by key, and their exactness at any size."""

from fractions import Fraction

import numpy as np
import pytest

from cascade_lab.regions import (
    CSA,
    HCA,
    MLA,
    NSA,
    Chunked,
    Compressed,
    Dense,
    Mixture,
    SinkWindow,
    SlidingWindow,
    TopK,
    TopKBlocks,
    deepseek_sparse,
)

LONGEST = 600


def blocks_seen(t, block, k):
    """Keys of row t that attends to its own block and k - 1 earlier ones; their choice does not change the count."""
    own = (t - 1) // block
    chosen = {own, *range(max(0, own - k + 1), own)}
    return [j for j in range(1, t + 1) if (j - 1) // block in chosen]


def entries(t, m):
    """Ends of the m-token groups that are whole at row t."""
    return [end for end in range(m, t + 1, m)]


# region, and the keys that row t sees by its definition: raw tokens j of 1..t, then compressed entries
CASES = [
    (Dense(), lambda t: range(1, t + 1)),
    *[(SlidingWindow(w), lambda t, w=w: [j for j in range(1, t + 1) if j > t - w]) for w in (1, 2, 64, 599, 600, 4096)],
    *[
        (SinkWindow(s, w), lambda t, s=s, w=w: [j for j in range(1, t + 1) if j <= s or j > t - w])
        for s, w in ((0, 1), (0, 40), (4, 1), (4, 128), (300, 400))
    ],
    *[
        (Chunked(c), lambda t, c=c: [j for j in range(1, t + 1) if (j - 1) // c == (t - 1) // c])
        for c in (1, 7, 128, 600, 601)
    ],
    *[(TopK(k), lambda t, k=k: list(range(1, t + 1))[:k]) for k in (1, 5, 600, 2048)],
    *[
        (TopKBlocks(block, k), lambda t, block=block, k=k: blocks_seen(t, block, k))
        for block, k in ((1, 1), (1, 9), (16, 1), (16, 4), (64, 3), (128, 16), (601, 2))
    ],
    *[(Compressed(m), lambda t, m=m: entries(t, m)) for m in (1, 2, 4, 128, 600, 601)],
    *[
        (CSA(m, k, w), lambda t, m=m, k=k, w=w: entries(t, m)[:k] + [j for j in range(1, t + 1) if j > t - w])
        for m, k, w in ((1, 1, 1), (4, 8, 32), (4, 512, 128), (7, 3, 1), (600, 1, 600))
    ],
    *[
        (HCA(m, w), lambda t, m=m, w=w: entries(t, m) + [j for j in range(1, t + 1) if j > t - w])
        for m, w in ((1, 1), (128, 128), (16, 40), (601, 700))
    ],
    *[
        (
            NSA(length, stride, block, k, w),
            lambda t, length=length, stride=stride, block=block, k=k, w=w: (
                [end for end in range(length, t + 1, stride)]
                + blocks_seen(t, block, k)
                + [j for j in range(1, t + 1) if j > t - w]
            ),
        )
        for length, stride, block, k, w in (
            (32, 16, 64, 3, 100),
            (1, 1, 1, 1, 1),
            (8, 16, 5, 2, 3),
            (700, 3, 64, 16, 512),
        )
    ],
]
IDS = [str(region) for region, _ in CASES]
REGIONS = [region for region, _ in CASES]


@pytest.mark.parametrize(("region", "keys"), CASES, ids=IDS)
def test_visible_and_total_equal_the_mask_written_out(region, keys):
    seen = [len(set(visible)) if region.__class__ in PLAIN else len(list(visible)) for visible in map(keys, rows())]
    assert [region.visible(t) for t in rows()] == seen
    sums = np.concatenate(([0], np.cumsum(seen)))
    assert [region.total(n) for n in range(LONGEST + 1)] == sums.tolist()


def rows():
    return range(1, LONGEST + 1)


# regions of raw tokens only, where a key counts once however many rules show it
PLAIN = (Dense, SlidingWindow, SinkWindow, Chunked, TopK, TopKBlocks)


@pytest.mark.parametrize("region", REGIONS, ids=IDS)
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_arrays_give_what_integers_give(region, dtype):
    n = np.array([1, 2, 3, 127, 128, 129, 599, 600, 30_000], dtype)
    assert region.visible(n).tolist() == [region.visible(int(x)) for x in n]
    totals = region.total(n)
    assert totals.tolist() == [region.total(int(x)) for x in n]
    assert totals.dtype == np.int64
    hit = n // 3
    if region.total(1):
        left = region.remaining(n, hit)
        assert left.dtype == np.float64
        assert left.tolist() == pytest.approx([float(region.remaining(int(x), int(x) // 3)) for x in n], abs=1e-15)


def test_shapes_broadcast_and_empty_arrays_pass():
    n, hit = np.array([[64], [600]]), np.array([0, 32, 64])
    assert SlidingWindow(64).remaining(n, hit).shape == (2, 3)
    assert SlidingWindow(64).remaining(n, hit)[0].tolist() == pytest.approx([1, 1 - 32 * 33 / (64 * 65), 0])
    assert SlidingWindow(64).remaining(600, hit).tolist() == [
        float(SlidingWindow(64).remaining(600, h)) for h in (0, 32, 64)
    ]
    assert Dense().total(np.array([], np.int64)).tolist() == []


@pytest.mark.parametrize("region", REGIONS, ids=IDS)
def test_big_integers_are_exact(region):
    """At n past 10^12 the rule F(n) - F(n - 1) = v(n) still holds to the last digit."""
    for n in (10**12, 10**18 + 7, 3**60):
        assert region.total(n) - region.total(n - 1) == region.visible(n)
    n, hit = 10**15 + 3, 10**14 + 1
    assert region.remaining(n, hit) == Fraction(region.total(n) - region.total(hit), region.total(n))


@pytest.mark.parametrize(
    "region", [Dense(), NSA(32, 16, 64, 16, 512), Mixture(((10**9, Dense()), (1, SlidingWindow(7))))], ids=str
)
def test_arrays_do_not_wrap_around(region):
    n = np.array([10**3, 10**10, 10**12])
    assert region.total(n).tolist() == [region.total(int(x)) for x in n]
    assert region.total(np.int64(10**12)) == region.total(10**12)
    assert region.remaining(n, n // 2).tolist() == pytest.approx(
        [float(region.remaining(int(x), int(x) // 2)) for x in n]
    )


@pytest.mark.parametrize(
    "region",
    [
        SlidingWindow(10**20),
        Chunked(10**10),
        TopKBlocks(10**10, 3),
        CSA(10**10, 10**10, 10**20),
        NSA(10**20, 1, 10**10, 1, 10**20),
        Mixture(((10**20, TopK(10**20)), (1, Compressed(10**20)))),
    ],
    ids=lambda region: type(region).__name__,
)
def test_parameters_beyond_64_bits_do_not_stop_arrays(region):
    lengths = np.array([1, 5, 40_000])
    assert region.total(lengths).tolist() == [region.total(int(n)) for n in lengths]
    assert region.visible(lengths).tolist() == [region.visible(int(t)) for t in lengths]


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_numpy_parameters_do_not_wrap_around(kind):
    n = 10**10
    for region, same in (
        (SlidingWindow(kind(60_000)), SlidingWindow(60_000)),
        (Chunked(kind(100_000)), Chunked(100_000)),
        (TopKBlocks(kind(65_536), kind(65_536)), TopKBlocks(65_536, 65_536)),
        (CSA(kind(60_000), kind(60_000), kind(9)), CSA(60_000, 60_000, 9)),
        (Mixture(((kind(2**30), Dense()),)), Mixture(((2**30, Dense()),))),
    ):
        assert region == same
        assert region.total(n) == same.total(n)
    flops = MLA().prefill_flops(kind(2**30), kind(2**29))
    assert flops == MLA().prefill_flops(2**30, 2**29)


def test_dense_total_by_hand():
    """N = 4 has 10 pairs: neither the square 16 nor its half 8."""
    assert Dense().total(4) == 10
    assert Dense().total(10**12) == 500000000000500000000000


def test_what_saturates_and_what_does_not():
    """At h = 1/2 and long prompts a cap tends to 1 - h, anything that grows with t to 1 - h^2."""
    n, hit = 2**40, 2**39
    for region in (SlidingWindow(128), SinkWindow(4, 128), TopK(2048), TopKBlocks(128, 16), CSA(4, 512, 128)):
        assert float(region.remaining(n, hit)) == pytest.approx(0.5, abs=1e-6)
        assert region.exponent(n, hit) == pytest.approx(1, abs=1e-6)
    for region in (Dense(), Compressed(4), HCA(128, 128), NSA(32, 16, 64, 16, 512)):
        assert float(region.remaining(n, hit)) == pytest.approx(0.75, abs=1e-6)
        assert region.exponent(n, hit) == pytest.approx(2, abs=1e-6)


def test_a_window_is_dense_until_it_fills():
    assert all(SlidingWindow(4096).remaining(4096, hit) == Dense().remaining(4096, hit) for hit in range(0, 4097, 97))
    assert SlidingWindow(256).exponent(16 * 256, 8 * 256) == pytest.approx(1.05, abs=0.005)


def test_chunks_are_linear_at_chunk_ends_only():
    region = Chunked(8)
    assert [region.remaining(64, hit) for hit in (8, 16, 56)] == [Fraction(64 - hit, 64) for hit in (8, 16, 56)]
    assert region.remaining(64, 12) == Fraction(8 * 36 - 36 - 10, 8 * 36) > Fraction(64 - 12, 64)


@pytest.mark.parametrize("region", REGIONS, ids=IDS)
def test_remaining_at_its_ends(region):
    assert region.remaining(601, 0) == 1
    assert region.remaining(601, 601) == 0
    left = [region.remaining(601, hit) for hit in range(602)]
    assert all(0 <= b <= a <= 1 for a, b in zip(left, left[1:], strict=False))


def test_exponent_solves_its_equation():
    region = NSA(32, 16, 64, 16, 512)
    for n, hit in ((4096, 1024), (131072, 65536), (10**6, 990_000)):
        assert float(region.remaining(n, hit)) == pytest.approx(1 - (hit / n) ** region.exponent(n, hit))
    assert Compressed(8).exponent(100, 7) == float("inf")


def test_published_exponents_of_native_sparse_attention():
    region = NSA(32, 16, 64, 16, 512)
    found = [round(region.exponent(n, n // 2), 2) for n in (4096, 16384, 131072, 2**20)]
    assert found == [1.23, 1.23, 1.66, 1.94]


def deepseek_v4(heads, k, csa, hca, window):
    core, indexer = 4 * heads * 512, 2 * 64 * 128
    parts = [(csa * core, CSA(4, k, 128)), (csa * indexer, Compressed(4)), (hca * core, HCA(128, 128))]
    return Mixture((*parts, (window * core, SlidingWindow(128))) if window else tuple(parts))


@pytest.mark.parametrize(
    ("region", "expected"),
    [
        (deepseek_v4(64, 512, 21, 20, 2), {2**13: 0.584, 2**15: 0.620, 2**17: 0.692, 2**20: 0.741}),
        (deepseek_v4(128, 1024, 30, 31, 0), {2**13: 0.637, 2**15: 0.580, 2**17: 0.641, 2**20: 0.727}),
        (
            deepseek_sparse(core_flops=2 * 128 * (576 + 512), indexer_flops=2 * 64 * 128),
            {2**13: 0.593, 2**15: 0.593, 2**17: 0.665},
        ),
        (Mixture(((1, SlidingWindow(128)), (1, Dense()))), {2**15: 0.748}),
    ],
    ids=["V4 Flash", "V4 Pro", "V3.2", "gpt-oss"],
)
def test_model_mixes_weighted_by_flops(region, expected):
    assert {n: round(float(region.remaining(n, n // 2)), 3) for n in expected} == expected


def test_mixture_is_the_weighted_sum():
    region = Mixture(((3, TopK(5)), (2, Chunked(4))))
    assert [region.visible(t) for t in (1, 5, 9)] == [3 + 2, 15 + 2, 15 + 2]
    assert region.total(9) == 3 * TopK(5).total(9) + 2 * Chunked(4).total(9)
    layer_average = (SlidingWindow(128).remaining(2**15, 2**14) + Dense().remaining(2**15, 2**14)) / 2
    assert float(layer_average) == pytest.approx(0.625, abs=1e-3)


def test_mla_payload():
    """DeepSeek-V3: 640 FLOPs per pair and head expanded, 2176 absorbed, 33.6 MFLOP per expanded token, 1152 bytes."""
    mla = MLA()
    assert (mla.expanded_flops, mla.absorbed_flops) == (128 * 640, 128 * 2176)
    assert mla.expansion_flops == 33_554_432
    assert (mla.token_bytes(), MLA().token_bytes(itemsize=1)) == (1152, 576)
    assert MLA(heads=2, latent=8, rope=4, nope=3, value=5).expanded_flops == 2 * 2 * (3 + 4 + 5)
    for n, hit in ((4096, 2048), (4096, 0), (4096, 4095)):
        flops, pairs = mla.prefill_flops(n, hit), Dense().total(n) - Dense().total(hit)
        assert flops == {"expanded": pairs * 81920, "expansion": hit * 33_554_432, "absorbed": pairs * 278528}


def test_mla_expansion_is_linear_in_the_hit_and_absorbed_wins_only_on_few_rows():
    """Equal cost where M (H + M / 2) x 1536 x heads = H x 2^25: M near 171 for H much longer than M."""
    mla, hit = MLA(), 2**20

    def absorbed_wins(new):
        flops = mla.prefill_flops(hit + new, hit)
        return flops["absorbed"] < flops["expanded"] + flops["expansion"]

    assert absorbed_wins(170)
    assert not absorbed_wins(171)
    assert [mla.prefill_flops(8192, h)["expansion"] / h for h in (1, 4096, 8191)] == [2**25] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Dense().remaining(4, 5), "hit: expected at most n = 4, given 5"),
        (lambda: Dense().remaining(4, -1), "hit: .*given -1"),
        (lambda: Dense().remaining(0, 0), "n: .*given 0"),
        (lambda: Dense().remaining(np.array([9, 4]), np.array([9, 5])), "hit: expected at most n = 4, given 5"),
        (lambda: Dense().remaining(np.array([9, 4]), np.array([-3, 0])), "hit: .*given -3"),
        (lambda: Dense().total(-1), "n: .*given -1"),
        (lambda: Dense().visible(0), "t: .*given 0"),
        (lambda: Dense().exponent(4, 0), "hit: .*given 0"),
        (lambda: Dense().exponent(4, 4), "hit: .*given 4"),
        (lambda: Compressed(16).remaining(15, 3), "n: .*given 15"),
        (lambda: SlidingWindow(0), "w: .*given 0"),
        (lambda: SlidingWindow(-1), "w: .*given -1"),
        (lambda: SinkWindow(-1, 4), "s: .*given -1"),
        (lambda: Chunked(0), "c: .*given 0"),
        (lambda: TopK(0), "k: .*given 0"),
        (lambda: TopKBlocks(0, 3), "block: .*given 0"),
        (lambda: CSA(4, 0, 128), "k: .*given 0"),
        (lambda: HCA(128, 0), "window: .*given 0"),
        (lambda: NSA(32, 0, 64, 16, 512), "stride: .*given 0"),
        (lambda: Mixture(()), "parts: .*given none"),
        (lambda: Mixture(((0, Dense()),)), "weight: .*given 0"),
        (lambda: MLA().prefill_flops(4, 5), "hit: .*given 5"),
    ],
)
def test_bad_input_is_refused_with_its_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Dense().remaining(4.0, 2), "n: .*given 4.0"),
        (lambda: Dense().remaining(4, 2.0), "hit: .*given 2.0"),
        (lambda: Dense().remaining(4, float("nan")), "hit: .*given nan"),
        (lambda: Dense().remaining(True, 0), "n: .*given True"),
        (lambda: Dense().remaining("8", 0), "n: .*given '8'"),
        (lambda: Dense().remaining(np.array([4.0]), 2), "n: .*float64"),
        (lambda: Dense().total(1.5), "n: .*given 1.5"),
        (lambda: SlidingWindow(2.5), "w: .*given 2.5"),
        (lambda: Compressed(False), "m: .*given False"),
        (lambda: Mixture(((1, "dense"),)), "parts: expected .* pairs, given 'dense' for a region"),
    ],
)
def test_input_that_is_no_integer_is_refused_with_its_value(call, message):
    with pytest.raises(TypeError, match=message):
        call()
