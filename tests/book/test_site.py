"""The site and the exported pages: whole without network, true to the notebooks, and closed to what these bring along.

What needs a browser to be seen is checked by `make browser-test`.
"""

import base64
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from fractions import Fraction
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import cascade_lab
from cascade_lab import book, cli
from cascade_lab.book import api_pages, editions, export, layout, modes, runner, site
from cascade_lab.book.mathml import FormulaError, to_mathml
from cascade_lab.book.parameters import NotebookError
from cascade_lab.evidence.claims import INSTRUMENTS, MIME, gather
from cascade_lab.files import UsageError

CHECKOUT = Path(__file__).resolve().parents[2]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
TRANSLATED = sorted(editions.read(CHECKOUT / "notebooks").pages)
HELD = modes.held(CHECKOUT / "notebooks")
# how many claims are folded, which each language says in its own words, and the first and the last of them
COUNTED = re.compile(r"(?<=<summary>)((?:✓ )?\d+) [^<>]*?(?=</summary>)")
NOTEBOOKS = {path.stem: path for path in sorted((CHECKOUT / "notebooks").glob("*.ipynb"))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("site") / "site"
    assert cli.main(["site", "--output", str(place)]) == 0
    return place


@pytest.fixture(scope="module")
def pages(folder):
    """Every page of the site, parsed, by its path within the site."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
    return found


def formulas(text):
    """The formulas of a Markdown text, found without the exporter: code is cut out, then dollar signs are paired."""
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    return re.findall(r"(?<!\\)\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$", text, re.DOTALL)


def plain(tex):
    return " ".join(re.sub(r"\\tag\{.*?\}", "", tex).split())


def test_the_site_has_a_page_for_everything(pages):
    expected = {f"{name}.html" for name in ("index", "sheet", "claims", "explorer", "reuse", "notation", "map")}
    expected |= {f"{name}.html" for name in (*NOTEBOOKS, "api/index")}
    expected |= {f"api/{name}.html" for name in api_pages.module_names()}
    assert editions.read(CHECKOUT / "notebooks").pages <= expected
    expected |= {f"zh/{name}" for name in TRANSLATED}
    assert set(pages) == expected
    assert {"levels", "drafts", "prefix", "regions", "states", "evidence.claims"} < set(api_pages.module_names())


def test_a_page_has_language_title_and_headings_in_order(pages):
    titles = {}
    for name, page in pages.items():
        assert page.html["lang"] == ("zh-Hans" if name.startswith("zh/") else "en"), name
        assert page.title.string.strip(), name
        levels = [int(heading.name[1]) for heading in page.find_all(re.compile("^h[1-6]$"))]
        assert levels.count(1) == 1, name
        assert all(after <= before + 1 for before, after in zip([0, *levels], levels, strict=False)), name
        ids = [node["id"] for node in page.find_all(id=True)]
        assert len(ids) == len(set(ids)), name
        titles.setdefault(page.title.string, []).append(name)
    assert [same for same in titles.values() if len(same) > 1] == [["api/index.html", "index.html", "zh/index.html"]]


def test_every_link_resolves(pages):
    ids = {name: {node["id"] for node in page.find_all(id=True)} for name, page in pages.items()}
    for name, page in pages.items():
        links = [link["href"] for link in page.find_all("a", href=True)]
        assert len(links) > 5, name
        for link in links:
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme == "https", (name, link)
                continue
            steps = [*name.split("/")[:-1], *parts.path.split("/")] if parts.path else name.split("/")
            target = "/".join(step for i, step in enumerate(steps) if step != ".." and steps[i + 1 : i + 2] != [".."])
            assert target in pages, (name, link)
            assert not parts.fragment or unquote(parts.fragment) in ids[target], (name, link)


def test_nothing_is_loaded_from_elsewhere(pages, folder):
    for name, page in pages.items():
        for node in page.find_all(src=True):
            assert node["src"].startswith("data:image/"), (name, node.name)
        for node in page.find_all("link"):
            assert node["href"] == "data:," or (node["rel"] == ["alternate"] and node["hreflang"]), name
        assert page.find_all(["iframe", "object", "embed", "base"]) == []
        assert not re.search(r"@import|url\(", "".join(style.string for style in page.find_all("style"))), name
        text = (folder / name).read_text(encoding="utf-8")
        explored = ("explorer.html", *(f"{stem}.html" for stem in site.EXPLORERS))
        assert text.count("<script") == (name.removeprefix("zh/") in explored), name
        # addresses stand in links to be clicked, in the name of MathML, and in text
        markup = re.sub(r'(src="data:|<a href=")[^"]+"', "", text)
        attributes = re.findall(r'\w+="[^"]*//[^"]*"', markup)
        assert set(attributes) <= {'xmlns="http://www.w3.org/1998/Math/MathML"'}, name


def test_the_page_on_reuse_shows_the_table_of_names_and_every_recipe(pages):
    text, page = (CHECKOUT / "REUSE.md").read_text(encoding="utf-8"), pages["reuse.html"]
    assert pages["index.html"].find("a", href="reuse.html", string="Reuse")
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    assert [heading.get_text() for heading in page.find_all(re.compile("^h[12]$"))] == headings
    recipes = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert [block.get_text().strip() for block in page.find_all("pre")] == [recipe.strip() for recipe in recipes]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip().replace("`", "") for cell in row] for row in (rows[0], *rows[2:])]
    assert [[cell.get_text() for cell in row.find_all(["th", "td"])] for row in page.find_all("tr")] == cells


def test_the_index_shows_the_thesis_of_the_readme_and_every_notebook(pages):
    index = pages["index.html"]
    text = " ".join(index.get_text().split())
    introduction = README.split("\n## ", 1)[0].split("\n", 1)[1].replace("**", "").replace("*", "")
    (alt,) = re.findall(r"^!\[(.+)\]\(figures/03_two_savings.png\)$", introduction, re.MULTILINE)
    first = index.find("img")
    assert first["alt"] == alt
    assert first["src"].startswith("data:image/svg+xml;base64,")
    assert first["src"].endswith(base64.b64encode((CHECKOUT / "figures" / "03_two_savings.svg").read_bytes()).decode())
    above, below = (getattr(first.parent, f"find_{side}_sibling")("p") for side in ("previous", "next"))
    assert above.get_text().startswith("A draft is a guess")
    assert below.get_text().startswith("The thesis. A plan has two ledgers")
    parts = [part for part in introduction.strip().split("\n\n") if not part.startswith(("![", "[English]"))]
    table = [part for part in parts if part.startswith("|")]
    for part in set(parts) - set(table):
        assert " ".join(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", part).split()) in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in "\n".join(table).splitlines()]
    shown = [[cell.get_text() for cell in row.find_all(["th", "td"])] for row in index.table.find_all("tr")]
    assert shown == [rows[0], *rows[2:]]
    for link in re.findall(r"\]\(notebooks/(\w+)\.ipynb\)", introduction):
        assert below.find_next_sibling("p").find_parent().find("a", href=f"{link}.html", string=re.compile("^notebook"))
    assert "A plan has two ledgers" in " ".join(pages["explorer.html"].get_text().split())
    for name, path in NOTEBOOKS.items():
        heading = index.select_one(f'h3 a[href="{name}.html"]')
        first = nbformat.read(path, as_version=4).cells[0].source.splitlines()[0]
        assert heading.get_text() == first.removeprefix("# ")
        row = next(line for line in README.splitlines() if line.startswith(f"| [{name}]"))
        entry = heading.find_parent("section")
        assert entry.p.get_text() == row.split("|")[2].strip()
        figure, alt = re.search(r'src="figures/(\w+)\.png".*alt="([^"]+)"', row).groups()
        if name in site.PICTURES:
            figure = site.PICTURES[name]
            (cell,) = [cell for cell in nbformat.read(path, as_version=4).cells if f'"{figure}"' in cell.source]
            (alt,) = [o.metadata["image/png"]["alt"] for o in cell.outputs if "image/png" in o.get("data", {})]
        assert entry.img["alt"] == alt
        drawn = base64.b64decode(entry.img["src"].removeprefix("data:image/svg+xml;base64,"))
        assert drawn == (CHECKOUT / "figures" / f"{figure}.svg").read_bytes()


def test_the_home_page_counts_the_claims_and_leads_to_their_table(pages):
    made = {name: gather(nbformat.read(path, as_version=4)) for name, path in NOTEBOOKS.items()}
    kinds = [claim.instrument for claims in made.values() for claim in claims]
    line = pages["index.html"].find(id="claims").find_next("p")
    assert line.a.get_text() == f"All {len(kinds)} claims"
    assert [int(found) for found in re.findall(r"\d+", line.get_text().replace("float64", ""))] == [
        len(kinds),
        *(kinds.count(name) for name in INSTRUMENTS),
    ]
    for name, claims in made.items():
        for page, root in (("index.html", ""), ("zh/index.html", "../")):
            short = pages[page].find("p", id=f"claims-{name}")  # addresses of the time when the table stood here
            assert short.get_text().startswith(str(len(claims)))
            assert short.a["href"] == f"{root}claims.html#claims-{name}"


@pytest.mark.parametrize("home", ["index.html", "zh/index.html"])
def test_the_navigation_says_what_each_notebook_is_about(home, pages):
    links = {link["href"].removeprefix("../"): link.get_text() for link in pages[home].nav.find_all("a")}
    said = {name: links[f"{name}.html"] for name in NOTEBOOKS}
    for name, text in said.items():
        number, _, subject = text.partition(" ")
        assert number == name.partition("_")[0]
        assert 2 <= len(subject) <= 16, text
    assert len(set(said.values())) == len(said)


def test_every_claim_is_in_the_table_with_its_values_and_a_link_to_its_place(pages):
    total = 0
    for name, path in NOTEBOOKS.items():
        claims = gather(nbformat.read(path, as_version=4))
        table = pages["claims.html"].find("div", attrs={"aria-label": f"Claims of {name}"}).table
        assert table.parent.find_previous("h2").a["href"] == f"{name}.html"
        header = [cell.get_text() for cell in table.thead.find_all("th")]
        assert header == ["id", "statement", "instrument", "expected", "measured", "verdict", "held in"]
        rows = [[cell.get_text() for cell in row.find_all(["th", "td"])] for row in table.tbody.find_all("tr")]
        held = [HELD.get((name, c.id, c.statement), ()) for c in claims]
        where = [" ".join(modes.MARKS[mode] for mode in found) for found in held]
        rows_of = table.tbody.find_all("tr")
        assert [[mark["title"] for mark in row.find_all("abbr")] for row in rows_of] == [list(each) for each in held]
        assert [row["id"] for row in rows_of] == [f"claim-{c.id}" for c in claims]
        assert [row.th.a["href"] for row in rows_of] == [f"{name}.html#claim-{c.id}" for c in claims]
        values = [[c.id, c.statement, c.instrument, c.expected, c.measured or "", c.verdict] for c in claims]
        assert rows == [[*row, place] for row, place in zip(values, where, strict=True)]
        places = {place["id"]: place.get_text() for place in pages[f"{name}.html"].find_all("div", class_="claim")}
        for claim in claims:
            assert f"{claim.id} {claim.verdict}: {claim.statement}" in places[f"claim-{claim.id}"]
        (own,) = pages[f"{name}.html"].select("table.claims")
        assert [row.td.get_text() for row in own.tbody.find_all("tr")] == [claim.id for claim in claims]
        total += len(claims)
    assert total > 200
    page = pages["claims.html"]
    assert page.find("p").get_text().startswith(f"{total} claims")
    legend = {item.get_text().split(",")[0].split(" and ")[0] for item in page.main.ul.find_all("li")}
    assert legend == {"I", "80", "GPU"}
    told = [int(number) for number in re.findall(r"(\d+)(?= and \d+ claims| claims)", page.main.ul.get_text())]
    assert told == [number for number in modes.counts(HELD).values() if number]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_keeps_its_pictures_their_alternative_text_and_its_code(name, pages):
    notebook, page = nbformat.read(NOTEBOOKS[name], as_version=4), pages[f"{name}.html"]
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    shown = page.find_all("img")
    assert len(images) == len(shown) > 0
    for output, image in zip(images, shown, strict=True):
        about, bitmap = output.metadata["image/png"], base64.b64decode(output.data["image/png"])
        assert image["alt"] == about["alt"]
        kind, _, data = image["src"].removeprefix("data:").partition(";base64,")
        if "figure" in about:
            vector = (CHECKOUT / "figures" / f"{about['figure']}.svg").read_bytes()
            assert (kind, base64.b64decode(data)) == ("image/svg+xml", vector)
            assert int(image["width"]) == int.from_bytes(bitmap[16:20], "big") > 500
        else:
            assert (kind, base64.b64decode(data)) == ("image/png", bitmap)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert [block.pre.get_text() for block in page.find_all("div", class_="code")] == sources


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_formula_is_mathml_and_no_tex_is_left(name, pages):
    notebook, page = nbformat.read(NOTEBOOKS[name], as_version=4), pages[f"{name}.html"]
    written = [pair for cell in notebook.cells if cell.cell_type == "markdown" for pair in formulas(cell.source)]
    math = [one for one in page.find_all("math") if not one.find_parent("nav")]
    assert len(math) > 10
    assert [m.annotation.string for m in math] == [plain(block or inline) for block, inline in written]
    assert [m["display"] for m in math] == ["block" if block else "inline" for block, _ in written]
    tags = [tag for block, _ in written for tag in re.findall(r"\\tag\{(.*?)\}", block)]
    assert [number.string for number in page.select(".equation .number")] == [f"({tag})" for tag in tags]
    hidden = ("annotation", "code", "pre", "style")
    left = " ".join(text for text in page.main.find_all(string=True) if not text.find_parent(hidden))
    assert not re.search(r"\\[a-zA-Z]+|\$", left), re.search(r".{20}(\\[a-zA-Z]+|\$).{20}", left)


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_translated_page_has_the_code_the_outputs_and_the_sections_of_the_english_one(name, pages):
    both = pages[name], pages[f"zh/{name}"]
    shown = [[block.get_text() for block in page.find_all("pre")] for page in both]
    assert shown[0] == shown[1]
    assert shown[0] or name == "index.html"
    ids = [[each["id"] for each in page.find_all(re.compile("^h[1-6]$"), id=True)] for page in both]
    assert ids[0] == ids[1]
    if name.removesuffix(".html") in NOTEBOOKS:
        for kind in ("code", "claim", "picture"):
            shown = [[re.sub(COUNTED, r"\1", str(block)) for block in page.find_all(class_=kind)] for page in both]
            assert shown[0] == shown[1] != []
    assert re.search("[\u4e00-\u9fff]{4}", both[1].main.get_text())
    for formula in both[1].find_all("math", display="inline"):
        end = formula.parent if formula.parent.name == "a" else formula
        assert not re.match("[，。；：、）]", str(end.next_sibling or "")) or end.find_parent(class_="together")


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_translated_page_and_the_english_one_lead_to_each_other_section_by_section(name, pages):
    for here, there, language in ((name, f"zh/{name}", "zh-Hans"), (f"zh/{name}", f"../{name}", "en")):
        page = pages[here]
        assert page.header.find_all("a")[-1]["href"] == there
        assert page.find("link", rel="alternate") == page.find("link", hreflang=language, href=there)
        sections = [heading["id"] for heading in page.find_all("h2", id=True)]
        linked = [a["href"] for a in page.find_all("a", class_="elsewhere", hreflang=language)]
        assert linked == [f"{there}#{id}" for id in sections]
    for name in set(pages) - {*TRANSLATED, *(f"zh/{name}" for name in TRANSLATED)}:
        assert not pages[name].find(hreflang=True), name


def test_a_page_of_the_edition_leads_to_the_edition_first(pages):
    for name in TRANSLATED:
        page = pages[f"zh/{name}"]
        for link in page.find_all("a", href=True):
            path = urlsplit(link["href"]).path.removeprefix("../")
            ours = not link["href"].startswith(("../", "http"))
            if link.get("hreflang") or not path or link.find_parent("p", class_="quiet"):
                continue
            assert ours == (path in TRANSLATED) or not path.endswith(".html"), (name, link["href"])


MATH = {
    r"\ln 2": "<mi>ln</mi><mspace width='0.167em' /><mn>2</mn>",
    r"\ln(2)": "<mi>ln</mi><mo stretchy='false'>(</mo>",
    r"\mathrm{lse}_A": "<msub><mrow><mi>lse</mi></mrow><mi>A</mi></msub>",
    r"\Delta w": "<mi mathvariant='normal'>Δ</mi><mi>w</mi>",
    r"\lceil x\rceil": "<mo stretchy='false'>⌈</mo><mi>x</mi><mo stretchy='false'>⌉</mo>",
    r"1/2": "<mo lspace='0' rspace='0'>/</mo>",
    r"u \max_i |o_i|": "<mi>u</mi><mspace width='0.167em' /><msub><mi>max</mi><mi>i</mi></msub><mspace",
    r"a < b": "<mi>a</mi><mo>&lt;</mo><mi>b</mi>",
    r"t \bmod c": "<mo>mod</mo>",
    r"\href{javascript:alert(1)}{x}": "<mrow><mi>x</mi></mrow>",
}


@pytest.mark.parametrize("tex", MATH)
def test_a_formula_is_set_as_tex_sets_it(tex):
    drawn = to_mathml(tex)
    assert MATH[tex].replace("'", '"') in drawn
    assert f'<annotation encoding="application/x-tex">{tex.replace("<", "&lt;")}</annotation>' in drawn
    assert "href=" not in drawn


def test_a_formula_of_its_own_line_has_its_number_beside_it():
    drawn = to_mathml(r"x = \frac{1}{2} . \tag{2.<1>}", block=True)
    assert drawn.startswith('<span class="equation" id="equation-2.&lt;1&gt;"><math display="block"')
    assert drawn.endswith('</math><span class="number">(2.&lt;1&gt;)</span></span>')
    assert "tag" not in drawn
    assert to_mathml("x", block=True).startswith('<span class="equation"><math display="block"')


@pytest.mark.parametrize(
    ("tex", "cause"),
    [
        (r"\nosuch{a}", r"unknown command \\nosuch"),
        (r"\frac{1}", "expected 2 parts of a mfrac"),
        (r"\left( a", "cannot be converted"),
        ("{", "cannot be converted"),
        (r"a \tag{1}", r"\\tag is for a formula of its own line"),
        ("", "cannot be converted"),
    ],
)
def test_a_formula_that_cannot_be_converted_is_an_error(tex, cause):
    with pytest.raises(FormulaError, match=cause):
        to_mathml(tex)


HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">'


def hostile_notebook():
    claim = {
        "id": '1.1"><b',
        "statement": HOSTILE,
        "instrument": "derived",
        "expected": "<b>1</b>",
        "measured": "<b>1</b>",
        "verdict": "holds",
    }
    outputs = [
        new_output("stream", name="stdout", text=f"\x1b[31m{HOSTILE}\x1b[0m"),
        new_output("display_data", data={"text/html": HOSTILE, "text/plain": "a table <1>"}),
        new_output("display_data", data={"application/javascript": "alert(3)"}),
        new_output("display_data", data={"image/svg+xml": f"<svg xmlns='http://www.w3.org/2000/svg'>{HOSTILE}</svg>"}),
        new_output(
            "display_data",
            data={"image/png": base64.b64encode(b"pixels").decode()},
            metadata={"image/png": {"alt": 'a "b" <c>'}},
        ),
        new_output("display_data", data={MIME: claim, "text/markdown": f"✓ **1.1 holds**: {HOSTILE}"}),
        new_output("error", ename="E", evalue="v", traceback=[HOSTILE]),
    ]
    text = (
        f"# A <em>title</em> & $N_r$\n\n{HOSTILE}\n\nin line {HOSTILE}, <kbd onclick=alert(4)>x</kbd> <kbd>y</kbd>\n\n"
        "<details open><summary>sum</summary></details>\n\n<details>\n<summary>Solution</summary>\n\nhidden $x$\n\n"
        "</details>\n\n[go](javascript:alert(5)) ![far](https://example.org/x.png) [next](02_next.ipynb#there)"
        " [source](../a.py)\n\n"
        f"<!-- {HOSTILE} -->\n\n`{HOSTILE}`\n\n```html\n{HOSTILE}\n```\n\n| a |\n|---|\n| {HOSTILE} |\n\n"
        "<iframe src=x></iframe>"
    )
    cells = [new_markdown_cell(text), new_code_cell(f"x = '{HOSTILE}'", outputs=outputs)]
    return new_notebook(cells=cells)


def test_nothing_that_a_notebook_brings_along_runs_or_is_loaded(tmp_path):
    page = BeautifulSoup(export.to_html(hostile_notebook(), tmp_path / '01_a"<b>.ipynb'), "html.parser")
    assert page.find_all(["script", "iframe", "b"]) == []
    for node in page.find_all(True):
        assert not [name for name in node.attrs if name.startswith("on")], node
        assert "javascript:" not in str(node.get("href", "")), node
        assert str(node.get("src", "data:image/")).startswith("data:image/"), node
    assert page.title.string == "A <em>title</em> & Nr"
    assert page.get_text().count("alert(1)") == 9
    assert page.find("img", alt='a "b" <c>')
    assert page.find("kbd", string="y")
    assert page.find("kbd", string="x") is None
    assert "a table <1>" in page.get_text()
    assert page.find("a", string="far")["href"] == "https://example.org/x.png"
    assert page.find("a", string="next")["href"] == "02_next.html#there"
    assert page.find("a", string="source") is None
    assert "source" in page.main.get_text()
    (details,) = page.main.find_all("details", recursive=True)
    assert details.summary.string == "Solution"
    assert details.math.annotation.string == "x"
    assert page.find(id='claim-1.1"><b')


def test_hidden_source_is_folded_under_what_it_does_and_its_output_is_not(tmp_path):
    said = {"output_type": "stream", "name": "stdout", "text": "four pages"}
    cells = [
        new_code_cell("# Fill the <cache>\nx = 1", outputs=[new_output(**said)]),
        new_code_cell("# A remark\ny = 2"),
        new_code_cell("z = 3"),
    ]
    for cell in (cells[0], cells[2]):
        cell.metadata["jupyter"] = {"source_hidden": True}
    page = BeautifulSoup(export.to_html(new_notebook(cells=cells), tmp_path / "01.ipynb"), "html.parser")
    shown = [(each.summary.string, each.pre.get_text().split("\n")[-1]) for each in page.main.find_all("details")]
    assert shown == [("Fill the <cache>", "x = 1"), ("Code", "z = 3")]
    assert not any(each.has_attr("open") for each in page.main.find_all("details"))
    assert page.find("pre", class_="stdout").find_parent("details") is None
    assert "y = 2" in page.main.get_text()


def test_hidden_claims_are_folded_under_how_many_hold_and_whatever_else_a_cell_shows_is_not(tmp_path):
    def told(*verdicts, more=()):
        claims = [
            new_output("display_data", data={MIME: {"id": f"1.{i}", "verdict": verdict}, "text/markdown": f"sum {i}"})
            for i, verdict in enumerate(verdicts, 1)
        ]
        cell = new_code_cell("x = 1", outputs=[*claims, *more])
        cell.metadata["jupyter"] = {"outputs_hidden": True}
        page = BeautifulSoup(export.to_html(new_notebook(cells=[cell]), tmp_path / "01.ipynb"), "html.parser")
        folds = page.main.find_all("details")
        return [each.summary.string for each in folds], [each["id"] for x in folds for each in x.select(".claim")]

    assert told("holds", "holds") == (["✓ 2 claims, 1.1 to 1.2"], ["claim-1.1", "claim-1.2"])
    assert told("holds", "not measured here", "holds")[0] == ["3 claims, 1.1 to 1.3"]
    assert told("holds", more=[new_output("stream", text="four")]) == ([], [])
    assert told("fails", more=[new_output("error", ename="AssertionError", evalue="", traceback=[])]) == ([], [])


def test_the_explorer_of_a_page_is_linked_behind_the_hand_example(pages):
    for stem, part in site.EXPLORERS.items():
        links = pages[f"{stem}.html"].main.find_all("a", href=f"#explore-{part}", string="Move the numbers")
        (own,) = [each for each in links if not each.find_parent("nav")]
        assert own.find_next("h2").get_text() == "What this notebook shows"
        assert pages[f"{stem}.html"].find(id=f"explore-{part}")


def test_a_figure_is_shown_in_place_of_its_bitmap_and_no_other_file_is(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "01_a.svg").write_text("<svg/>")
    (tmp_path / "secret.svg").write_text("<svg>secret</svg>")
    (tmp_path / "figures" / "01_a.txt").write_text("text")
    png = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(8) + (704).to_bytes(4, "big")).decode()

    def shown(figure, data=png, figures=tmp_path / "figures"):
        about = {"alt": 'a "b"', "figure": figure}
        outputs = [new_output("display_data", data={"image/png": data}, metadata={"image/png": about})]
        page = export.to_html(
            new_notebook(cells=[new_code_cell("1", outputs=outputs)]), tmp_path / "01.ipynb", figures=figures
        )
        (image,) = BeautifulSoup(page, "html.parser").find_all("img")
        assert image["alt"] == 'a "b"'
        return image["src"].removeprefix("data:"), image.get("width")

    vector = f"image/svg+xml;base64,{base64.b64encode(b'<svg/>').decode()}"
    assert shown("01_a") == (vector, "704")
    assert shown("01_a", base64.b64encode(b"pixels").decode()) == (vector, None)
    bitmap = (f"image/png;base64,{png}", None)
    for name in ("01_b", "../secret", "01_a.svg", "", None, ["01_a"], str(tmp_path / "secret")):
        assert shown(name) == bitmap, name
    assert shown("01_a", figures=None) == bitmap


def test_pictures_of_the_text_are_put_inside_and_none_is_left_out(tmp_path):
    data = base64.b64encode(b"pixels").decode()
    (tmp_path / "a.png").write_bytes(b"pixels")
    (tmp_path / "secret.txt").write_text("not a picture")
    cell = new_markdown_cell("# T\n\n![near](a.png) ![carried](attachment:b.png)")
    cell["attachments"] = {"b.png": {"image/png": data}}
    page = BeautifulSoup(export.to_html(new_notebook(cells=[cell]), tmp_path / "01.ipynb"), "html.parser")
    assert {image["alt"]: image["src"] for image in page.find_all("img")} == {
        "near": f"data:image/png;base64,{data}",
        "carried": f"data:image/png;base64,{data}",
    }
    for url in ("none.png", "attachment:none.png", "../a.png", "secret.txt"):
        notebook = new_notebook(cells=[new_markdown_cell(f"![missing]({url})")])
        with pytest.raises(NotebookError, match=rf"^cell 1: .*{re.escape(url.removeprefix('attachment:'))}"):
            export.to_html(notebook, tmp_path / "notebooks" / "01.ipynb" if ".." in url else tmp_path / "01.ipynb")


def test_a_formula_that_fails_names_notebook_and_cell_and_leaves_the_last_page(tmp_path, monkeypatch, capsys):
    folder, output = tmp_path / "notebooks", tmp_path / "build"
    folder.mkdir()
    output.mkdir()
    cells = [new_markdown_cell("# T"), new_code_cell("n = 1", metadata={"tags": ["parameters"]})]
    notebook = new_notebook(cells=[*cells, new_markdown_cell(r"so $\nosuch{x}$")])
    nbformat.write(notebook, folder / "01_bad.ipynb")
    (output / "01_bad.html").write_text("the last good one")
    monkeypatch.setattr(runner, "execute", lambda *_, **__: notebook)
    assert runner.run(folder=folder, output=output) == 1
    error = capsys.readouterr().err
    assert error.startswith(r"01_bad.ipynb, cell 3: formula $\nosuch{x}$: unknown command \nosuch")
    assert (output / "01_bad.html").read_text() == "the last good one"


@pytest.fixture
def checkout(tmp_path):
    """A small checkout with one executed notebook."""
    place = tmp_path / "checkout"
    (place / "notebooks").mkdir(parents=True)
    shutil.copy(NOTEBOOKS["04_other_regions"], place / "notebooks" / "04_other_regions.ipynb")
    (place / "README.md").write_text("# small\n\n**The thesis.** Few & <small>.\n\n## Notebooks\n")
    return place


def test_a_site_replaces_an_earlier_one_and_nothing_else(checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(api_pages, "module_names", lambda: ["levels"])
    output = tmp_path / "published"
    assert site.build(checkout / "notebooks", output) == 0
    first = {path.relative_to(output): path.read_bytes() for path in output.rglob("*.html")}
    assert BeautifulSoup((output / "index.html").read_text(), "html.parser").h1.string == "small"
    (output / "stale.html").write_text("of a notebook that is gone")
    assert site.build(checkout / "notebooks", output) == 0
    assert {path.relative_to(output): path.read_bytes() for path in output.rglob("*") if path.is_file()} == first
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("<title>my diary</title>")
    (tmp_path / "file").write_text("not a folder")
    for place in (tmp_path / "mine", tmp_path / "file", checkout):
        with pytest.raises(UsageError, match="no site of this project"):
            site.build(checkout / "notebooks", place)
    assert (tmp_path / "mine" / "index.html").read_text() == "<title>my diary</title>"
    (checkout / "README.md").unlink()
    with pytest.raises(UsageError, match=r"no README\.md beside"):
        site.build(checkout / "notebooks", output)


def test_a_site_shows_only_what_was_executed_and_holds(checkout, tmp_path, capsys):
    path, output = checkout / "notebooks" / "04_other_regions.ipynb", tmp_path / "site"
    good = path.read_text()
    path.write_text(good.replace('"verdict": "holds"', '"verdict": "fails"', 1))
    assert site.build(checkout / "notebooks", output) == 1
    assert "04_other_regions.ipynb" in capsys.readouterr().err
    empty = nbformat.reads(good, as_version=4)
    for cell in empty.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(empty, path)
    assert site.build(checkout / "notebooks", output) == 1
    error = capsys.readouterr().err
    assert error.startswith("04_other_regions.ipynb, ")
    assert error.count("\n") == 1
    assert not output.exists()


def test_the_reference_shows_what_each_module_lists_and_nothing_else(pages):
    index = pages["api/index.html"]
    assert "import cascade_lab as cl" in index.text  # what the examples begin with
    assert [heading.get_text() for heading in index.find_all("h2")] == [*layout.PUBLIC, "In cascade_lab itself"]
    for heading, names in zip(index.find_all("h2"), layout.PUBLIC.values(), strict=False):
        table = heading.find_next("dl")
        assert [code.get_text() for code in table.select("dt code")] == list(names)
        for term, name in zip(table.find_all("dt"), names, strict=True):
            public = importlib.import_module(f"cascade_lab.{name}").__all__
            linked = {link["href"]: link.get_text() for link in term.find_next("dd").select("p.quiet a")}
            assert linked == {f"{name}.html#{one}": one for one in public}
            page = pages[f"api/{name}.html"]
            calls = [member["id"] for member in page.select(".member") if not member.find_parent(class_="member")]
            constants = [constant["id"] for constant in page.select(".constants dt")]
            assert sorted(calls + constants) == sorted(public)
            for constant in page.select(".constants dd"):
                assert constant.get_text(strip=True), name
    top = [code.get_text() for code in index.find(id="names").find_next("p").find_all("code")]
    assert top == [n for n in cascade_lab.__all__ if not inspect.ismodule(getattr(cascade_lab, n))]


@pytest.mark.parametrize("name", api_pages.module_names())
def test_a_name_of_the_reference_has_its_signature_and_its_text(name, pages):
    module = importlib.import_module(f"cascade_lab.{name}")
    lines = []
    for one in module.__all__:
        thing = getattr(module, one)
        if not (inspect.isclass(thing) or inspect.isroutine(thing)):
            continue
        member = pages[f"api/{name}.html"].find(id=one)
        first = inspect.getdoc(thing).split("\n\n")[0].split(":")[0].split("`")[0]
        assert " ".join(first.split())[:60] in " ".join(member.get_text().split()), one
        lines.append((inspect.getsourcefile(inspect.unwrap(thing)), inspect.getsourcelines(thing)[1], one))
        if inspect.isclass(thing) and issubclass(thing, Exception):
            assert not member.find("pre", class_="signature"), one
            continue
        signature = member.find("pre").get_text()
        assert signature.startswith(f"{one}("), one
        assert "cascade_lab." not in signature, one
        parameters = [p for p in inspect.signature(thing).parameters if not p.startswith("_")]
        places = [re.search(rf"[ (*]{p}\b", signature).start() for p in parameters]
        assert places == sorted(places), one
    shown = [m["id"] for m in pages[f"api/{name}.html"].select(".member") if not m.find_parent(class_="member")]
    assert shown == [one for _, _, one in sorted(lines)]


def test_the_reference_shows_defaults_links_names_and_hides_what_is_private(pages):
    levels = pages["api/levels.html"]
    attention = levels.find(id="cascade_attention").pre.get_text()
    assert "    *,\n    softmax_scale: float | None = None,\n" in attention
    assert attention.endswith(") -> State")
    assert levels.find("a", href="attention.html#attention")
    assert levels.find("strong", string="Attributes:").find_next("li").get_text().startswith("cu_seqlens_q:")
    assert levels.find(id="Ledger.tile_tokens").h3.get_text() == "tile_tokens"
    assert "_passes" not in levels.find(id="Ledger").pre.get_text()
    assert pages["api/states.html"].find(id="merge_state").pre.get_text().startswith("merge_state(\n    o_a: ")
    traces = pages["api/traces.html"]
    assert "traffic: Traffic = CONVERSATION" in traces.find(id="generate").pre.get_text()
    assert traces.find("dt", id="CONVERSATION").find_next("dd").get_text(strip=True).startswith("Chats")
    assert traces.find("dt", id="BLOCK_SIZE").get_text() == "BLOCK_SIZE = 512"
    assert pages["api/prefix.html"].find("pre", class_="formula").get_text().startswith("pairs left = ")
    for name, page in pages.items():
        if name.startswith("api/"):
            for heading in page.select(".member h2, .member h3"):
                assert not heading.get_text().startswith("_"), name
            assert not re.search(r"^\s*(Args|#+ *Arguments):", page.main.get_text(), re.MULTILINE), name


def test_the_map_shows_every_room_and_every_import(pages):
    page, graph = pages["map.html"], layout.imports(CHECKOUT / "cascade_lab")
    assert pages["index.html"].find("a", href="map.html", string="map")
    shown = {}
    for heading in page.find_all("h2"):
        for term in heading.find_next("dl").find_all("dt"):
            name = term.get_text()
            shown[name] = {code.get_text() for code in term.find_next("dd").select("p.quiet code")}
            assert layout.room(name if name == "cascade_lab" else f"cascade_lab.{name}") == heading["id"]
            assert term.find_next("dd").p.get_text(strip=True), name
    short = {name: name.removeprefix("cascade_lab.") for name in graph}
    assert shown == {short[name]: {short[target] for target in graph[name]} for name in graph}


def test_the_picture_of_the_map_has_a_dot_where_a_room_imports_another(pages):
    drawing = pages["map.html"].find("svg")
    found = layout.arrows(layout.imports(CHECKOUT / "cascade_lab"))
    places = [text.get_text().removeprefix("core: ") for text in drawing.find_all("text", class_="ledger")]
    order = [next(name for name, one in layout.ROOMS.items() if one.place == place) for place in places]
    assert sorted(order) == sorted(layout.ROOMS)
    above = [(order.index(one), order.index(two)) for one in found for two in found[one]]
    assert all(one < two for one, two in above)
    tops = [float(box["y"]) for box in drawing.find_all("rect")]
    assert tops == sorted(tops)

    def nearest(y):
        return max(number for number, top in enumerate(tops) if top <= y)

    ends = {}
    for line in drawing.find_all("path", d=re.compile("V")):
        x, end = re.fullmatch(r"M(\d+) [\d.]+V([\d.]+)H\d+", line["d"]).groups()
        ends[x] = nearest(float(end))
    dots = [(nearest(float(dot["cy"])), ends[dot["cx"]]) for dot in drawing.find_all("circle")]
    assert sorted(dots) == sorted(above)
    for name in order:
        wanted = ", ".join(other for other in order if other in found[name]) or "no other room"
        assert f"{name} imports {wanted}. " in drawing["aria-label"]


@pytest.mark.parametrize(("stem", "ids"), [("02_cascade_read_volume", "L topk S"), ("03_prefix_hit_area", "N h tile")])
def test_a_part_of_the_explorer_stands_on_the_page_of_its_notebook(stem, ids, pages):
    page = pages[f"{stem}.html"]
    section = page.find("section", class_="explorer")
    assert {field["id"] for field in section.find_all("input", type="range")} >= set(ids.split())
    heading = section.find("h2")["id"]
    assert page.find("nav", class_="contents").find("a", href=f"#{heading}")
    found = [node["id"] for node in page.find_all(id=True)]
    assert len(found) == len(set(found))


def test_the_explorer_names_only_what_its_page_has(pages):
    page = pages["explorer.html"]
    (script,) = page.find_all("script")
    ids = {node["id"] for node in page.find_all(id=True)}
    for plan in ("naive", "cascade", "fused"):
        assert {f"{plan}-reads", f"{plan}-ratio", f"{plan}-pairs"} <= ids
    assert set(re.findall(r'(?:show|element|bars)\(\s*"([\w-]+)"', script.string)) <= ids
    for field in page.find_all("input"):
        assert field.get("aria-label") or page.find("label", attrs={"for": field["id"]}) or field.find_parent("label")
    for field in page.find_all("input", type="range"):
        typed = page.find(id=f"{field['id']}-number")
        assert {k: field[k] for k in ("min", "max", "step", "value")} == {
            k: typed[k] for k in ("min", "max", "step", "value")
        }
        assert Fraction(field["min"]) <= Fraction(field["value"]) <= Fraction(field["max"])
    for drawing in page.find_all("svg"):
        assert drawing["role"] == "img"
        assert drawing["aria-label"]


def test_the_pages_folder_is_packaged():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    package = CHECKOUT / "cascade_lab"
    packaged = {
        path for glob in project["tool"]["setuptools"]["package-data"]["cascade_lab"] for path in package.glob(glob)
    }
    assert set((package / "book" / "pages").iterdir()) <= packaged


def test_make_knows_the_site_and_keeps_the_browser_out_of_the_tests():
    planned = subprocess.run(
        ["make", "-n", "-C", str(CHECKOUT), "site", "browser-test"], capture_output=True, text=True, check=True
    ).stdout
    assert "-m cascade_lab site" in planned
    checks = sorted((CHECKOUT / "tests" / "browser").glob("check_*.py"))
    assert [check.name for check in checks if f"tests/browser/{check.name}" in planned] == [c.name for c in checks]
    assert list((CHECKOUT / "tests" / "browser").glob("test_*.py")) == []
    assert len(checks) == 2


def test_without_pdoc_the_command_names_the_extra_that_brings_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "pdoc", None)
    monkeypatch.delitem(sys.modules, api_pages.__name__)
    monkeypatch.delattr(book, "api_pages")
    assert cli.main(["site", "--output", str(tmp_path / "site")]) == 1
    assert "pip install 'cascade-lab[site]'" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_a_notebook_error_of_the_site_is_one_line(checkout, tmp_path, capsys):
    (checkout / "notebooks" / "04_other_regions.ipynb").write_text("{}")
    assert site.build(checkout / "notebooks", tmp_path / "site") == 1
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(NotebookError):
        dict(site._pages(checkout / "notebooks", "# t\n"))
