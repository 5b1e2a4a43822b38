"""Levels made from what requests share, prompts behind cached prefixes, and the check of plans made by hand."""

from __future__ import annotations

import math
import random as python_random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cascade_lab import (
    DraftTree,
    Level,
    PrefixHitBatch,
    VerifyBatch,
    attention,
    cascade_attention,
    check_plan,
    interactions,
    ledger,
    levels,
    paging,
    runtime,
    shared_prefix_levels,
)
from cascade_lab.drafts import PLANS, ROWS, pack_mask
from cascade_lab.evidence.reference import assert_state_close, attention_oracle
from cascade_lab.levels import sharing_order
from cascade_lab.prefix import PREFILL_PLANS
from tests.cases import int32, offsets, random
from tests.verify import CHAIN, FORK, SHUFFLED, STAR


def caches(num_pages: int, page: int, device="cpu") -> tuple[Tensor, Tensor]:
    return tuple(random(num_pages, page, 2, 16, seed=seed, device=device) for seed in (1, 2))


def random_tables(seed: int, page: int) -> tuple[Tensor, list[int], list[int], list[int]]:
    """(table, lengths, rows, computed): requests that take over some first pages of the one before, and others then.

    A page to which a request writes is nobody else's; some computed lengths end in the middle of what is shared.
    """
    draw = python_random.Random(seed)
    tables, lens, rows, computed, fresh = [], [], [], [], 0
    for r in range(draw.randint(1, 7)):
        rows.append(draw.choice([1, 1, 2, 5, 0]))
        known = draw.randint(0, 6 * page)
        lens.append(known + rows[-1])
        computed.append(draw.choice([known, known, draw.randint(0, known)]))
        taken = min(draw.randint(0, 5), known // page) if r else 0
        ids = tables[-1][:taken] if r else []
        while len(ids) < -(-lens[-1] // page):
            ids, fresh = [*ids, fresh], fresh + 1
        tables.append(ids)
    width = max(map(len, tables)) + 1
    return int32([[*ids, *[-1] * (width - len(ids))] for ids in tables]), lens, rows, computed


def shared_reads(table: Tensor, lens: list[int], rows: list[int], computed: list[int], page: int) -> int:
    """Tokens read when every run of neighbours with the same pages so far reads a page once, counted page by page."""
    active = [r for r in range(len(rows)) if rows[r]]
    known = {r: min(lens[r] - rows[r], computed[r]) // page for r in active}
    total = sum(lens[r] - known[r] * page for r in active)
    for column in range(table.shape[1]):
        before = None
        for r in active:
            heads = table[r, : column + 1].tolist() if known[r] > column else None
            if heads is not None and heads != before:
                total += page
            before = heads
    return total


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(30))
def test_shared_levels_show_each_key_once_and_read_each_shared_page_once(seed, page):
    table, lens, rows, computed = random_tables(seed, page)
    whole = Level(offsets(rows), table, int32(lens), page, causal=True)
    plan = shared_prefix_levels(table, int32(lens), offsets(rows), int32(computed), page)
    check_plan(plan, whole)
    counted, expected = ledger(plan), ledger([whole])
    assert counted.pairs == expected.pairs
    assert counted.kv_tokens_unique == expected.kv_tokens_unique
    assert counted.kv_tokens == shared_reads(table, lens, rows, computed, page)
    for level in plan:
        assert level.max_seqlen_q >= max(level.cu_seqlens_q.diff().tolist(), default=0)
    few = shared_prefix_levels(table, int32(lens), offsets(rows), int32(computed), page, max_shared_levels=1)
    check_plan(few, whole)
    assert len(few) <= 2
    coarse = shared_prefix_levels(table, int32(lens), offsets(rows), int32(computed), page, min_shared_tokens=2 * page)
    check_plan(coarse, whole)
    assert all(n == 0 or n >= 2 * page for level in coarse[:-1] for n in level.cache_seqlens.tolist())


NESTED = [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5, 6], [7, 8, -1, -1], [7, 9, -1, -1], [10, 11, -1, -1]]


def test_groups_nest_where_they_share_more():
    """Three requests share two pages and two of them a third; two others share one; the last is alone."""
    table, lens, rows = int32(NESTED), [14, 15, 16, 7, 6, 8], [2, 1, 3, 2, 1, 4]
    outer, inner, own = shared_prefix_levels(table, int32(lens), offsets(rows), None, 4)
    assert [level.name for level in (outer, inner, own)] == ["shared 0", "shared 1", "own"]
    assert outer.cu_seqlens_q.tolist() == [0, 6, 9, 13]
    assert outer.page_table.tolist() == [[0, 1], [7, -1], [-1, -1]]
    assert outer.cache_seqlens.tolist() == [8, 4, 0]
    assert inner.cu_seqlens_q.tolist() == [0, 3, 13]
    assert inner.page_table.tolist() == [[2], [-1]]
    assert own.cache_seqlens.tolist() == [2, 3, 8, 3, 2, 8]
    assert own.page_table.tolist() == [[3, -1], [4, -1], [5, 6], [8, -1], [9, -1], [10, 11]]
    assert own.causal
    assert not outer.causal
    assert ledger([outer, inner, own]).kv_tokens == 8 + 4 + 4 + 2 + 3 + 8 + 3 + 2 + 8


@pytest.mark.parametrize("causal", [True, False])
def test_shared_levels_equal_one_pass(backend, device, loads, causal):
    table, lens, rows = int32(NESTED, device), int32([14, 15, 16, 7, 6, 8], device), [2, 1, 3, 2, 1, 4]
    q, (k, v) = random(13, 4, 16, seed=3, device=device), caches(12, 4, device)
    plan = shared_prefix_levels(table, lens, offsets(rows, device), None, 4, causal=causal)
    state = cascade_attention(q, k, v, plan, backend=backend)
    assert_state_close(state, attention_oracle(q, k, v, table, lens, cu_seqlens_q=offsets(rows), causal=causal))


def test_drafts_of_a_shared_prompt_are_verified_over_shared_levels(backend, device, loads):
    """Ragged trees behind prompts that share pages in two groups: the last level has the tree mask."""
    forests, prefixes = [FORK, CHAIN, SHUFFLED, STAR], [9, 10, 13, 5]
    table = int32([[0, 1, 2, 3, -1], [0, 1, 4, 5, -1], [6, 7, 8, 9, 10], [6, 11, 12, -1, -1]], device)
    sizes = [len(parents) for parents in forests]
    lens = [n + size for n, size in zip(prefixes, sizes, strict=True)]
    words = torch.cat([DraftTree(parents).mask for parents in forests]).to(device)
    arguments = (table, int32(lens, device), offsets(sizes, device), int32(prefixes, device), 4)
    plan = shared_prefix_levels(*arguments, tree_mask=words, tail_seqlens=int32(sizes, device))
    assert [level.cache_seqlens.tolist() for level in plan] == [[8, 4], [6, 5, 16, 5]]
    q, (k, v) = random(sum(sizes), 4, 16, seed=3, device=device), caches(13, 4, device)
    state = cascade_attention(q, k, v, plan, backend=backend)
    options = dict(cu_seqlens_q=offsets(sizes), tree_mask=words, tail_seqlens=int32(sizes))
    assert_state_close(state, attention_oracle(q, k, v, table, int32(lens), **options))


def test_requests_in_order_of_their_pages_are_found_as_groups():
    """Two groups dealt out in turns share nothing as neighbours, and everything once they are."""
    table = int32([[0, 1, 2], [3, 4, 5], [0, 1, 6], [3, 4, 7], [0, 8, 9]])
    lens, computed = int32([12, 12, 12, 12, 12]), int32([11, 11, 11, 3, 11])
    rows = offsets([1] * 5)
    assert len(shared_prefix_levels(table, lens, rows, computed, 4)) == 1
    order = sharing_order(table, lens, computed, 4)
    assert order.tolist() == [3, 0, 2, 4, 1]
    plan = shared_prefix_levels(table[order], lens[order], rows, computed[order], 4)
    assert [level.cache_seqlens.tolist() for level in plan] == [[0, 4, 0], [0, 4, 0], [12, 4, 4, 8, 12]]
    check_plan(plan, Level(rows, table[order], lens[order], 4, causal=True))
    assert sharing_order(int32([]).view(0, 3), int32([]), int32([]), 4).tolist() == []


# (query rows, keys) of each request, pages that they share, heads, and what is computed
GRID = [
    ([(1, 130), (1, 97), (1, 113)], 5, (4, 2)),
    ([(5, 68), (16, 64), (1, 65)], 3, (4, 1)),
    ([(17, 113), (3, 150), (16, 112), (2, 99)], 6, (2, 2)),
]


def shared_batch(sizes: list[tuple[int, int]], shared: int, page: int, device) -> tuple[Tensor, Tensor, Tensor]:
    """(page table, lengths, row offsets) of requests that share their first pages and own the others."""
    rows, fresh = [], shared
    for _, keys in sizes:
        own = -(-keys // page) - shared
        rows.append([*range(shared), *range(fresh, fresh + own)])
        fresh += own
    width = max(map(len, rows))
    table = int32([[*row, *[-1] * (width - len(row))] for row in rows], device)
    return table, int32([keys for _, keys in sizes], device), offsets([count for count, _ in sizes], device)


@pytest.mark.parametrize(("sizes", "shared", "heads"), GRID)
def test_a_batch_with_one_shared_prefix_up_to_what_is_computed(backend, device, loads, sizes, shared, heads):
    table, lens, cu = shared_batch(sizes, shared, 16, device)
    num_pages = int(table.max()) + 1
    k, v = (random(num_pages, 16, heads[1], 16, seed=seed, device=device) for seed in (1, 2))
    q = random(int(cu[-1]), heads[0], 16, seed=3, device=device)
    computed = lens - cu.diff()
    plan = shared_prefix_levels(table, lens, cu, computed)
    common = paging.shared_prefix_len(table, lens, computed, 16)
    assert plan[0].cache_seqlens.tolist() == [common]
    state = cascade_attention(q, k, v, plan, softcap=30.0, backend=backend)
    reference = attention_oracle(q, k, v, table, lens.cpu(), cu_seqlens_q=cu.cpu(), causal=True, softcap=30.0)
    assert_state_close(state, reference)


def beyond_the_computed(last: tuple[int, int]) -> tuple[list[Level], Level]:
    """A prefix of 64 tokens for three requests, of which the last one has computed 48, made by hand."""
    sizes = [(5, 90), (3, 71), last]
    table, lens, cu = shared_batch(sizes, 4, 16, "cpu")
    whole = Level(cu, table, lens, 16, causal=True, name="whole")
    prefix = Level(int32([0, int(cu[-1])]), table[:1, :4], int32([64]), 16, name="prefix")
    return [prefix, Level(cu, table[:, 4:], lens - 64, 16, causal=True, name="own")], whole


@pytest.mark.parametrize(("last", "keys"), [((20, 68), 4), ((16, 64), 0)])
def test_a_level_beyond_the_computed_tokens_is_wrong_and_refused(last, keys):
    """K94 (tests/known_faults.md): rows of the last request would see their own later keys."""
    plan, whole = beyond_the_computed(last)
    q, (k, v) = random(8 + last[0], 4, 16, seed=3), caches(20, 16)
    message = rf"levels\[1\] 'own': expected at least {last[0] - 1} keys for the {last[0]} causal rows of request 2, "
    with pytest.raises(ValueError, match=f"{message}given {keys}"):
        cascade_attention(q, k, v, plan)
    with pytest.raises(ValueError, match=message):
        check_plan(plan)
    with pytest.raises(ValueError, match=r"levels\[0\] 'prefix': expected keys that whole shows row 8, given slot 49"):
        check_plan(plan, whole)
    with runtime.unchecked():
        wrong = cascade_attention(q, k, v, plan)
    reference = attention_oracle(
        q, k, v, whole.page_table, whole.cache_seqlens, cu_seqlens_q=whole.cu_seqlens_q, causal=True
    )
    assert (wrong.o - reference.o).abs().max() > 0.4
    computed = whole.cache_seqlens - whole.cu_seqlens_q.diff()
    capped = shared_prefix_levels(whole.page_table, whole.cache_seqlens, whole.cu_seqlens_q, computed)
    # all share 48 tokens, and the first two 16 more
    assert [level.cache_seqlens.tolist() for level in capped[:-1]] == [[48], [16, 0]]
    check_plan(capped, whole)
    assert_state_close(cascade_attention(q, k, v, capped), reference)


def test_the_last_computed_token_may_be_a_rows_own():
    """A prefix of 64 with 63 computed: the first row's own key ends the prefix, and every row sees what it should."""
    plan, whole = beyond_the_computed((3, 66))
    check_plan(plan, whole)
    q, (k, v) = random(11, 4, 16, seed=3), caches(20, 16)
    reference = attention_oracle(
        q, k, v, whole.page_table, whole.cache_seqlens, cu_seqlens_q=whole.cu_seqlens_q, causal=True
    )
    assert_state_close(cascade_attention(q, k, v, plan), reference)


def two_levels(**changes) -> list[Level]:
    """Two requests of 2 and 1 rows that share a page of 4; `changes` are those of the level of their own pages."""
    rows = int32([0, 2, 3])
    own = dict(
        cu_seqlens_q=rows, page_table=int32([[1, 2], [3, 4]]), cache_seqlens=int32([6, 5]), page_size=4, name="own"
    )
    shared = Level(int32([0, 3]), int32([[0]]), int32([4]), 4, name="shared")
    return [shared, Level(**own | changes)]


WHOLE = Level(int32([0, 2, 3]), int32([[0, 1, 2], [0, 3, 4]]), int32([10, 9]), 4, name="whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(page_table=int32([[1, 2], [3, 0]])),
            r"slot 0 twice for row 2: in levels\[0\] 'shared' and in levels\[1\] 'own'",
        ),
        (dict(page_table=int32([[1, 0], [3, 4]])), "slot 0 twice for row 0"),
        # single tokens of a page that another level has whole
        (
            dict(page_table=int32([[4, 5, 2], [6, 7, 8]]), page_size=1, cache_seqlens=int32([3, 3])),
            "slot 2 twice for row 0",
        ),
    ],
)
def test_a_key_in_two_levels_is_refused_by_default(backend, device, loads, changes, message):
    plan, q, (k, v) = two_levels(**changes), random(3, 4, 16, seed=3, device=device), caches(5, 4, device)
    moved = [
        replace(x, **{name: getattr(x, name).to(device) for name in ("cu_seqlens_q", "page_table", "cache_seqlens")})
        for x in plan
    ]
    message = f"levels: expected each key of a row once, given {message}"
    with pytest.raises(ValueError, match=message):
        cascade_attention(q, k, v, moved, backend=backend)
    for whole in (None, WHOLE):
        with pytest.raises(ValueError, match=message):
            check_plan(plan, whole)


def test_pages_shared_by_other_rows_alone_are_no_overlap():
    """Request 1 reads alone what request 0's group has in another level: no row sees a key twice."""
    group = Level(int32([0, 2, 3]), int32([[0], [-1]]), int32([4, 0]), 4, name="group")
    own = two_levels(page_table=int32([[1, 2], [0, 3]]), cache_seqlens=int32([6, 7]))[1]
    check_plan([group, own])
    q, (k, v) = random(3, 4, 16, seed=3), caches(5, 4)
    whole = (int32([[0, 1, 2], [0, 3, -1]]), int32([10, 7]))
    reference = attention_oracle(q, k, v, *whole, cu_seqlens_q=own.cu_seqlens_q)
    assert_state_close(cascade_attention(q, k, v, [group, own]), reference)


def test_masks_may_deal_the_keys_of_two_levels():
    """Both levels hold all keys; one mask shows what the other hides, and then a key twice."""
    table, lens, rows = int32([[0, 1], [2, 3]]), int32([7, 5]), int32([0, 2, 3])
    one = torch.rand(2, 7, generator=torch.Generator().manual_seed(0)) < 0.5, torch.ones(1, 5).bool()
    other = [~mask for mask in one]
    plan = [Level(rows, table, lens, 4, tree_mask=pack_mask(masks), tail_seqlens=lens) for masks in (one, other)]
    q, (k, v) = random(3, 4, 16, seed=3), caches(4, 4)
    reference = attention_oracle(q, k, v, table, lens, cu_seqlens_q=rows)
    assert_state_close(cascade_attention(q, k, v, plan), reference)
    check_plan(plan, Level(rows, table, lens, 4))
    other[0][1, 3] = one[0][1, 3] = True
    plan[1] = replace(plan[1], tree_mask=pack_mask(other))
    plan[0] = replace(plan[0], tree_mask=pack_mask(one))
    for call in (lambda: cascade_attention(q, k, v, plan), lambda: check_plan(plan)):
        with pytest.raises(ValueError, match="given slot 3 twice for row 1"):
            call()


def test_a_large_plan_is_left_to_the_explicit_check(monkeypatch):
    plan, q, (k, v) = two_levels(page_table=int32([[1, 0], [3, 4]])), random(3, 4, 16, seed=3), caches(5, 4)
    monkeypatch.setattr(levels, "CHEAP_ENTRIES", 4)
    cascade_attention(q, k, v, plan)
    with pytest.raises(ValueError, match="slot 0 twice for row 0"):
        check_plan(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(cache_seqlens=int32([5, 5])), "expected every key that whole shows row 0, given none at slot 9"),
        (dict(cache_seqlens=int32([7, 5])), r"levels\[1\] 'own': expected keys that whole shows row 0, given slot 10"),
        (
            dict(page_table=int32([[1, 2], [3, 9]])),
            r"levels\[1\] 'own': expected keys that whole shows row 2, given slot 36",
        ),
        (dict(causal=True), "expected every key that whole shows row 0, given none at slot 9"),
    ],
)
def test_missing_and_foreign_keys_are_found_by_what_the_rows_are_to_see(changes, message):
    check_plan(two_levels(), WHOLE)
    check_plan(two_levels(**changes))
    with pytest.raises(ValueError, match=message):
        check_plan(two_levels(**changes), WHOLE)


@pytest.mark.parametrize("block", [1, 1 << 22])
@pytest.mark.parametrize("rows", ROWS)
def test_the_plans_of_a_batch_show_what_the_fused_one_shows(monkeypatch, rows, block):
    """Whatever the number of rows that are looked at together."""
    monkeypatch.setattr(levels, "SPAN_BLOCK", block)
    trees = [None if parents is None else DraftTree(parents) for parents in (SHUFFLED, None, FORK)]
    batch = VerifyBatch([13, 4, 9], trees, 4, rows, shared_prefix_len=4)
    (whole,) = batch.levels("fused")
    for plan in PLANS:
        check_plan(batch.levels(plan), whole)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check_plan([], WHOLE), ValueError, "levels: expected at least one Level, given none"),
        (lambda: check_plan(WHOLE), TypeError, "levels: expected a sequence of Level, given Level"),
        (lambda: check_plan([WHOLE], "whole"), TypeError, r"levels\[1\]: expected a Level, given str"),
        (
            lambda: check_plan([WHOLE], Level(int32([0, 4]), int32([[0]]), int32([4]), 4)),
            ValueError,
            "cu_seqlens_q: expected the 3 rows of",
        ),
        (
            lambda: shared_prefix_levels(int32([[0]]), int32([9]), int32([0, 1]), None, 4),
            ValueError,
            "cache_seqlens: expected 0 to 4 tokens",
        ),
        (
            lambda: shared_prefix_levels(int32([[0]]), int32([4]), int32([0, 1]), int32([3, 3]), 4),
            ValueError,
            r"computed_lens: expected \[R\] = \[1\], given shape \(2,\)",
        ),
        (
            lambda: shared_prefix_levels(int32([[0]]), int32([4]), int32([0, 1]), [3], 4),
            TypeError,
            "computed_lens: expected a tensor, given list",
        ),
        (
            lambda: shared_prefix_levels(int32([[0]]), int32([4]), int32([0, 1]), tail_seqlens=int32([1])),
            ValueError,
            "tail_seqlens: expected None without tree_mask",
        ),
    ],
)
def test_wrong_plans_and_batches_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_nobody_shares_nothing():
    (own,) = shared_prefix_levels(int32([]).view(0, 2), int32([]), int32([0]), None, 4)
    assert own.cache_seqlens.tolist() == []
    (own,) = shared_prefix_levels(int32([[0], [0]]), int32([4, 4]), int32([0, 0, 0]), None, 4)
    assert own.cache_seqlens.tolist() == [0, 0]


@pytest.mark.parametrize("plan", PREFILL_PLANS)
def test_a_prefix_hit_is_computed_from_its_slots_and_levels(backend, device, loads, plan):
    """Hits of 8, 9, 0 and 5 tokens, two of which share their pages; new keys are written where the batch says."""
    lens, hits, page = [13, 12, 6, 7], [8, 9, 0, 5], 4
    table = int32([[3, 7, 1, 8], [3, 7, 5, -1], [0, 2, -1, -1], [6, 4, -1, -1]], device)
    batch = PrefixHitBatch(lens, hits, page, page_table=table)
    assert batch.num_pages == 9
    assert batch.row_counts == (5, 3, 6, 2)
    assert batch.positions.tolist() == [8, 9, 10, 11, 12, 9, 10, 11, 0, 1, 2, 3, 4, 5, 5, 6]
    assert batch.suffix_slots(1).tolist() == [21, 22, 23]
    assert batch.prefix_slots(3).tolist() == [24, 25, 26, 27, 16]
    assert batch.suffix_slots().tolist() == sum((batch.suffix_slots(r).tolist() for r in range(4)), [])
    assert batch.prefix_slots().tolist() == sum((batch.prefix_slots(r).tolist() for r in range(4)), [])
    k, v = (torch.full((9, page, 2, 16), math.nan, device=device) for _ in range(2))
    for seed, cache in enumerate((k, v)):
        known = batch.prefix_slots().unique()
        paging.write(cache, known, random(len(known), 2, 16, seed=10 + seed, device=device))
        paging.write(cache, batch.suffix_slots(), random(batch.num_rows, 2, 16, seed=20 + seed, device=device))
    q = random(batch.num_rows, 4, 16, seed=3, device=device)
    made = batch.levels(plan)
    assert len(made) == {"causal": 1, "split": 2, "shared": 2}[plan]
    state = cascade_attention(q, k, v, made, backend=backend)
    arguments = (q, k, v, table, batch.cache_seqlens)
    assert_state_close(state, attention_oracle(*arguments, cu_seqlens_q=batch.cu_seqlens_q, causal=True))
    assert ledger(made).pairs == sum(interactions(n, hit) for n, hit in zip(lens, hits, strict=True))
    assert ledger(made).kv_tokens == sum(lens) - (8 if plan == "shared" else 0)
    (whole,) = batch.levels()
    check_plan(made, whole)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(hits=[3]), ValueError, r"hits: expected one per request \(2\), given 1"),
        (dict(hits=[10, 0]), ValueError, "hit: expected at most n = 9, given 10"),
        (dict(num_pages=4), ValueError, "num_pages: expected at least 5 pages of 4 tokens, given 4"),
        (dict(page_table=int32([[0, 1, -1], [3, 4, 5]])), ValueError, "page_table: expected page ids from 0 to 4"),
        (
            dict(page_table=int32([[0, 1, 2], [0, 4, 5]])),
            ValueError,
            "page_table: expected a slot of its own .* slot 0",
        ),
        (
            dict(page_table=int32([[0, 1, 2], [2, 4, 5]])),
            ValueError,
            "page_table: expected a slot of its own .* slot 8",
        ),
        (dict(page_table=int32([[0, 1]])), ValueError, r"page_table: expected \[2, at least 3\]"),
        (dict(page_size=0), ValueError, "page_size: expected a number >= 1, given 0"),
    ],
)
def test_broken_prefix_hits_are_refused(changes, error, message):
    good = dict(prompt_lens=[9, 6], hits=[8, 0], page_size=4)
    batch = PrefixHitBatch(**good)
    assert batch.page_table.tolist() == [[0, 1, 2], [3, 4, -1]]
    with pytest.raises(ValueError, match="plan: expected one of"):
        batch.levels("cascade")
    with pytest.raises(ValueError, match="r: expected a request from 0 to 1, given 2"):
        batch.prefix_slots(2)
    with pytest.raises(error, match=message):
        PrefixHitBatch(**good | changes)


def test_a_whole_hit_and_nobody():
    batch = PrefixHitBatch([8, 5], [8, 5], 4)
    assert batch.num_rows == 0
    assert batch.positions.tolist() == batch.suffix_slots().tolist() == []
    nobody = PrefixHitBatch([], [], 4)
    assert (nobody.num_rows, nobody.num_pages) == (0, 0)
    assert ledger(nobody.levels("shared")).pairs == 0


def test_ragged_keys_share_nothing_and_pass_the_check():
    k = random(9, 2, 16, seed=1)
    *_, table, lens = paging.ragged_kv(k, k, int32([0, 5, 9]))
    level = Level(int32([0, 2, 3]), table, lens, 1, causal=True)
    check_plan(shared_prefix_levels(table, lens, level.cu_seqlens_q, None, 1), level)
    state = attention(random(3, 4, 16, seed=2), k[:, None], k[:, None], table, lens, cu_seqlens_q=level.cu_seqlens_q)
    assert state.o.shape == (3, 4, 16)
