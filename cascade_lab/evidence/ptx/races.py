"""Who touched which cell of shared memory last, and since which barrier: the race detector.

Time is counted in epochs, the barriers that a program has passed. Two accesses of one cell by different threads, one
of them a write, need different epochs. An asynchronous copy holds its cells from issue to the wait that covers it, and
lands as a write of the thread that waits; a warp-group product holds what it reads until its own wait, and reads
through another proxy, which sees a write only after a fence. `bar.warp.sync` orders the threads of one warp, counted
per warp; shuffles and other instructions of a warp are not taken for an order. A race is found whichever thread came
first here, but only on paths that are executed.

A cell is the narrowest access of the kernel, a row is 16 bytes, the widest. Rows say cheaply that there is nothing to
look at; reads are only noted, for a write that comes to a row read in its epoch, and dropped at the barrier.
"""

from __future__ import annotations

import numpy as np

from cascade_lab.evidence.ptx.faults import Race
from cascade_lab.evidence.ptx.lanes import WARP, Lanes, first

# readers of a cell: a thread, nobody, several, or from the last number down, several of warp 0, 1, ...
_NOBODY, _SEVERAL, _OF_WARP = -1, -2, -3
_ROW = 16


class Shadow:
    """Records over the shared memories of all programs, `stride` bytes each, in cells of `cell` bytes."""

    def __init__(self, lanes: Lanes, stride: int, cell: int) -> None:
        size = len(lanes.ctas) * stride
        self.lanes, self.stride, self.cell = lanes, stride, cell
        self._epoch = np.zeros(lanes.count, np.int32)
        # per cell: thread and epoch of the last write and of the last read, copies that are to write it
        self._writer, self._written = np.full(size // cell, _NOBODY, np.int32), np.full(size // cell, -1, np.int32)
        self._reader, self._read = np.full(size // cell, _NOBODY, np.int32), np.full(size // cell, -1, np.int32)
        # barriers of its warp that each lane has passed; per cell, those of the last writer and reader at the time
        self._passed = np.zeros(lanes.count, np.int32)
        self._write_passed, self._read_passed = np.zeros(size // cell, np.int32), np.zeros(size // cell, np.int32)
        self._copying = np.zeros(size // cell, np.int16)
        # per row: epoch and step of the last write, epoch of the last read, copies to write it, products that read it
        self._row_written, self._row_landed = np.full(size // _ROW, -1, np.int32), np.full(size // _ROW, -1, np.int64)
        self._row_read = np.full(size // _ROW, -1, np.int32)
        self._row_copying, self._row_multiplying = np.zeros(size // _ROW, np.int16), np.zeros(size // _ROW, np.int16)
        self._fenced = np.full(len(lanes.ctas), -1, np.int64)
        self._noted: list[tuple[np.ndarray, int, np.ndarray, np.ndarray, np.ndarray, int]] = []

    def barrier(self, mask: np.ndarray | None) -> None:
        """The programs of the mask pass a barrier."""
        if mask is None:
            # what is noted is of an older epoch now
            self._noted.clear()
            self._epoch = self._epoch + 1
        else:
            self._epoch = self._epoch + mask
            self._noted = [note for note in self._noted if (self._epoch[note[2]] == note[3]).any()]

    def warp_barrier(self, mask: np.ndarray | None) -> None:
        """The warps of the mask pass a barrier of their own."""
        self._passed = self._passed + (1 if mask is None else mask)

    def fence(self, ctas: np.ndarray | slice) -> None:
        """Products of these programs see what was written up to now."""
        self._fenced[ctas] = self.lanes.steps

    def reading(self, index: int, places: np.ndarray, width: int, who: np.ndarray, readers: int = 1) -> None:
        """Lanes `who` read `width` bytes at `places`; with `readers` 32 or 128 for their warp or group as well, so that
        not even their own write is ordered."""
        rows, epoch = places // _ROW, self._epoch[who]
        if self._row_copying.take(rows).any() or (self._row_written.take(rows) == epoch).any():
            cells, lanes, thread = self._cells(places, width, who)
            self._refuse(index, self._copying[cells] > 0, cells, lanes, "reads", "a copy that is to write it")
            late = self._written[cells] == self._epoch[lanes]
            if readers <= WARP:
                late &= ~self._ordered(self._writer[cells] // WARP, self._write_passed[cells], lanes, thread)
            if readers == 1:
                late &= self._writer[cells] != thread
            self._refuse(index, late, cells, lanes, "reads")
        self._row_read[rows] = epoch
        self._noted.append((places, width, who, epoch, self._passed[who], readers))

    def writing(
        self, index: int, places: np.ndarray, width: int, who: np.ndarray, changed=None, clash=None, copy: bool = False
    ) -> None:
        """Lanes `who` write `width` bytes at `places`, or issue a copy that is going to.

        A cell written twice with the same value (`changed` false) is no conflict; `clash` marks lanes whose value
        another lane of the same instruction replaced.
        """
        if (self._row_read.take(places // _ROW) == self._epoch[who]).any():
            self._look_at_noted()
        cells, lanes, thread = self._cells(places, width, who)
        each, epoch = width // self.cell, self._epoch[lanes]
        self._refuse(index, self._copying[cells] > 0, cells, lanes, "overwrites", "a copy that is to write it")
        multiplied = np.repeat(self._row_multiplying.take(places // _ROW) > 0, each)
        self._refuse(index, multiplied, cells, lanes, "overwrites", "a product that still reads it")
        reader = self._reader[cells]
        read = (self._read[cells] == epoch) & (reader != thread)
        read &= ~self._ordered(_warp_of(reader), self._read_passed[cells], lanes, thread)
        self._refuse(index, read, cells, lanes, "overwrites", "another thread's read")
        written = (self._written[cells] == epoch) & (self._writer[cells] != thread)
        written &= ~self._ordered(self._writer[cells] // WARP, self._write_passed[cells], lanes, thread)
        if changed is not None:
            written &= np.repeat(changed, each)
        self._refuse(index, written, cells, lanes, "overwrites")
        if clash is not None:
            self._refuse(index, np.repeat(clash, each), cells, lanes, "overwrites", "another lane's other value")
        if copy:
            self._copying[cells] += 1
            np.add.at(self._row_copying, places // _ROW, 1)
        else:
            self._write(places, cells, lanes, thread)

    def landed(self, places: np.ndarray, width: int, who: np.ndarray) -> None:
        """Copies of lanes `who` have written."""
        cells, lanes, thread = self._cells(places, width, who)
        self._copying[cells] -= 1
        np.subtract.at(self._row_copying, places // _ROW, 1)
        self._write(places, cells, lanes, thread)

    def multiplying(self, index: int, places: np.ndarray, who: np.ndarray) -> None:
        """Products of warp groups, named by a lane each, begin to read the rows at `places`, a row once a group."""
        self.reading(index, places, _ROW, who, readers=4 * WARP)
        late = self._row_landed.take(places // _ROW) > self._fenced[self.lanes.cta[who]]
        if late.any():
            other = "a write that no fence.proxy.async has shown to products"
            cells, lanes, _ = self._cells(places, self.cell, who)
            self._refuse(index, late, cells, lanes, "reads", other)
        self._count_products(places, who, 1)

    def multiplied(self, places: np.ndarray, who: np.ndarray) -> None:
        """These products have read."""
        self._count_products(places, who, -1)

    def _count_products(self, places: np.ndarray, who: np.ndarray, by: int) -> None:
        # groups of one program may read the same rows
        group = who % self.lanes.threads
        for one in np.unique(group):
            self._row_multiplying[places[group == one] // _ROW] += by

    def _look_at_noted(self) -> None:
        for places, width, who, epoch, passed, readers in self._noted:
            cells, _, thread = self._cells(places, width, who)
            epoch, passed = (np.repeat(each, width // self.cell) for each in (epoch, passed))
            if readers > WARP:
                self._reader[cells] = _SEVERAL
            else:
                warp, before = thread // WARP, self._reader[cells]
                reader = thread if readers == 1 else _OF_WARP - warp
                others = (self._read[cells] == epoch) & (before != reader)
                strangers = others & (_warp_of(before) != warp)
                self._reader[cells] = reader
                # of several lanes at one cell the last one stands there: the others see that they are not alone
                last = self._reader[cells]
                others |= last != reader
                strangers |= _warp_of(last) != warp
                self._reader[cells[others]] = _OF_WARP - warp[others]
                self._reader[cells[strangers]] = _SEVERAL
            self._read[cells], self._read_passed[cells] = epoch, passed
        self._noted.clear()

    def _cells(self, places: np.ndarray, width: int, who: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cells, lane by lane, and the lane and thread of each."""
        each = width // self.cell
        cells, lanes = places // self.cell, who
        if each > 1:
            cells, lanes = (cells[:, None] + np.arange(each)).ravel(), np.repeat(who, each)
        return cells, lanes, self.lanes.thread[lanes]

    def _ordered(self, warp: np.ndarray, passed: np.ndarray, lanes: np.ndarray, thread: np.ndarray) -> np.ndarray:
        """Whether a barrier of the lanes' warp lies between them and an access by `warp` after `passed` barriers."""
        return (warp == thread // WARP) & (passed < self._passed[lanes])

    def _write(self, places: np.ndarray, cells: np.ndarray, lanes: np.ndarray, thread: np.ndarray) -> None:
        epoch = self._epoch[lanes]
        self._writer[cells], self._written[cells], self._write_passed[cells] = thread, epoch, self._passed[lanes]
        rows = places // _ROW
        self._row_written[rows], self._row_landed[rows] = epoch[:: len(cells) // len(rows)], self.lanes.steps

    def _refuse(self, index: int, bad: np.ndarray, cells: np.ndarray, lanes: np.ndarray, verb: str, other="") -> None:
        if not bad.any():
            return
        k = first(bad)
        place = int(cells[k]) * self.cell % self.stride
        other = other or f"thread {self._writer[cells[k]]}'s write"
        self.lanes.fault(Race, index, f"{self.lanes.name(lanes[k])} {verb} byte {place}, not ordered after {other}")


def _warp_of(reader: np.ndarray) -> np.ndarray:
    """The one warp that a cell's readers are of, or a number that no warp has."""
    return np.where(reader <= _OF_WARP, _OF_WARP - reader, np.where(reader < 0, _NOBODY, reader // WARP))
