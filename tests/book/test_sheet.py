"""The sheet is true: the value beside a line of code is what it gives, and formulas are those of the notebooks."""

import ast
import re
from fractions import Fraction
from functools import reduce
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup

import cascade_lab as cl
from cascade_lab.book import notation, sheet_page

CHECKOUT = Path(__file__).resolve().parents[2]
SHEET = CHECKOUT / "SHEET.md"
TEXT = SHEET.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
PROSE = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
SECTIONS = re.split(r"^(?=## )", PROSE, flags=re.MULTILINE)[1:]
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$")


def written(value, digits):
    return f"{float(value):.{digits}f}"


def agrees(found, text):
    """A value and how it is written: a word, a decimal number rounded to the digits shown, or an exact number."""
    if isinstance(found, bool):
        return text == str(found)
    if "." in text or isinstance(found, float):
        return text == written(found, len(text.partition(".")[2]))
    return Fraction(text) == found


def judged(block):
    """(line, values, values as written) of each expression of a block that is run from its top."""
    names: dict = {}
    lines = block.splitlines()
    for statement in ast.parse(block).body:
        if not isinstance(statement, ast.Expr):
            exec(compile(ast.Module([statement], []), "SHEET.md", "exec"), names)
            continue
        line = lines[statement.end_lineno - 1]
        found = eval(compile(ast.Expression(statement.value), "SHEET.md", "eval"), names)
        values = [*found] if isinstance(found, (tuple, list)) else [found]
        yield line, values, line.partition("  # ")[2].split(", ")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[-1])
def test_the_value_beside_a_line_is_what_the_line_gives(block):
    results = list(judged(block))
    assert results
    for line, values, texts in results:
        assert len(values) == len(texts), line
        assert all(agrees(*pair) for pair in zip(values, texts, strict=True)), (line, values)


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("1 + 1  # 3", False),
        ("2 / 3, 5  # 0.667, 5", True),
        ("2 / 3  # 0.666", False),
        ("2 / 3  # 2/3", False),
        ("Fraction(1, 3)  # 1/3", True),
        ("Fraction(1, 3)  # 0.33", True),
        ("Fraction(1, 3)  # 0.34", False),
        ("Fraction(1, 3)  # 0", False),
        ("[True, False]  # True, True", False),
    ],
)
def test_a_wrong_value_is_noticed(line, right):
    ((_, values, texts),) = judged(f"from fractions import Fraction\n{line}")
    assert all(agrees(*pair) for pair in zip(values, texts, strict=True)) is right


def test_the_blocks_compute_what_the_collection_is_about():
    shown = {text for block in BLOCKS for _, _, texts in judged(block) for text in texts}
    assert {"8020", "2020", "4.5", "24", "36", "26", "13/18", "0.75", "1/2", "0.895", "0.818", "0.45"} <= shown


def test_the_three_counts_and_the_pairs_are_those_of_the_ledger():
    batch = cl.VerifyBatch([2000], [cl.DraftTree.branches(4, 5)], rows="branch")
    (section,) = [each for each in SECTIONS if "`cl.prefix_hit_levels([1024], [512])`" in each]
    plans = {
        "cascade": (batch.levels("naive"), batch.levels("cascade")),
        "hit": (cl.prefix_hit_levels([1024], [0]), cl.prefix_hit_levels([1024], [512])),
    }
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line
    ]
    assert [row[1] for row in rows] == ["`.kv_tokens_unique`", "`.kv_tokens`", "`.tile_tokens(128)`", "`.pairs`"]
    for row in rows:
        for plan, cell in zip(head[2:], row[2:], strict=True):
            before, after = (eval(f"ledger{row[1].strip('`')}", {"ledger": cl.ledger(x)}) for x in plans[plan])
            shown = f"{before} → {after}"
            assert cell == (f"**{shown}**" if after < before else shown)


def test_numbers_in_the_text_are_computed():
    half = cl.remaining_limit(0.5), float(cl.linear_remaining(8, 4))
    assert f"At $h = \\tfrac12$ these are {half[0]:.0%} and {half[1]:.0%}." in PROSE
    means = cl.traces.summarize([(1000, 900), (100, 0)])
    misled = [written(cl.remaining_limit(h), 2) for h in (means.rms_hit, means.token_hit, means.request_hit)]
    assert "At these three ratios $1 - h^2$ is {}, {} and {}.".format(*misled) in PROSE
    whole = Fraction(3 * 6 + 5 * 18, 6 + 18)
    assert f"All keys give {float(whole)} and {6 + 18}; the mean of the outputs, {(3 + 5) // 2}, is wrong." in PROSE
    at_half = Fraction(1, 2)
    assert 1 - at_half**2 - cl.remaining(8, 4) == at_half * (1 - at_half) / (8 + 1)
    assert r"The limit errs by $\frac{h(1-h)}{N+1}$." in PROSE
    reads = [
        (int(k), int(L), int(S), int(sum_))
        for k, L, S, sum_ in re.findall(r"(\d+) × \((\d+) \+ (\d+)\) = (\d+)", PROSE)
    ]
    assert reads
    assert all(k * (L + S) == total for k, L, S, total in reads)


def test_the_five_conditions_are_those_that_are_checked():
    names = [name.lower() for name in re.findall(r"^\d\. \*\*(.+?)\*\*: ", PROSE, re.MULTILINE)]
    case = cl.applicability.Case(64, [1, 1, 0, 0], 16)
    assert names == [finding.condition for finding in cl.check_applicability(case)]


def sides(tex):
    """What stands on the sides of the signs of a formula."""
    return [side.strip(" .,") for side in re.split(r"=|\\approx", tex)]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_a_displayed_formula_stands_in_the_notebook_that_its_section_names(section):
    shown = re.findall(r"\$\$(.+?)\$\$", section)
    linked = re.findall(r"\]\(notebooks/(\w+)\.ipynb", section) or ["02_cascade_read_volume"]
    texts = " ".join(
        cell.source
        for name in linked
        for cell in nbformat.read(CHECKOUT / "notebooks" / f"{name}.ipynb", as_version=4).cells
        if cell.cell_type == "markdown"
    )
    for tex in shown:
        for side in sides(tex):
            assert side in texts, (linked, side)


def test_there_are_five_numbered_formulas_and_two_pictures():
    numbered = [section for section in SECTIONS if re.match(r"## \d\. ", section)]
    assert [int(section[3]) for section in numbered] == [1, 2, 3, 4, 5]
    assert all("$$" in section for section in numbered)
    files = re.findall(r"!\[[^\]]{20,}\]\(([^)]+)\)", PROSE)
    assert len(files) == 2
    assert all((CHECKOUT / file).is_file() for file in files)


def test_symbols_are_those_of_the_notation():
    table = {symbol.name: symbol for symbol in notation.symbols()}
    used = {name for pair in FORMULA.findall(re.sub(r"`[^`]*`", "", PROSE)) for name in notation.names("".join(pair))}
    assert {notation.resolve(name, table) for name in used} - set(table) - notation.local_letters() == set()
    assert len(used) > 10


def test_names_in_the_text_are_public():
    named = re.findall(r"`cl\.([\w.]+)", PROSE)
    assert len(named) > 3
    for name in named:
        assert callable(reduce(getattr, name.split("."), cl)), name


def test_the_page_has_every_formula_picture_and_line():
    page = BeautifulSoup(sheet_page.page(SHEET, [("sheet.html", "Sheet", "Sheet")]), "html.parser")
    tex = [block or inline for block, inline in FORMULA.findall(re.sub(r"`[^`]*`", "", PROSE))]
    assert [formula.annotation.string for formula in page.find_all("math")] == tex
    assert [block.get_text().strip() for block in page.find_all("pre")] == [block.strip() for block in BLOCKS]
    pictures = page.find_all("img")
    assert [picture["alt"] for picture in pictures] == re.findall(r"!\[([^\]]+)\]", PROSE)
    assert all(picture["src"].startswith("data:image/svg+xml;base64,") for picture in pictures)
    ledgers = [(section.h2.get_text(), section.get("class", [""])[0]) for section in page.find_all("section")]
    named = [
        (re.match("## (.+)", section)[1], (re.findall(r"^<!-- (\w+) -->$", section, re.MULTILINE) or [""])[0])
        for section in SECTIONS
    ]
    assert ledgers == named
    assert {ledger for _, ledger in named} == {"", "reads", "pairs"}
