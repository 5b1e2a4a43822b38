"""The Chinese edition: whole, of today's English text, and the same in all that needs no translation."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from cascade_lab import cli
from cascade_lab.book import editions
from cascade_lab.book.execution import load
from cascade_lab.book.export import LANGUAGES, words

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / "notebooks"
DOCUMENTS = {document.name: document for document in editions.documents(FOLDER)}
CJK = "\u4e00-\u9fff"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_translation_is_of_todays_english_text(name):
    """What fails here is brought up to date as CONTRIBUTING says under "Change a text that is translated"."""
    assert editions.problems(DOCUMENTS[name]) == []


def test_readme_the_sheet_and_the_first_notebooks_are_translated():
    names = ("01_lse_splitting", "02_cascade_read_volume", "03_prefix_hit_area")
    assert set(DOCUMENTS) == {"README.md", "SHEET.md", *(f"notebooks/{name}.ipynb" for name in names)}


# half-width marks after Chinese, Chinese beside Latin without a space, a space beside a full-width mark, and a line end
# within a paragraph, which would become a space
ILL_SET = re.compile(
    rf"[{CJK}](?:[,;:?!.](?!\d)| ?\((?!\d))|\)[{CJK}]"
    rf"|[{CJK}][A-Za-z0-9`$]|[A-Za-z0-9`$%][{CJK}]"
    rf"|(?<=[^\n|]) [，。；：、？！）（]|[，；：、（] (?! |\|)|[{CJK}，。；：、）]\n[{CJK}（]"
)


def ill_set(text):
    """Where Chinese text breaks the rules of setting it beside Latin, formulas and code."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]+`", "`x`", text)
    text = re.sub(r"\$\$.+?\$\$|\$[^$\n]+\$", "$x$", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)\s]+\)|<[^>]+>", lambda found: "".join(re.findall('alt="[^"]*"', found[0])), text)
    return [found[0] for found in ILL_SET.finditer(re.sub(r"[*\[\]]", "", text))]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_chinese_is_set_with_full_width_marks_and_spaces_beside_latin(name):
    for passage in DOCUMENTS[name].translation:
        assert re.search(f"[{CJK}]", passage.text), passage.id
        assert ill_set(passage.text) == [], passage.id


@pytest.mark.parametrize(
    "text",
    [
        "前缀,命中",
        "前缀token",
        "用 `x`读",
        "设$x$ 为",
        "**前缀** ，命中",
        "前缀， 命中",
        "前缀 (prefix)",
        "8%的",
        "等\n（即",
    ],
)
def test_ill_set_chinese_is_found(text):
    assert ill_set(text)
    assert not ill_set("由式 (1.1)，前缀（prefix）占 8%，见[这里](#a)的 `x`，$x$ 为 1。\n\n- **前缀** token")


def test_words_follow_the_glossary():
    table = [
        line for line in (FOLDER / "zh" / "GLOSSARY.md").read_text(encoding="utf-8").splitlines() if line[0:1] == "|"
    ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    refused = [word for row in rows for word in row[2].split("、") if word]
    assert len(rows) > 20
    assert len(refused) > 25
    for document in DOCUMENTS.values():
        for passage in document.translation:
            assert [word for word in refused if word in passage.text] == [], (document.name, passage.id)


def test_pages_say_the_same_in_both_languages():
    english, chinese = words("en"), words("zh")
    assert set(LANGUAGES) == {"en", "zh"}
    assert set(english) == set(chinese)
    for key in set(english) - {"navigation"}:
        assert english[key]
        assert re.search(f"[{CJK}]", chinese[key]) or key == "notebooks", key
        assert re.findall(r'href="[^"]+"', english[key]) == re.findall(r'href="[^"]+"', chinese[key])


ENGLISH = """# A title

Two keys, $a + b$ and 24 tokens, by [another](02_other.ipynb#Far-away).

```text
## no heading
```

## By hand

See [above](#A-title) and `x = 1`, below 5%.
"""
CHINESE = """<!-- introduction {0} -->
# 标题

两个 key，24 个 token，$a + b$，见[另一篇](02_other.ipynb#Far-away)。

```text
## no heading
```

<!-- by-hand {1} -->
## 手算

见[上文](#A-title)和 `x = 1`，低于 5%。
"""


def document(english=ENGLISH, chinese=CHINESE, hashes=None):
    original = editions.sections(english)
    hashes = hashes or [editions.fingerprint(text) for text in editions.sections(ENGLISH).values()]
    return editions.Document("T.md", Path("T.zh.md"), original, editions.split(chinese.format(*hashes)))


def test_a_document_is_cut_at_its_second_headings_outside_code():
    assert list(editions.sections(ENGLISH)) == ["introduction", "by-hand"]
    assert editions.sections(ENGLISH)["introduction"].endswith("## no heading\n```")
    assert editions.problems(document()) == []
    assert document().text.startswith("# 标题\n")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("Two keys", "Three keys"), "T.md, introduction: lags behind the English text"),
        (("24 tokens", "25 tokens"), "T.md, introduction: numbers: lacks 25; adds 24"),
        (("$a + b$", "$a - b$"), "T.md, introduction: formulas: lacks $a - b$; adds $a + b$"),
        (("`x = 1`", "`x = 2`"), "T.md, by-hand: inline code: lacks `x = 2`; adds `x = 1`"),
        (
            ("#Far-away", "#Near"),
            "T.md, introduction: links: lacks ](02_other.ipynb#Near); adds ](02_other.ipynb#Far-away)",
        ),
        (("## no heading", "none"), "T.md, introduction: lags behind the English text"),
        (("## By hand", "## By hand\n\n### Again"), "T.md, by-hand: headings: lacks ###"),
        (("## By hand", "## By mind"), "T.md, by-mind: no translation"),
        (("## By hand", "## By mind"), "T.md, by-hand: a translation of no English text"),
        (("below 5%.", "below 5%.\n\n<br>"), "T.md, by-hand: tags: lacks <br"),
        (("below 5%.", "below 5%.\n\n| a |\n|---|"), "T.md, by-hand: table rows: lacks |, |"),
    ],
)
def test_what_changed_in_english_is_named(change, line):
    assert line in editions.problems(document(ENGLISH.replace(*change)))


def test_a_translation_that_is_missing_repeated_or_out_of_order_is_named():
    first, second = CHINESE.split("<!-- by-hand")
    second = "<!-- by-hand" + second
    marks = [editions.fingerprint(text) for text in editions.sections(ENGLISH).values()]
    assert editions.problems(document(chinese=first, hashes=marks)) == ["T.md, by-hand: no translation"]
    assert editions.problems(document(chinese=second + first)) == [
        "T.md: the passages stand in another order than in English"
    ]
    assert "T.md, by-hand: translated 2 times" in editions.problems(document(chinese=CHINESE + second))


@pytest.fixture
def checkout(tmp_path):
    """A README and two small notebooks, of which the first is translated."""
    place = tmp_path / "checkout"
    (place / "notebooks" / "zh").mkdir(parents=True)
    english = [new_markdown_cell("# One key\n\nIt has $k$.", id="title"), new_code_cell("k = 1", id="code")]
    english.append(new_markdown_cell("## Far *away*\n\n[here](#One-key), [there](02_two.ipynb#Two)", id="far"))
    nbformat.write(new_notebook(cells=english), place / "notebooks" / "01_one.ipynb")
    other = [new_markdown_cell("# Two\n\n[back](01_one.ipynb#Far-away)", id="title")]
    nbformat.write(new_notebook(cells=other), place / "notebooks" / "02_two.ipynb")
    (place / "notebooks" / "zh" / "01_one.md").write_text(
        f"<!-- title {editions.NEW} -->\n# 一个 key\n\n它有 $k$。\n\n"
        f"<!-- far {editions.NEW} -->\n## *远处*\n\n[这里](#One-key)，[那里](02_two.ipynb#Two)\n",
        encoding="utf-8",
    )
    return place


def test_the_command_names_what_lags_and_marks_what_was_brought_up_to_date(checkout, monkeypatch, capsys):
    monkeypatch.chdir(checkout)
    assert cli.main(["edition"]) == 1
    names = [f"notebooks/01_one.ipynb, {id}: lags behind the English text" for id in ("title", "far")]
    assert capsys.readouterr().out.splitlines() == names
    path = checkout / "notebooks" / "zh" / "01_one.md"
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace("$k$", "$q$"), encoding="utf-8")
    assert cli.main(["edition", "--mark"]) == 1  # a wrong formula is not marked as looked at
    assert capsys.readouterr().out.splitlines() == [
        names[0],
        names[0].replace("lags behind the English text", "formulas: lacks $k$; adds $q$"),
    ]
    path.write_text(whole, encoding="utf-8")
    assert cli.main(["edition", "--mark", "title"]) == 1  # and what was not named is not marked
    assert capsys.readouterr().out.splitlines() == [names[1]]
    assert cli.main(["edition", "--mark"]) == 0
    assert capsys.readouterr().out == "1 texts, 2 passages, up to date\n"
    assert cli.main(["edition"]) == 0
    assert (
        path.read_text(encoding="utf-8")
        .replace(editions.fingerprint("# One key\n\nIt has $k$."), "-" * 10)
        .startswith(whole[:40])
    )
    path.rename(path.with_name("03_none.md"))
    assert cli.main(["edition"]) == 2
    assert "03_none.md translates no notebook" in capsys.readouterr().err


def test_written_notebooks_have_the_same_code_and_links_that_lead_to_their_headings(checkout, tmp_path, capsys):
    assert cli.main(["edition", "--mark", "--notebooks", str(checkout / "notebooks")]) == 0
    arguments = ["--notebooks", str(checkout / "notebooks"), "--output", str(tmp_path / "out")]
    assert cli.main(["edition", "--write", *arguments]) == 0
    one, two = (load(tmp_path / "out" / "zh" / f"{name}.ipynb") for name in ("01_one", "02_two"))
    assert [cell.id for cell in one.cells] == ["title", "code", "far"]
    assert one.cells[0].source == "# 一个 key\n\n它有 $k$。"
    assert one.cells[1].source == "k = 1"
    assert one.cells[2].source == "## *远处*\n\n[这里](#一个-key)，[那里](02_two.ipynb#Two)"
    assert two.cells[0].source == "# Two\n\n[back](01_one.ipynb#远处)"


def test_notebooks_of_the_edition_differ_from_the_english_ones_in_text_alone():
    for document in DOCUMENTS.values():
        if not document.name.endswith(".ipynb"):
            continue
        english = load(CHECKOUT / document.name)
        chinese = editions.translated(english, document)
        assert [cell.id for cell in chinese.cells] == [cell.id for cell in english.cells]
        for before, after in zip(english.cells, chinese.cells, strict=True):
            if before.cell_type == "code":
                assert before == after
            else:
                assert after.source.startswith(document.passages[before.id].text)


def test_a_passage_that_lags_or_is_missing_says_so_where_it_is_read(checkout):
    (document,) = editions.documents(checkout / "notebooks")
    notebook = load(checkout / "notebooks" / "01_one.ipynb")
    text = editions.translated(notebook, document).cells[0].source
    assert text == f"# 一个 key\n\n它有 $k$。\n\n*{words('zh')['late']}*"
    notebook.cells[0].id = "new"
    document = editions.Document(document.name, document.path, editions.cells(notebook), document.translation)
    text = editions.translated(notebook, document).cells[0].source
    assert text == f"# One key\n\nIt has $k$.\n\n*{words('zh')['missing']}*"
