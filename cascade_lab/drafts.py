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
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from cascade_lab import _checks, paging
from cascade_lab.levels import Level

__all__ = ["CopiedTails", "DraftTree", "PLANS", "ROWS", "VerifyBatch", "VirtualRequests"]

PLANS = ("naive", "cascade", "fused")
"""What `VerifyBatch.levels` may be asked for."""
ROWS = ("branch", "leaf", "node")
"""What a virtual request of `VerifyBatch` is: a branch with the rows of its path, its leaf's row, or a node's row."""


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens of one request as a forest on its prefix.

    Attributes:
        parents: parent of each node, negative for a node that hangs on the prefix; any storage order.

    Raises:
        ValueError: no node, a parent that does not exist, or a cycle. TypeError: parents that are not integers.
    """

    parents: tuple[int, ...]

    def __init__(self, parents: Iterable[int]):
        values = np.asarray(_checks.integer_list("parents", parents, None), np.int64)
        if values.size == 0:
            raise ValueError("parents: expected at least one node, given none (a request without drafts has tree None)")
        if values.max() >= len(values):
            i = int(values.argmax())
            raise ValueError(f"parents: expected ids below {len(values)}, given {int(values[i])} for node {i}")
        values = np.maximum(values, -1)
        object.__setattr__(self, "parents", tuple(values.tolist()))
        # a path of more nodes than there are never ends
        climb, steps = np.arange(len(values)), 0
        while (climb >= 0).any():
            if steps == len(values):
                raise ValueError(f"parents: expected no cycle, given one through node {int(climb[climb >= 0][0])}")
            climb, steps = np.where(climb >= 0, values[climb], -1), steps + 1
        object.__setattr__(self, "depth", steps)

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
    def from_paths(cls, paths: Iterable[Sequence[Hashable]]) -> DraftTree:
        """The tree whose nodes are the non-empty prefixes of `paths`, numbered by first appearance.

        A path is the sequence of labels from the prefix down (token ids, or ranks among siblings as in Medusa).
        """
        node_of: dict[tuple, int] = {}
        parents = []
        for path in paths:
            for end in range(1, len(path) + 1):
                head = tuple(path[:end])
                if head not in node_of:
                    node_of[head] = len(parents)
                    parents.append(node_of.get(head[:-1], -1))
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

    def positions(self, prefix_len: int) -> torch.Tensor:
        """`[size]` int64 positions in the sequence: prefix_len + number of ancestors; siblings share one."""
        return _checks.integer("prefix_len", prefix_len, 0) - 1 + torch.from_numpy(self._path_lens)

    def dense_mask(self, prefix_len: int = 0) -> torch.Tensor:
        """`[size, prefix_len + size]` bool, true where a node sees a key.

        With prefix_len = 0 it is the draft square (SGLang's QLEN_ONLY), with the prefix its FULL_MASK, and flattened
        over a batch FlashInfer's custom_mask.
        """
        prefix = torch.ones(self.size, _checks.integer("prefix_len", prefix_len, 0), dtype=torch.bool)
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
        padded = torch.cat((slots.to(torch.int32).cpu(), torch.tensor([-1], dtype=torch.int32)))
        return padded[torch.from_numpy(order)], torch.from_numpy(self._path_lens.astype(np.int32))

    @cached_property
    def _paths(self) -> np.ndarray:
        """[size, depth] int64: nodes from the prefix down to each node, then -1."""
        parents = np.asarray(self.parents)
        upward = np.full((self.size, self.depth), -1)
        climb = np.arange(self.size)
        for step in range(self.depth):
            upward[:, step] = climb
            climb = np.where(climb >= 0, parents[climb], -1)
        lens = (upward >= 0).sum(1)
        column = lens[:, None] - 1 - np.arange(self.depth)
        return np.where(column >= 0, np.take_along_axis(upward, np.maximum(column, 0), 1), -1)

    @cached_property
    def _path_lens(self) -> np.ndarray:
        return (self._paths >= 0).sum(1)

    @cached_property
    def _visible(self) -> np.ndarray:
        """[size, size] bool: row sees column."""
        seen = np.zeros((self.size, self.size + 1), bool)
        # -1 falls into the last column of the row before, and that column is dropped
        seen.reshape(-1)[np.arange(self.size)[:, None] * (self.size + 1) + self._paths] = True
        return seen[:, :-1]


@dataclass(frozen=True)
class CopiedTails:
    """A plan in whole pages only: what an engine runs whose page table cannot address single tokens.

    Attributes:
        levels: naive, one level of the virtual requests' own page tables; or cascade, whole prefix pages and then each
            virtual request's own.
        src, dst: int64 slots to copy before the pass, `k_flat[dst] = k_flat[src]`.
        tail_tokens: how many of these are prefix tokens, copied because they do not fill a page.
        num_pages: pages the cache needs, those of the batch included.
    """

    levels: tuple[Level, ...]
    src: torch.Tensor
    dst: torch.Tensor
    tail_tokens: int
    num_pages: int


class VirtualRequests(NamedTuple):
    """The requests that a batch is expanded into, in the order of their rows; three `[V]` int64 tensors on the CPU.

    Attributes:
        request: of the batch, whose prefix is read.
        rows: query rows.
        drafts: tokens of its path, read behind the prefix.
    """

    request: torch.Tensor
    rows: torch.Tensor
    drafts: torch.Tensor


class VerifyBatch:
    """A batch of requests with draft trees to verify: its pages, its rows, and the plans over them.

    Rows are ordered by request, then by node or leaf in the tree's storage order, and those of a branch along its path
    from the prefix down. A request's drafts lie right behind its prefix, in storage order.
    """

    def __init__(
        self,
        prefix_lens: Sequence[int],
        trees: Sequence[DraftTree | None],
        page_size: int = 16,
        rows: str = "node",
        *,
        shared_prefix_len: int = 0,
        page_table: torch.Tensor | None = None,
        num_pages: int | None = None,
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
        page_size = _checks.integer("page_size", page_size, 1)
        shared_prefix_len = _checks.integer("shared_prefix_len", shared_prefix_len)
        num_pages = None if num_pages is None else _checks.integer("num_pages", num_pages)
        self.trees = tuple(trees)
        self.page_size = page_size
        self.rows = rows
        self.shared_prefix_len = shared_prefix_len
        self.device = torch.device(device)
        self._prefix = np.asarray(prefix_lens, np.int64)
        self._nodes = np.asarray([0 if tree is None else tree.size for tree in trees], np.int64)
        tokens = self._prefix + self._nodes
        shortest = int(self._prefix.min()) if len(self._prefix) else 0
        if not 0 <= shared_prefix_len <= shortest or shared_prefix_len % page_size:
            raise ValueError(
                f"shared_prefix_len: expected a multiple of page_size = {page_size} up to the shortest prefix "
                f"{shortest}, given {shared_prefix_len}"
            )
        distinct = int(tokens.sum()) - shared_prefix_len * max(0, len(tokens) - 1)
        if distinct >= 2**31:
            raise ValueError(f"prefix_lens: expected fewer than 2**31 distinct tokens in all, given {distinct}")
        if page_table is None:
            self._table = self._allocate(tokens)
        else:
            self._table = self._take(page_table, tokens)
        used = self._table[self._table >= 0]
        needed = int(used.max()) + 1 if used.size else 0
        if num_pages is not None and num_pages < needed:
            raise ValueError(f"num_pages: expected at least {needed} pages of {page_size} tokens, given {num_pages}")
        self.num_pages = needed if num_pages is None else num_pages
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

    def prefix_slots(self, r: int) -> torch.Tensor:
        """Flat slots (page x page_size + offset) of request r's prefix tokens, `[prefix_len]` int64."""
        r = self._check_request(r)
        return paging.token_slots(self.page_table, r, int(self._prefix[r]), self.page_size)

    def draft_slots(self, r: int) -> torch.Tensor:
        """Flat slots of request r's draft nodes in storage order, `[size]` int64; empty without a tree."""
        r = self._check_request(r)
        both = paging.token_slots(self.page_table, r, int(self._prefix[r] + self._nodes[r]), self.page_size)
        return both[int(self._prefix[r]) :]

    def levels(self, plan: str) -> tuple[Level, ...]:
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

    def copied_tails(self, plan: str = "naive") -> CopiedTails:
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
        mask = torch.zeros(self.num_rows, words, dtype=torch.int64)
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
