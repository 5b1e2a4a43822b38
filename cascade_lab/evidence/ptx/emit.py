"""The Python source of one basic block, instruction by instruction.

A register becomes a variable per form it is used in (`r12u` unsigned, `r12s` signed, `r12f` float, `p3p` predicate),
all views of the same bits. Operands of matrix products are gathered once per block and accumulators taken apart only
when somebody asks for a register; multiply-adds into one sum become one dot product. An opcode, modifier or operand
that is not listed here is an error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from cascade_lab.evidence.ptx.faults import Unsupported
from cascade_lab.evidence.ptx.parse import REGISTER, Instruction, address, vector

TYPE = re.compile(r"(?:([usbf])(8|16|32|64)|bf16|bf16x2|f16x2|pred)$")
# modifiers that are understood, by opcode; types are checked where they matter
_MODIFIERS = {
    head: set(known.split())
    for heads, known in {
        "ld": "param global shared v2 v4",
        "st": "global shared v2 v4",
        "atom red": "global gpu relaxed acq_rel add",
        "cp": "async ca cg shared global commit_group wait_group wait_all",
        "bar barrier": "sync warp",
        "fence": "proxy async shared",
        "griddepcontrol": "wait launch_dependents",
        "ldmatrix stmatrix": "sync aligned m8n8 x1 x2 x4 trans shared",
        "mma": "sync aligned m16n8k16 row col",
        "wgmma": "fence mma_async commit_group wait_group sync aligned",
        "shfl": "sync bfly idx up down",
        "redux": "sync add min max and or xor",
        "mov selp and or xor not bra ret exit": "uni",
        "setp": "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan and or xor ftz",
        "cvt": "rn rz rzi rni rmi rpi ftz e4m3x2 e5m2x2",
        "ex2 lg2 tanh rcp sqrt rsqrt abs neg": "approx rn ftz",
        "add sub fma": "rn ftz",
        "mul mad": "rn ftz lo hi wide",
        "div": "rn full approx ftz",
        "rem shl shr bfe prmt lop3": "",
        "min max": "ftz NaN relu",
        "shf": "l r wrap clamp",
    }.items()
    for head in heads.split()
}
_ORDERED = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
# each unordered comparison is the opposite of an ordered one
_UNORDERED = {"neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
_PAIRED = {"add": "np.add", "sub": "np.subtract", "mul": "np.multiply", "abs": "np.abs", "neg": "np.negative"}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_UNARY = {
    "ex2": "np.exp2({})", "lg2": "np.log2({})", "tanh": "np.tanh({})", "sqrt": "np.sqrt({})", "abs": "np.abs({})",
    "rcp": "f32(1) / {}", "rsqrt": "f32(1) / np.sqrt({})", "neg": "-{}",
}  # fmt: skip
# lanes that must act alike: a predicate on one of these is not modelled
_COLLECTIVE = {"bar", "barrier", "ldmatrix", "stmatrix", "mma", "wgmma", "shfl", "redux", "fence"}
_SHORTEST_DOT = 4
_SPECIAL = {"laneid", *(f"{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz")}
_ROUNDINGS = {"rzi": "trunc", "rni": "rint", "rmi": "floor", "rpi": "ceil"}
_VARIABLE = re.compile(r"\b(?:t|[a-z]+)\d+[usfpt]\b")


class Emitter:
    """Writes the function of one block of `whole`, the `translate.Translation` of its kernel."""

    def __init__(self, whole: Any, block: int, masked: bool, unknown: dict[str, str]) -> None:
        self.whole, self.block, self.masked, self.unknown = whole, block, masked, unknown
        self.instructions = whole.blocks[block]
        self.lines: list[str] = []
        self.forms: dict[str, set[str]] = {}
        # gathered operands by (kind, registers), and accumulators' registers that are not taken apart yet
        self.gathered: dict[tuple, str] = {}
        self.holders: dict[str, list[tuple]] = defaultdict(list)
        self.apart: dict[str, tuple[str, str, int]] = {}
        self.names = 0

    def source(self) -> str:
        mask = "mask" if self.masked else "None"
        self.lines = [
            "def block(batch, registers, mask):",
            "lanes, memory, shared = batch.lanes, batch.memory, batch.shared",
        ]
        for register in sorted(self.whole.live_in[self.block]):
            form = self.whole.form(register)
            self.forms[register] = {form}
            self.lines.append(f"{_variable(register, form)} = registers[{self.whole.slots[register]}]")
        after = self.block + 1 if self.block + 1 < len(self.whole) else -1
        ending = f"return {after}, None"
        k = 0
        while k < len(self.instructions):
            i = self.instructions[k]
            k += 1
            try:
                if i.parts[0] in ("bra", "ret", "exit"):
                    target = self.whole.block_at(i.operands[0]) if i.parts[0] == "bra" else -1
                    ending = f"return {target}, {self._guard(i) if i.guard else None}"
                elif length := self._dots(k - 1):
                    k += length - 1
                else:
                    self._one(i, mask)
            except Unsupported as error:
                self.unknown[i.opcode] = str(error)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError):
                self.unknown[i.opcode] = i.text
        self._leave()
        return "\n  ".join(_forgetting([*self.lines, ending]))

    def _leave(self) -> None:
        """Hand over what other blocks read."""
        written = dict.fromkeys(r for i in self.instructions for r in i.writes)
        for register in written:
            slot = self.whole.slots.get(register)
            if slot is None or (register not in self.forms and register not in self.apart):
                continue
            value = self.value(register, self.whole.form(register), self.whole.kernel.width(register))
            old = f"registers[{slot}]"
            self.lines.append(f"{old} = where(mask, {value}, {old})" if self.masked else f"{old} = {value}")

    def _one(self, i: Instruction, mask: str) -> None:
        head = i.parts[0]
        known = _MODIFIERS.get(head)
        if known is None:
            raise Unsupported("")
        for part in i.parts[1:]:
            if part not in known and not TYPE.match(part) and not (head == "wgmma" and part.startswith("m64n")):
                raise Unsupported(f"modifier .{part}")
        guard = self._guard(i) if i.guard else None
        if guard and (head in _COLLECTIVE or "group" in i.opcode):
            raise Unsupported(f"{i.text} under a predicate")
        taking = mask if guard is None else f"(mask & {guard})" if self.masked else guard
        getattr(self, f"_{head}")(i, guard, taking)

    # registers and constants

    def value(self, operand: str, form: str, width: int) -> str:
        """A variable or constant that holds `operand` in this form; a wider register gives its low bits."""
        if not operand.startswith("%"):
            return self._constant(operand, form, width)
        if not REGISTER.fullmatch(operand):
            if operand[1:] not in _SPECIAL:
                raise Unsupported(f"special register {operand}")
            return f"lanes.special[{operand[1:]!r}]"
        if operand in self.apart:
            taker, tile, k = self.apart.pop(operand)
            self.forms[operand] = {"f"}
            self.lines.append(f"{_variable(operand, 'f')} = {taker}({tile}, {k})")
        forms, own = self.forms.setdefault(operand, {self.whole.form(operand)}), self.whole.kernel.width(operand)
        if own != width:
            narrow = f"{self.value(operand, 'u', own)}.astype(u{width})"
            return narrow if form == "u" else f"{narrow}.view({form}{width})"
        if form not in forms:
            other = _variable(operand, next(iter(forms)))
            self.lines.append(f"{_variable(operand, form)} = {other}.view({form}{width})")
            forms.add(form)
        return _variable(operand, form)

    def _constant(self, text: str, form: str, width: int) -> str:
        if text == "global_smem":
            return self.whole.constant(0, form, width)
        if found := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]{8}|[0-9A-Fa-f]{16})", text):
            if len(found[1]) * 4 != width:
                raise Unsupported(f"constant {text} of {width} bits")
            return self.whole.constant(int(found[1], 16), form, width)
        number = int(text.rstrip("U"), 0)
        return self.whole.constant(int(number != 0) if form == "p" else number, form, width)

    def values(self, operand: str, form: str, width: int) -> str:
        return f"[{', '.join(self.value(member, form, width) for member in vector(operand))}]"

    def assign(self, register: str, form: str, width: int, expression: str, guard: str | None) -> None:
        """Set a register, extended to its width by the form's sign; masked-off lanes of a guard keep the old value."""
        if register == "_":
            return
        own = self.whole.kernel.width(register)
        if own != width:
            expression, width = f"({expression}).astype({form}{own})", own
        if guard:
            expression = f"where({guard}, {expression}, {self.value(register, form, width)})"
        self.lines.append(f"{_variable(register, form)} = {expression}")
        self._changed(register)
        self.forms[register] = {form}

    def _changed(self, register: str) -> None:
        self.apart.pop(register, None)
        for key in self.holders.pop(register, ()):
            self.gathered.pop(key, None)

    def _guard(self, i: Instruction) -> str:
        predicate = self.value(i.guard, "p", 1)
        return f"~{predicate}" if i.negated else predicate

    def _name(self) -> str:
        self.names += 1
        return f"t{self.names}t"

    def _gather(self, key: tuple, expression: Callable[[], str]) -> str:
        """The variable of a gathered operand, computed where it is first needed; the key's last part is registers."""
        if key not in self.gathered:
            value, name = expression(), self._name()
            self.lines.append(f"{name} = {value}")
            self._hold(key, name)
        return self.gathered[key]

    def _hold(self, key: tuple, name: str) -> None:
        self.gathered[key] = name
        for register in key[-1]:
            self.holders[register].append(key)

    # memory

    def _ld(self, i: Instruction, guard: str | None, taking: str) -> None:
        kind, width = _numeric(i.parts[-1])
        if "param" in i.parts:
            name = i.operands[1].strip("[] ")
            if name not in self.whole.kernel.parameters:
                raise Unsupported(i.text)
            kind = "s" if kind == "s" else "u"
            self.assign(i.operands[0], kind, width, f"batch.parameters[{name!r}].view({kind}{width})", guard)
            return
        registers, (base, offset) = vector(i.operands[0]), address(i.operands[1])
        kept = [self.value(r, "u", width) if guard else self.whole.constant(0, "u", width) for r in registers]
        space, bits = ("memory", 64) if "global" in i.parts else ("shared", 32)
        owner = "lanes, " if space == "memory" else ""
        where_from = f"{self.value(base, 'u', bits)}, {offset}, {len(registers) * width // 8}"
        loaded = self._name()
        self.lines.append(f"{loaded} = {space}.load({owner}{i.index}, {where_from}, {taking}, [{', '.join(kept)}])")
        for k, register in enumerate(registers):
            signed = kind == "s" and self.whole.kernel.width(register) != width
            view = f".view(s{width})" if signed else ""
            self.assign(register, "s" if signed else "u", width, f"{loaded}[{k}]{view}", None)

    def _st(self, i: Instruction, guard: str | None, taking: str) -> None:
        width = _numeric(i.parts[-1])[1]
        base, offset = address(i.operands[0])
        space, bits, owner = ("memory", 64, "lanes, ") if "global" in i.parts else ("shared", 32, "")
        values = self.values(i.operands[1], "u", width)
        size = len(vector(i.operands[1])) * width // 8
        base = self.value(base, "u", bits)
        self.lines.append(f"{space}.store({owner}{i.index}, {base}, {offset}, {size}, {taking}, {values})")

    def _atom(self, i: Instruction, guard: str | None, taking: str) -> None:
        kind, width = _numeric(i.parts[-1])
        if "add" not in i.parts or kind == "f":
            raise Unsupported("")
        where_to, value = i.operands[-2:]
        base, offset = address(where_to)
        base, (value,) = self.value(base, "u", 64), vector(value)
        value = self.value(value, "u", width)
        before = f"memory.add_atomically(lanes, {i.index}, {base}, {offset}, {width // 8}, {taking}, {value})"
        if i.parts[0] == "atom":
            self.assign(vector(i.operands[0])[0], "u", width, before, guard)
        else:
            self.lines.append(before)

    _red = _atom

    def _cp(self, i: Instruction, guard: str | None, taking: str) -> None:
        if "commit_group" in i.parts:
            self.lines.append(f"shared.commit_copies({taking})")
        elif "wait_group" in i.parts:
            self.lines.append(f"shared.wait_copies({i.index}, {int(i.operands[0])}, {taking})")
        elif "wait_all" in i.parts:
            self.lines += [f"shared.commit_copies({taking})", f"shared.wait_copies({i.index}, 0, {taking})"]
        else:
            (to, to_offset), (source, offset) = address(i.operands[0]), address(i.operands[1])
            places = f"{self.value(to, 'u', 32)}, {to_offset}, {self.value(source, 'u', 64)}, {offset}"
            size = self.value(i.operands[3], "u", 32) if len(i.operands) > 3 else None
            self.lines.append(f"shared.copy({i.index}, memory, {places}, {int(i.operands[2], 0)}, {size}, {taking})")

    # order

    def _bar(self, i: Instruction, guard: str | None, taking: str) -> None:
        if i.opcode == "bar.warp.sync" and i.operands in (("-1",), ("0xffffffff",)):
            self.lines.append(f"shared.warp_barrier({i.index}, {taking})")
            return
        if i.operands != ("0",):
            raise Unsupported(i.text)
        self.lines.append(f"shared.barrier({i.index}, {taking})")

    _barrier = _bar

    def _fence(self, i: Instruction, guard: str | None, taking: str) -> None:
        if i.opcode != "fence.proxy.async.shared":
            raise Unsupported("")
        self.lines.append(f"shared.fence({taking})")

    def _griddepcontrol(self, i: Instruction, guard: str | None, taking: str) -> None:
        """Order between launches, which run one after another here."""

    # warps

    def _ldmatrix(self, i: Instruction, guard: str | None, taking: str) -> None:
        registers, (base, offset) = vector(i.operands[0]), address(i.operands[1])
        if i.parts[-1] != "b16":
            raise Unsupported("")
        base, tiles = self.value(base, "u", 32), self._name()
        transposed = "trans" in i.parts
        self.lines.append(
            f"{tiles} = shared.load_matrix({i.index}, {base}, {offset}, {len(registers)}, {transposed}, {taking})"
        )
        for k, register in enumerate(registers):
            self.assign(register, "u", 32, f"{tiles}[{k}]", None)

    def _stmatrix(self, i: Instruction, guard: str | None, taking: str) -> None:
        if i.parts[-1] != "b16":
            raise Unsupported("")
        base, offset = address(i.operands[0])
        base, values, transposed = self.value(base, "u", 32), self.values(i.operands[1], "u", 32), "trans" in i.parts
        self.lines.append(f"shared.store_matrix({i.index}, {base}, {offset}, {values}, {transposed}, {taking})")

    def _mma(self, i: Instruction, guard: str | None, taking: str) -> None:
        kind = i.parts[-2]
        if i.parts[3:] != ["m16n8k16", "row", "col", "f32", kind, kind, "f32"] or kind not in ("bf16", "f16"):
            raise Unsupported("")
        d, a, b, c = (tuple(vector(operand)) for operand in i.operands)
        left = self._gather(
            ("a", kind, a), lambda: f"operand_a(lanes, {self.values(i.operands[1], 'u', 32)}, {kind!r})"
        )
        right = self._gather(
            ("b", kind, b), lambda: f"operand_b(lanes, {self.values(i.operands[2], 'u', 32)}, {kind!r})"
        )
        added = self._gather(("c", c), lambda: f"accumulator(lanes, {self.values(i.operands[3], 'f', 32)})")
        self._accumulate(d, "c", "accumulated", f"multiply(lanes, {i.index}, {left}, {right}, {added}, {taking})")

    def _wgmma(self, i: Instruction, guard: str | None, taking: str) -> None:
        if "commit_group" in i.parts:
            self.lines.append(f"shared.commit_products({taking})")
        elif "wait_group" in i.parts:
            self.lines.append(f"shared.wait_products({int(i.operands[0])}, {taking})")
        elif "mma_async" in i.parts:
            kind, columns = i.parts[-1], int(re.fullmatch(r"m64n(\d+)k16", i.parts[4])[1])
            d, a, descriptor, keep, *signs, transposed = i.operands
            d, a = tuple(vector(d)), tuple(vector(a))
            if i.parts[5:] != ["f32", kind, kind] or kind not in ("bf16", "f16") or signs != ["1", "1"] or len(a) != 4:
                raise Unsupported(re.sub(r"\{.*?\}", "{..}", i.text))
            keep, descriptor = self.value(keep, "p", 1), self.value(descriptor, "u", 64)
            left = self._gather(
                ("A", kind, a), lambda: f"group_operand(lanes, {self.values(i.operands[1], 'u', 32)}, {kind!r})"
            )
            added = self._gather(("C", d), lambda: f"group_accumulator(lanes, {self.values(i.operands[0], 'f', 32)})")
            right = self._name()
            self.lines.append(
                f"{right} = halves(shared.descriptor_tile({i.index}, {descriptor}, {columns}, {transposed == '1'}, "
                f"{taking}), {kind!r})"
            )
            self._accumulate(d, "C", "group_accumulated", f"group_multiply({left}, {right}, {added}, {keep})")

    def _accumulate(self, registers: tuple[str, ...], kind: str, taker: str, expression: str) -> None:
        """A product's result, taken apart when a register is read."""
        tile = self._name()
        self.lines.append(f"{tile} = {expression}")
        for k, register in enumerate(registers):
            self._changed(register)
            self.forms.pop(register, None)
            self.apart[register] = (taker, tile, k)
        self._hold((kind, registers), tile)

    def _shfl(self, i: Instruction, guard: str | None, taking: str) -> None:
        if i.operands[-1] not in ("-1", "0xffffffff"):
            raise Unsupported(i.text)
        result, *exists = (part.strip() for part in i.operands[0].split("|"))
        values = ", ".join(self.value(operand, "u", 32) for operand in i.operands[1:4])
        both = self._name()
        self.lines.append(f"{both} = shuffle(lanes, {i.index}, {i.parts[2]!r}, {values}, {taking})")
        self.assign(result, "u", 32, f"{both}[0]", None)
        for predicate in exists:
            self.assign(predicate, "p", 1, f"{both}[1]", None)

    def _redux(self, i: Instruction, guard: str | None, taking: str) -> None:
        if i.parts[-1] not in ("s32", "u32", "b32"):
            raise Unsupported(i.text)
        form = i.parts[-1][0].replace("b", "u")
        values, members = self.value(i.operands[1], form, 32), self.value(i.operands[2], "u", 32)
        expression = f"reduce(lanes, {i.index}, {i.parts[2]!r}, {values}, {members}, {taking})"
        self.assign(i.operands[0], form, 32, expression, None)

    def _dots(self, start: int) -> int:
        """A run of multiply-adds as dot products, where one adds to another: how many instructions, or 0 for none."""
        chains: list[list[Instruction]] = []
        open_at: dict[str, list[Instruction]] = {}
        factors: set[str] = set()
        starts: set[str] = set()
        length = 0
        for i in self.instructions[start:]:
            if i.opcode != "fma.rn.f32" or i.guard:
                break
            result, *pair, added = i.operands
            # the run is computed at its end: no result may be a factor, before or after
            if result in factors or not open_at.keys().isdisjoint(pair):
                break
            if added in open_at and (added == result or self.whole.uses[added] == 1):
                chain = open_at.pop(added)
            elif added in open_at or result in open_at or (result in starts and result != added):
                break
            else:
                chains.append(chain := [])
                starts.add(added)
            chain.append(i)
            open_at[result] = chain
            factors.update(pair)
            length += 1
        if not any(len(chain) >= _SHORTEST_DOT for chain in chains):
            return 0
        for chain in chains:
            added = self.value(chain[0].operands[3], "f", 32)
            if len(chain) < _SHORTEST_DOT:
                for i in chain:
                    self._add(i, None, "")
                continue
            rows = [self._rows(tuple(i.operands[side] for i in chain)) for side in (1, 2)]
            self.assign(chain[-1].operands[0], "f", 32, f"dot({rows[0]}, {rows[1]}, {added})", None)
        return length

    def _rows(self, registers: tuple[str, ...]) -> str:
        def stacked() -> str:
            return f"stack(lanes.count, [{', '.join(self.value(register, 'f', 32) for register in registers)}])"

        return self._gather(("rows", registers), stacked)

    # one lane

    def _mov(self, i: Instruction, guard: str | None, taking: str) -> None:
        to, source = i.operands
        kind, width = _numeric(i.parts[-1])
        if to.startswith("{"):
            parts = vector(to)
            each, whole = width // len(parts), self.value(source, "u", width)
            for k, part in enumerate(parts):
                shift = self.whole.constant(k * each, "u", width)
                self.assign(part, "u", each, f"({whole} >> {shift}).astype(u{each})", guard)
        elif source.startswith("{"):
            parts = vector(source)
            each = width // len(parts)
            joined = " | ".join(
                f"{self.value(part, 'u', each)}.astype(u{width}) << {self.whole.constant(k * each, 'u', width)}"
                for k, part in enumerate(parts)
            )
            self.assign(to, "u", width, joined, guard)
        else:
            form = "p" if kind == "p" else "u"
            if REGISTER.fullmatch(source) and form == "u" and source not in self.apart:
                form = next(iter(self.forms.get(source, {self.whole.form(source)})))
            self.assign(to, form, width, self.value(source, form, width), guard)

    def _selp(self, i: Instruction, guard: str | None, taking: str) -> None:
        kind, width = _numeric(i.parts[-1])
        kind = "f" if kind == "f" else "u"
        yes, no = (self.value(operand, kind, width) for operand in i.operands[1:3])
        self.assign(i.operands[0], kind, width, f"where({self.value(i.operands[3], 'p', 1)}, {yes}, {no})", guard)

    def _setp(self, i: Instruction, guard: str | None, taking: str) -> None:
        if i.parts[-1] == "f16x2":
            a, b = (self.value(operand, "u", 32) for operand in i.operands[1:])
            for k, predicate in enumerate(i.operands[0].split("|")):
                self.assign(predicate, "p", 1, f"half({a}, {k}) {_ORDERED[i.parts[1]]} half({b}, {k})", guard)
            return
        kind, width = _numeric(i.parts[-1])
        comparison, a, b = i.parts[1], *(self.value(operand, kind, width) for operand in i.operands[1:3])
        if comparison in ("num", "nan"):
            test = f"np.isnan({a}) | np.isnan({b})"
            test = f"({test})" if comparison == "nan" else f"~({test})"
        elif comparison == "ne":
            test = f"(({a} < {b}) | ({a} > {b}))" if kind == "f" else f"({a} != {b})"
        elif comparison == "equ":
            test = f"~(({a} < {b}) | ({a} > {b}))"
        elif comparison in _UNORDERED:
            test = f"~({a} {_UNORDERED[comparison]} {b})"
        else:
            test = f"({a} {_ORDERED[comparison]} {b})"
        if len(i.operands) > 3:
            other = i.operands[3]
            test += f" {_LOGIC[i.parts[2]]} {'~' * other.startswith('!')}{self.value(other.lstrip('!'), 'p', 1)}"
        self.assign(i.operands[0], "p", 1, test, guard)

    def _and(self, i: Instruction, guard: str | None, taking: str) -> None:
        kind, width = _numeric(i.parts[-1])
        kind = "p" if kind == "p" else "u"
        a, b = (self.value(operand, kind, width) for operand in i.operands[1:3])
        self.assign(i.operands[0], kind, width, f"{a} {_LOGIC[i.parts[0]]} {b}", guard)

    _or = _xor = _and

    def _not(self, i: Instruction, guard: str | None, taking: str) -> None:
        kind, width = _numeric(i.parts[-1])
        kind = "p" if kind == "p" else "u"
        self.assign(i.operands[0], kind, width, f"~{self.value(i.operands[1], kind, width)}", guard)

    def _cvt(self, i: Instruction, guard: str | None, taking: str) -> None:
        to, source = i.parts[-2:]
        rounding = i.parts[1] if len(i.parts) > 3 else ""
        result, *operands = i.operands
        if to in ("bf16x2", "f16x2", "bf16", "f16") and source == "f32" and rounding == "rn":
            bits = [f"to_{to.removesuffix('x2')}({self.value(operand, 'f', 32)})" for operand in operands]
            if len(bits) == 2:
                self.assign(result, "u", 32, f"{bits[0]} << {self.whole.constant(16, 'u', 32)} | {bits[1]}", guard)
            else:
                self.assign(result, "u", 16, f"{bits[0]}.astype(u16)", guard)
        elif to == "f16x2" and source in ("e4m3x2", "e5m2x2"):
            self.assign(result, "u", 32, f"float8_to_f16({self.value(operands[0], 'u', 16)}, {source[1]})", guard)
        elif (to, source, rounding) in (("bf16", "f16", ""), ("bf16", "f16", "rn")):
            wide = f"{self.value(operands[0], 'f', 16)}.astype(f32)"
            self.assign(result, "u", 16, f"to_bf16({wide}).astype(u16)", guard)
        elif (to, source) == ("f32", "bf16"):
            half = f"{self.value(operands[0], 'u', 16)}.astype(u32)"
            self.assign(result, "f", 32, f"({half} << {self.whole.constant(16, 'u', 32)}).view(f32)", guard)
        else:
            (kind, width), (from_kind, from_width) = _numeric(to), _numeric(source)
            value = self.value(operands[0], from_kind, from_width)
            if from_kind == "f" and kind != "f":
                value = f"np.{_ROUNDINGS[rounding]}({value})"
            elif rounding not in ("", "rn") or (from_kind == "f" and from_width > width):
                raise Unsupported("")
            self.assign(result, kind, width, f"{value}.astype({kind}{width})", guard)

    def _pair(self, i: Instruction, guard: str | None) -> None:
        """One operation on two float16 in a register."""
        words = ", ".join(self.value(operand, "u", 32) for operand in i.operands[1:])
        self.assign(i.operands[0], "u", 32, f"half2({_PAIRED[i.parts[0]]}, {words})", guard)

    def _ex2(self, i: Instruction, guard: str | None, taking: str) -> None:
        if i.parts[-1] == "f16x2" and i.parts[0] in _PAIRED:
            self._pair(i, guard)
            return
        kind, width = _numeric(i.parts[-1])
        if (
            kind == "f"
            and width != 32
            and (width != 16 or i.parts[0] not in _PAIRED)
            or kind == "u"
            or kind == "s"
            and i.parts[0] not in ("neg", "abs")
        ):
            raise Unsupported("")
        operand = self.value(i.operands[1], kind, width)
        self.assign(i.operands[0], kind, width, _UNARY[i.parts[0]].format(operand), guard)

    _lg2 = _tanh = _rcp = _sqrt = _rsqrt = _abs = _neg = _ex2

    def _add(self, i: Instruction, guard: str | None, taking: str) -> None:
        """add, sub, mul, mad, fma, div, rem, min, max of every type."""
        if i.parts[-1] == "f16x2" and i.parts[0] in _PAIRED:
            self._pair(i, guard)
            return
        head, parts = i.parts[0], i.parts
        kind, width = _numeric(parts[-1])
        if kind == "f" and width != 32 and (width != 16 or head not in _PAIRED):
            raise Unsupported("")
        if kind != "f" and ("wide" in parts or "hi" in parts or head in ("div", "rem", "min", "max")):
            pass
        elif kind != "f":
            kind = "u"
        a, b, *rest = (self.value(operand, kind, width) for operand in i.operands[1:3])
        result = width
        if "wide" in parts:
            result = 2 * width
            a, b = f"{a}.astype({kind}{result})", f"{b}.astype({kind}{result})"
        if len(i.operands) > 3:
            rest = [self.value(i.operands[3], kind, result)]
        if kind == "f":
            smaller, larger = ("np.minimum", "np.maximum") if "NaN" in parts else ("np.fmin", "np.fmax")
        else:
            smaller, larger = "np.minimum", "np.maximum"
        product = f"high_product({a}, {b})" if "hi" in parts else f"{a} * {b}"
        expression = {
            "add": f"{a} + {b}", "sub": f"{a} - {b}", "mul": product, "mad": f"{product} + {''.join(rest)}",
            "fma": f"fma({a}, {b}, {''.join(rest)})", "min": f"{smaller}({a}, {b})", "max": f"{larger}({a}, {b})",
            "div": f"{a} / {b}" if kind == "f" else f"quotient({a}, {b})", "rem": f"remainder({a}, {b})",
        }[head]  # fmt: skip
        if "relu" in parts:
            expression = f"{larger}({expression}, {self.whole.constant(0, kind, width)})"
        self.assign(i.operands[0], kind, result, expression, guard)

    _sub = _mul = _mad = _fma = _div = _rem = _min = _max = _add

    def _shl(self, i: Instruction, guard: str | None, taking: str) -> None:
        kind, width = _numeric(i.parts[-1])
        kind = "s" if kind == "s" and i.parts[0] == "shr" else "u"
        a, by = self.value(i.operands[1], kind, width), i.operands[2]
        if not by.startswith("%") and int(by, 0) < width:
            expression = f"{a} {'<<' if i.parts[0] == 'shl' else '>>'} {self.whole.constant(int(by, 0), kind, width)}"
        else:
            name = "shift_left" if i.parts[0] == "shl" else "shift_right"
            expression = f"{name}({a}, {self.value(by, 'u', 32)}, {width})"
        self.assign(i.operands[0], kind, width, expression, guard)

    _shr = _shl

    def _bfe(self, i: Instruction, guard: str | None, taking: str) -> None:
        kind, width = _numeric(i.parts[-1])
        start, length = (self.value(operand, "u", 32) for operand in i.operands[2:4])
        self.assign(
            i.operands[0], kind, width, f"extract({self.value(i.operands[1], kind, width)}, {start}, {length})", guard
        )

    def _prmt(self, i: Instruction, guard: str | None, taking: str) -> None:
        if i.parts[1:] != ["b32"]:
            raise Unsupported("")
        words = ", ".join(self.value(operand, "u", 32) for operand in i.operands[1:4])
        self.assign(i.operands[0], "u", 32, f"permute({words})", guard)

    def _lop3(self, i: Instruction, guard: str | None, taking: str) -> None:
        words = ", ".join(self.value(operand, "u", 32) for operand in i.operands[1:4])
        self.assign(i.operands[0], "u", 32, f"logic({words}, {int(i.operands[4], 0)})", guard)

    def _shf(self, i: Instruction, guard: str | None, taking: str) -> None:
        words = ", ".join(self.value(operand, "u", 32) for operand in i.operands[1:4])
        self.assign(i.operands[0], "u", 32, f"funnel({words}, {'l' in i.parts}, {'wrap' in i.parts})", guard)


def _numeric(name: str) -> tuple[str, int]:
    """Form and width of a type; b32 is taken as unsigned."""
    if name == "pred":
        return "p", 1
    found = TYPE.match(name)
    if not found or not found[1]:
        raise Unsupported(f"type .{name}")
    return {"b": "u"}.get(found[1], found[1]), int(found[2])


def _variable(register: str, form: str) -> str:
    return register[1:] + form


def _forgetting(lines: list[str]) -> list[str]:
    """The lines with each variable deleted after its last use: its memory is used again while it is in cache."""
    last = {name: k for k, line in enumerate(lines) for name in _VARIABLE.findall(line)}
    dead = defaultdict(list)
    for name, k in last.items():
        dead[k].append(name)
    result = []
    for k, line in enumerate(lines):
        result.append(line)
        if dead[k] and not line.startswith("return"):
            result.append(f"del {', '.join(dead[k])}")
    return result
