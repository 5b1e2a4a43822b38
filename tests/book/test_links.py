"""Links among notebooks, documents and pages: each leads somewhere, in JupyterLab, on GitHub and on the site.

Headings are read from the sources here by rules written out anew: JupyterLab makes their ids of the text with hyphens
for spaces, and GitHub of its small letters, digits and hyphens.
"""

import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from cascade_lab.book import api_pages, export, markdown, notation, site

CHECKOUT = Path(__file__).resolve().parents[2]
NOTEBOOKS = {path.name: path for path in sorted((CHECKOUT / "notebooks").glob("*.ipynb"))}
DOCUMENTS = [
    "README.md",
    "README.zh.md",
    "SHEET.md",
    "SHEET.zh.md",
    "REUSE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "tests/known_faults.md",
]


def without_code(text):
    return re.sub(r"^(```|~~~).*?^\1|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def texts(name):
    cells = nbformat.read(NOTEBOOKS[name], as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "markdown"]


def headings(text):
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^#{1,6}[ \t]+(.+?)[ \t]*$", text, re.MULTILINE)
    return [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in found]


def in_jupyterlab(name):
    return [heading.replace(" ", "-") for text in texts(name) for heading in headings(text)]


def on_github(document):
    found = headings((CHECKOUT / document).read_text(encoding="utf-8"))
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found]


def links(text):
    return re.findall(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", without_code(text))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_link_of_a_notebook_leads_somewhere_in_jupyterlab(name):
    ids = in_jupyterlab(name)
    assert len(ids) == len(set(ids)), "JupyterLab goes to the first of two equal headings"
    for text in texts(name):
        for words, target in links(text):
            if target.startswith("https://"):
                continue
            path, _, fragment = target.partition("#")
            assert not re.search(r"\w:", path), (words, target)
            if path:
                assert (NOTEBOOKS[name].parent / path).resolve().is_file(), (words, target)
                assert (NOTEBOOKS[name].parent / path).resolve().is_relative_to(CHECKOUT), (words, target)
            if fragment:
                # JupyterLab compares what the browser made of the address with the text of the heading
                assert quote(fragment, safe="/?:@!$&'()*+,;=-._~") == fragment, (words, target)
                assert fragment in in_jupyterlab(path or name), (words, target)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_number_that_is_a_link_leads_to_the_section_of_its_equation(name):
    for text in texts(name):
        for words, target in links(text):
            number = re.fullmatch(r"\((\d+\.\d+)\)", words)
            if number:
                path, _, fragment = target.partition("#")
                sections = markdown.sections(texts(path or name))
                assert [id for id, text in sections if f"\\tag{{{number[1]}}}" in text] == [fragment], (words, target)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_equations_are_numbered_by_notebook_and_in_order(name):
    found = re.findall(r"\\tag\{(.*?)\}", "".join(texts(name)))
    assert found == [f"{int(name[:2])}.{i}" for i in range(1, len(found) + 1)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_of_a_document_leads_somewhere_on_github(name):
    place = CHECKOUT / name
    for words, target in links(place.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        parts = urlsplit(target)
        there = (place.parent / parts.path).resolve() if parts.path else place
        assert there.exists(), (words, target)
        assert there.is_relative_to(CHECKOUT), (words, target)
        if parts.fragment:
            ids = in_jupyterlab(there.name) if there.suffix == ".ipynb" else on_github(there.relative_to(CHECKOUT))
            assert unquote(parts.fragment) in ids, (words, target)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The site without the API's pages, parsed, by name."""
    place = tmp_path_factory.mktemp("site") / "site"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api_pages, "module_names", lambda: ["levels"])
        assert site.build(CHECKOUT / "notebooks", place) == 0
    return {path.name: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser") for path in place.glob("*.html")}


def test_every_heading_has_a_link_to_it_beside_it(pages):
    for name, page in pages.items():
        found = page.find_all(re.compile("^h[1-6]$"))
        assert found, name
        for heading in found:
            link = heading.parent.select_one("a.permalink")
            assert link.parent == heading.parent, name
            assert link["href"] == f"#{heading['id']}", name
            assert link["aria-label"].startswith("Link to: "), name
            assert link["aria-label"] != "Link to: ", name
            assert link.get_text() == "¶", name
            assert "¶" not in heading.get_text(), name
        assert "¶" not in "".join(nav.get_text() for nav in page.find_all("nav")), name


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_heading_has_the_id_that_jupyterlab_gives_it(name, pages):
    page = pages[NOTEBOOKS[name].with_suffix(".html").name]
    found = [h["id"] for h in page.find_all(re.compile("^h[1-6]$")) if not h.find_parent("section", class_="explorer")]
    assert found == in_jupyterlab(name)
    assert found == list(dict.fromkeys(id for id, _ in markdown.sections(texts(name))))


def test_the_number_of_an_equation_stands_to_its_right_and_is_its_place(pages):
    for name in NOTEBOOKS:
        page = pages[f"{name.removesuffix('.ipynb')}.html"]
        tags = re.findall(r"\\tag\{(.*?)\}", "".join(texts(name)))
        assert tags, name
        for tag in tags:
            equation = page.find(id=f"equation-{tag}")
            assert equation["class"] == ["equation"], name
            assert [child.name for child in equation.children] == ["math", "span"], name
            assert equation.span.get_text() == f"({tag})", name


def made(*cells, **options):
    page = export.to_html(new_notebook(cells=list(cells)), Path("02_own.ipynb"), **options)
    return BeautifulSoup(page, "html.parser").main


def test_the_number_of_an_equation_is_a_link_to_the_equation_itself():
    text = (
        "# Own\n\n## The law\n\n$$x = 1 \\tag{2.1}$$\n\n[(2.1)](#The-law) [(2.2)](#The-law) [see (2.1)](#The-law) "
        "[(1.3)](01_other.ipynb#Sum) [(1.4)](01_other.ipynb#Sum) [(2.1)](01_other.ipynb#Sum) [(2.1)](https://a.org/#b)"
    )
    page = made(new_markdown_cell(text), equations={"01_other": ["1.3"]})
    found = [(link.get_text(), link["href"]) for link in page.select("p a")]
    assert found == [
        ("(2.1)", "#equation-2.1"),
        ("(2.2)", "#The-law"),
        ("see (2.1)", "#The-law"),
        ("(1.3)", "01_other.html#equation-1.3"),
        ("(1.4)", "01_other.html#Sum"),
        ("(2.1)", "01_other.html#Sum"),
        ("(2.1)", "https://a.org/#b"),
    ]


def test_equal_headings_have_ids_of_their_own_and_formulas_theirs_as_written():
    page = made(
        new_markdown_cell("# It's *one*: a `b`\n\n## Twice\n\n## Twice\n\n### $h^2$ & more"),
        new_code_cell("1", outputs=[new_output("display_data", data={"text/markdown": "## Twice"})]),
    )
    ids = [heading["id"] for heading in page.find_all(re.compile("^h[1-6]$"))]
    assert ids == ["It's-one:-a-b", "Twice", "Twice-1", "$h^2$-&-more", "Twice-2"]
    assert page.find("h1").parent.a["aria-label"] == "Link to: It's one: a b"
    document = BeautifulSoup(markdown.to_html("# It's *one*: a `b`\n\n## Twice_1 – x\n\n## Twice_1 – x"), "html.parser")
    assert [h["id"] for h in document.find_all(["h1", "h2"])] == ["its-one-a-b", "twice_1--x", "twice_1--x-1"]


def test_symbols_and_terms_link_to_their_explanation_once_in_a_section():
    known = [
        export.Explained(("L",), "<i>L</i>", 'a "length"', "notation.html#symbol-L"),
        export.Explained(("tail", "tails"), "tail", "the rest", "notation.html#term-tail"),
    ]
    text = "# The $L$\n\n$L$ and $L + 1$, $L$\n\n**Tails** are **tail**.\n\n## **Tail**\n\n[the $L$](#x) $L$\n\n$$L$$"
    page = made(new_markdown_cell(text), new_markdown_cell("$L$, a tail"), glossary=known)
    listed = [link.get_text() for link in page.nav.find_next("nav").find_all("a")]
    assert listed == ["L", "tail"]
    shown = [(link["href"], link["title"]) for link in page.select("a.term")]
    symbol, term = (("notation.html#symbol-L", 'a "length"'), ("notation.html#term-tail", "the rest"))
    assert shown == [symbol, term, term]
    assert page.select("h1 a, h2 a, a a") == []


def test_the_notation_page_leads_to_the_section_that_defines_and_each_notebook_leads_back(pages):
    page = pages["notation.html"]
    for row in (*notation.symbols(), *notation.terms()):
        place = page.find(id=row.anchor)
        place = place if place.name == "tr" else place.find_next("dd")
        assert row.meaning in place.get_text()
        found = {link["href"] for link in place.find_all("a")}
        wanted = {number for number in row.defined if any(name.startswith(number) for name in NOTEBOOKS)}
        assert {href[:2] for href in found} == wanted, row.name
        for number in wanted:
            (href,) = [href for href in found if href.startswith(number)]
            name = href.partition(".html")[0]
            assert "#" in href, row.name
            id = href.partition("#")[2]
            below = [text for section, text in markdown.sections(texts(f"{name}.ipynb")) if section == id]
            assert any(row.defined[number] in text for text in below), row.name
            nav = pages[f"{name}.html"].find("nav", attrs={"aria-label": "Symbols and terms"})
            assert nav.find("a", href=f"notation.html#{row.anchor}"), (name, row.name)
