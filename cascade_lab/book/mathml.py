"""TeX formulas as MathML, which browsers draw by themselves, without a script, a font or a network.

latex2mathml translates; what a browser would draw unlike TeX is put right afterwards, and what was not understood is an
error instead of raw TeX on the page.
"""

from __future__ import annotations

import re
from html import escape
from xml.etree import ElementTree

from latex2mathml.converter import convert

_NAMESPACE = "http://www.w3.org/1998/Math/MathML"
_LONG = 32
_TAG = re.compile(r"\\tag\{([^{}]*)\}")
_FENCES = frozenset("()[]{}|⌈⌉⌊⌋")
_PARTS = {"mfrac": 2, "mroot": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "msubsup": 3, "munderover": 3}
_SPACE = {"|": "0", "/": "0", "·": "0.222em"}
# latex2mathml passes the text of a formula on as markup; what is none of these came from there.
_ELEMENTS = frozenset(
    ("math", "menclose", "mfrac", "mi", "mn", "mo", "mover", "mpadded", "mphantom", "mroot", "mrow", "mspace", "msqrt")
    + ("mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover")
)
# Everything else is dropped: a formula lays itself out and does nothing.
_ATTRIBUTES = frozenset(
    ("accent", "accentunder", "columnalign", "columnlines", "columnspacing", "depth", "display", "displaystyle")
    + ("fence", "form", "height", "largeop", "linethickness", "lspace", "mathvariant", "maxsize", "minsize")
    + ("movablelimits", "rowlines", "rowspacing", "rspace", "scriptlevel", "separator", "stretchy", "symmetric")
    + ("voffset", "width")
)


class FormulaError(ValueError):
    """A formula that cannot be drawn as it is meant."""


def to_mathml(tex: str, *, block: bool = False) -> str:
    r"""One formula as a `math` element that carries its TeX as an annotation.

    Args:
        tex: the formula without its dollar signs.
        block: on a line of its own, inside a `span` of class "equation"; the number of a \tag stands beside it, in a
            `span` of class "number", and names the place of the equation (`equation_id`). A long formula within a line
            is inside a `span` of class "formula", for a browser breaks no formula and a narrow page has to scroll it.

    Raises:
        FormulaError: a command that is not known, or a formula that does not parse.
    """
    source = " ".join(tex.split())
    tags = _TAG.findall(source)
    if len(tags) > block:
        raise FormulaError(f"formula ${source}$: \\tag is for a formula of its own line, and once")
    body = _TAG.sub("", source).strip()
    try:
        root = ElementTree.fromstring(convert(body, display="block" if block else "inline"))
    # latex2mathml raises many kinds, bare IndexError among them, for what it cannot read
    except Exception as error:
        raise FormulaError(f"formula ${source}$ cannot be converted ({type(error).__name__}: {error})") from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        if element.tag not in _ELEMENTS:
            raise FormulaError(f"formula ${source}$: <{element.tag}> is no part of a formula")
        element.attrib = {name: value for name, value in element.attrib.items() if name in _ATTRIBUTES}
        if (element.text or "").startswith("\\"):
            raise FormulaError(f"formula ${source}$: unknown command {element.text}")
        if len(element) != _PARTS.get(element.tag, len(element)):
            raise FormulaError(f"formula ${source}$: expected {_PARTS[element.tag]} parts of a {element.tag}")
    for element in list(root.iter()):
        _space_as_tex(element)
    for element in list(root.iter()):
        _space_functions(element)
        _join_letters(element)
    (row,) = root
    root.remove(row)
    semantics = ElementTree.SubElement(root, "semantics")
    semantics.append(row)
    ElementTree.SubElement(semantics, "annotation", encoding="application/x-tex").text = body
    root.set("xmlns", _NAMESPACE)
    math = ElementTree.tostring(root, encoding="unicode")
    if not block:
        return f'<span class="formula">{math}</span>' if len(body) > _LONG else math
    number = "".join(f'<span class="number">({escape(tag)})</span>' for tag in tags)
    place = "".join(f' id="{escape(equation_id(tag))}"' for tag in tags)
    return f'<span class="equation"{place}>{math}{number}</span>'


def numbers(text: str) -> list[str]:
    r"""The numbers that equations of a Markdown text have by \tag, in order."""
    return _TAG.findall(text)


def equation_id(number: str) -> str:
    """The id of the equation of a number on its page."""
    return f"equation-{number}"


def _space_as_tex(element: ElementTree.Element) -> None:
    """Undo what a MathML renderer assumes of operators where TeX sets them otherwise."""
    text = element.text or ""
    if element.tag == "mi" and text in _FENCES:
        element.tag, element.attrib = "mo", {"stretchy": "false"}
    elif element.tag == "mo" and (text in ("∞", "∅") or (text.isascii() and text.isalpha() and text != "mod")):
        element.tag = "mi"
    elif element.tag == "mi" and text.isupper() and not text.isascii() and not element.attrib:
        element.set("mathvariant", "normal")
    elif element.tag == "mo" and text in _SPACE:
        element.attrib |= {"lspace": _SPACE[text], "rspace": _SPACE[text]}


def _join_letters(element: ElementTree.Element) -> None:
    """Make an upright word one identifier; letter by letter it is read aloud and copied as a product."""
    letters = list(element)
    upright = {"mathvariant": "normal"}
    if element.tag == "mrow" and len(letters) > 1 and all(x.tag == "mi" and x.attrib == upright for x in letters):
        word = "".join(x.text or "" for x in letters)
        for letter in letters:
            element.remove(letter)
        ElementTree.SubElement(element, "mi").text = word


def _space_functions(row: ElementTree.Element) -> None:
    """Set a thin space between a function's name and what is multiplied or stands without parentheses, as TeX does."""
    if row.tag not in ("mrow", "mstyle"):
        return
    children = list(row)
    for left, right in reversed(list(zip(children, children[1:], strict=False))):
        if (_is_function(left) and not _opens(right)) or (_is_function(right) and left.tag not in ("mo", "mspace")):
            row.insert(children.index(left) + 1, ElementTree.Element("mspace", width="0.167em"))


def _is_function(element: ElementTree.Element) -> bool:
    if element.tag in ("msub", "msup", "msubsup"):
        return _is_function(element[0])
    return element.tag == "mi" and not element.attrib and len(element.text or "") > 1


def _opens(element: ElementTree.Element) -> bool:
    if len(element):
        return element.tag == "mrow" and _opens(element[0])
    return element.tag in ("mo", "mspace") and element.text != "|"
