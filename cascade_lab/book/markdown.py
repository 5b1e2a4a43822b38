"""Markdown as HTML that can be shown anywhere: formulas as MathML, pictures inside, foreign HTML as text.

A page needs no network and runs nothing that a text brings along. Of raw HTML only the tags of `TAGS` are kept, without
attributes; every other tag is shown as it was written.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pygments
from nbconvert.filters.markdown_mistune import InvalidNotebook, IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from cascade_lab.book.mathml import to_mathml

TAGS = ("br", "details", "kbd", "p", "sub", "summary", "sup")
_KEPT = re.compile(rf"(</?(?:{'|'.join(TAGS)})\s*/?>|<!--.*?-->)", re.DOTALL)
_NEIGHBOUR = re.compile(r"([\w.-]+)\.ipynb(#.*)?")


class Headings(list):
    """The headings of one page as (level, id, html), in order; ids are unique on the page."""

    def add(self, level: int, text: str) -> str:
        """Note a heading and return its id."""
        plain = html.unescape(re.sub(r"<annotation.*?</annotation>|<[^>]+>", "", text))
        stem = re.sub(r"[^\w]+", "-", plain.lower()).strip("-") or "section"
        taken = {id for _, id, _ in self}
        id = next(i for i in (stem, *(f"{stem}-{n}" for n in range(2, len(self) + 3))) if i not in taken)
        self.append((level, id, text))
        return id


def to_html(
    text: str,
    *,
    folder: Path | None = None,
    attachments: Mapping[str, Mapping[str, str]] | None = None,
    headings: Headings | None = None,
    link: Callable[[str], str] | None = None,
) -> str:
    """Markdown with formulas between dollar signs as HTML.

    Args:
        text: Markdown as JupyterLab reads it.
        folder: where the pictures lie that the text names; they are put inside.
        attachments: pictures that a notebook's cell carries itself, by name and then by type, in base64.
        headings: collects the headings; each gets its id from there.
        link: the address that a name in backticks leads to, "" for none.

    Raises:
        FormulaError: a formula cannot be converted.
        ValueError: a picture is not there, or outside the folder.
    """
    renderer = _Renderer(folder, attachments, Headings() if headings is None else headings, link)
    try:
        return MarkdownWithMath(renderer).render(text)
    except InvalidNotebook as error:
        raise ValueError(str(error)) from None


def highlight(code: str, language: str) -> str:
    """Source text as HTML with one class for each kind of token; plain text where the language is unknown."""
    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return html.escape(code)
    return pygments.highlight(code, lexer, HtmlFormatter(nowrap=True)).rstrip("\n")


class _Renderer(IPythonRenderer):
    def __init__(
        self,
        folder: Path | None,
        attachments: Mapping[str, Mapping[str, str]] | None,
        headings: Headings,
        link: Callable[[str], str] | None,
    ):
        embedding = {"embed_images": folder is not None, "path": str(folder or ""), "attachments": attachments}
        super().__init__(allow_harmful_protocols=False, **embedding)
        self._headings, self._link = headings, link

    def heading(self, text: str, level: int, **_: object) -> str:
        return f'<h{level} id="{self._headings.add(level, text)}">{text}</h{level}>\n'

    def block_math(self, body: str) -> str:
        return to_mathml(body, block=True)

    def inline_math(self, body: str) -> str:
        return to_mathml(body)

    def latex_environment(self, name: str, body: str) -> str:
        return to_mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", block=True)

    def block_code(self, code: str, info: str | None = None) -> str:
        language = (info or "").split()
        return f"<pre><code>{highlight(code.rstrip(), language[0] if language else '')}</code></pre>\n"

    def codespan(self, text: str) -> str:
        address = self._link(html.unescape(text)) if self._link else ""
        code = f"<code>{html.escape(html.unescape(text), quote=False)}</code>"
        return f'<a href="{html.escape(address)}">{code}</a>' if address else code

    def block_html(self, html: str) -> str:
        return _plain(html) + "\n"

    def inline_html(self, html: str) -> str:
        return _plain(html)

    def link(self, text: str, url: str, title: str | None = None) -> str:
        if url.startswith("../"):  # a source beside the notebooks, of which there is no page
            return text
        neighbour = _NEIGHBOUR.fullmatch(url)
        return super().link(text, f"{neighbour[1]}.html{neighbour[2] or ''}" if neighbour else url, title)

    def image(self, text: str, url: str, title: str | None = None) -> str:
        if re.match(r"(https?:)?//", url):
            return self.link(text or url, url, title)
        image = super().image(text, url, title)
        if 'src="data:image/' not in image:
            raise ValueError(f"picture {url!r} is no picture in the notebook's folder")
        return image

    def table(self, text: str) -> str:
        return f'<div class="scroll" role="region" aria-label="Table" tabindex="0"><table>\n{text}</table></div>\n'


def _plain(source: str) -> str:
    pieces = _KEPT.split(source)
    return "".join(
        ("" if piece.startswith("<!--") else piece) if i % 2 else html.escape(html.unescape(piece), quote=False)
        for i, piece in enumerate(pieces)
    )
