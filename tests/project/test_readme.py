"""README says what is there: its example equals one call, its table lists the notebooks, its links lead somewhere."""

import re
from pathlib import Path

import pytest
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
    code, *_ = blocks("python")
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    lengths = torch.tensor([39, 25], dtype=torch.int32)
    q, k, v, pages, rows = (names[name] for name in ("q", "k", "v", "pages", "rows"))
    whole = cl.attention(q, k, v, pages, lengths, cu_seqlens_q=rows, causal=True)
    assert names["o"].shape == (5, 8, 64)
    assert names["lse"].shape == (5, 8)
    torch.testing.assert_close(names["o"], whole.o, atol=2e-6, rtol=0)
    torch.testing.assert_close(names["lse"], whole.lse, atol=2e-6, rtol=0)


def test_the_python_examples_are_six_lines_after_imports_and_data():
    code, verify, _ = blocks("python")
    lines = [line for line in code.splitlines() if line and not line.startswith("import ")]
    assert len(lines) == 6
    lines = verify.split("\n\n")[-1].splitlines()
    assert len([line for line in lines if not line.startswith("x = ")]) == 6


def test_the_verify_round_accepts_what_the_model_says_along_each_path():
    """Every node's answer again from its own path in float64, and the accepted states where they belong."""
    _, code, _ = blocks("python")
    torch.manual_seed(3)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    k, v, batch, accepted = (names[name] for name in ("k", "v", "batch", "accepted"))
    table, w_q, w_k, w_v = (names[name].double() for name in ("table", "w_q", "w_k", "w_v"))
    tokens, row = batch.tokens.tolist(), 0
    for r, (tree, length) in enumerate(zip(batch.trees, batch.prefix_lens, strict=True)):
        slots = batch.prefix_slots(r)
        prefix_k, prefix_v = (cache.view(-1, 2, 64)[slots].double() for cache in (k, v))
        said = []
        for node in range(tree.size):
            path = [tokens[row + n] for n in (*tree.ancestors(node), node)]
            x = table[path]
            keys = torch.cat((prefix_k, (x @ w_k).view(-1, 2, 64))).repeat_interleave(4, 1)
            values = torch.cat((prefix_v, (x @ w_v).view(-1, 2, 64))).repeat_interleave(4, 1)
            scores = torch.einsum("hd,khd->hk", (x[-1] @ w_q).view(8, 64), keys) / 8
            o = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
            torch.testing.assert_close(names["o"][row + node].double(), o, atol=1e-3, rtol=1e-4)
            said.append(int((o.flatten() @ w_q.T @ table.T).argmax()))
        path = accepted.nodes[r][: accepted.lens[r]].tolist()
        for parent, node in zip(path, path[1:], strict=False):
            assert tokens[row + node] == said[parent]
        assert accepted.next_tokens[r] == said[path[-1]]
        children = [node for node in range(tree.size) if tree.parents[node] == path[-1]]
        assert said[path[-1]] not in [tokens[row + node] for node in children]
        new = cl.paging.token_slots(batch.page_table, r, length + len(path), 16)[length:]
        expected = (table[[tokens[row + n] for n in path]] @ w_k).view(-1, 2, 64)
        torch.testing.assert_close(k.view(-1, 2, 64)[new].double(), expected, atol=1e-4, rtol=1e-4)
        row += tree.size


def test_the_model_of_transformers_accepts_what_it_says_eagerly():
    pytest.importorskip("transformers")
    *_, code = blocks("python")
    torch.manual_seed(5)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    names["model"].set_attn_implementation("eager")
    prompt, paged, accepted = [*range(21)], names["paged"], names["accepted"]
    with torch.no_grad():
        said = [int(names["model"](torch.tensor([prompt])).logits[0, -1].argmax())]
        taken = accepted.tokens[0][: accepted.lens[0]].tolist()
        for token in taken:
            prompt.append(token)
            said.append(int(names["model"](torch.tensor([prompt])).logits[0, -1].argmax()))
    assert taken == said[:-1]
    assert accepted.next_tokens.tolist() == said[-1:]
    assert len(paged.caches) == 2 * len(paged.k_caches) == 2 * names["config"].num_hidden_layers


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
    shown = set(re.findall(r'src="([^"]+)"|!\[[^\]]{20,}\]\(([^)]+)\)', README))
    shown = {table or before for table, before in shown}
    assert len(shown) == len(notebook_rows()) + 1
    assert shown == {f"figures/{path.name}" for path in (CHECKOUT / "figures").glob("*.png")}


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("http") or (CHECKOUT / target).exists(), target


def test_the_versions_named_are_the_pinned_ones():
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (CHECKOUT / "constraints.txt").read_text(), re.MULTILINE))
    for name in ("torch", "triton", "NumPy"):
        assert f"{name} {pinned[name.lower()]}" in README


def test_the_table_of_the_thesis_has_the_counts_of_the_ledger():
    head = README.split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in head.splitlines() if line[:1] == "|"][2:]
    branches = cl.VerifyBatch([24], [cl.DraftTree.branches(4, 3)], rows="branch")
    changes = [
        [cl.ledger(branches.levels(plan)) for plan in ("naive", "cascade")],
        [cl.ledger(cl.prefix_hit_levels([8], [hit])) for hit in (0, 4)],
    ]
    counts = {
        "*pairs*": lambda ledger: ledger.pairs,
        "*distinct* keys": lambda ledger: ledger.kv_tokens_unique,
        "reads *per request*": lambda ledger: ledger.kv_tokens,
        "reads *per row tile*": lambda ledger: ledger.tile_tokens(4),
    }
    assert len(rows) == len(counts)
    for (name, *cells), (kind, count) in zip(rows, counts.items(), strict=True):
        assert name.startswith(kind)
        for cell, plans in zip(cells, changes, strict=True):
            before, after = (count(ledger) for ledger in plans)
            said = f"{before} → {after}"
            assert cell == (said if before == after else f"**{said}**")
    assert "all 12 rows of the branches loads 36" in head
    assert (branches.num_rows, changes[0][1].tile_tokens(12)) == (12, 36)
