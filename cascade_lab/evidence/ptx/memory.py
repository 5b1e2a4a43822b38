"""Global memory: the storages of a launch's tensors at made-up addresses, far apart, and what every access is held to.

Bounds are those of storages, not of views: an access between the elements of a strided view is inside. What no access
may read is declared per byte. Requests count warps that take part in an instruction, sectors the distinct aligned 32
bytes that each of those touches: what the L1 is asked for, and what the L2 is asked for if nothing is found in the L1.
No cache is modelled, and no two programs' accesses are ordered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cascade_lab.evidence.ptx.faults import Misaligned, NeverRead, OutOfBounds
from cascade_lab.evidence.ptx.lanes import WARP, Lanes, first

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SECTOR = 32
_GAP = 1 << 20
# a 16-byte access gathers elements of a 16-byte type
_WIDE = {**UNSIGNED, 16: np.complex128}


def by_width(data: np.ndarray) -> dict[int, np.ndarray]:
    """The same bytes as elements of 1 to 16 bytes; a last part that fills none is left out."""
    return {width: data[: len(data) // width * width].view(dtype) for width, dtype in _WIDE.items()}


def split(elements: np.ndarray, parts: int, width: int) -> list[np.ndarray]:
    """Gathered elements as `parts` arrays of `width` bytes per element, the lowest address first."""
    if parts == 1:
        return [elements]
    return list(np.ascontiguousarray(elements.view(UNSIGNED[width]).reshape(-1, parts).T))


@dataclass
class Allocation:
    """One storage: its bytes, and by width which elements hold a byte that nothing may read."""

    name: str
    base: int
    data: np.ndarray
    views: dict[int, np.ndarray]
    never: dict[int, np.ndarray] | None = None


class GlobalMemory:
    """Allocations by address, and counts of the accesses to them.

    Attributes:
        requests, sectors, bytes: by (allocation's name, "load", "store" or "atomic").
        stream: (program's index, allocation's name, sectors, kind) in order, if asked for.
    """

    def __init__(self, *, count: bool = True, stream: bool = False) -> None:
        self.allocations: list[Allocation] = []
        self._bases = np.zeros(0, np.int64)
        self._ends = np.zeros(0, np.int64)
        self._next = 0x7F00_0000_0000
        self._count = count
        self.requests: dict[tuple[str, str], int] = defaultdict(int)
        self.sectors: dict[tuple[str, str], int] = defaultdict(int)
        self.bytes: dict[tuple[str, str], int] = defaultdict(int)
        self.stream: list[tuple[int, str, np.ndarray, str]] | None = [] if stream else None

    def add(self, name: str, data: np.ndarray) -> Allocation:
        """Place a storage, given as uint8; its base is a multiple of 4096."""
        allocation = Allocation(name, self._next, data, by_width(data))
        self.allocations.append(allocation)
        self._next = (self._next + len(data) + _GAP) // 4096 * 4096
        self._bases = np.array([a.base for a in self.allocations], np.int64)
        self._ends = np.array([a.base + len(a.data) for a in self.allocations], np.int64)
        return allocation

    def load(self, lanes: Lanes, index: int, address, offset: int, width: int, mask, kept: list) -> list[np.ndarray]:
        """Elements of `width` bytes as len(kept) registers; masked lanes keep `kept`."""
        parts = len(kept)
        groups = list(self._groups(lanes, index, address, offset, width, mask, "load"))
        if len(groups) == 1 and groups[0][2] is None:
            allocation, places, _ = groups[0]
            return split(allocation.views[width].take(places), parts, width // parts)
        result = [np.array(lanes.spread(values)) for values in kept]
        for allocation, places, taking in groups:
            loaded = split(allocation.views[width].take(places), parts, width // parts)
            for register, values in zip(result, loaded, strict=True):
                register[slice(None) if taking is None else taking] = values
        return result

    def fetch(self, lanes: Lanes, index: int, address, offset: int, width: int, mask) -> np.ndarray:
        """Elements of `width` bytes of the lanes of `mask`, zeros elsewhere: the source of an asynchronous copy."""
        result = np.zeros(lanes.count, _WIDE[width])
        for allocation, places, taking in self._groups(lanes, index, address, offset, width, mask, "load"):
            result[slice(None) if taking is None else taking] = allocation.views[width].take(places)
        return result

    def store(self, lanes: Lanes, index: int, address, offset: int, width: int, mask, values: list) -> None:
        part = width // len(values)
        for allocation, places, taking in self._groups(lanes, index, address, offset, width, mask, "store"):
            for k, register in enumerate(values):
                register = lanes.spread(register)
                target = allocation.views[part]
                target[places * len(values) + k] = register if taking is None else register[taking]

    def add_atomically(self, lanes: Lanes, index: int, address, offset: int, width: int, mask, values) -> np.ndarray:
        """Add integers lane after lane; the values that were there before each."""
        before = np.zeros(lanes.count, UNSIGNED[width])
        for allocation, places, taking in self._groups(lanes, index, address, offset, width, mask, "atomic"):
            target, taking = allocation.views[width], lanes.every if taking is None else taking
            for lane, place, value in zip(taking, places, lanes.spread(values)[taking], strict=True):
                before[lane] = target[place]
                target[place] += value
        return before

    def _groups(
        self, lanes: Lanes, index: int, address, offset: int, width: int, mask, kind: str
    ) -> Iterator[tuple[Allocation, np.ndarray, np.ndarray | None]]:
        """(allocation, element indices, lanes) of one access, after every check of all of it."""
        taking = lanes.active(mask)
        places = lanes.spread(address) if taking is None else lanes.spread(address)[taking]
        if not len(places):
            return
        places = places.astype(np.int64) + offset
        who = lanes.every if taking is None else taking
        if np.bitwise_or.reduce(places) & (width - 1):
            k = first(places & (width - 1) != 0)
            lanes.fault(Misaligned, index, f"{width}-byte {kind} at {places[k]:#x} by {lanes.name(who[k])}")
        at = np.searchsorted(self._bases, (places.min(), places.max()), "right") - 1
        if at[0] == at[1] >= 0 and places.max() + width <= self._ends[at[0]]:
            found = [(self.allocations[at[0]], (places - self._bases[at[0]]) // width, taking)]
        else:
            owner = np.searchsorted(self._bases, places, "right") - 1
            outside = (owner < 0) | (places + width > self._ends[owner])
            if outside.any():
                k = first(outside)
                near = self.allocations[max(int(owner[k]), 0)]
                place = f"at byte {places[k] - near.base} of the {len(near.data)} of {near.name}"
                if not -_GAP < places[k] - near.base - len(near.data) < _GAP:
                    place = f"at {places[k]:#x}, far from all of them"
                lanes.fault(
                    OutOfBounds,
                    index,
                    f"{width}-byte {kind} outside every tensor, {place}, by {lanes.name(who[k])} "
                    f"and {outside.sum() - 1} more",
                )
            found = [
                (self.allocations[k], (places[owner == k] - self._bases[k]) // width, who[owner == k])
                for k in np.unique(owner)
            ]
        for allocation, elements, of_lanes in found:
            if kind == "load" and allocation.never is not None:
                bad = allocation.never[width].take(elements)
                if bad.any():
                    lane = (lanes.every if of_lanes is None else of_lanes)[first(bad)]
                    lanes.fault(
                        NeverRead,
                        index,
                        f"{width}-byte load of what is never read, at byte {elements[first(bad)] * width} of "
                        f"{allocation.name}, by {lanes.name(lane)} and {bad.sum() - 1} more",
                    )
            if self._count:
                self._add(lanes, allocation.name, kind, elements * width // SECTOR, of_lanes, width)
        yield from found

    def _add(self, lanes: Lanes, name: str, kind: str, sectors: np.ndarray, taking, width: int) -> None:
        touched = np.full(lanes.count, -1)
        touched[slice(None) if taking is None else taking] = sectors
        touched = np.sort(touched.reshape(-1, WARP), 1)
        new = touched >= 0
        new[:, 1:] &= touched[:, 1:] != touched[:, :-1]
        self.requests[name, kind] += int((touched[:, -1] >= 0).sum())
        self.sectors[name, kind] += int(new.sum())
        self.bytes[name, kind] += len(sectors) * width
        if self.stream is not None:
            programs, found = np.nonzero(new)[0] * WARP // lanes.threads, touched[new]
            cuts = np.flatnonzero(np.diff(programs)) + 1
            for program, part in zip(programs[np.append(0, cuts)].tolist(), np.split(found, cuts), strict=True):
                self.stream.append((program, name, part, kind))


def forbid(allocation: Allocation, never: np.ndarray) -> None:
    """Let nothing read the bytes where `never`, one bool per byte of the storage, is true, beside earlier ones."""
    if allocation.never is not None:
        never = never | allocation.never[1]
    whole = {width: len(never) // width * width for width in _WIDE}
    allocation.never = {width: never[:end].reshape(-1, width).any(1) for width, end in whole.items()}
