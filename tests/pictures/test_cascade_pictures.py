"""The numbers behind the pictures of draft trees, read volumes and triggers."""

import math
from fractions import Fraction

import pytest
import torch

from cascade_lab import (
    DraftTree,
    VerifyBatch,
    cascade_attention,
    interactions,
    ledger,
    prefix_hit_levels,
    rules,
    runtime,
    trigger,
)
from cascade_lab.evidence import reads
from cascade_lab.evidence.recorded import published
from cascade_lab.pictures import cascade as pictures

PLANS = ("naive", "cascade", "fused")


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_a_tree_is_drawn_by_parent_links_whatever_its_storage_order():
    tree = DraftTree([2, 5, -1, 5, 2, 2])
    fig, data = pictures.draft_tree(tree, 37)
    assert data["positions"] == [38, 39, 37, 39, 38, 38]
    assert data["edges"] == [(2, 0), (5, 1), (-1, 2), (5, 3), (2, 4), (2, 5)]
    assert [sum(row) for row in data["visible"]] == [2, 3, 1, 3, 2, 2]
    left, right = fig.axes
    assert len(left.lines) == 6
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["37", "38", "39"]
    drawn = right.images[0].get_array().tolist()
    assert drawn == [[True, *row] for row in data["visible"]]


def test_an_inner_node_stands_in_the_middle_of_its_leaves():
    fig, _ = pictures.draft_tree(DraftTree([-1, 0, 0, 1, 1]), 0)
    # leaves 2, 3, 4 are on lines 0, 1, 2, node 1 over 3 and 4, the root over all three
    assert [line.get_ydata()[1] for line in fig.axes[0].lines] == [1.0, 1.5, 0.0, 1.0, 2.0]


def test_a_tree_of_more_nodes_than_ticks_is_drawn():
    fig, data = pictures.draft_tree(DraftTree.branches(8, 8), 0)
    assert sum(map(sum, data["visible"])) == 8 * 36
    assert len(fig.axes[1].get_yticks()) == 8


def test_page_tables_name_rows_tokens_and_pages_of_every_request():
    tiny = VerifyBatch([5, 3], [DraftTree.branches(2, 2), None], page_size=4, rows="branch")
    assert pictures.page_tables(tiny.levels("cascade")).splitlines() == [
        "  prefix    rows 0 to 3   5 tokens in pages of 4: [0, 1]",
        "  prefix    no rows       3 tokens in pages of 4: [3]",
        "  draft     rows 0 to 1   2 tokens in pages of 1: [5, 6]",
        "  draft     rows 2 to 3   2 tokens in pages of 1: [7, 8]",
    ]
    assert "rows 2 to 3   7 tokens in pages of 1: [0, 1, 2, 3, 4, 7, 8]" in pictures.page_tables(tiny.levels("naive"))
    leaves = VerifyBatch([5], [DraftTree.branches(2, 2)], page_size=4, rows="leaf")
    assert "row 1         2 tokens in pages of 1: [7, 8]" in pictures.page_tables(leaves.levels("cascade"))


def test_the_ledger_table_itemises_levels_and_adds_them_up():
    batch = VerifyBatch([1000], [DraftTree.branches(4, 3)], rows="branch")
    table = pictures.ledger_table({"cascade": ledger(batch.levels("cascade"))}, {"prefix": "L", "draft": "topk S"})
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["cascade", "prefix", "L", "1000", "98.8%", "12000"],
        ["cascade", "draft", "topk", "S", "12", "1.2%", "24"],
        ["cascade", "total", "sum", "1012", "100.0%", "12024"],
    ]


def test_the_table_of_reads_names_three_counts_of_plans_and_of_hits():
    """A cascade lowers the second count, a hit leaves it; a kernel loads as the one, then as the pairs."""
    batch = VerifyBatch([1000], [DraftTree.branches(4, 3)], rows="branch")
    plans = {plan: ledger(batch.levels(plan)) for plan in PLANS}
    header, *rows = pictures.reads_table(plans, 16).splitlines()
    assert header.split() == ["plan", "distinct", "per", "request", "per", "row", "tile", "pairs"]
    assert [row.split() for row in rows] == [
        ["naive", "1012", "4012", "4012", "12024"],
        ["cascade", "1012", "1012", "1012", "12024"],
        ["fused", "1012", "1012", "1012", "12024"],
    ]
    long = pictures.reads_table(plans | {"branch rows, cascade": plans["cascade"]}, 16).splitlines()
    assert len({len(line) for line in long}) == 1
    hits = {f"H = {hit}": ledger(prefix_hit_levels([1024], [hit])) for hit in (0, 512, 768)}
    header, *rows = pictures.reads_table(hits, 128, {"H = 0": 4608, "H = 512": 3328, "H = 768": 1920}).splitlines()
    assert header.split()[-2:] == ["counted", "pairs"]
    assert [row.split()[3:] for row in rows] == [
        ["1024", "1024", "4608", "4608", str(interactions(1024))],
        ["1024", "1024", "3328", "3328", str(interactions(1024, 512))],
        ["1024", "1024", "1920", "1920", str(interactions(1024, 768))],
    ]


def test_the_table_of_counts_has_a_column_per_instrument():
    table = pictures.counts_table({"naive": {"ledger": 4012, "K": Fraction(8024, 2)}, "cascade": {"ledger": 9, "K": 8}})
    assert [line.split() for line in table.splitlines()] == [
        ["ledger", "K"],
        ["naive", "4012", "4012"],
        ["cascade", "9", "8"],
    ]


@pytest.mark.skipif(runtime.triton_mode() != "interpreted", reason="the recorder sees interpreted launches")
@pytest.mark.parametrize("prefix_len", [24, 5])
def test_program_reads_show_each_programs_slots_and_add_up_to_the_ledger(prefix_len):
    batch = VerifyBatch([prefix_len], [DraftTree.branches(2, 3)], page_size=8, rows="branch")
    cache, q = torch.zeros(batch.num_pages, 8, 1, 8), torch.zeros(6, 1, 8)
    records = {}
    for plan in PLANS:
        with reads.record_loads(k=cache, q=q, table=batch.page_table) as record:
            cascade_attention(q, cache, cache, batch.levels(plan), backend="triton")
        records[plan] = record["k"]
    fig, data = pictures.program_reads(records, batch.draft_slots(0).tolist())
    prefix, drafts = batch.prefix_slots(0).tolist(), batch.draft_slots(0).tolist()
    assert data["naive"] == [
        ("pass 1, program 0", prefix + drafts[:3]),
        ("pass 1, program 1", prefix + drafts[3:]),
    ]
    assert data["cascade"] == [
        ("pass 1, program 0", prefix),
        ("pass 2, program 0", drafts[:3]),
        ("pass 2, program 1", drafts[3:]),
    ]
    assert data["fused"] == [("pass 1, program 0", prefix + drafts)]
    for ax, plan in zip(fig.axes, PLANS, strict=True):
        total = ledger(batch.levels(plan))
        assert sum(len(slots) for _, slots in data[plan]) == total.kv_tokens
        title = f"{plan}: {total.kv_tokens} tokens loaded, {total.kv_tokens_unique} distinct"
        assert ax.get_title(loc="left") == title
        bars = [path.get_extents() for bars in ax.collections for path in bars.get_paths()]
        assert sum(box.width for box in bars) == pytest.approx(total.kv_tokens)


def test_the_ratio_is_that_of_the_page_tables_and_nears_topk():
    lengths, topks = [1, 40, 3000], [1, 3, 8]
    _, data = pictures.read_ratio(lengths, topks, 5, topk=4, other_steps=[1, 3, 20])

    def counted(length, topk, steps):
        batch = VerifyBatch([length], [DraftTree.branches(topk, steps)], rows="branch")
        return Fraction(*(ledger(batch.levels(plan)).kv_tokens for plan in ("naive", "cascade")))

    for topk, line in zip(topks, data["surface"], strict=True):
        assert line == pytest.approx([float(counted(length, topk, 5)) for length in lengths], rel=1e-15)
    for steps, cut in zip([1, 3, 20], data["cuts"], strict=True):
        assert cut == pytest.approx([float(counted(length, 4, steps)) for length in lengths], rel=1e-15)
    assert data["surface"][0] == [1.0] * 3
    assert 7.9 < data["surface"][2][2] < 8


def test_a_length_that_never_pays_is_marked_at_the_ceiling():
    curves = {"group 1": [900, 300, 0], "group 8": [None, 5000, 700]}
    fig, data = pictures.break_even([2, 4, 8], curves, 65536)
    assert data == curves
    line, none, other, never = (axis_line.get_ydata() for axis_line in fig.axes[0].lines)
    assert list(line) == [900, 300, 1]
    assert len(none) == 0
    assert math.isnan(other[0])
    assert list(other[1:]) == [5000, 700]
    assert list(never) == [65536]
    assert "x: never up to 65536" in texts(fig.axes[0])


def test_no_mark_for_never_when_every_length_pays():
    fig, _ = pictures.break_even([2, 4], {"group 1": [900, 300]}, 65536)
    assert texts(fig.axes[0]) == ["group 1"]


def test_losing_cases_and_the_best_of_each_source_are_labelled():
    cases = {"one": [("8/1", 4.5, 0.9), ("8/8", 7.2, 1.9), ("8/16", 7.5, 2.5)], "two": [("2/9", 2.0, 1.1)]}
    fig, data = pictures.published_speedups(cases)
    assert data == cases
    assert [label for label in texts(fig.axes[0]) if "/" in label] == ["8/1", "8/16", "2/9"]


def test_prediction_table_holds_the_decisions_numbers():
    batch = VerifyBatch([2000] * 4, [DraftTree.branches(4, 5)] * 4, rows="branch")
    decision = trigger.should_cascade(batch, trigger.H200, num_q_heads=32, num_kv_heads=8, head_dim=128)
    header, *rows, last = (line.split() for line in pictures.prediction_table(decision).splitlines())
    for plan, row in zip(PLANS, rows, strict=True):
        p = decision.predictions[plan]
        shown = dict(zip(header[:1] + ["KV MB"] + header[3:], row, strict=True))
        assert (shown["plan"], int(shown["launches"])) == (plan, p.launches)
        assert float(shown["KV MB"]) == pytest.approx(p.bytes / 1e6, abs=0.05)
        assert float(shown["total"]) == pytest.approx(1e6 * p.seconds, abs=0.05)
        assert float(shown["reread"]) == pytest.approx(1e6 * p.terms["reread"], abs=0.05)
    assert last[-1] == decision.plan


def test_published_table_says_where_the_model_has_the_wrong_sign():
    _, *rows = pictures.published_table(published()).splitlines()
    for case, row in zip(published(), rows, strict=True):
        branches, length, suffix, group, measured, model, sign = row.split()
        assert (int(branches), int(length), int(suffix)) == (case.branches, case.prefix_len, case.suffix_len)
        assert int(group) == case.num_q_heads // case.num_kv_heads
        assert float(measured[:-1]) == pytest.approx(case.speedup, abs=0.005)
        assert float(model[:-1]) == pytest.approx(case.predicted_speedup(), abs=0.005)
        assert sign == ("right" if (case.predicted_speedup() > 1) == (case.speedup > 1) else "wrong")


def test_rule_table_answers_yes_or_no_for_every_line():
    rows = rules.rule_table(
        [128, 8192], [1, 64], [1], steps=5, device_model=trigger.H200, num_q_heads=32, num_kv_heads=8, head_dim=128
    )
    _, *lines = pictures.rule_answers_table(rows).splitlines()
    answers = {True: "yes", False: "no"}
    for row, line in zip(rows, lines, strict=True):
        batch, topk, length, model, speedup, sglang, vllm, plan = line.split()
        assert (int(batch), int(topk), int(length)) == (row.batch, row.topk, row.prefix_len)
        assert (model, sglang, vllm) == tuple(answers[x] for x in (row.cascade, row.sglang, row.vllm))
        assert float(speedup[:-1]) == pytest.approx(row.speedup, abs=0.005)
        assert plan == row.plan


def l2_row(length, plan, volume, dram, batch=4):
    """A row of the L2 model: 100 distinct bytes, and (slots, capacity, bytes from DRAM) by drift."""
    found = [{"slots": s, "drift": "d", "capacity": c, "K, V": x, "other": 7} for s, c, x in dram]
    return {
        "length": length, "batch": batch, "plan": plan, "distinct": 100,
        "volume": {"K, V": volume, "other": 9}, "dram": found,
    }  # fmt: skip


def test_traffic_under_the_modelled_cache_is_shown_in_distinct_bytes_with_its_spread():
    record = {
        "rows": [
            l2_row(64, "naive", 400, [(66, 1024, 100), (33, 1024, 150), (1, 1024, 390), (66, 512, 200)]),
            l2_row(64, "cascade", 100, [(66, 1024, 100), (66, 512, 100)]),
            l2_row(128, "naive", 410, [(66, 1024, 120), (66, 512, 300), (33, 512, 210)]),
            l2_row(128, "cascade", 104, [(66, 1024, 104), (66, 512, 104)]),
            l2_row(256, "naive", 800, [(66, 1024, 120)], batch=16),
        ],
        "scale": {"one in": 1024, "capacities": [512, 1024]},
        "shape": {"topk": 4},
    }
    fig, data = pictures.cache_traffic(record, 4)
    assert data == {
        "naive": {
            64: {"volume": 4.0, "dram": {1024: (1.0, 1.5), 512: (2.0, 2.0)}},
            128: {"volume": 4.1, "dram": {1024: (1.2, 1.2), 512: (2.1, 3.0)}},
        },
        "cascade": {
            64: {"volume": 1.0, "dram": {1024: (1.0, 1.0), 512: (1.0, 1.0)}},
            128: {"volume": 1.04, "dram": {1024: (1.04, 1.04), 512: (1.04, 1.04)}},
        },
    }
    (ax,) = fig.axes
    assert "a model of the L2, not a measurement: batch 4" in ax.get_title(loc="left")
    assert texts(ax) == ["naive", "naive", "cascade", "cascade"]
    drawn = [tuple(line.get_ydata()) for line in ax.lines]
    # the largest cache first, and above it what the multiprocessors load
    assert drawn[1:4] == [(4.0, 4.0), (1.0, 1.5), (2.0, 2.0)]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["DRAM, L2 of 1 MiB", "DRAM, L2 of 0.5 MiB", "L2 to multiprocessors"]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["64", "128"]
