"""One symbol has one meaning: the table of the notation page, held to the notebooks and to the sources."""

import re
from pathlib import Path

import pytest

import cascade_lab
from cascade_lab.book import notation
from cascade_lab.book.execution import load

NOTEBOOKS = {path.name[:2]: path for path in sorted(Path(__file__).parents[2].glob("notebooks/*.ipynb"))}
TABLE = {symbol.name: symbol for symbol in notation.symbols()}


def texts(number):
    return [cell.source for cell in load(NOTEBOOKS[number]).cells if cell.cell_type == "markdown"]


def formulas(text):
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    found = re.findall(r"(?<!\\)\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$", text, re.DOTALL)
    return [block or inline for block, inline in found]


def test_no_symbol_has_two_rows():
    rows = [symbol.name for symbol in notation.symbols()]
    assert len(rows) == len(set(rows)) > 30
    assert not set(rows) & notation.local_letters()


@pytest.mark.parametrize("symbol", notation.symbols(), ids=lambda symbol: symbol.name)
def test_a_symbol_is_defined_where_the_table_says_and_named_in_the_code(symbol):
    for number, words in symbol.defined.items():
        assert any(words in text for text in texts(number)), (number, words)
    sources = [path.read_text(encoding="utf-8") for path in Path(cascade_lab.__file__).parent.rglob("*.py")]
    for name in symbol.code:
        whole = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
        assert any(whole.search(source) for source in sources), name
    assert symbol.defined or symbol.code


@pytest.mark.parametrize("term", notation.terms(), ids=lambda term: term.name)
def test_a_term_is_defined_in_bold_where_the_table_says_and_named_in_the_code(term):
    for number, words in term.defined.items():
        assert any(words in text for text in texts(number)), (number, words)
        (bold,) = re.findall(r"\*\*(.+?)\*\*", words)
        assert bold.rstrip(".").lower() in {name.lower() for name in (term.name, *term.words)}
    sources = [path.read_text(encoding="utf-8") for path in Path(cascade_lab.__file__).parent.rglob("*.py")]
    for name in term.code:
        assert any(re.search(rf"(?<!\w){name}(?!\w)", source) for source in sources), name
    assert term.defined


def test_every_row_of_the_notation_page_has_a_place_of_its_own():
    places = [row.anchor for row in (*notation.symbols(), *notation.terms())]
    assert len(places) == len(set(places))
    assert all(re.fullmatch(r"(symbol|term)-[\w-]+", place) for place in places)


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_formulas_of_a_notebook_use_symbols_that_the_table_defines_for_it(number):
    unlisted = set()
    for text in texts(number):
        for tex in formulas(text):
            for name in notation.names(tex):
                row = notation.resolve(name, TABLE)
                if row not in notation.local_letters() and number not in getattr(TABLE.get(row), "defined", ()):
                    unlisted.add(row)
    assert not unlisted


@pytest.mark.parametrize(
    ("tex", "expected"),
    [
        (r"P(N, H) = M H + \frac{M(M+1)}{2}", ["P", "N", "H", "M", "H", "M", "M"]),
        (r"T_{\text{attn},0}\,(1 - h^2)", ["T_attn", "h"]),
        (r"\rho_\text{tiles} + \alpha N_r", [r"\rho_tiles", r"\alpha", "N_r"]),
        (r"\sum_{t=1}^{n} \min(t, w) \tag{4.2}", ["t", "n", "t", "w"]),
        (r"\mathrm{lse} + H_{kv} D_v", ["H_kv", "D_v"]),
    ],
)
def test_symbols_of_a_formula(tex, expected):
    assert notation.names(tex) == expected


def test_a_symbol_with_an_index_is_that_of_its_letter_unless_it_has_a_row():
    known = ["w", "w_i", "N", "B_M", "B"]
    asked = {"w": "w", "w_r": "w_i", "w_A": "w_i", "N_r": "N", "B_M": "B_M", "B_N": "B", "Q": "Q"}
    assert {name: notation.resolve(name, known) for name in asked} == asked
