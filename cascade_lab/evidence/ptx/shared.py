"""Shared memory of the programs, asynchronous copies into it, and the cost of its banks.

Copies land at the wait that covers their group and not before, so data that arrive too late are late here too. An
access is split into wavefronts as the hardware does: 32 banks of 4 bytes, one distinct word per bank and wavefront,
8-byte accesses by half warps and 16-byte accesses by quarters; `phases` are the wavefronts without any conflict. What a
warp-group product reads by itself is not in either count.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from cascade_lab.evidence.ptx.faults import Misaligned, OutOfBounds, Unsupported
from cascade_lab.evidence.ptx.lanes import WARP, Lanes, first
from cascade_lab.evidence.ptx.memory import GlobalMemory, by_width, split
from cascade_lab.evidence.ptx.races import Shadow

_BANKS = 32
# bits of an address that a swizzle mode of a matrix descriptor folds into bits 4 to 6, and bytes of its rows
_SWIZZLES = {1: (7, 128), 2: (3, 64), 3: (1, 32)}


class Groups:
    """Asynchronous work under way, in groups that an owner (a lane, a warp group) commits and waits for in order."""

    def __init__(self, owners: int) -> None:
        self._committed = np.zeros(owners, np.int64)
        self._pending: list[tuple[np.ndarray, np.ndarray, tuple]] = []

    def issue(self, owners: np.ndarray, *payload) -> None:
        """Arrays of one element per owner."""
        self._pending.append((owners, self._committed[owners], payload))

    def commit(self, owners: np.ndarray) -> None:
        self._committed[owners] += 1

    def wait(self, owners: np.ndarray, left: int) -> list[tuple]:
        """End all but the last `left` groups of these owners; what ends, in order of issue."""
        waiting = np.zeros(len(self._committed), bool)
        waiting[owners] = True
        pending, self._pending, ended = self._pending, [], []
        for who, group, payload in pending:
            done = waiting[who] & (group < self._committed[who] - left)
            if done.all():
                ended.append((who, *payload))
                continue
            if done.any():
                ended.append((who[done], *(part[done] for part in payload)))
            self._pending.append((who[~done], group[~done], tuple(part[~done] for part in payload)))
        return ended

    def in_flight(self) -> int:
        """Groups under way; owners number theirs alike."""
        return len(set().union(*(np.unique(group).tolist() for _, group, _ in self._pending)))


class SharedMemory:
    """The programs' shared memories one after another, `size` bytes each, with what checks and counts are asked for.

    Attributes:
        wavefronts, phases: by opcode.
        waits: (index of the wait, copy groups still in flight after it) -> times.
    """

    def __init__(self, lanes: Lanes, size: int, cell: int, *, races: bool = True, banks: bool = False) -> None:
        self.lanes, self.size = lanes, size
        self.stride = (size + 15) // 16 * 16 + 16
        # no value that a kernel could take for a number it wrote
        self.views = by_width(np.full(len(lanes.ctas) * self.stride, 0xA5, np.uint8))
        self._start = lanes.cta * self.stride
        self.shadow = Shadow(lanes, self.stride, cell) if races else None
        self._banks = banks
        # of the last address register: itself, its least and greatest value, all its bits, its places
        self._checked: tuple = (None, 0, 0, 0, None)
        self.wavefronts: Counter[str] = Counter()
        self.phases: Counter[str] = Counter()
        self.waits: Counter[tuple[int, int]] = Counter()
        self._copies = Groups(lanes.count)
        self._products = Groups(lanes.count // 128)

    def load(self, index: int, address, offset: int, width: int, mask, kept: list) -> list[np.ndarray]:
        """Elements of `width` bytes as len(kept) registers; masked lanes keep `kept`."""
        places, taking = self._places(index, address, offset, width, mask, "load")
        if places is None:
            return kept
        if self.shadow:
            self.shadow.reading(index, places, width, self.lanes.every if taking is None else taking)
        loaded = split(self.views[width].take(places // width), len(kept), width // len(kept))
        if taking is None:
            return loaded
        result = [np.array(self.lanes.spread(values)) for values in kept]
        for register, values in zip(result, loaded, strict=True):
            register[taking] = values
        return result

    def store(self, index: int, address, offset: int, width: int, mask, values: list) -> None:
        places, taking = self._places(index, address, offset, width, mask, "store")
        if places is None:
            return
        view, elements = self.views[width // len(values)], places // (width // len(values))
        values = [self.lanes.spread(v) if taking is None else self.lanes.spread(v)[taking] for v in values]
        changed, clash = np.zeros(len(places), bool), np.zeros(len(places), bool)
        for k, value in enumerate(values):
            changed |= view[elements + k] != value
            view[elements + k] = value
            # a lane that does not find its value met another lane of this instruction
            clash |= view[elements + k] != value
        if self.shadow:
            self.shadow.writing(index, places, width, self.lanes.every if taking is None else taking, changed, clash)

    def load_matrix(self, index: int, address, offset: int, count: int, transposed: bool, mask) -> list[np.ndarray]:
        """ldmatrix: `count` tiles of 8 x 8 halves, whose rows of 16 bytes the first 8 x count lanes point at."""
        rows = self._matrix_rows(index, address, offset, count, mask, "ldmatrix")
        halves = self.views[16].take(rows // 16).view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            halves = np.ascontiguousarray(halves.swapaxes(2, 3))
        return [tile.ravel() for tile in halves.view(np.uint32).swapaxes(0, 1)]

    def store_matrix(self, index: int, address, offset: int, values: list, transposed: bool, mask) -> None:
        """stmatrix: the inverse of ldmatrix."""
        rows = self._matrix_rows(index, address, offset, len(values), mask, "stmatrix", writes=True)
        taking = slice(None) if mask is None else self.lanes.spread(mask)[::WARP]
        tiles = np.stack([self.lanes.spread(value).reshape(-1, 8, 4) for value in values], 1)
        if transposed:
            halves = tiles.view(np.uint16).reshape(-1, len(values), 8, 8).swapaxes(2, 3)
            tiles = np.ascontiguousarray(halves).view(np.uint32)
        self.views[16][rows[taking] // 16] = tiles.reshape(len(rows), -1).view(np.complex128)[taking]

    def _matrix_rows(
        self, index: int, address, offset: int, count: int, mask, kind: str, writes: bool = False
    ) -> np.ndarray:
        """Byte places of the rows [warps, 8 * count] in all shared memory; those of idle warps lie anywhere."""
        self.lanes.require_whole(index, mask)
        points = mask
        if count < 4:
            points = self.lanes.every % WARP < 8 * count
            points = points if mask is None else points & mask
        rows = self._start.copy()
        places, taking = self._places(index, address, offset, 16, points, kind)
        if places is not None:
            taking = self.lanes.every if taking is None else taking
            rows[taking] = places
            if self.shadow:
                if writes:
                    self.shadow.writing(index, places, 16, taking)
                else:
                    self.shadow.reading(index, places, 16, taking, readers=WARP)
        return rows.reshape(-1, WARP)[:, : 8 * count]

    def copy(self, index: int, memory: GlobalMemory, to, to_offset: int, source, offset: int, width: int, size, mask):
        """cp.async: read global memory now, write shared memory at the wait; a source of size 0 gives zeros."""
        places, taking = self._places(index, to, to_offset, width, mask, "copy")
        if places is None:
            return
        who = self.lanes.every if taking is None else taking
        reads = mask
        if size is not None:
            size = self.lanes.spread(size)
            if not np.isin(size[who], (0, width)).all():
                raise Unsupported(f"cp.async of a part of {width} bytes")
            reads = size > 0 if mask is None else (size > 0) & mask
        data = memory.fetch(self.lanes, index, source, offset, width, reads)[who]
        if self.shadow:
            self.shadow.writing(index, places, width, who, copy=True)
        self._copies.issue(who, places, data, np.full(len(who), width))

    def commit_copies(self, mask) -> None:
        self._copies.commit(self.lanes.every if mask is None else np.flatnonzero(mask))

    def wait_copies(self, index: int, left: int, mask) -> None:
        self.lanes.steps += 1
        for who, places, data, width in self._copies.wait(
            self.lanes.every if mask is None else np.flatnonzero(mask), left
        ):
            width = int(width[0])
            self.views[width][places // width] = data
            if self.shadow:
                self.shadow.landed(places, width, who)
        self.waits[index, self._copies.in_flight()] += 1

    def unfinished(self) -> int:
        """Copy groups that nothing has waited for."""
        return self._copies.in_flight()

    def barrier(self, index: int, mask) -> None:
        self.lanes.require_whole(index, mask, self.lanes.threads)
        if self.shadow:
            self.shadow.barrier(mask)

    def warp_barrier(self, index: int, mask) -> None:
        self.lanes.require_whole(index, mask, WARP)
        if self.shadow:
            self.shadow.warp_barrier(mask)

    def fence(self, mask) -> None:
        """fence.proxy.async: what was written before is seen by products from now on."""
        if self.shadow:
            self.shadow.fence(slice(None) if mask is None else np.unique(self.lanes.cta[mask]))

    def descriptor_tile(self, index: int, descriptor, columns: int, transposed: bool, mask) -> np.ndarray:
        """B [warp groups, 16, columns] of halves that a warp-group product reads through its descriptor."""
        self.lanes.require_whole(index, mask, 128)
        groups = self.lanes.spread(descriptor).reshape(-1, 128)
        live = np.ones(len(groups), bool) if mask is None else self.lanes.spread(mask)[::128]
        groups = groups[:, 0].astype(np.int64)
        modes = np.unique(groups[live] >> 62 & 3)
        if len(modes) != 1 or modes[0] == 0:
            raise Unsupported("a matrix descriptor without swizzle")
        bits, row = _SWIZZLES[int(modes[0])]
        start, leading, stride = (((groups >> shift & 0x3FFF) << 4)[:, None, None] for shift in (0, 16, 32))
        n, k = np.arange(columns)[None, None, :], np.arange(16)[None, :, None]
        if transposed:
            inside = n % (row // 2) * 2 + n // (row // 2) * leading + k % 8 * row + k // 8 * stride
        else:
            inside = n % 8 * row + n // 8 * stride + k * 2
        places = start + inside
        places ^= (places >> 7 & bits) << 4
        places[~live] = 0
        if places.max() + 2 > self.size:
            self.lanes.fault(OutOfBounds, index, f"product reads byte {places.max()} of {self.size} shared bytes")
        places += self._start[::128][:, None, None]
        if self.shadow:
            rows = (places % 16 == 0) & live[:, None, None]
            groups = np.nonzero(rows)[0]
            self.shadow.multiplying(index, places[rows], groups * 128)
            self._products.issue(groups, places[rows])
        return self.views[2].take(places // 2)

    def commit_products(self, mask) -> None:
        self._products.commit(self._warp_groups(mask))

    def wait_products(self, left: int, mask) -> None:
        for groups, places in self._products.wait(self._warp_groups(mask), left):
            self.shadow.multiplied(places, groups * 128)

    def _warp_groups(self, mask) -> np.ndarray:
        return np.flatnonzero(np.ones(self.lanes.count // 128, bool) if mask is None else mask[::128])

    def _places(self, index: int, address, offset: int, width: int, mask, kind: str):
        """(byte places in all shared memory, lanes or None for all) of one access; (None, None) if there is none."""
        taking = self.lanes.active(mask)
        self.lanes.steps += 1
        if taking is None and not self._banks:
            # loads often differ in their constant offset alone
            if address is not self._checked[0]:
                wide = self.lanes.spread(address).astype(np.int64)
                bits = int(np.bitwise_or.reduce(wide))
                self._checked = address, int(wide.min()), int(wide.max()), bits, wide + self._start
            _, lowest, highest, bits, places = self._checked
            if lowest + offset >= 0 and highest + offset + width <= self.size and not (bits | offset) & (width - 1):
                return places + offset, None
        address, start = self.lanes.spread(address), self._start
        if taking is not None:
            if not len(taking):
                return None, None
            address, start = address[taking], start[taking]
        address = address.astype(np.int64) + offset
        if address.max() + width > self.size or address.min() < 0:
            k = first((address + width > self.size) | (address < 0))
            who = self.lanes.name(k if taking is None else taking[k])
            self.lanes.fault(OutOfBounds, index, f"{width}-byte {kind} at byte {address[k]} of {self.size} by {who}")
        if np.bitwise_or.reduce(address) & (width - 1):
            k = first(address & (width - 1) != 0)
            self.lanes.fault(Misaligned, index, f"{width}-byte {kind} at shared byte {address[k]}")
        if self._banks and kind != "copy":
            self._count_banks(index, address, width, self.lanes.every if taking is None else taking)
        return address + start, taking

    def _count_banks(self, index: int, address: np.ndarray, width: int, who: np.ndarray) -> None:
        words = max(1, width // 4)
        phase = np.repeat(who // (WARP // words), words)
        word = (address[:, None] // 4 + np.arange(words)).ravel()
        distinct = np.unique(phase * (1 << 32) + word)
        per_bank = np.bincount((distinct >> 32) * _BANKS + distinct % _BANKS, minlength=(phase.max() + 1) * _BANKS)
        slowest = per_bank.reshape(-1, _BANKS).max(1)
        opcode = self.lanes.kernel.instructions[index].opcode
        self.phases[opcode] += int((slowest > 0).sum())
        self.wavefronts[opcode] += int(slowest.sum())
