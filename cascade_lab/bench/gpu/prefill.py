"""Prefill after a hit on a GPU, against pairs, executed tiles and the matrix rate; and a linear layer beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from cascade_lab.bench.gpu.answers import hold, row_in_float64
from cascade_lab.bench.gpu.session import DTYPE, MEMORY_SHARE, Scale, Session, planned
from cascade_lab.evidence import checks
from cascade_lab.levels import Level
from cascade_lab.prefix import executed_tiles, interactions, prefix_hit_levels, remaining


@dataclass(frozen=True)
class PrefillWork:
    """One prompt's suffix over its whole cache."""

    q: Tensor
    k: Tensor
    v: Tensor
    levels: Sequence[Level]


def prefill_work(bench: Session, n: int, hit: int, group: int) -> PrefillWork:
    scale, device = bench.scale, bench.clock.device
    pages = -(-n // scale.page)
    table = torch.randperm(pages)[None].int().to(device)
    levels = prefix_hit_levels([n], [hit], scale.page, page_table=table)
    k, v = (bench.random(pages, scale.page, scale.num_kv_heads, scale.head_dim) for _ in range(2))
    return PrefillWork(bench.random(n - hit, group * scale.num_kv_heads, scale.head_dim), k, v, levels)


def time_prefill(bench: Session) -> Iterator[dict]:
    """(d) New tokens M over a hit H, dense causal: time against pairs, executed tiles and the matrix rate."""
    scale = bench.scale
    group = scale.centre[3]
    for point in bench.visit(prefill_points(scale)):
        m, hit = point.values()
        n = m + hit
        if 2 * n * scale.num_kv_heads * scale.head_dim * DTYPE.itemsize > MEMORY_SHARE * bench.clock.free_bytes():
            bench.skipped.append(point | {"why": "memory"})
            continue
        work = prefill_work(bench, n, hit, group)
        call = planned(work.q, work.k, work.v, work.levels)
        errors = hold(call(), _prefill_reference(work, hit), f"prefill M={m} H={hit}")
        timing = bench.clock.measure(call)
        tile = checks.launch_tile(m * group, scale.head_dim, DTYPE)
        pairs = interactions(n, hit)
        tiles = executed_tiles(n, hit, tile.block_m, tile.block_n, group)
        flops = 4 * scale.head_dim * pairs * group * scale.num_kv_heads
        yield point | {
            "group": group,
            "pairs": pairs,
            "tiles": tiles,
            "block_m": tile.block_m,
            "block_n": tile.block_n,
            "remaining": float(remaining(n, hit)),
            "tile_remaining": tiles / executed_tiles(n, 0, tile.block_m, tile.block_n, group),
            "flops": flops,
            "flops_per_s": flops / timing.seconds,
            "share_of_matmul": flops / timing.seconds / bench.matmul_rate,
        } | asdict(timing) | errors  # fmt: skip


def prefill_points(scale: Scale) -> list[dict]:
    """Prompts cut at eighths, for the law; then the grid, every other line first, so that cut short it is coarser."""
    law = [(n - n * e // 8, n * e // 8) for n in scale.prompts for e in scale.eighths]
    grid = sorted(
        itertools.product(scale.new_tokens, scale.hits),
        key=lambda x: scale.new_tokens.index(x[0]) % 2 + scale.hits.index(x[1]) % 2,
    )
    return [{"new": m, "hit": hit} for m, hit in dict.fromkeys((*law, *grid))]


def _prefill_reference(work: PrefillWork, hit: int) -> tuple[int, Tensor, Tensor]:
    """One random suffix row in float64."""
    q, table = work.q, work.levels[0].page_table[0].long()
    row = int(torch.randint(len(q), ()))
    k, v = (x[table].flatten(0, 1)[: hit + row + 1] for x in (work.k, work.v))
    return row, *row_in_float64(q[row], k, v)


def time_linear(bench: Session) -> Iterator[dict]:
    """(e) A linear layer over M rows: what a hit leaves of everything that is linear in tokens."""
    width, out_width = bench.scale.linear
    weight = bench.random(out_width, width)
    for point in bench.visit({"rows": m} for m in bench.scale.linear_rows):
        x = bench.random(point["rows"], width)
        timing = bench.clock.measure(lambda x=x: torch.nn.functional.linear(x, weight))
        flops = 2 * point["rows"] * width * out_width
        yield (
            point
            | {
                "width": width,
                "out_width": out_width,
                "flops": flops,
                "flops_per_s": flops / timing.seconds,
                "share_of_matmul": flops / timing.seconds / bench.matmul_rate,
            }
            | asdict(timing)
        )
