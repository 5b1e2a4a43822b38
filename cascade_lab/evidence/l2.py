"""A model of the last-level cache: the loads of compiled kernels, recorded as they were executed, replayed in time.

    L2 -> multiprocessors = 32 bytes x sectors loaded               recorded, exact: the ledger's bytes for K and V
    DRAM -> L2            = 32 bytes x sectors not found in the L2  a model, until the counters of a card confirm it

The second depends on when a program touches what another has touched, which no recording knows. Assumed are:

* order within a launch: programs start in grid order, x first, each on the first of a fixed number of slots
  (multiprocessors x programs on each) that is free; how their accesses then interleave is a `Drift`. On a card whoever
  leads waits for DRAM and whoever follows does not, which draws programs together; no drift here does that.
* launches follow one another without overlap, and the first finds the cache empty.
* one fully associative cache of 128-byte lines in LRU order, filled by 32-byte sectors on demand. Cards have sets, a
  policy of their own, and some have halves that may both hold a line: try smaller capacities.
* a sector has arrived when it is next asked for, nothing is prefetched, and nothing is found in the L1 (which copies
  into shared memory pass by; tables would be found).
* a store fills its sectors and reads nothing; what is written back to DRAM is not counted.

All capacities follow from one replay: LRU finds a line whose reuse distance, the distinct lines since it was last
touched, is below the capacity (Mattson et al., 1970).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cascade_lab import _checks
from cascade_lab.evidence.ptx.memory import SECTOR
from cascade_lab.evidence.ptx.run import Run

__all__ = ["DRIFTS", "LINE", "Drift", "Recording", "Replay", "record", "replay"]

LINE = 128
_PARTS = LINE // SECTOR
# reuse distance of what was never touched; no capacity reaches it
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Drift:
    """How the accesses of programs that run side by side interleave; a step is one burst of each program.

    Attributes:
        name: for tables.
        burst: accesses that a program makes before others get their turn; one access is an instruction of a program.
        random: each burst takes a random time, exponential with mean 1, as if the next program were drawn by lot at
            every turn. Otherwise all take the same time.
        stagger: the last slot starts this part of the longest program later than the first, the others in between.
    """

    name: str
    burst: int = 1
    random: bool = False
    stagger: float = 0.0

    def __post_init__(self) -> None:
        _checks.integer("burst", self.burst, 1)
        if not 0 <= self.stagger < math.inf:
            raise ValueError(f"stagger: expected a number from 0, given {self.stagger!r}")


DRIFTS = (
    Drift("lockstep"),
    Drift("round robin", burst=32),
    Drift("random walk", burst=8, random=True),
    Drift("staggered start", stagger=1.0),
)


@dataclass(frozen=True)
class _Launch:
    """Accesses of one launch, program after program in grid order, each program's in its own order.

    Attributes:
        per_program: accesses of each program that makes any.
        sizes: sectors of each access.
        sectors: of all accesses, as numbers that are unique over the recording's tensors.
        loads: whether each access is a load.
    """

    per_program: np.ndarray
    sizes: np.ndarray
    sectors: np.ndarray
    loads: np.ndarray


@dataclass(frozen=True)
class Recording:
    """What the launches of one plan asked of the L2.

    Attributes:
        names: of the tensors: that of the first launch with it, numbered where others were first to have the name.
        volume: bytes from the L2 into the multiprocessors, by tensor.
    """

    names: tuple[str, ...]
    volume: dict[str, int]
    _launches: tuple[_Launch, ...]
    # first line of each tensor, and one past the last
    _lines: np.ndarray


@dataclass(frozen=True)
class Replay:
    """One recording in one order.

    Attributes:
        volume: bytes from the L2 into the multiprocessors by tensor, which no order changes.
    """

    volume: dict[str, int]
    # by tensor, rising: of each sector of each load, the least capacity in lines that does not find it
    _reuse: dict[str, np.ndarray]

    def dram(self, capacity: int) -> dict[str, int]:
        """Bytes read from DRAM by tensor, with an L2 of `capacity` bytes; what is part of a line is left out.

        Raises:
            TypeError, ValueError: no whole number, or less than one line.
        """
        _checks.integer("capacity", capacity, LINE)
        lines = int(capacity) // LINE
        return {name: SECTOR * int(len(x) - np.searchsorted(x, lines)) for name, x in self._reuse.items()}

    def compulsory(self) -> dict[str, int]:
        """Bytes read by tensor whatever the capacity: distinct sectors that are loaded before anything stores them."""
        return {name: SECTOR * int(len(x) - np.searchsorted(x, _NEVER)) for name, x in self._reuse.items()}


def record(runs: Sequence[Run]) -> Recording:
    """Take the streams of executed launches, in the order of the launches, as one recording.

    Args:
        runs: from `executed(..., stream=True)`, one plan's.

    Raises:
        ValueError: no launch, or one that was executed without its stream.
    """
    if not runs:
        raise ValueError("runs: expected at least one launch, given none")
    for run in runs:
        if run.sectors and not run.stream:
            raise ValueError(f"runs: expected launches with their streams, given {run.kernel} without")
    names: dict[int, str] = {}
    taken: Counter[str] = Counter()
    for run in runs:
        for name, address in run.storages.items():
            if address not in names:
                taken[name] += 1
                names[address] = name if taken[name] == 1 else f"{name} {taken[name]}"
    number = {address: i for i, address in enumerate(names)}
    length = np.zeros(len(names), np.int64)
    for run in runs:
        for _, name, sectors, _ in run.stream:
            i = number[run.storages[name]]
            length[i] = max(length[i], int(sectors.max()) // _PARTS + 1)
    lines = np.concatenate(([0], length.cumsum()))
    volume = dict.fromkeys(names.values(), 0)
    for run in runs:
        for (name, kind), count in run.sectors.items():
            volume[names[run.storages[name]]] += SECTOR * count if kind != "store" else 0
    launches = tuple(_launch(run, number, lines) for run in runs if run.stream)
    return Recording(tuple(names.values()), volume, launches, lines)


def _launch(run: Run, number: dict[int, int], lines: np.ndarray) -> _Launch:
    wide, high, _ = run.grid
    program = np.array([(z * high + y) * wide + x for (x, y, z), *_ in run.stream])
    order = np.argsort(program, kind="stable")
    stream = [run.stream[i] for i in order]
    return _Launch(
        per_program=np.unique(program, return_counts=True)[1],
        sizes=np.array([len(sectors) for _, _, sectors, _ in stream]),
        sectors=np.concatenate(
            [sectors + _PARTS * lines[number[run.storages[name]]] for _, name, sectors, _ in stream]
        ),
        loads=np.array([kind != "store" for *_, kind in stream]),
    )


def replay(recording: Recording, *, slots: int, drift: Drift, seed: int = 0) -> Replay:
    """Let the launches of a recording run one after the other through an LRU cache.

    Args:
        slots: programs that run side by side, multiprocessors x programs on each.
        drift: how they interleave.
        seed: of a random drift.

    Raises:
        TypeError, ValueError: slots that are no number from 1.
    """
    _checks.integer("slots", slots, 1)
    rng = np.random.default_rng(seed)
    sectors, loads = [], []
    for launch in recording._launches:
        order = _order(launch.per_program, slots, drift, rng)
        sizes = launch.sizes[order]
        first = (launch.sizes.cumsum() - launch.sizes)[order]
        within = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
        sectors.append(launch.sectors[np.repeat(first, sizes) + within])
        loads.append(np.repeat(launch.loads[order], sizes))
    tensor, reuse = _loaded(np.concatenate(sectors), np.concatenate(loads), recording._lines)
    found = {name: np.sort(reuse[tensor == i]) for i, name in enumerate(recording.names)}
    return Replay(recording.volume, found)


def _order(per_program: np.ndarray, slots: int, drift: Drift, rng: np.random.Generator) -> np.ndarray:
    """The order in which accesses, given program after program, are made."""
    bursts = -(-per_program // drift.burst)
    took = rng.exponential(size=bursts.sum()) if drift.random else np.ones(bursts.sum())
    # burst by burst, the time since its program's start
    time = took.cumsum() - took
    heads = bursts.cumsum() - bursts
    time -= np.repeat(time[heads], bursts)
    lasts = np.add.reduceat(took, heads)
    used = min(slots, len(per_program))
    free = [(drift.stagger * float(lasts.max()) * k / used, k) for k in range(used)]
    begins, places = np.empty(len(lasts)), np.empty(len(lasts), np.int64)
    for i, last in enumerate(lasts.tolist()):
        begins[i], places[i] = heapq.heappop(free)
        heapq.heappush(free, (begins[i] + last, int(places[i])))
    time += np.repeat(begins, bursts)
    within = np.arange(per_program.sum()) - np.repeat(per_program.cumsum() - per_program, per_program)
    burst = np.repeat(heads, per_program) + within // drift.burst
    return np.lexsort((np.repeat(places, per_program), time[burst]))


def _loaded(sectors: np.ndarray, loads: np.ndarray, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of every sector that a load asks for: its tensor, and the least capacity in lines that does not find it.

    A visit is a run of accesses of one kind to one line. A sector is lost when any visit to its line since the
    sector's own last one found the line gone: its reuse is the largest reuse distance of these visits.
    """
    line = sectors // _PARTS
    starts = np.flatnonzero(np.concatenate(([True], (line[1:] != line[:-1]) | (loads[1:] != loads[:-1]))))
    asked = np.bitwise_or.reduceat(1 << (sectors % _PARTS), starts)
    line, loading = line[starts], loads[starts]
    order = np.argsort(line, kind="stable")
    distance = _reuse_distances(line, order)[order]
    asked, loading, tensor = asked[order], loading[order], np.searchsorted(lines, line[order], "right") - 1
    tensors, reuses = [], []
    for part in range(_PARTS):
        visits = np.flatnonzero(asked & 1 << part)
        if len(visits):
            # a line's first visit lies before its sectors' first ones, and has the distance of what was never touched
            since = np.concatenate(([0], visits[:-1] + 1))
            reuse = np.maximum.reduceat(distance[: visits[-1] + 1], since)
            tensors.append(tensor[visits][loading[visits]])
            reuses.append(reuse[loading[visits]])
    return np.concatenate(tensors), np.concatenate(reuses)


def _reuse_distances(line: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Per visit the number of other lines visited since the line's visit before; `order` sorts visits by line, stably.

    With p the visit before visit i, these are the visits j < i whose own visit before lies before p, less the p + 1
    visits up to p, for which that holds anyway.
    """
    n = len(line)
    again = np.flatnonzero(line[order[1:]] == line[order[:-1]])
    before = np.full(n, -1, np.int64)
    before[order[again + 1]] = order[again]
    repeated = np.flatnonzero(before >= 0)
    distance = np.full(n, _NEVER)
    if len(repeated):
        has_next = np.zeros(n, bool)
        has_next[before[repeated]] = True
        rank = has_next.cumsum() - 1
        firsts = (before < 0).cumsum()[repeated]
        distance[repeated] = firsts + _smaller_before(rank[before[repeated]]) - before[repeated] - 1
    return distance


def _smaller_before(values: np.ndarray) -> np.ndarray:
    """For a permutation of 0 .. n - 1, how many smaller values stand before each.

    Bit by bit from the highest, values that agree in the bits above form one block, zeros before ones: a one has the
    zeros before it in its block as smaller ones, and what agrees in this bit too is left to the bits below.
    """
    n = len(values)
    place = np.arange(n, dtype=np.int32)
    values, counts = values.astype(np.int32), np.zeros(n, np.int32)
    origin = place.copy()
    for bit in reversed(range((n - 1).bit_length())):
        start = values >> (bit + 1) << (bit + 1)
        one = (values >> bit & 1).astype(bool)
        zeros = np.concatenate(([0], (~one).cumsum(dtype=np.int32)))[:-1].astype(np.int32)
        zeros -= zeros[start]
        counts += np.where(one, zeros, 0)
        target = np.where(one, place + (1 << bit) - zeros, start + zeros)
        moved = [np.empty_like(x) for x in (values, counts, origin)]
        for new, old in zip(moved, (values, counts, origin), strict=True):
            new[target] = old
        values, counts, origin = moved
    result = np.empty(n, np.int64)
    result[origin] = counts
    return result
