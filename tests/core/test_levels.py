"""Levels: every plan gives the answer of the unrolled paths, and the ledger counts what kernels load."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
import torch

from cascade_lab import DraftTree, Level, State, VerifyBatch, attention, cascade_attention, ledger, runtime
from cascade_lab.drafts import PLANS, ROWS
from cascade_lab.evidence.reference import assert_state_close, attention_oracle, visible_keys
from cascade_lab.levels import PassShape
from cascade_lab.paging import split_kv_cache
from tests.cases import attention_case, int32, offsets, poisoned_cache, random, run
from tests.verify import (
    CHAIN,
    FORK,
    SHUFFLED,
    STAR,
    VerifyCase,
    check_levels,
    path_to,
    row_ends,
    run_levels,
    verify_case,
    virtual_paths,
)

PREFIXES, FORESTS = [13, 0, 5, 16], [FORK, SHUFFLED, None, STAR]


def branches(topk: int, steps: int) -> list[int]:
    """Parents of `topk` disjoint chains of `steps` nodes, chain after chain."""
    return [-1 if i % steps == 0 else i - 1 for i in range(topk * steps)]


def branch_batch(batch: int, topk: int, length: int, steps: int, rows: str = "branch", page: int = 16) -> VerifyBatch:
    return VerifyBatch([length] * batch, [DraftTree.branches(topk, steps)] * batch, page, rows)


@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_equals_the_unrolled_paths(backend, device, loads, plan, rows, page):
    case = verify_case(PREFIXES, FORESTS, rows=rows, page=page, heads=(2, 1), device=device)
    check_levels(case, case.batch.levels(plan), backend, loads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_half_precision_partials_stay_in_float32(backend, device, loads, plan, dtype):
    case = verify_case([9, 0, 6], [CHAIN, STAR, None], dtype=dtype, device=device)
    check_levels(case, case.batch.levels(plan), backend, loads)
    state = check_levels(case, case.batch.levels(plan), backend, loads, out_dtype=torch.float32)
    assert_state_close(state, case.oracle(), atol=2e-2 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("plan", PLANS)
def test_float64_on_the_torch_backend(plan):
    case = verify_case([70, 0, 5, 300], [*FORESTS], page=16, shared=0, dtype=torch.float64)
    state = check_levels(case, case.batch.levels(plan), "torch")
    assert state.lse.dtype == torch.float64


@pytest.mark.parametrize("options", [{"softmax_scale": 0.7}, {"softcap": 1.5}, {"num_splits": 3}], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_options_hold_for_every_level(backend, device, loads, plan, options):
    case = verify_case([9, 4], [FORK, CHAIN], heads=(2, 1), value_dim=24, device=device)
    check_levels(case, case.batch.levels(plan), backend, loads, **options)


@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_splits_of_long_levels_join_the_same_reduction(backend, device, loads, num_splits):
    case = verify_case([150, 70], [FORK, CHAIN], heads=(2, 1), page=16, device=device)
    levels = case.batch.levels("cascade")
    counted = torch.zeros(1, dtype=torch.int64, device=device)
    check_levels(case, levels, backend, loads, num_splits=num_splits, reads=counted)
    assert counted.tolist() == [ledger(levels).kv_tokens] == [150 + 70 + 11 + 6]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("plan", PLANS)
def test_three_levels_over_a_shared_system_prompt(backend, device, loads, plan, rows):
    case = verify_case([9, 8, 14], [FORK, CHAIN, SHUFFLED], rows=rows, page=4, shared=8, device=device)
    levels = case.batch.levels(plan)
    assert len(levels) == (3 if plan == "cascade" else 1)
    check_levels(case, levels, backend, loads)


def test_four_levels_of_hand_made_page_tables(backend, device, loads):
    """Keys dealt to levels at will, in pages of 4 and of 1 and in any order, give the state of one pass."""
    keys = attention_case([3, 2], [12, 12], page=4, device=device)
    table = keys.page_table
    cu = offsets([3, 2], device)
    first = Level(cu, table[:, :1], int32([4, 4], device), 4, name="first page")
    # the second page from its end, token by token, for each row by itself
    slots = table[[0, 0, 0, 1, 1], 1:2] * 4 + int32([[3, 2, 1, 0]], device)
    second = Level(offsets([1] * 5, device), slots, int32([4] * 5, device), 1, name="second, reversed")
    third = [
        Level(cu, table[:, 2:3] * 4 + int32([[0, 2, 1, 3]], device)[:, part], int32([2, 2], device), 1, name="half")
        for part in (slice(0, 2), slice(2, 4))
    ]
    state = cascade_attention(keys.q, keys.k_cache, keys.v_cache, [third[1], first, second, third[0]], backend=backend)
    assert_state_close(state, keys.reference())


@pytest.mark.parametrize("plan", PLANS)
def test_storage_order_moves_rows_and_nothing_else(plan):
    """All 24 orders of a tree: row for row the state of the first order."""
    parents = [-1, 0, 1, 1]
    case = verify_case([6, 3], [parents, CHAIN], dtype=torch.float64)
    drafts = case.batch.draft_slots(0)
    first = run_levels(case, case.batch.levels(plan), "torch")
    for order in permutations(range(4)):
        moved = [0] * 4
        for i, parent in enumerate(parents):
            moved[order[i]] = -1 if parent < 0 else order[parent]
        batch = VerifyBatch([6, 3], [DraftTree(moved), DraftTree(CHAIN)], 4)
        k_cache, v_cache, q = case.k_cache.clone(), case.v_cache.clone(), case.q.clone()
        place = torch.tensor(order)
        for new, old in ((k_cache, case.k_cache), (v_cache, case.v_cache)):
            new.view(-1, 2, 16)[drafts[place]] = old.view(-1, 2, 16)[drafts]
        q[place] = case.q[:4]
        state = cascade_attention(q, k_cache, v_cache, batch.levels(plan), backend="torch")
        back = torch.cat((place, torch.tensor([4, 5, 6])))
        assert_state_close(State(state.o[back], state.lse[back]), first)


# the other plans have no mask, and would interpret 70 programs for nothing
@pytest.mark.parametrize(
    ("backend", "plan"), [*(("torch", plan) for plan in PLANS), ("triton", "fused")], indirect=["backend"]
)
def test_trees_of_more_than_64_nodes(backend, device, loads, plan):
    parents = [(i - 1) // 2 if i else -1 for i in range(70)][::-1]
    parents = [-1 if p < 0 else 69 - p for p in parents]
    case = verify_case([3, 2], [parents, CHAIN], heads=(1, 1), device=device)
    check_levels(case, case.batch.levels(plan), backend, loads)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_caches_that_interleave_k_and_v(backend, device, loads, plan, page):
    """Views of one 5-D allocation, pages of K and V in turn; single tokens are addressed across the gaps."""
    case = verify_case([9, 0, 6], [FORK, CHAIN, SHUFFLED], page=page, interleaved=True, device=device)
    assert case.k_cache.untyped_storage().data_ptr() == case.v_cache.untyped_storage().data_ptr()
    check_levels(case, case.batch.levels(plan), backend, loads)


@pytest.mark.parametrize("layout", ["heads first", "interleaved", "padded"])
def test_strided_caches(backend, device, loads, layout):
    case = verify_case([9, 6], [FORK, CHAIN], device=device)
    caches = []
    for cache in (case.k_cache, case.v_cache):
        view = poisoned_cache(len(cache), 4, 2, 16, torch.float32, device, layout)
        caches.append(view.copy_(cache))
    case = replace(case, k_cache=caches[0], v_cache=caches[1])
    for plan in ("naive", "cascade"):
        state = cascade_attention(case.q, *caches, case.batch.levels(plan), backend=backend)
        assert_state_close(state, case.oracle(), plain=case.oracle(torch.float32))


def test_pages_too_far_apart_to_number_are_refused():
    case = verify_case([9], [FORK], page=4)
    k_cache = poisoned_cache(len(case.k_cache), 8, 2, 16, torch.float32, "cpu", "packed")[:, :4]
    with pytest.raises(ValueError, match=r"levels\[1\] 'draft': k_cache, v_cache: expected both with pages the same"):
        cascade_attention(case.q, k_cache, case.v_cache, case.batch.levels("cascade"))


def test_a_cache_of_one_page_has_no_distance_between_pages(backend, device, loads):
    """The stride of a dimension of size 1 means nothing, and may be anything."""
    case = verify_case([2], [[-1]], page=4, spare_pages=0, device=device)
    apart = random(3, 10, 2, 16, seed=0, device=device)
    k_cache = torch.as_strided(apart, (1, 4, 2, 16), (333, 32, 16, 1)).copy_(case.k_cache)
    assert k_cache.stride(0) == 333
    state = cascade_attention(case.q, k_cache, case.v_cache, case.batch.levels("cascade"), backend=backend)
    assert_state_close(state, case.oracle())


def test_rows_without_keys_and_padding_requests(backend, device, loads):
    """Lengths [9, 4, 6, 0]: the last row is empty on every level, its neighbours are what they are without it."""
    case = attention_case([1, 1, 1, 1], [9, 4, 6, 0], page=4, device=device)
    whole = (case.cache_seqlens // 4 * 4).to(torch.int32)
    tail = (case.cache_seqlens - whole).to(torch.int32)
    rest = torch.gather(case.page_table, 1, (whole // 4).long()[:, None])
    ones = offsets([1] * 4, device)
    levels = [Level(ones, case.page_table, whole, 4), Level(ones, rest, tail, 4)]
    state = cascade_attention(case.q, case.k_cache, case.v_cache, levels, backend=backend)
    assert_state_close(state, case.reference())
    assert torch.equal(state.o[3], torch.zeros(4, 16, device=device))
    assert state.lse[3].tolist() == [-math.inf] * 4
    three = offsets([1] * 3, device)
    alone = [Level(three, level.page_table[:3], level.cache_seqlens[:3], 4) for level in levels]
    without = cascade_attention(case.q[:3], case.k_cache, case.v_cache, alone, backend=backend)
    assert torch.equal(without.o, state.o[:3])
    assert torch.equal(without.lse, state.lse[:3])


@pytest.mark.parametrize("plan", PLANS)
def test_each_request_of_a_batch_equals_its_own_run(backend, device, loads, plan):
    case = verify_case([3, 17, 64], [[-1, 0], [-1, -1], [1, -1]], page=16, device=device)
    state = check_levels(case, case.batch.levels(plan), backend, loads)
    for r in range(3):
        tree = case.batch.trees[r]
        single = VerifyBatch([(3, 17, 64)[r]], [tree], 16, page_table=case.batch.page_table[r : r + 1], device=device)
        rows = slice(2 * r, 2 * r + 2)
        alone = cascade_attention(case.q[rows], case.k_cache, case.v_cache, single.levels(plan), backend=backend)
        assert_state_close(alone, State(state.o[rows], state.lse[rows]))


@pytest.mark.parametrize("rows", ["branch", "node"])
def test_one_branch_is_one_causal_call(backend, device, loads, rows):
    """topk = 1: a chain over its prefix is a causal pass with cache_seqlens = L + S, on every plan."""
    case = verify_case([9, 5], [CHAIN, CHAIN], rows=rows, page=4, heads=(2, 1), device=device)
    batch = case.batch
    lengths = int32([12, 8], device)
    causal = attention(
        case.q, case.k_cache, case.v_cache, batch.page_table, lengths,
        cu_seqlens_q=offsets([3, 3], device), causal=True, backend=backend,
    )  # fmt: skip
    assert_state_close(causal, case.oracle())
    for plan in PLANS:
        assert_state_close(run_levels(case, batch.levels(plan), backend, loads), causal)
    if rows == "branch":
        # not only equal to it: the naive plan is that call, and no plan reads more or less
        (naive,) = batch.levels("naive")
        assert naive.causal
        assert (naive.cu_seqlens_q.tolist(), naive.cache_seqlens.tolist()) == ([0, 3, 6], [12, 8])
        assert {ledger(batch.levels(plan)).kv_tokens for plan in PLANS} == {12 + 8}


def test_a_node_on_two_branches_has_a_row_in_each(backend, device, loads):
    """Branches of FORK are 0, 1, 3 and 0, 2, 4: with one query, both rows of node 0 have one state."""
    case = verify_case([6, 3], [FORK, CHAIN], rows="branch", heads=(2, 1), device=device)
    assert case.batch.row_nodes.tolist() == [0, 1, 3, 0, 2, 4, 0, 1, 2]
    assert case.batch.row_counts == (6, 3)
    assert case.batch.positions.tolist() == [6, 7, 8, 6, 7, 8, 3, 4, 5]
    per_node = verify_case([6, 3], [FORK, CHAIN], heads=(2, 1), device=device)
    node = case.batch.row_nodes + torch.tensor([0] * 6 + [len(FORK)] * 3, device=device)
    one_query = replace(case, q=per_node.q[node])
    expected = run_levels(per_node, per_node.batch.levels("fused"), backend, loads)
    for plan in PLANS:
        state = run_levels(one_query, case.batch.levels(plan), backend)
        assert_state_close(state, State(expected.o[node], expected.lse[node]))
        assert_state_close(State(state.o[0], state.lse[0]), State(state.o[3], state.lse[3]))


def test_a_branch_that_sees_its_later_drafts_is_noticed():
    """The check can fail: without the causal mask the first row of a branch sees the whole branch."""
    case = verify_case([5, 2], [branches(2, 3), CHAIN], rows="branch", dtype=torch.float64)
    right = case.oracle()
    for plan in ("naive", "cascade"):
        *above, last = case.batch.levels(plan)
        wrong = run_levels(case, [*above, replace(last, causal=False)], "torch")
        apart = (wrong.o - right.o).abs().amax((1, 2))
        # the last row of a branch sees all of it either way
        assert apart[[2, 5, 8]].max() < 1e-12
        assert apart[[0, 1, 3, 4, 6, 7]].min() > 0.01


def test_a_level_that_shows_siblings_is_noticed():
    """The check can fail: the fused plan without its mask is far from the unrolled paths."""
    case = verify_case([5], [STAR], dtype=torch.float64)
    (fused,) = case.batch.levels("fused")
    wrong = run_levels(case, [replace(fused, tree_mask=None, tail_seqlens=None)], "torch")
    right = case.oracle()
    assert (wrong.o - right.o).abs().amax() > 0.1
    with pytest.raises(AssertionError, match="differs by"):
        assert_state_close(wrong, right)


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_equal_those_of_the_unrolled_paths(plan):
    case = verify_case([6, 0], [FORK, CHAIN], rows="node", dtype=torch.float64)
    seen = torch.cat([torch.cat((case.batch.prefix_slots(r), case.batch.draft_slots(r))) for r in range(2)])
    # slots of every token of every row's own sequence, so that dense gradients can be summed per slot
    own = []
    for r, parents in enumerate((FORK, CHAIN)):
        prefix, drafts = case.batch.prefix_slots(r), case.batch.draft_slots(r)
        own += [torch.cat((prefix, drafts[path_to(parents, node)])) for node in range(len(parents))]
    q, k, v, keys, values = (
        x.clone().requires_grad_() for x in (case.q, case.k_cache, case.v_cache, case.keys, case.values)
    )
    state = cascade_attention(q, k, v, case.batch.levels(plan), backend="torch")
    weight_o, weight_lse = random(*state.o.shape, seed=5).double(), random(*state.lse.shape, seed=6).double()
    ((state.o * weight_o).sum() + (state.lse * weight_lse).sum()).backward()
    dense_q = case.q.clone().requires_grad_()
    table = int32([[row] for row in range(len(q))])
    dense = attention_oracle(dense_q, keys, values, table, case.lengths)
    ((dense.o * weight_o).sum() + (dense.lse * weight_lse).sum()).backward()
    torch.testing.assert_close(q.grad, dense_q.grad)
    for grad, dense_grad in ((k.grad, keys.grad), (v.grad, values.grad)):
        expected = torch.zeros_like(grad).view(-1, 2, 16)
        for row, slots in enumerate(own):
            expected.index_add_(0, slots, dense_grad[row, : len(slots)])
        torch.testing.assert_close(grad.view(-1, 2, 16), expected)
        assert (grad.view(-1, 2, 16)[seen] != 0).any(-1).all()


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_reach_interleaved_caches(plan):
    """Through views that step over the gaps between pages, as through packed pages."""
    grads = []
    for interleaved in (False, True):
        case = verify_case([6, 3], [FORK, CHAIN], interleaved=interleaved, dtype=torch.float64)
        if interleaved:
            leaf = torch.stack((case.k_cache, case.v_cache), dim=1).requires_grad_()
            k_cache, v_cache = split_kv_cache(leaf)
        else:
            leaf = torch.stack((case.k_cache, case.v_cache)).requires_grad_()
            k_cache, v_cache = leaf
        state = cascade_attention(case.q, k_cache, v_cache, case.batch.levels(plan), backend="torch")
        (state.o.sin().sum() + state.lse.sin().sum()).backward()
        grads.append(leaf.grad.transpose(0, 1) if interleaved else leaf.grad)
    assert grads[0].abs().sum() > 0
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("plan", PLANS)
def test_gradcheck(plan):
    case = verify_case([3, 0], [[-1, 0, 0], [-1]], heads=(2, 1), dim=2, page=2, dtype=torch.float64, spare_pages=0)
    levels = case.batch.levels(plan)
    # finite differences cannot step from NaN, and slots that nobody reads have gradient 0 either way
    caches = (x.nan_to_num().requires_grad_() for x in (case.k_cache, case.v_cache))
    function = lambda q, k, v: tuple(cascade_attention(q, k, v, levels, backend="torch"))  # noqa: E731
    assert torch.autograd.gradcheck(function, (case.q.requires_grad_(), *caches))


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_gradients_under_triton_are_refused(backend, device):
    case = verify_case([3], [CHAIN], device=device)
    with pytest.raises(RuntimeError, match="attention has no gradient on backend='triton'"):
        cascade_attention(
            case.q.requires_grad_(), case.k_cache, case.v_cache, case.batch.levels("cascade"), backend=backend
        )


def hand_count(case: VerifyCase, forests, plan: str, rows: str) -> int:
    """KV tokens of a plan, by adding up sets, with all rows of a request in one tile."""
    total = 0
    for r, parents in enumerate(forests):
        length = len(case.batch.prefix_slots(r))
        paths = [len(path) for path in virtual_paths(parents, rows)]
        if plan == "naive":
            total += sum(length + path for path in paths)
        elif plan == "cascade":
            total += length + sum(paths)
        else:
            total += length + len(parents)
    return total


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("plan", PLANS)
def test_four_routes_to_the_same_count(backend, device, loads, plan, rows, heads):
    """By hand, by ledger, by the kernel's counter and by the recorder of its addresses: the same integers."""
    forests = [FORK, SHUFFLED, STAR]
    case = verify_case([13, 0, 5], forests, rows=rows, heads=heads, value_dim=8, device=device)
    levels = case.batch.levels(plan)
    counted = torch.tensor([7] * heads[1], device=device)
    check_levels(case, levels, backend, loads, reads=counted)
    expected = hand_count(case, forests, plan, rows)
    book = ledger(levels, num_q_heads=heads[0], num_kv_heads=heads[1])
    assert (counted - 7).tolist() == [expected] * heads[1]
    assert book.pairs == sum(int(length) for length in case.lengths)
    assert book.kv_tokens == book.tile_tokens(128) == expected
    unique = 13 + 0 + 5 + sum(map(len, forests))
    assert book.kv_tokens_unique == unique
    if loads is None:
        return
    for cache, width in (("k_cache", 16), ("v_cache", 8)):
        per_token = heads[1] * width * 4
        assert loads[cache].loaded_bytes == expected * per_token
        assert loads[cache].distinct_bytes == unique * per_token


@pytest.mark.parametrize("plan", PLANS)
def test_requests_with_more_rows_than_a_tile_read_again(device, loads, backend, plan):
    """35 rows x 4 heads are 140 packed rows, two tiles of 128; a prefix is then read twice."""
    forests = [branches(7, 5), FORK]
    case = verify_case([11, 2], forests, heads=(4, 1), device=device)
    levels = case.batch.levels(plan)
    counted = torch.zeros(1, dtype=torch.int64, device=device)
    check_levels(case, levels, backend, loads, reads=counted)
    book = ledger(levels, num_q_heads=4, num_kv_heads=1)
    again = {"naive": 0, "cascade": 11, "fused": 11 + 35}[plan]
    assert book.kv_tokens == hand_count(case, forests, plan, "node")
    assert book.tile_tokens(128) == book.kv_tokens + again
    if backend == "triton":
        assert counted.tolist() == [book.tile_tokens(128)]
    if loads is not None:
        assert loads["k_cache"].loaded_bytes == book.tile_tokens(128) * 16 * 4


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_small_tiles_read_the_prefix_once_per_tile(device, loads, backend):
    """Head dim 320 runs in tiles of 32 packed rows: the ledger takes that number and gives the kernel's count."""
    from cascade_lab.backends.triton.config import tile_for

    case = verify_case([11, 2], [branches(2, 5), CHAIN], heads=(4, 1), dim=320, device=device)
    levels = case.batch.levels("cascade")
    blocks = [tile_for(rows * 4, 320, torch.float32).block_m for rows in (10, 1)]
    assert blocks == [32, 16]
    counted = torch.zeros(1, dtype=torch.int64, device=device)
    check_levels(case, levels, backend, loads, reads=counted)
    book = ledger(levels, num_q_heads=4, num_kv_heads=1)
    assert counted.tolist() == [book.tile_tokens(32)] == [2 * 11 + 2 + 2 * 15 + 6]


@pytest.mark.parametrize(("length", "steps", "naive", "cascade"), [(1000, 3, 4012, 1012), (2000, 5, 8020, 2020)])
def test_the_worked_numbers(length, steps, naive, cascade):
    """The first two count alike with the S rows of a branch and with its last alone; only the pairs differ."""
    pairs = {"branch": 4 * (steps * length + steps * (steps + 1) // 2), "leaf": naive}
    for rows in ("branch", "leaf"):
        books = {plan: ledger(branch_batch(1, 4, length, steps, rows).levels(plan)) for plan in PLANS}
        reads = {plan: book.kv_tokens for plan, book in books.items()}
        assert reads == {"naive": naive, "cascade": cascade, "fused": cascade}
        assert {book.pairs for book in books.values()} == {pairs[rows]}
        assert {book.kv_tokens_unique for book in books.values()} == {cascade}
    nodes = {plan: ledger(branch_batch(1, 4, length, steps, "node").levels(plan)) for plan in PLANS}
    assert nodes["naive"].kv_tokens == nodes["naive"].pairs == pairs["branch"]


@pytest.mark.parametrize(("length", "steps", "naive", "cascade"), [(1000, 3, 4012, 1012), (2000, 5, 8020, 2020)])
def test_the_plan_by_branches_built_by_hand(backend, device, loads, length, steps, naive, cascade):
    """topk = 4 virtual requests of S causal rows over L + S keys, against S topk rows over L and S causal rows over S.

    Levels made of slot numbers alone give the counts of the worked case by ledger, counter and recorder, topk (S L +
    S (S + 1) / 2) pairs under both, the state of the unrolled paths, and are what `VerifyBatch` builds.
    """
    forests = [branches(4, steps)]
    case = verify_case([length], forests, rows="branch", page=1, heads=(1, 1), spare_pages=0, device=device)
    prefix = torch.arange(length)
    drafts = length + torch.arange(4 * steps).view(4, steps)
    by_branch = offsets([steps] * 4, device)
    expanded = torch.cat((prefix.expand(4, -1), drafts), 1).int().to(device)
    plans = {
        "naive": [Level(by_branch, expanded, int32([length + steps] * 4, device), 1, causal=True)],
        "cascade": [
            Level(offsets([4 * steps], device), prefix[None].int().to(device), int32([length], device), 1),
            Level(by_branch, drafts.int().to(device), int32([steps] * 4, device), 1, causal=True),
        ],
    }
    for plan, reads in (("naive", naive), ("cascade", cascade)):
        counted = torch.zeros(1, dtype=torch.int64, device=device)
        before = loads["k_cache"].loaded_bytes if loads is not None and "k_cache" in loads.tensors else 0
        check_levels(case, plans[plan], backend, loads, reads=counted)
        book = ledger(plans[plan])
        assert counted.tolist() == [reads]
        assert book.kv_tokens == book.tile_tokens(128) == reads
        assert book.kv_tokens_unique == length + 4 * steps
        assert book.pairs == 4 * (steps * length + steps * (steps + 1) // 2)
        if loads is not None:
            assert loads["k_cache"].loaded_bytes - before == reads * 16 * 4
        for ours, built in zip(plans[plan], case.batch.levels(plan), strict=True):
            for name in ("cu_seqlens_q", "page_table", "cache_seqlens"):
                assert torch.equal(getattr(ours, name), getattr(built, name)), name
            assert (built.page_size, built.causal, built.tree_mask) == (1, ours.causal, None)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("topk", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 3])
def test_closed_forms(batch, topk, steps, page):
    rows_of = {"branch": topk * steps, "leaf": topk}
    for length, rows in product((0, 37, 64), rows_of):
        plans = branch_batch(batch, topk, length, steps, rows, page=page)
        per_branch = steps * length + steps * (steps + 1) // 2 if rows == "branch" else length + steps
        assert plans.num_rows == batch * rows_of[rows]
        books = {plan: ledger(plans.levels(plan)) for plan in PLANS}
        assert books["naive"].kv_tokens == batch * topk * (length + steps)
        assert books["cascade"].kv_tokens == batch * length + batch * topk * steps
        assert books["fused"].kv_tokens == batch * length + batch * topk * steps
        assert {book.kv_tokens_unique for book in books.values()} == {batch * (length + topk * steps)}
        assert {book.pairs for book in books.values()} == {batch * topk * per_branch}
        assert isinstance(books["naive"].kv_tokens, int)
        assert [level.kv_tokens for level in books["cascade"].levels] == [batch * length, batch * topk * steps]


def test_counts_beyond_32_bits_are_exact():
    level = Level(int32([0, 1, 3]), int32([[0], [1]]), int32([2**31 - 1, 2**31 - 2]), 2**31 - 1)
    book = ledger([level, level, level], num_q_heads=64, num_kv_heads=8)
    assert book.kv_tokens == 3 * (2**32 - 3)
    assert book.pairs == 3 * (2**31 - 1 + 2 * (2**31 - 2))
    assert book.kv_tokens_unique == 2**32 - 3
    assert book.kv_bytes(128, torch.bfloat16) == 3 * (2**32 - 3) * 8 * 256 * 2


@pytest.mark.parametrize("nodes", [1, 2, 9, 65])
def test_one_row_per_node_reads_the_sum_of_depths(nodes):
    """Between 2N - 1 for a star under one root and N(N+1)/2 for a chain, any other rooted tree in between."""
    star, chain = [-1] + [0] * (nodes - 1), list(range(-1, nodes - 1))
    binary = [(i - 1) // 2 if i else -1 for i in range(nodes)]
    drafts = {}
    for name, parents in (("star", star), ("chain", chain), ("binary", binary)):
        batch = VerifyBatch([7], [DraftTree(parents)], 4)
        level = ledger(batch.levels("cascade")).levels[1]
        assert level.kv_tokens == sum(len(path_to(parents, i)) for i in range(nodes))
        drafts[name] = level.kv_tokens
    assert drafts["star"] == 2 * nodes - 1
    assert drafts["chain"] == nodes * (nodes + 1) // 2
    assert drafts["star"] <= drafts["binary"] <= drafts["chain"]


@pytest.mark.parametrize("rows", ROWS)
def test_disjoint_chains_with_a_virtual_request_per_branch_leaf_or_node(rows):
    batch = branch_batch(1, 4, 10, 3, rows)
    expected = {"branch": 4 * 3, "leaf": 4 * 3, "node": 4 * 3 * 4 // 2}[rows]
    assert ledger(batch.levels("cascade")).levels[1].kv_tokens == expected


@pytest.mark.parametrize("shared", [0, 4])
@pytest.mark.parametrize("rows", ROWS)
def test_a_cascade_moves_reads_and_leaves_pairs(rows, shared):
    prefixes, forests = [13, 4, 5, 16], FORESTS
    batch = VerifyBatch(prefixes, [p and DraftTree(p) for p in forests], 4, rows, shared_prefix_len=shared)
    books = {plan: ledger(batch.levels(plan)) for plan in PLANS}
    pairs = sum(
        length + len(path_to(parents, node))
        for length, parents in zip(prefixes, forests, strict=True)
        for node in row_ends(parents, rows)
    )
    assert {plan: book.pairs for plan, book in books.items()} == dict.fromkeys(PLANS, pairs)
    active = [(n, p) for n, p in zip(prefixes, forests, strict=True) if p is not None]
    unique = shared + sum(n - shared + len(p) for n, p in active)
    assert {book.kv_tokens_unique for book in books.values()} == {unique}
    virtual = [(n, len(path)) for n, p in active for path in virtual_paths(p, rows)]
    assert books["naive"].kv_tokens == sum(n + path for n, path in virtual)
    assert books["fused"].kv_tokens == sum(n + len(p) for n, p in active)
    assert books["cascade"].kv_tokens == shared + sum(n - shared for n, _ in active) + sum(path for _, path in virtual)


def test_whole_pages_are_a_separate_term():
    """Lengths 13, 4, 16 in pages of 4 are 16 + 4 + 16 paged; the request without rows (length 5) counts nowhere."""
    batch = VerifyBatch([13, 4, 5, 16], [DraftTree([-1]), DraftTree([-1]), None, DraftTree([-1])], 4)
    prefix, draft = ledger(batch.levels("cascade")).levels
    assert (prefix.name, prefix.kv_tokens, prefix.kv_tokens_paged, prefix.kv_tokens_unique) == ("prefix", 33, 36, 33)
    assert (draft.name, draft.kv_tokens, draft.kv_tokens_paged, draft.kv_tokens_unique) == ("draft", 3, 3, 3)
    assert ledger(batch.levels("fused")).kv_tokens_paged == 16 + 8 + 20


@pytest.mark.parametrize("rows", ROWS)
def test_copied_tails_are_a_separate_term(rows):
    """Copies have slots of their own: they raise the compulsory reads, which the ideal formula leaves out."""
    length, page, tree = 7, 4, DraftTree.branches(8, 5)
    batch = VerifyBatch([length], [tree], page, rows)
    paths = [len(path) for path in virtual_paths(tree.parents, rows)]
    naive, cascade = (ledger(batch.copied_tails(plan).levels) for plan in ("naive", "cascade"))
    assert naive.kv_tokens == sum(length + path for path in paths)
    # the cascade reads whole prefix pages once, and tail and path with every virtual request
    assert cascade.kv_tokens == 4 + sum(3 + path for path in paths)
    ends = row_ends(tree.parents, rows)
    assert cascade.pairs == naive.pairs == sum(length + len(path_to(tree.parents, node)) for node in ends)
    tails = batch.copied_tails("naive").tail_tokens
    # those on branch 0 keep the original tail and path
    kept = 5 if rows == "node" else 1
    assert tails == 3 * (len(paths) - kept)
    assert naive.kv_tokens_unique == cascade.kv_tokens_unique == 7 + 5 + tails + sum(paths[kept:])
    ideal = ledger(batch.levels("cascade")).kv_tokens
    assert cascade.kv_tokens - ideal == 3 * (len(paths) - 1)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 2)])
@pytest.mark.parametrize("block_m", [1, 2, 5, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_ledger_of_causal_levels_against_brute_force(causal, block_m, heads):
    rows, keys = [3, 1, 0, 7, 5, 2], [9, 4, 6, 7, 2, 0]
    table = torch.arange(6 * 9, dtype=torch.int32).view(6, 9)
    level = Level(offsets(rows), table, int32(keys), 1, causal=causal)
    book = ledger([level], num_q_heads=heads[0], num_kv_heads=heads[1])
    visible = visible_keys(offsets(rows), int32(keys), causal=causal)
    assert book.pairs == sum(int(seen.sum()) for seen in visible)
    group = heads[0] // heads[1]
    tile_tokens = 0
    for seen in visible:
        packed = seen.repeat_interleave(group, 0)
        tile_tokens += sum(int(tile.any(0).sum()) for tile in packed.split(block_m)) if len(packed) else 0
    assert book.tile_tokens(block_m) == tile_tokens
    assert book.kv_tokens == 9 + 4 + 7 + 2 + 0


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_causal_levels_are_counted_as_the_kernel_reads_them(backend, device, loads):
    case = attention_case([40, 3], [45, 9], heads=(4, 1), page=4, device=device)
    counted = torch.zeros(1, dtype=torch.int64, device=device)
    run(case.with_options(causal=True), backend, loads, reads=counted)
    level = Level(case.cu_seqlens_q, case.page_table, case.cache_seqlens, 4, causal=True)
    # 160 packed rows: a tile of 128 ends with row 31 at key 36, the next reads all 45
    assert ledger([level], num_q_heads=4, num_kv_heads=1).tile_tokens(128) == 37 + 45 + 9
    assert counted.tolist() == [37 + 45 + 9]


def test_tree_levels_count_only_set_bits_of_the_tail():
    mask = torch.tensor([[-1], [0b101], [0b1]])
    level = Level(
        int32([0, 2, 3]), int32([[0, 1], [2, 3]]), int32([7, 6]), 4, tree_mask=mask, tail_seqlens=int32([3, 2])
    )
    # tail of 3: all 3 and 2 bits beside 2 x 4 earlier keys; tail of 2: 1 bit beside 4
    assert ledger([level]).pairs == 2 * 4 + 3 + 2 + 4 + 1
    by_rows = replace(level, tail_seqlens=None)
    assert ledger([by_rows]).pairs == 2 * 5 + 2 + 1 + 5 + 1


def test_bytes_count_both_caches():
    book = ledger(branch_batch(2, 4, 100, 3).levels("cascade"), num_q_heads=8, num_kv_heads=2)
    assert book.kv_bytes(64, torch.bfloat16) == (200 + 24) * 2 * 128 * 2
    assert book.kv_bytes(64, torch.float32, head_dim_v=32) == (200 + 24) * 2 * 96 * 4


def test_bad_ledger_arguments_are_named():
    levels = branch_batch(1, 2, 4, 2).levels("cascade")
    with pytest.raises(ValueError, match="num_q_heads: expected a positive multiple of num_kv_heads = 2, given 3"):
        ledger(levels, num_q_heads=3, num_kv_heads=2)
    with pytest.raises(ValueError, match="num_kv_heads: expected a number >= 1, given 0"):
        ledger(levels, num_kv_heads=0)
    with pytest.raises(TypeError, match="num_q_heads: expected an integer, given 2.0"):
        ledger(levels, num_q_heads=2.0)
    with pytest.raises(ValueError, match="levels: expected at least one Level, given none"):
        ledger([])
    with pytest.raises(ValueError, match="block_m: expected a number >= 1, given 0"):
        ledger(levels).tile_tokens(0)
    with pytest.raises(TypeError, match="block_m: expected an integer, given 1.5"):
        ledger(levels).tile_tokens(1.5)
    with pytest.raises(ValueError, match="head_dim_v: expected a number >= 1, given -8"):
        ledger(levels).kv_bytes(8, torch.float16, -8)
    with pytest.raises(TypeError, match="dtype: expected a torch.dtype, given 'bf16'"):
        ledger(levels).kv_bytes(8, "bf16")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(cu_seqlens_q=int32([0, 7, 8])), ValueError, r"cu_seqlens_q: expected the 9 rows of levels\[0\], given 8"),
        (dict(cu_seqlens_q=int32([1, 5, 9])), ValueError, r"cu_seqlens_q: .* given \[1, 5, 9\]"),
        (dict(cu_seqlens_q=int32([0, 10, 9])), ValueError, r"cu_seqlens_q: .* given \[0, 10, 9\]"),
        (
            dict(cu_seqlens_q=int32([0, 9])),
            ValueError,
            r"cu_seqlens_q: expected \[R \+ 1\] = \[3\], given shape \(2,\)",
        ),
        (
            dict(cache_seqlens=int32([0, 17])),
            ValueError,
            "cache_seqlens: .* 0 to 16 tokens .* given 17 for",
        ),
        (dict(cache_seqlens=int32([-1, 4])), ValueError, "cache_seqlens: .* given -1 for request 0"),
        (dict(cache_seqlens=[3, 4]), TypeError, "cache_seqlens: expected a tensor, given list"),
        (dict(page_size=0), ValueError, "page_size: expected a number >= 1, given 0"),
    ],
)
def test_levels_that_cannot_be_counted_are_named(changes, error, message):
    first = Level(int32([0, 9]), int32([[0]]), int32([5]), 8)
    second = Level(int32([0, 7, 9]), int32([[1, 2], [3, 4]]), int32([16, 0]), 8, name="own")
    assert ledger([first, second]).kv_tokens == 21
    with pytest.raises(error, match=rf"levels\[1\] 'own': {message}"):
        ledger([first, replace(second, **changes)])


def test_distinct_slots_of_levels_inside_each_other():
    """Page 1 of 8 tokens whole, then single tokens inside it and one outside: 8 + 1 slots."""
    whole = Level(int32([0, 2]), int32([[1]]), int32([8]), 8)
    single = Level(int32([0, 1, 2]), int32([[10, 13], [9, 3]]), int32([2, 2]), 1)
    counts = ledger([whole, single])
    assert (counts.kv_tokens, counts.kv_tokens_unique) == (12, 9)
    assert [level.kv_tokens_unique for level in counts.levels] == [8, 4]
    assert ledger([single, whole]).kv_tokens_unique == 9


def test_counts_beyond_64_bits_are_exact():
    """64 requests of 2**24 rows over 2**30 keys: with 128 heads in a group, 2**67 tokens in tiles of one row."""
    rows = torch.arange(65, dtype=torch.int32) * 2**24
    level = Level(rows, torch.zeros(64, 2**12, dtype=torch.int32), torch.full((64,), 2**30, dtype=torch.int32), 2**18)
    counts = ledger([level], num_q_heads=128)
    assert counts.pairs == 2**60
    assert counts.tile_tokens(1) == 2**67
    assert counts.tile_tokens(2**31) == 64 * 2**30


def broken(case: VerifyCase, which: int, **changes) -> list[Level]:
    levels = list(case.batch.levels("cascade"))
    levels[which] = replace(levels[which], **changes)
    return levels


@pytest.mark.parametrize(
    ("which", "changes", "error", "message"),
    [
        (0, dict(cu_seqlens_q=int32([0, 5, 7])), ValueError, "cu_seqlens_q: expected offsets rising from 0 to T = 8"),
        (1, dict(cu_seqlens_q=int32([0, 1, 2, 3, 4, 5, 6, 6, 7])), ValueError, "cu_seqlens_q: .* T = 8"),
        (0, dict(cu_seqlens_q=int32([0, 8])), ValueError, r"cu_seqlens_q: expected \[R \+ 1\] = \[3\]"),
        (0, dict(cu_seqlens_q=int32([0, 9, 8])), ValueError, "cu_seqlens_q: expected offsets rising"),
        (0, dict(cache_seqlens=int32([9, 17])), ValueError, "cache_seqlens: expected 0 to 12 tokens"),
        (1, dict(cache_seqlens=int32([1] * 7 + [-1])), ValueError, "cache_seqlens: expected 0 to 3 tokens"),
        (0, dict(page_size=3), ValueError, "page_size: expected a divisor of the cache's page size 4, given 3"),
        (0, dict(page_size=8), ValueError, "page_size: expected a divisor of the cache's page size 4, given 8"),
        (1, dict(page_size=0), ValueError, "page_size: expected a divisor"),
        (1, dict(page_size=1.0), TypeError, "page_size: expected an integer, given 1.0"),
        (0, dict(page_table=int32([[0, 1, 99], [3, 4, 5]])), ValueError, "page_table: expected page ids from 0 to"),
        (0, dict(page_table=torch.zeros(2, 3).long()), TypeError, "page_table: expected int32, given torch.int64"),
        (0, dict(tree_mask=torch.zeros(8, 1).long(), causal=True), ValueError, "tree_mask: expected neither causal"),
        (1, dict(tree_mask=torch.zeros(7, 1).long()), ValueError, "tree_mask: expected .* T = 8"),
    ],
)
def test_a_bad_level_is_named_with_its_argument(backend, device, which, changes, error, message):
    case = verify_case([9, 6], [FORK, CHAIN], page=4, device=device)
    name = ["prefix", "draft"][which]
    changes = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in changes.items()}
    before = case.q.clone()
    with pytest.raises(error, match=rf"levels\[{which}\] '{name}': {message}"):
        cascade_attention(case.q, case.k_cache, case.v_cache, broken(case, which, **changes), backend=backend)
    assert torch.equal(case.q, before)


def test_a_window_together_with_levels_is_refused(backend, device):
    case = verify_case([3], [[-1, 0]], page=4, device=device)
    arguments = (case.q, case.k_cache, case.v_cache, case.batch.levels("cascade"))
    for window in ((3, 0), (0, -1), (-1, 0), [0, 0]):
        with pytest.raises(ValueError, match=r"window_size: expected \(-1, -1\), for a window moves with each row"):
            cascade_attention(*arguments, window_size=window, backend=backend)
    unlimited = cascade_attention(*arguments, window_size=None, backend=backend)
    for window in ((-1, -1), [-1, -1], (None, None)):
        assert torch.equal(unlimited.o, cascade_attention(*arguments, window_size=window, backend=backend).o)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: {"levels": []}, ValueError, "levels: expected at least one Level, given none"),
        (
            lambda c: {"levels": c.batch.levels("fused")[0]},
            TypeError,
            "levels: expected a sequence of Level, given Level",
        ),
        (lambda c: {"levels": [c.q]}, TypeError, r"levels\[0\]: expected a Level, given Tensor"),
        (
            lambda c: {"levels": broken(c, 1, page_table=[[0]])},
            TypeError,
            r"levels\[1\] 'draft': page_table: expected a",
        ),
        (lambda c: {"window_size": 3}, ValueError, r"window_size: expected \(-1, -1\).* given 3"),
        (
            lambda c: {"q": c.q[:, :3]},
            ValueError,
            "q: expected H_q to be a positive multiple of H_kv = 2, given H_q = 3",
        ),
        (lambda c: {"q": c.q[:7]}, ValueError, r"levels\[0\] 'prefix': cu_seqlens_q: expected offsets .* T = 7"),
        (lambda c: {"q": None}, TypeError, "q: expected a tensor, given NoneType"),
        (lambda c: {"v_cache": c.v_cache.half()}, TypeError, "v_cache: expected dtype torch.float32 as q"),
        (lambda c: {"k_cache": c.k_cache[0]}, ValueError, "k_cache: expected"),
        (lambda c: {"num_splits": 0}, ValueError, "num_splits: expected an integer from 1"),
        (lambda c: {"reads": torch.zeros(3, dtype=torch.int64)}, ValueError, r"reads: expected .* \[2\]"),
        (lambda c: {"backend": "cuda"}, ValueError, "backend: expected one of"),
    ],
)
def test_bad_arguments_of_the_whole_call_are_named(change, error, message):
    case = verify_case([9, 6], [FORK, CHAIN], page=4)
    good = dict(q=case.q, k_cache=case.k_cache, v_cache=case.v_cache, levels=case.batch.levels("cascade"))
    with pytest.raises(error, match=message):
        cascade_attention(**good | change(case))


@pytest.mark.parametrize("plan", PLANS)
def test_engine_sized_batches_count_as_the_closed_forms_say(plan):
    """The shapes of 8 requests of 64 nodes over 1024 tokens; totals as the closed forms say."""
    batch = VerifyBatch([1024] * 8, [DraftTree.branches(8, 8)] * 8, 16)
    book = ledger(batch.levels(plan))
    paths = 8 * 8 * 36
    expected = {"naive": 8 * 64 * 1024 + paths, "cascade": 8 * 1024 + paths, "fused": 8 * (1024 + 64)}[plan]
    assert book.kv_tokens == expected


@pytest.mark.parametrize("plan", PLANS)
def test_distinct_slots_do_not_depend_on_how_many_rows_are_looked_at_together(plan, monkeypatch):
    """The table of a naive plan is united block by block; a block of one row, of a few, and of all agree."""
    batch = VerifyBatch([37, 0, 20], [DraftTree.branches(3, 4), DraftTree.chain(2), None], page_size=4)
    levels = batch.levels(plan)
    found = []
    for entries in (1, 100, 1 << 22):
        monkeypatch.setattr("cascade_lab.levels.SPAN_BLOCK", entries)
        found.append(ledger(levels).kv_tokens_unique)
    assert found == [37 + 12 + 2] * 3


@pytest.mark.parametrize(
    "changes",
    [
        dict(tail_seqlens=int32([500, 2])),
        dict(causal=True),
        dict(tree_mask=torch.ones(5, 1, dtype=torch.int32)),
        dict(tree_mask=torch.ones(4, 1, dtype=torch.int64)),
        dict(tree_mask=None, tail_seqlens=None, cache_seqlens=torch.tensor([13.0, 4.0])),
        dict(tree_mask=None, tail_seqlens=None, cache_seqlens=torch.tensor([float("nan"), 4.0])),
        dict(page_table=int32([[0, 1, -3, 3], [4, 5, 6, 7]])),
        dict(page_table=torch.zeros(2, 4, dtype=torch.int64)),
        dict(cu_seqlens_q=int32([0, 3, 2]), tree_mask=None, tail_seqlens=None),
        dict(max_seqlen_q=1),
        dict(causal=1, tree_mask=None, tail_seqlens=None),
        dict(tree_mask=None),
        dict(page_size=2.0),
    ],
)
def test_what_a_call_refuses_is_not_counted(changes):
    """F6 (tests/known_faults.md): the ledger, also inside `unchecked()`, raises what `cascade_attention` raises."""
    good = Level(
        int32([0, 3, 5]),
        int32([[0, 1, 2, 3], [4, 5, 6, 7]]),
        int32([13, 4]),
        4,
        tree_mask=torch.ones(5, 1, dtype=torch.int64),
        tail_seqlens=int32([3, 2]),
        name="drafts",
    )
    q, cache = random(5, 2, 16, seed=1), random(8, 4, 1, 16, seed=2)
    cascade_attention(q, cache, cache, [good], backend="torch")
    assert ledger([good]).pairs == 3 * 10 + 3 + 2 * 2 + 2
    broken = [replace(good, **changes)]
    with pytest.raises((TypeError, ValueError)) as refused:
        cascade_attention(q, cache, cache, broken, backend="torch")
    with pytest.raises(type(refused.value)) as uncounted:
        ledger(broken)
    assert str(uncounted.value)[:60] == str(refused.value)[:60]
    with runtime.unchecked(), pytest.raises(type(refused.value)):
        ledger(broken)


def test_tile_tokens_of_causal_levels_have_a_closed_form():
    """F26: equal to the sum over tiles, whatever the shapes, and exact where there are 2^33 tiles of 10^12 rows."""

    def by_tiles(rows: int, keys: int, block_m: int, group: int) -> int:
        last_rows = (min(rows - 1, ((i + 1) * block_m - 1) // group) for i in range(-(-rows * group // block_m)))
        return sum(min(max(row + keys - rows + 1, 0), keys) for row in last_rows)

    draw = np.random.default_rng(3)
    for _ in range(300):
        rows, keys = draw.integers(1, 40, 3), draw.integers(0, 60, 3)
        block_m, group = int(draw.integers(1, 40)), int(draw.integers(1, 9))
        expected = sum(by_tiles(*pair, block_m, group) for pair in zip(rows.tolist(), keys.tolist(), strict=True))
        assert PassShape(rows, keys, True).tile_tokens(block_m, group) == expected, (rows, keys, block_m, group)
    n, tiles = 10**12, 10**12 * 4 // 128
    whole = PassShape(np.asarray([n, n]), np.asarray([n, n]), True)
    assert whole.tile_tokens(128, 4) == 2 * 32 * tiles * (tiles + 1) // 2
