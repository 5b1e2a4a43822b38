"""README says what is there: its example equals one call, its table lists the notebooks, its links lead somewhere."""

import re
from pathlib import Path

import torch

import cascade_lab as cl

CHECKOUT = Path(__file__).resolve().parents[2]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def notebook_rows():
    """Name, claim, check, seconds and figure of each notebook in the table."""
    table = README.split("## Notebooks", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert lines[0] == "| notebook | claim | how it is checked | seconds on CPU | figure |"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_python_example_runs_and_equals_one_causal_call():
    (code,) = blocks("python")
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    lengths = torch.tensor([39, 25], dtype=torch.int32)
    q, k, v, pages, rows = (names[name] for name in ("q", "k", "v", "pages", "rows"))
    whole = cl.attention(q, k, v, pages, lengths, cu_seqlens_q=rows, causal=True)
    assert names["o"].shape == (5, 8, 64)
    assert names["lse"].shape == (5, 8)
    torch.testing.assert_close(names["o"], whole.o, atol=2e-6, rtol=0)
    torch.testing.assert_close(names["lse"], whole.lse, atol=2e-6, rtol=0)


def test_the_python_example_is_six_lines_after_its_imports():
    (code,) = blocks("python")
    lines = [line for line in code.splitlines() if line and not line.startswith("import ")]
    assert len(lines) == 6


def test_the_table_lists_exactly_the_notebooks_there_are_in_order():
    links = [re.fullmatch(r"\[(\w+)\]\(notebooks/(\w+)\.ipynb\)", row[0]) for row in notebook_rows()]
    assert all(link and link[1] == link[2] for link in links)
    assert [link[1] for link in links] == sorted(path.stem for path in (CHECKOUT / "notebooks").glob("*.ipynb"))


def test_every_row_has_a_claim_a_check_a_time_and_a_described_figure_of_its_notebook():
    for name, claim, check, seconds, figure in notebook_rows():
        assert claim, name
        assert check, name
        assert 0 < float(seconds) <= 30, name
        source, alt = re.search(r'src="([^"]+)"', figure)[1], re.search(r'alt="([^"]+)"', figure)[1]
        assert (CHECKOUT / source).is_file(), name
        assert Path(source).name.startswith(name[1:3]), name
        assert len(alt) > 20, name


def test_the_only_bitmaps_among_the_figures_are_those_shown_here():
    shown = {re.search(r'src="([^"]+)"', row[4])[1] for row in notebook_rows()}
    assert shown == {f"figures/{path.name}" for path in (CHECKOUT / "figures").glob("*.png")}


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("http") or (CHECKOUT / target).exists(), target


def test_the_versions_named_are_the_pinned_ones():
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (CHECKOUT / "constraints.txt").read_text(), re.MULTILINE))
    for name in ("torch", "triton", "NumPy"):
        assert f"{name} {pinned[name.lower()]}" in README
