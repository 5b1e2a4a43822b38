"""What a GPU can do at best, and what is not attention: launches, host time, merges, and the choice of splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import torch

from cascade_lab import runtime
from cascade_lab.attention import attention
from cascade_lab.bench.gpu.limits import merge_bytes
from cascade_lab.bench.gpu.session import DTYPE, Session, planned
from cascade_lab.drafts import DraftTree, VerifyBatch
from cascade_lab.levels import cascade_attention
from cascade_lab.states import State, merge_state, merge_states

WARM_REPEATS = 50


def time_ceilings(bench: Session) -> Iterator[dict]:
    """(a) What the card can do: copy and read rates beyond and within the L2, and a matrix product."""
    scale, device = bench.scale, bench.clock.device
    rates = {}
    for name, size, times in (("memory", scale.copy_bytes, 1), ("L2", scale.small_copy_bytes, WARM_REPEATS)):
        source = torch.empty(size // 2, dtype=DTYPE, device=device).normal_()
        target, wide, total = torch.empty_like(source), source.view(torch.float32), torch.zeros((), device=device)
        calls = {
            "copy": (2, partial(target.copy_, source)),
            "read": (1, partial(torch.sum, wide, dim=0, out=total)),
        }
        for what, (passes, once) in calls.items():
            # only the first of many finds a cold cache
            timing = bench.clock.measure(lambda once=once, times=times: [once() for _ in range(times)])
            moved = passes * size * times
            rates[f"{what} {name}"] = moved / timing.seconds
            yield {"what": f"{what} {name}", "bytes": moved, "bytes_per_s": moved / timing.seconds} | asdict(timing)
    for side in scale.matmul_sides:
        a, b = bench.random(side, side), bench.random(side, side)
        out = torch.empty_like(a)
        timing = bench.clock.measure(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), seconds=0.3)
        flops = 2 * side**3
        rates["matmul"] = max(rates.get("matmul", 0.0), flops / timing.seconds)
        yield {"what": f"matmul {side}", "flops": flops, "flops_per_s": flops / timing.seconds} | asdict(timing)
    one = torch.zeros(1, device=device)
    yield {"what": "one-element addition"} | asdict(bench.clock.measure(lambda: one.add_(1.0)))
    bench.copy_rate, bench.matmul_rate = rates["copy memory"], rates["matmul"]


def time_costs(bench: Session) -> Iterator[dict]:
    """(f) What is not attention: launches, host time, merges, and the choice of splits."""
    scale = bench.scale
    yield from _small_calls(bench)
    heads, dim = scale.merge_heads, scale.head_dim
    points = [{"rows": t, "parts": s} for s in scale.merge_parts for t in scale.merge_rows]
    for point in bench.visit(points):
        t, s = point.values()
        o = torch.empty(t, s, heads, dim, device=bench.clock.device).normal_()
        lse = torch.empty(t, s, heads, device=bench.clock.device).normal_()
        moved = merge_bytes(asdict(scale), t, s)
        calls = {"merge_states": lambda o=o, lse=lse: merge_states(o, lse, out_dtype=DTYPE, backend="triton")}
        if s == 2:
            calls["merge_state"] = lambda o=o, lse=lse: merge_state(
                o[:, 0], lse[:, 0], o[:, 1], lse[:, 1], out_dtype=DTYPE, backend="triton"
            )
        for name, call in calls.items():
            timing = bench.clock.measure(call)
            yield {"what": name, "bytes": moved, "bytes_per_s": moved / timing.seconds} | point | asdict(timing)
    yield from _time_splits(bench)


def _small_calls(bench: Session) -> Iterator[dict]:
    """The same tiny work through every way in: the difference is the host's."""
    scale, device = bench.scale, bench.clock.device
    group = scale.centre[3]
    batch = VerifyBatch([scale.page], [DraftTree.branches(2, 2)], scale.page, "branch", device=device)
    k, v = (bench.random(batch.num_pages, scale.page, scale.num_kv_heads, scale.head_dim) for _ in range(2))
    q = bench.random(batch.num_rows, group * scale.num_kv_heads, scale.head_dim)
    (fused,) = batch.levels("fused")
    cascade = batch.levels("cascade")

    def one_pass() -> State:
        return attention(
            q,
            k,
            v,
            fused.page_table,
            fused.cache_seqlens,
            cu_seqlens_q=fused.cu_seqlens_q,
            max_seqlen_q=batch.num_rows,
            tree_mask=fused.tree_mask,
            tail_seqlens=fused.tail_seqlens,
            backend="triton",
        )

    def one_pass_unchecked() -> State:
        with runtime.unchecked():
            return one_pass()

    def all_levels() -> State:
        return cascade_attention(q, k, v, cascade, backend="triton")

    calls = {
        "attention": (one_pass, False),
        "attention, unchecked": (one_pass_unchecked, True),
        "cascade_attention": (all_levels, False),
        "cascade_attention, unchecked": (planned(q, k, v, cascade), True),
    }
    for point in bench.visit({"what": name} for name in calls):
        call, capturable = calls[point["what"]]
        yield point | asdict(bench.clock.measure(call, capture="required" if capturable else "off"))


def _time_splits(bench: Session) -> Iterator[dict]:
    """One request, few programs: the time at given numbers of splits beside the automatic choice."""
    scale = bench.scale
    length, group = scale.splits_length, scale.centre[3]
    pages = length // scale.page
    table = torch.randperm(pages)[None].int().to(bench.clock.device)
    lengths = torch.tensor([length], dtype=torch.int32, device=bench.clock.device)
    k, v = (bench.random(pages, scale.page, scale.num_kv_heads, scale.head_dim) for _ in range(2))
    q = bench.random(1, group * scale.num_kv_heads, scale.head_dim)
    for point in bench.visit({"what": "splits", "splits": n, "length": length} for n in scale.splits):

        def call(n=point["splits"]) -> State:
            with runtime.unchecked():
                return attention(q, k, v, table, lengths, num_splits=n, backend="triton")

        yield point | asdict(bench.clock.measure(call))
