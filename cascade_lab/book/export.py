"""A notebook as one HTML page that needs nothing else: no network, no script, no font and no file beside it.

Formulas are MathML, pictures and the stylesheet are inside, and what a notebook brings along is text: of raw HTML a few
tags are kept, and of an output the richest form that cannot run (Markdown, picture, plain text) is shown. A cell whose
source is hidden in JupyterLab is folded under what it does.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cascade_lab.book.parameters import NotebookError
from cascade_lab.evidence.claims import MIME

if TYPE_CHECKING:
    from jinja2 import Environment
    from nbformat import NotebookNode

PICTURES = ("image/svg+xml", "image/png", "image/jpeg")


def to_html(
    notebook: NotebookNode,
    path: Path,
    *,
    navigation: Sequence[tuple[str, str, str]] = (),
    here: str = "",
    explorer: str = "",
) -> str:
    """The page of one executed notebook.

    A picture's alternative text is its output metadata, {"image/png": {"alt": ...}}. A claim has the anchor
    "claim-ID", and a heading the one made of its text.

    Args:
        notebook: as nbformat reads it.
        path: its file; pictures that the Markdown names lie in its folder.
        navigation: (address, text, name read aloud) of the pages to link to at the top.
        here: which of these is this page.
        explorer: a macro of explorer_parts.html.j2 that the page ends with, or none.

    Raises:
        NotebookError: a formula cannot be converted or a picture is not there; the cell is named.
    """
    from cascade_lab.book import canonical, markdown

    headings, cells = markdown.Headings(), []
    language = notebook.metadata.get("language_info", {}).get("pygments_lexer", "ipython3")
    for number, cell in enumerate(notebook.cells, 1):
        try:
            if cell.cell_type == "markdown":
                carried = cell.get("attachments", {})
                text = markdown.to_html(cell.source, folder=path.parent, attachments=carried, headings=headings)
                cells.append({"text": text, "code": "", "purpose": "", "outputs": []})
            elif cell.cell_type == "code" and (cell.source.strip() or cell.outputs):
                outputs = [shown for output in cell.outputs if (shown := _output(output, headings))]
                code = markdown.highlight(cell.source, language)
                told = (canonical.purpose(cell) or "Code") if canonical.is_folded(cell) else ""
                cells.append({"text": "", "code": code, "purpose": told, "outputs": outputs})
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
    )


def render(template: str, **values: object) -> str:
    """One page from a template of the folder pages/, where texts are escaped unless the template says `safe`."""
    return _environment().get_template(template).render(**values)


def picture(data: bytes, kind: str, alt: str) -> str:
    """An `img` element with the picture inside."""
    encoded = base64.b64encode(data).decode()
    return f'<img src="data:{kind};base64,{encoded}" alt="{html.escape(alt)}">'


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
    return environment


def _output(output: NotebookNode, headings: list) -> str:
    from nbconvert.filters import strip_ansi

    from cascade_lab.book import markdown

    if output.output_type == "stream":
        return f'<pre class="{html.escape(output.name)}">{html.escape(strip_ansi(output.text).rstrip())}</pre>'
    if output.output_type == "error":
        return f'<pre class="stderr">{html.escape(strip_ansi(chr(10).join(output.traceback)))}</pre>'
    data = output.get("data", {})
    if "text/markdown" in data:
        text = markdown.to_html(data["text/markdown"], headings=headings)
        if MIME not in data:
            return f'<div class="note">{text}</div>'
        return f'<div class="claim" id="claim-{html.escape(data[MIME]["id"])}">{text}</div>'
    for kind in PICTURES:
        if kind in data:
            content = data[kind].encode() if kind.endswith("xml") else base64.b64decode(data[kind])
            alt = output.get("metadata", {}).get(kind, {}).get("alt", "")
            return f'<p class="picture">{picture(content, kind, alt)}</p>'
    return f"<pre>{html.escape(strip_ansi(data['text/plain']).rstrip())}</pre>" if "text/plain" in data else ""


def _text(fragment: str) -> str:
    """What a fragment of HTML says, for places that hold no markup."""
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(fragment, "html.parser")
    for annotation in soup.find_all("annotation"):
        annotation.decompose()
    return soup.get_text()
