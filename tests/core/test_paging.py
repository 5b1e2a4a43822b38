"""Page tables: which tokens they name, their conversions, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch

from cascade_lab import Level, attention, cascade_attention, paging, runtime
from cascade_lab.evidence.reference import assert_state_close, attention_oracle
from tests.cases import attention_case, int32, offsets, poisoned_cache, random

LENGTHS = [5, 0, 16, 17, 1, 32]


def spelled_out(lengths: list[int], page_size: int) -> list[list[int]]:
    """Consecutive page ids of each request, counted token by token."""
    pages, fresh = [], 0
    for length in lengths:
        mine = []
        for n in range(length):
            if n % page_size == 0:
                mine.append(fresh)
                fresh += 1
        pages.append(mine)
    return pages


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 64])
def test_built_tables_give_each_request_pages_of_its_own(page_size):
    table = paging.build_page_table(LENGTHS, page_size, first_page=10)
    assert table.dtype == torch.int32
    for row, pages in zip(table.tolist(), spelled_out(LENGTHS, page_size), strict=True):
        assert row == [10 + page for page in pages] + [-1] * (table.shape[1] - len(pages))


def test_building_for_nobody_gives_no_rows():
    assert paging.build_page_table([], 16).shape == (0, 0)
    assert paging.build_page_table([0, 0], 16).shape == (2, 0)


@pytest.mark.parametrize(("length", "page_size", "pages"), [(100, 16, 7), (8, 4, 2), (0, 4, 0), (1, 4, 1), (9, 1, 9)])
def test_pages_needed(length, page_size, pages):
    assert paging.pages_needed(length, page_size) == pages
    assert paging.pages_needed(torch.tensor([length]), page_size).tolist() == [pages]


def test_slots_start_at_whole_pages_not_at_the_sum_of_lengths():
    """K35 (tests/known_faults.md): lengths 5 and 7 in pages of 4 start at slots 0 and 8."""
    table = paging.build_page_table([5, 7], 4)
    assert paging.token_slots(table, 0, 5, 4).tolist() == [0, 1, 2, 3, 4]
    assert paging.token_slots(table, 1, 7, 4).tolist() == [8, 9, 10, 11, 12, 13, 14]


def test_slots_follow_the_table_in_any_order_of_pages():
    table = int32([[7, 2, 9, -1], [3, 0, -1, -1]])
    slots = paging.token_slots(table, 0, 8, 3)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [21, 22, 23, 6, 7, 8, 27, 28]
    assert paging.token_slots(table, 1, 0, 3).tolist() == []


def test_slots_beyond_the_32_bit_range_are_exact():
    table = int32([[2**31 - 1]])
    assert paging.token_slots(table, 0, 2, 256).tolist() == [(2**31 - 1) * 256, (2**31 - 1) * 256 + 1]


@pytest.mark.parametrize("length", [-1, 9])
def test_slots_of_more_tokens_than_the_row_holds_are_refused(length):
    with pytest.raises(ValueError, match=rf"length: expected 0 to 8 tokens for 2 pages of 4, given {length}"):
        paging.token_slots(int32([[0, 1]]), 0, length, 4)


@pytest.mark.parametrize(("length", "pages", "last"), [(100, 7, 4), (8, 1, 8), (16, 1, 16), (17, 2, 1), (0, 0, 0)])
def test_last_page_length_counts_tokens_not_pages(length, pages, last):
    """K33: 100 tokens in pages of 16 are 7 pages, the last of 4."""
    table = paging.build_page_table([3, length], 16)
    indptr, indices, last_page_len = paging.page_table_to_csr(table, int32([3, length]), 16)
    assert indptr.tolist() == [0, 1, 1 + pages]
    assert len(indices) == 1 + pages
    assert last_page_len.tolist() == [3, last]


def test_a_full_last_page_has_the_length_of_a_page():
    """K33: 8 tokens in pages of 4 end in a page of 4, not of 0."""
    _, _, last = paging.page_table_to_csr(paging.build_page_table([8, 4], 4), int32([8, 4]), 4)
    assert last.tolist() == [4, 4]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_csr_round_trip(page_size):
    generator = torch.Generator().manual_seed(0)
    pages = [-(-n // page_size) for n in LENGTHS]
    ids = torch.randperm(sum(pages), generator=generator).tolist()
    table = torch.full((len(LENGTHS), max(pages) + 2), 2**31 - 1, dtype=torch.int32)
    at = 0
    for r, count in enumerate(pages):
        table[r, :count] = int32(ids[at : at + count])
        at += count
    indptr, indices, last = paging.page_table_to_csr(table, int32(LENGTHS), page_size)
    assert {x.dtype for x in (indptr, indices, last)} == {torch.int32}
    assert indptr.tolist() == offsets(pages).tolist()
    assert indices.tolist() == ids
    back, lengths = paging.page_table_from_csr(indptr, indices, last, page_size)
    assert lengths.tolist() == LENGTHS
    for r, count in enumerate(pages):
        assert back[r].tolist() == table[r, :count].tolist() + [-1] * (max(pages) - count)
    again = paging.page_table_to_csr(back, lengths, page_size)
    assert all(torch.equal(a, b) for a, b in zip(again, (indptr, indices, last), strict=True))


def test_csr_of_no_requests():
    table, lengths = paging.page_table_from_csr(int32([0]), int32([]), int32([]), 16)
    assert table.shape == (0, 0)
    assert lengths.shape == (0,)


def test_attention_over_a_table_from_csr(backend, device, loads):
    case = attention_case([2, 1, 3], [9, 4, 30], page=4, device=device)
    csr = paging.page_table_to_csr(case.page_table, case.cache_seqlens, 4)
    table, lengths = paging.page_table_from_csr(*csr, 4)
    state = attention(
        case.q, case.k_cache, case.v_cache, table, lengths, cu_seqlens_q=case.cu_seqlens_q, backend=backend
    )
    assert_state_close(state, case.reference())


@pytest.mark.parametrize(
    ("indptr", "last", "message"),
    [
        ([0, 2, 3], [0, 4], r"last_page_len: expected 1 to 4, given 0 for request 0"),
        ([0, 2, 3], [4, 5], r"last_page_len: expected 1 to 4, given 5 for request 1"),
        ([0, 2, 3], [4, -1], r"last_page_len: expected 1 to 4, given -1 for request 1"),
        ([0, 3, 3], [4, 1], r"last_page_len: expected 0 for a request without pages, given 1 for request 1"),
        ([0, 3, 3], [4], r"last_page_len: expected shape \(2,\), given \(1,\)"),
        ([1, 2, 3], [1, 1], r"indptr: expected offsets rising from 0 to len\(indices\) = 3, given \[1, 2, 3\]"),
        ([0, 2, 2], [1, 0], r"indptr: expected .* 3, given \[0, 2, 2\]"),
        ([0, 4, 3], [1, 1], r"indptr: expected .* 3, given \[0, 4, 3\]"),
        ([], [], r"indptr: expected .* given \[\]"),
    ],
)
def test_broken_csr_is_refused(indptr, last, message):
    """K33: a last page holds 1 to page_size tokens, and 0 only where there is no page."""
    with pytest.raises(ValueError, match=message):
        paging.page_table_from_csr(int32(indptr), int32([0, 1, 2]), int32(last), 4)


@pytest.mark.parametrize(("lengths", "given"), [([4, 9], "9 for request 1"), ([-1, 8], "-1 for request 0")])
def test_lengths_that_a_row_cannot_hold_are_refused(lengths, given):
    with pytest.raises(ValueError, match=rf"cache_seqlens: expected 0 to 8 tokens \(2 pages of 4\), given {given}"):
        paging.page_table_to_csr(int32([[0, 1], [2, 3]]), int32(lengths), 4)


def test_only_pages_that_are_read_are_checked():
    table = int32([[0, 5, -7], [4, 2**31 - 1, -1]])
    paging.check_page_table(table, int32([8, 4]), 6, 4)
    for page in (6, -1):
        table[0, 1] = page
        with pytest.raises(ValueError, match=f"page ids from 0 to 5, given {page} for request 0, page 1"):
            paging.check_page_table(table, int32([8, 4]), 6, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paging.build_page_table([3, -1], 4), r"lengths\[1\]: expected a number >= 0, given -1"),
        (lambda: paging.build_page_table([3], 0), "page_size: expected a number >= 1, given 0"),
        (lambda: paging.token_slots(int32([[0]]), 0, 1, 0), "page_size: expected a number >= 1, given 0"),
        (lambda: paging.branch_capacity(30, 4, 5, -2), "page_size: expected a number >= 1, given -2"),
        (lambda: paging.page_table_to_csr(int32([[0]]), int32([0]), 0), "page_size: expected a number >= 1, given 0"),
    ],
)
def test_wrong_sizes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("prefix", "branches", "steps", "page", "slots"),
    [
        (30, 4, 5, 16, 128),
        (32, 4, 5, 16, 64),
        (31, 4, 1, 16, 64),
        (31, 4, 2, 16, 128),
        (7, 8, 5, 4, 64),
        (5, 3, 2, 1, 6),
    ],
)
def test_branch_capacity_counts_whole_pages_of_every_branch(prefix, branches, steps, page, slots):
    """K22: 30 tokens, page 16, 5 steps, 4 branches: 14 + 5 tokens are two pages a branch, 128 slots and not 20."""
    assert paging.branch_capacity(prefix, branches, steps, page) == slots
    tail = prefix
    while tail >= page:
        tail -= page
    assert slots == sum(page for _ in range(branches) for n in range(tail + steps) if n % page == 0)


def test_sharing_is_found_by_comparing_page_ids():
    """K28: of 15 requests the 8 survivors have 8 first pages, however many references one of these still counts."""
    survivors = int32([[page, 20 + page] for page in range(8)])
    lengths = int32([256] * 8)
    assert paging.shared_prefix_len(survivors, lengths, lengths, 128) == 0
    survivors[:, 0] = 3
    assert paging.shared_prefix_len(survivors, lengths, lengths, 128) == 128


@pytest.mark.parametrize(
    ("table", "lengths", "computed", "shared"),
    [
        ([[1, 2, 3], [1, 2, 4]], [12, 12], [12, 12], 8),
        ([[1, 2, 3], [1, 2, 3]], [12, 11], [12, 11], 8),
        ([[1, 2, 3], [1, 2, 3]], [12, 12], [12, 7], 4),
        ([[1, 2, 3], [1, 2, 3]], [12, 12], [12, 0], 0),
        ([[1, 2, 3], [4, 2, 3]], [12, 12], [12, 12], 0),
        ([[1, 2, 3], [1, 5, 3]], [12, 12], [12, 12], 4),
        ([[1, -1, -1], [1, -1, -1]], [4, 4], [4, 4], 4),
        ([[1, -1, -1], [1, -1, -1]], [4, 4], [12, 12], 4),
        ([[1, 2, 3]], [10], [10], 8),
    ],
)
def test_shared_prefix_len(table, lengths, computed, shared):
    assert paging.shared_prefix_len(int32(table), int32(lengths), int32(computed), 4) == shared


def test_shared_prefix_len_of_nobody_is_0_and_shapes_are_checked():
    assert paging.shared_prefix_len(torch.zeros(0, 3, dtype=torch.int32), int32([]), int32([]), 4) == 0
    with pytest.raises(ValueError, match=r"page_table, cache_seqlens, computed_lens: expected \[R, max_pages\]"):
        paging.shared_prefix_len(int32([[1], [1]]), int32([4, 4]), int32([4]), 4)


def test_split_kv_cache_is_a_pair_of_views():
    both = random(3, 2, 4, 2, 8, seed=1)
    k_cache, v_cache = paging.split_kv_cache(both)
    assert k_cache.shape == v_cache.shape == (3, 4, 2, 8)
    assert {x.untyped_storage().data_ptr() for x in (k_cache, v_cache)} == {both.untyped_storage().data_ptr()}
    k_cache[2, 3, 1, 7], v_cache[0, 0, 0, 0] = 41.0, 42.0
    assert (both[2, 0, 3, 1, 7], both[0, 1, 0, 0, 0]) == (41.0, 42.0)


def test_attention_over_a_split_cache(backend, device, loads):
    case = attention_case([2, 1], [9, 14], page=4, device=device)
    both = torch.full((len(case.k_cache), 2, 4, 2, 16), math.nan, device=device)
    both[:, 0], both[:, 1] = case.k_cache, case.v_cache
    k_cache, v_cache = paging.split_kv_cache(both)
    arguments = (case.q, k_cache, v_cache, case.page_table, case.cache_seqlens)
    assert_state_close(attention(*arguments, cu_seqlens_q=case.cu_seqlens_q, backend=backend), case.reference())


@pytest.mark.parametrize("shape", [(3, 4, 2, 8), (3, 3, 4, 2, 8), (3, 1, 4, 2, 8)])
def test_split_kv_cache_refuses_other_layouts(shape):
    with pytest.raises(ValueError, match=r"kv_cache: expected \[num_pages, 2, page_size, H_kv, D\], given shape"):
        paging.split_kv_cache(torch.zeros(shape))


def test_dense_table_reads_one_page_per_request():
    assert paging.dense_page_table(3).tolist() == [[0], [1], [2]]


def test_ragged_keys_are_a_cache_of_one_token_pages(backend, device, loads):
    """Packed keys with cu_seqlens_k, strided and with an empty request, are read where they lie."""
    lens, rows = [9, 0, 21, 1], [2, 1, 3, 1]
    k = torch.full((31, 3, 24), math.nan, device=device)[:, 1:, 4:20]
    v = torch.full((31, 2, 8), math.nan, device=device)
    k.copy_(random(31, 2, 16, seed=1)), v.copy_(random(31, 2, 8, seed=2))
    q = random(7, 4, 16, seed=3, device=device)
    k_cache, v_cache, table, seqlens = paging.ragged_kv(k, v, offsets(lens, device))
    assert k_cache.data_ptr() == k.data_ptr()
    assert v_cache.data_ptr() == v.data_ptr()
    assert seqlens.tolist() == lens
    assert {table.dtype, seqlens.dtype} == {torch.int32}
    state = attention(
        q, k_cache, v_cache, table, seqlens, cu_seqlens_q=offsets(rows, device), causal=True, backend=backend
    )
    # the oracle reads each request from a dense cache of its own
    dense = [torch.zeros(4, 21, 2, width, device=device) for width in (16, 8)]
    for r, n in enumerate(lens):
        for cache, x in zip(dense, (k, v), strict=True):
            cache[r, :n] = x[sum(lens[:r]) : sum(lens[:r]) + n]
    arguments = (q, *dense, paging.dense_page_table(4, device=device), seqlens)
    assert_state_close(state, attention_oracle(*arguments, cu_seqlens_q=offsets(rows, device), causal=True))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(cu_seqlens_k=int32([0, 2, 4])), ValueError, "cu_seqlens_k: expected offsets rising from 0 to T_k = 5"),
        (dict(cu_seqlens_k=int32([0, 3, 2, 5])), ValueError, "cu_seqlens_k: expected offsets rising"),
        (dict(cu_seqlens_k=int32([])), ValueError, "cu_seqlens_k: expected offsets rising"),
        (dict(cu_seqlens_k=torch.tensor([0, 5])), TypeError, "cu_seqlens_k: expected int32, given torch.int64"),
        (dict(v=torch.zeros(4, 2, 8)), ValueError, r"v: expected \[T_k, H_kv\] = \(5, 2\) as k"),
        (dict(k=torch.zeros(5, 8)), ValueError, r"k: expected \[T_k, H_kv, D\], given shape \(5, 8\)"),
    ],
)
def test_broken_ragged_keys_are_refused(changes, error, message):
    good = dict(k=torch.zeros(5, 2, 8), v=torch.zeros(5, 2, 4), cu_seqlens_k=int32([0, 2, 5]))
    with pytest.raises(error, match=message):
        paging.ragged_kv(**good | changes)


def test_slots_of_all_rows_follow_one_another():
    table = int32([[7, 2, 9, -1], [3, 0, -1, -1], [5, -1, -1, -1]])
    lens = [8, 4, 0]
    slots = paging.token_slots(table, int32(lens), 3)
    assert slots.dtype == torch.int64
    assert slots.tolist() == sum((paging.token_slots(table, r, n, 3).tolist() for r, n in enumerate(lens)), [])
    assert slots.tolist() == [21, 22, 23, 6, 7, 8, 27, 28, 9, 10, 11, 0]
    assert paging.token_slots(table, lens, 3, starts=[5, 0, 0]).tolist() == [8, 27, 28, 9, 10, 11, 0]
    assert paging.token_slots(table, lens, 3, starts=lens).tolist() == []
    assert paging.token_slots(int32([]).view(0, 2), [], 3).tolist() == []


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: paging.token_slots(t, [9, 1], 4), ValueError, r"lens: expected at most 8 .* given 9 for row 0"),
        (
            lambda t: paging.token_slots(t, [1], 4),
            ValueError,
            r"lens: expected one per row of page_table \(2\), given 1",
        ),
        (lambda t: paging.token_slots(t, [1, -1], 4), ValueError, r"lens\[1\]: expected a number >= 0, given -1"),
        (lambda t: paging.token_slots(t, [1, 2.0], 4), TypeError, r"lens\[1\]: expected an integer, given 2.0"),
        (
            lambda t: paging.token_slots(t, [1, 2], 4, starts=[2, 2]),
            ValueError,
            "starts: expected one per row, at most",
        ),
        (lambda t: paging.token_slots(t, [1, 2], 0), ValueError, "page_size: expected a number >= 1, given 0"),
        (lambda t: paging.token_slots(t, 0, 1, 4, starts=[0]), ValueError, "starts: expected None for a single row"),
    ],
)
def test_broken_lengths_of_rows_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(int32([[0, 1], [2, 3]]))


CACHES = ["packed", "heads first", "interleaved", "padded", "split", "HND", "split HND"]


def cache_of(kind: str, dtype=torch.float32, device="cpu") -> tuple[torch.Tensor, torch.Tensor, str]:
    """(memory full of NaN, the cache in it, its layout): 6 pages of 4 tokens, 2 heads, 16 numbers."""
    split = torch.full((6, 2, 4, 2, 16) if kind == "split" else (6, 2, 2, 4, 16), math.nan, dtype=dtype, device=device)
    if kind == "split":
        return split, split[:, 1], "NHD"
    if kind == "split HND":
        return split, split[:, 1], "HND"
    if kind == "HND":
        memory = torch.full((6, 2, 4, 16), math.nan, dtype=dtype, device=device)
        return memory, memory, "HND"
    cache = poisoned_cache(6, 4, 2, 16, dtype, device, kind)
    return (cache if cache._base is None else cache._base), cache, "NHD"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CACHES)
def test_tokens_are_written_where_the_cache_lies_and_nowhere_else(kind, dtype):
    """K92: a view of single tokens does not exist for most of these, and a reshaped copy would keep the write."""
    memory, cache, layout = cache_of(kind, dtype)
    slots = torch.tensor([22, 3, 0, 13])
    x = random(4, 2, 16, seed=1, dtype=dtype)
    paging.write(cache, slots, x, layout=layout)
    assert int((~memory.isnan()).sum()) == x.numel()
    for slot, token in zip(slots.tolist(), x, strict=True):
        for head in range(2):
            place = (slot // 4, head, slot % 4) if layout == "HND" else (slot // 4, slot % 4, head)
            assert torch.equal(cache[place], token[head])
    assert torch.equal(paging.read(cache, slots.int(), layout=layout), x)
    assert torch.equal(paging.read(cache, torch.tensor([3, 3]), layout=layout), x[[1, 1]])


@pytest.mark.parametrize("kind", CACHES)
def test_tokens_are_all_read_before_one_is_moved(kind):
    """0 -> 1 -> 2 -> 0: a copy one after another would leave three times the same token."""
    _, cache, layout = cache_of(kind)
    x = random(3, 2, 16, seed=2)
    paging.write(cache, torch.tensor([0, 1, 2]), x, layout=layout)
    paging.move(cache, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), layout=layout)
    assert torch.equal(paging.read(cache, torch.tensor([1, 2, 0]), layout=layout), x)


@pytest.mark.parametrize("kind", ["split", "split HND", "HND"])
def test_attention_reads_what_was_written_in_either_layout(backend, device, loads, kind):
    case = attention_case([2, 1, 3], [9, 4, 6], page=4, device=device)
    slots = paging.token_slots(case.page_table, case.cache_seqlens, 4)
    caches = []
    for cache in (case.k_cache, case.v_cache):
        shape = (len(cache), 2, 4, 2, 16) if kind == "split" else (len(cache), 2, 2, 4, 16)
        memory = torch.full(shape, math.nan, device=device)
        own, layout = memory[:, 1], "NHD" if kind == "split" else "HND"
        paging.write(own, slots, cache.reshape(-1, 2, 16)[slots], layout=layout)
        caches.append(own)
    arguments = (case.q, *caches, case.page_table, case.cache_seqlens)
    options = dict(cu_seqlens_q=case.cu_seqlens_q, layout=layout, backend=backend)
    state = attention(*arguments, **options)
    assert_state_close(state, case.reference())
    level = Level(case.cu_seqlens_q, case.page_table, case.cache_seqlens, 4)
    options.pop("cu_seqlens_q")
    assert torch.equal(cascade_attention(case.q, *caches, [level], **options).o, state.o)


def test_a_cache_in_the_other_layout_is_refused_where_heads_tell():
    """H_q = 4 is no multiple of the 16 tokens of a page; H_kv = page_size is nothing that a shape tells apart."""
    q, table, lens = torch.zeros(2, 4, 8), int32([[0], [1]]), int32([5, 7])
    nhd, hnd = torch.zeros(3, 16, 2, 8), torch.zeros(3, 2, 16, 8)
    level = Level(int32([0, 1, 2]), table, lens, 16)
    for cache, layout, other in ((hnd, "NHD", "HND"), (nhd, "HND", "NHD")):
        message = f"multiple of H_kv = 16, given H_q = 4; the caches fit layout='{other}' with H_kv = 2"
        with pytest.raises(ValueError, match=message):
            attention(q, cache, cache, table, lens, layout=layout)
        with pytest.raises(ValueError, match=message):
            cascade_attention(q, cache, cache, [level], layout=layout)
        with pytest.raises(ValueError, match=rf"x: expected .* in layout '{layout}', .*; it fits layout='{other}'"):
            paging.write(cache, torch.tensor([1]), torch.zeros(1, 2, 8), layout=layout)
        both = torch.stack((cache, cache), 1)
        with pytest.raises(ValueError, match=f"kv_cache: expected .* H_kv = 2, .*; it fits layout='{other}'"):
            paging.split_kv_cache(both, layout=layout, num_kv_heads=2)
        right = paging.split_kv_cache(both, layout=other, num_kv_heads=2)
        assert {x.shape for x in right} == {(3, 16, 2, 8)}
        assert {x.untyped_storage().data_ptr() for x in right} == {both.untyped_storage().data_ptr()}
    for call in (
        lambda: attention(q, nhd, nhd, table, lens, layout="DHN"),
        lambda: paging.write(nhd, torch.tensor([1]), torch.zeros(1, 2, 8), layout="DHN"),
        lambda: paging.split_kv_cache(both, layout="DHN"),
    ):
        with pytest.raises(ValueError, match=r"layout: expected one of \('NHD', 'HND'\), given 'DHN'"):
            call()


SLOTS = torch.tensor([1, 5])


@pytest.mark.parametrize(
    ("cache", "slots", "x", "error", "message"),
    [
        (torch.zeros(3, 4, 2, 8), torch.tensor([1, 12]), torch.zeros(2, 2, 8), ValueError, "from 0 to 11 .* given 12"),
        (torch.zeros(3, 4, 2, 8), torch.tensor([-1, 2]), torch.zeros(2, 2, 8), ValueError, "slots: .* given -1"),
        (torch.zeros(3, 4, 2, 8), torch.tensor([2, 2]), torch.zeros(2, 2, 8), ValueError, "each slot once, given 2"),
        (torch.zeros(3, 4, 2, 8), SLOTS, torch.zeros(2, 3, 8), ValueError, r"x: expected \[n, H_kv, D\] = \[2, 2, 8\]"),
        (torch.zeros(3, 4, 2, 8), SLOTS, torch.zeros(3, 2, 8), ValueError, "x: expected .* for 2 slots"),
        (torch.zeros(3, 4, 2, 8), SLOTS, torch.zeros(2, 2, 8).half(), TypeError, "x: expected dtype torch.float32"),
        (torch.zeros(3, 4, 2, 8), SLOTS.float(), torch.zeros(2, 2, 8), TypeError, "slots: expected int64 or int32"),
        (
            torch.zeros(12, 2, 8),
            SLOTS,
            torch.zeros(2, 2, 8),
            ValueError,
            r"cache: expected \[num_pages, page_size, H_kv",
        ),
        (
            torch.zeros(4, 2, 8).expand(3, 4, 2, 8),
            SLOTS,
            torch.zeros(2, 2, 8),
            ValueError,
            "cache: expected a place of",
        ),
        (
            torch.zeros(99).as_strided((3, 4, 2, 8), (8, 16, 8, 1)),
            SLOTS,
            torch.zeros(2, 2, 8),
            ValueError,
            "a place of",
        ),
        (torch.zeros(3, 4, 2, 8, requires_grad=True), SLOTS, torch.zeros(2, 2, 8), RuntimeError, "cache: expected"),
        ([0.0], SLOTS, torch.zeros(2, 2, 8), TypeError, "cache: expected a tensor, given list"),
    ],
)
def test_what_cannot_be_written_in_place_is_refused_and_nothing_is_changed(cache, slots, x, error, message):
    with pytest.raises(error, match=message):
        paging.write(cache, slots, x + 1)
    assert not torch.as_tensor(cache).any()


def test_writes_without_checks_and_of_nothing():
    cache = torch.zeros(2, 4, 1, 8)
    paging.write(cache, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1, 8))
    with runtime.unchecked():
        paging.write(cache, torch.tensor([7]), torch.ones(1, 1, 8))
    assert cache.sum() == cache[1, 3].sum() == 8


def test_gradients_pass_through_a_write():
    x = random(2, 2, 8, seed=1).requires_grad_()
    cache = torch.zeros(3, 4, 2, 8)
    paging.write(cache, torch.tensor([9, 2]), x)
    (cache[2, 1] * 3).sum().backward()
    assert torch.equal(x.grad, torch.tensor([3.0, 0.0])[:, None, None].expand(2, 2, 8))


def test_moves_name_as_many_sources_as_destinations():
    with pytest.raises(ValueError, match=r"dst: expected one per source \(2\), given 1"):
        paging.move(torch.zeros(3, 4, 2, 8), SLOTS, torch.tensor([1]))
