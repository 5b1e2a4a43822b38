"""What the Triton kernel executes of a prefill after a hit: tiles, visible pairs, distinct keys.

In the interpreter tiles are counted by the load recorder, as matrix products: each tile takes two, scores and output;
where keys without a mask go by in wider tiles than others, one of those counts as several. Compiled code that is
executed has its sectors recorded instead, and a tile is a stretch of keys that a program loads.
Pairs are counted by the kernel itself: with q = 0 every visible key has weight e^0 = 1, so a row's e^lse is the number
of keys it saw. `instructions` counts what the compiled kernel issues, by executing its PTX.
`Prefill.skip = False` gives the same causal rule to the kernel as a tree mask over all keys, which it applies inside
every tile and never uses to leave one out. Formulas are not here: they are what these counts are held against.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cascade_lab import attention, cascade_attention, runtime
from cascade_lab.evidence import reads
from cascade_lab.evidence.compiled import in_child
from cascade_lab.evidence.ptx import executed
from cascade_lab.prefix import prefix_hit_levels
from cascade_lab.states import State

PAGE_SIZE = 16
_HEAD_DIM, _SECTOR = 16, 32


@dataclass(frozen=True)
class Prefill:
    """One request of `n` tokens, the first `hit` of them cached; rows hit to n - 1 are computed."""

    n: int
    hit: int
    num_q_heads: int = 1
    num_kv_heads: int = 1
    dtype: str = "float32"
    skip: bool = True


@dataclass(frozen=True)
class TileCount:
    """What one launch did.

    Attributes:
        block_m, block_n: packed rows and keys of a tile, the narrower where masked ones are.
        tiles: executed tiles, over all KV heads.
        pairs: visible query-key pairs, over all query heads.
        keys: distinct K rows loaded, over all KV heads.
    """

    block_m: int
    block_n: int
    tiles: int
    pairs: int
    keys: int


def count(prefills: Sequence[Prefill]) -> list[TileCount] | None:
    """Run each prefill and count; None where Triton is not installed.

    Where kernels are compiled for a GPU, a child process interprets them.
    """
    if runtime.triton_mode() == "absent":
        return None
    if runtime.triton_mode() == "compiled":
        return [TileCount(**found) for found in json.loads(_interpreted(json.dumps([asdict(p) for p in prefills])))]
    one = _execute_one if runtime.triton_mode() == "executed" else _interpret_one
    return [one(prefill) for prefill in prefills]


def instructions(prefills: Sequence[Prefill], target: str = "sm_90") -> list[dict[str, int]] | None:
    """Instructions that the kernel issues for each prefill, by class, in a child process; None without Triton.

    The PTX compiled for `target` is executed on the CPU (`evidence.ptx`). A class is that of `evidence.ptx.Run`:
    "tensor" are matrix products, "global store" writes the rows' results. Beside the classes, "multiply-adds" are those
    of the matrix products, whose instructions are larger in wide tiles than in narrow ones. `skip` has to be True and
    `dtype` a half precision; head dim 64, no splits.

    Raises:
        ValueError: another dtype, or a prefill that only masks.
        RuntimeError: the child failed, for an unknown target too.
    """
    for prefill in prefills:
        if prefill.dtype not in ("float16", "bfloat16") or not prefill.skip:
            raise ValueError(f"prefills: expected float16 or bfloat16 and skip=True, given {prefill}")
    if runtime.triton_mode() == "absent":
        return None
    return in_child(f"_issued({[asdict(p) for p in prefills]!r}, {target!r})", module=__name__)


def _issued(prefills: list[dict], target: str) -> list[dict[str, int]]:
    found = []
    for prefill in (Prefill(**fields) for fields in prefills):
        (level,) = prefix_hit_levels([prefill.n], [prefill.hit], PAGE_SIZE)
        gen, dtype = torch.Generator().manual_seed(0), getattr(torch, prefill.dtype)
        shape = (int(level.page_table.max()) + 1, PAGE_SIZE, prefill.num_kv_heads, 64)
        k, v = (torch.randn(shape, generator=gen).to(dtype) for _ in range(2))
        q = torch.randn(prefill.n - prefill.hit, prefill.num_q_heads, 64, generator=gen).to(dtype)
        with executed(target, races=False, traffic=False) as runs:
            cascade_attention(q, k, v, [level], num_splits=1, backend="triton")
        issued = sum((run.instructions for run in runs), start=Counter())
        found.append(dict(issued) | {"multiply-adds": sum(run.multiply_adds for run in runs)})
    return found


@dataclass(frozen=True)
class _Call:
    """The tensors of one prefill, by the names they are recorded under, and the rule that hides keys."""

    tensors: dict[str, torch.Tensor]
    rule: dict

    def __call__(self) -> State:
        q, k, v, table, lengths, rows = (self.tensors[name] for name in ("q", "k", "v", "table", "lengths", "rows"))
        return attention(q, k, v, table, lengths, cu_seqlens_q=rows, **self.rule, num_splits=1, backend="triton")


def _call(prefill: Prefill) -> _Call:
    n, new, dtype = prefill.n, prefill.n - prefill.hit, getattr(torch, prefill.dtype)
    (level,) = prefix_hit_levels([n], [prefill.hit], PAGE_SIZE)
    gen = torch.Generator().manual_seed(0)
    shape = (int(level.page_table.max()) + 1, PAGE_SIZE, prefill.num_kv_heads, _HEAD_DIM)
    k, v = (torch.randn(shape, generator=gen).to(dtype) for _ in range(2))
    q = torch.zeros(new, prefill.num_q_heads, _HEAD_DIM, dtype=dtype)
    lengths, rows = level.cache_seqlens, level.cu_seqlens_q
    if prefill.skip:
        mask, rule = None, {"causal": True}
    else:
        mask = _causal_bits(n, prefill.hit)
        rule = {"tree_mask": mask, "tail_seqlens": lengths}
    tensors = {"q": q, "k": k, "v": v, "table": level.page_table, "lengths": lengths, "rows": rows, "mask": mask}
    return _Call(tensors, rule)


def _interpret_one(prefill: Prefill) -> TileCount:
    call = _call(prefill)
    with reads.record_loads(**call.tensors) as record:
        state = call()
    # scores are [M, D] x [D, N] and outputs [M, N] x [N, D]; no tile has fewer keys than _HEAD_DIM
    widths = Counter()
    for (m, columns, inner), number in record.dots.items():
        widths[m, max(columns, inner)] += number
    ((block_m, block_n),) = {(m, min(n for _, n in widths)) for m, _ in widths}
    return TileCount(
        block_m=block_m,
        block_n=block_n,
        tiles=sum(number * n // block_n for (_, n), number in widths.items()) // 2,
        pairs=_pairs(state),
        keys=record["k"].distinct_bytes // (_HEAD_DIM * call.tensors["k"].element_size()),
    )


def _execute_one(prefill: Prefill) -> TileCount:
    from cascade_lab.backends.triton.config import rows_of, tile_for

    call, target = _call(prefill), runtime.pretended_target().name
    with executed(target, stream=True) as runs:
        state = call()
    (run,) = runs
    packed = (prefill.n - prefill.hit) * (prefill.num_q_heads // prefill.num_kv_heads)
    tile = tile_for(packed, _HEAD_DIM, call.tensors["q"].dtype, rows_of(target))
    loaded: dict[tuple[int, int, int], set[int]] = {}
    for program, name, sectors, _ in run.stream:
        if name == "k":
            loaded.setdefault(program, set()).update(sectors.tolist())
    per_key = _HEAD_DIM * call.tensors["k"].element_size() // _SECTOR
    return TileCount(
        block_m=tile.block_m,
        block_n=tile.tail_n,
        # a program walks from the first key on, the last of them tail_n at a time
        tiles=sum(-(-len(sectors) // (per_key * tile.tail_n)) for sectors in loaded.values()),
        pairs=_pairs(state),
        keys=len(set().union(*loaded.values())) // per_key,
    )


def _pairs(state: State) -> int:
    return int(state.lse.double().exp().round().sum())


def _causal_bits(n: int, hit: int) -> torch.Tensor:
    """[n - hit, words] int64: bit j of row i is set when j <= hit + i."""
    bit = torch.arange(64)
    key = torch.arange(-(-n // 64))[:, None] * 64 + bit
    visible = key <= torch.arange(hit, n)[:, None, None]
    # the sum wraps into the sign bit, as the 64th bit of a word must
    return (visible.long() << bit).sum(-1)


def _interpreted(prefills: str) -> str:
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {runtime.SWITCH: "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [sys.executable, "-m", "cascade_lab.evidence.tiles"]
    done = subprocess.run(command, input=prefills, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the interpreting process failed:\n{done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    print(json.dumps([asdict(found) for found in count([Prefill(**p) for p in json.load(sys.stdin)])]))
