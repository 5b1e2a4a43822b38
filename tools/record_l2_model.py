"""Make figures/measured/l2_model.json: what three verify plans load through a modelled L2, and from DRAM into it.

The plans' kernels are compiled for sm_90 and executed here, and the sectors they load are replayed through the cache
of `cascade_lab.evidence.l2`. No card is needed and none is measured:
`TRITON_INTERPRET=0 python tools/record_l2_model.py figures/measured/l2_model.json`.

Everything is one eighth of an H200 with 8 KV heads of 128: a quarter of the heads on a quarter of the multiprocessors,
so that each multiprocessor has as many programs; half of the head dim, so that each program loads half of the bytes;
and an eighth of the cache, so that it holds as many tokens. An access then loads twice the tokens, so that a burst of n
accesses stands for one of 2 n.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

import torch

from cascade_lab import cascade_attention, ledger, runtime
from cascade_lab.drafts import PLANS, DraftTree, VerifyBatch
from cascade_lab.evidence import l2
from cascade_lab.evidence.ptx import executed

TARGET, SCALE = "sm_90", 8
FULL = {"multiprocessors": 132, "kv heads": 8, "head dim": 128, "cache bytes": 50 << 20}
MULTIPROCESSORS, NUM_KV_HEADS, HEAD_DIM, CACHE = 132 // 4, 8 // 4, 128 // 2, (50 << 20) // SCALE
GROUP, TOPK, STEPS, PAGE, ROWS = 4, 4, 5, 16, "branch"
# a cache whose halves hold copies of each other's lines, and one that others use too, have less to offer
CAPACITIES = (CACHE, CACHE // 2, CACHE // 4)
# (prefix length, batch)
CASES = ((2000, 4), (8192, 4), (32768, 4), (8192, 16))
# by batch, programs side by side: two on each multiprocessor; one on each, where that makes several waves of the naive
# plan; and one in all
SLOTS = {4: (2 * MULTIPROCESSORS, 1), 16: (2 * MULTIPROCESSORS, MULTIPROCESSORS, 1)}
SEEDS = range(4)


def case(length: int, batch: int, plan: str) -> dict:
    """One plan of `batch` equal requests: bytes of K and V and of everything else, loaded and read from DRAM."""
    work = VerifyBatch([length] * batch, [DraftTree.branches(TOPK, STEPS)] * batch, PAGE, ROWS)
    levels = work.levels(plan)
    # which sectors are loaded does not depend on what they hold
    k, v = (torch.zeros(work.num_pages, PAGE, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
    q = torch.zeros(work.num_rows, NUM_KV_HEADS * GROUP, HEAD_DIM, dtype=torch.bfloat16)
    device = replace(runtime.TARGETS[TARGET], multiprocessors=MULTIPROCESSORS)
    with executed(device, races=False, stream=True) as runs:
        cascade_attention(q, k, v, levels, backend="triton")
    recording = l2.record(runs)
    counted = ledger(levels, num_q_heads=q.shape[1], num_kv_heads=NUM_KV_HEADS)
    row = {
        "length": length,
        "batch": batch,
        "plan": plan,
        "launches": [{"kernel": run.kernel, "grid": list(run.grid)} for run in runs],
        "ledger": counted.kv_bytes(HEAD_DIM, k.dtype),
        "distinct": counted.kv_tokens_unique * NUM_KV_HEADS * 2 * HEAD_DIM * k.itemsize,
        "volume": _parts(recording.volume),
        "dram": [],
    }
    for slots, drift, seed in replays(batch):
        found = l2.replay(recording, slots=slots, drift=drift, seed=seed)
        row["compulsory"] = _parts(found.compulsory())
        where = {"slots": slots, "drift": drift.name, "seed": seed}
        row["dram"] += [where | {"capacity": capacity} | _parts(found.dram(capacity)) for capacity in CAPACITIES]
    return row


def replays(batch: int) -> list[tuple[int, l2.Drift, int]]:
    """(slots, drift, seed) of all replays: random drifts with every seed, and one order where programs run alone."""
    return [
        (slots, drift, seed)
        for slots in SLOTS[batch]
        for drift in (l2.DRIFTS if slots > 1 else l2.DRIFTS[:1])
        for seed in (SEEDS if drift.random else SEEDS[:1])
    ]


def _parts(by_tensor: Mapping[str, int]) -> dict[str, int]:
    cache = by_tensor["k"] + by_tensor["v"]
    return {"K, V": cache, "other": sum(by_tensor.values()) - cache}


def summarise() -> dict:
    """All cases and plans, without the date."""
    versions = {name: version for name, version in runtime.provenance().items() if name in ("torch", "triton", "numpy")}
    return {
        "source": "loads of compiled kernels, executed and replayed through a model of the L2: no card was measured",
        "devices": ["model"],
        "target": TARGET,
        "versions": versions,
        "scale": {"one in": SCALE, "of": FULL, "multiprocessors": MULTIPROCESSORS, "capacities": list(CAPACITIES)},
        "shape": {"topk": TOPK, "steps": STEPS, "rows": ROWS, "group": GROUP, "page": PAGE, "dtype": "bfloat16"}
        | {"kv heads": NUM_KV_HEADS, "head dim": HEAD_DIM},
        "drifts": [asdict(drift) for drift in l2.DRIFTS],
        "unit": "bytes",
        "rows": [case(length, batch, plan) for length, batch in CASES for plan in PLANS],
    }


if __name__ == "__main__":
    (path,) = map(Path, sys.argv[1:])
    found = {"date": date.today().isoformat()} | summarise()
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
