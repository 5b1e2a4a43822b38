"""One kernel as Python functions over NumPy arrays, one pair per basic block.

Each block exists twice: for all lanes, and for the lanes of a mask when programs or threads have parted. Every
instruction of a kernel is translated before the first is executed, so what is not modelled is an error in which nothing
has run. Registers pass from block to block in a list, each in the form that its first writer gives it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from cascade_lab.evidence.ptx import arithmetic, warp
from cascade_lab.evidence.ptx.emit import TYPE, Emitter
from cascade_lab.evidence.ptx.faults import Unsupported
from cascade_lab.evidence.ptx.parse import Instruction, Kernel, vector
from cascade_lab.evidence.ptx.products import check_products

_NUMPY = {"p1": "bool_"} | {
    f"{form}{bits}": f"{name}{bits}"
    for form, name in (("u", "uint"), ("s", "int"), ("f", "float"))
    for bits in (8, 16, 32, 64)
    if (form, bits) != ("f", 8)
}
_LABELS = {
    "mma": "tensor", "wgmma": "tensor", "ldmatrix": "matrix load", "stmatrix": "matrix store", "shfl": "shuffle",
    "redux": "shuffle",
    "bar": "order", "barrier": "order", "fence": "order", "griddepcontrol": "order", "bra": "branch", "ret": "branch",
    "exit": "branch", "mov": "move", "selp": "move", "cvt": "convert", "ex2": "special", "lg2": "special",
    "tanh": "special", "rcp": "special", "sqrt": "special", "rsqrt": "special", "atom": "atomic", "red": "atomic",
}  # fmt: skip


def label(opcode: str) -> str:
    """The class that an instruction is counted under: "tensor", "float", "integer", "global load", "copy", ..."""
    parts = opcode.split(".")
    head = parts[0]
    if head == "cp":
        return "copy" if "global" in parts else "order"
    if head == "wgmma" and "mma_async" not in parts:
        return "order"
    if head in ("ld", "st"):
        space = next((part for part in parts if part in ("param", "global", "shared")), "other")
        return f"{space} {'load' if head == 'ld' else 'store'}"
    return _LABELS.get(head) or ("float" if re.match(r"b?f\d", parts[-1]) else "integer")


def multiply_adds(opcode: str) -> int:
    """Those of a warp's share of a matrix product, 0 for other instructions; a wgmma is of four warps."""
    shape = re.search(r"\.m(\d+)n(\d+)k(\d+)", opcode) if label(opcode) == "tensor" else None
    return math.prod(map(int, shape.groups())) // (4 if opcode.startswith("wgmma") else 1) if shape else 0


class Translation:
    """A kernel in executable form.

    Attributes:
        blocks, live_in: instructions of each basic block, and the registers that it reads before it writes them.
        uses: how often each register is read in the whole kernel.
        slots, dtypes: places of the registers that pass between blocks, and what is kept there.
        labels: per block, instructions of each class.
        multiply_adds: per block, those of matrix products.
        cell: bytes of the narrowest access to shared memory: what races are told apart by.
    """

    def __init__(self, kernel: Kernel) -> None:
        """Translate everything.

        Raises:
            Unsupported: naming every instruction that is not modelled.
            InFlight: a warp-group product's registers are used too early on some path.
        """
        if kernel.threads == 0 or kernel.threads % 32:
            raise Unsupported(f"a program of {kernel.threads} threads")
        self.kernel = kernel
        self.blocks, self._block_at = _blocks(kernel)
        self.uses = Counter(r for i in kernel.instructions for r in i.reads)
        self.live_in = [_live_in(block) for block in self.blocks]
        self.slots = {r: k for k, r in enumerate(sorted(set().union(*self.live_in)))}
        self._forms = _first_forms(kernel)
        self.dtypes = [_NUMPY[f"{self.form(r)}{kernel.width(r)}"] for r in self.slots]
        self._constants: dict[str, np.ndarray] = {}
        self._functions: dict[tuple[int, bool], Callable] = {}
        self.labels = [Counter(label(i.opcode) for i in block) for block in self.blocks]
        self.multiply_adds = [sum(multiply_adds(i.opcode) for i in block) for block in self.blocks]
        self.cell = min((_shared_width(i) for i in kernel.instructions), default=16)
        unknown: dict[str, str] = {}
        self._sources = [Emitter(self, k, False, unknown).source() for k in range(len(self.blocks))]
        if unknown:
            listed = "; ".join(f"{opcode} ({why})" if why else opcode for opcode, why in unknown.items())
            raise Unsupported(f"{kernel.name}: not modelled: {listed}")
        check_products(self)

    def __len__(self) -> int:
        return len(self.blocks)

    def function(self, block: int, masked: bool) -> Callable:
        """`f(batch, registers, mask)`: executes a block; returns (next block or -1 for the end, condition or None)."""
        if (block, masked) not in self._functions:
            source = Emitter(self, block, True, {}).source() if masked else self._sources[block]
            space: dict[str, Any] = _NAMES | self._constants
            exec(compile(source, f"<{self.kernel.name}, block {block}>", "exec"), space)
            self._functions[block, masked] = space["block"]
        return self._functions[block, masked]

    def form(self, register: str) -> str:
        """The form that a register is passed from block to block in."""
        return self._forms.get(register, "p" if self.kernel.width(register) == 1 else "u")

    def block_at(self, target: str) -> int:
        return self._block_at[self.kernel.labels[target]]

    def constant(self, bits: int, form: str, width: int) -> str:
        """Name of a one-element array of these bits."""
        name = f"k{bits & (1 << width) - 1:x}{form}{width}"
        if name not in self._constants:
            dtype = _NUMPY[f"{form}{width}"]
            raw = np.array([bits & (1 << width) - 1], "bool" if form == "p" else f"uint{width}")
            self._constants[name] = raw.view(dtype)
        return name


_NAMES = {
    "np": np,
    "where": np.where,
    **{short: getattr(np, dtype) for short, dtype in _NUMPY.items()},
    **{
        name: function for module in (arithmetic, warp) for name, function in vars(module).items() if callable(function)
    },
}


def _blocks(kernel: Kernel) -> tuple[list[list[Instruction]], dict[int, int]]:
    """Basic blocks, and the block that starts at an instruction's index."""
    cuts = {0, *kernel.labels.values()}
    cuts |= {i.index + 1 for i in kernel.instructions if i.parts[0] in ("bra", "ret", "exit")}
    starts = sorted(cut for cut in cuts if cut < len(kernel.instructions))
    ends = [*starts[1:], len(kernel.instructions)]
    at = {start: k for k, start in enumerate(starts)} | {len(kernel.instructions): -1}
    return [kernel.instructions[a:b] for a, b in zip(starts, ends, strict=True)], at


def _live_in(block: list[Instruction]) -> set[str]:
    """Registers that the block reads before it writes them."""
    needed: set[str] = set()
    written: set[str] = set()
    for instruction in block:
        needed |= set(instruction.reads) - written
        written |= set(instruction.writes)
    return needed


def _first_forms(kernel: Kernel) -> dict[str, str]:
    forms: dict[str, str] = {}
    for i in kernel.instructions:
        floating = i.parts[-1] == "f32" and i.parts[0] not in ("setp", "cvt") or i.parts[0] in ("mma", "wgmma")
        for register in i.writes:
            width = kernel.width(register)
            forms.setdefault(register, "p" if width == 1 else "f" if floating and width == 32 else "u")
    return forms


def _shared_width(i: Instruction) -> int:
    parts = i.parts
    if parts[0] in ("ld", "st") and "shared" in parts:
        return len(vector(i.operands[0 if parts[0] == "ld" else 1])) * int(TYPE.match(parts[-1])[2]) // 8
    if parts[0] == "cp" and len(i.operands) > 2:
        return int(i.operands[2], 0)
    return 16
