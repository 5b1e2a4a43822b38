"""Compiled kernels without a GPU: the PTX that Triton emits for sm_80 and sm_90, executed instruction by instruction.

    with executed("sm_90") as runs:
        state = attention(q, k_cache, v_cache, page_table, cache_seqlens, backend="triton")

Results can be held to the float64 oracle, and each `Run` says what was read, issued and waited for. On the way the
executor stops at what a GPU would let pass: accesses outside every tensor, reads of what is never read, races in shared
memory, misaligned vectors. It executes PTX, not machine code: the assembler is trusted, and nothing is timed.
"""

from cascade_lab.evidence.ptx.faults import (
    Divergence,
    Endless,
    Fault,
    InFlight,
    Misaligned,
    NeverRead,
    OutOfBounds,
    Race,
    Unsupported,
)
from cascade_lab.evidence.ptx.launch import EXECUTED, executed
from cascade_lab.evidence.ptx.run import Run

__all__ = [
    "EXECUTED",
    "Divergence",
    "Endless",
    "Fault",
    "InFlight",
    "Misaligned",
    "NeverRead",
    "OutOfBounds",
    "Race",
    "Run",
    "Unsupported",
    "executed",
]
