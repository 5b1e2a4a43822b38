"""The three plans of verification on a GPU, over prefix length, topk, batch, group and kind of rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from cascade_lab.bench.gpu.answers import agree, hold, row_in_float64
from cascade_lab.bench.gpu.limits import verify_work
from cascade_lab.bench.gpu.session import DTYPE, MEMORY_SHARE, Scale, Session, planned
from cascade_lab.drafts import ROWS, DraftTree, VerifyBatch
from cascade_lab.evidence import checks
from cascade_lab.levels import Ledger, Level, ledger


@dataclass(frozen=True)
class VerifyPlans:
    """One verify batch on the pool's tensors, with its plans."""

    batch: VerifyBatch
    q: Tensor
    k: Tensor
    v: Tensor
    plans: dict[str, Sequence[Level]]


def time_verify(bench: Session) -> Iterator[dict]:
    """(b) The three plans over prefix length, topk, batch, group and kind of rows."""
    scale = bench.scale
    points = verify_points(scale)
    pool = Pool(bench, max(tokens_needed(scale, **point) for point in points))
    for point in bench.visit(points):
        if tokens_needed(scale, **point) > pool.tokens:
            bench.skipped.append(point | {"why": "memory"})
            continue
        work = pool.verify(**point)
        must_move = verify_work(asdict(scale), point).bytes
        yield point | {"steps": scale.steps, "plans": _time_plans(bench, work, must_move)}


def verify_points(scale: Scale) -> list[dict]:
    """The grid, the sweeps through its crossing first, then what differs from it along more and more axes."""
    axes = (scale.lengths, scale.topks, scale.batches, scale.groups, ROWS)
    names = ("length", "topk", "batch", "group", "rows")
    points = sorted(
        itertools.product(*axes), key=lambda point: sum(x != y for x, y in zip(point, scale.centre, strict=True))
    )
    return [dict(zip(names, point, strict=True)) for point in points]


def tokens_needed(scale: Scale, length: int, topk: int, batch: int, group: int, rows: str) -> int:
    """Slots that a point needs: prefix and drafts in whole pages, and each virtual request's own in the naive plan."""
    nodes = topk * scale.steps
    own_pages = (nodes if rows == "node" else topk) * -(-scale.steps // scale.page)
    return batch * scale.page * (-(-(length + nodes) // scale.page) + own_pages)


class Pool:
    """One pair of random caches for all points of a section: pages are dealt anew for each, in random order.

    A folded pool is a few pages that stand for any number, for launches whose answer nobody looks at.
    """

    def __init__(self, bench: Session, tokens: int, *, folded: bool = False):
        scale = bench.scale
        self.bench, self.folded = bench, folded
        per_token = 2 * scale.num_kv_heads * scale.head_dim * DTYPE.itemsize
        most = int(MEMORY_SHARE * bench.clock.free_bytes()) // per_token
        self.tokens = min(-(-tokens // scale.coarse_page), most // scale.coarse_page) * scale.coarse_page
        shape = (self.tokens // scale.page, scale.page, scale.num_kv_heads, scale.head_dim)
        self.k, self.v = bench.random(*shape), bench.random(*shape)

    def verify(self, length: int, topk: int, batch: int, group: int, rows: str) -> VerifyPlans:
        scale, device = self.bench.scale, self.bench.clock.device
        pages = -(-(length + topk * scale.steps) // scale.page)
        table = torch.randperm(batch * pages).view(batch, pages).int()
        trees = [DraftTree.branches(topk, scale.steps)] * batch
        work = VerifyBatch([length] * batch, trees, scale.page, rows, page_table=table, device=device)
        naive = work.copied_tails("naive")
        q = self.bench.random(work.num_rows, group * scale.num_kv_heads, scale.head_dim)
        plans = {"naive": naive.levels, "cascade": work.levels("cascade"), "fused": work.levels("fused")}
        if self.folded:
            plans = {plan: [folded(level, self.tokens) for level in levels] for plan, levels in plans.items()}
        else:
            self.copy(naive.src, naive.dst)
        return VerifyPlans(work, q, self.k, self.v, plans)

    def copy(self, src: Tensor, dst: Tensor) -> None:
        for cache in (self.k, self.v):
            flat = cache.view(-1, *cache.shape[2:])
            flat[dst] = flat[src]


def folded(level: Level, tokens: int) -> Level:
    """The level with its pages wrapped into a cache of `tokens`: the same launch, other addresses."""
    return replace(level, page_table=level.page_table.clamp(min=0) % (tokens // level.page_size))


def _time_plans(bench: Session, work: VerifyPlans, must_move: int) -> dict[str, dict]:
    """Every plan's answer held against float64, its time, what it must move, and its ratio to the naive plan."""
    q, k = work.q, work.k
    heads = dict(num_q_heads=q.shape[1], num_kv_heads=k.shape[2])
    reference = reference_row(work)
    ledgers = {plan: ledger(levels, **heads) for plan, levels in work.plans.items()}
    found, first = {}, None
    for plan, levels in work.plans.items():
        call = planned(q, work.k, work.v, levels)
        state = call()
        errors = hold(state, reference, plan)
        first = state if first is None else first
        agree(state, first, plan)
        timing = bench.clock.measure(call)
        row = asdict(timing) | errors
        row |= {
            "kv_tokens": ledgers[plan].kv_tokens,
            "kv_tokens_loaded": kv_tokens_loaded(ledgers[plan], levels, q),
            "bytes_must_move": must_move,
            "bytes_per_s": must_move / timing.seconds,
            "share_of_copy": must_move / timing.seconds / bench.copy_rate,
        }
        found[plan] = row
    for row in found.values():
        row["ratio_measured"] = found["naive"]["seconds"] / row["seconds"]
        row["ratio_predicted"] = found["naive"]["kv_tokens"] / row["kv_tokens"]
        row["ratio_loaded"] = found["naive"]["kv_tokens_loaded"] / row["kv_tokens_loaded"]
    return found


def kv_tokens_loaded(plan: Ledger, levels: Sequence[Level], q: Tensor) -> int:
    """Tokens per KV head that the launches of a plan load, their row tiles counted."""
    loaded = 0
    for part, level in zip(plan.levels, levels, strict=True):
        rows = int(torch.diff(level.cu_seqlens_q).max())
        tile = checks.launch_tile(rows * part.num_q_heads // part.num_kv_heads, q.shape[2], q.dtype)
        loaded += part.tile_tokens(tile.block_m)
    return loaded


def reference_row(work: VerifyPlans) -> tuple[int, Tensor, Tensor]:
    """One random row of the batch in float64, from parent links and slots alone: (row, o [H_q, D], lse [H_q])."""
    batch, q = work.batch, work.q
    row = int(torch.randint(batch.num_rows, ()))
    request = next(r for r, end in enumerate(itertools.accumulate(batch.row_counts)) if row < end)
    tree = batch.trees[request]
    node = int(batch.row_nodes[row])
    path = torch.tensor([*tree.ancestors(node), node], device=q.device)
    slots = torch.cat((batch.prefix_slots(request), batch.draft_slots(request)[path]))
    k, v = (x.view(-1, *x.shape[2:])[slots] for x in (work.k, work.v))
    return row, *row_in_float64(q[row], k, v)
