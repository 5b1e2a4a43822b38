"""Bugs seeded into compiled code, and the detector that has to notice each.

None of them exists in the source that the interpreter runs: they are what a compiler, or a hand at the assembly, could
get wrong. A detector is the class of a `Fault`, or "values": the result leaves twice the error of the torch backend.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """`change` turns the PTX of `kernel` (a key of the programs' KERNELS) on `target` into wrong code."""

    name: str
    kernel: str
    target: str
    detector: str
    change: Callable[[str], str]


def line(pattern: str, old: str, new: str, which: int = 0, loop: bool = False) -> Callable[[str], str]:
    """Substitute in one of the lines that match `pattern`; `loop`: of those in the pipelined loop over keys."""

    def change(ptx: str) -> str:
        lines = ptx.split("\n")
        start, end = _main_loop(lines) if loop else (0, len(lines))
        hits = [k for k in range(start, end) if re.search(pattern, lines[k])]
        lines[hits[which]] = re.sub(old, new, lines[hits[which]], count=1)
        return "\n".join(lines)

    return change


def drop(pattern: str, which: int = 0, loop: bool = False) -> Callable[[str], str]:
    return line(pattern, ".*", "", which, loop)


def added(pattern: str, by: int, which: int = 0, loop: bool = False) -> Callable[[str], str]:
    """Add to the first group of a line that matches: an offset, a distance, a count."""

    def change(ptx: str) -> str:
        lines = ptx.split("\n")
        start, end = _main_loop(lines) if loop else (0, len(lines))
        k = [k for k in range(start, end) if re.search(pattern, lines[k])][which]
        found = re.search(pattern, lines[k])
        lines[k] = f"{lines[k][: found.start(1)]}{int(found[1]) + by}{lines[k][found.end(1) :]}"
        return "\n".join(lines)

    return change


def _main_loop(lines: list[str]) -> tuple[int, int]:
    """First and last line of the loop with the most groups of copies, or else the most multiply-adds."""
    labels = {text.split(":")[0]: k for k, text in enumerate(lines) if re.match(r"\$L__BB\w+:", text)}
    jumps = [(k, re.search(r"bra(?:\.uni)?\s+(\$\w+);", text)) for k, text in enumerate(lines)]
    loops = [(labels[found[1]], k + 1) for k, found in jumps if found and labels.get(found[1], k) < k]
    return max(loops, key=lambda span: sum("cp.async.c" in text for text in lines[span[0] : span[1]]))


def _divided(ptx: str) -> str:
    """The first barrier is passed by without waiting by the threads from 50 on."""
    skipped = "mov.u32 %r1, %tid.x;\nsetp.gt.u32 %p1, %r1, 50;\n@%p1 bra $L__seeded;\nbar.sync 0;\n$L__seeded:\n"
    return re.sub(r"bar\.sync\s+0;", lambda _: skipped, ptx, count=1)


def _other_swizzle(ptx: str) -> str:
    """Of the first matrix descriptor, 64-byte rows in place of 128-byte ones."""
    found = re.search(r"(?:or|add)\.[bs]64.*, (-?\d{10,});", ptx)
    bits = int(found[1]) & ~(3 << 62) | 2 << 62
    return ptx[: found.start(1)] + str(bits - 2**64) + ptx[found.end(1) :]


_WAIT, _BARRIER, _COMMIT = r"cp\.async\.wait_group\s+(\d+)", r"bar\.sync", r"cp\.async\.commit_group"
_A = r"(mma\S+\s+\{[^}]*\}, \{ ?)(%r\d+), (%r\d+)"
_B = r"(mma\S+\s+\{[^}]*\}, \{[^}]*\}, \{ ?)(%r\d+), (%r\d+)"
_SWAPPED = r"\1\3, \2"
_GUARDED = r"@!?%p\d+ "
_TO, _STORED = r"cp\.async\.cg\S+ \[ %r\d+ \+ (\d+)", r"@%p\d+ st\.global\.v4\S+ \[ %rd\d+ \+ (\d+)"
_STORE, _NEXT = r"@%p\d+ st\.global\.v", r"shfl\.sync\.bfly.*, 1, 31,"
_KEYS, _PAGES = r"selp\.b32\s+%r\d+, 16, 0", r"selp\.b32\s+%r\d+, 4, 0"
_TURNED = r"\.trans|\.x4(?!\.trans)", ".x4.trans"
_FRESH, _FACTORS = r"wgmma\.mma.*, 0, 1, 1, 0;", r"ld\.shared\.v4\S+\s+\{.*\[%r\d+\+(\d+)\]"
_PLACE, _MOVED = r"\[\s*(%r\d+)[^\]]*\]", r"[\1+16]"

BUGS = [
    Bug("the wait for copies dropped", "causal", "sm_80", "Race", drop(_WAIT, -1, loop=True)),
    Bug("the wait lets one group more fly", "causal", "sm_80", "Race", added(_WAIT, 1, -1, loop=True)),
    Bug("a commit dropped", "causal", "sm_80", "Race", drop(_COMMIT, 0, loop=True)),
    Bug("the loop's first barrier dropped", "causal", "sm_80", "Race", drop(_BARRIER, 0, loop=True)),
    Bug("the loop's last barrier dropped", "tree", "sm_80", "Race", drop(_BARRIER, -1, loop=True)),
    Bug("the last barrier dropped", "causal", "sm_80", "Race", drop(_BARRIER, -1)),
    Bug("a barrier passed by some", "causal", "sm_80", "Divergence", _divided),
    Bug("a tile read 16 bytes on", "tree", "sm_80", "values", line(r"ldmatrix.*trans", _PLACE, _MOVED, 0, True)),
    Bug("a copy into the next rows", "causal", "sm_80", "Race", added(_TO, 2048, 0, True)),
    Bug("a load's predicate dropped", "tree", "sm_80", "NeverRead", line(r"@%p\d+ ld\.global\.v4", _GUARDED, "", -1)),
    Bug("a store's predicate dropped", "causal", "sm_80", "OutOfBounds", line(_STORE, _GUARDED, "", -1)),
    Bug("a store 8 bytes on", "causal", "sm_80", "Misaligned", added(_STORED, 8)),
    Bug("two registers of A swapped", "causal", "sm_80", "values", line(r"mma\.sync", _A, _SWAPPED, 0, True)),
    Bug("two registers of B swapped", "tree", "sm_80", "values", line(r"mma\.sync", _B, _SWAPPED, -1, True)),
    Bug("a shuffle twice as far", "tree", "sm_80", "Race", line(_NEXT, ", 1, 31,", ", 2, 31,", 0, True)),
    Bug("keys prefetched past the end", "causal", "sm_80", "NeverRead", line(_KEYS, "16, 0,", "16, 16,", 0, True)),
    Bug("pages prefetched past the end", "causal", "sm_80", "NeverRead", line(_PAGES, "4, 0,", "4, 4,", 0, True)),
    Bug("transposed where it must not be", "tree", "sm_80", "values", line("ldmatrix", *_TURNED, 0, True)),
    Bug("a difference for a sum", "causal", "sm_80", "values", line(r"add\.f32", "add", "sub", 0, True)),
    Bug("products not waited for", "tree", "sm_90", "InFlight", drop(r"wgmma\.wait_group", 0, loop=True)),
    Bug("accumulators changed without a fence", "tree", "sm_90", "InFlight", drop(r"wgmma\.fence", 0, loop=True)),
    Bug("products behind a proxy", "tree", "sm_90", "Race", drop(r"fence\.proxy\.async", 0, loop=True)),
    Bug("the wait for copies dropped on sm_90", "tree", "sm_90", "Race", drop(_WAIT, -1, loop=True)),
    Bug("the loop's first barrier dropped on sm_90", "tree", "sm_90", "Race", drop(_BARRIER, 0, loop=True)),
    Bug("another swizzle in a descriptor", "tree", "sm_90", "values", _other_swizzle),
    Bug("B taken as transposed", "tree", "sm_90", "values", line(r"wgmma\.mma.*1, 1, 1;", "1, 1, 1;", "1, 1, 0;")),
    Bug("a product on top of the last", "tree", "sm_90", "values", line(_FRESH, ", 0, 1", ", 1, 1")),
    Bug("stored page ids 16 bytes on", "causal", "sm_90", "OutOfBounds", line(r"stmatrix", _PLACE, _MOVED)),
    Bug("a barrier of a warp dropped", "narrow", "sm_90", "Race", drop(r"bar\.warp\.sync")),
    Bug("a barrier of a warp dropped on sm_80", "narrow", "sm_80", "Race", drop(r"bar\.warp\.sync")),
    Bug("a factor from the wrong place", "single", "sm_80", "values", added(_FACTORS, 16, 3)),
    Bug("a barrier dropped around plain stores", "single", "sm_90", "Race", drop(_BARRIER, 1)),
    Bug("scalars read 2 bytes on", "single", "sm_80", "Misaligned", line(r"ld\.shared\.b32.*\[%r\d+\]", r"\]", "+2]")),
]  # fmt: skip

# changes that no check can notice, and why; they are tried too, so that the reasons stay true
SURVIVORS = {
    "softmax does not change with its shift: a smaller maximum is as right while nothing overflows": Bug(
        "a maximum for a minimum", "causal", "sm_80", "nothing", line(r"max\.f32", "max", "min", 0, True)
    ),
    "rows 0 to 15 of a tile exist in every request here, so the predicate is true in every thread": Bug(
        "the first rows' predicate dropped", "tree", "sm_80", "nothing", line(r"@%p\d+ st\.global\.v", _GUARDED, "")
    ),
    "a wait for everything also waits for what is needed; it costs time, and nothing here is timed": Bug(
        "a wait for too much", "causal", "sm_80", "nothing", line(_WAIT, r"wait_group\s+\d+", "wait_group 0", -1, True)
    ),
}
