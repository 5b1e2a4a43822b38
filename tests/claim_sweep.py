"""Every claim of a notebook judged again with what it measured moved: a claim that holds for anything says nothing.

`python tests/claim_sweep.py NOTEBOOK` runs the notebook's code cells in one process and prints a JSON list with an
object for each claim: its id, what is wrong with it, and what it showed. The package is the one on the path.

- A value that is expected exactly or within a tolerance is moved by +10 %, by -10 % and by its sign, each element of a
  sequence alone; zeros by one, truth values and texts to others. No move may hold.
- An error, by a bound or a tolerance around zero, is no value to be moved: 10 % more of it is as good. Its bound may be
  100 times the error, and the least that is asked of a number a hundredth of it. Beyond that the claim has a reason.
- What is shown of it must survive another machine: twice the error, half of it, or 0.1 % of another float.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

ROOM = 100
"""How far a bound may lie from what was measured without a reason."""


def faults(claims, tried: dict[str, object]) -> Iterator[str]:
    """What is wrong with one claim that holds; `claims` is the package's module, `tried` the arguments of `claim`."""
    measured, expected = tried["measured"], tried["expected"]
    tol, reason = tried.get("tol", 0), tried.get("reason", "")
    if measured is None:
        return
    measured = claims._value(measured, "measured")
    elements, wanted = claims._flat(measured), expected
    if isinstance(expected, (claims.AtMost, claims.AtLeast)):
        if not reason:
            yield from _bound_faults(claims, float(measured), expected)
    elif tol and not any(claims._flat(claims._value(expected, "expected"))):
        if not reason:
            yield from _bound_faults(claims, max(map(abs, elements)), claims.AtMost(float(tol)))
    elif not (tol and reason):
        wanted = claims._value(expected, "expected")
        for i, element in enumerate(elements):
            for name, moved in moves(element):
                other = iter([*elements[:i], moved, *elements[i + 1 :]])
                if claims._agrees(_shaped(measured, other), wanted, claims._value(tol, "tol"), "claim"):
                    yield f"holds with element {i} moved by {name}: {element} to {moved}"
    yield from _display_faults(claims, measured, tried)


def moves(element: object) -> Iterator[tuple[str, object]]:
    """Other values of the element's kind."""
    if isinstance(element, bool):
        yield "its negation", not element
    elif isinstance(element, str):
        yield "a letter", element + "x"
    elif element == 0 or element in (float("inf"), float("-inf")):
        yield "one", 1
        yield "minus one", -1
    else:
        exact = Fraction(element)
        yield "+10 %", exact * Fraction(11, 10)
        yield "-10 %", exact * Fraction(9, 10)
        yield "its sign", -exact


def _bound_faults(claims, measured: float, expected) -> Iterator[str]:
    bound = float(expected.bound)
    low, high = (measured, bound) if isinstance(expected, claims.AtMost) else (bound, measured)
    if low < 0 or high > ROOM * low:
        yield f"measured {measured:.3g}, {expected}: more than {ROOM} times apart, without a reason"


def _display_faults(claims, measured: object, tried: dict[str, object]) -> Iterator[str]:
    expected, tol = tried["expected"], claims._value(tried.get("tol", 0), "tol")
    instrument, magnitude = tried.get("instrument", "oracle"), tried.get("magnitude")
    bounded = isinstance(expected, (claims.AtMost, claims.AtLeast))
    if instrument in ("timed", "recorded") or not (tol or (bounded and not isinstance(measured, int))):
        return
    if instrument == "derived" and not (isinstance(measured, float) and abs(measured) < claims.NOISE):
        return
    wanted = expected if bounded else claims._value(expected, "expected")

    def shown(found: object) -> str:
        return claims._shown(found, wanted, tol, instrument, magnitude)

    text, others = shown(measured), []
    if not bounded:
        for factor in (0.5, 2):
            pairs = zip(claims._flat(measured), claims._flat(wanted), strict=True)
            others.append(_shaped(measured, iter([float(w) + factor * float(m - w) for m, w in pairs])))
    elif text.startswith("below") or text == "0":
        others = [measured * 0.5, measured * 2 or 1e-16]
    else:
        others = [measured * 0.999, measured * 1.001]
    for other in others:
        if shown(other) != text:
            yield f"shows {text}, elsewhere maybe {shown(other)}: name a magnitude"


def _shaped(value: object, elements: Iterator) -> object:
    return tuple(_shaped(item, elements) for item in value) if isinstance(value, tuple) else next(elements)


def watch(claims, found: list[dict[str, object]]) -> Callable:
    """A `claim` that also notes what is wrong with each claim."""
    judge = claims.claim

    def claim(id: str, statement: str, **options: object) -> None:
        judge(id, statement, **options)
        (judged,) = (each for each in claims._claims_here.values() if each.id == id)
        found.append({"id": id, "faults": list(faults(claims, options)), "shown": judged.measured})

    return claim


def main(notebook: Path) -> list[dict[str, object]]:
    """Run the code cells in their folder and return what `watch` noted."""
    from cascade_lab.evidence import claims

    found: list[dict[str, object]] = []
    claims.claim = watch(claims, found)  # before anything imports it by name
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    os.chdir(notebook.parent)
    names = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        for number, cell in enumerate(cells):
            source, name = "".join(cell["source"]), f"<cell {number}>"
            linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # ranks read programs
            exec(compile(source, name, "exec"), names)
    return found


if __name__ == "__main__":
    json.dump(main(Path(sys.argv[1]).resolve()), sys.stdout)
