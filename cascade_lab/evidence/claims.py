"""A claim is a sentence with two numbers: what was measured and what the derivation expects.

It holds iff |measured - expected| <= tol, exactly equal for tol = 0; NaN never holds. Every claim names the
instrument that took the measurement, and leaves one output that a reader, nbval and the runner all read. This
module judges and records; it measures nothing.

The output is text that machines compare, so a measured number is shown as precisely as all machines agree on it:

- integers, fractions and texts, and what is expected exactly, whole;
- floats that are derived or recorded to four digits, or to the decimals of the tolerance;
- an error, which is less than 1e-3, by a power of ten above twice its size, "below 1e-6";
- another float of the oracle or a counter to two digits, "about 0.031";
- either by the `magnitude` that the claim names, where the next machine may show another one;
- a time by the bound that it keeps.

The raw numbers go to claims.json.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real
from typing import Any, Literal

from cascade_lab.files import one_line

__all__ = ["AtLeast", "AtMost", "Claim", "INSTRUMENTS", "VERDICTS", "claim", "claims_table"]

MIME = "application/vnd.cascade-lab.claim+json"
Instrument = Literal["derived", "oracle", "counted", "timed", "recorded"]
INSTRUMENTS: tuple[Instrument, ...] = ("derived", "oracle", "counted", "timed", "recorded")
"""What measured: exact arithmetic, the float64 oracle, a counter, a clock, or a stored measurement."""
HOLDS, FAILS, NOT_MEASURED = "holds", "fails", "not measured here"
VERDICTS = (HOLDS, FAILS, NOT_MEASURED)
"""What a claim may come to."""
COLUMNS = ("id", "statement", "instrument", "expected", "measured", "verdict")

_MACHINE_BOUND = ("timed", "recorded")
# a recorder that watches one mode alone counts nothing in the others
_MAY_BE_ABSENT = ("timed", "recorded", "counted")
NOISE = 1e-12
"""Below this a float that should be exact is rounding, which no two mathematics libraries share."""
_claims_here: dict[str, Claim] = {}


@dataclass(frozen=True)
class AtMost:
    """An expected upper bound: holds iff measured <= bound.

    Example:
        >>> from cascade_lab.evidence.claims import AtMost, claim
        >>> claim("1.1", "rounding of a merge", measured=3e-7, expected=AtMost(1e-6))
        1.1 holds: rounding of a merge (oracle: expected at most 1e-6, measured below 1e-6)
    """

    bound: int | float | Fraction

    def __str__(self) -> str:
        return f"at most {_text(self.bound)}"


@dataclass(frozen=True)
class AtLeast:
    """An expected lower bound: holds iff measured >= bound.

    Example:
        >>> from cascade_lab.evidence.claims import AtLeast, claim
        >>> claim("1.2", "reads saved", measured=8020 - 2020, expected=AtLeast(5000), instrument="counted")
        1.2 holds: reads saved (counted: expected at least 5000, measured 6000)
    """

    bound: int | float | Fraction

    def __str__(self) -> str:
        return f"at least {_text(self.bound)}"


@dataclass(frozen=True)
class Claim:
    """One judged claim.

    `expected` and `measured` are texts that are the same on every machine. `raw_expected` and `raw_measured` are JSON
    values (a Fraction is written "p/q", a non-finite float as text), None where only the text is known.

    Example:
        >>> from cascade_lab.evidence.claims import Claim
        >>> Claim("1.3", "pairs left", "derived", "26", "26", "holds").line
        '1.3 holds: pairs left (derived: expected 26, measured 26)'
    """

    id: str
    statement: str
    instrument: str
    expected: str
    measured: str | None
    verdict: str
    raw_expected: object = None
    raw_measured: object = None

    @property
    def line(self) -> str:
        """The claim in one line, stable between machines."""
        return f"{self.id} {self.verdict}: {self.detail}"

    @property
    def detail(self) -> str:
        """Statement, instrument, expected and measured in one line."""
        found = "" if self.measured is None else f", measured {self.measured}"
        return f"{self.statement} ({self.instrument}: expected {self.expected}{found})"

    def record(self, notebook: str) -> dict[str, object]:
        """The claim as an object of claims.json: numbers as measured on this machine where they are known."""
        return {
            "id": self.id,
            "notebook": notebook,
            "statement": self.statement,
            "instrument": self.instrument,
            "expected": self.expected if self.raw_expected is None else self.raw_expected,
            "measured": self.measured if self.raw_measured is None else self.raw_measured,
            "verdict": self.verdict,
        }


def claim(
    id: str,
    statement: str,
    *,
    measured: object,
    expected: object,
    tol: float | Fraction = 0,
    instrument: Instrument = "oracle",
    magnitude: float | None = None,
    reason: str = "",
) -> None:
    """Assert that `measured` is `expected` within `tol`, and leave one output that says so.

    In a notebook the output carries the claim as JSON and as one line of text; elsewhere the line is
    printed. The raw numbers stand in the output's metadata only, so that the visible text can be compared
    (the module says how it is rounded).

    Args:
        id: short name without spaces, unique in the notebook.
        statement: one sentence, plain text on one line.
        measured: bool, int, Fraction, float, str, a list or tuple of these, or a torch or NumPy value of one
            element. None says that this machine, or this mode of Triton, cannot measure it; only for "timed",
            "recorded" and "counted".
        expected: as `measured`, or AtMost(x), AtLeast(x). Texts and truth values are compared with their
            own kind.
        tol: absolute bound, element by element in sequences; 0 asks for exact equality.
        instrument: "derived" (exact arithmetic), "oracle" (float64), "counted" (read counter, load
            recorder or operating system), "timed" (a clock on this machine), "recorded" (a stored measurement).
        magnitude: the round number, twice the error or more, under which the error is shown to lie. For errors of
            which another machine's would lie beyond the next power of ten. For AtLeast the round number that the
            measured one is shown to exceed.
        reason: why a bound or tolerance is as wide as it is, or why nothing was measured here, one line; shown with
            the claim.

    Raises:
        AssertionError: the claim fails; the output with verdict "fails" has been left before.
        TypeError, ValueError: the claim cannot be judged, for example an array of many elements, or a truth
            value against a number.

    Example:
        >>> from cascade_lab.evidence.claims import claim
        >>> claim("1.4", "pairs left", measured=cl.interactions(8, 4), expected=5 + 6 + 7 + 8, instrument="derived")
        1.4 holds: pairs left (derived: expected 26, measured 26)
        >>> claim("1.5", "pairs left", measured=cl.interactions(8, 4), expected=36, instrument="derived")
        Traceback (most recent call last):
            ...
        AssertionError: claim 1.5 fails: pairs left: measured 26, expected 36 (derived)
    """
    if not isinstance(id, str) or not re.fullmatch(r"\S+", id):
        raise ValueError(f"id: expected a name without spaces, given {id!r}")
    if not isinstance(statement, str) or not statement.strip() or len(statement.splitlines()) != 1:
        raise ValueError(f"claim {id}: statement: expected one line of text, given {statement!r}")
    if instrument not in INSTRUMENTS:
        raise ValueError(f"claim {id}: instrument: expected one of {INSTRUMENTS}, given {instrument!r}")
    bounded = isinstance(expected, (AtMost, AtLeast))
    wanted = _value(expected.bound if bounded else expected, f"claim {id}: expected")
    if bounded and (not _is_number(wanted) or math.isnan(wanted)):
        raise TypeError(f"claim {id}: expected: a bound is a number, given {wanted!r}")
    tol = _value(tol, f"claim {id}: tol")
    if not _is_number(tol) or not 0 <= tol < math.inf:
        raise ValueError(f"claim {id}: tol: expected a finite number >= 0, given {tol!r}")
    if bounded and tol:
        raise ValueError(f"claim {id}: tol: a bound takes none, given {tol!r}")
    if magnitude is not None and not (_is_number(magnitude) and 0 < magnitude < math.inf and (bounded or tol)):
        raise ValueError(
            f"claim {id}: magnitude: expected a number > 0 beside a tolerance or bound, given {magnitude!r}"
        )
    if not isinstance(reason, str) or len(reason.splitlines()) > 1:
        raise ValueError(f"claim {id}: reason: expected one line of text, given {reason!r}")

    # A bound or a tolerance is only whole as text.
    raw_expected = None if bounded or tol else _json(wanted)
    expected_text = str(type(expected)(wanted)) if bounded else _text(wanted)
    if tol:
        expected_text += f" ± {_text(tol)}"
    if measured is None:
        if instrument not in _MAY_BE_ABSENT:
            raise ValueError(
                f"claim {id}: measured: None is for {', '.join(_MAY_BE_ABSENT)} claims, given instrument {instrument!r}"
            )
        judged = Claim(id, statement, instrument, expected_text, None, NOT_MEASURED, raw_expected)
    else:
        found = _value(measured, f"claim {id}: measured")
        judge = type(expected)(wanted) if bounded else wanted
        holds = _agrees(found, judge, tol, f"claim {id}")
        measured_text = _shown(found, judge, tol, instrument, magnitude) if holds else _text(found)
        verdict = HOLDS if holds else FAILS
        judged = Claim(id, statement, instrument, expected_text, measured_text, verdict, raw_expected, _json(found))

    _claims_here[id] = judged
    raw = {"expected": judged.raw_expected, "measured": judged.raw_measured}
    of = "Reason" if judged.verdict == NOT_MEASURED else "Bound"
    why = f" {of}: {reason}." if reason else ""
    line = _markdown_line(judged) + _escape(why)
    data = {MIME: {name: getattr(judged, name) for name in COLUMNS}, "text/markdown": line}
    _show(data, judged.line + why, {MIME: raw})
    if judged.verdict == FAILS:
        raise AssertionError(
            f"claim {id} fails: {statement}: measured {_text(found)}, expected {expected_text} ({instrument})"
        )


def claims_table() -> None:
    """Show the claims judged so far in this process as one table, each id with its latest verdict.

    Example:
        >>> from cascade_lab.evidence.claims import claim, claims_table
        >>> claim("1.6", "pairs left", measured=cl.interactions(8, 4), expected=26, instrument="derived")
        1.6 holds: pairs left (derived: expected 26, measured 26)
        >>> claims_table()
        id   statement   instrument  expected  measured  verdict
        ---  ----------  ----------  --------  --------  -------
        1.6  pairs left  derived     26        26        holds
    """
    claims = list(_claims_here.values())
    _show({"text/markdown": markdown_table(claims)}, format_table([_row(c) for c in claims]), {})


def gather(notebook: Mapping[str, Any]) -> list[Claim]:
    """The claims an executed notebook left in its outputs, in order, repeated ids included.

    Args:
        notebook: a notebook as nbformat reads it.

    Raises:
        ValueError: an output of the claim type lacks a field, has one of another type, or has an unknown verdict or
            instrument.
    """
    found = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            fields = output.get("data", {}).get(MIME)
            if fields is None:
                continue
            raw = output.get("metadata", {}).get(MIME, {})
            try:
                if not isinstance(fields, Mapping) or set(fields) != set(COLUMNS) or not isinstance(raw, Mapping):
                    raise ValueError(f"expected exactly {', '.join(COLUMNS)}")
                if not all(isinstance(fields[name], str) for name in COLUMNS if name != "measured"):
                    raise ValueError("expected texts")
                claim = Claim(**fields, raw_expected=raw.get("expected"), raw_measured=raw.get("measured"))
                check_record(claim.record(""), "claim")
            except ValueError as error:
                raise ValueError(f"malformed claim output: {error}, given {one_line(repr(fields))}") from None
            found.append(claim)
    return found


def check_record(record: object, name: str) -> None:
    """Check one object of claims.json, as `Claim.record` makes it.

    Raises:
        ValueError: naming the claim by `name`, and the field.
    """
    if not isinstance(record, Mapping) or set(record) != {*COLUMNS, "notebook"}:
        raise ValueError(f"{name}: expected an object with notebook, {', '.join(COLUMNS)}")
    for field in ("id", "notebook", "statement"):
        if not isinstance(record[field], str):
            raise ValueError(f"{name}: {field}: expected text, given {one_line(repr(record[field]), 80)}")
    for field, known in (("instrument", INSTRUMENTS), ("verdict", VERDICTS)):
        if record[field] not in known:
            raise ValueError(f"{name}: {field}: expected one of {known}, given {one_line(repr(record[field]), 80)}")
    for field in ("expected", "measured"):
        if not _is_json(record[field]):
            raise ValueError(f"{name}: {field}: expected values that JSON knows, lists of them, or null")


def format_table(
    records: Iterable[Mapping[str, object]], width: int | None = None, columns: Sequence[str] = COLUMNS
) -> str:
    """Lay claims out as text.

    Args:
        records: objects with the columns as keys, for example those of claims.json.
        width: columns of the terminal; long cells are wrapped to fit. None writes one line per claim.
        columns: their headings.
    """
    rows = [[one_line(_cell(record[name]), 2000) for name in columns] for record in records]
    if not rows:
        return "no claims"
    widths = [max(len(name), *(len(row[i]) for row in rows)) for i, name in enumerate(columns)]
    if width is not None:
        gaps = 2 * (len(columns) - 1)
        floors = {name: 12 for name in columns if name not in ("id", "instrument", "verdict")} | {"statement": 24}
        while sum(widths) + gaps > width:
            spare = {i: widths[i] - floors[name] for i, name in enumerate(columns) if name in floors}
            widest = max(spare, key=lambda i: spare[i])
            if spare[widest] <= 0:
                break
            widths[widest] -= 1
    lines = []
    for row in [list(columns), ["-" * w for w in widths], *rows]:
        cells = [textwrap.wrap(text, w) or [""] for text, w in zip(row, widths, strict=True)]
        for k in range(max(map(len, cells))):
            parts = (cell[k] if k < len(cell) else "" for cell in cells)
            lines.append("  ".join(p.ljust(w) for p, w in zip(parts, widths, strict=True)).rstrip())
    return "\n".join(lines)


def print_table(records: Iterable[Mapping[str, object]], columns: Sequence[str] = COLUMNS) -> None:
    """Print claims: fitted to the terminal when there is one, one line per claim when piped."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(format_table(records, width, columns))


def markdown_table(claims: Sequence[Claim]) -> str:
    """The claims as a Markdown table with the same columns."""
    rows = [[_escape(_cell(_row(c)[name])) for name in COLUMNS] for c in claims]
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row(claim: Claim) -> dict[str, object]:
    return {name: getattr(claim, name) for name in COLUMNS}


def _value(value: object, name: str) -> object:
    """A plain Python value out of what a measurement hands over."""
    if isinstance(value, (list, tuple)):
        return tuple(_value(item, f"{name}[{i}]") for i, item in enumerate(value))
    if isinstance(value, (bool, int, float, str, Fraction)):
        # NumPy's float64 and str_ are subclasses that print differently.
        plain = next(t for t in (bool, int, float, str, Fraction) if isinstance(value, t))
        return value if type(value) is plain else plain(value)
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "item"):
        if math.prod(shape) != 1:
            raise TypeError(
                f"{name}: expected one value, given an array of shape {tuple(shape)}; reduce it first, "
                "for example to its largest error"
            )
        return _value(value.item(), name)
    raise TypeError(
        f"{name}: expected bool, int, Fraction, float, str, a sequence of these or a one-element array, "
        f"given {type(value).__name__}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _agrees(found: object, wanted: object, tol: object, name: str) -> bool:
    if isinstance(wanted, (AtMost, AtLeast)):
        if not _is_number(found):
            raise TypeError(f"{name}: a bound judges numbers, measured {found!r}")
        return found <= wanted.bound if isinstance(wanted, AtMost) else found >= wanted.bound
    if isinstance(found, tuple) and isinstance(wanted, tuple):
        # Every pair is judged, so that a wrong kind further on is not hidden by an earlier difference.
        pairs = [_agrees(f, w, tol, f"{name}[{i}]") for i, (f, w) in enumerate(zip(found, wanted, strict=False))]
        return len(found) == len(wanted) and all(pairs)
    if _is_number(found) and _is_number(wanted):
        if math.isnan(found) or math.isnan(wanted):
            return False
        if found == wanted:
            return True
        if not tol or math.isinf(found) or math.isinf(wanted):
            return False
        return abs(Fraction(found) - Fraction(wanted)) <= Fraction(tol)
    if type(found) is not type(wanted):
        raise TypeError(
            f"{name}: measured {found!r} ({type(found).__name__}) cannot be compared with "
            f"expected {wanted!r} ({type(wanted).__name__})"
        )
    if tol:
        raise ValueError(f"{name}: tol is for numbers, given {tol!r} with {wanted!r}")
    return found == wanted


def _shown(found: object, wanted: object, tol: object, instrument: str, magnitude: float | None) -> str:
    """A measured value that holds, as every machine shows it."""
    bounded, exact = isinstance(wanted, (AtMost, AtLeast)), instrument in ("derived", "recorded")
    if instrument == "timed":
        if bounded:
            return str(wanted)
        return f"within {_text(tol)}" if tol else _text(found)
    if bounded:
        if (not isinstance(found, float) and magnitude is None) or not math.isfinite(found):
            return _text(found)
        if isinstance(wanted, AtLeast) and magnitude is not None and found > magnitude:
            return f"above {_text(magnitude)}"
        plain = found >= (NOISE if exact else 1e-3) and magnitude is None
        if isinstance(wanted, AtLeast) or plain or found < 0:
            return f"{'' if exact else 'about '}{_digits(found, 4 if exact else 2)}"
        return _below(float(found), magnitude)
    if not tol:
        return _text(found)
    if exact and magnitude is None and any(_flat(wanted)):
        return _rounded(found, max(0, math.ceil(-math.log10(tol))))
    pairs = [(f, w) for f, w in zip(_flat(found), _flat(wanted), strict=True) if f != w]
    error = max((float(abs(Fraction(f) - Fraction(w))) for f, w in pairs), default=0.0)
    text = _below(error, magnitude)
    return "off by " + text.replace("below", "less than") if any(_flat(wanted)) else text


def _below(error: float, magnitude: float | None) -> str:
    if magnitude is not None and error < magnitude:
        return f"below {_text(magnitude)}"
    # 10.0 ** -6 may miss 1e-6 by a bit, the text does not.
    return f"below {_text(float(f'1e{math.ceil(math.log10(2 * error))}'))}" if error else "0"


def _flat(value: object) -> list:
    return [x for item in value for x in _flat(item)] if isinstance(value, tuple) else [value]


def _rounded(value: object, decimals: int) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(_rounded(item, decimals) for item in value) + ("," if len(value) == 1 else "") + ")"
    return str(value) if isinstance(value, int) else f"{float(value):.{decimals}f}"


def _digits(value: float, digits: int) -> str:
    return _short(f"{value:.{digits}g}")


def _short(number: str) -> str:
    return re.sub(r"e([+-])0*(?=\d)", lambda sign: "e-" if sign[1] == "-" else "e", number)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_text, value)) + ("," if len(value) == 1 else "") + ")"
    # Ten digits: a computed expectation may differ in its last place between mathematics libraries.
    return _digits(value, 10) if isinstance(value, float) else str(value)


def _json(value: object) -> object:
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value) if isinstance(value, Rational) and not isinstance(value, int) else value


def _is_json(value: object, depth: int = 8) -> bool:
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_json(item, depth - 1) for item in value)
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return "(" + ", ".join(map(_cell, value)) + ")"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|$~])", r"\\\1", text)


def _markdown_line(claim: Claim) -> str:
    mark = {HOLDS: "✓", FAILS: "✗", NOT_MEASURED: "–"}[claim.verdict]
    return f"{mark} **{_escape(claim.id)} {claim.verdict}**: {_escape(claim.detail)}"


def _show(data: dict[str, object], text: str, metadata: dict[str, object]) -> None:
    """One output in a notebook, one text elsewhere; IPython is used when it runs, never imported for this."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not getattr(shell, "kernel", None):
        print(text)
        return
    from IPython.display import display

    display(data | {"text/plain": text}, metadata=metadata, raw=True)
