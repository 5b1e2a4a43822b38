"""A notebook as one HTML page that needs nothing else: no network, no script, no font and no file beside it.

Formulas are MathML, pictures and the stylesheet are inside, and what a notebook brings along is text: of raw HTML a few
tags are kept, and of an output the richest form that cannot run (Markdown, picture, plain text) is shown. A cell whose
source is hidden in JupyterLab is folded under what it does, and claims that are hidden there under how many they are.
"""

from __future__ import annotations

import base64
import html
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cascade_lab.book.parameters import NotebookError
from cascade_lab.evidence.claims import COLUMNS, HOLDS, MIME

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from nbformat import NotebookNode

LANGUAGES = {"en": "en", "zh": "zh-Hans"}
"""The languages of pages, as HTML names them."""

PICTURES = ("image/svg+xml", "image/png", "image/jpeg")


@dataclass(frozen=True)
class Explained:
    """A symbol or a term: formulas or words for it, one of them as HTML, its meaning, and where it is explained."""

    names: tuple[str, ...]
    shown: str
    meaning: str
    address: str


def to_html(
    notebook: NotebookNode,
    path: Path,
    *,
    navigation: Sequence[tuple[str, str, str]] = (),
    here: str = "",
    explorer: str = "",
    figures: Path | None = None,
    equations: Mapping[str, Collection[str]] | None = None,
    glossary: Sequence[Explained] = (),
    language: str = "en",
    other: tuple[str, str] | None = None,
) -> str:
    """The page of one executed notebook.

    A picture's alternative text is in its output metadata, {"image/png": {"alt": ..., "figure": ...}}, and the figure
    of that name is shown in place of the bitmap where it has been drawn as NAME.svg. A claim has the anchor "claim-ID",
    a heading the one that JupyterLab makes of its text, and an equation that of its number.

    Args:
        notebook: as nbformat reads it.
        path: its file; pictures that the Markdown names lie in its folder.
        navigation: (address, text, name read aloud) of the pages to link to at the top.
        here: which of these is this page.
        explorer: a macro of explorer_parts.html.j2 that the page ends with, or none.
        figures: the folder of the figures.
        equations: numbers of equations by the name of the other notebook that has them.
        glossary: symbols and terms of this notebook, which it lists and links to their explanations.
        language: of LANGUAGES.
        other: language and address of the same page in another language, or none.

    Raises:
        NotebookError: a formula cannot be converted or a picture is not there; the cell is named.
    """
    from cascade_lab.book import canonical, markdown
    from cascade_lab.book.mathml import numbers

    headings, cells = markdown.Headings(markdown.jupyterlab_id), []
    own = [number for cell in notebook.cells if cell.cell_type == "markdown" for number in numbers(cell.source)]
    linked = {
        "headings": headings,
        "equations": {**(equations or {}), "": own},
        "glossary": markdown.Glossary({name: (one.address, one.meaning) for one in glossary for name in one.names}),
    }
    lexer = notebook.metadata.get("language_info", {}).get("pygments_lexer", "ipython3")
    for number, cell in enumerate(notebook.cells, 1):
        try:
            if cell.cell_type == "markdown":
                carried = cell.get("attachments", {})
                text = markdown.to_html(cell.source, folder=path.parent, attachments=carried, **linked)
                if explorer and sum(level == 2 for level, *_ in headings) > 1 and not any(x["explore"] for x in cells):
                    cells.append(_cell(explore=True))  # between the hand example and what follows it
                cells.append(_cell(text=text))
            elif cell.cell_type == "code" and (cell.source.strip() or cell.outputs):
                outputs = [shown for output in cell.outputs if (shown := _output(output, headings, figures))]
                code = markdown.highlight(cell.source, lexer)
                told = (canonical.purpose(cell) or "Code") if canonical.is_folded(cell) else ""
                claims = _claims_told(cell, words(language)["folded"]) if canonical.outputs_folded(cell) else ""
                cells.append(_cell(code=code, purpose=told, outputs=outputs, claims=claims))
        except ValueError as error:
            raise NotebookError(str(error), number) from None
    title = next((text for level, _, text in headings if level == 1), html.escape(path.stem))
    contents = [(id, text) for level, id, text in headings if level == 2]
    return render(
        "notebook.html.j2",
        title=_text(title),
        cells=cells,
        contents=contents,
        navigation=navigation,
        root="",
        here=here,
        explorer=explorer,
        glossary=glossary,
        language=language,
        other=other,
    )


def _cell(*, text: str = "", code: str = "", outputs: Sequence[str] = (), **folds: str | bool) -> dict:
    """A cell as the template has it: a text, code with its outputs, or the place of the link to the explorer."""
    return {"text": text, "code": code, "outputs": outputs} | {"purpose": "", "claims": "", "explore": False} | folds


def _claims_told(cell: NotebookNode, told: str) -> str:
    """The line over folded claims: a mark if all of them hold, how many, and which; "" where not all are claims."""
    claims = [output.data[MIME] for output in cell.outputs if MIME in output.get("data", {})]
    if not claims or len(claims) < len(cell.outputs):
        return ""
    mark = "✓ " if all(each["verdict"] == HOLDS for each in claims) else ""
    return mark + told.format(count=len(claims), first=claims[0]["id"], last=claims[-1]["id"])


def render(template: str, *, language: str = "en", other: tuple[str, str] | None = None, **values: object) -> str:
    """One page from a template of the folder pages/, where texts are escaped unless the template says `safe`.

    Args:
        template: its file.
        language: of LANGUAGES, for what the template itself says.
        other: language and address of the same page in another language, or none.
        values: what the template names.
    """
    switch = (
        {"language": LANGUAGES[other[0]], "address": other[1], "text": words(other[0])["switch"]} if other else None
    )
    said = {"words": words(language), "language": LANGUAGES[language], "switch": switch}
    return _environment().get_template(template).render(**said, **values)


@cache
def words(language: str) -> dict[str, str | dict[str, str]]:
    """What pages say beside their texts, in a language of LANGUAGES."""
    return tomllib.loads((Path(__file__).parent / "pages" / "words.toml").read_text(encoding="utf-8"))[language]


def picture(data: bytes, kind: str, alt: str, width: int | None = None) -> str:
    """An `img` element with the picture inside, as wide as it says or so many pixels of CSS."""
    encoded = base64.b64encode(data).decode()
    size = "" if width is None else f' width="{width}"'
    return f'<img src="data:{kind};base64,{encoded}" alt="{html.escape(alt)}"{size}>'


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    import cascade_lab

    environment = Environment(
        loader=PackageLoader("cascade_lab.book", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["version"] = cascade_lab.__version__
    environment.globals["heading"] = _heading
    return environment


def _heading(level: int, text: str, id: str = "", *, anchored: bool = True) -> Markup:
    """A heading of a template, with the id made of its text where none is given."""
    from markupsafe import escape

    from cascade_lab.book import markdown

    shown = escape(text)
    return type(shown)(markdown.heading(level, id or markdown.github_id(_text(shown)), shown, anchored=anchored))


def _output(output: NotebookNode, headings: list, figures: Path | None) -> str:
    from nbconvert.filters import strip_ansi

    from cascade_lab.book import markdown

    if output.output_type == "stream":
        return f'<pre class="{html.escape(output.name)}">{html.escape(strip_ansi(output.text).rstrip())}</pre>'
    if output.output_type == "error":
        return f'<pre class="stderr">{html.escape(strip_ansi(chr(10).join(output.traceback)))}</pre>'
    data = output.get("data", {})
    if "text/markdown" in data:
        text = markdown.to_html(data["text/markdown"], headings=headings)
        if str(data["text/markdown"]).startswith(f"| {' | '.join(COLUMNS)} |"):
            text = text.replace("<table>", '<table class="claims">')
        if MIME not in data:
            return f'<div class="note">{text}</div>'
        return f'<div class="claim" id="claim-{html.escape(data[MIME]["id"])}">{text}</div>'
    for kind in PICTURES:
        if kind in data:
            content = data[kind].encode() if kind.endswith("xml") else base64.b64decode(data[kind])
            about = output.get("metadata", {}).get(kind, {})
            shown = picture(content, kind, about.get("alt", ""))
            drawn = _drawn(figures, about.get("figure"))
            if drawn:
                # a sharp picture in the bitmap's place, and as wide
                width = int.from_bytes(content[16:20], "big") if content.startswith(b"\x89PNG") else None
                shown = picture(drawn, "image/svg+xml", about.get("alt", ""), width)
            return f'<p class="picture">{shown}</p>'
    return f"<pre>{html.escape(strip_ansi(data['text/plain']).rstrip())}</pre>" if "text/plain" in data else ""


def _drawn(figures: Path | None, name: object) -> bytes:
    """A figure by the name that an output gives, b"" where there is none in the folder."""
    if figures is None or not isinstance(name, str) or not re.fullmatch(r"\w[\w-]*", name):
        return b""
    path = figures / f"{name}.svg"
    return path.read_bytes() if path.is_file() else b""


def _text(fragment: str) -> str:
    """What a fragment of HTML says, for places that hold no markup."""
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(fragment, "html.parser")
    for annotation in soup.find_all("annotation"):
        annotation.decompose()
    return soup.get_text()
