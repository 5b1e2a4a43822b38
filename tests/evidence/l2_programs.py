"""What tests of the L2 model run in a child process with compiled kernels; each returns JSON values."""

from __future__ import annotations

from dataclasses import replace

import torch

from cascade_lab import cascade_attention, ledger, runtime
from cascade_lab.drafts import PLANS, DraftTree, VerifyBatch
from cascade_lab.evidence import l2
from cascade_lab.evidence.ptx import executed


def plans(lengths: list[int], steps: int, capacity: int) -> dict:
    """Both ragged requests under every plan and drift: bytes by tensor, and what the ledger says."""
    work = VerifyBatch(lengths, [DraftTree.branches(3, steps), DraftTree.branches(2, steps + 1)], 16, "branch")
    heads, dim = 2, 64
    k, v = (torch.zeros(work.num_pages, 16, heads, dim, dtype=torch.bfloat16) for _ in range(2))
    q = torch.zeros(work.num_rows, heads * 4, dim, dtype=torch.bfloat16)
    found = {}
    for plan in PLANS:
        levels = work.levels(plan)
        with executed(replace(runtime.TARGETS["sm_80"], multiprocessors=8), races=False, stream=True) as runs:
            cascade_attention(q, k, v, levels, backend="triton")
        recording = l2.record(runs)
        counted = ledger(levels, num_q_heads=q.shape[1], num_kv_heads=heads)
        found[plan] = {
            "kernels": [run.kernel for run in runs],
            "ledger": counted.kv_bytes(dim, k.dtype),
            "distinct": counted.kv_tokens_unique * heads * 2 * dim * k.itemsize,
            "volume": recording.volume,
            "sectors": sum(run.sectors[key] for run in runs for key in run.sectors if key[1] == "load"),
            "replays": {},
        }
        for drift in l2.DRIFTS:
            replayed = l2.replay(recording, slots=3, drift=drift)
            found[plan]["replays"][drift.name] = {
                "compulsory": replayed.compulsory(),
                "dram": replayed.dram(capacity),
                "unbounded": replayed.dram(1 << 40),
            }
    return found


def without_stream() -> str:
    o, lse = torch.zeros(3, 2, 32), torch.zeros(3, 2)
    with executed("sm_80") as runs:
        from cascade_lab import merge_state

        merge_state(o, lse, o, lse, backend="triton")
    try:
        l2.record(runs)
    except ValueError as error:
        return str(error)
    return "no error"
