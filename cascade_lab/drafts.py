"""Draft trees and the plans that verify them (claim 2).

A draft tree hangs on a request's prefix; a node sees the prefix, its ancestors and itself, and stands at position
prefix length + number of ancestors. Verifying a batch of trees is the same attention under three plans:

    naive     one level of virtual requests, each the prefix and one path:     R n (L + path) KV tokens
    cascade   a prefix level and a draft level of virtual requests, merged:    R L + R n path
    fused     one level, prefix and all drafts once, a tree mask inside:       R (L + V), no merge

Reads are counted per request here (see `levels`), for R requests with trees of V nodes, each expanded into n virtual
ones. What a virtual request is, `rows` says: a whole branch with the rows of its path, causal ("branch"); a leaf with
one row, as in a drafting step ("leaf"); a node with one row ("node"). Branches of topk x S drafts make n = topk of the
first two, so reads are R topk (L + S) against R L + R topk S under both, and pairs topk (S L + S (S + 1) / 2) a request
under the first. With a virtual request per node, n is V = topk S and a path is the node's depth.

After the pass `accept` finds the longest path that the target agrees with, and `commit` closes it up behind the prefix.
Drafting, sampling and the model itself are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch

from cascade_lab import _checks, paging, runtime
from cascade_lab.levels import Level

__all__ = [
    "Accepted",
    "Committed",
    "CopiedTails",
    "DraftTree",
    "PLANS",
    "ROWS",
    "VerifyBatch",
    "VirtualRequests",
    "pack_mask",
]

Plan = Literal["naive", "cascade", "fused"]
Rows = Literal["branch", "leaf", "node"]
PLANS: tuple[Plan, ...] = ("naive", "cascade", "fused")
"""What `VerifyBatch.levels` may be asked for."""
ROWS: tuple[Rows, ...] = ("branch", "leaf", "node")
"""What a virtual request of `VerifyBatch` is: a branch with the rows of its path, its leaf's row, or a node's row."""


MOST_ENTRIES = 1 << 26
"""Nodes times depth, and nodes times nodes, up to which a tree has paths, masks and plans: 512 MB of paths."""


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens of one request as a forest on its prefix.

    Attributes:
        parents: parent of each node, negative for a node that hangs on the prefix; any storage order.
        depth: nodes on the longest path from the prefix down.
        labels: what each node is called, its token or its rank among siblings, or None. Trees are equal by parents
            alone.

    Raises:
        ValueError: no node, a parent that does not exist, a cycle, or other than one label per node. TypeError: parents
            that are not integers.

    Paths, masks and plans of a tree take memory for nodes x depth and nodes x nodes, and are refused with ValueError
    beyond 2^26 entries: a chain of 8,192 nodes is the longest.

    Example:
        >>> tree = cl.DraftTree.from_paths([[5, 3, 9], [5, 4, -1]])  # token ids, filled up by -1
        >>> tree.parents, tree.depth, tree.leaves
        ((-1, 0, 1, 0), 3, (2, 3))
        >>> tree.tokens().tolist(), tree.positions(prefix_len=100).tolist()
        ([5, 3, 9, 4], [100, 101, 102, 101])
        >>> tree.dense_mask().int().tolist()  # who sees whom
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    """

    parents: tuple[int, ...]
    depth: int = field(init=False, repr=False, compare=False)
    labels: tuple[Hashable, ...] | None = field(init=False, repr=False, compare=False)

    def __init__(self, parents: Iterable[int], labels: Iterable[Hashable] | None = None):
        values = np.asarray(_checks.integer_list("parents", parents, None), np.int64)
        if values.size == 0:
            raise ValueError("parents: expected at least one node, given none (a request without drafts has tree None)")
        if values.max() >= len(values):
            i = int(values.argmax())
            raise ValueError(f"parents: expected ids below {len(values)}, given {int(values[i])} for node {i}")
        values = np.maximum(values, -1)
        object.__setattr__(self, "parents", tuple(values.tolist()))
        object.__setattr__(self, "depth", _depth(values))
        labels = None if labels is None else tuple(_plain(labels))
        if labels is not None and len(labels) != len(values):
            raise ValueError(f"labels: expected one per node ({len(values)}), given {len(labels)}")
        object.__setattr__(self, "labels", labels)

    def __reduce__(self) -> tuple[object, ...]:
        return DraftTree, (self.parents, self.labels)

    @classmethod
    def branches(cls, topk: int, steps: int) -> DraftTree:
        """`topk` disjoint chains of `steps` nodes, branch-major: node b * steps + s is step s of branch b."""
        topk, steps = _checks.integer("topk", topk, 1), _checks.integer("steps", steps, 1)
        return cls(-1 if s == 0 else b * steps + s - 1 for b in range(topk) for s in range(steps))

    @classmethod
    def chain(cls, n: int) -> DraftTree:
        """One chain of `n` nodes."""
        return cls(range(-1, _checks.integer("n", n, 1) - 1))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[Hashable]] | torch.Tensor, *, pad: Hashable | None = -1) -> DraftTree:
        """The tree whose nodes are the non-empty prefixes of `paths`, numbered by first appearance.

        A path is the sequence of labels from the prefix down (token ids, or ranks among siblings as in Medusa), which
        become the tree's `labels`.

        Args:
            paths: sequences of labels, or a `[paths, steps]` tensor or array.
            pad: what fills a path up behind its end; None for paths without padding, in which -1 is a label.

        Raises:
            ValueError: a label behind padding, or no node at all.
        """
        node_of: dict[tuple, int] = {}
        parents, labels = [], []
        for i, path in enumerate(_plain(paths)):
            path = _plain(path)
            if pad is not None and pad in path:
                whole, path = path, path[: path.index(pad)]
                if any(label != pad for label in whole[len(path) :]):
                    raise ValueError(f"paths[{i}]: expected {pad!r} at the end alone, given {_checks.shown(whole)}")
            for end in range(1, len(path) + 1):
                head = tuple(path[:end])
                if head not in node_of:
                    node_of[head] = len(parents)
                    parents.append(node_of.get(head[:-1], -1))
                    labels.append(head[-1])
        return cls(parents, labels)

    @classmethod
    def from_retrieve_indices(cls, indices: Iterable[Sequence[int]] | torch.Tensor, *, pad: int = -1) -> DraftTree:
        """The tree of these paths of node ids, numbers kept; inverse of `retrieve_indices`.

        Args:
            indices: `[paths, steps]`, in each row nodes from the prefix down, then `pad`: EAGLE's and Medusa's
                retrieve_indices, whose first column is the root. Every id from 0 to the largest stands in some row.
            pad: what fills a row up.

        Raises:
            TypeError, ValueError: ids that are no integers >= 0, an id behind padding, an id with two parents, or an id
                that is missing.
        """
        pad = _checks.integer("pad", pad)
        parent_of: dict[int, int] = {}
        for i, row in enumerate(_plain(indices)):
            nodes = _checks.integer_list(f"indices[{i}]", _plain(row), None)
            own = nodes[: nodes.index(pad)] if pad in nodes else nodes
            if min(own, default=0) < 0 or any(node != pad for node in nodes[len(own) :]):
                raise ValueError(f"indices[{i}]: expected node ids, then {pad} alone, given {_checks.shown(nodes)}")
            for parent, node in zip([-1, *own[:-1]], own, strict=True):
                if parent_of.setdefault(node, parent) != parent:
                    raise ValueError(
                        f"indices[{i}]: expected node {node} under {parent_of[node]} as in an earlier row, "
                        f"given it under {parent}"
                    )
        missing = sorted(set(range(len(parent_of))) - set(parent_of))
        if missing:
            raise ValueError(f"indices: expected every node up to {max(parent_of)}, given none that is {missing[0]}")
        return cls(parent_of[node] for node in range(len(parent_of)))

    @classmethod
    def from_retrieve_links(cls, next_token: Iterable[int], next_sibling: Iterable[int]) -> DraftTree:
        """The tree of these links, each `[size]`, negative for none; inverse of `retrieve_links`.

        A node that no link leads to hangs on the prefix, as do its siblings.

        Raises:
            TypeError, ValueError: links that are no integers or lead nowhere, two links to one node, or a cycle.
        """
        links = {"next_token": _checks.integer_list("next_token", next_token, None)}
        links["next_sibling"] = _checks.integer_list("next_sibling", next_sibling, None)
        size = len(links["next_token"])
        if len(links["next_sibling"]) != size:
            raise ValueError(f"next_sibling: expected {size} links as next_token, given {len(links['next_sibling'])}")
        before: dict[int, tuple[str, int]] = {}
        for name, targets in links.items():
            for node, target in enumerate(targets):
                if target >= size:
                    raise ValueError(f"{name}: expected ids below {size}, given {target} for node {node}")
                if target >= 0 and target in before:
                    raise ValueError(f"{name}: expected one link to node {target}, given another from node {node}")
                if target >= 0:
                    before[target] = name, node
        parents = []
        for node in range(size):
            kind, at, steps = "next_sibling", node, 0
            while kind == "next_sibling":  # back along the siblings to the first child
                kind, at = before.get(at, ("next_token", -1))
                if steps == size:
                    raise ValueError(f"next_sibling: expected no cycle, given one through node {node}")
                steps += 1
            parents.append(at)
        return cls(parents)

    @classmethod
    def from_dense_mask(cls, mask: torch.Tensor) -> DraftTree:
        """The tree with this `[N, N]` bool visibility (row sees column); inverse of `dense_mask`.

        Raises:
            ValueError: not the ancestor relation of a forest.
        """
        seen = mask.cpu().numpy().astype(bool)
        if seen.ndim != 2 or seen.shape[0] != seen.shape[1] or not seen.size or not seen.diagonal().all():
            raise ValueError(
                f"mask: expected [N, N], N >= 1, with every node seeing itself, given shape {tuple(mask.shape)}"
            )
        above = seen & ~np.eye(len(seen), dtype=bool)
        # the parent is the ancestor with most ancestors of its own
        rank = np.where(above, seen.sum(1)[None, :], 0)
        unlike = "mask: expected the ancestor relation of a forest, given rows that no parent array produces"
        try:
            tree = cls(np.where(above.any(1), rank.argmax(1), -1))
        except ValueError:
            raise ValueError(unlike) from None
        if not np.array_equal(tree._visible, seen):
            raise ValueError(unlike)
        return tree

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.parents)

    def ancestors(self, i: int) -> tuple[int, ...]:
        """Nodes above node `i`, from the prefix down, `i` excluded.

        Raises:
            TypeError, ValueError: no such node.
        """
        i = _checks.integer("i", i)
        if not 0 <= i < self.size:
            raise ValueError(f"i: expected a node from 0 to {self.size - 1}, given {i}")
        return tuple(int(node) for node in self._paths[i][: self._path_lens[i] - 1])

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, in storage order; each ends one branch."""
        return tuple(sorted(set(range(self.size)) - set(self.parents)))

    @cached_property
    def mask(self) -> torch.Tensor:
        """`[size, words]` int64: bit j of row i (word j // 64, bit j % 64) is set when node i sees node j."""
        packed = np.packbits(self._visible, axis=1, bitorder="little")
        words = np.zeros((self.size, -(-self.size // 64) * 8), np.uint8)
        words[:, : packed.shape[1]] = packed
        return torch.from_numpy(words.view(np.int64))

    def retrieve_indices(self, *, pad: int = -1) -> torch.Tensor:
        """`[leaves, depth]` int64: the nodes of each branch from the prefix down, then `pad`; a row per leaf.

        The form of EAGLE's and Medusa's retrieve_indices for a tree whose root is node 0; `node_tokens[rows]` are the
        candidates of a branch.
        """
        paths = torch.from_numpy(self._paths[list(self.leaves)])
        return torch.where(paths >= 0, paths, _checks.integer("pad", pad))

    def retrieve_links(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(next_token, next_sibling), `[size]` int64: each node's first child and its next sibling, -1 where none is.

        In storage order, as SGLang's retrive_next_token and retrive_next_sibling, which it keeps beside
        retrive_index, a node's row in the batch. Nodes on the prefix are siblings of one another.
        """
        first, following = np.full(self.size, -1), np.full(self.size, -1)
        last: dict[int, int] = {}
        for node, parent in enumerate(self.parents):
            if parent in last:
                following[last[parent]] = node
            elif parent >= 0:
                first[parent] = node
            last[parent] = node
        return torch.from_numpy(first), torch.from_numpy(following)

    def tokens(self, steps: torch.Tensor | None = None, *, paths: torch.Tensor | None = None) -> torch.Tensor:
        """The token of each node in storage order, `[size]`: from the labels, or looked up in what a drafter gives.

        Args:
            steps: `[..., at least depth, k]` candidates of each step, best first, as the top-k of Medusa's heads. A
                node at depth d takes rank r of row d - 1; its rank is its label, or its place among its siblings when
                the tree has no labels. Leading dims are requests that share the tree.
            paths: `[..., leaves, depth]` tokens along each branch, in the order of `retrieve_indices`; what stands
                behind a branch's end is not looked at.

        Returns:
            `[..., size]`, int64 on the CPU from labels, otherwise like what was given.

        Raises:
            TypeError, ValueError: both are given, or neither and the labels are no tokens; a shape that does not fit; a
                rank below 0 or beyond k; paths that differ in a node that they share.
        """
        if steps is not None and paths is not None:
            raise ValueError("paths: expected None beside steps, given both")
        if steps is None and paths is None:
            if self.labels is None:
                raise ValueError("steps: expected candidates or paths for a tree without labels, given neither")
            return torch.tensor(_checks.integer_list("labels", self.labels, None), dtype=torch.int64, device="cpu")
        if steps is not None:
            _checks.tensor("steps", steps)
            ranks = self._ranks
            if steps.dim() < 2 or steps.shape[-2] < self.depth or steps.shape[-1] <= max(ranks):
                raise ValueError(
                    f"steps: expected [..., at least {self.depth}, at least {max(ranks) + 1}], "
                    f"given shape {tuple(steps.shape)}"
                )
            return steps[..., torch.from_numpy(self._path_lens - 1), torch.tensor(ranks, device="cpu")]
        _checks.tensor("paths", paths)
        branches = self._paths[list(self.leaves)]
        if paths.shape[-2:] != branches.shape or paths.dim() < 2:
            raise ValueError(f"paths: expected [..., {branches.shape[0]}, {branches.shape[1]}], given {paths.shape}")
        leaf, step = (branches >= 0).nonzero()
        node = branches[leaf, step]
        _, first = np.unique(node, return_index=True)
        tokens = paths[..., torch.from_numpy(leaf[first]), torch.from_numpy(step[first])]
        if runtime.checks_enabled():
            differ = paths[..., torch.from_numpy(leaf), torch.from_numpy(step)] != tokens[..., torch.from_numpy(node)]
            if differ.any():
                at = int(differ.reshape(-1, len(node)).any(0).nonzero()[0])
                raise ValueError(
                    f"paths: expected one token for node {node[at]} on all its branches, given another on branch "
                    f"{leaf[at]}"
                )
        return tokens

    def positions(self, prefix_len: int) -> torch.Tensor:
        """`[size]` int64 positions in the sequence: prefix_len + number of ancestors; siblings share one."""
        return _checks.integer("prefix_len", prefix_len, 0) - 1 + torch.from_numpy(self._path_lens)

    def dense_mask(self, prefix_len: int = 0) -> torch.Tensor:
        """`[size, prefix_len + size]` bool, true where a node sees a key.

        With prefix_len = 0 it is the draft square (SGLang's QLEN_ONLY), with the prefix its FULL_MASK, and flattened
        over a batch FlashInfer's custom_mask.
        """
        prefix = torch.ones(self.size, _checks.integer("prefix_len", prefix_len, 0), dtype=torch.bool, device="cpu")
        return torch.cat((prefix, torch.from_numpy(self._visible)), dim=1)

    def packed_mask(self, prefix_len: int = 0) -> torch.Tensor:
        """The flattened `dense_mask` as uint8, 8 entries a byte, the first in the lowest bit (FlashInfer's packing)."""
        flat = self.dense_mask(prefix_len).flatten().numpy()
        return torch.from_numpy(np.packbits(flat, bitorder="little"))

    def ancestor_page_table(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page table in pages of one token that lets a plain paged kernel verify the tree, one request per node.

        Args:
            slots: `[size]` slot of each node.

        Returns:
            (`[size, depth]` int32, `[size]` int32): row i lists the slots of node i's ancestors and its own, in storage
            order as SGLang compacts them, then -1; and how many.

        Raises:
            ValueError: another number of slots.
        """
        _checks.tensor("slots", slots)
        if slots.shape != (self.size,):
            raise ValueError(f"slots: expected one per node, [{self.size}], given shape {tuple(slots.shape)}")
        order = np.where(self._paths >= 0, self._paths, self.size)
        order.sort(axis=1)
        padded = torch.cat((slots.to(torch.int32).cpu(), torch.tensor([-1], dtype=torch.int32, device="cpu")))
        return padded[torch.from_numpy(order)], torch.from_numpy(self._path_lens.astype(np.int32))

    @cached_property
    def _paths(self) -> np.ndarray:
        """[size, depth] int64: nodes from the prefix down to each node, then -1."""
        parents = np.asarray(self.parents)
        self._check_room(self.depth, "paths")
        upward = np.full((self.size, self.depth), -1)
        climb = np.arange(self.size)
        for step in range(self.depth):
            upward[:, step] = climb
            climb = np.where(climb >= 0, parents[climb], -1)
        lens = (upward >= 0).sum(1)
        column = lens[:, None] - 1 - np.arange(self.depth)
        return np.where(column >= 0, np.take_along_axis(upward, np.maximum(column, 0), 1), -1)

    @property
    def _ranks(self) -> list[int]:
        """The rank of each node among the candidates of its step."""
        if self.labels is not None:
            return _checks.integer_list("labels", self.labels)
        count: dict[int, int] = {}
        ranks = []
        for parent in self.parents:
            ranks.append(count.get(parent, 0))
            count[parent] = ranks[-1] + 1
        return ranks

    def _check_room(self, width: int, what: str) -> None:
        if self.size * width > MOST_ENTRIES:
            raise ValueError(
                f"parents: expected {what} of at most {MOST_ENTRIES} entries, given {self.size} nodes x {width}"
            )

    @cached_property
    def _path_lens(self) -> np.ndarray:
        return (self._paths >= 0).sum(1)

    @cached_property
    def _visible(self) -> np.ndarray:
        """[size, size] bool: row sees column."""
        self._check_room(self.size, "a mask")
        seen = np.zeros((self.size, self.size + 1), bool)
        # -1 falls into the last column of the row before, and that column is dropped
        seen.reshape(-1)[np.arange(self.size)[:, None] * (self.size + 1) + self._paths] = True
        return seen[:, :-1]


def _depth(parents: np.ndarray) -> int:
    """Nodes on the longest path, in a number of steps that grows with its logarithm: each looks twice as far up."""
    ahead, lengths, reach = parents, np.ones(len(parents), np.int64), 1
    while (ahead >= 0).any():
        # a path of more nodes than there are never ends
        if reach > len(parents):
            raise ValueError(f"parents: expected no cycle, given one through node {int(ahead[ahead >= 0][0])}")
        lengths = lengths + np.where(ahead >= 0, lengths[ahead], 0)
        ahead, reach = np.where(ahead >= 0, ahead[ahead], -1), 2 * reach
    return int(lengths.max())


def _plain(values) -> list:
    """A list of what an iterable holds, tensors and arrays as Python's numbers."""
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return values.tolist()
    return [x.item() if isinstance(x, torch.Tensor) and x.dim() == 0 else x for x in values]


def pack_mask(mask: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Any bool mask as the words that `attention` takes: `tree_mask=pack_mask(mask)` with `tail_seqlens` = its columns.

    The mask may hide any key from any row: left padding, a window, blocks of documents. With tail_seqlens[r] = K, all
    of a request's keys are in the tail, and nothing is visible but by the mask; with fewer columns than keys, all
    earlier keys are visible.

    Args:
        mask: `[Q, K]` bool, true where a row sees a key, or one such mask per request, of any Q and K.

    Returns:
        `[T, words]` int64 on the device of the masks, rows request after request, words = ceil(largest K / 64).

    Raises:
        TypeError, ValueError: no bool tensor of two dims.

    Example:
        >>> mask = torch.tensor([[True, False, True], [True, True, False]])
        >>> cl.drafts.pack_mask(mask).tolist()  # bits 0 and 2, bits 0 and 1
        [[5], [3]]
    """
    masks = [mask] if isinstance(mask, torch.Tensor) and mask.dim() == 2 else list(mask)
    for i, one in enumerate(masks):
        _checks.tensor("mask" if len(masks) == 1 else f"mask[{i}]", one, "[Q, K]", dtypes=(torch.bool,))
    words = max([1, *(-(-one.shape[1] // 64) for one in masks)])
    bits = np.zeros((sum(len(one) for one in masks), words * 64), bool)
    at = 0
    for one in masks:
        bits[at : at + len(one), : one.shape[1]] = one.cpu().numpy()
        at += len(one)
    packed = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int64))
    return packed.to(masks[0].device) if masks else packed


@dataclass(frozen=True, eq=False)
class Accepted:
    """What a target agrees with: per request the longest accepted path of its tree.

    Attributes:
        nodes: `[R, depth]` int64, the path's nodes from the prefix down, then -1.
        lens: `[R]` int64, nodes on it; 0 for a request without drafts.
        tokens: `[R, depth]` int64, their tokens, then -1.
        next_tokens: `[R]` int64, the target's own token behind the path; -1 where no row says it.

    Example:
        >>> batch = cl.VerifyBatch([9], [cl.DraftTree([-1, 0, 0], labels=[5, 3, 4])])
        >>> accepted = batch.accept(torch.tensor([4, 0, 7]))  # the target says 4 behind the root, and 7 behind that
        >>> accepted.nodes.tolist(), accepted.tokens.tolist(), accepted.next_tokens.tolist()
        ([[0, 2]], [[5, 4]], [7])
    """

    nodes: torch.Tensor
    lens: torch.Tensor
    tokens: torch.Tensor
    next_tokens: torch.Tensor


@dataclass(frozen=True, eq=False)
class Committed:
    """A batch after its accepted drafts became part of the prefixes.

    Attributes:
        src, dst: `[moves]` int64 slots: the token states at `src` belong at `dst`. All are read before one is written.
        prefix_lens: committed tokens of each request, the accepted ones included.
        page_table: `[R, max_pages]` int32, the pages of these tokens, then -1.
        free_pages: int32, pages of the batch, and of its copies, that no request needs any more.

    Example:
        >>> batch = cl.VerifyBatch([9], [cl.DraftTree([-1, 0, 0])])  # drafts in slots 9, 10 and 11
        >>> done = batch.commit([[0, 2]])
        >>> done.prefix_lens, done.src.tolist(), done.dst.tolist()
        ((11,), [11], [10])
    """

    src: torch.Tensor
    dst: torch.Tensor
    prefix_lens: tuple[int, ...]
    page_table: torch.Tensor
    free_pages: torch.Tensor

    def move(self, *caches: torch.Tensor, layout: paging.Layout = "NHD") -> None:
        """Move the accepted token states in each of these caches, in place: K and V, of every layer.

        Raises:
            TypeError, ValueError, RuntimeError: as `paging.move`.
        """
        for cache in caches:
            paging.move(cache, self.src.to(cache.device), self.dst.to(cache.device), layout=layout)


@dataclass(frozen=True, eq=False)
class CopiedTails:
    """A plan in whole pages only: what an engine runs whose page table cannot address single tokens.

    Attributes:
        levels: naive, one level of the virtual requests' own page tables; or cascade, whole prefix pages and then each
            virtual request's own.
        src, dst: int64 slots to copy before the pass, `k_flat[dst] = k_flat[src]`.
        tail_tokens: how many of these are prefix tokens, copied because they do not fill a page.
        num_pages: pages the cache needs, those of the batch included.

    Example:
        >>> batch = cl.VerifyBatch([9], [cl.DraftTree.branches(2, 1)], page_size=4)  # 2 pages and a tail of 1 token
        >>> copies = batch.copied_tails("cascade")
        >>> copies.tail_tokens, copies.src.tolist(), copies.dst.tolist()  # branch 1 takes both to a page of its own
        (1, [8, 10], [12, 13])
    """

    levels: tuple[Level, ...]
    src: torch.Tensor
    dst: torch.Tensor
    tail_tokens: int
    num_pages: int


class _PackedTrees(NamedTuple):
    """All trees of a batch as one forest of its nodes, tensors on one device; a node's number is its place in it."""

    parents: torch.Tensor
    request: torch.Tensor
    local: torch.Tensor
    paths: torch.Tensor
    lens: torch.Tensor
    of_request: torch.Tensor
    given: torch.Tensor
    rows: torch.Tensor
    tokens: torch.Tensor


class VirtualRequests(NamedTuple):
    """The requests that a batch is expanded into, in the order of their rows; three `[V]` int64 tensors on the CPU.

    Attributes:
        request: of the batch, whose prefix is read.
        rows: query rows.
        drafts: tokens of its path, read behind the prefix.

    Example:
        >>> batch = cl.VerifyBatch([21, 13], [cl.DraftTree.branches(2, 2), cl.DraftTree.chain(3)], rows="branch")
        >>> request, rows, drafts = batch.virtual_requests
        >>> request.tolist(), rows.tolist()
        ([0, 0, 1], [2, 2, 3])
    """

    request: torch.Tensor
    rows: torch.Tensor
    drafts: torch.Tensor


class VerifyBatch:
    """A batch of requests with draft trees to verify: its pages, its rows, and the plans over them.

    Rows are ordered by request, then by node or leaf in the tree's storage order, and those of a branch along its path
    from the prefix down. A request's drafts lie right behind its prefix, in storage order.

    Example:
        >>> batch = cl.VerifyBatch([21, 13], [cl.DraftTree.branches(2, 2), cl.DraftTree.chain(3)])
        >>> batch.num_rows, batch.positions.tolist()
        (7, [21, 22, 21, 22, 13, 14, 15])
        >>> {plan: [level.name for level in batch.levels(plan)] for plan in cl.drafts.PLANS}
        {'naive': ['expanded'], 'cascade': ['prefix', 'draft'], 'fused': ['fused']}
        >>> batch.draft_slots(1).tolist()  # behind 13 tokens in pages 2 of 16 tokens
        [45, 46, 47]
    """

    def __init__(
        self,
        prefix_lens: Sequence[int],
        trees: Sequence[DraftTree | None],
        page_size: int = 16,
        rows: Rows = "node",
        *,
        shared_prefix_len: int = 0,
        page_table: torch.Tensor | None = None,
        num_pages: int | None = None,
        tokens: torch.Tensor | Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ):
        """Allocate pages (or take an engine's) for every request's prefix and drafts.

        Args:
            prefix_lens: committed tokens per request, >= 0.
            trees: a tree per request, or None for a request without drafts, which has no rows.
            page_size: tokens per page.
            rows: "branch", a virtual request per leaf with a row for every node of its path, causal among themselves
                (target verification by branches; a node on several branches has a row in each); "leaf", a virtual
                request per leaf with its row alone (a drafting step); or "node", a virtual request and a row per node.
            shared_prefix_len: leading tokens that all requests share (a system prompt), a multiple of page_size. The
                cascade then has three levels.
            page_table: `[R, max_pages]` int32 with the pages of prefix and drafts; consecutive ones are handed out when
                absent. Pages of different requests must differ beyond the shared prefix, and be equal within it.
            num_pages: pages of the cache, to refuse a batch that does not fit; the smallest number by default.
            tokens: the draft tokens, a request's nodes in storage order, request after request, `[sum of sizes]`. The
                trees' labels when absent, if they are integers.
            device: where the levels' tensors are.

        Raises:
            TypeError, ValueError: naming the argument, what was given and what was expected.
        """
        if rows not in ROWS:
            raise ValueError(f"rows: expected one of {ROWS}, given {rows!r}")
        for name, given in (("prefix_lens", prefix_lens), ("trees", trees)):
            if not hasattr(given, "__len__"):
                raise TypeError(f"{name}: expected a sequence, one per request, given {given!r}")
        prefix_lens = _checks.integer_list("prefix_lens", prefix_lens)
        if len(prefix_lens) != len(trees):
            raise ValueError(f"trees: expected one per request ({len(prefix_lens)}), given {len(trees)}")
        for r, tree in enumerate(trees):
            if tree is not None and not isinstance(tree, DraftTree):
                raise TypeError(f"trees: expected DraftTree or None, given {type(tree).__name__} for request {r}")
            if tree is not None:
                tree._check_room(tree.depth, "paths")
        page_size = _checks.integer("page_size", page_size, 1)
        shared_prefix_len = _checks.integer("shared_prefix_len", shared_prefix_len)
        num_pages = None if num_pages is None else _checks.integer("num_pages", num_pages)
        self.trees: tuple[DraftTree | None, ...] = tuple(trees)
        self.page_size = page_size
        self.rows = rows
        self.shared_prefix_len = shared_prefix_len
        self.device: torch.device = torch.device(device)
        self._prefix = np.asarray(prefix_lens, np.int64)
        self._nodes = np.asarray([0 if tree is None else tree.size for tree in trees], np.int64)
        spans = self._prefix + self._nodes
        shortest = int(self._prefix.min()) if len(self._prefix) else 0
        if not 0 <= shared_prefix_len <= shortest or shared_prefix_len % page_size:
            raise ValueError(
                f"shared_prefix_len: expected a multiple of page_size = {page_size} up to the shortest prefix "
                f"{shortest}, given {shared_prefix_len}"
            )
        distinct = int(spans.sum()) - shared_prefix_len * max(0, len(spans) - 1)
        if distinct >= 2**31:
            raise ValueError(f"prefix_lens: expected fewer than 2**31 distinct tokens in all, given {distinct}")
        if page_table is None:
            self._table = self._allocate(spans)
        else:
            self._table = self._take(page_table, spans)
        used = self._table[self._table >= 0]
        needed = int(used.max()) + 1 if used.size else 0
        if num_pages is not None and num_pages < needed:
            raise ValueError(f"num_pages: expected at least {needed} pages of {page_size} tokens, given {num_pages}")
        self.num_pages: int = needed if num_pages is None else num_pages
        if self.num_pages * page_size >= 2**31:
            raise ValueError(f"num_pages: expected fewer than 2**31 slots, given {self.num_pages} x {page_size}")
        ends = [() if tree is None else (range(tree.size) if rows == "node" else tree.leaves) for tree in trees]
        self._virtual_counts = np.asarray([len(e) for e in ends], np.int64)
        self._virtual = np.repeat(np.arange(len(trees)), self._virtual_counts)
        nodes = self._path_nodes(ends)
        on_path = nodes >= 0
        token = self._prefix[self._virtual][:, None] + nodes
        self._path_slots = np.where(on_path, self._slots(self._virtual[:, None], token), -1)
        self._path_lens = on_path.sum(1)
        # rows in batch order: their request, the node that each stands on, and the nodes from the prefix down to it
        if rows == "branch":
            self._virtual_rows = self._path_lens
            self._row_nodes, self._depths = nodes[on_path], on_path.nonzero()[1] + 1
        else:
            self._virtual_rows = np.ones(len(self._virtual), np.int64)
            self._row_nodes = np.concatenate([np.zeros(0, np.int64), *(np.asarray(e, np.int64) for e in ends)])
            self._depths = self._path_lens
        self._request = np.repeat(self._virtual, self._virtual_rows)
        self._row_counts = np.bincount(self._request, minlength=len(trees))
        self._tokens = self._node_tokens(tokens)

    @property
    def prefix_lens(self) -> tuple[int, ...]:
        """Committed tokens of each request."""
        return tuple(self._prefix.tolist())

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Query rows of each request; their sum is num_rows."""
        return tuple(self._row_counts.tolist())

    @property
    def num_rows(self) -> int:
        """Query rows T of the batch."""
        return len(self._request)

    @cached_property
    def page_table(self) -> torch.Tensor:
        """`[R, max_pages]` int32: the pages of each request's prefix and drafts; unused entries are -1."""
        return self._to_tensor(self._table)

    @property
    def positions(self) -> torch.Tensor:
        """`[T]` int64: the position in its sequence of each row, prefix length + number of ancestors."""
        return self._to_tensor(self._prefix[self._request] + self._depths - 1, np.int64)

    @property
    def row_nodes(self) -> torch.Tensor:
        """`[T]` int64: the node that each row stands on, counted within its own request's tree."""
        return self._to_tensor(self._row_nodes, np.int64)

    @property
    def virtual_requests(self) -> VirtualRequests:
        """What the naive plan and the draft level of the cascade expand the batch into."""
        arrays = (self._virtual, self._virtual_rows, self._path_lens)
        return VirtualRequests(*(torch.from_numpy(x.astype(np.int64)) for x in arrays))

    @property
    def tokens(self) -> torch.Tensor:
        """`[T]` int64: the draft token of each row, what a model embeds.

        Raises:
            ValueError: neither `tokens` were given nor have all trees integers for labels.
        """
        return self._to_tensor(self._need_tokens()[self._first_node[self._request] + self._row_nodes], np.int64)

    @property
    def node_rows(self) -> torch.Tensor:
        """`[sum of sizes]` int64: the first row that stands on each node, nodes in the order of `draft_slots()`.

        `k_new[node_rows]` are the states to write at `draft_slots()`. With rows="node" it counts from 0 to T - 1.

        Raises:
            ValueError: rows="leaf", where inner nodes have no row.
        """
        return self._to_tensor(self._rows_of_nodes, np.int64)

    def prefix_slots(self, r: int | None = None) -> torch.Tensor:
        """Flat slots (page x page_size + offset) of request r's prefix tokens, `[prefix_len]` int64.

        Without r those of all requests, one after another.
        """
        if r is None:
            return paging.token_slots(self.page_table, self._prefix, self.page_size)
        r = self._check_request(r)
        return paging.token_slots(self.page_table, r, int(self._prefix[r]), self.page_size)

    def draft_slots(self, r: int | None = None) -> torch.Tensor:
        """Flat slots of request r's draft nodes in storage order, `[size]` int64; empty without a tree.

        Without r those of all requests, one after another: with rows="node" that is a slot per row.
        """
        if r is None:
            ends = self._prefix + self._nodes
            return paging.token_slots(self.page_table, ends, self.page_size, starts=self._prefix)
        r = self._check_request(r)
        both = paging.token_slots(self.page_table, r, int(self._prefix[r] + self._nodes[r]), self.page_size)
        return both[int(self._prefix[r]) :]

    def levels(self, plan: Plan) -> tuple[Level, ...]:
        """The levels of one plan; the state of any plan is the same.

        Args:
            plan: "naive" (one level of virtual requests, single tokens addressed), "cascade" (a prefix level of all
                rows and a draft level of virtual requests, a shared level before them if the batch has one), or
                "fused" (one level of the requests themselves, tree mask). Rows of a virtual request are causal.

        Raises:
            ValueError: unknown plan.
        """
        if plan not in PLANS:
            raise ValueError(f"plan: expected one of {PLANS}, given {plan!r}")
        if plan == "naive":
            return (self._expanded_level(),)
        if plan == "fused":
            return (self._fused_level(),)
        levels = (self._prefix_level(self.shared_prefix_len, self._prefix), self._draft_level())
        return levels if self.shared_prefix_len == 0 else (self._shared_level(), *levels)

    def accept(self, predicted: torch.Tensor, *, first: torch.Tensor | None = None) -> Accepted:
        """The longest path of each request that the target itself would have taken, greedily.

        A node is accepted when its parent is and its token is the one that the target predicts there. Of equally long
        paths (siblings with one token) the one that ends first in storage order is taken.

        Args:
            predicted: `[T]` integers, the target's token after each row (the argmax of its logits).
            first: `[R]` integers, its token after each prefix. When absent, each tree hangs on its prefix by one root,
                which is the token sampled last: it is accepted as it is.

        Raises:
            TypeError, ValueError: other shapes or dtypes, no tokens, rows="leaf", or no `first` for a request with
                several drafts on its prefix.
        """
        whole = (torch.int64, torch.int32)
        _checks.tensor("predicted", predicted, "[T]", (self.num_rows,), dtypes=whole)
        if first is not None:
            _checks.tensor("first", first, "[R]", (len(self.trees),), dtypes=whole, like=("predicted", predicted))
        tree = self._packed_trees(predicted.device, first is None)
        at_node = predicted.long()[tree.rows]
        at_prefix = torch.full((len(self.trees),), -1, device=predicted.device) if first is None else first.long()
        wanted = torch.where(tree.parents >= 0, at_node[tree.parents], at_prefix[tree.request])
        return self._longest(tree, (tree.tokens == wanted) | tree.given, None, at_node, at_prefix)

    def accept_typical(
        self,
        posterior: torch.Tensor,
        *,
        first: torch.Tensor | None = None,
        epsilon: float = 0.09,
        delta: float = 0.3,
    ) -> Accepted:
        """The longest path of tokens that are typical of the target, without sampling: Medusa's typical acceptance.

        A node x behind a parent with the posterior p is accepted when its parent is and

            p(x) > min(epsilon, delta e^(-H(p))),    H(p) = - sum p ln p,

        so that a flat posterior accepts what a peaked one refuses. Of equally long paths the one with the largest
        product of probabilities is taken, then the one that ends first in storage order. The next token is the argmax.

        Args:
            posterior: `[T, V]` probabilities of the target after each row, float32 or float64.
            first: `[R, V]`, after each prefix; when absent, the root is accepted as in `accept`.
            epsilon: threshold that no posterior exceeds, from 0 to 1.
            delta: factor on e^(-H), at least 0.

        Raises:
            TypeError, ValueError: as in `accept`; rows that are no probabilities, tokens outside the vocabulary.

        Cai et al., *Medusa* (2024), arXiv:2401.10774, on typical acceptance; the defaults are those of its code, which
        adds 1e-5 inside the logarithm.
        """
        _checks.number("epsilon", epsilon, 0, 1)
        _checks.number("delta", delta, 0)

        def typical(p: torch.Tensor, all_p: torch.Tensor) -> torch.Tensor:
            entropy = -torch.xlogy(all_p, all_p).sum(-1)
            return p > torch.clamp(delta * torch.exp(-entropy), max=epsilon)

        return self._accept_posterior(posterior, first, typical)

    def accept_relaxed(
        self, posterior: torch.Tensor, *, first: torch.Tensor | None = None, topk: int = 1, delta: float = 0.0
    ) -> Accepted:
        """The longest path of tokens that are nearly the target's own: among its topk, and within delta of its best.

        A node x behind a parent with the posterior p is accepted when its parent is, fewer than topk tokens are more
        probable, and p(x) >= max p - delta. Ties and the next token are as in `accept_typical`; topk=1 is `accept`, but
        for equal probabilities.

        Args:
            posterior, first: as in `accept_typical`.
            topk: at least 1.
            delta: at least 0.

        Raises:
            TypeError, ValueError: as in `accept_typical`.

        The relaxed_topk and relaxed_delta of TensorRT-LLM (*DeepSeek R1 MTP implementation and optimization*, 2025).
        """
        topk = _checks.integer("topk", topk, 1)
        _checks.number("delta", delta, 0)

        def relaxed(p: torch.Tensor, all_p: torch.Tensor) -> torch.Tensor:
            return ((all_p > p[:, None]).sum(-1) < topk) & (p >= all_p.amax(-1) - delta)

        return self._accept_posterior(posterior, first, relaxed)

    def commit(self, accepted: Accepted | Sequence[Sequence[int]], *, copied: CopiedTails | None = None) -> Committed:
        """Make the accepted paths part of the prefixes: which token states move, and what the batch then is.

        Token j of a path belongs right behind the prefix and the j before it, and drafts lie there in storage order, so
        a path moves where it does not begin the storage. After copied tails nothing moves: the accepted virtual
        request's own pages, which hold tail and path in order, take the place of the request's.

        Args:
            accepted: of `accept`, or the accepted nodes of each request from the prefix down.
            copied: this batch's `copied_tails`, when the pass ran over them.

        Returns:
            Committed; its `move` does the moves. An engine whose own page table has room keeps that table.

        Raises:
            TypeError, ValueError: other than one path per request, nodes that are no path of its tree, or copies of
                another batch.
        """
        paths = self._accepted_paths(accepted)
        lens = np.asarray([len(path) for path in paths], np.int64)
        request = np.repeat(np.arange(len(paths)), lens)
        node = np.asarray([n for path in paths for n in path], np.int64)
        step = np.arange(len(node)) - np.repeat(lens.cumsum() - lens, lens)
        ends = self._prefix + lens
        pages = -(-ends // self.page_size)
        before = self._table
        if copied is None:
            moved = node != step
            src = self._slots(request, self._prefix[request] + node)[moved]
            dst = self._slots(request, self._prefix[request] + step)[moved]
            table = before
        else:
            src = dst = np.zeros(0, np.int64)
            table, own = self._adopted(paths, copied)
            before = np.concatenate((before.ravel(), own.ravel()))
        table = np.where(np.arange(table.shape[1]) < pages[:, None], table, -1)[:, : int(pages.max(initial=0))]
        return Committed(
            self._to_tensor(src, np.int64),
            self._to_tensor(dst, np.int64),
            tuple(ends.tolist()),
            self._to_tensor(table),
            self._to_tensor(np.setdiff1d(before[before >= 0], table)),
        )

    def copied_tails(self, plan: Literal["naive", "cascade"] = "naive") -> CopiedTails:
        """The naive or cascade plan in whole pages: every virtual request owns the pages of its tail and its path.

        The tail is the part of the prefix that does not fill a page. A virtual request whose path already lies right
        behind the prefix keeps the original; for any other one tail and path are copied.

        Raises:
            ValueError: another plan.
        """
        if plan not in ("naive", "cascade"):
            raise ValueError(f"plan: expected 'naive' or 'cascade' (a fused pass copies nothing), given {plan!r}")
        size = self.page_size
        prefix = self._prefix[self._virtual]
        whole = prefix // size
        tail = prefix % size
        own_pages = -(-(tail + self._path_lens) // size)
        node = np.arange(self._path_slots.shape[1])
        behind = self._slots(self._virtual[:, None], prefix[:, None] + node)
        kept = ((behind == self._path_slots) | (self._path_slots < 0)).all(1)
        taken = np.where(kept, 0, own_pages)
        first = self.num_pages + taken.cumsum() - taken
        column = np.arange(int(own_pages.max()) if len(own_pages) else 0)
        original = np.take_along_axis(
            np.pad(self._table[self._virtual], ((0, 0), (0, len(column)))), whole[:, None] + column, 1
        )
        own = np.where(kept[:, None], original, first[:, None] + column)
        own = np.where(column < own_pages[:, None], own, -1)

        # token n of a virtual request's own pages: tail first, then path
        token = np.arange(len(column) * size)
        length = tail + self._path_lens
        dst = np.repeat(own, size, axis=1) * size + token % size
        at = np.clip(token - tail[:, None], 0, max(self._path_slots.shape[1] - 1, 0))
        path = np.take_along_axis(self._path_slots, at, 1) if self._path_slots.size else np.zeros_like(dst)
        src = np.where(
            token < tail[:, None], self._slots(self._virtual[:, None], (whole * size)[:, None] + token), path
        )
        moved = (token < length[:, None]) & ~kept[:, None]
        if plan == "cascade":
            levels = (
                self._prefix_level(0, self._prefix // size * size),
                self._virtual_level(own, tail + self._path_lens, size, "tail and draft"),
            )
        else:
            table = np.full((len(self._virtual), int((whole + own_pages).max()) if len(self._virtual) else 0), -1)
            table[:, : self._table.shape[1]] = self._table[self._virtual][:, : table.shape[1]]
            np.put_along_axis(padded := np.pad(table, ((0, 0), (0, len(column)))), whole[:, None] + column, own, 1)
            levels = (self._virtual_level(padded[:, : table.shape[1]], prefix + self._path_lens, size, "expanded"),)
        return CopiedTails(
            levels,
            self._to_tensor(src[moved], np.int64),
            self._to_tensor(dst[moved], np.int64),
            int(tail[~kept].sum()),
            self.num_pages + int(taken.sum()),
        )

    @property
    def _first_node(self) -> np.ndarray:
        """Where each request's nodes begin among those of all."""
        return self._nodes.cumsum() - self._nodes

    @cached_property
    def _rows_of_nodes(self) -> np.ndarray:
        if self.rows == "leaf":
            raise ValueError("rows: expected 'node' or 'branch', where every node has a row, given 'leaf'")
        _, first = np.unique(self._first_node[self._request] + self._row_nodes, return_index=True)
        return first

    def _node_tokens(self, tokens) -> np.ndarray | None:
        nodes = int(self._nodes.sum())
        if tokens is not None:
            values = _checks.integer_list("tokens", tokens)
            if len(values) != nodes:
                raise ValueError(f"tokens: expected one per draft ({nodes}), given {len(values)}")
            return np.asarray(values, np.int64)
        labels = [tree.labels for tree in self.trees if tree is not None]
        if any(one is None or not all(type(x) is int or isinstance(x, np.integer) for x in one) for one in labels):
            return None
        return np.asarray([x for one in labels for x in one], np.int64)

    def _need_tokens(self) -> np.ndarray:
        if self._tokens is None:
            raise ValueError("tokens: expected one per draft, given none, nor trees with tokens for labels")
        return self._tokens

    def _packed_trees(self, device: torch.device, rooted: bool) -> _PackedTrees:
        """All trees as one forest over the nodes of the batch; `rooted`: the one node on a prefix needs no proof."""
        paths = [np.zeros((0, 0), np.int64)] + [tree._paths for tree in self.trees if tree is not None]
        width, at, first = max([1, *(x.shape[1] for x in paths)]), 0, self._first_node
        local = np.full((int(self._nodes.sum()), width), -1)
        for one in paths:
            local[at : at + len(one), : one.shape[1]] = one
            at += len(one)
        request = np.repeat(np.arange(len(self.trees)), self._nodes)
        lens = (local >= 0).sum(1)
        above = np.take_along_axis(local, np.maximum(lens - 2, 0)[:, None], 1)[:, 0]
        parents = np.where(lens > 1, first[request] + above, -1)
        roots = np.bincount(request[parents < 0], minlength=len(self.trees))
        if rooted and (roots > 1).any():
            r = int((roots > 1).argmax())
            raise ValueError(
                f"first: expected the target's answer behind each prefix, for request {r} has {roots[r]} drafts on its "
                f"prefix, given None"
            )
        column = np.arange(int(self._nodes.max(initial=1)) or 1)
        of_request = np.where(column < self._nodes[:, None], first[:, None] + column, -1)
        arrays = parents, request, local, np.where(local >= 0, first[request, None] + local, -1), lens, of_request
        tensors = [torch.from_numpy(x.astype(np.int64)).to(device) for x in arrays]
        given = torch.from_numpy((parents < 0) & rooted).to(device)
        rows, tokens = (torch.from_numpy(x).to(device) for x in (self._rows_of_nodes, self._need_tokens()))
        return _PackedTrees(*tensors, given, rows, tokens)

    def _accept_posterior(
        self, posterior: torch.Tensor, first: torch.Tensor | None, rule: Callable[..., torch.Tensor]
    ) -> Accepted:
        """Accept by `rule(probability of the node's token, all probabilities behind its parent)`."""
        floats = (torch.float32, torch.float64)
        _checks.tensor("posterior", posterior, "[T, V]", dtypes=floats)
        given = {"posterior": posterior} if first is None else {"posterior": posterior, "first": first}
        for name, x in given.items():
            count = self.num_rows if name == "posterior" else len(self.trees)
            _checks.tensor(name, x, "[T, V]" if name == "posterior" else "[R, V]", (count, posterior.shape[1]))
            if x.dtype != posterior.dtype or x.device != posterior.device:
                raise TypeError(f"{name}: expected {posterior.dtype} on {posterior.device} as posterior")
            if runtime.checks_enabled() and not ((x >= 0).all() and ((x.sum(-1) - 1).abs() < 1e-3).all()):
                raise ValueError(f"{name}: expected probabilities that add up to 1 in each row, given other numbers")
        tree = self._packed_trees(posterior.device, first is None)
        if runtime.checks_enabled() and len(tree.tokens) and int(tree.tokens.max()) >= posterior.shape[1]:
            raise ValueError(
                f"posterior: expected a vocabulary with token {int(tree.tokens.max())}, "
                f"given {posterior.shape[1]} tokens"
            )
        at_node = posterior[tree.rows]
        behind = at_node[tree.parents.clamp(min=0)]
        if first is not None:
            behind = torch.where(tree.parents[:, None] >= 0, behind, first[tree.request])
        p = behind.gather(1, tree.tokens[:, None])[:, 0]
        allowed = rule(p, behind) | tree.given
        score = torch.where(tree.given, 0.0, p.log())
        at_prefix = torch.full((len(self.trees),), -1, device=posterior.device)
        at_prefix = at_prefix if first is None else first.argmax(-1)
        return self._longest(tree, allowed, score, at_node.argmax(-1), at_prefix)

    def _longest(
        self,
        tree: _PackedTrees,
        allowed: torch.Tensor,
        score: torch.Tensor | None,
        at_node: torch.Tensor,
        at_prefix: torch.Tensor,
    ) -> Accepted:
        """Per request the longest path of allowed nodes, by the sum of `score` among equals, then by storage order.

        at_node `[nodes]` and at_prefix `[R]` are the target's tokens behind each.
        """
        if not len(allowed):
            none = torch.full((len(self.trees), 1), -1, device=allowed.device)
            return Accepted(none, torch.zeros_like(none[:, 0]), none.clone(), at_prefix)
        inside = tree.paths >= 0
        whole = (allowed[tree.paths.clamp(min=0)] | ~inside).all(1)
        lens = torch.where(whole, tree.lens, 0)
        mine = tree.of_request.clamp(min=0)
        own = torch.where(tree.of_request >= 0, lens[mine], 0)
        longest = own.amax(1)
        best = (own == longest[:, None]) & (own > 0)
        if score is not None:
            total = torch.where(inside, score[tree.paths.clamp(min=0)], 0.0).sum(1)[mine].masked_fill(~best, -torch.inf)
            best &= total == total.amax(1, keepdim=True)
        column = torch.arange(own.shape[1], device=own.device)
        end = torch.where(best, column, own.shape[1] - 1).amin(1)
        end = mine.gather(1, end[:, None])[:, 0]
        found = longest > 0
        nodes = torch.where(found[:, None], tree.local[end], -1)
        tokens = torch.where(nodes >= 0, tree.tokens[tree.paths[end].clamp(min=0)], -1)
        return Accepted(nodes, longest, tokens, torch.where(found, at_node[end], at_prefix))

    def _accepted_paths(self, accepted: Accepted | Sequence[Sequence[int]]) -> list[list[int]]:
        if isinstance(accepted, Accepted):
            rows = zip(accepted.nodes.tolist(), accepted.lens.tolist(), strict=True)
            paths = [row[:length] for row, length in rows]
        else:
            paths = [_checks.integer_list(f"accepted[{r}]", _plain(path)) for r, path in enumerate(_plain(accepted))]
        if len(paths) != len(self.trees):
            raise ValueError(f"accepted: expected one path per request ({len(self.trees)}), given {len(paths)}")
        for r, (tree, path) in enumerate(zip(self.trees, paths, strict=True)):
            size = 0 if tree is None else tree.size
            parents = [tree.parents[node] if 0 <= node < size else None for node in path]
            if parents != [-1, *path][: len(path)]:
                raise ValueError(
                    f"accepted[{r}]: expected nodes of a tree of {size} from the prefix down, "
                    f"given {_checks.shown(path)}"
                )
        return paths

    def _adopted(self, paths: Sequence[Sequence[int]], copied: CopiedTails) -> tuple[np.ndarray, np.ndarray]:
        """The requests' tables with the accepted virtual requests' own pages in place, and the pages of all copies."""
        naive = len(copied.levels) == 1
        own = copied.levels[-1].page_table.cpu().numpy().astype(np.int64)
        if len(own) != len(self._virtual) or copied.levels[-1].page_size != self.page_size:
            raise ValueError(
                f"copied: expected the copied tails of this batch, {len(self._virtual)} virtual requests in pages of "
                f"{self.page_size}, given {len(own)} in pages of {copied.levels[-1].page_size}"
            )
        width = int((self._prefix // self.page_size).max(initial=0)) + own.shape[1]
        table = np.full((len(self.trees), max(width, self._table.shape[1])), -1)
        table[:, : self._table.shape[1]] = self._table
        first = self._virtual_counts.cumsum() - self._virtual_counts
        for r, path in enumerate(paths):
            if not path:
                continue
            tree = self.trees[r]
            ends = range(tree.size) if self.rows == "node" else tree.leaves
            heads = [tuple(tree._paths[end][: len(path)]) for end in ends]
            v = first[r] + heads.index(tuple(path))
            start = 0 if naive else int(self._prefix[r]) // self.page_size
            table[r, start : start + own.shape[1]] = own[v]
        return table, own

    def _allocate(self, tokens: np.ndarray) -> np.ndarray:
        """Consecutive pages: the shared ones first, then each request's own."""
        shared = self.shared_prefix_len // self.page_size
        pages = -(-tokens // self.page_size)
        own = pages - shared
        column = np.arange(int(pages.max()) if len(pages) else 0)
        table = shared + (own.cumsum() - own)[:, None] + column - shared
        table[:, :shared] = column[:shared]
        return np.where(column < pages[:, None], table, -1)

    def _take(self, page_table: torch.Tensor, tokens: np.ndarray) -> np.ndarray:
        """An engine's table: wide enough, pages apart where nothing is declared shared and equal where it is."""
        _checks.tensor("page_table", page_table, dtypes=(torch.int32,))
        pages = -(-tokens // self.page_size)
        widest = int(pages.max()) if len(pages) else 0
        if page_table.dim() != 2 or page_table.shape[0] != len(tokens) or page_table.shape[1] < widest:
            raise ValueError(
                f"page_table: expected [{len(tokens)}, at least {widest}], given shape {tuple(page_table.shape)}"
            )
        table = page_table.cpu().numpy().astype(np.int64)[:, :widest]
        table = np.where(np.arange(widest) < pages[:, None], table, -1)
        shared = self.shared_prefix_len // self.page_size
        if (table[:, :shared] != table[:1, :shared]).any():
            raise ValueError(
                f"page_table: expected the first {shared} pages equal in all requests, as shared_prefix_len = "
                f"{self.shared_prefix_len} declares, given different ones"
            )
        own = np.concatenate(
            (table[:1, :shared].ravel(), table[:, shared:][np.arange(shared, widest) < pages[:, None]])
        )
        if (own < 0).any():
            raise ValueError(f"page_table: expected page ids >= 0 for every token, given {int(own.min())}")
        page, times = np.unique(own, return_counts=True)
        if (times > 1).any():
            raise ValueError(
                f"page_table: expected pages of different requests to differ beyond shared_prefix_len = "
                f"{self.shared_prefix_len}, given page {int(page[times > 1][0])} more than once"
            )
        return table

    def _slots(self, request: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Flat slots of tokens of requests, elementwise; a token beyond the table has an arbitrary slot."""
        if self._table.shape[1] == 0:
            return np.zeros(np.broadcast_shapes(request.shape, token.shape), np.int64)
        page = np.minimum(token // self.page_size, self._table.shape[1] - 1)
        return self._table[request, page] * self.page_size + token % self.page_size

    def _path_nodes(self, ends: Sequence[Sequence[int]]) -> np.ndarray:
        """Nodes of each virtual request from the prefix down to its end, [V, depth] padded by -1."""
        depth = max((tree.depth for tree in self.trees if tree is not None), default=0)
        nodes = np.full((len(self._virtual), depth), -1)
        at = 0
        for tree, own in zip(self.trees, ends, strict=True):
            if tree is not None:
                paths = tree._paths if self.rows == "node" else tree._paths[list(own)]
                nodes[at : at + len(own), : tree.depth] = paths
                at += len(own)
        return nodes

    def _prefix_level(self, start: int, end: np.ndarray) -> Level:
        """All rows of a request over its prefix tokens [start, end)."""
        first, last = start // self.page_size, int(-(-end.max() // self.page_size)) if len(end) else 0
        table = self._table[:, first : max(first, last)]
        return Level(
            cu_seqlens_q=self._offsets(self._row_counts),
            page_table=self._to_tensor(table),
            cache_seqlens=self._to_tensor(end - start),
            page_size=self.page_size,
            name="prefix",
            max_seqlen_q=self._most_rows,
        )

    def _shared_level(self) -> Level:
        """All rows of the batch as one request over the tokens that all requests share."""
        return Level(
            cu_seqlens_q=self._offsets(np.asarray([self.num_rows])),
            page_table=self._to_tensor(self._table[:1, : self.shared_prefix_len // self.page_size]),
            cache_seqlens=self._to_tensor(np.asarray([self.shared_prefix_len])),
            page_size=self.page_size,
            name="shared",
            max_seqlen_q=self.num_rows,
        )

    def _draft_level(self) -> Level:
        return self._virtual_level(self._path_slots, self._path_lens, 1, "draft")

    def _expanded_level(self) -> Level:
        """Every virtual request as one of its own, prefix and path, in pages of one token."""
        lens = self._prefix[self._virtual] + self._path_lens
        table = np.empty((len(self._virtual), int(lens.max()) if len(lens) else 0), np.int32)
        # in int32 and whole pages: this table is by far the largest thing that a plan builds
        first, offset = (self._table * self.page_size).astype(np.int32), np.arange(self.page_size, dtype=np.int32)
        paths = self._path_slots.astype(np.int32)
        end = 0
        for r, (length, count) in enumerate(zip(self.prefix_lens, self._virtual_counts.tolist(), strict=True)):
            if count == 0:
                continue
            own = slice(end, end := end + count)
            whole = (first[r, : -(-length // self.page_size), None] + offset).reshape(-1)
            table[own, :length] = whole[:length]
            behind = table[own, length:]
            width = min(behind.shape[1], paths.shape[1])
            behind[:, :width] = paths[own, :width]
            behind[:, width:] = -1
        return self._virtual_level(table, lens, 1, "expanded")

    def _fused_level(self) -> Level:
        words = -(-int(self._nodes.max()) // 64) if len(self._nodes) and self._nodes.max() else 1
        mask = torch.zeros(self.num_rows, words, dtype=torch.int64, device="cpu")
        at = 0
        for tree, count in zip(self.trees, self._row_counts, strict=True):
            if tree is not None:
                nodes = torch.from_numpy(self._row_nodes[at : at + count])
                mask[at : at + count, : tree.mask.shape[1]] = tree.mask[nodes]
                at += count
        return Level(
            cu_seqlens_q=self._offsets(self._row_counts),
            page_table=self.page_table,
            cache_seqlens=self._to_tensor(self._prefix + self._nodes),
            page_size=self.page_size,
            tree_mask=mask.to(self.device),
            tail_seqlens=self._to_tensor(self._nodes),
            name="fused",
            max_seqlen_q=self._most_rows,
        )

    def _virtual_level(self, table: np.ndarray, lengths: np.ndarray, page_size: int, name: str) -> Level:
        """The virtual requests; the rows of a branch see each other causally, at the end of the keys."""
        return Level(
            cu_seqlens_q=self._offsets(self._virtual_rows),
            page_table=self._to_tensor(table),
            cache_seqlens=self._to_tensor(lengths),
            page_size=page_size,
            causal=self.rows == "branch",
            name=name,
            max_seqlen_q=int(self._virtual_rows.max()) if len(self._virtual_rows) else 0,
        )

    @property
    def _most_rows(self) -> int:
        return int(self._row_counts.max()) if len(self._row_counts) else 0

    def _offsets(self, counts: np.ndarray) -> torch.Tensor:
        return self._to_tensor(np.concatenate(([0], counts.cumsum())))

    def _to_tensor(self, values: np.ndarray, dtype: type = np.int32) -> torch.Tensor:
        return torch.from_numpy(values.astype(dtype, copy=False)).to(self.device)

    def _check_request(self, r: int) -> int:
        r = _checks.integer("r", r)
        if not 0 <= r < len(self.trees):
            raise ValueError(f"r: expected a request from 0 to {len(self.trees) - 1}, given {r}")
        return r

    def __reduce__(self) -> tuple[object, ...]:
        tokens = None if self._tokens is None else self._tokens.tolist()
        return _verify_batch, (
            *(self.prefix_lens, self.trees, self.page_size, self.rows, self.shared_prefix_len),
            *(self.page_table, self.num_pages, tokens, self.device),
        )


def _verify_batch(
    prefix_lens, trees, page_size, rows, shared_prefix_len, page_table, num_pages, tokens, device
) -> VerifyBatch:
    """What `VerifyBatch` is saved as."""
    return VerifyBatch(
        prefix_lens,
        trees,
        page_size,
        rows,
        shared_prefix_len=shared_prefix_len,
        page_table=page_table,
        num_pages=num_pages,
        tokens=tokens,
        device=device,
    )


torch.serialization.add_safe_globals(
    [Accepted, Committed, CopiedTails, DraftTree, VerifyBatch, VirtualRequests, _verify_batch]
)
