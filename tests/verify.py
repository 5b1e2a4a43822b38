"""Draft trees to verify, and an answer that knows no plan: every row's path unrolled into its own sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cascade_lab import DraftTree, State, VerifyBatch, cascade_attention
from cascade_lab.evidence.reference import Reference, assert_state_close, attention_oracle
from cascade_lab.levels import Level
from cascade_lab.paging import split_kv_cache
from tests.cases import bytes_of, int32, random

FORK = [-1, 0, 0, 1, 2]
SHUFFLED = [3, 3, 0, -1, 2, -1, 1]
CHAIN = [-1, 0, 1]
STAR = [2, 2, -1, 2]
# what the oracle of unrolled sequences takes
ORACLE_OPTIONS = ("softmax_scale", "softcap", "sinks", "k_scale", "v_scale")


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the prefix down to `node`, by climbing parent links."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def virtual_paths(parents: Sequence[int] | None, rows: str) -> list[list[int]]:
    """The path of each virtual request, from the prefix down."""
    nodes = range(len(parents or []))
    return [path_to(parents, node) for node in nodes if rows == "node" or node not in parents]


def row_ends(parents: Sequence[int] | None, rows: str) -> list[int]:
    """The node each query row of a request stands on."""
    return [node for path in virtual_paths(parents, rows) for node in (path if rows == "branch" else path[-1:])]


@dataclass(frozen=True)
class VerifyCase:
    """A batch with filled caches; `keys` and `values` [T, longest, H_kv, D] hold each row's own sequence."""

    batch: VerifyBatch
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor

    def oracle(self, dtype: torch.dtype = torch.float64, **options) -> Reference:
        table = int32([[row] for row in range(len(self.q))], self.q.device).view(-1, 1)
        arguments = (self.q, self.keys, self.values, table, self.lengths)
        return attention_oracle(*arguments, dtype=dtype, **options)


def verify_case(
    prefix_lens: Sequence[int],
    forests: Sequence[Sequence[int] | None],
    *,
    rows: str = "node",
    page: int = 4,
    shared: int = 0,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device="cpu",
    seed: int = 0,
    interleaved: bool = False,
    page_table: Tensor | None = None,
    spare_pages: int = 1,
) -> VerifyCase:
    """Fill NaN caches at the batch's slots, and unroll every row by climbing its parents.

    Tokens below `shared` have the same content in every request.
    """
    num_heads, num_kv_heads = heads
    value_dim = dim if value_dim is None else value_dim
    trees = [None if parents is None else DraftTree(parents) for parents in forests]
    batch = VerifyBatch(prefix_lens, trees, page, rows, shared_prefix_len=shared, page_table=page_table, device=device)
    num_pages = batch.num_pages + spare_pages
    cache_dtype = dtype if cache_dtype is None else cache_dtype

    def draw(count: int, width: int, stream: int) -> Tensor:
        values = random(count, num_kv_heads, width, seed=1000 * seed + stream, dtype=dtype, device=device)
        return values.to(cache_dtype)

    if interleaved:
        assert value_dim == dim
        both = torch.full((num_pages, 2, page, num_kv_heads, dim), math.nan, dtype=cache_dtype, device=device)
        k_cache, v_cache = split_kv_cache(both)
    else:
        k_cache = torch.full((num_pages, page, num_kv_heads, dim), math.nan, dtype=cache_dtype, device=device)
        v_cache = torch.full((num_pages, page, num_kv_heads, value_dim), math.nan, dtype=cache_dtype, device=device)
    sequences: tuple[list[Tensor], list[Tensor]] = ([], [])
    for which, (cache, width) in enumerate(((k_cache, dim), (v_cache, value_dim))):
        common = draw(shared, width, 1 + which)
        for r, parents in enumerate(forests):
            prefix = torch.cat((common, draw(prefix_lens[r] - shared, width, 10 + 4 * r + which)))
            slots = batch.prefix_slots(r)
            cache[slots // page, slots % page] = prefix
            if parents is None:
                continue
            drafts = draw(len(parents), width, 12 + 4 * r + which)
            slots = batch.draft_slots(r)
            cache[slots // page, slots % page] = drafts
            for node in row_ends(parents, rows):
                sequences[which].append(torch.cat((prefix, drafts[path_to(parents, node)])))
    lengths = [len(sequence) for sequence in sequences[0]]
    dense = []
    for parts, width in zip(sequences, (dim, value_dim), strict=True):
        padded = torch.full(
            (len(parts), max([1, *lengths]), num_kv_heads, width), math.nan, dtype=cache_dtype, device=device
        )
        for row, part in enumerate(parts):
            padded[row, : len(part)] = part
        dense.append(padded)
    q = random(len(lengths), num_heads, dim, seed=1000 * seed + 7, dtype=dtype, device=device)
    return VerifyCase(batch, q, k_cache, v_cache, *dense, int32(lengths, device).view(-1))


def run_levels(case: VerifyCase, levels: Sequence[Level], backend: str, loads=None, **options) -> State:
    """Call `cascade_attention` with every tensor named to the recorder, and assert that no input changed."""
    named = {"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache}
    for i, level in enumerate(levels):
        for name in ("cu_seqlens_q", "page_table", "cache_seqlens", "tree_mask", "tail_seqlens"):
            if getattr(level, name) is not None:
                named[f"{name}_{i}"] = getattr(level, name)
    if loads is not None:
        loads.register(**{name: tensor for name, tensor in named.items() if name not in loads.tensors})
    before = {name: bytes_of(tensor) for name, tensor in named.items() if tensor.numel()}
    state = cascade_attention(case.q, case.k_cache, case.v_cache, levels, backend=backend, **options)
    for name, tensor in before.items():
        assert torch.equal(bytes_of(named[name]), tensor), f"{name} was modified"
    return state


def check_levels(case: VerifyCase, levels: Sequence[Level], backend: str, loads=None, **options) -> State:
    """Run, and hold the state to the unrolled oracle within twice the error of plain torch in q's dtype."""
    state = run_levels(case, levels, backend, loads, **options)
    oracle_options = {name: options[name] for name in ORACLE_OPTIONS if name in options}
    plain = case.oracle(case.q.dtype, **oracle_options)
    assert state.o.dtype == options.get("out_dtype", case.q.dtype)
    assert_state_close(state, case.oracle(**oracle_options), plain=plain)
    return state
