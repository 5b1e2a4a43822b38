"""The same work by other kernels on a GPU, on the same numbers in the layout each likes best, answers compared."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch

from cascade_lab.bench import peers
from cascade_lab.bench.gpu.answers import O_TOLERANCE, hold
from cascade_lab.bench.gpu.prefill import prefill_work
from cascade_lab.bench.gpu.session import Scale, Session, planned
from cascade_lab.bench.gpu.verify import Pool, VerifyPlans, reference_row, tokens_needed
from cascade_lab.bench.record import progress
from cascade_lab.drafts import ROWS, DraftTree, VerifyBatch
from cascade_lab.states import State


def time_peers(bench: Session) -> Iterator[dict]:
    """(c) The same work by other kernels, on the same numbers in the layout each likes best, answers compared."""
    scale = bench.scale
    _, topk, _, group, _ = scale.centre
    shapes = [
        {"length": length, "topk": topk, "batch": batch, "group": group, "rows": rows}
        for rows in ROWS
        for batch in scale.peer_batches
        for length in scale.peer_lengths
    ]
    pool = Pool(bench, max(tokens_needed(scale, **shape) + _coarse_tokens(scale, **shape) for shape in shapes))
    for shape in bench.visit(shapes):
        if tokens_needed(scale, **shape) + _coarse_tokens(scale, **shape) > pool.tokens:
            bench.skipped.append(shape | {"why": "memory"})
            continue
        yield from _peers_of(bench, pool, shape)
    for n in scale.prompts[:2]:
        for shape in bench.visit([{"prompt": n, "hit": 0, "group": group}]):
            work = prefill_work(bench, n, 0, group)
            ours = planned(work.q, work.k, work.v, work.levels)
            yield shape | {"kernel": "cascade_lab prefill"} | asdict(bench.clock.measure(ours))
            for name, make in peers.PREFILL_PEERS.items():
                yield shape | _peer_row(bench, name, partial(make, work.q, work.k, work.v, work.levels[0]), ours())


def _coarse_tokens(scale: Scale, length: int, topk: int, batch: int, group: int, rows: str) -> int:
    nodes = topk * scale.steps
    own_pages = (nodes if rows == "node" else topk) * -(-scale.steps // scale.coarse_page)
    return batch * scale.coarse_page * (1 + -(-(length + nodes) // scale.coarse_page) + own_pages)


def _peers_of(bench: Session, pool: Pool, shape: dict) -> Iterator[dict]:
    """Our plans and every peer on one batch, whose pages are coarse for the kernels that take no small ones."""
    scale, device = bench.scale, bench.clock.device
    length, topk, batch, group, rows = shape.values()
    trees = [DraftTree.branches(topk, scale.steps)] * batch
    pages = -(-(length + topk * scale.steps) // scale.coarse_page)
    table = torch.randperm(batch * pages).view(batch, pages).int()
    parts = scale.coarse_page // scale.page
    fine_table = (table[:, :, None] * parts + torch.arange(parts)).flatten(1).int()
    coarse = VerifyBatch([length] * batch, trees, scale.coarse_page, rows, page_table=table, device=device)
    fine = VerifyBatch([length] * batch, trees, scale.page, rows, page_table=fine_table, device=device)
    naive = coarse.copied_tails("naive")
    pool.copy(naive.src, naive.dst)
    q = bench.random(fine.num_rows, group * scale.num_kv_heads, scale.head_dim)
    k, v = (x.view(-1, scale.coarse_page, *x.shape[2:]) for x in (pool.k, pool.v))
    work = VerifyPlans(fine, q, pool.k, pool.v, {plan: fine.levels(plan) for plan in ("cascade", "fused")})
    reference = reference_row(work)
    state = None
    for plan, levels in (("naive", naive.levels), *work.plans.items()):
        call = planned(q, *((k, v) if plan == "naive" else (pool.k, pool.v)), levels)
        state = call()
        hold(state, reference, plan)
        yield shape | {"kernel": f"cascade_lab {plan}"} | asdict(bench.clock.measure(call))
    verify_work = peers.VerifyWork(q, k, v, coarse, naive.levels[0])
    for name, make in peers.VERIFY_PEERS.items():
        if time.monotonic() >= bench.deadline:
            bench.skipped.append(shape | {"kernel": name, "why": "time"})
            continue
        progress(f"{name}, " + ", ".join(f"{axis} {value}" for axis, value in shape.items()))
        yield shape | _peer_row(bench, name, partial(make, verify_work, bench.max_autotune), state)


def _peer_row(bench: Session, name: str, make: Callable[[], peers.Peer], expected: State) -> dict:
    """A peer's time, or why there is none. Whatever goes wrong in foreign code is noted and passed over.

    What it takes to be ready, compilation and tuning included, is in "ready_seconds" and in no other time.
    """
    try:
        start = time.monotonic()
        with warnings.catch_warnings():
            # a backend that is asked for by name and refuses warns of each reason
            warnings.simplefilter("ignore")
            peer = make()
            o = peer.call()
        bench.clock.wait()
        error = float((o.float() - expected.o.float()).abs().max() / expected.o.float().abs().max())
        row = {"kernel": peer.name, "o_difference": error, "agrees": error <= 2 * O_TOLERANCE}
        row["ready_seconds"] = time.monotonic() - start
        return row | asdict(bench.clock.measure(peer.call, capture="tried"))
    except Exception as error:
        return {"kernel": name, "missing": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
