"""A reader can go to every source: each entry has a link, or says who wrote what where and when."""

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
LINK = re.compile(r"\[[^\]]+\]\(https://[^)\s]+\)")
# A. Author and B. Author or A. Author et al., *Title*, venue, year
CITATION = re.compile(
    r"(?P<authors>[A-Z][^*]+), \*(?P<title>[^*]{8,})\*,? (?P<venue>[^,:]*[A-Za-z]{3}[^,:]*?),? (?P<year>(19|20)\d\d)\b"
)


def entries(path):
    cells = nbformat.read(path, as_version=4).cells
    (section,) = [
        found[1]
        for cell in cells
        if cell.cell_type == "markdown"
        for found in [re.search(r"^## Sources\n(.*?)(?=^## |\Z)", cell.source, re.DOTALL | re.MULTILINE)]
        if found
    ]
    return [" ".join(entry.split()) for entry in re.split(r"^- ", section, flags=re.MULTILINE)[1:]]


def can_be_found(entry):
    return bool(LINK.search(entry) or CITATION.match(entry))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_source_has_a_link_or_is_cited_in_full(path):
    found = entries(path)
    assert len(found) > 3
    assert [entry for entry in found if not can_be_found(entry)] == []


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("A. Writer, *A long title*, in Proceedings of X, 2023, section 2: what for.", True),
        ("A. Writer and B. Other, *A long title*, Journal 3(2), 2023.", True),
        ("R. Qin et al., *Mooncake: a long title*, FAST 2025, section 2.2: what for.", True),
        ("Vendor, [pull request 7](https://example.org/7): what for.", True),
        ("A. Writer, *A long title*, 2023: what for.", False),
        ("A. Writer, *A long title*, in Proceedings of X: what for.", False),
        ("*A long title*, in Proceedings of X, 2023.", False),
        ("Vendor, pull request 7: what for.", False),
        ("Vendor, the documentation of 2026.", False),
        ("Vendor, [pull request 7](../seven.md).", False),
    ],
)
def test_what_counts_as_a_source_that_can_be_found(entry, found):
    assert can_be_found(entry) is found
