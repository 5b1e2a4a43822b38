"""The notation page: one symbol, one meaning, in every notebook, in the code and in the figures, and likewise terms.

The tables are pages/notation.toml. Each entry quotes the words by which a notebook defines its symbol or term, so that
a test can hold the notebooks to the table. Nothing is derived here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files

from cascade_lab.book.export import Explained, render
from cascade_lab.book.mathml import to_mathml

GREEK = ("alpha", "beta", "delta", "rho", "sigma", "tau", "varepsilon", "epsilon", "gamma", "lambda", "mu")
_SUBSCRIPT = re.compile(r"(?<=[a-zA-Z])_(\{(?:[^{}]|\{[^{}]*\})*\}|\\(?:text|mathrm)\{[^{}]*\})")
_WORDS = re.compile(r"\\(?:text|mathrm|operatorname|tag)\{[^{}]*\}")
_COMMANDS = re.compile(rf"\\(?!(?:{'|'.join(GREEK)})(?![a-zA-Z]))[a-zA-Z]+")
_TOKEN = re.compile(r"(?P<letter>\\[a-zA-Z]+|[a-zA-Z])(?:_(?:\{(?P<below>[^{}]*)\}|(?P<index>\w)))?")


@dataclass(frozen=True)
class Symbol:
    """One row of the table.

    Attributes:
        tex: the symbol as a formula.
        meaning: in words.
        code: what stands for it in the package's sources.
        defined: by the number of a notebook, the words there that define it.
    """

    tex: str
    meaning: str
    code: tuple[str, ...] = ()
    defined: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The symbol without arguments, its subscript in plain letters; "w_i" for one with any index."""
        found = names(self.tex)
        return found[0] if found else self.tex

    @property
    def anchor(self) -> str:
        """The id of the row on the page."""
        return "symbol-" + re.sub(r"\\(?:text|mathrm)|\W", "", self.name)


@dataclass(frozen=True)
class Term:
    """One term, with the other words for it that notebooks use, its meaning, and the rest as for a symbol."""

    name: str
    meaning: str
    words: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    defined: Mapping[str, str] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        """The id of the term on the page."""
        return "term-" + self.name.replace(" ", "-")


def symbols() -> tuple[Symbol, ...]:
    """The rows of the table in order."""
    return tuple(Symbol(**row | {"code": tuple(row.get("code", ()))}) for row in _table()["symbol"])


def terms() -> tuple[Term, ...]:
    """The terms in order."""
    return tuple(
        Term(**row | {"words": tuple(row.get("words", ())), "code": tuple(row.get("code", ()))})
        for row in _table()["term"]
    )


def explained(number: str) -> list[Explained]:
    """The symbols and terms that a notebook defines, with their places on the page."""
    symbol = [
        Explained((row.tex,), to_mathml(row.tex), row.meaning, f"notation.html#{row.anchor}")
        for row in symbols()
        if number in row.defined
    ]
    term = [
        Explained((row.name, *row.words), escape(row.name), row.meaning, f"notation.html#{row.anchor}")
        for row in terms()
        if number in row.defined
    ]
    return symbol + term


def local_letters() -> frozenset[str]:
    """Letters that are indices or numbers of one section."""
    return frozenset(_table()["local"].split())


def names(tex: str) -> list[str]:
    """The symbols in a formula: letters with their subscripts, words and commands left out.

    A subscript is written after "_", without braces: "H_kv", "T_attn", "N_r".
    """
    plain = _COMMANDS.sub(" ", _WORDS.sub(" ", _SUBSCRIPT.sub(_flat, tex)))
    return ["_".join(filter(None, (m["letter"], m["below"] or m["index"]))) for m in _TOKEN.finditer(plain)]


def resolve(name: str, known: Collection[str]) -> str:
    """The row that a symbol of a formula belongs to: its own, that of an index, or that of the letter alone."""
    letter = name.partition("_")[0]
    indexed = next((each for each in known if re.fullmatch(rf"{re.escape(letter)}_[ij]", each)), None)
    if name in known or "_" not in name:
        return name
    return indexed or letter


def page(navigation: Sequence[tuple[str, str, str]], notebooks: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """The page.

    Args:
        navigation: as for a notebook's page.
        notebooks: the sections of the site's notebooks, as `markdown.sections` gives them, by the pages' names.
    """

    def places(row: Symbol | Term) -> list[tuple[str, str]]:
        found = []
        for name, sections in notebooks.items():
            number = name.partition("_")[0]
            words = row.defined.get(number)
            if words is not None:
                id = next((id for id, text in sections if words in text), "")
                found.append((number, f"{name}.html#{id}" if id else f"{name}.html"))
        return found

    rows = [{"row": row, "formula": to_mathml(row.tex), "places": places(row)} for row in symbols()]
    return render(
        "notation.html.j2",
        title="Notation",
        rows=rows,
        terms=[(row, places(row)) for row in terms()],
        local=[to_mathml(letter) for letter in _table()["local"].split()],
        navigation=navigation,
        root="",
        here="notation.html",
    )


def _flat(subscript: re.Match[str]) -> str:
    return "_{" + re.sub(r"\\[a-zA-Z]+|[{}\s]", "", subscript[1]).partition(",")[0] + "}"


def _table() -> dict:
    return tomllib.loads(files("cascade_lab.book").joinpath("pages", "notation.toml").read_text(encoding="utf-8"))
