"""Page tables convert and come back, and what requests share is what equal page ids prove."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from cascade_lab import paging
from tests.cases import int32
from tests.properties.budget import cases
from tests.properties.strategies import page_sizes

lengths = st.lists(st.integers(0, 40), max_size=5)


@st.composite
def tables(draw, ids: st.SearchStrategy[int] | None = None) -> tuple[torch.Tensor, list[int], int]:
    """(page table with junk behind each length, lengths, page size); pages may repeat."""
    size, tokens = draw(page_sizes), draw(lengths)
    columns = max((-(-n // size) for n in tokens), default=0) + draw(st.integers(0, 2))
    ids = st.integers(0, 50) if ids is None else ids
    rows = []
    for n in tokens:
        used = -(-n // size)
        junk = st.sampled_from([-1, 2**31 - 1, -(2**31)])
        rows.append([draw(ids) for _ in range(used)] + [draw(junk) for _ in range(columns - used)])
    return int32(rows).view(len(tokens), columns), tokens, size


@cases(200)
@given(tables())
def test_csr_names_the_pages_of_each_request_and_comes_back(drawn):
    table, tokens, size = drawn
    indptr, indices, last = paging.page_table_to_csr(table, int32(tokens), size)
    assert {x.dtype for x in (indptr, indices, last)} == {torch.int32}
    used = [-(-n // size) for n in tokens]
    assert indptr.tolist() == [sum(used[:r]) for r in range(len(used) + 1)]
    assert indices.tolist() == [page for row, count in zip(table.tolist(), used, strict=True) for page in row[:count]]
    assert last.tolist() == [n - (count - 1) * size if count else 0 for n, count in zip(tokens, used, strict=True)]
    back, seqlens = paging.page_table_from_csr(indptr, indices, last, size)
    assert seqlens.tolist() == tokens
    assert back.shape == (len(tokens), max(used, default=0))
    for row, own, count in zip(back.tolist(), table.tolist(), used, strict=True):
        assert row == own[:count] + [-1] * (back.shape[1] - count)


@cases(150)
@given(tables())
def test_slots_are_page_times_size_plus_offset(drawn):
    table, tokens, size = drawn
    for r, n in enumerate(tokens):
        slots = paging.token_slots(table, r, n, size)
        assert slots.tolist() == [table.tolist()[r][i // size] * size + i % size for i in range(n)]
    paging.check_page_table(table, int32(tokens), 51, size)


@cases(150)
@given(lengths, page_sizes, st.integers(0, 9))
def test_built_tables_give_every_token_a_slot_of_its_own(tokens, size, first):
    table = paging.build_page_table(tokens, size, first_page=first)
    slots = [slot for r, n in enumerate(tokens) for slot in paging.token_slots(table, r, n, size).tolist()]
    assert len(set(slots)) == sum(tokens)
    pages = sum(-(-n // size) for n in tokens)
    assert sorted({slot // size for slot in slots}) == list(range(first, first + pages))
    assert int((table >= 0).sum()) == pages
    assert all(paging.pages_needed(n, size) == len(range(0, n, size)) for n in tokens)


@cases(200)
@given(tables(ids=st.integers(0, 1)), st.data())
def test_shared_prefix_is_the_longest_run_of_whole_equal_pages(drawn, data):
    table, tokens, size = drawn
    computed = [data.draw(st.integers(0, n)) for n in tokens]
    limit = min(computed, default=0)
    shared = 0
    while tokens and shared + size <= limit and len({row[shared // size] for row in table.tolist()}) == 1:
        shared += size
    assert paging.shared_prefix_len(table, int32(tokens), int32(computed), size) == shared


@cases(80)
@given(st.integers(0, 4), st.integers(1, 6), page_sizes, st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_a_cache_splits_into_views_of_keys_and_values(pages, extra, size, heads, dim, sliced):
    cache = torch.arange(pages * 2 * size * heads * (dim + extra), dtype=torch.float64)
    cache = cache.view(pages, 2, size, heads, dim + extra)
    cache = cache[..., :dim] if sliced else cache
    keys, values = paging.split_kv_cache(cache)
    assert torch.equal(torch.stack((keys, values), 1), cache)
    assert (
        keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    )


@cases(80)
@given(st.integers(0, 60), st.integers(1, 8), st.integers(0, 12), page_sizes)
def test_branches_own_the_pages_of_tail_and_steps(prefix, branches, steps, size):
    own = len({(prefix // size * size + i) // size for i in range(prefix % size + steps)})
    assert paging.branch_capacity(prefix, branches, steps, size) == branches * own * size
