"""Draft trees, their masks and positions, and the slots and plans of a batch of them."""

from __future__ import annotations

import random as python_random
from itertools import permutations

import numpy as np
import pytest
import torch

from cascade_lab import DraftTree, VerifyBatch, cascade_attention, paging
from cascade_lab.drafts import PLANS, ROWS
from cascade_lab.evidence.reference import assert_state_close
from tests.cases import int32, tree_words
from tests.verify import (
    CHAIN,
    FORK,
    SHUFFLED,
    STAR,
    check_levels,
    path_to,
    row_ends,
    run_levels,
    verify_case,
    virtual_paths,
)

TREES = {"fork": FORK, "shuffled": SHUFFLED, "chain": CHAIN, "star": STAR, "one": [-1], "flat": [-1, -1, -1]}


def random_parents(size: int, seed: int) -> list[int]:
    """A random forest with its nodes stored in random order."""
    draw = python_random.Random(seed)
    grown = [draw.choice([-1, *range(i)]) for i in range(size)]
    order = draw.sample(range(size), size)
    return relabel(grown, order)


def relabel(parents: list[int], order: list[int]) -> list[int]:
    """The same tree with old node i stored at place order[i]."""
    moved = [-1] * len(parents)
    for i, parent in enumerate(parents):
        moved[order[i]] = -1 if parent < 0 else order[parent]
    return moved


def seen_by(tree: DraftTree, i: int) -> set[int]:
    """Nodes whose bits are set in row i of the mask."""
    words = tree.mask[i].tolist()
    return {64 * w + b for w, word in enumerate(words) for b in range(64) if word >> b & 1}


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_everything_follows_from_parent_links(parents):
    tree = DraftTree(parents)
    paths = [path_to(parents, i) for i in range(len(parents))]
    assert tree.size == len(parents)
    assert tree.depth == max(map(len, paths))
    assert [tree.ancestors(i) for i in range(tree.size)] == [tuple(path[:-1]) for path in paths]
    assert [seen_by(tree, i) for i in range(tree.size)] == [set(path) for path in paths]
    assert tree.positions(7).tolist() == [7 + len(path) - 1 for path in paths]
    assert tree.leaves == tuple(row_ends(parents, "leaf"))


def test_node_sees_its_ancestors_and_itself_but_no_sibling_or_cousin():
    """K25 (tests/known_faults.md): 1 and 2 under 0, 3 under 1, 4 under 2."""
    tree = DraftTree([-1, 0, 0, 1, 2])
    assert (seen_by(tree, 1), seen_by(tree, 2)) == ({0, 1}, {0, 2})
    assert seen_by(tree, 3) == {0, 1, 3}
    assert seen_by(tree, 4) == {0, 2, 4}
    assert tree.ancestors(3) == (0, 1)
    assert tree.ancestors(0) == ()


@pytest.mark.parametrize("parents", [FORK, SHUFFLED[:0] + [-1, 0, 1, 1]], ids=["fork", "late fork"])
def test_every_storage_order_gives_the_same_tree(parents):
    original = DraftTree(parents)
    for order in permutations(range(len(parents))):
        moved = DraftTree(relabel(parents, list(order)))
        for i, place in enumerate(order):
            assert moved.ancestors(place) == tuple(order[a] for a in original.ancestors(i))
            assert seen_by(moved, place) == {order[j] for j in seen_by(original, i)}
            assert moved.positions(5)[place] == original.positions(5)[i]
        assert moved.depth == original.depth


def test_children_stand_below_their_parents_wherever_they_are_stored():
    """K24: a frontier at 11 and 12, both new children under the node at 12: they stand at 13, not at 12 and 13."""
    tree = DraftTree([-1, 0, 1, 1])
    assert tree.positions(11).tolist() == [11, 12, 13, 13]
    assert DraftTree.chain(2).positions(7).tolist() == [7, 8]
    assert tree.positions(0).dtype == torch.int64


@pytest.mark.parametrize("size", [1, 63, 64, 65, 128, 130])
def test_masks_of_any_number_of_nodes(size):
    parents = random_parents(size, seed=size)
    mask = DraftTree(parents).mask
    assert mask.dtype == torch.int64
    assert mask.shape == (size, -(-size // 64))
    assert mask.tolist() == tree_words(parents)


def test_the_sign_bit_is_an_ordinary_bit():
    mask = DraftTree.chain(66).mask
    assert mask[63].tolist() == [-1, 0]
    assert mask[62].tolist() == [2**63 - 1, 0]
    assert mask[65].tolist() == [-1, 3]


def test_branches_are_stored_branch_after_branch():
    """K37: 3 branches of 2 steps in slots 100 to 105: branch 0 is [100, 101], and step-major would be [100, 103]."""
    tree = DraftTree.branches(3, 2)
    assert tree.parents == (-1, 0, -1, 2, -1, 4)
    slots = torch.arange(100, 106)
    table, lengths = tree.ancestor_page_table(slots)
    assert table[list(tree.leaves)].tolist() == [[100, 101], [102, 103], [104, 105]]
    assert lengths[list(tree.leaves)].tolist() == [2, 2, 2]


def test_constructors_agree_with_their_parents():
    assert DraftTree.chain(4) == DraftTree([-1, 0, 1, 2]) == DraftTree.branches(1, 4)
    assert DraftTree.chain(1) == DraftTree([-7])
    assert DraftTree.branches(3, 1).parents == (-1, -1, -1)
    assert hash(DraftTree.chain(3)) == hash(DraftTree.chain(3))
    assert DraftTree(torch.tensor([-1, 0])).parents == (-1, 0)
    # any negative number hangs a node on the prefix, also one below -(number of nodes)
    assert DraftTree([-9, 0, -2, 2]) == DraftTree([-1, 0, -1, 2])
    assert DraftTree(np.array([-128, 0], np.int8)) == DraftTree.chain(2)


def test_paths_are_numbered_by_first_appearance():
    tree = DraftTree.from_paths([("b", "x", "y"), ("a",), ("b", "z"), ("b",), ("a", "x")])
    # b, bx, bxy, a, bz, ax
    assert tree.parents == (-1, 0, 1, -1, 0, 3)
    # ranks among siblings: the same label under another parent is another node
    assert DraftTree.from_paths([(0,), (0, 0), (1,), (1, 0)]).parents == (-1, 0, -1, 2)
    assert DraftTree.from_paths([(0, 0), (1, 0)]) == DraftTree.branches(2, 2)


@pytest.mark.parametrize(
    ("parents", "error", "message"),
    [
        ([], ValueError, "parents: expected at least one node, given none"),
        ([0], ValueError, "parents: expected no cycle, given one through node 0"),
        ([1, 0], ValueError, "parents: expected no cycle"),
        ([-1, 2, 3, 1, 0], ValueError, "parents: expected no cycle, given one through node [123]"),
        ([-1, 2], ValueError, "parents: expected ids below 2, given 2 for node 1"),
        ([-1, 0.0], TypeError, r"parents\[1\]: expected an integer, given 0.0"),
        ([-1, None], TypeError, r"parents\[1\]: expected an integer, given None"),
        (5, TypeError, "parents: expected a sequence of integers, given 5"),
        ([[-1], [0, 1]], TypeError, r"parents\[0\]: expected an integer, given \[-1\]"),
        (["a"], TypeError, r"parents\[0\]: expected an integer, given 'a'"),
        ([-1, False], TypeError, r"parents\[1\]: expected an integer, given False"),
        ([[-1, 0]], TypeError, r"parents\[0\]: expected an integer, given \[-1, 0\]"),
    ],
)
def test_what_is_no_tree_is_refused(parents, error, message):
    with pytest.raises(error, match=message):
        DraftTree(parents)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DraftTree.branches(0, 3), "topk: expected a number >= 1, given 0"),
        (lambda: DraftTree.branches(2, -1), "steps: expected a number >= 1, given -1"),
        (lambda: DraftTree.chain(0), "n: expected a number >= 1, given 0"),
        (lambda: DraftTree.from_paths([]), "parents: expected at least one node"),
        (lambda: DraftTree.from_paths([(), ()]), "parents: expected at least one node"),
        (lambda: DraftTree.chain(3).ancestors(3), "i: expected a node from 0 to 2, given 3"),
        (lambda: DraftTree.chain(3).ancestors(-1), "i: expected a node from 0 to 2, given -1"),
        (lambda: DraftTree.chain(3).ancestors(1.0), "i: expected an integer, given 1.0"),
        (lambda: DraftTree.branches(2.0, 3), "topk: expected an integer, given 2.0"),
        (lambda: DraftTree.chain(2.5), "n: expected an integer, given 2.5"),
        (lambda: DraftTree.chain(3).positions(-1), "prefix_len: expected a number >= 0, given -1"),
        (lambda: DraftTree.chain(3).positions(1.5), "prefix_len: expected an integer, given 1.5"),
        (lambda: DraftTree.chain(3).dense_mask(-1), "prefix_len: expected a number >= 0, given -1"),
        (lambda: DraftTree.chain(3).ancestor_page_table(torch.arange(4)), r"slots: expected one per node, \[3\]"),
        (lambda: DraftTree.from_dense_mask(torch.ones(2, 2)), "mask: expected the ancestor relation of a forest"),
        (lambda: DraftTree.from_dense_mask(torch.ones(0, 0)), r"mask: expected \[N, N\], N >= 1"),
    ],
)
def test_wrong_sizes_are_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize("parents", [*TREES.values(), random_parents(70, 3)], ids=[*TREES, "70 nodes"])
def test_dense_mask_round_trip(parents):
    tree = DraftTree(parents)
    dense = tree.dense_mask()
    assert dense.dtype == torch.bool
    for i in range(tree.size):
        assert dense[i].nonzero().flatten().tolist() == sorted(path_to(parents, i))
    assert DraftTree.from_dense_mask(dense).parents == tuple(max(p, -1) for p in parents)


def test_full_mask_shows_the_whole_prefix():
    tree = DraftTree(SHUFFLED)
    full = tree.dense_mask(prefix_len=5)
    assert full.shape == (7, 12)
    assert full[:, :5].all()
    assert torch.equal(full[:, 5:], tree.dense_mask())


@pytest.mark.parametrize("prefix_len", [0, 1, 3, 13])
@pytest.mark.parametrize("parents", [SHUFFLED, random_parents(66, 1)], ids=["7 nodes", "66 nodes"])
def test_packed_mask_is_little_endian_over_the_flattened_mask(parents, prefix_len):
    tree = DraftTree(parents)
    packed = tree.packed_mask(prefix_len)
    assert packed.dtype == torch.uint8
    flat = [byte >> bit & 1 for byte in packed.tolist() for bit in range(8)]
    entries = tree.size * (prefix_len + tree.size)
    assert len(packed) == -(-entries // 8)
    assert not any(flat[entries:])
    unpacked = torch.tensor(flat[:entries], dtype=torch.bool).view(tree.size, prefix_len + tree.size)
    assert torch.equal(unpacked, tree.dense_mask(prefix_len))
    assert DraftTree.from_dense_mask(unpacked[:, prefix_len:]) == tree


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        ([[1, 0], [0, 0]], "a node does not see itself"),
        ([[1, 1], [1, 1]], "two nodes see each other"),
        ([[1, 0, 0], [1, 1, 0], [0, 1, 1]], "not transitive"),
        ([[1, 0, 0], [0, 1, 0], [1, 1, 1]], "two parents"),
        ([[1, 0]], "not square"),
    ],
)
def test_masks_that_no_tree_has_are_refused(mask, why):
    with pytest.raises(ValueError, match=r"^(mask|parents): expected"):
        DraftTree.from_dense_mask(torch.tensor(mask).bool())


@pytest.mark.parametrize("parents", [*TREES.values(), random_parents(70, 5)], ids=[*TREES, "70 nodes"])
def test_ancestor_page_table_lists_what_the_mask_shows(parents):
    tree = DraftTree(parents)
    slots = torch.arange(tree.size) * 3 + 50
    table, lengths = tree.ancestor_page_table(slots)
    assert table.dtype == lengths.dtype == torch.int32
    assert table.shape == (tree.size, tree.depth)
    for i, (row, length) in enumerate(zip(table.tolist(), lengths.tolist(), strict=True)):
        nodes = [(slot - 50) // 3 for slot in row[:length]]
        assert nodes == sorted(path_to(parents, i))
        assert row[length:] == [-1] * (tree.depth - length)


def test_a_plain_paged_kernel_verifies_over_the_ancestor_page_table(backend, device, loads):
    """The table has as many columns as the deepest path, not as many as there are draft tokens."""
    case = verify_case([5, 9], [SHUFFLED, CHAIN], heads=(2, 1), page=4, device=device)
    tables = [
        DraftTree(parents).ancestor_page_table(case.batch.draft_slots(r)) for r, parents in enumerate((SHUFFLED, CHAIN))
    ]
    table = torch.full((10, 4), -1, dtype=torch.int32, device=device)
    table[:7], table[7:, :3] = tables[0][0].to(device), tables[1][0].to(device)
    prefix, draft = case.batch.levels("cascade")
    assert draft.page_table.shape == (10, 4)
    lengths = torch.cat((tables[0][1], tables[1][1])).to(device)
    assert lengths.tolist() == draft.cache_seqlens.tolist()
    own = type(draft)(draft.cu_seqlens_q, table, lengths, 1)
    check_levels(case, [prefix, own], backend, loads)


PREFIXES, FORESTS = [13, 0, 16, 5, 0, 7], [SHUFFLED, FORK, None, CHAIN, None, [-1, -1]]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("page", [1, 3, 16, 64, 256])
def test_slots_are_disjoint_in_bounds_and_whole(page, rows):
    trees = [parents and DraftTree(parents) for parents in FORESTS]
    batch = VerifyBatch(PREFIXES, trees, page, rows)
    taken = []
    for r, (length, parents) in enumerate(zip(PREFIXES, FORESTS, strict=True)):
        prefix, draft = batch.prefix_slots(r), batch.draft_slots(r)
        assert prefix.dtype == draft.dtype == torch.int64
        assert (len(prefix), len(draft)) == (length, len(parents or []))
        taken += prefix.tolist() + draft.tolist()
    assert len(set(taken)) == len(taken)
    assert 0 <= min(taken) <= max(taken) < batch.num_pages * page
    pages = {r: set((torch.cat((batch.prefix_slots(r), batch.draft_slots(r))) // page).tolist()) for r in range(6)}
    assert sum(map(len, pages.values())) == len(set().union(*pages.values())) == batch.num_pages
    assert batch.num_pages == sum(-(-(n + len(p or [])) // page) for n, p in zip(PREFIXES, FORESTS, strict=True))
    assert batch.num_rows == sum(len(row_ends(parents, rows)) for parents in FORESTS)


@pytest.mark.parametrize("rows", ROWS)
def test_rows_stand_at_prefix_length_plus_depth(rows):
    batch = VerifyBatch(PREFIXES, [parents and DraftTree(parents) for parents in FORESTS], 4, rows)
    expected = [
        length + len(path_to(parents, node)) - 1
        for length, parents in zip(PREFIXES, FORESTS, strict=True)
        for node in row_ends(parents, rows)
    ]
    assert batch.positions.tolist() == expected
    assert batch.row_nodes.tolist() == [node for parents in FORESTS for node in row_ends(parents, rows)]
    assert batch.row_counts == tuple(len(row_ends(parents, rows)) for parents in FORESTS)


@pytest.mark.parametrize("rows", ROWS)
def test_virtual_requests_are_the_paths_in_the_order_of_their_rows(rows):
    batch = VerifyBatch(PREFIXES, [parents and DraftTree(parents) for parents in FORESTS], 4, rows)
    paths = [(r, len(path)) for r, parents in enumerate(FORESTS) for path in virtual_paths(parents, rows)]
    virtual = batch.virtual_requests
    assert virtual.request.tolist() == [r for r, _ in paths]
    assert virtual.drafts.tolist() == [drafts for _, drafts in paths]
    assert virtual.rows.tolist() == [drafts if rows == "branch" else 1 for _, drafts in paths]
    assert {x.dtype for x in virtual} == {torch.int64}
    assert virtual.rows.sum() == batch.num_rows


def test_shared_pages_are_handed_out_once():
    batch = VerifyBatch([9, 12, 8], [DraftTree(FORK), None, DraftTree(CHAIN)], 4, shared_prefix_len=8)
    assert len({tuple(batch.prefix_slots(r)[:8].tolist()) for r in range(3)}) == 1
    own = [torch.cat((batch.prefix_slots(r)[8:], batch.draft_slots(r))).tolist() for r in range(3)]
    flat = sum(own, batch.prefix_slots(0)[:8].tolist())
    assert len(set(flat)) == len(flat) == 8 + 1 + 4 + 0 + 5 + 3
    assert batch.num_pages == 2 + 2 + 1 + 1
    lengths = int32([14, 12, 11])
    assert paging.shared_prefix_len(batch.page_table, lengths, int32([9, 12, 8]), 4) == 8


@pytest.mark.parametrize("plan", PLANS)
def test_an_engine_brings_its_own_pages(backend, device, loads, plan):
    """Shuffled pages, out of range where nothing is read, with two pages shared by all."""
    junk = 2**31 - 1
    table = int32([[6, 1, 11, 4, junk], [6, 1, 9, -5, junk], [6, 1, 2, 7, 0]], device)
    case = verify_case([9, 8, 12], [FORK, CHAIN, SHUFFLED], page=4, shared=8, page_table=table, device=device)
    assert case.batch.num_pages == 12
    assert case.batch.prefix_slots(0).tolist() == [24, 25, 26, 27, 4, 5, 6, 7, 44]
    assert case.batch.draft_slots(1).tolist() == [36, 37, 38]
    check_levels(case, case.batch.levels(plan), backend, loads)


@pytest.mark.parametrize(
    ("table", "shared", "message"),
    [
        ([[0, 1, 2], [3, 1, 4]], 0, "pages of different requests to differ beyond shared_prefix_len = 0, given page 1"),
        ([[0, 1, 2], [0, 3, 4]], 0, "given page 0 more than once"),
        ([[0, 1, 1], [2, 3, 4]], 0, "given page 1 more than once"),
        ([[0, 1, 2], [0, 1, 3]], 4, "beyond shared_prefix_len = 4, given page 1 more than once"),
        ([[0, 1, 2], [3, 4, 5]], 4, "page_table: expected the first 1 pages equal in all requests"),
        ([[0, 1, -1], [3, 4, 5]], 0, "page_table: expected page ids >= 0 for every token, given -1"),
        ([[0, 1], [3, 4]], 0, r"page_table: expected \[2, at least 3\], given shape \(2, 2\)"),
        ([[0, 1, 2]], 0, r"page_table: expected \[2, at least 3\], given shape \(1, 3\)"),
    ],
)
def test_overlapping_or_missing_pages_are_refused(table, shared, message):
    trees = [DraftTree(CHAIN), DraftTree(FORK)]
    with pytest.raises(ValueError, match=message):
        VerifyBatch([8, 7], trees, 4, page_table=int32(table), shared_prefix_len=shared)


def test_page_table_must_be_int32():
    with pytest.raises(TypeError, match="page_table: expected int32, given torch.int64"):
        VerifyBatch([1], [DraftTree(CHAIN)], 4, page_table=torch.tensor([[0]]))
    with pytest.raises(TypeError, match="page_table: expected a tensor, given list"):
        VerifyBatch([1], [DraftTree(CHAIN)], 4, page_table=[[0]])


def test_a_cache_too_small_is_refused_with_both_numbers():
    """K22: the pages a batch needs are known beforehand, and are what an engine's own count is held against."""
    trees = [DraftTree.branches(4, 5), DraftTree(CHAIN)]
    assert VerifyBatch([30, 3], trees, 16).num_pages == 5
    assert VerifyBatch([30, 3], trees, 16, num_pages=5).num_pages == 5
    with pytest.raises(ValueError, match="num_pages: expected at least 5 pages of 16 tokens, given 4"):
        VerifyBatch([30, 3], trees, 16, num_pages=4)
    with pytest.raises(ValueError, match=r"num_pages: expected fewer than 2\*\*31 slots"):
        VerifyBatch([30, 3], trees, 16, num_pages=2**27)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(rows="step"), ValueError, r"rows: expected one of \('branch', 'leaf', 'node'\), given 'step'"),
        (dict(prefix_lens=5), TypeError, "prefix_lens: expected a sequence, one per request, given 5"),
        (dict(prefix_lens=[2**40, 6]), ValueError, r"prefix_lens: expected fewer than 2\*\*31 distinct tokens"),
        (dict(trees=[None]), ValueError, r"trees: expected one per request \(2\), given 1"),
        (dict(prefix_lens=[4, -1]), ValueError, r"prefix_lens\[1\]: expected a number >= 0, given -1"),
        (dict(prefix_lens=[4, 1.5]), TypeError, r"prefix_lens\[1\]: expected an integer, given 1.5"),
        (dict(trees=[None, [-1]]), TypeError, "trees: expected DraftTree or None, given list for request 1"),
        (dict(page_size=0), ValueError, "page_size: expected a number >= 1, given 0"),
        (dict(page_size=1.5), TypeError, "page_size: expected an integer, given 1.5"),
        (dict(shared_prefix_len=3), ValueError, "shared_prefix_len: expected a multiple of page_size = 4 up to the"),
        (dict(shared_prefix_len=8), ValueError, "up to the shortest prefix 6, given 8"),
        (dict(shared_prefix_len=-4), ValueError, "given -4"),
    ],
)
def test_wrong_batches_are_named(arguments, error, message):
    good = dict(prefix_lens=[9, 6], trees=[DraftTree(CHAIN), None], page_size=4)
    VerifyBatch(**good)
    with pytest.raises(error, match=message):
        VerifyBatch(**good | arguments)


def test_sizes_may_be_numpy_integers():
    batch = VerifyBatch(np.array([9, 4]), [DraftTree(CHAIN)] * 2, np.int64(4), shared_prefix_len=np.int32(4))
    assert [(level.page_size, type(level.page_size)) for level in batch.levels("cascade")] == [
        (4, int), (4, int), (1, int)
    ]  # fmt: skip


def test_unknown_plans_and_requests_are_named():
    batch = VerifyBatch([3], [DraftTree(CHAIN)], 4)
    with pytest.raises(ValueError, match=r"plan: expected one of \('naive', 'cascade', 'fused'\), given 'tree'"):
        batch.levels("tree")
    with pytest.raises(ValueError, match="plan: expected 'naive' or 'cascade'"):
        batch.copied_tails("fused")
    for r in (-1, 1):
        with pytest.raises(ValueError, match=f"r: expected a request from 0 to 0, given {r}"):
            batch.draft_slots(r)


@pytest.mark.parametrize("rows", ["branch", "leaf"])
@pytest.mark.parametrize("plan", ["naive", "cascade"])
def test_seven_prefix_tokens_in_pages_of_four_cost_21_copied_tokens(plan, rows):
    """K20: prefix in slots 4 to 10, tail [8, 9, 10], 8 branches of two pages: 7 x 3 copies, one keeps its own."""
    table = int32([[1, 2, *range(3, 14)]])
    case = verify_case([7], [list(DraftTree.branches(8, 5).parents)], rows=rows, page=4, page_table=table)
    copies = case.batch.copied_tails(plan)
    assert case.batch.prefix_slots(0).tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert copies.tail_tokens == 21
    from_tail = torch.isin(copies.src, torch.tensor([8, 9, 10]))
    assert int(from_tail.sum()) == 21
    # after copying slot numbers as if they were tokens, each branch reads the same 7 and then its own 5
    holds = torch.arange(copies.num_pages * 4)
    holds[copies.dst] = holds[copies.src]
    for branch in range(8):
        read = []
        for level in copies.levels:
            r = branch if len(level.cache_seqlens) == 8 else 0
            slots = paging.token_slots(level.page_table, r, int(level.cache_seqlens[r]), level.page_size)
            read += holds[slots].tolist()
        drafts = case.batch.draft_slots(0)[5 * branch : 5 * branch + 5].tolist()
        assert read == [4, 5, 6, 7, 8, 9, 10, *drafts]
    # 8 branches x 2 pages are what the capacity formula counts, one of them already there
    assert (copies.num_pages - case.batch.num_pages) * 4 == paging.branch_capacity(7, 8, 5, 4) * 7 // 8


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("plan", ["naive", "cascade"])
@pytest.mark.parametrize("page", [4, 16])
def test_copied_tails_give_the_result_of_single_token_pages(backend, device, loads, plan, page, rows):
    """K20: the index of a partial page is not enough, each row's own page must hold the prefix tokens themselves."""
    case = verify_case([7, 0, 16, 5], [FORK, STAR, None, CHAIN], rows=rows, page=page, heads=(2, 1), device=device)
    copies = case.batch.copied_tails(plan)
    assert {level.page_size for level in copies.levels} == {page}
    assert len(set(copies.dst.tolist())) == len(copies.dst)
    assert copies.dst.min() >= case.batch.num_pages * page
    caches = []
    for cache in (case.k_cache, case.v_cache):
        grown = torch.full((copies.num_pages, *cache.shape[1:]), float("nan"), device=device)
        grown[: case.batch.num_pages] = cache[: case.batch.num_pages]
        flat = grown.view(-1, *cache.shape[2:])
        assert not flat[copies.src].isnan().any()
        flat[copies.dst] = flat[copies.src]
        caches.append(grown)
    state = cascade_attention(case.q, *caches, copies.levels, backend=backend)
    assert_state_close(state, case.oracle(), plain=case.oracle(torch.float32))
    assert_state_close(state, run_levels(case, case.batch.levels(plan), backend, loads))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("plan", PLANS)
def test_each_pass_counts_its_own_rows(plan, rows):
    """K29: offsets of every level run from 0 to T in steps of that level's own requests."""
    batch = VerifyBatch([9, 12, 8], [DraftTree(FORK), None, DraftTree(CHAIN)], 4, rows, shared_prefix_len=8)
    levels = batch.levels(plan)
    per_request = [len(row_ends(parents, rows)) for parents in (FORK, None, CHAIN)]
    steps = [level.cu_seqlens_q.diff().tolist() for level in levels]
    virtual = [len(p) if rows == "branch" else 1 for tree in (FORK, None, CHAIN) for p in virtual_paths(tree, rows)]
    own = {"naive": [virtual], "fused": [per_request], "cascade": [[batch.num_rows], per_request, virtual]}
    assert steps == own[plan]
    for level, rows_of in zip(levels, steps, strict=True):
        assert level.cu_seqlens_q[0] == 0
        assert level.cu_seqlens_q[-1] == batch.num_rows
        assert len(level.cache_seqlens) == len(level.page_table) == len(rows_of)
        assert {x.dtype for x in (level.cu_seqlens_q, level.cache_seqlens, level.page_table)} == {torch.int32}


def test_a_common_prefix_is_one_sequence_of_all_queries():
    """K29: 4 requests of 1 query over one prefix are 1 x 4 rows in its pass; with prefixes of their own, 4 x 1."""
    trees = [DraftTree([-1])] * 4
    shared, _, draft = VerifyBatch([8, 9, 8, 12], trees, 4, shared_prefix_len=8).levels("cascade")
    assert (shared.cu_seqlens_q.tolist(), shared.cache_seqlens.tolist()) == ([0, 4], [8])
    assert draft.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    prefix, draft = VerifyBatch([8, 9, 8, 12], [DraftTree.branches(2, 3)] * 4, 4).levels("cascade")
    assert prefix.cu_seqlens_q.tolist() == [0, 6, 12, 18, 24]
    assert draft.cu_seqlens_q.tolist() == list(range(25))


@pytest.mark.parametrize("rows", ["branch", "leaf"])
@pytest.mark.parametrize("topk", [1, 4])
def test_draft_tables_are_as_wide_as_the_paths_they_hold(backend, device, loads, topk, rows):
    """K23: 3 steps of 4 branches are 12 draft tokens, and a row reads at most 3: the loop ends with the table."""
    case = verify_case([6, 2], [list(DraftTree.branches(topk, 3).parents)] * 2, rows=rows, page=4, device=device)
    draft = case.batch.levels("cascade")[1]
    assert draft.page_table.shape == (2 * topk, 3)
    assert draft.cache_seqlens.tolist() == [3] * 2 * topk
    check_levels(case, case.batch.levels("cascade"), backend, loads)


def test_eight_draft_tokens_in_four_columns(backend, device, loads):
    """K23: a root, 3 steps below it and 4 more nodes: 8 draft tokens, but paths and columns of at most 4."""
    parents = [-1, 0, 1, 2, 0, 0, 1, 4]
    case = verify_case([6, 2], [parents, CHAIN], page=4, heads=(2, 1), device=device)
    levels = case.batch.levels("cascade")
    assert levels[1].page_table.shape == (8 + 3, 4)
    counted = torch.zeros(1, dtype=torch.int64, device=device)
    check_levels(case, levels, backend, loads, reads=counted)
    assert counted.tolist() == [6 + 2 + sum(len(path_to(parents, i)) for i in range(8)) + 6]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("prefix_lens", "shared"), [([], 0), ([5, 0], 0), ([0], 0), ([9, 4], 4)], ids=["nobody", "drafts", "all", "own"]
)
def test_a_batch_without_rows_has_levels_without_rows(backend, device, loads, plan, prefix_lens, shared):
    """Without requests, without drafts, without a page in the cache: a state of no rows."""
    case = verify_case(prefix_lens, [None] * len(prefix_lens), shared=shared, spare_pages=0, device=device)
    state = run_levels(case, case.batch.levels(plan), backend, loads)
    assert state.o.shape == (0, 4, 16)
    assert state.lse.shape == (0, 4)


def test_long_chains_are_bounded():
    """F26 (tests/known_faults.md): depth takes log steps; paths, masks and plans of over 2^26 entries are refused."""
    chain = DraftTree.chain(200_000)
    assert (chain.size, chain.depth) == (200_000, 200_000)
    assert DraftTree([1, 2, 3, -1, 0]).depth == 5
    for call in (lambda: chain.mask, lambda: chain.positions(3), lambda: VerifyBatch([5], [chain])):
        with pytest.raises(ValueError, match=r"parents: expected .* of at most 67108864 entries, given 200000 nodes x"):
            call()
    flat = DraftTree([-1] * 8193)
    assert flat.positions(3).tolist() == [3] * 8193
    with pytest.raises(
        ValueError, match="parents: expected a mask of at most 67108864 entries, given 8193 nodes x 8193"
    ):
        flat.mask  # noqa: B018
    with pytest.raises(ValueError, match="no cycle, given one through node"):
        DraftTree([*range(1, 100_000), 50_000])
