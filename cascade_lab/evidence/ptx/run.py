"""Executing a translated kernel over its grid, and the record of what it did.

Programs run in batches; in a batch the lanes at the earliest block advance, so that programs that parted meet again.
Programs are independent of each other here, as on a GPU: results do not depend on the batches unless the kernel does.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from cascade_lab.evidence.ptx.faults import Endless
from cascade_lab.evidence.ptx.lanes import WARP, Lanes
from cascade_lab.evidence.ptx.memory import GlobalMemory
from cascade_lab.evidence.ptx.shared import SharedMemory
from cascade_lab.evidence.ptx.translate import Translation

# where one NumPy call costs about as much as its work
_LANES = 4096
_MOST_BLOCKS = 1_000_000
_END = 1 << 30


@dataclass(frozen=True)
class Checks:
    """What is looked at beside bounds, alignment and memory that is never read, which always are.

    Attributes:
        races: order of accesses to shared memory; about half of the time again.
        traffic: requests and sectors per tensor.
        banks: wavefronts of shared memory; doubles the time and more.
        stream: the sectors of every program in order, for a model of a cache; needs traffic.
    """

    races: bool = True
    traffic: bool = True
    banks: bool = False
    stream: bool = False


@dataclass
class Run:
    """One launch that was executed.

    Attributes:
        kernel: name of the Triton function.
        target: what it was compiled for.
        grid: programs along three axes.
        threads: of one program.
        sectors, requests, bytes: by (tensor's name, "load", "store" or "atomic"). A tensor is named after the first
            argument with its storage, without the ending "_ptr". Copies into shared memory are loads.
        instructions: PTX instructions of warps by class; those switched off by a predicate are counted.
        multiply_adds: of matrix products, whatever the size of one.
        wavefronts, phases: of shared memory by opcode, with conflicts and without; empty unless banks were asked for.
        waits: (line of the Triton source, copy groups in flight after the wait) -> times a batch came by.
        unfinished: copy groups that no wait covered, at the end.
        stream: (program, tensor's name, sectors, kind) in order of execution; empty unless asked for.
        storages: address of each tensor's storage by its name, which tells tensors of several launches apart.
    """

    kernel: str
    target: str
    grid: tuple[int, int, int]
    threads: int
    sectors: dict[tuple[str, str], int] = field(default_factory=dict)
    requests: dict[tuple[str, str], int] = field(default_factory=dict)
    bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    instructions: Counter[str] = field(default_factory=Counter)
    multiply_adds: int = 0
    wavefronts: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[str, int]] = field(default_factory=Counter)
    unfinished: int = 0
    stream: list[tuple[tuple[int, int, int], str, np.ndarray, str]] = field(default_factory=list, repr=False)
    storages: dict[str, int] = field(default_factory=dict, repr=False)


@dataclass
class _Batch:
    """What the function of a block works on."""

    lanes: Lanes
    memory: GlobalMemory
    shared: SharedMemory
    parameters: dict[str, np.ndarray]


def execute(
    translation: Translation,
    memory: GlobalMemory,
    parameters: dict[str, np.ndarray],
    run: Run,
    shared_bytes: int,
    checks: Checks = Checks(),
    lanes: int = _LANES,
) -> Run:
    """Execute every program of `run.grid` and complete the record.

    Args:
        memory: holds all that the parameters point at, and counts.
        parameters: the bits of each parameter, one uint32 or uint64 element.
        shared_bytes: shared memory of a program.
        lanes: threads that advance together, as far as whole programs allow.

    Raises:
        Fault: at the first rule that is broken; memory keeps what was stored until then.
    """
    kernel = translation.kernel
    programs = [(x, y, z) for z in range(run.grid[2]) for y in range(run.grid[1]) for x in range(run.grid[0])]
    batches = math.ceil(len(programs) / max(1, lanes // kernel.threads))
    size = math.ceil(len(programs) / max(1, batches))
    lines = {i.index: i.line for i in kernel.instructions}
    with np.errstate(all="ignore"):
        for at in range(0, len(programs), max(1, size)):
            part = Lanes(kernel, programs[at : at + size], run.grid)
            shared = SharedMemory(part, shared_bytes, translation.cell, races=checks.races, banks=checks.banks)
            visits = _execute_batch(translation, _Batch(part, memory, shared, parameters))
            for block, warps in visits.items():
                for name, count in translation.labels[block].items():
                    run.instructions[name] += count * warps
                run.multiply_adds += translation.multiply_adds[block] * warps
            run.wavefronts += shared.wavefronts
            run.phases += shared.phases
            for (index, left), times in shared.waits.items():
                run.waits[lines[index], left] += times
            run.unfinished += shared.unfinished()
            if memory.stream:
                run.stream += [(part.ctas[program], *rest) for program, *rest in memory.stream]
                memory.stream.clear()
    return replace(run, sectors=dict(memory.sectors), requests=dict(memory.requests), bytes=dict(memory.bytes))


def _execute_batch(translation: Translation, batch: _Batch) -> Counter[int]:
    """Run the batch to its end; how many warps visited each block."""
    lanes, visits = batch.lanes, Counter()
    registers = [np.zeros(1, dtype) for dtype in translation.dtypes]
    block, places = 0, None
    for _ in range(_MOST_BLOCKS):
        mask = None
        if places is not None:
            block = int(places.min())
            if block == _END:
                return visits
            mask = places == block
            if mask.all():
                mask = places = None
        visits[block] += lanes.warps if mask is None else int(mask.reshape(-1, WARP).any(1).sum())
        after, condition = translation.function(block, mask is not None)(batch, registers, mask)
        after = _END if after < 0 else after
        if mask is None:
            if condition is not None and not condition.all():
                if condition.any():
                    places = np.where(lanes.spread(condition), after, block + 1)
                    continue
                after = block + 1
            if after == _END:
                return visits
            block = after
        else:
            places[mask] = after if condition is None else np.where(lanes.spread(condition)[mask], after, block + 1)
    raise Endless(f"{_MOST_BLOCKS} blocks executed", translation.kernel.name)
