"""The site as a reader meets it: opened from a folder without network, on a desk and on a phone, by eye and by ear.

The explorer's numbers are compared with the package, integer by integer. Screenshots go to build/browser.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import cascade_lab as cl
from cascade_lab.book import api_pages, canonical, editions, site
from cascade_lab.book.execution import load
from cascade_lab.drafts import ROWS
from tests.browser.conftest import CHECKOUT

AUDIT = (Path(__file__).parent / "audit.js").read_text(encoding="utf-8")
NOTEBOOKS = sorted(path.stem for path in (CHECKOUT / "notebooks").glob("*.ipynb"))
PAGES = ["index", "sheet", "claims", "explorer", "reuse", "notation", "map", *NOTEBOOKS, "api/index"]
PAGES += [f"api/{name}" for name in api_pages.module_names()]
TRANSLATED = sorted(name.removesuffix(".html") for name in editions.read(CHECKOUT / "notebooks").pages)
PAGES += [f"zh/{name}" for name in TRANSLATED]
WIDTHS = {"desk": 1280, "phone": 360}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("site with space") / "site"
    assert site.build(CHECKOUT / "notebooks", place) == 0
    return place


@pytest.fixture
def page(browser):
    """A page without network; what it asks for beyond files, and what it complains about, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    asked, complaints = [], []

    def route(request):
        if urlsplit(request.request.url).scheme in ("file", "data"):
            return request.continue_()
        asked.append(request.request.url)
        return request.abort()

    context.route("**/*", route)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()
    assert asked == []
    assert complaints == []


@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_readable(name, device, page, folder, pictures):
    page.set_viewport_size({"width": WIDTHS[device], "height": 900})
    page.goto((folder / f"{name}.html").as_uri())
    for details in page.query_selector_all("details"):
        details.evaluate("node => node.open = true")
    assert page.evaluate(AUDIT) == []
    # beyond some 16000 pixels Chromium repeats itself
    height = min(page.evaluate("document.documentElement.scrollHeight"), 12000)
    page.set_viewport_size({"width": WIDTHS[device], "height": height})
    page.screenshot(path=pictures / f"{name.replace('/', '_')}_{device}.png")


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name, page, folder):
    place = folder / f"{name}.html"
    page.goto(place.as_uri())
    links = page.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.href)")
    assert links
    anchors = {}
    for link in set(links):
        parts = urlsplit(link)
        if parts.scheme == "https":
            continue
        assert parts.scheme == "file", link
        target = Path(unquote(parts.path))
        assert target.is_file(), link
        assert target.is_relative_to(folder), link
        if parts.fragment:
            if target not in anchors:
                page.goto(target.as_uri())
                anchors[target] = set(page.evaluate("[...document.querySelectorAll('[id]')].map(n => n.id)"))
            assert unquote(parts.fragment) in anchors[target], link


BESIDE = """links => links.map(link => {
  const heading = link.parentElement.querySelector('h1, h2, h3, h4');
  const [words, mark] = [heading.getBoundingClientRect(), link.getBoundingClientRect()];
  const middle = mark.top + mark.height / 2;
  const beside = words.top <= middle && middle <= words.bottom;
  return [heading.id, link.hash, link.checkVisibility() && mark.width > 3 && beside];
})"""


@pytest.mark.parametrize("name", ["index", "reuse", "notation", "map", NOTEBOOKS[0]])
def test_a_permalink_is_seen_beside_its_heading_and_leads_there_by_keyboard(name, page, folder):
    page.goto((folder / f"{name}.html").as_uri())
    found = page.eval_on_selector_all("a.permalink", BESIDE)
    assert len(found) == page.locator("h1, h2, h3, h4").count() > 1
    for id, fragment, beside in found:
        assert unquote(fragment) == f"#{id}"
        assert beside, id
    last = page.locator("a.permalink").last
    last.focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    assert page.evaluate("document.querySelector(':target').id") == found[-1][0]
    assert unquote(urlsplit(page.url).fragment) == found[-1][0]


EQUATIONS = """all => all.map(e => [e.id,
  e.querySelector('.number').getBoundingClientRect().left - e.querySelector('math').getBoundingClientRect().right])"""


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_number_of_an_equation_is_at_the_right_and_a_link_brings_it_into_view(name, page, folder):
    address = (folder / f"{name}.html").as_uri()
    page.goto(address)
    found = page.eval_on_selector_all(".equation[id]", EQUATIONS)
    assert found
    assert [id for id, gap in found if gap < 0] == []
    page.goto(f"{address}#{found[-1][0]}")
    assert 0 <= page.locator(".equation:target").bounding_box()["y"] < 900
    words = page.eval_on_selector_all("main a[href*='#equation-']", "all => all.map(a => a.textContent)")
    assert all(re.fullmatch(r"\(\d+\.\d+\)", text) for text in words)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_set_up_cells_are_folded_and_open_by_keyboard(name, page, folder):
    notebook = load(CHECKOUT / "notebooks" / f"{name}.ipynb")
    folded = [cell for cell in notebook.cells if canonical.is_folded(cell)]
    page.goto((folder / f"{name}.html").as_uri())
    closed = page.eval_on_selector_all(
        "details.folded", "all => all.map(d => [d.querySelector('summary').textContent, d.open])"
    )
    assert closed == [[canonical.purpose(cell), False] for cell in folded]
    assert len(folded) > 3
    assert page.eval_on_selector_all(".code > pre", "all => all.every(p => p.checkVisibility())")
    first = page.locator("details.folded").first
    assert not first.locator("pre").is_visible()
    first.locator("summary").focus()
    page.keyboard.press("Enter")
    assert first.locator("pre").is_visible()
    assert first.locator("pre").inner_text().strip() == folded[0].source.strip()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_figures_are_drawn_as_vectors_and_as_wide_as_in_the_notebook(name, page, folder):
    outputs = [o for cell in load(CHECKOUT / "notebooks" / f"{name}.ipynb").cells for o in cell.get("outputs", [])]
    about = [o.metadata["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    page.goto((folder / f"{name}.html").as_uri())
    found = page.eval_on_selector_all(
        ".picture img", "all => all.map(i => [i.alt, i.src.slice(5, 18), i.getBoundingClientRect().width])"
    )
    assert [alt for alt, _, _ in found] == [each["alt"] for each in about]
    assert [kind == "image/svg+xml" for _, kind, _ in found] == ["figure" in each for each in about]
    assert all(600 <= width <= 928 for _, kind, width in found if kind == "image/svg+xml")


def test_the_home_page_is_short_and_the_labels_of_its_figures_can_be_read(page, folder):
    page.goto((folder / "index.html").as_uri())
    assert page.evaluate("document.documentElement.scrollHeight") < 8000
    sizes = page.eval_on_selector_all(
        ".entry img", "all => all.map(i => [i.getBoundingClientRect().width, i.naturalWidth])"
    )
    assert len(sizes) == len(NOTEBOOKS)
    assert all(9 * 96 / 72 * width / natural >= 9.9 for width, natural in sizes)  # figures are set in 9 points


def test_the_table_of_claims_shows_all_its_columns_on_a_desk(page, folder):
    page.goto((folder / "claims.html").as_uri())
    cut = page.eval_on_selector_all(".scroll", "all => all.filter(x => x.scrollWidth > x.clientWidth + 1).length")
    assert cut == 0
    lines = page.eval_on_selector_all(".claims tbody tr", "all => all.map(x => x.clientHeight)")
    assert sorted(lines)[len(lines) // 2] < 60  # two lines


@pytest.mark.parametrize("width", [360, 390])
@pytest.mark.parametrize(
    ("name", "numbers"),
    [("explorer", ".ledgers td.number"), ("claims", ".claims td"), *((name, ".claims td") for name in NOTEBOOKS)],
)
def test_numbers_of_a_table_are_in_view_on_a_phone(name, numbers, width, page, folder):
    page.set_viewport_size({"width": width, "height": 800})
    page.goto((folder / f"{name}.html").as_uri())
    cells = page.eval_on_selector_all(
        numbers, "all => all.map(x => [x.textContent, x.getBoundingClientRect().right, x.scrollWidth - x.clientWidth])"
    )
    assert len(cells) > 10
    assert [text for text, right, cut in cells if right > width or cut > 1] == []


PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAAAAAAALAAAAAABAAEAAAIBTAA7"
FAULTS = {
    "language: none": "<!DOCTYPE html><title>t</title><main><h1>t</h1></main>",
    "title: none": '<html lang="en"><main><h1>t</h1></main>',
    "heading: level 3 after 1": "<h1>t</h1><h3>deeper</h3>",
    "heading: expected one h1": "<h1>t</h1><h1>u</h1>",
    "id: used twice": '<h1 id="a">t</h1><p id="a">again</p>',
    "alternative text: none data": f'<h1>t</h1><img src="{PIXEL}">',
    "image: not shown": '<h1>t</h1><img alt="a" src="data:image/png;base64,AAAA">',
    "alternative text: none <svg>": "<h1>t</h1><svg><text>drawn</text></svg>",
    "label: none <input>": "<h1>t</h1><input type='range'>",
    "link: without a name": "<h1>t</h1><a href='#'></a>",
    "overflow: ": "<h1>t</h1><div style='width:3000px'>wide</div>",
    "contrast: 4.48": "<h1>t</h1><p style='color:#777'>pale</p>",
    "contrast: 1.00": "<h1>t</h1><div style='background:#000'><p style='color:rgb(0 0 0)'>unseen</p></div>",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_audit_finds(fault, page):
    """The checks above can fail: each of these pages has one fault."""
    whole = FAULTS[fault].startswith("<!") or FAULTS[fault].startswith("<html")
    frame = '<!DOCTYPE html><html lang="en"><title>t</title><main>{}</main></html>'
    page.set_content(FAULTS[fault] if whole else frame.format(FAULTS[fault]))
    (problem,) = page.evaluate(AUDIT)
    assert problem.startswith(fault)


def set_slider(page, id, value):
    """Move a slider as a hand does: its value changes, and the page is told."""
    page.evaluate(
        "([id, value]) => { const s = document.getElementById(id); s.value = value; "
        "s.dispatchEvent(new Event('input', { bubbles: true })); }",
        [id, str(value)],
    )


def shown(page, id):
    """An output's text without the spaces between groups of digits."""
    return page.inner_text(f"#{id}").replace("\u202f", "")


def rounded(fraction, digits):
    """A fraction >= 0 in decimals, half up."""
    scaled = int(fraction * 10**digits + Fraction(1, 2))
    return f"{scaled // 10**digits}.{scaled % 10**digits:0{digits}}"


LENGTHS = [0, 1, 15, 1000, 2000, 32768]
TREES = [(1, 1), (1, 16), (4, 5), (4, 3), (16, 1), (16, 16), (7, 11)]


def counted(ledger, count, block):
    return {
        "request": ledger.kv_tokens,
        "distinct": ledger.kv_tokens_unique,
        "tile": ledger.tile_tokens(block),
    }[count]


@pytest.mark.parametrize("count", ["request", "distinct", "tile"])
@pytest.mark.parametrize("rows", ROWS)
def test_the_explorer_counts_what_the_ledger_counts_of_verification(rows, count, page, folder):
    page.goto((folder / "explorer.html").as_uri())
    page.check(f"#rows-{rows}")
    page.check(f"#count-{count}")
    for i, (topk, steps) in enumerate(TREES):
        for length in LENGTHS:
            block = (1, 2, 16, 64, 256)[i % 5]
            for id, value in (("L", length), ("topk", topk), ("S", steps), ("block", block)):
                set_slider(page, id, value)
            where = (length, topk, steps, block)
            batch = cl.VerifyBatch([length], [cl.DraftTree.branches(topk, steps)], rows=rows)
            ledgers = {plan: cl.ledger(batch.levels(plan)) for plan in ("naive", "cascade", "fused")}
            counts = {plan: counted(ledger, count, block) for plan, ledger in ledgers.items()}
            for plan, ledger in ledgers.items():
                assert shown(page, f"{plan}-reads") == shown(page, f"live-{plan}") == str(counts[plan]), where
                assert shown(page, f"{plan}-pairs") == str(ledger.pairs), where
                assert shown(page, f"{plan}-ratio") == rounded(Fraction(counts["naive"], counts[plan]), 3), where
                assert shown(page, "unique") == str(ledger.kv_tokens_unique), where
            assert shown(page, "rows") == str(batch.num_rows)
            virtual = len(batch.virtual_requests.rows)
            assert shown(page, "limit") == str(virtual)
            reading = shown(page, "verify-reading")
            if count == "distinct":
                assert f"same {counts['naive']} distinct keys" in reading
            elif virtual == 1:
                assert "One branch has nobody to share with: one causal call" in reading
                assert f"L + S = {length + steps} keys" in reading
            else:
                fall = f"fall from {counts['naive']} to {counts['cascade']}, by a factor of"
                assert (fall if counts["naive"] > counts["cascade"] else f"stay at {counts['naive']}") in reading, where
            widths = page.eval_on_selector_all(
                "#verify-bars rect.reads", "bars => bars.map(b => +b.getAttribute('width'))"
            )
            most = max(counts.values())
            assert widths == pytest.approx([178 * each / most for each in counts.values()])
            assert f"cascade {counts['cascade']}" in page.get_attribute("#verify-bars", "aria-label")


STEPS = {
    "naive": [("all", [0])],
    "fused": [("all", [0])],
    "cascade": [("all", [0, 1]), ("prefix", [0]), ("draft", [1])],
}


@pytest.mark.parametrize(
    ("length", "topk", "steps", "size"), [(10, 3, 2, 4), (33, 2, 3, 16), (7, 5, 4, 1), (0, 2, 2, 8)]
)
@pytest.mark.parametrize("rows", ROWS)
def test_the_explorer_draws_the_rows_keys_and_pages_of_each_program(rows, length, topk, steps, size, page, folder):
    page.goto((folder / "explorer.html").as_uri() + f"#L={length}&topk={topk}&S={steps}&page={size}&rows={rows}")
    batch = cl.VerifyBatch([length], [cl.DraftTree.branches(topk, steps)], page_size=size, rows=rows)
    for plan, parts in STEPS.items():
        page.check(f"#plan-{plan}")
        assert page.is_enabled("#step-prefix") == (plan == "cascade")
        levels = batch.levels(plan)
        for step, wanted in parts:
            page.check(f"#step-{step}")
            expected = []
            for level in (levels[i] for i in wanted):
                ends = level.cu_seqlens_q.tolist()
                for i, tokens in enumerate(level.cache_seqlens.tolist()):
                    if ends[i] == ends[i + 1]:
                        continue
                    pages = level.page_table[i, : -(-tokens // level.page_size)].tolist()
                    expected.append(((ends[i], ends[i + 1] - 1), tokens, level.page_size, pages))
            lines = shown(page, "page-tables").splitlines()
            more = [line for line in lines if line.startswith("and ")]
            assert len(expected) == len(lines) - len(more) + sum(int(line.split()[1]) for line in more)
            for line, (which, tokens, page_size, pages) in zip(lines[: len(lines) - len(more)], expected, strict=False):
                found = re.fullmatch(r".+: rows? (\d+)(?: to (\d+))?, (\d+) tokens in pages of (\d+): (.+)", line)
                assert (int(found[1]), int(found[2] or found[1])) == which
                assert (int(found[3]), int(found[4])) == (tokens, page_size)
                spans = [list(map(int, span.split(" … "))) for span in found[5].split(", ") if span != "none"]
                assert [k for span in spans for k in range(span[0], span[-1] + 1)] == pages
            total = sum(tokens for _, tokens, _, _ in expected)
            assert f"{total} tokens." in shown(page, "step-reading")
            assert page.locator("#reads-picture rect.reads").count() >= sum(
                tokens > 0 for _, tokens, _, _ in expected[:16]
            )
    page.check("#plan-cascade")
    page.check("#step-merge")
    assert "no cached token is read" in shown(page, "step-reading")
    assert page.locator("#reads-picture rect.state").count() == 3
    assert page.locator("#reads-picture circle").count() == topk * steps


def test_the_address_of_the_explorer_shows_the_same_again(page, folder):
    address = (folder / "explorer.html").as_uri()
    page.goto(address)
    assert page.url == address
    set_slider(page, "L", 1000)
    set_slider(page, "h", 0.25)
    for id in ("rows-node", "count-tile", "plan-cascade", "step-draft"):
        page.check(f"#{id}")
    assert page.url == f"{address}#L=1000&rows=node&count=tile&plan=cascade&step=draft&h=0.25"
    before = {id: page.inner_text(f"#{id}") for id in ("naive-reads", "step-reading", "pairs-left", "page-tables")}
    other = page.context.new_page()
    other.goto(page.url)
    assert {id: other.inner_text(f"#{id}") for id in before} == before
    assert other.input_value("#L-number") == "1000"
    other.goto(f"{address}#L=99999999&topk=none&rows=nobody&S=&explore=1")
    assert [other.input_value(f"#{id}") for id in ("L", "topk", "S")] == ["32768", "4", "5"]
    assert other.is_checked("#rows-branch")
    other.goto(f"{address}#explore-hit")
    assert [other.input_value(f"#{id}") for id in ("L", "topk", "S")] == ["32768", "4", "5"]
    other.close()
    set_slider(page, "L", 2000)
    set_slider(page, "h", 0.5)
    for id in ("rows-branch", "count-request", "step-all", "plan-naive"):
        page.check(f"#{id}")
    assert page.url == address


def test_parts_of_the_explorer_work_on_the_pages_of_their_notebooks(page, folder):
    page.goto((folder / "02_cascade_read_volume.html").as_uri() + "#L=1000")
    assert [shown(page, f"{plan}-reads") for plan in ("naive", "cascade", "fused")] == ["4020", "1020", "1020"]
    page.goto((folder / "03_prefix_hit_area.html").as_uri() + "#N=100&h=0.5")
    assert shown(page, "pairs-left") == str(cl.interactions(100, 50))


def test_numbers_stay_beside_the_sliders_on_a_phone(browser, folder):
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto((folder / "explorer.html").as_uri())
    for id, live in (("block", "live-naive"), ("tile", "live-pairs")):
        page.locator(f"#{id}").scroll_into_view_if_needed()
        page.evaluate(f"document.getElementById('{id}').scrollIntoView({{block: 'center'}})")
        numbers, slider = (page.locator(f"#{each}").bounding_box() for each in (live, id))
        assert 0 <= numbers["y"] < slider["y"] < 800
    page.close()


def test_the_explorer_counts_what_the_package_counts_of_a_prefix_hit(page, folder):
    page.goto((folder / "explorer.html").as_uri())
    for n in [1, 2, 3, 100, 999, 1000, 8192, 131072]:
        set_slider(page, "N", n)
        for thousandths in [0, 1, 333, 500, 707, 999, 1000]:
            set_slider(page, "h", thousandths / 1000)
            hit = cl.effective_hit(n * thousandths // 1000, n)
            where = (n, thousandths)
            assert shown(page, "hit-tokens") == str(hit), where
            assert shown(page, "pairs-all") == str(cl.interactions(n)), where
            assert shown(page, "pairs-left") == str(cl.interactions(n, hit)), where
            assert shown(page, "pairs-fraction") == rounded(cl.remaining(n, hit), 6), where
            assert shown(page, "limit-fraction") == rounded(1 - Fraction(hit, n) ** 2, 6), where
            assert float(shown(page, "limit-fraction")) == pytest.approx(cl.remaining_limit(hit / n), abs=6e-7), where
            assert shown(page, "rows-left") == str(n - hit), where
            assert shown(page, "rows-fraction") == rounded(cl.linear_remaining(n, hit), 6), where
            levels = cl.ledger(cl.prefix_hit_levels([n], [hit]))
            assert shown(page, "reads-left") == shown(page, "reads-all") == str(levels.kv_tokens), where
            whole = cl.ledger(cl.prefix_hit_levels([n], [0])).tile_tokens(128)
            assert [shown(page, f"tiles-{which}") for which in ("all", "left")] == [
                str(whole),
                str(levels.tile_tokens(128)),
            ]
            assert shown(page, "pairs-left") == str(levels.pairs), where
            label = page.get_attribute("#triangle", "aria-label")
            assert f"{cl.interactions(hit)} saved above, {cl.interactions(n, hit)} left below" in label, where


def test_the_explorer_is_used_by_keyboard_and_takes_typed_numbers(page, folder):
    page.goto((folder / "explorer.html").as_uri())
    assert [shown(page, f"{plan}-reads") for plan in ("naive", "cascade", "fused")] == ["8020", "2020", "2020"]
    page.focus("#topk")
    page.keyboard.press("ArrowRight")
    assert page.input_value("#topk-number") == "5"
    assert shown(page, "naive-reads") == str(5 * 2005)
    page.keyboard.press("Home")
    assert shown(page, "naive-ratio") == shown(page, "cascade-ratio") == "1.000"
    page.fill("#L-number", "12345")
    assert page.input_value("#L") == "12345"
    assert shown(page, "cascade-reads") == str(12345 + 5)
    for typed, taken in (("99999999", "32768"), ("-4", "0"), ("", "0"), ("7.6", "8")):
        page.fill("#L-number", typed)
        page.press("#L-number", "Tab")
        assert page.input_value("#L-number") == page.input_value("#L") == taken
        assert shown(page, "fused-reads") == str(int(taken) + 5)
    page.press("#N-number", "Enter")
    assert page.url.endswith("explorer.html#L=8&topk=1")


def test_every_control_of_the_explorer_has_a_name_and_is_reached_in_order(page, folder):
    page.goto((folder / "explorer.html").as_uri())
    page.focus("#L")
    reached = ["L"]
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    order = ["L", "L-number", "topk", "topk-number", "S", "S-number", "rows-branch"]
    assert reached[:7] == order
    assert {"N", "h"} & set(reached)
    snapshot = page.locator("#verify").aria_snapshot()
    for name in ("L, prefix tokens", "topk, branches", "S, draft tokens per branch"):
        assert f'slider "{name}"' in snapshot
        assert f'spinbutton "{name}, typed"' in snapshot


@pytest.mark.parametrize("name", ["index", "sheet", NOTEBOOKS[0]])
def test_a_page_prints_without_its_navigation_and_without_cut_code(name, page, folder):
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 700, "height": 900})
    page.goto((folder / f"{name}.html").as_uri())
    assert not page.is_visible("header")
    assert not page.eval_on_selector_all("a.permalink", "all => all.some(a => a.checkVisibility())")
    cut = page.evaluate("[...document.querySelectorAll('pre')].filter(p => p.scrollWidth > p.clientWidth + 1).length")
    assert cut == 0


def printed(page, paper):
    """The pages that Chromium prints on a paper, as PDF objects."""
    return len(re.findall(rb"/Type\s*/Page\b", page.pdf(format=paper, prefer_css_page_size=False)))


@pytest.mark.parametrize("paper", ["A4", "Letter"])
@pytest.mark.parametrize("name", ["sheet", "zh/sheet"])
def test_the_sheet_prints_on_one_page_in_a_size_that_can_be_read(name, paper, page, folder, pictures):
    page.goto((folder / f"{name}.html").as_uri())
    assert printed(page, paper) == 1
    page.pdf(path=pictures / f"{name.replace('/', '_')}_{paper}.pdf", format=paper)
    page.emulate_media(media="print")
    point = 96 / 72
    sizes = page.eval_on_selector_all(
        ".sheet :is(p, li)", "all => all.map(x => parseFloat(getComputedStyle(x).fontSize))"
    )
    assert min(sizes) >= 8 * point
    smaller = page.eval_on_selector_all(
        ".sheet :is(td, pre, code)", "all => all.map(x => parseFloat(getComputedStyle(x).fontSize))"
    )
    assert min(smaller) >= 6.5 * point
    tops = page.eval_on_selector_all(".sheet section", "all => all.map(x => x.getBoundingClientRect().left)")
    assert len(set(tops)) == 2  # columns
    page.evaluate("{ const sheet = document.querySelector('.sheet'); sheet.append(sheet.cloneNode(true)); }")
    assert printed(page, paper) > 1


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_reader_changes_the_language_and_stays_in_the_section(name, page, folder):
    page.goto((folder / f"{name}.html").as_uri())
    page.click("header a[hreflang='zh-Hans']")
    assert page.url == (folder / "zh" / f"{name}.html").as_uri()
    assert page.evaluate("getComputedStyle(document.body).fontFamily.includes('PingFang SC')")
    place, _, section = page.locator("a.elsewhere").last.get_attribute("href").partition("#")
    page.locator("a.elsewhere").last.click()
    assert page.url.startswith((folder / f"{name}.html").as_uri() + "#")
    heading = page.locator(f"[id='{unquote(section)}']")
    heading.wait_for(state="visible")
    assert page.evaluate("window.scrollY") > 0
    assert "English" not in page.locator("header").inner_text()
