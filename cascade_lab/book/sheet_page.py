"""The sheet: SHEET.md, the project on one page, laid out in two columns that fill one side of paper when printed.

Each section of the text is a block that no column breaks. A comment in it, "reads" or "pairs", names the ledger that it
speaks of, and so its colour. Nothing is computed here: the numbers stand in the text, and a test runs the code beside
them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cascade_lab.book import markdown
from cascade_lab.book.export import picture, render

_LEDGER = re.compile(r"^<!-- (reads|pairs) -->$", re.MULTILINE)
_PICTURE = re.compile(r"^!\[([^\]]+)\]\(([^)\s]+\.svg)\)$", re.MULTILINE)


def page(
    source: Path,
    navigation: Sequence[tuple[str, str, str]],
    here: str = "sheet.html",
    text: str = "",
    language: str = "en",
    other: tuple[str, str] | None = None,
) -> str:
    """The page of a sheet.

    Args:
        source: its Markdown; SVG pictures, each on a line of its own, lie where it says from there on, and links to
            notebooks lead to their pages.
        navigation: as for a notebook's page.
        here: which of these is this page.
        text: a translation to show in place of the source.
        language: of the text.
        other: language and address of the page in another language, or none.

    Raises:
        OSError: a picture is not there.
        ValueError: a formula cannot be converted.
    """
    text = (text or source.read_text(encoding="utf-8")).replace("](notebooks/", "](")
    headings = markdown.Headings()
    lead, *sections = (
        _section(part, source.parent, headings) for part in re.split(r"^(?=## )", text, flags=re.MULTILINE)
    )
    return render(
        "sheet.html.j2",
        title=re.search(r"^# (.+)$", text, re.MULTILINE)[1],
        lead=lead[1],
        sections=sections,
        navigation=navigation,
        root="",
        here=here,
        language=language,
        other=other,
    )


def _section(text: str, folder: Path, headings: markdown.Headings) -> tuple[str, str]:
    """The ledger that a section speaks of, or "", and its HTML."""
    ledger = _LEDGER.search(text)
    shown = []
    for i, piece in enumerate(_PICTURE.split(text)):  # text, then alternative text and file, then text, and so on
        if i % 3 == 0:
            shown.append(markdown.to_html(piece, headings=headings))
        elif i % 3 == 1:
            alt = piece
        else:
            shown.append(f'<p class="picture">{picture((folder / piece).read_bytes(), "image/svg+xml", alt)}</p>\n')
    return ledger[1] if ledger else "", "".join(shown)
