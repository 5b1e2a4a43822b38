"""One attention pass against the float64 oracle and against exact invariants, on every backend."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from cascade_lab import attention, merge_state, runtime
from cascade_lab.evidence.reference import assert_state_close, attention_oracle, visible_keys
from tests.cases import (
    INT32_MAX,
    attention_case,
    bytes_of,
    check,
    int32,
    offsets,
    poisoned_cache,
    random,
    run,
    tree_mask,
)

INF, NAN = math.inf, math.nan
ROWS, LENGTHS = [3, 1, 0, 6, 2], [5, 37, 9, 40, 2]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RULES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "self only": {"window_size": (0, 0)},
    "left": {"window_size": (4, -1)},
    "right": {"window_size": (-1, 2)},
    "causal window": {"causal": True, "window_size": (5, -1)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_ragged_paged_batch_matches_float64(backend, device, loads, rule, dtype):
    """The central assertion: within twice the error of plain torch in the same dtype, for o and for lse."""
    check(attention_case(ROWS, LENGTHS, dtype=dtype, device=device, **RULES[rule]), backend, loads)


@pytest.mark.parametrize("rule", RULES)
def test_float64_on_the_torch_backend(rule):
    check(attention_case(ROWS, LENGTHS, dtype=torch.float64, **RULES[rule]), "torch")


@pytest.mark.parametrize(
    "options",
    [
        {"softmax_scale": 0.0},
        {"softmax_scale": -0.4},
        {"softmax_scale": 1.7},
        {"softmax_scale": 1},
        {"softcap": 2.0},
        {"softcap": 0.05, "causal": True},
        {"softcap": 30.0, "softmax_scale": -1.0, "window_size": (6, 1)},
    ],
    ids=str,
)
def test_scale_and_softcap(backend, device, loads, options):
    check(attention_case(ROWS, LENGTHS, device=device, **options), backend, loads)


def test_the_scale_enters_once(backend, device):
    """K8 (tests/known_faults.md): D = 64, raw scores [8, 0], scale 0.125: weights e / (e + 1) and lse = ln(e + 1) =
    1.31326.
    """
    q, k = torch.zeros(1, 1, 64, device=device), torch.zeros(1, 2, 1, 64, device=device)
    q[..., 0], k[0, 0, 0, 0] = 8.0, 1.0
    v = torch.tensor([1.0, 0.0], device=device).view(1, 2, 1, 1)
    for scale in (None, 0.125):
        state = attention(q, k, v, int32([[0]], device), int32([2], device), softmax_scale=scale, backend=backend)
        assert state.o.item() == pytest.approx(math.e / (math.e + 1), rel=1e-6)
        assert state.lse.item() == pytest.approx(1.3132616875, rel=1e-6)


def test_lopsided_parts_merge_in_natural_logarithms(backend, device):
    """K6: all scores 0, 4096 keys of value 0 in one pass and 16 of value 1 in another: o = 16 / 4112."""
    parts = []
    for keys, value in ((4096, 0.0), (16, 1.0)):
        k = torch.zeros(1, keys, 1, 16, device=device)
        arguments = (torch.ones(2, 1, 16, device=device), k, k + value, int32([[0]], device), int32([keys], device))
        parts.append(attention(*arguments, cu_seqlens_q=int32([0, 2], device), backend=backend))
    merged = merge_state(*parts[0], *parts[1], backend=backend)
    torch.testing.assert_close(merged.o, torch.full_like(merged.o, 16 / 4112), rtol=1e-5, atol=0)
    torch.testing.assert_close(merged.lse, torch.full_like(merged.lse, math.log(4112)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page", [1, 3, 16, 64, 256])
def test_page_size_does_not_matter(backend, device, loads, page, dtype):
    check(attention_case(ROWS, LENGTHS, page=page, dtype=dtype, device=device, causal=True), backend, loads)


def test_dense_cache_is_a_cache_of_one_page_per_request(backend, device, loads):
    case = attention_case(ROWS, LENGTHS, device=device, causal=True)
    paged = run(case, backend, loads)
    longest = max(LENGTHS)
    k = poisoned_cache(len(ROWS), longest, 2, 16, torch.float32, device, "packed")
    v = k.clone()
    for r, length in enumerate(LENGTHS):
        slots = case.page_table[r, torch.arange(length, device=device) // 4].long(), torch.arange(length) % 4
        k[r, :length], v[r, :length] = case.k_cache[slots], case.v_cache[slots]
    table = torch.arange(len(ROWS), dtype=torch.int32, device=device)[:, None]
    dense = replace(case, k_cache=k, v_cache=v, page_table=table)
    assert_state_close(run(dense, backend, loads, prefix="dense_"), paged)


@pytest.mark.parametrize("rule", ["full", "causal window"])
@pytest.mark.parametrize("longest", [150, 256])
def test_dense_caches_of_several_tiles_match_float64(backend, device, loads, longest, rule):
    """One page a request, of a power of two or not, full and in part; rows of three tiles of keys and more."""
    case = attention_case([3, 1, 2], [longest, 131, 7], page=longest, device=device, **RULES[rule])
    check(replace(case, page_table=case.page_table[:, :1]), backend, loads)


@pytest.mark.parametrize("layout", ["heads first", "interleaved", "padded"])
@pytest.mark.parametrize("rule", ["full", "causal"])
def test_cache_strides_are_honoured(backend, device, loads, layout, rule):
    """K11, K54: transposed, interleaved and padded caches are read in place; their gaps hold NaN."""
    case = attention_case(ROWS, LENGTHS, layout=layout, device=device, **RULES[rule])
    assert not case.k_cache.is_contiguous()
    state, _ = check(case, backend, loads)
    packed = attention_case(ROWS, LENGTHS, device=device, **RULES[rule])
    assert torch.equal(state.o, run(packed, backend, loads, prefix="packed_").o)


def test_index_and_query_strides_are_honoured(backend, device, loads):
    """K11: every index tensor is every other element of a larger one, q is a transposed [H, T, D]."""

    def spread(x):
        memory = torch.full([2 * n for n in x.shape], INT32_MAX, dtype=x.dtype, device=x.device)
        view = memory[tuple(slice(None, None, 2) for _ in x.shape)]
        view.copy_(x)
        return view

    case = attention_case([3, 2], [11, 30], device=device)
    case = case.with_options(tree_mask=tree_mask([[-1, 0, 0], [-1, 0]], device), tail_seqlens=int32([3, 2], device))
    expected = run(case, backend, loads)
    q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    names = ("page_table", "cache_seqlens", "cu_seqlens_q")
    strided = replace(case, q=q, **{name: spread(getattr(case, name)) for name in names})
    strided = strided.with_options(**{name: spread(x) for name, x in case.options.items()})
    state = run(strided, backend, loads, prefix="strided_")
    assert torch.equal(state.o, expected.o)
    assert torch.equal(state.lse, expected.lse)


@pytest.mark.parametrize(
    ("dim", "value_dim"),
    [(1, 1), (2, 3), (8, 8), (36, 36), (72, 40), (80, 80), (96, 128), (192, 128), (256, 256), (576, 512)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_head_dim(backend, device, loads, dim, value_dim, dtype):
    """K14: head dims that are no power of two, and D_v different from D."""
    case = attention_case([2, 1], [7, 19], heads=(2, 1), dim=dim, value_dim=value_dim, dtype=dtype, device=device)
    state, _ = check(case, backend, loads)
    assert state.o.shape == (3, 2, value_dim)


def test_values_may_be_a_view_of_the_keys(backend, device, loads):
    """The absorbed MLA layout: one latent cache, V the first columns of K."""
    case = attention_case([2, 3], [9, 33], heads=(4, 1), dim=40, device=device, causal=True)
    check(replace(case, v_cache=case.k_cache[..., :32]), backend, loads)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (5, 1), (8, 1)], ids=str)
def test_query_heads_share_their_key_head(backend, device, loads, heads):
    """MHA, GQA and MQA equal a run whose KV heads are repeated, distinct in every head."""
    case = attention_case(ROWS, LENGTHS, heads=heads, device=device, causal=True)
    state, _ = check(case, backend, loads)
    k, v = (x.repeat_interleave(heads[0] // heads[1], dim=2) for x in (case.k_cache, case.v_cache))
    assert_state_close(run(replace(case, k_cache=k, v_cache=v), backend, loads, prefix="repeated_"), state)


EDGES = [0, 1, 15, 16, 17, 127, 128, 129]


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.long), True])
def test_lengths_around_block_edges(backend, device, loads, causal):
    """K53: queries and keys of 0, 1, 15, 16, 17, 127, 128 and 129, in all 64 pairs."""
    for turn in range(len(EDGES)):
        lengths = EDGES[turn:] + EDGES[:turn]
        case = attention_case(EDGES, lengths, heads=(2, 1), dim=8, page=16, seed=turn, device=device, causal=causal)
        check(case, backend, loads, prefix=f"turn{turn}_")


SMALL = list(product(range(6), range(6)))


@pytest.mark.parametrize("left", [-1, 0, 1, 3])
@pytest.mark.parametrize("right", [-1, 0, 1, 3])
def test_windows_on_every_small_shape(backend, device, loads, left, right):
    """K49, K51: every pair of 0 to 5 queries and keys, K - Q negative included, under every small window."""
    rows, lengths = [q for q, _ in SMALL], [k for _, k in SMALL]
    case = attention_case(rows, lengths, heads=(1, 1), dim=4, page=2, device=device, window_size=(left, right))
    check(case, backend, loads)


@pytest.mark.skipif(runtime.triton_mode() != "interpreted", reason="watches the interpreter divide")
@pytest.mark.parametrize("rule", [*RULES, "tree"])
def test_no_negative_number_is_divided(rule, monkeypatch):
    """K49: // and % round down in Python and toward zero when compiled; no operand makes a difference."""
    from triton.runtime.interpreter import InterpreterBuilder

    divided = []

    def watch(name):
        operation = getattr(InterpreterBuilder, name)

        def watched(self, lhs, rhs):
            divided.append(min(int(lhs.data.min()), int(rhs.data.min())))
            return operation(self, lhs, rhs)

        monkeypatch.setattr(InterpreterBuilder, name, watched)

    for name in ("create_sdiv", "create_srem"):
        watch(name)
    rows, lengths = [2, 5, 0, 4, 20], [5, 2, 3, 0, 33]
    for page in (3, 4):
        case = attention_case(rows, lengths, page=page, heads=(2, 1), dim=4, **RULES.get(rule, {}))
        if rule == "tree":
            tails = int32([2, 2, 0, 0, 20])
            case = case.with_options(tree_mask=tree_mask([[-1] * n for n in rows]), tail_seqlens=tails)
        for num_splits in (1, 3):
            check(case, "triton", num_splits=num_splits)
    assert len(divided) > 100
    assert min(divided) >= 0


def seen(backend, rows, keys, device, **options):
    """Which keys each row gives weight to, as strings of 0 and 1: all scores are 0 and V is the identity."""
    q = torch.zeros(rows, 1, 4, device=device)
    k, v = torch.zeros(1, keys, 1, 4, device=device), torch.eye(keys, device=device).view(1, keys, 1, keys)
    arguments = (int32([[0]], device), int32([keys], device))
    state = attention(q, k, v, *arguments, cu_seqlens_q=int32([0, rows], device), backend=backend, **options)
    weights = state.o[:, 0]
    visible = weights > 0
    count = visible.sum(1, keepdim=True)
    torch.testing.assert_close(weights, visible / count.clamp_min(1))
    torch.testing.assert_close(state.lse, count.log())
    return ["".join(str(int(x)) for x in row) for row in visible]


def test_causal_is_aligned_to_the_bottom_right(backend, device):
    """K51: Q=2, K=5 and Q=5, K=2."""
    assert seen(backend, 2, 5, device, causal=True) == ["11110", "11111"]
    assert seen(backend, 5, 2, device, causal=True) == ["00", "00", "00", "10", "11"]


def test_minus_one_is_no_window(backend, device):
    """K32: -1 and None are no limit, 0 is the row's own position."""
    everything = ["1" * 8] * 3
    for window in ((-1, -1), None, (None, None), (None, -1), [-1, -1], (8, 8)):
        assert seen(backend, 3, 8, device, window_size=window) == everything
    assert seen(backend, 3, 8, device, window_size=(0, 0)) == ["00000100", "00000010", "00000001"]
    assert seen(backend, 3, 8, device, window_size=(2, -1)) == ["00011111", "00001111", "00000111"]
    assert seen(backend, 3, 8, device, window_size=(-1, 0)) == seen(backend, 3, 8, device, causal=True)


@pytest.mark.parametrize("window", [(50, -1), (-1, 40), (50, 40)])
def test_rows_of_a_tile_enter_and_leave_the_window_at_their_own_keys(backend, device, loads, window):
    """Windows of several key tiles: a tile inside the first row's window is not yet inside the last row's."""
    check(attention_case([40, 5], [300, 37], heads=(1, 1), dim=16, device=device, window_size=window), backend, loads)


@pytest.mark.parametrize("wide", [2**30, 2**31 - 1, 2**31, 2**62])
def test_a_window_wider_than_int32_positions_is_no_limit(backend, device, loads, wide):
    """A position plus the window must not wrap around."""
    case = attention_case([9, 4], [40, 13], device=device)
    for window in ((wide, wide), (0, wide), (wide, 0)):
        limits = tuple(-1 if x == wide else x for x in window)
        expected = case.with_options(window_size=limits).reference()
        assert_state_close(run(case, backend, loads, window_size=window), expected)


def test_node_sees_ancestors_and_itself(backend, device):
    """K25: 1 and 2 under 0, 3 under 1, 4 under 2: node 3 sees {0,1,3} and node 4 sees {0,2,4}."""
    mask = tree_mask([[-1, 0, 0, 1, 2]], device)
    expected = ["10000", "11000", "10100", "11010", "10101"]
    assert seen(backend, 5, 5, device, tree_mask=mask) == expected
    assert seen(backend, 5, 8, device, tree_mask=mask) == ["111" + row for row in expected]


def random_tree(size, seed):
    """Parents of a tree whose storage order is not topological."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(size, generator=generator).tolist()
    parents = [-1] * size
    for depth in range(1, size):
        choice = int(torch.randint(-1, depth, (), generator=generator))
        parents[order[depth]] = order[choice] if choice >= 0 else -1
    return parents


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [[5, 1, 0, 9], [64, 3], [130, 65]], ids=str)
def test_tree_masks_match_float64(backend, device, loads, sizes, dtype):
    """Trees of any storage order, up to 130 nodes in three words, over prefixes that end anywhere in a tile."""
    trees = [random_tree(size, seed) for seed, size in enumerate(sizes)]
    lengths = [size + prefix for size, prefix in zip(sizes, (0, 31, 7, 50), strict=False)]
    mask = tree_mask(trees, device)
    case = attention_case(sizes, lengths, heads=(2, 1), dim=8, dtype=dtype, page=16, device=device, tree_mask=mask)
    check(case, backend, loads)


@pytest.mark.parametrize("prefix", [0, 1, 30, 31, 32, 33, 63, 64, 65, 95])
def test_tree_begins_anywhere_in_a_tile(backend, device, loads, prefix):
    trees = [random_tree(40, 1), random_tree(7, 2)]
    case = attention_case([40, 7], [prefix + 40, 7], heads=(1, 1), dim=8, device=device)
    check(case.with_options(tree_mask=tree_mask(trees, device)), backend, loads)


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 100, 127, 128, 191])
def test_tree_begins_anywhere_in_a_tile_of_128_keys(backend, device, loads, prefix, monkeypatch):
    """Masked tiles have 64 keys, so up to two of them lie before the tail, one of them whole."""
    if backend == "triton":
        from cascade_lab.backends.triton import attention as kernels
        from cascade_lab.backends.triton.config import Tile

        monkeypatch.setattr(kernels, "tile_for", lambda *_: Tile(32, 128, 4, 2, tail_n=64))
    trees = [random_tree(70, 1), random_tree(7, 2)]
    case = attention_case([70, 7], [prefix + 70, 7 + prefix // 2], heads=(1, 1), dim=8, page=16, device=device)
    check(case.with_options(tree_mask=tree_mask(trees, device)), backend, loads)


def test_tail_may_differ_from_the_rows(backend, device, loads):
    """Rows are the leaves only, or the tail is empty, or longer than the rows."""
    parents = random_tree(70, 3)
    leaves = [node for node in range(70) if node not in parents]
    rows = tree_mask([parents], device)[leaves[:6]]
    mask = torch.cat(
        [rows, torch.zeros(2, 2, dtype=torch.int64, device=device), tree_mask([[-1, 0]], device).repeat(1, 2)]
    )
    case = attention_case([6, 2, 2], [90, 11, 17], device=device)
    check(case.with_options(tree_mask=mask, tail_seqlens=int32([70, 0, 2], device)), backend, loads)


def test_rows_that_see_no_key_are_empty(backend, device, loads):
    """A zero mask over a tail that is the whole cache, a window that ends before the first key, and no keys at all."""
    case = attention_case([2, 3], [4, 9], device=device)
    mask = torch.zeros(5, 1, dtype=torch.int64, device=device)
    state, _ = check(case.with_options(tree_mask=mask, tail_seqlens=int32([4, 9], device)), backend, loads)
    assert (state.o == 0).all()
    assert (state.lse == -INF).all()
    check(attention_case([9, 4], [3, 2], device=device, causal=True), backend, loads, prefix="short_")
    check(attention_case([2, 1], [0, 0], device=device), backend, loads, prefix="none_")


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("rule", ["full", "causal window", "tree"])
def test_number_of_splits_does_not_matter(backend, device, loads, num_splits, rule):
    """K17: also more splits than tiles and more than keys; empty splits leave nothing behind."""
    case = attention_case([3, 0, 6], [5, 9, 137], heads=(2, 1), dtype=torch.bfloat16, device=device)
    if rule == "tree":
        case = case.with_options(tree_mask=tree_mask([random_tree(n, n) for n in (3, 0, 6)], device))
    else:
        case = case.with_options(**RULES[rule])
    check(case, backend, loads, num_splits=num_splits)


def test_three_keys_in_any_number_of_splits(backend, device, loads):
    """K17: 3 keys, and 2 beside them, in 1, 3 and 8 splits: one state."""
    case = attention_case([2, 1], [3, 2], device=device)
    states = [run(case, backend, loads, num_splits=n) for n in (1, 3, 8)]
    for state in states:
        assert_state_close(state, case.reference())
        assert_state_close(state, states[0])


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_out_dtype(backend, device, loads, out_dtype, num_splits):
    case = attention_case([2, 1], [9, 70], dtype=torch.bfloat16, device=device)
    check(case, backend, loads, out_dtype=out_dtype, num_splits=num_splits)


def test_one_row_per_request_needs_no_offsets(backend, device, loads):
    case = attention_case([1, 1, 1], [4, 21, 33], device=device)
    expected = run(case, backend, loads)
    state = run(replace(case, cu_seqlens_q=None), backend, loads)
    assert torch.equal(state.o, expected.o)
    assert torch.equal(state.lse, expected.lse)


@pytest.mark.parametrize("max_seqlen_q", [6, 7, 500, 2**40])
def test_a_generous_max_seqlen_q_changes_nothing(backend, device, loads, max_seqlen_q):
    case = attention_case(ROWS, LENGTHS, device=device, causal=True)
    check(case, backend, loads, max_seqlen_q=max_seqlen_q)


def test_unchecked_gives_the_same_state(backend, device, loads):
    case = attention_case(ROWS, LENGTHS, device=device, causal=True)
    with runtime.unchecked():
        check(case, backend, loads)
        check(case, backend, loads, max_seqlen_q=6)


@pytest.mark.parametrize("rows", [[], [0], [0, 0, 0]])
def test_no_query_rows(backend, device, loads, rows):
    case = attention_case(rows, [7] * len(rows), device=device)
    state = run(case, backend, loads)
    assert state.o.shape == (0, 4, 16)
    assert state.lse.shape == (0, 4)


def test_padding_rows_are_empty_and_harmless(backend, device, loads):
    """K36: lengths [9, 4, 6, 0]; row 3 is empty and rows 0 to 2 are those of a run without it."""
    case = attention_case([2, 2, 2, 2], [9, 4, 6, 0], device=device)
    state, _ = check(case, backend, loads)
    assert (state.o[6:] == 0).all()
    assert (state.lse[6:] == -INF).all()
    short = replace(
        case,
        q=case.q[:6],
        page_table=case.page_table[:3],
        cache_seqlens=case.cache_seqlens[:3],
        cu_seqlens_q=case.cu_seqlens_q[:4],
    )
    alone = run(short, backend, loads, prefix="short_")
    assert torch.equal(state.o[:6], alone.o)
    assert torch.equal(state.lse[:6], alone.lse)


def test_each_request_equals_its_own_run(backend, device, loads):
    """K38: lengths [3, 17, 64], 2 queries each; a folded batch stride would show."""
    case = attention_case([2, 2, 2], [3, 17, 64], device=device, causal=True)
    state = run(case, backend, loads)
    for r in range(3):
        alone = run(case.request(r), backend, loads, prefix=f"request{r}_")
        assert torch.equal(state.o[2 * r : 2 * r + 2], alone.o)
        assert torch.equal(state.lse[2 * r : 2 * r + 2], alone.lse)


def test_heads_are_independent(backend, device, loads):
    """K54: B=2, H=2, N=4, D=16 viewed [B, H, N, D]; changing head 1 of q, k or v never changes head 0."""
    case = attention_case([4, 3], [4, 6], heads=(2, 2), layout="heads first", device=device)
    before = run(case, backend, loads)
    for name in ("q", "k_cache", "v_cache"):
        x = getattr(case, name)
        x.select(-2, 1).mul_(-2.0).add_(1.0)
        after = run(case, backend, loads)
        assert torch.equal(after.o[:, 0], before.o[:, 0])
        assert torch.equal(after.lse[:, 0], before.lse[:, 0])
        assert not torch.equal(after.o[:, 1], before.o[:, 1])
        before = after


def test_integer_data_is_exact_in_bfloat16(backend, device, loads):
    """K40: scores of whole numbers from -2 to 2 are exact in every dtype, so all lse agree to float32 rounding."""
    lse = {}
    for dtype in DTYPES:
        case = attention_case([16, 5], [16, 40], dtype=dtype, integers=True, softmax_scale=0.5, device=device)
        state, expected = check(case, backend, loads, prefix=f"{dtype}_")
        assert_state_close((expected.o, state.lse), expected)
        lse[dtype] = state.lse
    torch.testing.assert_close(lse[torch.bfloat16], lse[torch.float32], rtol=0, atol=1e-5)
    torch.testing.assert_close(lse[torch.float16], lse[torch.float32], rtol=0, atol=1e-5)


def test_float32_products_are_float32(backend, device, loads):
    """K44: D=64, L=256 within 5e-6 of float64; TF32 products would be off by about 1e-3."""
    case = attention_case([3, 2], [256, 100], heads=(2, 1), dim=64, page=16, softmax_scale=1.0, device=device)
    assert_state_close(run(case, backend, loads), case.reference())


def test_single_row_and_narrow_head(backend, device, loads):
    """K45: one query row, a group of 4 heads, D=8: products are padded to the 16 a side that a compiler takes."""
    check(attention_case([1, 1], [3, 18], heads=(4, 1), dim=8, device=device), backend, loads)
    if loads is not None:
        assert loads.dots
        assert min(size for shape in loads.dots for size in shape) >= 16


@pytest.mark.parametrize("height", [300.0, -300.0, 1e4, -1e4])
@pytest.mark.parametrize("rule", ["full", "causal"])
def test_shifted_scores_shift_only_the_lse(backend, device, loads, height, rule):
    """K5 in attention: adding a constant to all scores of a row leaves o alone, at any height."""
    case = attention_case(ROWS, LENGTHS, softmax_scale=1.0, device=device, **RULES[rule])
    case.q[..., 0] = 1.0
    case.k_cache[..., 0].mul_(0.0)
    base, _ = check(case, backend, loads)
    case.k_cache[..., 0].add_(height)
    shifted = run(case, backend, loads)
    slack = 4 * abs(height) * torch.finfo(torch.float32).eps
    empty = base.lse == -INF
    torch.testing.assert_close(shifted.o, base.o, rtol=0, atol=3 * slack + 1e-6)
    torch.testing.assert_close(shifted.lse[~empty], base.lse[~empty] + height, rtol=0, atol=slack)
    assert torch.equal(shifted.lse[empty], base.lse[empty])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("height", [1e30, -1e30, 2.3e38, -2.3e38, 1e-40])
def test_no_finite_score_stands_for_a_missing_one(backend, device, height):
    """Requirement 3: keys of one score share the weight, also where a mask made of a large number would hide them."""
    q, k = torch.zeros(2, 1, 4, device=device), torch.zeros(2, 4, 1, 4, device=device)
    q[..., 0], k[..., 0] = 1.0, height
    v = torch.arange(8.0, device=device).view(2, 4, 1, 1)
    arguments = (int32([[0], [1]], device), int32([4, 3], device))
    state = attention(q, k, v, *arguments, softmax_scale=1.0, backend=backend)
    torch.testing.assert_close(state.o.flatten().tolist(), [1.5, 5.0], rtol=1e-6, atol=0)
    expected = [height + math.log(4), height + math.log(3)]
    torch.testing.assert_close(state.lse.flatten().tolist(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_beyond_half_precision_are_float32(backend, device, dtype):
    """Requirement 3: 100 x 100 x 16 = 160,000 overflows float16; two keys of that score share the weight."""
    q, k = torch.full((2, 1, 16), 100.0), torch.full((2, 4, 1, 16), 100.0)
    k[:, 2:] = 96.0
    v = torch.tensor([1.0, 3.0, 5.0, 7.0, 2.0, 4.0, 6.0, 8.0]).view(2, 4, 1, 1)
    q, k, v = (x.to(device=device, dtype=dtype) for x in (q, k, v))
    state = attention(q, k, v, int32([[0], [1]], device), int32([4, 3], device), softmax_scale=1.0, backend=backend)
    assert state.o.flatten().tolist() == [2.0, 3.0]
    assert state.lse.flatten().tolist() == pytest.approx([160_000 + math.log(2)] * 2, rel=2.5e-7)


@pytest.mark.parametrize("rule", RULES)
def test_constant_values_are_returned(backend, device, loads, rule):
    case = attention_case(ROWS, LENGTHS, device=device, **RULES[rule])
    level = torch.arange(1.0, 33.0, device=device).view(2, 16)
    case.v_cache.copy_(torch.where(case.v_cache.isnan(), NAN, level))
    state = run(case, backend, loads)
    expected = level.repeat_interleave(2, 0).expand(12, 4, 16)
    empty = (state.lse == -INF)[..., None]
    torch.testing.assert_close(state.o, expected.masked_fill(empty, 0.0), rtol=2e-6, atol=0)


def test_order_of_keys_does_not_matter(backend, device, loads):
    case = attention_case([3, 2], [29, 40], page=1, device=device)
    state = run(case, backend, loads)
    table = case.page_table.clone()
    for r, length in enumerate([29, 40]):
        table[r, :length] = table[r, torch.randperm(length, generator=torch.Generator().manual_seed(r)).to(device)]
    assert_state_close(run(replace(case, page_table=table), backend, loads, prefix="permuted_"), state)


def test_repeated_keys_add_ln_2(backend, device, loads):
    case = attention_case([3, 2], [20, 8], device=device)
    state = run(case, backend, loads)
    table = case.page_table.new_full((2, 10), -1)
    table[0, :5], table[0, 5:] = case.page_table[0, :5], case.page_table[0, :5]
    table[1, :2], table[1, 2:4] = case.page_table[1, :2], case.page_table[1, :2]
    doubled = replace(case, page_table=table, cache_seqlens=2 * case.cache_seqlens)
    doubled = run(doubled, backend, loads, prefix="doubled_")
    assert_state_close((doubled.o, doubled.lse - math.log(2.0)), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", [0, 1, 8, 13, 40])
def test_two_passes_merge_to_one(backend, device, loads, cut, dtype):
    """Claim 1: the keys before and after any cut, in two calls, merged, equal one call over all keys."""
    case = attention_case([3, 2], [40, 14], page=1, dtype=dtype, device=device)
    head = torch.clamp(case.cache_seqlens, max=cut)
    rest = case.page_table.clone()
    for r, length in enumerate(case.cache_seqlens.tolist()):
        start = min(cut, length)
        rest[r, : length - start] = case.page_table[r, start:length]
    first = run(replace(case, cache_seqlens=head), backend, loads, prefix="first_")
    tail = replace(case, page_table=rest, cache_seqlens=case.cache_seqlens - head)
    second = run(tail, backend, loads, prefix="second_")
    merged = merge_state(*first, *second, backend=backend)
    assert_state_close(merged, case.reference(), plain=case.reference(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chain_of_drafts_is_one_causal_call(backend, device, loads, dtype):
    """topk = 1: one causal call with cache_seqlens L + S equals the prefix merged with a causal pass over the draft."""
    rows, prefix = [4, 1, 3], [21, 7, 32]
    lengths = [s + n for s, n in zip(prefix, rows, strict=True)]
    case = attention_case(rows, lengths, page=1, dtype=dtype, device=device, causal=True)
    draft = case.page_table.clone()
    for r, n in enumerate(rows):
        draft[r, :n] = case.page_table[r, prefix[r] : lengths[r]]
    whole, _ = check(case, backend, loads)
    shared = replace(case, cache_seqlens=int32(prefix, device), options={})
    tail = replace(case, page_table=draft, cache_seqlens=int32(rows, device))
    parts = run(shared, backend, loads, prefix="prefix_"), run(tail, backend, loads, prefix="draft_")
    merged = merge_state(*parts[0], *parts[1], backend=backend)
    assert_state_close(merged, case.reference(), plain=case.reference(dtype))
    chain = replace(case, options={"tree_mask": tree_mask([[i - 1 for i in range(n)] for n in rows], device)})
    assert_state_close(run(chain, backend, loads, prefix="chain_"), whole, plain=case.reference(dtype), factor=4.0)


@pytest.mark.parametrize("rule", [*RULES, "tree"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_read_counter_matches_the_recorder(backend, device, loads, rule, num_splits):
    """`reads` gains the K rows loaded per KV head; the recorder sees the same bytes, V likewise, each slot once."""
    case = attention_case(ROWS, [5, 137, 9, 70, 2], value_dim=24, device=device)
    if rule == "tree":
        case = case.with_options(tree_mask=tree_mask([random_tree(n, n) for n in ROWS], device))
    else:
        case = case.with_options(**RULES[rule])
    reads = torch.tensor([5, 70], device=device)
    run(case, backend, loads, reads=reads, num_splits=num_splits)
    gained = (reads - torch.tensor([5, 70], device=device)).tolist()
    options = {name: x for name, x in case.options.items() if name in ("causal", "window_size", "tree_mask")}
    visible = visible_keys(case.cu_seqlens_q, case.cache_seqlens, **options)
    needed = sum(int(matrix.any(0).sum()) for matrix in visible)
    spanned = sum(length for length, rows in zip([5, 137, 9, 70, 2], ROWS, strict=True) if rows)
    assert gained[0] == gained[1]
    assert needed <= gained[0] <= spanned
    if rule == "full":
        assert gained[0] == spanned == needed
    if loads is not None:
        assert loads["k_cache"].loaded_bytes == sum(gained) * 16 * 4
        assert loads["v_cache"].loaded_bytes == sum(gained) * 24 * 4
        assert loads["k_cache"].distinct_bytes == loads["k_cache"].loaded_bytes
        assert loads["v_cache"].distinct_bytes == loads["v_cache"].loaded_bytes
        assert len(loads["k_cache"].rows) == sum(gained)


def test_a_key_tile_is_loaded_once_per_row_tile(backend, device, loads):
    """Rows x group beyond one tile load the keys again, and the counter says so; the group shares its loads."""
    case = attention_case([100, 3], [50, 40], heads=(4, 2), page=16, device=device)
    reads = torch.zeros(2, dtype=torch.int64, device=device)
    run(case, backend, loads, reads=reads)
    times, rest = divmod(reads[0].item() - 40, 50)
    assert rest == 0
    assert 1 <= times <= 100 * 2 / 16
    if loads is not None:
        assert loads["k_cache"].loaded_bytes == reads.sum().item() * 16 * 4
        assert loads["k_cache"].distinct_bytes == 2 * 90 * 16 * 4
        assert sum(m * n for (m, n, _) in loads.dots.elements()) >= 2 * 2 * (200 * 50 + 6 * 40)


@pytest.mark.skipif(runtime.triton_mode() != "interpreted", reason="the recorder watches Triton's interpreter")
@pytest.mark.parametrize("rule", RULES)
def test_row_tiles_skip_keys_that_none_of_their_rows_sees(rule):
    """Each row tile loads the span from the first to the last key that one of its rows sees, and nothing else."""
    from cascade_lab.backends.triton.config import tile_for
    from cascade_lab.evidence.reads import record_loads

    rows, lengths, group = [150, 9, 70], [170, 40, 30], 2
    case = attention_case(rows, lengths, heads=(2, 1), dim=8, page=16, **RULES[rule])
    block_m = tile_for(max(rows) * group, 8, torch.float32).block_m
    assert block_m < max(rows) * group
    expected = 0
    for visible in visible_keys(case.cu_seqlens_q, case.cache_seqlens, **RULES[rule]):
        for tile in visible.repeat_interleave(group, 0).split(block_m):
            columns = tile.any(0).nonzero()
            expected += int(columns.max() - columns.min()) + 1 if len(columns) else 0
    reads = torch.zeros(1, dtype=torch.int64)
    with record_loads(reads=reads, **case.tensors) as record:
        run(case, "triton", reads=reads)
        assert record["k_cache"].loaded_bytes == record["v_cache"].loaded_bytes == expected * 8 * 4
    assert reads.item() == expected


@pytest.mark.skipif(runtime.triton_mode() != "interpreted", reason="the recorder watches Triton's interpreter")
def test_launches_and_stores():
    """One launch without splits, two with; o and lse are written exactly once and nothing else is."""
    from cascade_lab.evidence.reads import record_loads

    case = attention_case(ROWS, LENGTHS, dtype=torch.bfloat16)
    for splits, launches in ((1, 1), (3, 2)):
        with record_loads(**case.tensors) as record:
            run(case, "triton", num_splits=splits)
            assert len(record.launches) == launches
            written = sorted((t.stored_bytes, t.distinct_stored_bytes) for t in record.allocated() if t.stored_bytes)
        o, lse = 12 * 4 * 16 * 2, 12 * 4 * 4
        partials = [(3 * lse, 3 * lse), (3 * 2 * o, 3 * 2 * o)] if splits == 3 else []
        assert written == sorted([(lse, lse), (o, o), *partials])


@pytest.mark.skipif(runtime.triton_mode() != "interpreted", reason="the recorder watches Triton's interpreter")
def test_requests_and_rows_lie_on_the_long_axis_of_a_launch():
    """Requirement 12: a grid holds 65535 programs on its other axes, here KV heads and at most 1024 splits."""
    from cascade_lab.evidence.reads import Launch, record_loads

    case = attention_case([70, 1, 3], [90, 4, 8], heads=(4, 2))
    with record_loads(**case.tensors) as record:
        run(case, "triton", num_splits=3)
    kernel, merge = record.launches
    assert kernel == Launch("_attention_kernel", (3 * 2, 2, 3))
    assert (merge.kernel, merge.grid[1:]) == ("_merge_many_kernel", (1, 1))
    with pytest.raises(ValueError, match="num_splits: expected an integer from 1 to 1024, given 1025"):
        run(case, "triton", num_splits=1025)


@pytest.mark.parametrize(
    "which", ["q rows", "q heads", "k pages", "v pages", "k slots", "v slots", "k heads", "v heads"]
)
def test_addresses_are_64_bit(backend, device, loads, which, tmp_path):
    """Strides whose offsets pass 2**31 elements, in memory that is mapped but almost never touched."""
    if device.type != "cpu":
        pytest.skip("the sparse memory lives on the CPU")
    far = 2**31
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=3 * far + 4096, dtype=torch.bfloat16)
    case = attention_case([1, 3], [4, 3], heads=(4, 4), dim=8, page=4, dtype=torch.bfloat16, seed=7)
    assert case.page_table[:, 0].tolist() == [3, 2]
    tensor, dim = which.split()
    name = {"q": "q", "k": "k_cache", "v": "v_cache"}[tensor]
    x = getattr(case, name)
    axis = {"rows": 0, "pages": 0, "slots": 1, "heads": x.dim() - 2}[dim]
    assert x.shape[axis] == 4
    strides, step = [far] * x.dim(), 1
    for i in reversed([i for i in range(x.dim()) if i != axis]):
        strides[i] = step
        step *= x.shape[i]
    view = memory.as_strided(x.shape, strides)
    view.copy_(x)
    expected = run(case, backend, loads)
    state = run(replace(case, **{name: view}), backend, loads, prefix="far_")
    assert torch.equal(state.o, expected.o)
    assert torch.equal(state.lse, expected.lse)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's own maximum
@pytest.mark.parametrize("length", [5, 40])
def test_nan_query_makes_its_own_row_nan(backend, device, loads, length):
    """Nothing hides a NaN that a row really reads: o and lse of that row and head are NaN, all others are right."""
    case = attention_case([3, 2], [length, 9], device=device)
    expected = case.reference()
    case.q[1, 2, 3] = NAN
    nan_rows = torch.zeros(5, 4, dtype=torch.bool)
    nan_rows[1, 2] = True
    assert_state_close(run(case, backend, loads), expected, nan_rows=nan_rows)


def loss_of(state, seed):
    weight = random(*state[0].shape, seed=seed).to(state[0])
    kept = ~state[1].detach().isinf()
    return (state[0] * weight).sum() + (state[1] * weight[..., 0])[kept].sum()


@pytest.mark.parametrize("rule", [*RULES, "tree", "softcap", "negative scale"])
def test_gradients_match_float64_autograd(rule):
    """For q and both caches on the torch backend: shared pages add up, unread slots and empty rows get 0."""
    extra = {"softcap": {"softcap": 1.5}, "negative scale": {"softmax_scale": -0.5}}
    case = attention_case([3, 7, 0, 2], [10, 5, 4, 10], dtype=torch.float64, **(RULES | extra).get(rule, {}))
    if rule == "tree":
        trees = [random_tree(3, 1), random_tree(7, 2), random_tree(2, 3)]
        case = replace(case, cache_seqlens=int32([10, 7, 4, 10])).with_options(tree_mask=tree_mask(trees))
        case.page_table[1, :2] = case.page_table[0, :2]
    case.page_table[3, :2] = case.page_table[0, :2]
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k_cache, case.v_cache)]
    case = replace(case, **dict(zip(("q", "k_cache", "v_cache"), leaves, strict=True)))
    actual = torch.autograd.grad(loss_of(run(case, "torch"), seed=5), leaves)
    expected = torch.autograd.grad(loss_of(case.reference(), seed=5), leaves)
    for name, a, e in zip(("q", "k_cache", "v_cache"), actual, expected, strict=True):
        assert e.abs().max() > 0.01
        torch.testing.assert_close(a, e, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")
        assert not a.isnan().any()


def test_attention_gradcheck():
    case = attention_case([2, 1], [3, 4], heads=(2, 1), dim=3, page=2, dtype=torch.float64, causal=True)

    def merged(q, k, v):
        state = run(replace(case, q=q, k_cache=k, v_cache=v), "torch")
        return state.o, state.lse

    leaves = [x.nan_to_num(0.5).requires_grad_() for x in (case.q, case.k_cache, case.v_cache)]
    assert torch.autograd.gradcheck(merged, leaves)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_triton_says_that_it_has_no_gradient(name, backend, device, loads):
    case = attention_case([1, 2], [3, 4], device=device)
    needed = replace(case, **{name: getattr(case, name).clone().requires_grad_()})
    with pytest.raises(RuntimeError, match=r"gradient.*backend='torch'"):
        run(needed, backend)
    with torch.no_grad():
        assert_state_close(run(needed, backend, loads), case.reference())


def change(**changes):
    return changes


BAD = [
    (change(q=lambda x: x[0]), ValueError, ["q", "[T, H_q, D]", "(4, 16)"]),
    (change(q=lambda x: x.int()), TypeError, ["q", "float32", "int32"]),
    (change(q=lambda x: x.tolist()), TypeError, ["q", "tensor", "list"]),
    (change(q=lambda x: x[:, :3]), ValueError, ["q", "multiple", "2", "3"]),
    (change(q=lambda x: x[..., ::2].clone()), ValueError, ["k_cache", "8", "16"]),
    (change(q=lambda x: x.repeat(1, 1, 2)[..., ::2]), ValueError, ["q", "last dim", "2)"]),
    (change(k_cache=lambda x: x[0]), ValueError, ["k_cache", "[num_pages, page_size, H_kv, D]", "(4, 2, 16)"]),
    (change(k_cache=lambda x: x.half()), TypeError, ["k_cache", "float32", "float16"]),
    (change(k_cache=lambda x: x.to("meta")), ValueError, ["k_cache", "cpu", "meta"]),
    (change(k_cache=lambda x: x[:, :, :1]), ValueError, ["v_cache", "1", "2, 16)"]),
    (change(v_cache=lambda x: x[1:]), ValueError, ["v_cache", "k_cache"]),
    (change(v_cache=lambda x: x.bfloat16()), TypeError, ["v_cache", "float32", "bfloat16"]),
    (change(v_cache=lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2)), ValueError, ["v_cache", "last dim"]),
    (change(v_cache=lambda x: x[..., :0]), ValueError, ["v_cache", "D_v"]),
    (change(page_table=lambda x: x.long()), TypeError, ["page_table", "int32", "int64"]),
    (change(page_table=lambda x: x[0]), ValueError, ["page_table", "max_pages", "given"]),
    (change(page_table=lambda x: x[:1]), ValueError, ["cache_seqlens", "[1]", "(2,)"]),
    (change(page_table=lambda x: torch.full_like(x, 99)), ValueError, ["page_table", "99", "request 0"]),
    (change(page_table=lambda x: torch.where(x == x[1, 0], -1, x)), ValueError, ["page_table", "-1", "request 1"]),
    (change(cache_seqlens=lambda x: x.long()), TypeError, ["cache_seqlens", "int32", "int64"]),
    (change(cache_seqlens=lambda x: x[:, None]), ValueError, ["cache_seqlens", "[2]", "(2, 1)"]),
    (change(cache_seqlens=lambda x: x.float()), TypeError, ["cache_seqlens", "int32", "float32"]),
    (change(cache_seqlens=lambda x: x - 6), ValueError, ["cache_seqlens", "-1", "request 0"]),
    (change(cache_seqlens=lambda x: x * 100), ValueError, ["cache_seqlens", "500", "request 0"]),
    (change(cu_seqlens_q=lambda x: None), ValueError, ["cu_seqlens_q", "T = 5", "R = 2"]),
    (change(cu_seqlens_q=lambda x: x.long()), TypeError, ["cu_seqlens_q", "int32", "int64"]),
    (change(cu_seqlens_q=lambda x: x[:-1]), ValueError, ["cu_seqlens_q", "[3]", "(2,)"]),
    (change(cu_seqlens_q=lambda x: x - 1), ValueError, ["cu_seqlens_q", "T = 5", "[-1, 2, 4]"]),
    (change(cu_seqlens_q=lambda x: int32([0, 3, 4])), ValueError, ["cu_seqlens_q", "T = 5", "[0, 3, 4]"]),
    (change(cu_seqlens_q=lambda x: int32([0, 6, 5])), ValueError, ["cu_seqlens_q", "T = 5", "[0, 6, 5]"]),
    (change(max_seqlen_q=2), ValueError, ["max_seqlen_q", "3", "2"]),
    (change(max_seqlen_q=-1), ValueError, ["max_seqlen_q", "-1"]),
    (change(max_seqlen_q=3.0), TypeError, ["max_seqlen_q", "integer", "3.0"]),
    (change(softmax_scale=NAN), ValueError, ["softmax_scale", "finite", "nan"]),
    (change(softmax_scale=1e300), ValueError, ["softmax_scale", "float32", "1e+300"]),
    (change(softmax_scale=-(10**400)), ValueError, ["softmax_scale", "float32", "-1000"]),
    (change(softcap=1e-300), ValueError, ["softcap", "float32", "1e-300"]),
    (change(softmax_scale="0.1"), TypeError, ["softmax_scale", "number", "0.1"]),
    (change(softcap=-1.0), ValueError, ["softcap", "-1.0"]),
    (change(softcap=INF), ValueError, ["softcap", "finite", "inf"]),
    (change(softcap=None), TypeError, ["softcap", "number", "None"]),
    (change(causal=1), TypeError, ["causal", "bool", "1"]),
    (change(window_size=3), TypeError, ["window_size", "(left, right)", "3"]),
    (change(window_size=(1, 2, 3)), TypeError, ["window_size", "(left, right)", "(1, 2, 3)"]),
    (change(window_size=(-2, 0)), ValueError, ["window_size", "-1", "-2"]),
    (change(window_size=(0.5, 0)), TypeError, ["window_size", "integer", "0.5"]),
    (change(num_splits=0), ValueError, ["num_splits", "1", "0"]),
    (change(num_splits=True), TypeError, ["num_splits", "integer", "True"]),
    (change(out_dtype=torch.int32), TypeError, ["out_dtype", "float32", "int32"]),
    (change(reads=torch.zeros(2)), TypeError, ["reads", "int64", "float32"]),
    (change(reads=torch.zeros(4, dtype=torch.int64)), ValueError, ["reads", "[2]", "(4,)"]),
    (change(tree_mask=torch.zeros(5, 1)), TypeError, ["tree_mask", "int64", "float32"]),
    (change(tree_mask=torch.zeros(4, 1, dtype=torch.int64)), ValueError, ["tree_mask", "T = 5", "(4, 1)"]),
    (change(tree_mask=torch.zeros(5, dtype=torch.int64)), ValueError, ["tree_mask", "[T, words]", "(5,)"]),
    (change(tree_mask=torch.zeros(5, 1, dtype=torch.int64), causal=True), ValueError, ["tree_mask", "causal"]),
    (
        change(tree_mask=torch.zeros(5, 1, dtype=torch.int64), window_size=(1, 1)),
        ValueError,
        ["tree_mask", "window_size", "(1, 1)"],
    ),
    (change(tail_seqlens=int32([1, 1])), ValueError, ["tail_seqlens", "tree_mask"]),
    (
        change(tree_mask=torch.zeros(5, 1, dtype=torch.int64), tail_seqlens=int32([6, 1])),
        ValueError,
        ["tail_seqlens", "5", "6", "request 0"],
    ),
    (
        change(tree_mask=torch.zeros(5, 1, dtype=torch.int64), tail_seqlens=int32([1, -1])),
        ValueError,
        ["tail_seqlens", "-1", "request 1"],
    ),
    (
        change(tree_mask=torch.zeros(5, 1, dtype=torch.int64), tail_seqlens=torch.tensor([1, 1])),
        TypeError,
        ["tail_seqlens", "int32", "int64"],
    ),
    (change(backend="cuda"), ValueError, ["backend", "triton", "cuda"]),
]


@pytest.mark.parametrize(
    ("changes", "error", "fragments"), BAD, ids=[f"{i}-{'+'.join(b[0])}" for i, b in enumerate(BAD)]
)
def test_bad_input_is_refused(backend, device, changes, error, fragments):
    """The message names the argument, what was expected and what was given; nothing has run and nothing changed."""
    case = attention_case([3, 2], [5, 11], device=device)
    arguments = {"backend": backend} | case.tensors
    for key, value in changes.items():
        x = value(arguments[key]) if callable(value) else value
        arguments[key] = x.to(device) if isinstance(x, torch.Tensor) and not x.is_meta else x
    before = {key: bytes_of(x) for key, x in case.tensors.items()}
    with pytest.raises(error) as caught:
        attention(**arguments)
    for fragment in fragments:
        assert (device.type if fragment == "cpu" else fragment) in str(caught.value)
    assert str(caught.value).startswith(fragments[0])
    for key, content in before.items():
        assert torch.equal(bytes_of(case.tensors[key]), content), f"{key} was modified"


def test_a_mask_too_narrow_for_its_tail_is_refused(backend, device):
    case = attention_case([70, 2], [80, 9], device=device)
    with pytest.raises(ValueError, match=r"tail_seqlens.*64.*70"):
        run(case.with_options(tree_mask=torch.zeros(72, 1, dtype=torch.int64, device=device)), backend)


def test_tensors_without_data_are_refused(backend):
    """Compiled kernels have no tensors but a GPU's, and say so first."""
    case = attention_case([3, 2], [5, 11])
    compiled = backend == "triton" and runtime.triton_mode() == "compiled"
    error, message = (RuntimeError, "on meta tensors") if compiled else (ValueError, r"q: .*data.*meta")
    with pytest.raises(error, match=message):
        attention(**{name: x.to("meta") for name, x in case.tensors.items()}, backend=backend)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_triton_refuses_float64(backend, device):
    with pytest.raises(TypeError, match=r"q: .*float64"):
        run(attention_case([1], [3], dtype=torch.float64, device=device), backend)


def test_shared_pages_are_read_by_each_request(backend, device, loads):
    """Two requests over one prefix: the same physical pages, distinct queries, distinct lengths."""
    case = attention_case([2, 3], [12, 9], page=4, device=device, causal=True)
    case.page_table[1, :2] = case.page_table[0, :2]
    check(case, backend, loads)
    arguments = (case.q, case.k_cache, case.v_cache, case.page_table, case.cache_seqlens)
    full = attention_oracle(*arguments, cu_seqlens_q=offsets([2, 3]), causal=True)
    assert full.o.isfinite().all()


@pytest.mark.parametrize(("size", "right"), [(4e37, 4e37), (1e38, math.inf)])
def test_the_largest_values_that_add_up(backend, device, size, right):
    """F10: 8 equal keys hold values up to 3.4e38 / 8, beside a request of one key, which holds what float32 does."""
    q = torch.zeros(2, 1, 8, device=device)
    v = torch.full((2, 8, 1, 8), size, device=device)
    table, lengths = int32([[0], [1]], device), int32([8, 1], device)
    state = attention(q, torch.zeros_like(v), v, table, lengths, backend=backend)
    torch.testing.assert_close(state.o[0], torch.full_like(state.o[0], right))
    torch.testing.assert_close(state.o[1], torch.full_like(state.o[1], size))
    torch.testing.assert_close(state.lse[:, 0], torch.tensor([math.log(8), 0.0], device=device))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_what_the_precision_of_float32_products_does_to_the_torch_backend(precision):
    """F8: float32 by default; with a lower precision off by no more than bfloat16's 2^-8 of each product."""
    case = attention_case([40, 3], [300, 70], heads=(4, 2), dim=64, page=16, causal=True)
    exact, largest = case.reference(), float(case.q.norm(dim=-1).max() * case.k_cache.nan_to_num().norm(dim=-1).max())
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        state = run(case, "torch")
    finally:
        torch.set_float32_matmul_precision(before)
    bound = 2e-6 if precision == "highest" else 2.0**-8 * 64**-0.5 * largest
    assert float((state.lse.double() - exact.lse).abs().max()) <= bound * max(1.0, float(exact.lse.abs().max()))
