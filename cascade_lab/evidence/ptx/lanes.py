"""The threads of several programs side by side: one NumPy element each, program by program, warp by warp.

A register is an array over all of these lanes, or of one element where they all agree. Programs thus advance together,
which is what makes executing them in Python affordable; nothing here relies on the order in which they advance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cascade_lab.evidence.ptx.faults import Divergence, Fault
from cascade_lab.evidence.ptx.parse import Kernel

WARP = 32


class Lanes:
    """Lanes of the programs `ctas`, their places, and how to name one in an error.

    Attributes:
        count, warps: lanes and warps in all.
        every: 0 .. count - 1.
        cta, warp, thread: of each lane; thread within its program.
        special: values of the special registers, by name without %.
        steps: instructions that had an effect on memory so far; it dates events.
    """

    def __init__(self, kernel: Kernel, ctas: Sequence[tuple[int, int, int]], grid: tuple[int, int, int]) -> None:
        self.kernel, self.ctas, self.threads = kernel, ctas, kernel.threads
        self.count = len(ctas) * kernel.threads
        self.warps = self.count // WARP
        self.every = np.arange(self.count)
        self.cta = self.every // kernel.threads
        self.warp = self.every // WARP
        self.thread = (self.every % kernel.threads).astype(np.int32)
        self.steps = 0
        thread = self.thread.astype(np.uint32)
        self.special = {"tid.x": thread, "laneid": thread % np.uint32(WARP)}
        for axis, place in enumerate("xyz"):
            self.special[f"ctaid.{place}"] = np.array(ctas, np.uint32)[:, axis].repeat(kernel.threads)
            self.special[f"nctaid.{place}"] = np.array([grid[axis]], np.uint32)
            self.special[f"ntid.{place}"] = np.array([1 if axis else kernel.threads], np.uint32)
            self.special.setdefault(f"tid.{place}", np.zeros(1, np.uint32))

    def spread(self, values: np.ndarray) -> np.ndarray:
        """One element a lane."""
        return values if len(values) == self.count else np.broadcast_to(values, (self.count,))

    def active(self, mask: np.ndarray | None) -> np.ndarray | None:
        """Indices of the lanes of a mask; None for all of them."""
        if mask is None or mask.all():
            return None
        return np.flatnonzero(self.spread(mask))

    def require_whole(self, index: int, mask: np.ndarray | None, width: int = WARP) -> None:
        """Every `width` lanes take part in the instruction together, or none of them does."""
        if mask is not None and not mask.all():
            groups = self.spread(mask).reshape(-1, width)
            if (groups.any(1) != groups.all(1)).any():
                self.fault(Divergence, index, f"reached by a part of {width} threads that must take part together")

    def name(self, lane: int) -> str:
        x, y, z = self.ctas[lane // self.threads]
        return f"program ({x}, {y}, {z}), thread {lane % self.threads}"

    def fault(self, kind: type[Fault], index: int, message: str) -> None:
        """Raise `kind` for the instruction at `index`."""
        instruction = self.kernel.instructions[index]
        raise kind(message, self.kernel.name, instruction.line, instruction.text)


def first(bad: np.ndarray) -> int:
    """Index of the first true element."""
    return int(np.flatnonzero(bad)[0])
