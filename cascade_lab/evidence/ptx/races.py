"""Who touched which cell of shared memory last, and since which barrier: the race detector.

Time is counted in epochs, the barriers that a program has passed. Two accesses of one cell by different threads, one
of them a write, need different epochs. An asynchronous copy holds its cells from issue to the wait that covers it, and
lands as a write of the thread that waits; a warp-group product holds the cells it reads until its own wait, and reads
through another proxy, which sees a write only after a fence. A race is found whichever thread came first here, but
only on paths that are executed, and order within a warp (shuffles, `bar.warp`) is not taken for an order.
"""

from __future__ import annotations

import numpy as np

from cascade_lab.evidence.ptx.faults import Race
from cascade_lab.evidence.ptx.lanes import Lanes, first

_NOBODY, _SEVERAL = -1, -2


class Shadow:
    """One record per cell of `cell` bytes, over the shared memories of all programs, `stride` bytes each."""

    def __init__(self, lanes: Lanes, stride: int, cell: int) -> None:
        cells = len(lanes.ctas) * stride // cell
        self.lanes, self.stride, self.cell = lanes, stride, cell
        self.writer, self.written = np.full(cells, _NOBODY, np.int32), np.full(cells, -1, np.int32)
        self.reader, self.read = np.full(cells, _NOBODY, np.int32), np.full(cells, -1, np.int32)
        self.landed = np.full(cells, -1, np.int64)
        self.copying = np.zeros(cells, np.int16)
        self.multiplying = np.zeros(cells, np.int16)
        self.epoch = np.zeros(len(lanes.ctas), np.int32)
        self.fenced = np.full(len(lanes.ctas), -1, np.int64)

    def cells(self, places: np.ndarray, width: int) -> np.ndarray:
        """Cells of accesses of `width` bytes at byte `places`, access by access."""
        each = width // self.cell
        start = places // self.cell
        return start if each == 1 else (start[:, None] + np.arange(each)).ravel()

    def reading(self, index: int, places: np.ndarray, width: int, who: np.ndarray) -> None:
        """Lanes `who` read for themselves."""
        cells, lanes, thread, epoch = self._opened(index, places, width, who, "reads")
        self._refuse(index, (self.written[cells] == epoch) & (self.writer[cells] != thread), cells, lanes, "reads")
        others = (self.read[cells] == epoch) & (self.reader[cells] != thread)
        self.reader[cells] = thread
        # of several lanes at one cell the last one stands there, so the others see that they are not alone
        others |= self.reader[cells] != thread
        self.reader[cells[others]] = _SEVERAL
        self.read[cells] = epoch

    def reading_together(self, index: int, places: np.ndarray, width: int, who: np.ndarray) -> None:
        """Lanes `who` read for others of their warp or warp group, so that nobody's own write is ordered."""
        cells, lanes, _, epoch = self._opened(index, places, width, who, "reads")
        self._refuse(index, self.written[cells] == epoch, cells, lanes, "reads")
        self.reader[cells] = _SEVERAL
        self.read[cells] = epoch

    def writing(
        self, index: int, places: np.ndarray, width: int, who: np.ndarray, changed=None, clash=None
    ) -> np.ndarray:
        """Lanes `who` write, and the cells that they write.

        A cell written twice with the same value (`changed` false) is no conflict; `clash` marks lanes whose value
        another lane of the same instruction replaced.
        """
        cells, lanes, thread, epoch = self._opened(index, places, width, who, "overwrites")
        self._refuse(index, self.multiplying[cells] > 0, cells, lanes, "overwrites", "a product that still reads it")
        bad = (self.read[cells] == epoch) & (self.reader[cells] != thread)
        self._refuse(index, bad, cells, lanes, "overwrites", "its reader")
        bad = (self.written[cells] == epoch) & (self.writer[cells] != thread)
        if changed is not None:
            bad &= np.repeat(changed, width // self.cell)
        self._refuse(index, bad, cells, lanes, "overwrites")
        if clash is not None:
            clash = np.repeat(clash, width // self.cell)
            self._refuse(index, clash, cells, lanes, "overwrites", "another lane's other value")
        self._write(cells, thread, epoch)
        return cells

    def copy_issued(self, index: int, places: np.ndarray, width: int, who: np.ndarray) -> None:
        self.copying[self.writing(index, places, width, who)] += 1

    def copy_landed(self, places: np.ndarray, width: int, who: np.ndarray) -> None:
        cells, lanes = self.cells(places, width), np.repeat(who, width // self.cell)
        self.copying[cells] -= 1
        self._write(cells, self.lanes.thread[lanes], self.epoch[self.lanes.cta[lanes]])

    def product_issued(self, index: int, places: np.ndarray, width: int, who: np.ndarray) -> np.ndarray:
        """The cells that a warp-group product reads, to be given back at its wait."""
        self.reading_together(index, places, width, who)
        cells, lanes = self.cells(places, width), np.repeat(who, width // self.cell)
        late = self.landed[cells] > self.fenced[self.lanes.cta[lanes]]
        self._refuse(index, late, cells, lanes, "reads", "a write that no fence.proxy.async has shown it")
        np.add.at(self.multiplying, cells, 1)
        return cells

    def product_done(self, cells: np.ndarray) -> None:
        np.subtract.at(self.multiplying, cells, 1)

    def _opened(self, index: int, places: np.ndarray, width: int, who: np.ndarray, verb: str):
        cells, lanes = self.cells(places, width), np.repeat(who, width // self.cell)
        self._refuse(index, self.copying[cells] > 0, cells, lanes, verb, "a copy that still writes it")
        return cells, lanes, self.lanes.thread[lanes], self.epoch[self.lanes.cta[lanes]]

    def _write(self, cells: np.ndarray, thread: np.ndarray, epoch: np.ndarray) -> None:
        self.writer[cells] = thread
        self.written[cells] = epoch
        self.landed[cells] = self.lanes.steps

    def _refuse(self, index: int, bad: np.ndarray, cells: np.ndarray, lanes: np.ndarray, verb: str, other="") -> None:
        if not bad.any():
            return
        k = first(bad)
        place = int(cells[k]) * self.cell % self.stride
        other = other or f"thread {self.writer[cells[k]]}'s write"
        self.lanes.fault(
            Race, index, f"{self.lanes.name(lanes[k])} {verb} byte {place}: nothing orders it after {other}"
        )
