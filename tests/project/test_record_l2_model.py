"""The record of the modelled L2 follows from executed kernels, and its exact part from the ledger."""

from importlib import metadata

import pytest

from cascade_lab import runtime
from cascade_lab.drafts import PLANS, DraftTree, VerifyBatch
from cascade_lab.evidence import l2, recorded
from cascade_lab.evidence.compiled import in_child
from cascade_lab.levels import ledger
from tools import record_l2_model as tool

RECORD = recorded.load("l2_model")


def kv(row):
    return row["K, V"]


def test_the_record_has_every_case_and_calls_itself_a_model():
    assert RECORD["devices"] == ["model"]
    assert "no card was measured" in RECORD["source"]
    assert [(row["length"], row["batch"], row["plan"]) for row in RECORD["rows"]] == [
        (length, batch, plan) for length, batch in tool.CASES for plan in PLANS
    ]
    assert RECORD["scale"]["capacities"] == list(tool.CAPACITIES)
    assert [drift["name"] for drift in RECORD["drifts"]] == [drift.name for drift in l2.DRIFTS]
    for row in RECORD["rows"]:
        # every drift at each number of programs side by side, the random one from four seeds, and programs alone
        side_by_side = {4: 1, 16: 2}[row["batch"]]
        assert len(row["dram"]) == (side_by_side * (len(l2.DRIFTS) + 3) + 1) * len(tool.CAPACITIES)


def test_an_eighth_of_everything_is_an_eighth():
    """Programs per multiprocessor, and tokens that the cache holds, are those of the whole device."""
    full = RECORD["scale"]["of"]
    assert tool.MULTIPROCESSORS * full["kv heads"] == full["multiprocessors"] * tool.NUM_KV_HEADS
    here, there = (2 * 2 * heads * dim for heads, dim in ((tool.NUM_KV_HEADS, tool.HEAD_DIM), (8, 128)))
    assert tool.CACHE * there == full["cache bytes"] * here
    assert there == tool.SCALE * here


def test_what_the_multiprocessors_load_is_the_ledger_and_what_must_be_read_is_distinct():
    for row in RECORD["rows"]:
        batch, shape = row["batch"], RECORD["shape"]
        work = VerifyBatch(
            [row["length"]] * batch, [DraftTree.branches(shape["topk"], shape["steps"])] * batch, 16, "branch"
        )
        counted = ledger(work.levels(row["plan"]), num_q_heads=8, num_kv_heads=2)
        per_token = shape["kv heads"] * 2 * shape["head dim"] * 2
        assert kv(row["volume"]) == row["ledger"] == per_token * counted.kv_tokens
        assert kv(row["compulsory"]) == row["distinct"] == per_token * counted.kv_tokens_unique
        for found in row["dram"]:
            for part in ("K, V", "other"):
                assert row["compulsory"][part] <= found[part] <= row["volume"][part]


def test_what_is_loaded_once_is_read_once_in_any_order():
    for row in RECORD["rows"]:
        if row["plan"] != "naive":
            assert {kv(found) for found in row["dram"]} == {row["distinct"]}


def test_copies_side_by_side_reach_dram_only_where_the_prefix_is_long_and_they_drift():
    """As a share of what the branches load beyond the distinct bytes; the whole cache, one wave of programs."""
    extra = {}
    for row in RECORD["rows"]:
        if row["plan"] == "naive" and row["batch"] == 4:
            beyond = kv(row["volume"]) - row["distinct"]
            for found in row["dram"]:
                if found["slots"] > 1 and found["capacity"] == tool.CACHE:
                    extra.setdefault(row["length"], []).append((kv(found) - row["distinct"]) / beyond)
    assert max(extra[2000]) == 0
    assert max(extra[8192]) < 0.05
    assert min(extra[32768]) == 0
    assert 0.3 < max(extra[32768]) < 0.6


@pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")
@pytest.mark.parametrize("plan", ["naive", "cascade"])
def test_the_shortest_case_is_found_again(plan):
    again = in_child(f"case(2000, 4, {plan!r})", module="tools.record_l2_model")
    row = next(row for row in RECORD["rows"] if (row["length"], row["batch"], row["plan"]) == (2000, 4, plan))
    if metadata.version("triton") == RECORD["versions"]["triton"]:
        assert again == row
        return
    # another compiler loads the same bytes in another order
    for name in ("ledger", "distinct", "launches"):
        assert again[name] == row[name]
    assert (kv(again["volume"]), kv(again["compulsory"])) == (kv(row["volume"]), kv(row["compulsory"]))
    assert [kv(x) for x in again["dram"]] == pytest.approx([kv(x) for x in row["dram"]], rel=0.1)
