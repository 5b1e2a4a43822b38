"""Batches as engines have them, on a GPU: lengths that differ, one long request, decodes beside a prefill, any trees.

A batch is one causal call over ragged requests, or a plan over ragged trees. Its bytes and operations are sums over the
requests, so a kernel that deals its work out evenly takes max(bytes / copy rate, flops / matrix rate) whatever the mix,
and one that gives every request the same share of the card takes as long as its longest request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import exp, gcd
from statistics import NormalDist

import torch
from torch import Tensor

from cascade_lab.bench.gpu.answers import hold, row_in_float64
from cascade_lab.bench.gpu.limits import Work, batch_work, pass_work
from cascade_lab.bench.gpu.session import DTYPE, MEMORY_SHARE, Scale, Session, planned
from cascade_lab.drafts import DraftTree, VerifyBatch
from cascade_lab.levels import Level, ledger
from cascade_lab.paging import build_page_table
from cascade_lab.prefix import prefix_hit_levels

TREE_PLANS = ("cascade", "fused")


@dataclass(frozen=True)
class Mix:
    """Requests of one causal call: rows hits[r] to prompts[r] - 1 of each, over all its earlier tokens."""

    name: str
    prompts: tuple[int, ...]
    hits: tuple[int, ...]

    @classmethod
    def of(cls, name: str, *parts: tuple[Sequence[int], int]) -> Mix:
        """From prompts that have so many new rows each."""
        requests = [(n, n - new) for prompts, new in parts for n in prompts]
        return cls(name, *zip(*requests, strict=True))


def mixes(scale: Scale) -> tuple[Mix, ...]:
    """The causal batches of a run: with a unit length U and R requests, at full size 16,384 and 16."""
    unit, few = scale.mix_length, scale.mix_requests
    short = unit // 8
    return (
        Mix.of(f"{few} decodes of {unit}", ([unit] * few, 1)),
        Mix.of(f"{4 * few} decodes, lognormal around {unit}", (lognormal_lengths(4 * few, unit), 1)),
        Mix.of(
            f"1 decode of {4 * unit}, {few - 1} of {short}", ([short] * (few - 1), 1), ([4 * unit], 1)
        ),
        Mix.of(
            f"1 decode of {8 * unit}, {4 * few - 1} of {short}", ([short] * (4 * few - 1), 1), ([8 * unit], 1)
        ),
        Mix.of(
            f"{few - 1} decodes of {unit}, {4 * few} rows over {unit}",
            ([unit] * (few - 1), 1),
            ([unit + 4 * few], 4 * few),
        ),
        Mix.of(
            f"{16 * few - 1} decodes of {short}, a prompt of {unit // 2}",
            ([short] * (16 * few - 1), 1),
            ([unit // 2], unit // 2),
        ),
    )  # fmt: skip


def lognormal_lengths(count: int, mean: int, spread: float = 1.0) -> tuple[int, ...]:
    """Lengths at equally spaced quantiles of a lognormal distribution, the same in every run.

    Args:
        count: lengths, in an order that neither rises nor falls.
        mean: of them, but for rounding.
        spread: standard deviation of their logarithm.
    """
    quantiles = [exp(spread * NormalDist().inv_cdf((i + 0.5) / count)) for i in range(count)]
    scale = mean * count / sum(quantiles)
    stride = next(step for step in range(count // 3 + 1, count + 2) if gcd(step, count) == 1)
    return tuple(max(1, round(scale * quantiles[i * stride % count])) for i in range(count))


def tree_batch(scale: Scale, device: torch.device | str) -> VerifyBatch:
    """Requests of lognormal prefixes with no draft, a chain, a bush, and branches as in the sweeps, in turn."""
    count = scale.mix_requests
    bush = DraftTree([-1, *(i // 2 for i in range(scale.steps**2))])
    kinds = (None, DraftTree.chain(2 * scale.steps), bush, DraftTree.branches(scale.centre[1], scale.steps))
    trees = [kinds[r % len(kinds)] for r in range(count)]
    lengths = lognormal_lengths(count, scale.mix_length)
    sizes = [n + (0 if tree is None else tree.size) for n, tree in zip(lengths, trees, strict=True)]
    table = _shuffled(build_page_table(sizes, scale.page))
    return VerifyBatch(lengths, trees, scale.page, "node", page_table=table, device=device)


def mix_levels(mix: Mix, scale: Scale, device: torch.device | str) -> tuple[Level, ...]:
    """One causal level over shuffled pages."""
    table = _shuffled(build_page_table(mix.prompts, scale.page)).to(device)
    return prefix_hit_levels(mix.prompts, mix.hits, scale.page, page_table=table)


def batch_points(scale: Scale) -> list[dict]:
    """Names of the batches and, for trees, of the plan."""
    plain = [{"mix": mix.name, "call": "causal"} for mix in mixes(scale)]
    return [*plain, *({"mix": f"{scale.mix_requests} ragged trees", "call": plan} for plan in TREE_PLANS)]


def tree_work(scale: Scale, batch: VerifyBatch) -> Work:
    """Bytes and operations of a batch of trees, whatever the plan."""
    counted = ledger(batch.levels("fused"))
    heads = {"num_kv_heads": scale.num_kv_heads, "head_dim": scale.head_dim}
    return pass_work(heads, scale.centre[3], batch.num_rows, counted.kv_tokens_unique, counted.pairs)


def time_batches(bench: Session) -> Iterator[dict]:
    """(h) Ragged, mixed and long-tailed batches: time against what their bytes and operations need."""
    scale, device = bench.scale, bench.clock.device
    group = scale.centre[3]
    by_name = {mix.name: mix for mix in mixes(scale)}
    for point in bench.visit(batch_points(scale)):
        mix = by_name.get(point["mix"])
        if mix is None:
            batch = tree_batch(scale, device)
            levels, work = batch.levels(point["call"]), tree_work(scale, batch)
        else:
            levels = mix_levels(mix, scale, device)
            work = batch_work(asdict(scale), group, mix.prompts, mix.hits)
        pages = 1 + max(int(level.page_table.max()) * level.page_size // scale.page for level in levels)
        if 2 * pages * scale.page * scale.num_kv_heads * scale.head_dim * DTYPE.itemsize > (
            MEMORY_SHARE * bench.clock.free_bytes()
        ):
            bench.skipped.append(point | {"why": "memory"})
            continue
        k, v = (bench.random(pages, scale.page, scale.num_kv_heads, scale.head_dim) for _ in range(2))
        rows = int(levels[0].cu_seqlens_q[-1])
        q = bench.random(rows, group * scale.num_kv_heads, scale.head_dim)
        call = planned(q, k, v, levels)
        slots = tree_row(batch) if mix is None else mix_row(mix, levels[0])
        errors = hold(call(), _reference(q, k, v, *slots), point["mix"])
        timing = bench.clock.measure(call)
        needs = {"group": group, "bytes_must_move": work.bytes, "flops": work.flops}
        yield point | needs | {"bytes_per_s": work.bytes / timing.seconds} | asdict(timing) | errors


def mix_row(mix: Mix, level: Level) -> tuple[int, Tensor]:
    """A random row of the longest request and the slots of all keys that it sees."""
    r = max(range(len(mix.prompts)), key=lambda r: mix.prompts[r])
    local = int(torch.randint(mix.prompts[r] - mix.hits[r], ()))
    positions = torch.arange(mix.hits[r] + local + 1, device=level.page_table.device)
    slots = level.page_table[r].long()[positions // level.page_size] * level.page_size + positions % level.page_size
    return int(level.cu_seqlens_q[r]) + local, slots


def tree_row(batch: VerifyBatch) -> tuple[int, Tensor]:
    """A random row of a batch by nodes, and the slots of its prefix and of its path."""
    row = int(torch.randint(batch.num_rows, ()))
    ends = torch.tensor(batch.row_counts).cumsum(0)
    r = int((ends > row).int().argmax())
    node = int(batch.row_nodes[row])
    path = torch.tensor([*batch.trees[r].ancestors(node), node], device=batch.page_table.device)
    return row, torch.cat((batch.prefix_slots(r), batch.draft_slots(r)[path]))


def _reference(q: Tensor, k: Tensor, v: Tensor, row: int, slots: Tensor) -> tuple[int, Tensor, Tensor]:
    seen = (x.view(-1, *x.shape[2:])[slots] for x in (k, v))
    return row, *row_in_float64(q[row], *seen)


def _shuffled(table: Tensor) -> Tensor:
    """The page table with its pages renumbered at random; entries that hold no page stay negative."""
    order = torch.randperm(int(table.max()) + 1).int()
    return torch.where(table >= 0, order[table.clamp(min=0).long()], table)
