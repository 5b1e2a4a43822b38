"""What the properties draw: structure by Hypothesis, so that it shrinks and reads well; tensor contents from a seed.

Batches are drawn as small frozen records of plain numbers, which is what a falsifying example prints, and become
tensors inside the test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from cascade_lab import DraftTree, Level, VerifyBatch, runtime
from cascade_lab.drafts import ROWS
from tests.cases import AttentionCase, attention_case, int32, tree_mask
from tests.properties.budget import FUZZING
from tests.verify import VerifyCase, verify_case

CPU = torch.device("cpu")
LAYOUTS = ("packed", "heads first", "interleaved", "padded")
WORD = (-(2**63), 2**63 - 1)

seeds = st.integers(0, 2**16 - 1)
page_sizes = st.sampled_from([4, 1, 2, 3, 5, 7, 8, 16])
# (query heads, KV heads): one group, none, several, and groups that are no power of two
heads = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (3, 1), (6, 2), (5, 1)])

# A compiler would take seconds for each new shape, so compiled kernels meet random shapes only in `make fuzz`.
needs_triton = pytest.mark.skipif(
    runtime.triton_mode() == "absent" or (runtime.triton_mode() != "interpreted" and not FUZZING),
    reason="Triton is absent, or would compile each case: make fuzz does",
)


@contextlib.contextmanager
def watched() -> Iterator:
    """The recorder that bounds every access of an interpreted launch made inside; None where kernels are compiled."""
    if runtime.triton_mode() != "interpreted":
        yield None
        return
    from cascade_lab.evidence.reads import record_loads

    with record_loads() as record:
        yield record


@st.composite
def forests(draw, max_size: int = 8, min_size: int = 1) -> list[int]:
    """Parents of `min_size` to `max_size` nodes in any storage order, -1 where a node hangs on the prefix."""
    size = draw(st.integers(min_size, max_size))
    above = [draw(st.integers(-1, node - 1)) for node in range(size)]
    place = draw(st.permutations(range(size)))
    parents = [-1] * size
    for node, parent in enumerate(above):
        parents[place[node]] = -1 if parent < 0 else place[parent]
    return parents


def spread(indices: torch.Tensor) -> torch.Tensor:
    """The same numbers as every third element of a tensor whose others name no page, row or key."""
    apart = indices.new_full((*indices.shape, 3), -(2**31))
    apart[..., 1] = indices
    return apart[..., 1]


@dataclass(frozen=True)
class Batch:
    """Requests of `rows[r]` query rows over `lengths[r]` cached tokens, and the rule that hides keys.

    `trees` are the parents of a tree mask, one per request and `rows[r]` long. `tails` stand beside a mask of random
    `mask_words`, whose bits beyond the tail mean nothing. With `strided`, index tensors lie between other numbers.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (1, 1)
    dim: int = 16
    value_dim: int = 16
    page: int = 4
    dtype: str = "float32"
    layout: str = "packed"
    strided: bool = False
    seed: int = 0
    rule: dict = field(default_factory=dict)
    trees: tuple[list[int], ...] | None = None
    tails: tuple[int, ...] | None = None
    mask_words: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def case(self, device: torch.device = CPU, **changes) -> AttentionCase:
        """The tensors; `changes` are other arguments of `attention_case`."""
        options = dict(self.rule)
        if self.trees is not None:
            none = torch.zeros(0, 1, dtype=torch.int64, device=device)
            options["tree_mask"] = tree_mask(self.trees, device) if any(self.rows) else none
        if self.tails is not None:
            bits = np.random.default_rng(self.seed).integers(*WORD, (sum(self.rows), self.mask_words), endpoint=True)
            options |= {"tree_mask": torch.from_numpy(bits).to(device), "tail_seqlens": int32(self.tails, device)}
        arguments = dict(
            heads=self.heads,
            dim=self.dim,
            value_dim=self.value_dim,
            page=self.page,
            dtype=self.torch_dtype,
            layout=self.layout,
            seed=self.seed,
            device=device,
        )
        case = attention_case(list(self.rows), list(self.lengths), **arguments | options | changes)
        if not self.strided:
            return case
        indices = {name: spread(x) for name, x in case.tensors.items() if not x.is_floating_point()}
        options = {name: indices.pop(name) for name in case.options if name in indices}
        return replace(case, **indices).with_options(**options)

    def level(self, case: AttentionCase) -> Level:
        """The same pass as a level; a window is not one."""
        options = {name: case.options[name] for name in ("causal", "tree_mask", "tail_seqlens") if name in case.options}
        return Level(case.cu_seqlens_q, case.page_table, case.cache_seqlens, self.page, **options)


RULES = ("all keys", "causal", "window", "causal window", "tree", "tails")


@st.composite
def batches(
    draw,
    *,
    rules: tuple[str, ...] = RULES,
    dtypes: tuple[str, ...] = ("float32",),
    dims: st.SearchStrategy[int] | None = None,
    max_requests: int = 4,
    max_rows: int = 6,
    max_keys: int = 40,
) -> Batch:
    """Ragged batches under one of `rules`; none or requests without rows, without keys, with fewer keys than rows."""
    rule = draw(st.sampled_from(rules))
    rows, lengths = [], []
    for _ in range(draw(st.integers(1, max_requests) | st.just(0))):
        rows.append(draw(st.integers(0, max_rows)))
        shortest = rows[-1] if rule == "tree" else 0
        lengths.append(draw(st.integers(shortest, max_keys)))
    dims = st.sampled_from([16, 1, 3, 8, 17, 24, 32, 48]) if dims is None else dims
    batch = Batch(
        tuple(rows),
        tuple(lengths),
        heads=draw(heads),
        dim=draw(dims),
        value_dim=draw(dims),
        page=draw(page_sizes),
        dtype=draw(st.sampled_from(dtypes)),
        layout=draw(st.sampled_from(LAYOUTS)),
        strided=draw(st.booleans()),
        seed=draw(seeds),
    )
    reach = st.integers(-1, max_keys) | st.sampled_from([2**31 - 1, 2**40])
    if rule == "causal":
        return replace(batch, rule={"causal": True})
    if rule == "window":
        return replace(batch, rule={"window_size": (draw(reach), draw(reach))})
    if rule == "causal window":
        return replace(batch, rule={"causal": True, "window_size": (draw(reach), 0)})
    if rule == "tree":
        trees = tuple(draw(forests(n, n)) for n in rows)
        return replace(batch, trees=trees)
    if rule == "tails":
        tails = tuple(draw(st.integers(0, length)) for length in lengths)
        words = max(1, -(-max(tails, default=0) // 64)) + draw(st.integers(0, 1))
        return replace(batch, tails=tails, mask_words=words)
    return batch


@dataclass(frozen=True)
class Verification:
    """A batch of prefixes and draft trees, as `tests.verify.verify_case` takes it."""

    prefix_lens: tuple[int, ...]
    forests: tuple[list[int] | None, ...]
    rows: str
    page: int
    shared: int
    heads: tuple[int, int]
    dim: int
    value_dim: int
    seed: int
    shuffled: bool

    @property
    def trees(self) -> list[list[int]]:
        return [[] if parents is None else parents for parents in self.forests]

    def batch(self) -> VerifyBatch:
        """The batch without caches."""
        trees = [None if parents is None else DraftTree(parents) for parents in self.forests]
        options = dict(shared_prefix_len=self.shared, page_table=self.table())
        return VerifyBatch(self.prefix_lens, trees, self.page, self.rows, **options)

    def table(self) -> torch.Tensor | None:
        """An engine's page table in random order with pages to spare, or None for consecutive pages."""
        if not self.shuffled:
            return None
        pages = [-(-(n + len(tree)) // self.page) for n, tree in zip(self.prefix_lens, self.trees, strict=True)]
        pool = np.random.default_rng(self.seed).permutation(sum(pages) + 3)
        common, pool = pool[: self.shared // self.page], pool[self.shared // self.page :]
        table = np.full((len(pages), max(pages) + 1), -7)
        for r, count in enumerate(pages):
            own, pool = pool[: count - len(common)], pool[count - len(common) :]
            table[r, :count] = np.concatenate((common, own))
        return torch.from_numpy(table.astype(np.int32))


@st.composite
def verifications(
    draw, *, max_requests: int = 4, max_prefix: int = 40, max_nodes: int = 8, dims: tuple[int, ...] = (16, 8, 3, 24)
) -> Verification:
    """Prefixes of any length, trees or None, a shared system prompt now and then."""
    count = draw(st.integers(1, max_requests))
    page = draw(page_sizes)
    shared = draw(st.sampled_from([0, 0, page, 2 * page]))
    return Verification(
        prefix_lens=tuple(shared + draw(st.integers(0, max_prefix)) for _ in range(count)),
        forests=tuple(draw(st.none() | forests(max_nodes)) for _ in range(count)),
        rows=draw(st.sampled_from(ROWS)),
        page=page,
        shared=shared,
        heads=draw(heads),
        dim=draw(st.sampled_from(dims)),
        value_dim=draw(st.sampled_from(dims)),
        seed=draw(seeds),
        shuffled=draw(st.booleans()),
    )


def filled(drawn: Verification, device="cpu", dtype: torch.dtype = torch.float32) -> VerifyCase:
    """The drawn verification with tensors: slots, caches and queries."""
    return verify_case(
        drawn.prefix_lens,
        drawn.forests,
        rows=drawn.rows,
        page=drawn.page,
        shared=drawn.shared,
        heads=drawn.heads,
        dim=drawn.dim,
        value_dim=drawn.value_dim,
        dtype=dtype,
        device=device,
        seed=drawn.seed,
        page_table=drawn.table(),
    )
