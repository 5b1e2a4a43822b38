"""Page tables: which tokens they name, their conversions, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch

from cascade_lab import attention, paging
from cascade_lab.evidence.reference import assert_state_close
from tests.cases import attention_case, int32, offsets, random

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
