"""Draft trees from any parents: masks, positions and tables against climbing parent links."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cascade_lab import DraftTree
from tests.cases import tree_words
from tests.properties.budget import cases
from tests.properties.strategies import forests, verifications
from tests.verify import path_to

trees = forests(12) | forests(70, 60)


@cases(200)
@given(trees, st.integers(0, 2**40))
def test_a_tree_is_what_its_parent_links_say(parents, prefix):
    tree = DraftTree(parents)
    paths = [path_to(parents, node) for node in range(len(parents))]
    assert tree.size == len(parents)
    assert tree.depth == max(map(len, paths))
    assert [tree.ancestors(node) for node in range(tree.size)] == [tuple(path[:-1]) for path in paths]
    assert tree.positions(prefix).tolist() == [prefix + len(path) - 1 for path in paths]
    assert tree.leaves == tuple(node for node in range(tree.size) if node not in parents)
    assert tree.mask.tolist() == tree_words(parents)


@cases(150)
@given(forests(12), st.integers(0, 20))
def test_dense_and_packed_masks_hold_the_same_bits(parents, prefix):
    tree = DraftTree(parents)
    dense = tree.dense_mask(prefix)
    for node in range(tree.size):
        seen = {*range(prefix), *(prefix + i for i in path_to(parents, node))}
        assert dense[node].nonzero()[:, 0].tolist() == sorted(seen)
    bits = np.unpackbits(tree.packed_mask(prefix).numpy(), bitorder="little")
    assert bits[: dense.numel()].tolist() == dense.flatten().int().tolist()
    assert not bits[dense.numel() :].any()
    assert DraftTree.from_dense_mask(tree.dense_mask()) == tree


@cases(100)
@given(forests(7), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=3))
def test_a_mask_that_is_no_forest_is_refused(parents, flips):
    """Whatever bits are turned: the mask is refused, or it is the mask of the tree that comes back."""
    mask = DraftTree(parents).dense_mask()
    for row, column in flips:
        mask[row % len(parents), column % len(parents)] ^= True
    closed = mask.diagonal().all() and all(
        bool((mask[a] <= mask[b]).all()) for b in range(len(mask)) for a in mask[b].nonzero()[:, 0].tolist()
    )
    # what a node sees is a chain: of two ancestors one sees the other, and no two nodes see each other
    chains = all(
        bool(mask[a, b]) != bool(mask[b, a])
        for row in mask
        for a in row.nonzero()[:, 0].tolist()
        for b in row.nonzero()[:, 0].tolist()
        if a != b
    )
    if closed and chains:
        assert torch.equal(DraftTree.from_dense_mask(mask).dense_mask(), mask)
    else:
        with pytest.raises(ValueError, match="mask: expected"):
            DraftTree.from_dense_mask(mask)


@cases(150)
@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=6).filter(any))
def test_paths_become_their_distinct_heads(paths):
    tree = DraftTree.from_paths(paths)
    heads = list(dict.fromkeys(tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)))
    assert tree.size == len(heads)
    for node, head in enumerate(heads):
        assert [heads[i] for i in (*tree.ancestors(node), node)] == [head[:end] for end in range(1, len(head) + 1)]


@cases(60)
@given(st.integers(1, 20), st.integers(1, 12))
def test_branches_are_their_paths(topk, steps):
    tree = DraftTree.branches(topk, steps)
    assert tree == DraftTree.from_paths([[(b, s) for s in range(steps)] for b in range(topk)])
    assert tree.depth == steps
    assert len(tree.leaves) == topk
    assert DraftTree.chain(steps) == DraftTree.branches(1, steps)


@cases(100)
@given(st.lists(st.integers(-3, 8), min_size=1, max_size=7))
def test_any_parents_are_a_forest_or_refused(parents):
    def ends(node: int) -> bool:
        for _ in range(len(parents) + 1):
            if not 0 <= node < len(parents):
                return node < 0
            node = parents[node]
        return False

    if all(map(ends, parents)):
        assert DraftTree(parents).parents == tuple(max(p, -1) for p in parents)
    else:
        with pytest.raises(ValueError, match="parents: expected"):
            DraftTree(parents)


@cases(100)
@given(forests(10), st.data())
def test_an_ancestor_table_lists_the_slots_of_each_path(parents, data):
    slots = data.draw(st.lists(st.integers(0, 99), min_size=len(parents), max_size=len(parents), unique=True))
    table, counts = DraftTree(parents).ancestor_page_table(torch.tensor(slots))
    for node in range(len(parents)):
        seen = sorted(path_to(parents, node))
        assert table[node].tolist() == [slots[i] for i in seen] + [-1] * (table.shape[1] - len(seen))
        assert counts[node] == len(seen)


@cases(100)
@given(verifications(max_requests=5, max_prefix=60, max_nodes=12))
def test_rows_and_slots_of_a_batch_follow_the_requests(drawn):
    batch = drawn.batch()
    every, positions = [], []
    for r, (prefix, parents) in enumerate(zip(drawn.prefix_lens, drawn.trees, strict=True)):
        own = batch.prefix_slots(r)
        assert len(own) == prefix
        assert own[: drawn.shared].tolist() == batch.prefix_slots(0)[: drawn.shared].tolist()
        every += [*own[drawn.shared :].tolist(), *batch.draft_slots(r).tolist()]
        ends = [i for i in range(len(parents)) if drawn.rows == "node" or i not in parents]
        if drawn.rows == "branch":
            ends = [i for leaf in ends for i in path_to(parents, leaf)]
        positions += [prefix + len(path_to(parents, i)) - 1 for i in ends]
        assert batch.row_counts[r] == len(ends)
    assert batch.num_rows == len(positions)
    assert batch.positions.tolist() == positions
    assert (
        len(set(every))
        == len(every)
        == sum(drawn.prefix_lens) - drawn.shared * len(drawn.forests) + sum(map(len, drawn.trees))
    )
    assert max(every, default=-1) < batch.num_pages * drawn.page
