"""Registers of asynchronous warp-group products, followed along every path before anything runs."""

from __future__ import annotations

from typing import Any

from cascade_lab.evidence.ptx.faults import InFlight
from cascade_lab.evidence.ptx.parse import REGISTER


def check_products(whole: Any) -> None:
    """Hold every path of a `translate.Translation` to the rules.

    A result may be read, and any operand overwritten, only after a wait that covers its group; and an operand that
    other instructions changed needs a wgmma.fence before the product. `age` counts the groups committed since a
    register's product was issued, and is the least over all paths.

    Raises:
        InFlight: naming the register.
    """
    kernel = whole.kernel
    products = [i for i in kernel.instructions if i.opcode.startswith("wgmma.mma")]
    concerned = {r for i in products for operand in i.operands[:2] for r in REGISTER.findall(operand)}
    results = {r for i in products for r in i.writes}
    if not products:
        return
    entry: list[tuple[dict[str, int], frozenset[str]] | None] = [None] * len(whole)
    todo = [(0, {}, frozenset())]
    while todo:
        block, ages, changed = todo.pop()
        if entry[block] is not None:
            old_ages, old_changed = entry[block]
            merged = {r: min(ages.get(r, 99), old_ages.get(r, 99)) for r in {*ages, *old_ages}}
            if merged == old_ages and changed <= old_changed:
                continue
            ages, changed = merged, changed | old_changed
        entry[block] = (dict(ages), changed)
        ages, changed, falls = dict(ages), set(changed), True
        for i in whole.blocks[block]:
            if i.opcode.startswith("wgmma.mma"):
                operands = [r for operand in i.operands[:2] for r in REGISTER.findall(operand)]
                if bad := changed.intersection(operands):
                    raise InFlight(f"{min(bad)} changed and no wgmma.fence before", kernel.name, i.line, i.text)
                ages |= dict.fromkeys(operands, 0)
            elif "commit_group" in i.parts and i.parts[0] == "wgmma":
                ages = {r: min(age + 1, 9) for r, age in ages.items()}
            elif "wait_group" in i.parts and i.parts[0] == "wgmma":
                ages = {r: age for r, age in ages.items() if age <= int(i.operands[0])}
            elif i.opcode.startswith("wgmma.fence"):
                changed.clear()
            else:
                early = [r for r in i.reads if r in ages and r in results] + [r for r in i.writes if r in ages]
                if early:
                    raise InFlight(f"{early[0]} used before wgmma.wait_group", kernel.name, i.line, i.text)
                changed |= concerned.intersection(i.writes)
            if i.parts[0] == "bra":
                todo.append((whole.block_at(i.operands[0]), ages, frozenset(changed)))
            falls &= i.parts[0] not in ("bra", "ret", "exit") or i.guard is not None
        if falls and block + 1 < len(whole):
            todo.append((block + 1, ages, frozenset(changed)))
