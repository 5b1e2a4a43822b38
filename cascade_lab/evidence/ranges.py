"""The values that a notebook accepts for its parameters, and what it says of others.

A claim is made for all values of some range, so a notebook begins by refusing the rest. Each function here looks at one
rule and returns what is wrong, in the words "name: expected ..., given ...: remedy"; `accept` raises once for all. This
module knows no notebook: `book.parameters` reads types and defaults, and a rule needs only values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

__all__ = ["accept", "as_many", "multiple", "one_of", "rule", "within"]

Number = TypeVar("Number", int, float)


def accept(*findings: Sequence[str]) -> None:
    """Refuse parameters of which a rule says something.

    Args:
        findings: what `within`, `as_many`, `multiple`, `one_of` and `rule` returned.

    Raises:
        ValueError: naming every parameter that is not accepted, what was expected, what was given, and what to change.
    """
    if found := [line for lines in findings for line in lines]:
        raise ValueError("parameters: " + "; ".join(found))


def within(low: Number, high: Number | None = None, **values: Number | Sequence[Number]) -> list[str]:
    """What is wrong with numbers, or lists of numbers, of which each must lie from `low` to `high`.

    Args:
        low, high: bounds, both accepted; None for no upper one. A list must have an element.
        values: parameters by their names.
    """
    span = f"{low} or more" if high is None else f"from {low} to {high}"
    found = []
    for name, value in values.items():
        many = isinstance(value, (list, tuple))
        items, expected = (value, f"each {span}") if many else ([value], span)
        below = [x for x in items if not x >= low]
        above = [x for x in items if high is not None and not x <= high]
        found += rule(bool(items), name, f"at least one value, {expected}", value, "add one")
        if below:
            found += rule(False, name, expected, below[0], f"raise it to {low} or more")
        elif above:
            found += rule(False, name, expected, above[0], f"lower it to {high} or less")
    return found


def as_many(**lists: Sequence) -> list[str]:
    """What is wrong with lists that must have the same number of elements."""
    first, *others = lists
    size = len(lists[first])
    remedy = f"add or remove some, or change {first}"
    return [
        line
        for name in others
        for line in rule(len(lists[name]) == size, name, f"{size} values, as {first} has", lists[name], remedy)
    ]


def multiple(**pair: int) -> list[str]:
    """What is wrong with two integers of which the first must be a positive multiple of the second."""
    (name, value), (unit_name, unit) = pair.items()
    holds = unit > 0 and value > 0 and value % unit == 0
    expected = f"a positive multiple of {unit_name} = {unit}" if unit > 0 else f"a multiple of a positive {unit_name}"
    near = f"{max(1, round(value / unit)) * unit} is one" if unit > 0 else f"raise {unit_name}, given {unit}"
    return rule(holds, name, expected, value, near)


def one_of(known: Iterable[str], **values: str) -> list[str]:
    """What is wrong with texts that must be among the known ones."""
    names = list(known)
    return [
        line
        for name, value in values.items()
        for line in rule(value in names, name, f"one of {', '.join(names)}", value, "choose one of these")
    ]


def rule(holds: bool, name: str, expected: str, given: object, remedy: str) -> list[str]:
    """What is wrong with one parameter, [] if `holds`.

    Args:
        holds: whether it is accepted.
        name: of the parameter.
        expected, remedy: in a few words.
        given: its value.
    """
    shown = repr(given) if isinstance(given, (str, Collection)) else str(given)
    return [] if holds else [f"{name}: expected {expected}, given {shown}: {remedy}"]
