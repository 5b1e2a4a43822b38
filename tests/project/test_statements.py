"""What the source documents state, each in our words, stands in a notebook: as a claim that holds, or as a phrase."""

import csv
import functools
import re
from pathlib import Path

import pytest

from cascade_lab.book.execution import load
from cascade_lab.evidence.claims import gather

CHECKOUT = Path(__file__).resolve().parents[2]
FILES = sorted((CHECKOUT / "tests" / "data").glob("statements_*.csv"))


def statements(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


ROWS = [(path.stem, row) for path in FILES for row in statements(path)]


@functools.cache
def notebook(name):
    """Verdict of each claim, and the prose without line breaks."""
    book = load(CHECKOUT / "notebooks" / f"{name}.ipynb")
    prose = " ".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    return {claim.id: claim.verdict for claim in gather(book)}, " ".join(prose.split())


@pytest.mark.parametrize(("document", "row"), ROWS, ids=[f"{name}-{row['statement'][:50]}" for name, row in ROWS])
def test_a_statement_of_a_document_stands_in_its_notebook(document, row):
    verdicts, prose = notebook(row["notebook"])
    if re.fullmatch(r"\d+\.\d+[\w-]*", row["where"]):
        assert verdicts.get(row["where"]) == "holds"
    else:
        assert len(row["where"]) > 9
        assert " ".join(row["where"].split()) in prose


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_statements_are_listed_once_and_whole(path):
    rows = statements(path)
    assert all(list(row) == ["statement", "notebook", "where"] and all(row.values()) for row in rows)
    texts = [row["statement"] for row in rows]
    assert len(set(texts)) == len(texts)


def test_the_document_on_cascades_is_listed():
    assert CHECKOUT / "tests" / "data" / "statements_cascade.csv" in FILES
