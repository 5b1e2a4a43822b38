"""The site: a home page with the thesis, the notebooks as pages, the table of claims, an explorer of the two ledgers,
the API reference, what other programs can reuse, the notation, and a map of the package. What is translated comes a
second time, below zh/.

It is made in seconds from the notebooks as they are kept, for these carry their outputs, and `check` proves them fresh;
nothing is executed. Every page holds all it needs, so the site works from a folder, from an archive or without network.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cascade_lab import files
from cascade_lab.book import canonical, editions, modes
from cascade_lab.book.execution import load
from cascade_lab.book.export import picture, render, to_html, words
from cascade_lab.book.parameters import NotebookError
from cascade_lab.book.runner import select
from cascade_lab.evidence.claims import COLUMNS, FAILS, INSTRUMENTS, Claim, gather
from cascade_lab.files import UsageError

if TYPE_CHECKING:
    from nbformat import NotebookNode

_ROW = re.compile(r"^\|\s*\[\w+\]\(notebooks/(?P<name>\w+)\.ipynb\)\s*\|(?P<claim>[^|]+)\|.*\|(?P<figure>[^|]*)\|\s*$")
_FIGURE = re.compile(r'src="(?P<file>[^"]+)".*?alt="(?P<alt>[^"]*)"')
_PICTURE = re.compile(r"^!\[(?P<alt>[^\]]+)\]\((?P<file>[^)\s]+)\)\n*", re.MULTILINE)
# README's own links to its languages, which a page has in its navigation
_SWITCH = re.compile(r"^\[English\]\(README\.md\) .*\n+", re.MULTILINE)

EXPLORERS = {"02_cascade_read_volume": "verify", "03_prefix_hit_area": "hit"}
"""The part of the explorer that the page of a notebook ends with."""

PICTURES = {"01_lse_splitting": "01_split"}
"""Figures that say on the home page what a notebook claims, where the one in README's table says something else."""

# the pages that README's introduction links to as files
_PAGE_LINK = re.compile(r"\]\((?:notebooks/(\w+)\.ipynb|(SHEET)\.md)\)")
# to a file beside README, of which the site has no page
_LOCAL_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)[^)]+\)")


@dataclass(frozen=True)
class Entry:
    """One notebook on the home page and in the table of claims.

    Attributes:
        title: as HTML, like `claim` and `picture`.
        claims: as they were judged.
        held: by the id of a claim, the modes in which it is recorded to hold.
    """

    name: str
    title: str
    claim: str
    picture: str
    claims: tuple[Claim, ...]
    held: dict[str, tuple[str, ...]]


def build(folder: Path, output: Path) -> int:
    """Write the site into a folder, whole or not at all.

    Args:
        folder: the notebooks folder; README.md and the figures lie beside it.
        output: replaced if it holds an earlier site, made if it does not exist.

    Returns:
        0, or 1 after one line on stderr for each notebook that has no good result to show.

    Raises:
        UsageError: no README.md beside the notebooks, or an output folder that holds something else.
    """
    readme = folder.parent / "README.md"
    if not readme.is_file():
        raise UsageError(f"no README.md beside {folder}; the site takes its introduction from there")
    if output.exists() and not (output.is_dir() and _is_ours(output)):
        raise UsageError(f"{output} holds something that is no site of this project; name another place with --output")
    try:
        edition = editions.read(folder)
        pages = dict(_pages(folder, readme.read_text(encoding="utf-8"), edition))
        for name, page in _pages(folder, edition.readme, edition, editions.EDITION) if edition.pages else ():
            pages[name], pages[edition.address(name)] = edition.side_by_side(name, pages[name], page)
    except NotebookError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise UsageError(f"cannot write to {output.parent} ({error.strerror})") from None
    try:
        fresh.chmod(0o755)
        for name, page in pages.items():
            (fresh / name).parent.mkdir(exist_ok=True)
            (fresh / name).write_text(page, encoding="utf-8")
        with files.held_back():  # the earlier site goes only when the new one takes its place
            if output.exists():
                shutil.rmtree(output)
            os.replace(fresh, output)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    print(f"{len(pages)} pages in {output}, from {output / 'index.html'}")
    return 0


def _is_ours(output: Path) -> bool:
    index = output / "index.html"
    if not index.is_file():
        return not any(output.iterdir())
    return '<meta name="generator" content="cascade-lab ' in index.read_text(encoding="utf-8", errors="replace")[:1000]


def _pages(
    folder: Path, readme: str, edition: editions.Edition = editions.NONE, language: str = "en"
) -> Iterator[tuple[str, str]]:
    """(file name, page) of everything, or of what the edition has where its language is asked for."""
    from cascade_lab.book import api_pages, map_page, markdown, notation, sheet_page
    from cascade_lab.book.mathml import numbers

    paths = select(folder)
    title, opening, drawn, introduction = _introduction(readme, folder.parent)
    reuse, sheet = folder.parent / "REUSE.md", folder.parent / "SHEET.md"
    english, labels = language == "en", words(language)["navigation"]
    navigation = [
        ("index.html", title, title),
        *([("sheet.html", "Sheet", "Everything on one page")] if sheet.is_file() else []),
        ("claims.html", "Claims", "Claims"),
        ("explorer.html", "Explorer", "Explorer"),
        ("api/index.html", "API", "API reference"),
        *([("reuse.html", "Reuse", "Reuse from other programs")] if reuse.is_file() else []),
        ("notation.html", "Notation", "Notation"),
        ("map.html", "Map", "Map of the package"),
        *((f"{path.stem}.html", path.stem.partition("_")[0], path.stem.replace("_", " ")) for path in paths),
    ]
    navigation = [(address, labels.get(text, text), labels.get(text, name)) for address, text, name in navigation]
    entries, known = [], modes.held(folder)
    written = {path.stem: _texts(path) for path in paths}
    equations = {name: [number for text in texts for number in numbers(text)] for name, texts in written.items()}
    for path in paths:
        try:
            notebook = load(path)
            for problem in canonical.problems(path, notebook):
                raise NotebookError(f"{problem}; `cascade-lab refresh` executes it")
            claims = gather(notebook)
            for claim in claims:
                if claim.verdict == FAILS:
                    raise NotebookError(f"claim {claim.id} fails")
            here, explorer = f"{path.stem}.html", EXPLORERS.get(path.stem, "")
            if not english:
                notebook = edition.translated(path.stem, notebook)
            in_language = {"language": language, "other": edition.other(here, language)}
            page = ""
            if english or here in edition.pages:
                page = to_html(
                    notebook,
                    path,
                    navigation=navigation,
                    here=here,
                    explorer=explorer,
                    figures=folder.parent / "figures",
                    equations=equations,
                    glossary=notation.explained(path.stem.partition("_")[0]),
                    **in_language,
                )
        except (NotebookError, ValueError) as error:
            raise NotebookError(f"{path.name}, {error}") from None
        if page:
            yield here, page
        heading = re.search(r"^# (.+)$", notebook.cells[0].source, re.MULTILINE)
        claim, image = _row(readme, path.stem, folder.parent)
        image = _figure(notebook, PICTURES.get(path.stem), folder.parent) or image
        entries.append(
            Entry(
                path.stem,
                _inline(heading[1] if heading else path.stem),
                _inline(claim),
                image,
                tuple(claims),
                {c.id: known.get((path.stem, c.id, c.statement), ()) for c in claims},
            )
        )
    yield (
        "index.html",
        render(
            "index.html.j2",
            title=title,
            opening=markdown.to_html(opening),
            picture=drawn,
            introduction=markdown.to_html(introduction),
            notebooks=entries,
            counts=_counts(entries),
            navigation=navigation,
            root="",
            here="index.html",
            language=language,
            other=edition.other("index.html", language),
        ),
    )
    if sheet.is_file() and (english or "sheet.html" in edition.pages):
        text = "" if english else edition.documents["sheet.html"].text
        in_language = {"text": text, "language": language, "other": edition.other("sheet.html", language)}
        yield "sheet.html", sheet_page.page(sheet, navigation, **in_language)
    if not english:
        return
    yield (
        "claims.html",
        render(
            "claims.html.j2",
            title="Claims",
            notebooks=entries,
            columns=(*COLUMNS, modes.COLUMN),
            counts=_counts(entries),
            marks=modes.MARKS,
            navigation=navigation,
            root="",
            here="claims.html",
        ),
    )
    thesis = next((part for part in introduction.split("\n\n") if part.startswith("**The thesis.**")), "")
    yield (
        "explorer.html",
        render(
            "explorer.html.j2",
            title="Explorer of the two ledgers",
            thesis=markdown.to_html(thesis),
            navigation=navigation,
            root="",
            here="explorer.html",
        ),
    )
    if reuse.is_file():
        text = _LOCAL_LINK.sub(r"\1", reuse.read_text(encoding="utf-8"))
        yield (
            "reuse.html",
            render(
                "document.html.j2",
                title="Reuse from other programs",
                text=markdown.to_html(text),
                navigation=navigation,
                root="",
                here="reuse.html",
            ),
        )
    sections = {name: markdown.sections(texts) for name, texts in written.items()}
    yield "notation.html", notation.page(navigation, sections)
    yield "map.html", map_page.page(Path(__file__).parents[1], navigation, api_pages.module_names())
    for name, page in api_pages.pages(navigation):
        yield f"api/{name}", page


def _texts(path: Path) -> list[str]:
    """The Markdown cells of a notebook; none of a file that is no notebook, which its page reports."""
    try:
        return [cell.source for cell in load(path).cells if cell.cell_type == "markdown"]
    except NotebookError:
        return []


def _counts(entries: Sequence[Entry]) -> dict[str, int]:
    """How many claims there are as "all", and how many by instrument and by the mode in which they held."""
    claims = [claim for entry in entries for claim in entry.claims]
    held = [mode for entry in entries for found in entry.held.values() for mode in found]
    kinds = {name: sum(claim.instrument == name for claim in claims) for name in INSTRUMENTS}
    return {"all": len(claims)} | kinds | {mode: held.count(mode) for mode in modes.MODES}


def _introduction(readme: str, root: Path) -> tuple[str, str, str, str]:
    """Title, and what stands above the picture, the picture and what stands below it, up to README's first section.

    The picture is as drawn in the SVG beside its bitmap.
    """
    head = readme.split("\n## ", 1)[0]
    title, _, text = head.partition("\n")
    text = _SWITCH.sub("", text)
    text = _PAGE_LINK.sub(lambda found: f"]({found[1] or found[2].lower()}.html)", text)
    found = _PICTURE.search(text)
    if not found:
        return title.removeprefix("# ").strip(), text.strip(), "", ""
    above, below = text[: found.start()].strip(), text[found.end() :].strip()
    return title.removeprefix("# ").strip(), above, _drawn(root / found["file"], found["alt"]), below


def _figure(notebook: NotebookNode, name: str | None, root: Path) -> str:
    """A figure by the name under which a notebook shows it, as drawn, with its alternative text; empty without one."""
    for cell in notebook.cells if name else ():
        for output in cell.get("outputs", []) if f'"{name}"' in cell.source else ():
            if "image/png" in output.get("data", {}):
                return _drawn(root / "figures" / f"{name}.svg", output.metadata["image/png"]["alt"])
    return ""


def _drawn(bitmap: Path, alt: str) -> str:
    vector = bitmap.with_suffix(".svg")
    return picture(vector.read_bytes(), "image/svg+xml", alt) if vector.is_file() else ""


def _row(readme: str, name: str, root: Path) -> tuple[str, str]:
    """Claim and picture of a notebook as README's table has them, empty where it lists none."""
    for line in readme.splitlines():
        row = _ROW.match(line)
        if row and row["name"] == name:
            figure = _FIGURE.search(row["figure"])
            return row["claim"].strip(), _drawn(root / figure["file"], figure["alt"]) if figure else ""
    return "", ""


def _inline(text: str) -> str:
    from cascade_lab.book import markdown

    return markdown.to_html(text).strip().removeprefix("<p>").removesuffix("</p>")
