"""The Chinese edition: a translation beside each English text, passage by passage, and which of them lag behind.

A passage is a Markdown cell of a notebook or a section of a document. Its translation names it and carries a hash of
the English text that it translates, so what has changed since is known by name; formulas, code, numbers and links have
to be the same in both. Code and outputs have no second copy: pages and notebooks of the edition take them from the
English notebook. Nothing here translates.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cascade_lab.book.execution import load
from cascade_lab.book.export import LANGUAGES, words
from cascade_lab.book.runner import select
from cascade_lab.files import UsageError, put_in_place, read_text

if TYPE_CHECKING:
    from nbformat import NotebookNode

EDITION = "zh"
"""The language of the edition, its folder among notebooks and pages, and the suffix of its documents."""

DOCUMENTS = ("README", "SHEET")
NEW = "-" * 10
"""What a passage carries in place of a hash until it is marked for the first time."""

_MARK = re.compile(r"^<!-- (?P<id>[\w-]+) (?P<hash>[0-9a-f]{10}|-{10}) -->$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#{1,6}) (.+)$", re.MULTILINE)
_ANCHOR = re.compile(r"(\]\((?:(?P<name>\w+)\.ipynb)?)#(?P<anchor>[^)\s]+)\)")
# of a finished page: headings with an id, any mention of an id, links within the site, and where a section begins
_ID = re.compile(r'<h([1-6])[^>]*? id="([^"]+)"')
_ANY_ID = re.compile(r'( id="| href="#)([^"]+)(")')
_HREF = re.compile(r'((?:<a|<link)\b[^>]*? href=")(?![a-z]+:|#|\.\./)([^"]+)')
_SECTION = re.compile(r'<h2[^>]*? id="([^"]+)"[^>]*>.*?</h2>(?:&nbsp;<a class="permalink"[^>]*>.*?</a>)?', re.DOTALL)
# a formula within a line and a mark behind it, which begins no line in Chinese, though browsers break before it
_MARKED = re.compile(
    r'((?:<a class="term"[^>]*>)?<math display="inline"(?:(?!</math>).)*</math>(?:</a>)?)([，。；：、）？！])',
    re.DOTALL,
)
# what has to be the same in a passage and its translation; each is taken out before the next is looked for
_KINDS = {
    "code blocks": _FENCE,
    "inline code": re.compile(r"`[^`\n]+`"),
    "formulas": re.compile(r"\$\$.+?\$\$|(?<!\\)\$[^$\n]+\$", re.DOTALL),
    "links": re.compile(r"\]\([^)\s]+\)|(?<=src=)\"[^\"]+\"|https?://[^\s)>]+"),
    "tags": re.compile(r"</?\w+|<!--.*?-->", re.DOTALL),
    "headings": re.compile(r"^#{1,6}(?= )", re.MULTILINE),
    "table rows": re.compile(r"^\|(?=.*\|$)", re.MULTILINE),
    "numbers": re.compile(r"(?<![A-Za-z0-9_.,])[0-9]+(?:[.,][0-9]+)*"),
}


@dataclass(frozen=True)
class Passage:
    """The translation of one passage.

    Attributes:
        id: of the Markdown cell, or of the section: its English heading in small letters, "introduction" for the first.
        hash: of the English text that it translates, NEW where nobody has compared the two yet.
        text: in Markdown.
    """

    id: str
    hash: str
    text: str


@dataclass(frozen=True)
class Document:
    """A text of the project with its translation: README, the sheet, or a notebook.

    Attributes:
        name: the English file, relative to the checkout.
        path: the file of the translation.
        original: the English passages by id, in order.
        translation: the translated ones, in order.
    """

    name: str
    path: Path
    original: Mapping[str, str]
    translation: Sequence[Passage]

    @property
    def passages(self) -> dict[str, Passage]:
        """The translation by id."""
        return {passage.id: passage for passage in self.translation}

    @property
    def text(self) -> str:
        """The translation as one text, with a note where it lags behind."""
        return "\n\n".join(self.shown(passage.id) for passage in self.translation) + "\n"

    def lags(self, id: str) -> bool:
        """Whether the English passage has no translation, or has changed since it was translated."""
        passage = self.passages.get(id)
        return passage is None or passage.hash != fingerprint(self.original.get(id, ""))

    def shown(self, id: str) -> str:
        """A passage as it is shown: the translation, else the English text, with a note unless it is current."""
        passage, late = self.passages.get(id), self.lags(id)
        text = passage.text if passage else self.original[id]
        return f"{text}\n\n*{words(EDITION)['late' if passage else 'missing']}*" if late else text


@dataclass(frozen=True)
class Edition:
    """What is translated, as the site needs it.

    Attributes:
        documents: with their translations, by the name of their page.
    """

    documents: Mapping[str, Document]

    @property
    def pages(self) -> frozenset[str]:
        """The pages that the edition has, by their addresses in the English site; none without a home page."""
        return frozenset(self.documents) if "index.html" in self.documents else frozenset()

    @property
    def readme(self) -> str:
        """README in the edition's language."""
        return self.documents["index.html"].text

    def address(self, page: str) -> str:
        """Where the translation of a page stands in the site."""
        return f"{EDITION}/{page}"

    def other(self, page: str, language: str) -> tuple[str, str] | None:
        """The other language of a page and its address there, for a page at the root of its language; or none."""
        if page not in self.pages:
            return None
        return (EDITION, self.address(page)) if language == "en" else ("en", f"../{page}")

    def translated(self, name: str, notebook: NotebookNode) -> NotebookNode:
        """The notebook of that name in the edition's language where it is translated, else as it is."""
        document = self.documents.get(f"{name}.html")
        return translated(notebook, document) if document else notebook

    def side_by_side(self, page: str, english: str, chinese: str) -> tuple[str, str]:
        """Both pages with links between their sections, the second one ready to stand in the edition's folder.

        Its headings take the English ids, so an address leads to the same section in both, and its links lead to what
        the edition has and to the English pages for the rest.

        Args:
            page: its address in the English site.
            english: the page.
            chinese: its translation, made as if it stood beside the English one.
        """
        ids = [[found[2] for found in _ID.finditer(text)] for text in (english, chinese)]
        if len(ids[0]) == len(ids[1]):
            known = dict(zip(ids[1], ids[0], strict=True))
            chinese = _ANY_ID.sub(lambda found: found[1] + known.get(found[2], found[2]) + found[3], chinese)

        def lead(found: re.Match[str]) -> str:
            target = found[2].partition("#")[0]
            return f"{found[1]}{'' if target in self.pages else '../'}{found[2]}"

        labels = [f' aria-label="{words(language)["link"]}' for language in ("en", EDITION)]
        chinese = _HREF.sub(lead, chinese).replace(*labels)
        chinese = _MARKED.sub(r'<span class="together">\1\2</span>', chinese)
        shared = {found[2] for found in _ID.finditer(english)} & {found[2] for found in _ID.finditer(chinese)}

        def linked(text: str, language: str) -> str:
            there, address = self.other(page, language)
            attributes = f'lang="{LANGUAGES[there]}" hreflang="{LANGUAGES[there]}"'

            def beside(found: re.Match[str]) -> str:
                if found[1] not in shared:
                    return found[0]
                to = f'<a class="elsewhere" href="{address}#{found[1]}" {attributes}>{words(there)["switch"]}</a>'
                return f"{found[0]}{to}"

            return _SECTION.sub(beside, text)

        return linked(english, "en"), linked(chinese, EDITION)


NONE = Edition({})
"""No translation at all."""


def read(folder: Path) -> Edition:
    """The edition beside a notebooks folder; raises as `documents` does."""
    found = {}
    for document in documents(folder):
        stem = Path(document.name).stem
        found["index.html" if stem == "README" else f"{stem if stem[0].isdigit() else stem.lower()}.html"] = document
    return Edition(found)


def documents(folder: Path) -> list[Document]:
    """Everything that is translated, by the notebooks folder: documents beside it, then notebooks.

    Raises:
        UsageError: a translation whose English text is not there.
        NotebookError: an English notebook cannot be read.
        ForeignFileError: a file that is no UTF-8 text.
    """
    root, found = folder.parent, []
    for stem in DOCUMENTS:
        path, source = root / f"{stem}.{EDITION}.md", root / f"{stem}.md"
        if path.is_file() and source.is_file():
            original = sections(read_text(source))
            found.append(Document(source.name, path, original, split(read_text(path))))
    known = {path.stem: path for path in select(folder)}
    for path in sorted((folder / EDITION).glob("[0-9]*.md")):
        if path.stem not in known:
            raise UsageError(f"{path.name} translates no notebook of {folder}")
        source = known[path.stem]
        name = source.relative_to(root).as_posix()
        found.append(Document(name, path, cells(load(source)), split(read_text(path))))
    return found


def sections(text: str) -> dict[str, str]:
    """The sections of a Markdown document by id, split before each heading of level two."""
    code = [match.span() for match in _FENCE.finditer(text)]
    cuts = [m.start() for m in _HEADING.finditer(text) if m[1] == "##" and not any(a <= m.start() < b for a, b in code)]
    found = {}
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        part = text[start:end].strip()
        heading = part.partition("\n")[0].removeprefix("## ")
        id = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") if start else "introduction"
        found[id] = part
    return found


def cells(notebook: NotebookNode) -> dict[str, str]:
    """The Markdown cells of a notebook by id."""
    return {cell.id: cell.source.strip() for cell in notebook.cells if cell.cell_type == "markdown"}


def split(text: str) -> list[Passage]:
    """The passages of a translation: each stands under a comment with its id and the hash of its English text."""
    marks = list(_MARK.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [Passage(m["id"], m["hash"], text[m.end() : end].strip()) for m, end in zip(marks, ends, strict=True)]


def fingerprint(text: str) -> str:
    """The hash of an English passage: ten hexadecimal digits that change with any character but outer white space."""
    return hashlib.sha256(text.strip().encode()).hexdigest()[:10]


def problems(document: Document) -> list[str]:
    """One line for each passage that lags behind, is missing or too many, or differs in what has to be the same."""
    found = [f"{document.name}, {id}: no translation" for id in document.original if id not in document.passages]
    counts = Counter(passage.id for passage in document.translation)
    found += [f"{document.name}, {id}: translated {n} times" for id, n in counts.items() if n > 1]
    for id, passage in document.passages.items():
        if id not in document.original:
            found.append(f"{document.name}, {id}: a translation of no English text")
            continue
        if document.lags(id):
            found.append(f"{document.name}, {id}: lags behind the English text")
        found += [f"{document.name}, {id}: {line}" for line in differences(document.original[id], passage.text)]
    if not found and list(document.original) != [passage.id for passage in document.translation]:
        found.append(f"{document.name}: the passages stand in another order than in English")
    return found


def differences(original: str, translation: str) -> list[str]:
    """One line for each kind of thing that both texts have to hold and do not hold alike."""
    found = []
    for kind, pattern in _KINDS.items():
        counts = [Counter(pattern.findall(text)) for text in (original, translation)]
        lacks, adds = counts[0] - counts[1], counts[1] - counts[0]
        said = [f"{word} {', '.join(few.elements())}" for word, few in (("lacks", lacks), ("adds", adds)) if few]
        if said:
            found.append(f"{kind}: {'; '.join(said)}")
        original, translation = (pattern.sub(" ", text) for text in (original, translation))
    return found


def mark(document: Document, ids: Collection[str] = ()) -> list[str]:
    """Write the hashes of today's English text into a translation, for every passage that holds what it has to.

    Args:
        document: whose file is rewritten.
        ids: the passages to mark, all unless given.

    Returns:
        What is left to say about the document.
    """

    def renewed(found: re.Match[str]) -> str:
        id, passage = found["id"], document.passages[found["id"]]
        original = document.original.get(id)
        if original is None or (ids and id not in ids) or differences(original, passage.text):
            return found[0]
        return f"<!-- {id} {fingerprint(original)} -->"

    text = read_text(document.path)
    fresh = _MARK.sub(renewed, text)
    if fresh != text:
        put_in_place({document.path: fresh.encode()})
    return problems(Document(document.name, document.path, document.original, split(fresh)))


def translated(notebook: NotebookNode, document: Document) -> NotebookNode:
    """A copy of a notebook with the translated text; code, outputs and ids stay.

    A passage that lags behind says so, and one that is missing stays in English.
    """
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.strip():
            cell.source = document.shown(cell.id)
    return notebook


def write(folder: Path, output: Path) -> list[Path]:
    """Write all notebooks into a folder: those of the edition with their Chinese text, the others as they are.

    Links to headings lead to the translated ones, as JupyterLab names them.
    """
    import nbformat

    ours = {document.path.stem: document for document in documents(folder) if document.path.parent != folder.parent}
    notebooks = {path.stem: load(path) for path in select(folder)}
    fresh = {name: translated(notebooks[name], document) for name, document in ours.items()}
    anchors = {name: _anchors(notebooks[name], fresh[name]) for name in ours}
    written = {}
    for name, notebook in (notebooks | fresh).items():
        for cell in notebook.cells:
            if cell.cell_type == "markdown":

                def follow(found: re.Match[str], here: str = name) -> str:
                    known = anchors.get(found["name"] or here, {})
                    return f"{found[1]}#{known.get(found['anchor'], found['anchor'])})"

                cell.source = _ANCHOR.sub(follow, cell.source)
        text = nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"
        written[output / f"{name}.ipynb"] = text.encode()
    put_in_place(written)
    return list(written)


def _anchors(english: NotebookNode, chinese: NotebookNode) -> dict[str, str]:
    """JupyterLab's anchor of each English heading, and that of its translation."""
    from cascade_lab.book.markdown import jupyterlab_id

    found = {}
    for one, other in zip(english.cells, chinese.cells, strict=True):
        if one.cell_type == "markdown":
            pairs = zip(_headings(one.source), _headings(other.source), strict=False)
            found |= {jupyterlab_id(before): jupyterlab_id(after) for before, after in pairs}
    return found


def _headings(text: str) -> list[str]:
    return [re.sub(r"[`*$]", "", found[2]) for found in _HEADING.finditer(_FENCE.sub("", text))]
