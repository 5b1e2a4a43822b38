"""Markdown as HTML that can be shown anywhere: formulas as MathML, pictures inside, foreign HTML as text.

A page needs no network and runs nothing that a text brings along. Of raw HTML only the tags of `TAGS` are kept, without
attributes; every other tag is shown as it was written.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pygments
from nbconvert.filters.markdown_mistune import InvalidNotebook, IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from cascade_lab.book.mathml import equation_id, to_mathml

TAGS = ("br", "details", "kbd", "p", "sub", "summary", "sup")
_KEPT = re.compile(rf"(</?(?:{'|'.join(TAGS)})\s*/?>|<!--.*?-->)", re.DOTALL)
_NEIGHBOUR = re.compile(r"([\w.-]+)\.ipynb(#.*)?")
_NUMBER = re.compile(r"\((\d+\.\d+)\)")
_HEADING = re.compile(r"^(?=#{1,6}[ \t])", re.MULTILINE)
_CODE_BLOCK = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_TERM = re.compile(r'<a class="term"[^>]*>(.*?)</a>')


def jupyterlab_id(text: str) -> str:
    """The id that JupyterLab gives a heading of this text: its spaces are hyphens, and all else stays."""
    return text.replace(" ", "-")


def github_id(text: str) -> str:
    """The id that GitHub gives a heading of this text: small letters, digits and hyphens for spaces."""
    return re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")


class Headings(list):
    """The headings of one page as (level, id, html), in order; ids are unique on the page.

    Args:
        name: makes the id of a heading from its text, `jupyterlab_id` or `github_id`.
    """

    def __init__(self, name: Callable[[str], str] = github_id):
        super().__init__()
        self._name = name

    def add(self, level: int, text: str) -> str:
        """Note a heading and return its id."""
        stem = self._name(_plain_text(text)) or "section"
        taken = {id for _, id, _ in self}
        id = next(i for i in (stem, *(f"{stem}-{n}" for n in range(1, len(self) + 2))) if i not in taken)
        self.append((level, id, text))
        return id


def heading(level: int, id: str, text: str, *, anchored: bool = True) -> str:
    """A heading with a link to it beside it, which is no part of the heading.

    Args:
        level: 1 to 6.
        id: where the link leads.
        text: HTML.
        anchored: give the heading this id, which otherwise an element around it has.
    """
    id, label = html.escape(id), html.escape(_plain_text(text))
    own = f' id="{id}"' if anchored else ""
    link = f'<a class="permalink" href="#{id}" aria-label="Link to: {label}">¶</a>'
    return f'<div class="heading"><h{level}{own}>{text}</h{level}>&nbsp;{link}</div>\n'


def sections(texts: Iterable[str]) -> list[tuple[str, str]]:
    """A notebook cut at its headings: (id of the heading, text below it), a heading's own line included.

    Args:
        texts: the sources of its Markdown cells in order.
    """
    headings, found = Headings(jupyterlab_id), []
    for text in texts:
        for piece in _HEADING.split(_CODE_BLOCK.sub("", text)):
            if piece.startswith("#"):
                to_html(piece.partition("\n")[0], headings=headings)
            if piece.strip():
                found.append((headings[-1][1] if headings else "", piece))
    return found


@dataclass
class Glossary:
    """Where symbols and terms are explained; each is a link at its first use in a section of a page.

    Attributes:
        entries: (address, meaning) by the formula of a symbol, and by a term, which is linked where it stands in bold.
    """

    entries: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set, init=False, repr=False)

    def new_section(self) -> None:
        self._used.clear()

    def link(self, name: str, shown: str) -> str:
        """`shown` as a link to the explanation of `name`, where it has one that this section does not link yet."""
        found = self.entries.get(name)
        if found is None or name in self._used:
            return shown
        self._used.add(name)
        address, meaning = (html.escape(each) for each in found)
        return f'<a class="term" href="{address}" title="{meaning}">{shown}</a>'


def to_html(
    text: str,
    *,
    folder: Path | None = None,
    attachments: Mapping[str, Mapping[str, str]] | None = None,
    headings: Headings | None = None,
    link: Callable[[str], str] | None = None,
    equations: Mapping[str, Collection[str]] | None = None,
    glossary: Glossary | None = None,
) -> str:
    """Markdown with formulas between dollar signs as HTML.

    Args:
        text: Markdown as JupyterLab reads it.
        folder: where the pictures lie that the text names; they are put inside.
        attachments: pictures that a notebook's cell carries itself, by name and then by type, in base64.
        headings: collects the headings; each gets its id from there. By default ids are GitHub's.
        link: the address that a name in backticks leads to, "" for none.
        equations: numbers of equations by the name of the notebook that has them, those of this page under "". A link
            of such a number leads to the equation itself, where the text can name no more than its section.
        glossary: makes the first use of symbols and terms links.

    Raises:
        FormulaError: a formula cannot be converted.
        ValueError: a picture is not there, or outside the folder.
    """
    headings = Headings() if headings is None else headings
    renderer = _Renderer(folder, attachments, headings, link, equations or {}, glossary or Glossary())
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
        equations: Mapping[str, Collection[str]],
        glossary: Glossary,
    ):
        embedding = {"embed_images": folder is not None, "path": str(folder or ""), "attachments": attachments}
        super().__init__(allow_harmful_protocols=False, **embedding)
        self._headings, self._link, self._equations, self._glossary = headings, link, equations, glossary

    def heading(self, text: str, level: int, **_: object) -> str:
        self._glossary.new_section()
        text = _TERM.sub(r"\1", text)
        return heading(level, self._headings.add(level, text), text)

    def block_math(self, body: str) -> str:
        return to_mathml(body, block=True)

    def inline_math(self, body: str) -> str:
        return self._glossary.link(body.strip(), to_mathml(body))

    def strong(self, text: str) -> str:
        return f"<strong>{self._glossary.link(_as_term(text), text)}</strong>"

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
        text, number, neighbour = _TERM.sub(r"\1", text), _NUMBER.fullmatch(text), _NEIGHBOUR.fullmatch(url)
        if number and (neighbour or url.startswith("#")):
            name = neighbour[1] if neighbour else ""
            if number[1] in self._equations.get(name, ()):
                return super().link(text, f"{name and name + '.html'}#{equation_id(number[1])}", title)
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


def _as_term(text: str) -> str:
    """Words in bold as the glossary has them: without a full stop, and without a capital that opens a sentence."""
    text = text.rstrip(".")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _plain_text(fragment: str) -> str:
    """What a fragment of HTML says; of a formula its TeX between dollar signs, as JupyterLab names a heading."""
    formula = re.sub(r"<math.*?<annotation[^>]*>(.*?)</annotation>.*?</math>", r"$\1$", fragment)
    return html.unescape(re.sub(r"<[^>]+>", "", formula))


def _plain(source: str) -> str:
    pieces = _KEPT.split(source)
    return "".join(
        ("" if piece.startswith("<!--") else piece) if i % 2 else html.escape(html.unescape(piece), quote=False)
        for i, piece in enumerate(pieces)
    )
