"""An exercise is an empty function for the reader, and a judge that knows the same values by another way.

The judgement is that of a claim: |answer - expected| <= tol for every case, exactly equal for tol = 0. An exercise
proves nothing, so it is no claim, stops no notebook, and says in one line that it is unanswered for as long as it is.
This module judges answers; a notebook computes what is expected of them.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence

from cascade_lab.evidence.claims import _agrees, _escape, _show, _text, _value
from cascade_lab.files import one_line

__all__ = ["check"]

_MARKS = {"right": "✓", "wrong": "✗", "unanswered": "–"}


def check(
    answer: Callable[..., object],
    *,
    cases: Sequence[tuple[object, ...]],
    expected: Sequence[object],
    tol: float = 0,
    hint: str,
) -> None:
    """Judge a reader's function on every case, and leave one line: right, wrong with a hint, or unanswered.

    What the reader's function raises becomes part of that line, with the line of code that it came from; it is not
    raised again, so the notebook runs on.

    Args:
        answer: the reader's function. It counts as unanswered while it returns nothing, None or `...`, in every case.
        cases: arguments of one call each.
        expected: the value of each case, as `claim` takes it: bool, int, Fraction, float, str, a list or tuple of
            these, or a torch or NumPy value of one element.
        tol: absolute bound, element by element in sequences; 0 asks for exact equality.
        hint: one line, shown with an answer that is wrong.

    Raises:
        TypeError, ValueError: the exercise itself is at fault: `answer` is no function, `cases` is empty or has not
            one expected value each, the hint is empty or not one line, or `tol` is negative.

    Example:
        >>> from cascade_lab.evidence.exercises import check
        >>> cases = [(8, 4), (5, 0)]
        >>> judge = {"cases": cases, "expected": [26, 15], "hint": "row t sees t keys"}
        >>> def pairs_left(n, hit):
        ...     ...
        >>> check(pairs_left, **judge)
        unanswered: pairs_left returns nothing yet. Write its body, and run this cell again.
        >>> check(lambda n, hit: n * n - hit * hit, **judge)
        wrong: <lambda>(8, 4) returned 48. Hint: row t sees t keys
        >>> check(cl.interactions, **judge)
        right: interactions, in 2 of 2 cases.
    """
    if not callable(answer):
        raise TypeError(f"answer: expected a function, given {answer!r}")
    if not cases or len(cases) != len(expected):
        raise ValueError(f"cases: expected one or more, each with an expected value, given {cases!r} and {expected!r}")
    if not isinstance(hint, str) or len(hint.splitlines()) != 1:
        raise ValueError(f"hint: expected one line of text, given {hint!r}")
    if not isinstance(tol, (int, float)) or not tol >= 0:
        raise ValueError(f"tol: expected a number >= 0, given {tol!r}")
    wanted = [_value(value, f"expected[{i}]") for i, value in enumerate(expected)]

    name = getattr(answer, "__name__", "the answer")
    given = []
    for case in cases:
        try:
            given.append(answer(*case))
        except Exception as error:
            _leave("wrong", f"{_call(name, case)} raised {_raised(error, answer)}. Hint: {hint}")
            return
    if all(value is None or value is ... for value in given):
        _leave("unanswered", f"{name} returns nothing yet. Write its body, and run this cell again.")
        return
    for case, value, right in zip(cases, given, wanted, strict=True):
        if fault := _fault(value, right, tol):
            _leave("wrong", f"{_call(name, case)} returned {fault}. Hint: {hint}")
            return
    _leave("right", f"{name}, in {len(cases)} of {len(cases)} cases.")


def _fault(value: object, right: object, tol: float) -> str:
    """What was returned in place of the right value, "" when it is right."""
    try:
        found = _value(value, "answer")
    except TypeError:
        return f"{one_line(repr(value), 80)}, where {_kind(right)} is expected"
    if _shape(found) != _shape(right):
        return f"{one_line(_text(found), 80)}, where {_kind(right)} is expected"
    return "" if _agrees(found, right, tol, "answer") else one_line(_text(found), 80)


def _shape(value: object) -> object:
    """The kinds in a value: those that a claim would compare with each other are equal."""
    if isinstance(value, tuple):
        return tuple(map(_shape, value))
    return type(value) if isinstance(value, (bool, str)) else "number"


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind, value))})"
    return {bool: "True or False", str: "a text"}.get(type(value), "a number")


def _call(name: str, case: tuple[object, ...]) -> str:
    return f"{name}({one_line(', '.join(map(_argument, case)), 80)})"


def _argument(value: object) -> str:
    try:
        return _text(_value(value, "argument"))
    except TypeError:
        return repr(value)


def _raised(error: Exception, answer: Callable[..., object]) -> str:
    """An exception in one line, with the last line of the reader's own code on the way to it."""
    said = one_line(f"{type(error).__name__}: {error}", 120)
    code, trace, line = getattr(answer, "__code__", None), error.__traceback__, ""
    while trace is not None and code is not None:
        if trace.tb_frame.f_code.co_filename == code.co_filename:
            line = linecache.getline(code.co_filename, trace.tb_lineno).strip() or line
        trace = trace.tb_next
    return f"{said}, in the line `{line}`" if line else said


def _leave(verdict: str, detail: str) -> None:
    line = f"{_MARKS[verdict]} **{verdict}**: {_escape(detail)}"
    _show({"text/markdown": line}, f"{verdict}: {detail}", {})
