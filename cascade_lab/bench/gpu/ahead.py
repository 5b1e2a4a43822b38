"""Kernels are compiled ahead of the clock: worker processes make each launch once, and what they compiled is on disk.

Launches go to a few pages that stand for any number, for compiled code depends on shapes and strides and not on where
pages point. What is not compiled when the section's time is over is compiled where it is timed, before its timing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import torch

from cascade_lab import runtime
from cascade_lab.bench import peers
from cascade_lab.bench.clock import clock
from cascade_lab.bench.gpu.batches import batch_points, mix_levels, mixes, tree_batch
from cascade_lab.bench.gpu.prefill import prefill_points
from cascade_lab.bench.gpu.session import Scale, Session, planned
from cascade_lab.bench.gpu.verify import Pool, folded, verify_points
from cascade_lab.bench.record import progress
from cascade_lab.drafts import ROWS
from cascade_lab.evidence.workers import finished, workers
from cascade_lab.levels import Level
from cascade_lab.prefix import prefix_hit_levels

# pages of the cache of the few that stand for all
FOLDED_PAGES = 16


def compile_ahead(bench: Session) -> Iterator[dict]:
    """Launch every plan of the grids once in worker processes, whose compiled kernels this process finds on disk.

    Points that differ in lengths and batch share most kernels, so one worker takes them together. FlexAttention, the
    peer that is compiled for each shape, is compiled by the same workers.
    """
    scale = bench.scale
    tasks: dict[tuple, list[dict]] = {}
    for point in batch_points(scale):
        tasks.setdefault((point["mix"],), []).append(point)
    for point in verify_points(scale):
        tasks.setdefault((point["topk"], point["group"], point["rows"]), []).append(point)
    for point in prefill_points(scale):
        tasks.setdefault((point["new"],), []).append(point)
    parts = [points[i::4] for points in tasks.values() for i in range(min(4, len(points)))]
    if runtime.triton_mode() != "compiled":
        yield {"tasks": 1, "done": 1, "plans": launch_once(scale, parts[0][:1]), "failed": []}
        return
    if bench.clock.meaningful:
        parts = [*([point] for point in flex_points(scale)), *parts]
    plans, failed = [], []
    todo = [(scale, part, bench.deadline, bench.max_autotune) for part in parts]
    for _, done in finished(launch_once, todo, processes=workers(), deadline=bench.deadline):
        # what fails here fails again where it is timed, and stops the run there
        error = done.exception()
        (failed if error else plans).append(repr(error) if error else done.result())
        progress(f"compiling, {len(plans)} of {len(parts)}")
    yield {"tasks": len(parts), "done": len(plans), "plans": sum(plans), "failed": failed}


def flex_points(scale: Scale) -> list[dict]:
    """The shapes for which FlexAttention is compiled, which is for one shape each."""
    group = scale.centre[3]
    return [
        {"flex": rows, "batch": batch, "keys": length + scale.centre[1] * scale.steps, "group": group}
        for rows in ROWS
        for batch in scale.peer_batches
        for length in scale.peer_lengths
    ]


def launch_once(scale: Scale, points: Sequence[dict], deadline: float = math.inf, max_autotune: bool = False) -> int:
    """Launch the plans of points on a few pages until the deadline, and return how many were launched."""
    bench = Session(clock(), scale, max_autotune)
    launched = 0
    with torch.no_grad():
        pool = Pool(bench, FOLDED_PAGES * scale.coarse_page, folded=True)
        for point in points:
            if time.monotonic() >= deadline:
                break
            if "flex" in point:
                peers.compile_flex_attention(*_flex_tensors(bench, point), max_autotune=max_autotune)
                launched += 1
                continue
            for q, levels in _plans_of(bench, pool, point):
                planned(q, pool.k, pool.v, levels)()
                launched += 1
        bench.clock.wait()
    return launched


def _plans_of(bench: Session, pool: Pool, point: dict) -> Iterator[tuple[torch.Tensor, Sequence[Level]]]:
    scale, device = bench.scale, bench.clock.device
    heads = scale.centre[3] * scale.num_kv_heads
    if "topk" in point:
        work = pool.verify(**point)
        for levels in work.plans.values():
            yield work.q, levels
        return
    if "mix" in point:
        mix = next((mix for mix in mixes(scale) if mix.name == point["mix"]), None)
        levels = tree_batch(scale, device).levels(point["call"]) if mix is None else mix_levels(mix, scale, device)
    else:
        m, hit = point.values()
        table = torch.arange(-(-(m + hit) // scale.page), dtype=torch.int32, device=device)
        levels = prefix_hit_levels([m + hit], [hit], scale.page, page_table=table[None])
    q = bench.random(int(levels[0].cu_seqlens_q[-1]), heads, scale.head_dim)
    yield q, [folded(level, pool.tokens) for level in levels]


def _flex_tensors(bench: Session, point: dict) -> tuple[torch.Tensor, ...]:
    """Random q, k, v in the shapes that FlexAttention gets, and a mask that shows every draft."""
    scale = bench.scale
    topk, batch, heads, dim = scale.centre[1], point["batch"], scale.num_kv_heads, scale.head_dim
    rows = topk if point["flex"] == "leaf" else topk * scale.steps
    q = bench.random(batch, point["group"] * heads, rows, dim)
    k, v = (bench.random(batch, heads, point["keys"], dim) for _ in range(2))
    visible = torch.ones(batch, rows, topk * scale.steps, dtype=torch.bool, device=q.device)
    return q, k, v, visible
