"""How a record's fields become a request: expressions such as "usage.input_tokens + usage.cache_read_input_tokens".

An expression is a sum of terms joined by " + "; a term is a column, a dotted path into an object, `len(path)`, or a
whole number. " | " separates alternatives, of which the first that a file has is taken. A time may end in its unit, as
in "arrived_at:s": s, ms, us, ns or iso; without one it is told from the size of the number. A field that is missing or
null is a fault that names it, never 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime

from cascade_lab.traces.records import short
from cascade_lab.traces.request import MAX_TOKENS, Fault

FIELDS = {
    "input_tokens": "prompt length N, cached tokens included",
    "hit_tokens": "cached tokens H",
    "block_ids": "list of block ids, each for a block and all before it",
    "token_ids": "list of the prompt's token ids",
    "text": "the prompt as text or as messages",
    "output_tokens": "generated tokens",
    "time": "arrival",
    "session": "session or conversation",
    "model": "model",
    "tenant": "user, key, team or project",
    "requests": "number of requests that a row sums up",
    "block_size": "tokens per block id",
    "scope": "within which block ids are unique",
}
"""What a request can be read from, by the names that `--field` takes."""
UNITS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
_UNIT = re.compile(r":(s|ms|us|ns|iso)$")
_LENGTH = re.compile(r"len\((.+)\)$")
# from this magnitude on, a number can only be an epoch in that unit: 1973 in milliseconds is 1e11
_MAGNITUDES = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"))
Getter = Callable[[Mapping], object]


def lookup(record: Mapping, path: str) -> object:
    """The value of a column, or of a dotted path; None where there is none."""
    if path in record:
        return record[path]
    value: object = record
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def split_unit(expression: str) -> tuple[str, str]:
    """An expression of a time without its unit, and the unit, "" for one that is told from the number."""
    found = _UNIT.search(expression)
    return (expression[: found.start()], found[1]) if found else (expression, "")


def terms(expression: str) -> list[str]:
    """The paths that an expression reads."""
    found = [split_unit(term.strip())[0] for term in re.split(r" [+|] ", expression)]
    found = [length[1] if (length := _LENGTH.match(term)) else term for term in found]
    return [term for term in found if not term.isdecimal()]


def resolve(expression: str, record: Mapping) -> str | None:
    """The first alternative of which the record has every term; None if it has none whole."""
    alternatives = (one.strip() for one in expression.split(" | "))
    return next((one for one in alternatives if all(lookup(record, term) is not None for term in terms(one))), None)


def count(expression: str, typed: bool, low: int = 0) -> Callable[[Mapping], int]:
    """A getter of a number of tokens.

    Args:
        expression: without alternatives.
        typed: whether numbers are numbers; otherwise they are text, as in CSV.
        low: the least sum.

    Returns:
        A function that raises Fault where a term is missing, no integer or out of range.
    """
    parts = [_term(term.strip(), typed, low if " + " not in expression else 0) for term in expression.split(" + ")]
    if len(parts) == 1:
        return parts[0]

    def total(record: Mapping) -> int:
        return tokens(expression, sum(part(record) for part in parts), low)

    return total


def _term(term: str, typed: bool, low: int) -> Callable[[Mapping], int]:
    if term.isdecimal():
        return lambda record: int(term)
    if length := _LENGTH.match(term):
        path = length[1]
        return lambda record: tokens(term, len(as_list(path, _present(record, path), typed)), low)
    if not typed:
        return lambda record: tokens(term, number(_present(record, term)), low)
    if "." not in term:

        def plain(record: Mapping) -> int:
            value = record.get(term)
            if type(value) is not int or not low <= value <= MAX_TOKENS:
                return tokens(term, _present(record, term), low)
            return value

        return plain
    return lambda record: tokens(term, _present(record, term), low)


def _present(record: Mapping, path: str) -> object:
    value = lookup(record, path)
    if value is None or value == "":
        raise Fault(path, "missing" if path not in record else f"expected a value, given {short(value)}")
    return value


def present(path: str) -> Getter:
    """A getter of a value that has to be there."""
    return lambda record: _present(record, path)


def optional_count(expression: str, typed: bool) -> Callable[[Mapping], int | None]:
    """As `count`, but None where a term is missing."""
    needed, get = terms(expression), count(expression, typed)
    (plain,) = needed if len(needed) == 1 and "." not in needed[0] else ("",)

    def found(record: Mapping) -> int | None:
        if plain:
            if record.get(plain) in (None, ""):
                return None
        elif any(lookup(record, term) in (None, "") for term in needed):
            return None
        return get(record)

    return found


def label(expression: str) -> Callable[[Mapping], str | None]:
    """A getter of a name: of a session, model or tenant; None where there is none."""
    plain = "." not in expression

    def named(record: Mapping) -> str | None:
        value = record.get(expression) if plain else lookup(record, expression)
        return None if value is None or value == "" else str(value)

    return named


def as_list(path: str, value: object, typed: bool) -> list:
    """A list of a record; in CSV as JSON text."""
    if not typed and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Fault(path, f"expected a list in JSON, given {short(value)}") from None
    if type(value) is not list:
        raise Fault(path, f"expected a list of integers or strings, given {short(value)}")
    return value


def time(expression: str, typed: bool) -> Callable[[Mapping], float | None]:
    """A getter of a time in milliseconds; None where there is none."""
    path, unit = split_unit(expression)
    plain, factor = "." not in path, UNITS.get(unit)

    def milliseconds(record: Mapping) -> float | None:
        value = record.get(path) if plain else lookup(record, path)
        if value is None or value == "":
            return None
        if factor is not None and type(value) is int and -(10**18) < value < 10**18:
            return value * factor
        if not typed and isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        if isinstance(value, datetime):
            return _epoch(value)
        if isinstance(value, str):
            return _iso(path, value)
        if type(value) not in (int, float) or not -1e30 < value < 1e30:
            raise Fault(path, f"expected a finite number of {_words(unit)}, given {short(value)}")
        return float(value) * UNITS[unit or told_unit(value)]

    return milliseconds


def told_unit(value: float) -> str:
    """The unit of a time that does not say: that of an epoch by its size, else seconds."""
    return next((unit for low, unit in _MAGNITUDES if abs(value) >= low), "s")


def _words(unit: str) -> str:
    return {"ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}.get(unit, "seconds")


def _iso(path: str, text: str) -> float:
    # Azure writes seven digits of a second, of which datetime takes six
    text = re.sub(r"(\.\d{6})\d+", r"\1", text.strip())
    try:
        return _epoch(datetime.fromisoformat(text))
    except ValueError:
        raise Fault(path, f"expected a number or a date such as 2026-11-30T12:00:00Z, given {short(text)}") from None


def _epoch(moment: datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e3


def number(value: object) -> object:
    """The integer that a CSV field spells in plain digits, also as 472.0; else the text itself."""
    if not isinstance(value, str):
        return value
    digits = value.strip().removesuffix(".0")
    plain = digits.removeprefix("-")
    return int(digits) if plain.isascii() and plain.isdigit() and len(plain) < 20 else value


def tokens(name: str, value: object, low: int) -> int:
    """A number of tokens, checked."""
    if type(value) is not int or not low <= value <= MAX_TOKENS:
        raise Fault(name, f"expected an integer from {low} to {MAX_TOKENS}, given {short(value)}")
    return value
