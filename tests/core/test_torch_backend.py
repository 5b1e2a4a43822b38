"""The torch backend of attention, called below the public checks, against the float64 oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from cascade_lab.backends import Call, Pass
from cascade_lab.backends import torch as torch_backend
from cascade_lab.evidence.reference import assert_state_close, attention_oracle, state_error


@dataclass(frozen=True)
class Case:
    """One paged, ragged call. Every cache slot that no length covers holds NaN; unused table entries are absurd."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    cache_seqlens: Tensor
    cu_seqlens_q: Tensor
    softmax_scale: float
    window_size: tuple[int, int] = (-1, -1)
    tree_mask: Tensor | None = None
    tail_seqlens: Tensor | None = None
    softcap: float = 0.0

    def run(self, **changed) -> tuple[Tensor, Tensor]:
        arguments = (
            vars(self)
            | {
                "max_seqlen_q": int(self.cu_seqlens_q.diff().max()) if len(self.cu_seqlens_q) > 1 else 0,
                "num_splits": None,
                "out_dtype": self.q.dtype,
                "reads": None,
                "backend": "torch",
            }
            | dict.fromkeys(("sinks", "k_scale", "v_scale"))
        )
        arguments |= changed
        only = Pass(*(arguments[field.name] for field in fields(Pass)))
        return torch_backend.attend(arguments["q"], [only], Call(*(arguments[name] for name in Call._fields)))

    def oracle(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        return attention_oracle(**vars(self), dtype=dtype)


def make_case(
    queries: list[int],
    keys: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options,
) -> Case:
    gen = torch.Generator().manual_seed(seed)
    num_pages = [-(-n // page_size) for n in keys]
    total = sum(num_pages) + 3
    order = torch.randperm(total, generator=gen)
    table = torch.full((len(keys), max(num_pages, default=0) + 2), 2**31 - 1, dtype=torch.int32)
    (num_heads, num_kv_heads), (head_dim, value_dim) = heads, dims
    k_cache = torch.full((total, page_size, num_kv_heads, head_dim), math.nan)
    v_cache = torch.full((total, page_size, num_kv_heads, value_dim), math.nan)
    used = 0
    for r, n in enumerate(keys):
        pages = order[used : used + num_pages[r]]
        used += num_pages[r]
        table[r, : num_pages[r]] = pages
        token = torch.arange(n)
        where = pages[token // page_size], token % page_size
        k_cache[where] = torch.randn(n, num_kv_heads, head_dim, generator=gen)
        v_cache[where] = torch.randn(n, num_kv_heads, value_dim, generator=gen)
    return Case(
        q=torch.randn(sum(queries), num_heads, head_dim, generator=gen).to(dtype),
        k_cache=k_cache.to(dtype),
        v_cache=v_cache.to(dtype),
        page_table=table,
        cache_seqlens=torch.tensor(keys, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        softmax_scale=options.pop("softmax_scale", head_dim**-0.5),
        **options,
    )


def tree_words(rows: int, tail: int, seed: int = 0) -> Tensor:
    """Random int64 [rows, ceil(tail / 64)] with every row seeing something."""
    gen = torch.Generator().manual_seed(seed)
    bits = torch.rand(rows, -(-tail // 64) * 64, generator=gen) < 0.5
    bits[:, tail:] = False
    bits[:, 0] = True
    return (bits.view(rows, -1, 64).long() << torch.arange(64)).sum(-1)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 8 rows and 16 keys, so that short inputs cross many block edges."""
    monkeypatch.setattr(torch_backend, "BLOCK_ROWS", 8)
    monkeypatch.setattr(torch_backend, "BLOCK_SCORES", 1)
    monkeypatch.setattr(torch_backend, "MIN_BLOCK_KEYS", 16)


WINDOWS = {
    "dense": (-1, -1),
    "causal": (-1, 0),
    "sliding": (5, 0),
    "left": (0, -1),
    "both": (3, 2),
    "wide": (40, 30),
}


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize(("heads", "dims"), [((4, 4), (16, 16)), ((6, 2), (8, 20)), ((3, 1), (5, 1))])
@pytest.mark.usefixtures("small_blocks")
def test_ragged_paged_state_equals_the_oracle_in_float64(heads, dims, window):
    case = make_case([5, 0, 1, 33, 17, 3], [7, 4, 50, 33, 70, 0], heads=heads, dims=dims, window_size=window)
    case = replace(case, **{name: getattr(case, name).double() for name in ("q", "k_cache", "v_cache")})
    assert_state_close(case.run(), case.oracle())


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("rows", [1, 7, 8, 9])
@pytest.mark.usefixtures("small_blocks")
def test_every_length_around_a_block_edge(rows, length):
    case = make_case([rows, 2], [length, 21], window_size=(-1, 0), dtype=torch.float64)
    assert_state_close(case.run(), case.oracle())


@pytest.mark.parametrize("tails", [[66, 9], [80, 40], [3, 3]], ids=["rows", "longer", "shorter"])
@pytest.mark.usefixtures("small_blocks")
def test_tree_mask_shows_its_bits_and_everything_before_the_tail(tails):
    case = make_case(
        [66, 9],
        [90, 41],
        tree_mask=tree_words(75, 80),
        tail_seqlens=torch.tensor(tails, dtype=torch.int32),
        dtype=torch.float64,
    )
    assert_state_close(case.run(), case.oracle())


def test_tree_tail_defaults_to_the_rows_of_each_request():
    mask = tree_words(12, 12)
    case = make_case([9, 3], [20, 3], tree_mask=mask, dtype=torch.float64)
    explicit = replace(case, tail_seqlens=torch.tensor([9, 3], dtype=torch.int32))
    assert_state_close(case.run(), explicit.oracle())


def test_bottom_right_causal_with_more_rows_than_keys_leaves_the_first_rows_empty():
    case = make_case([5, 2], [2, 5], window_size=(-1, 0))
    o, lse = case.run()
    assert (lse[:3] == -math.inf).all()
    assert (o[:3] == 0).all()
    assert lse[3:].isfinite().all()
    assert_state_close((o, lse), case.oracle())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.25, -0.3, 0.0])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_error_stays_within_twice_that_of_a_plain_run_in_the_same_dtype(dtype, scale, softcap):
    case = make_case([40, 7], [300, 90], window_size=(-1, 0), dtype=dtype, softmax_scale=scale, softcap=softcap)
    exact = case.oracle()
    assert_state_close(case.run(), exact, plain=case.oracle(dtype))
    # All arithmetic is in float32, so only the rounding of o distinguishes the input dtypes.
    o, lse = case.run(out_dtype=torch.float32)
    assert state_error((o, lse), exact).o < 2e-6
    assert state_error((o, lse), exact).lse < 4e-6
    assert lse.dtype == torch.float32


def test_shifted_scores_move_only_lse():
    case = make_case([6, 2], [70, 9], window_size=(-1, 0), softmax_scale=1.0)
    # One more head dimension, constant in k, adds the shift to each score.
    for shift in (300.0, -300.0, 1e4):
        moved = replace(
            case,
            q=torch.cat((case.q, torch.full_like(case.q[..., :1], shift)), -1),
            k_cache=torch.cat((case.k_cache, torch.ones_like(case.k_cache[..., :1])), -1),
        )
        (o, lse), (moved_o, moved_lse) = case.run(), moved.run()
        tolerance = 8 * abs(shift) * torch.finfo(torch.float32).eps
        torch.testing.assert_close(moved_o, o, rtol=0, atol=tolerance)
        torch.testing.assert_close(moved_lse, lse + shift, rtol=0, atol=tolerance)


def test_constant_values_are_returned_and_equal_scores_count_the_keys():
    case = make_case([3, 4], [50, 9], window_size=(-1, 0), softmax_scale=0.0)
    case = replace(case, v_cache=torch.where(case.v_cache.isnan(), math.nan, 1.5))
    o, lse = case.run()
    torch.testing.assert_close(o, torch.full_like(o, 1.5))
    keys = torch.tensor([48, 49, 50, 6, 7, 8, 9]).log()
    torch.testing.assert_close(lse, keys[:, None].expand(-1, 4))


def test_scores_of_minus_infinity_have_no_weight():
    case = make_case([2, 1], [9, 5], softmax_scale=1.0)
    q, k_cache = case.q.abs(), case.k_cache.clone()
    pages = case.page_table[:, 0].long()
    k_cache[pages, 1] = -math.inf
    case = replace(case, q=q, k_cache=k_cache)
    assert_state_close(case.run(), case.oracle())


POISON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
@pytest.mark.parametrize("where", ["q", "k_cache", "v_cache"])
@pytest.mark.parametrize("mask", ["causal", "sliding", "tree"])
def test_a_bad_number_reaches_only_the_rows_that_see_it(where, poison, mask):
    options = {"causal": {"window_size": (-1, 0)}, "sliding": {"window_size": (4, 0)}}
    case = make_case([12, 3], [12, 7], **options.get(mask, {"tree_mask": tree_words(15, 12)}))
    clean = case.run()
    bad = getattr(case, where).clone()
    if where == "q":
        bad[8] = poison
        seen = torch.arange(15) == 8
    else:
        page, offset = case.page_table[0, 2], 1
        bad[page, offset] = poison
        seen = torch.zeros(15, dtype=torch.bool)
        seen[9:12] = True
        if mask == "tree":
            seen[:12] = (case.tree_mask[:12, 0] >> 9 & 1).bool()
    o, lse = replace(case, **{where: bad}).run()
    assert torch.equal(o[~seen], o[~seen].nan_to_num())
    torch.testing.assert_close(o[~seen], clean[0][~seen], rtol=0, atol=1e-6)
    torch.testing.assert_close(lse[~seen], clean[1][~seen], rtol=0, atol=1e-6)
    if math.isnan(poison):
        assert o[seen].isnan().all()


def test_an_empty_row_is_exactly_empty_beside_bad_numbers():
    case = make_case([5, 2], [2, 5], window_size=(-1, 0))
    q, v_cache = case.q.clone(), case.v_cache.clone()
    q[0] = math.nan
    v_cache[case.page_table[0, 0], 1] = math.inf
    o, lse = replace(case, q=q, v_cache=v_cache).run()
    assert (o[:3] == 0).all()
    assert (lse[:3] == -math.inf).all()


def test_shapes_without_rows_keys_or_requests():
    for queries, keys in (([], []), ([0, 0], [5, 0]), ([2, 3], [0, 0])):
        case = make_case(queries, keys)
        o, lse = case.run()
        assert o.shape == (sum(queries), 4, 16)
        assert lse.shape == (sum(queries), 4)
        assert (o == 0).all()
        assert (lse == -math.inf).all()


def test_strided_inputs_give_the_same_state_as_contiguous_ones():
    case = make_case([6, 9], [30, 14], dims=(16, 12), window_size=(-1, 0))
    expected = case.run()
    spread_q = case.q.transpose(0, 2).contiguous().transpose(0, 2)
    head_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.k_cache, case.v_cache)]
    padded = [torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]] for x in (case.k_cache, case.v_cache)]
    interleaved = [torch.stack((x, x * 0), 1)[:, 0] for x in (case.k_cache, case.v_cache)]
    for k_cache, v_cache in (head_major, padded, interleaved):
        assert_state_close(replace(case, q=spread_q, k_cache=k_cache, v_cache=v_cache).run(), expected)


def test_a_dense_batch_is_a_cache_with_one_page_per_request():
    k, v = torch.randn(3, 64, 2, 16), torch.randn(3, 64, 2, 16)
    case = make_case([3, 17, 2], [3, 17, 64], window_size=(-1, 0))
    table = torch.tensor([[2], [0], [1]], dtype=torch.int32)
    for cache in ((k, v), [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]):
        dense = replace(case, k_cache=cache[0], v_cache=cache[1], page_table=table)
        assert_state_close(dense.run(), dense.oracle())


def test_split_count_does_not_change_the_state():
    case = make_case([2, 3], [3, 40])
    expected = case.run()
    for num_splits in (1, 3, 8):
        o, lse = case.run(num_splits=num_splits)
        assert torch.equal(o, expected[0])
        assert torch.equal(lse, expected[1])


def test_reads_gain_the_tokens_of_every_row_block(monkeypatch):
    reads = torch.tensor([100, 200])
    make_case([3, 1], [50, 9]).run(reads=reads)
    assert reads.tolist() == [159, 259]
    monkeypatch.setattr(torch_backend, "BLOCK_ROWS", 8)  # 4 rows of 2 heads
    reads.zero_()
    make_case([8, 1], [50, 9], window_size=(-1, 0)).run(reads=reads)
    assert reads.tolist() == [46 + 50 + 9] * 2


GRADIENT_CASES = {
    "dense": {},
    "causal": {"window_size": (-1, 0)},
    "sliding": {"window_size": (3, 1)},
    "softcap": {"window_size": (-1, 0), "softcap": 1.5},
    "negative scale": {"softmax_scale": -0.7},
    "tree": {"tree_mask": tree_words(9, 6)},
}


@pytest.mark.parametrize("options", GRADIENT_CASES.values(), ids=GRADIENT_CASES)
@pytest.mark.parametrize("heads", [pytest.param((2, 2), marks=pytest.mark.long), (4, 2)])
def test_gradients_equal_finite_differences_where_requests_share_pages(options, heads, monkeypatch):
    monkeypatch.setattr(torch_backend, "BLOCK_ROWS", 2 * heads[0] // heads[1])
    monkeypatch.setattr(torch_backend, "BLOCK_SCORES", 1)
    monkeypatch.setattr(torch_backend, "MIN_BLOCK_KEYS", 3)
    case = make_case([5, 0, 3, 1], [6, 2, 7, 0], heads=heads, dims=(3, 2), page_size=2, dtype=torch.float64)
    case = replace(case, **options)
    table = case.page_table.clone()
    table[2, 0] = table[0, 1]
    inputs = [x.nan_to_num().requires_grad_() for x in (case.q, case.k_cache, case.v_cache)]

    def run(q, k_cache, v_cache):
        o, lse = replace(case, q=q, k_cache=k_cache, v_cache=v_cache, page_table=table).run()
        return o, lse.masked_fill(lse == -math.inf, 0)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_blocks")
def test_gradients_equal_those_of_the_oracle_and_vanish_in_empty_rows_and_unread_slots(dtype):
    case = make_case([9, 30, 4], [5, 60, 30], window_size=(-1, 0), dtype=dtype)
    gen = torch.Generator().manual_seed(1)
    weight = torch.randn(43, 4, 16, generator=gen), torch.randn(43, 4, generator=gen)

    def gradients(run, cast):
        leaves = [cast(x).requires_grad_() for x in (case.q, case.k_cache, case.v_cache)]
        o, lse = run(replace(case, q=leaves[0], k_cache=leaves[1], v_cache=leaves[2]))
        loss = (o * weight[0]).sum() + (lse * weight[1]).masked_fill(lse == -math.inf, 0).sum()
        return torch.autograd.grad(loss, leaves)

    actual = gradients(lambda c: c.run(out_dtype=torch.float32), torch.clone)
    expected = gradients(lambda c: c.oracle(), torch.Tensor.double)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), e, rtol=2 * torch.finfo(dtype).eps, atol=2e-5)
    assert (actual[0][:4] == 0).all()
    unread = case.k_cache.isnan()
    assert (actual[1][unread] == 0).all()
    assert (actual[2][unread] == 0).all()


def test_gradients_of_rows_that_do_not_see_a_bad_value_are_unharmed():
    case = make_case([12, 3], [12, 7], window_size=(-1, 0), dtype=torch.float64)
    weight = torch.randn(12, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    results = []
    for poison in (None, math.nan, math.inf):
        k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
        if poison is not None:
            k_cache[case.page_table[0, 2], 1] = poison
            v_cache[case.page_table[0, 2], 1] = poison
        q = case.q.clone().requires_grad_()
        o, _ = replace(case, q=q, k_cache=k_cache, v_cache=v_cache).run()
        results.append(torch.autograd.grad((o[:9] * weight[:9]).sum(), q)[0][:9])
    assert results[0].isfinite().all()
    for poisoned in results[1:]:
        torch.testing.assert_close(poisoned, results[0])


@pytest.mark.parametrize("power", [1, 2], ids=["constant upstream gradient", "upstream gradient of o"])
def test_a_second_derivative_is_refused(power):
    case = make_case([2, 1], [5, 3])
    q = case.q.clone().requires_grad_()
    o, _ = replace(case, q=q).run()
    (first,) = torch.autograd.grad(o.pow(power).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_results_do_not_depend_on_the_default_dtype():
    case = make_case([5, 3], [40, 9], window_size=(-1, 0))
    expected = case.run()
    torch.set_default_dtype(torch.float64)
    try:
        o, lse = case.run()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])


def peak_bytes(run) -> int:
    """Largest sum of tensor memory that run() holds beyond what was there, from the profiler's allocation events."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    del result
    return peak


@pytest.mark.parametrize("derivative", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("page_size", [16, 8192], ids=["paged", "dense"])
def test_peak_memory_does_not_grow_with_the_length(page_size, derivative, monkeypatch):
    monkeypatch.setattr(torch_backend, "BLOCK_SCORES", 1 << 14)
    monkeypatch.setattr(torch_backend, "BLOCK_TOKENS", 1 << 14)
    peaks = []
    for length in (1024, 8192):
        case = make_case([64, 3], [length, 100], page_size=page_size, window_size=(-1, 0))
        q = case.q.requires_grad_(derivative)

        def run(case=case, q=q):
            o, lse = case.run()
            return torch.autograd.grad(o.sum() + lse.sum(), q) if derivative else o

        peaks.append(peak_bytes(run))
    assert peaks[0] > 2**14 * 4
    assert peaks[1] <= 1.05 * peaks[0]


def test_widely_spread_scores_keep_their_accuracy():
    case = make_case([30, 5], [200, 70], window_size=(-1, 0), softmax_scale=30.0)
    o, lse = case.run()
    exact = case.oracle()
    size = float(exact[1].abs().max())
    assert size > 300
    assert state_error((o, lse), exact).lse < 8 * size * torch.finfo(torch.float32).eps
    assert state_error((o, lse), exact).o < 64 * size * torch.finfo(torch.float32).eps


def test_inference_mode_gives_the_same_state():
    case = make_case([5, 3], [40, 9], window_size=(-1, 0))
    expected = case.run()
    with torch.inference_mode():
        o, lse = case.run()
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])
