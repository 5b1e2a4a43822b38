"""PTX text as a list of instructions, each with the line of the Triton source that it came from.

It reads the dialect that Triton's back end writes: one entry function, virtual registers declared by prefix, inline
assembly already spliced in, `.loc` lines with the source place in a comment. Registers that a piece of inline assembly
declares for itself get names of their own. It gives instructions no meaning beyond which registers they read and write;
functions, local memory and tables of branch targets are not read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from cascade_lab.evidence.ptx.faults import Unsupported

REGISTER = re.compile(r"%[a-z]+\d+\b")
# prefixes of registers that are declared in a scope of inline assembly, by their bits
_SCOPED = {1: "%ip", 16: "%ih", 32: "%iw", 64: "%id"}
_NAME = re.compile(r"(?<![%\w.$])[A-Za-z_]\w*")
# no destination register: the first operand is an address, a label or a count
_NO_RESULT = {
    "st", "red", "stmatrix", "bra", "ret", "exit", "bar", "barrier", "cp", "fence", "membar", "griddepcontrol", "trap",
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@guard opcode operands;`, at `index` in its kernel, from `line` of the Triton source."""

    index: int
    text: str
    opcode: str
    operands: tuple[str, ...]
    guard: str | None
    negated: bool
    line: str

    @cached_property
    def parts(self) -> list[str]:
        """The opcode's name and its modifiers."""
        return self.opcode.split(".")

    @cached_property
    def writes(self) -> list[str]:
        """Registers that it sets."""
        head = self.parts[0]
        if head in _NO_RESULT or not self.operands or (head == "wgmma" and "mma_async" not in self.parts):
            return []
        return REGISTER.findall(self.operands[0])

    @cached_property
    def reads(self) -> list[str]:
        """Registers that it uses, the old values of guarded and accumulated results among them."""
        used = [r for operand in self.operands[1 if self.writes else 0 :] for r in REGISTER.findall(operand)]
        if self.guard:
            used += [self.guard, *self.writes]
        if self.parts[0] == "wgmma":
            used += self.writes
        return used


@dataclass(frozen=True)
class Kernel:
    """One entry function.

    Attributes:
        parameters: names in order.
        widths: bits of the registers of each prefix, 1 for predicates.
        labels: index of the instruction that each label stands before.
        threads: of one program, all on the x axis.
    """

    name: str
    parameters: list[str]
    widths: dict[str, int]
    instructions: list[Instruction]
    labels: dict[str, int]
    threads: int

    def width(self, register: str) -> int:
        return self.widths[register.rstrip("0123456789")]


def split_operands(text: str) -> list[str]:
    """Comma-separated operands, those in braces and brackets kept whole."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip()]


def vector(operand: str) -> list[str]:
    """The members of `{a, b}`, or the operand alone."""
    return [member.strip() for member in operand.strip("{} ").split(",")]


def address(operand: str) -> tuple[str, int]:
    """Base and byte offset of `[base + offset]`."""
    found = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
    if not found:
        raise Unsupported(f"address {operand}")
    return found[1], int(found[2], 0) if found[2] else 0


def parse(ptx: str) -> Kernel:
    """Read the entry function of a PTX module.

    Raises:
        Unsupported: no entry function, or more than one.
    """
    entries = list(re.finditer(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\n\{", ptx, re.S))
    if len(entries) != 1:
        raise Unsupported(f"a module of {len(entries)} entry functions")
    (entry,) = entries
    name = entry[1]
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3])
    files = dict(re.findall(r'\.file\s+(\d+)\s+"[^"]*?([^/"]+)"', ptx))
    widths: dict[str, int] = {}
    scope: dict[str, str] = {}
    fresh = count()
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    place, unfinished = "?", ""
    for line in ptx[entry.end() :].splitlines():
        text, _, comment = line.partition("//")
        text = text.strip()
        if text.startswith(".section"):
            break
        if text.startswith(".loc"):
            number, row = text.split()[1:3]
            place = comment.strip() or f"{files.get(number, number)}:{row}"
        elif text.startswith(".reg"):
            kind, declared = re.match(r"\.reg \.(\w+)\s+(.*);", text).groups()
            width = 1 if kind == "pred" else int(kind[1:])
            for name_or_range in map(str.strip, declared.split(",")):
                prefix, _, size = name_or_range.rstrip(">").partition("<")
                if prefix.startswith("%"):
                    widths[prefix] = width
                    continue
                widths[_SCOPED[width]] = width
                for own in [f"{prefix}{k}" for k in range(int(size))] if size else [prefix]:
                    scope[own] = f"{_SCOPED[width]}{next(fresh)}"
        elif text in ("{", "}") and not unfinished:
            scope.clear()
        elif label := re.fullmatch(r"([\w$]+):", text):
            labels[label[1]] = len(instructions)
        elif text and text not in "{}" and not text.startswith("."):
            if scope:
                text = _NAME.sub(lambda found: scope.get(found[0], found[0]), text)
            *statements, unfinished = f"{unfinished} {text}".split(";")
            for statement in statements:
                instructions.append(_instruction(statement.lstrip("{} \t"), len(instructions), place))
            unfinished = unfinished.strip(" \t}")
    return Kernel(
        name,
        re.findall(rf"{name}_param_\d+", entry[2]),
        widths,
        instructions,
        labels,
        int(threads[1]) if threads else 0,
    )


def _instruction(text: str, index: int, place: str) -> Instruction:
    # 3.8 spells the default state space of shared memory out
    statement, guard, negated = text.replace("shared::cta", "shared"), None, False
    if statement.startswith("@"):
        guard, statement = statement.split(None, 1)
        negated, guard = "!" in guard, guard.strip("@!")
    opcode, *rest = statement.split(None, 1)
    return Instruction(index, text, opcode, tuple(split_operands(rest[0]) if rest else ()), guard, negated, place)
