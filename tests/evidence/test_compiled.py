"""What the kernels become on each target, read from the assembler's report and the disassembly; no GPU is needed."""

import json
from pathlib import Path

import pytest

from cascade_lab import runtime
from cascade_lab.cli import main
from cascade_lab.evidence import compiled

CHECKOUT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")

# issue: warp-instructions of the main loop per K and V byte, by (head dim, rows)
ISSUE = {(64, 16): 0.07, (64, 64): 0.11, (64, 128): 0.18, (128, 16): 0.07, (128, 64): 0.12, (128, 128): 0.15}
ISSUE_SM80 = ISSUE | {(128, 64): 0.14}
PRODUCTS = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}


@pytest.fixture(scope="module")
def found():
    return compiled.in_child("survey()")


def of_table(found):
    return found["rows"][: 3 * len(compiled.table_works())]


def named(row):
    work = row["work"]
    return f"D={work['head_dim']} rows={work['rows']} {work['mask']} page={work['page_size']} {row['target']}"


@pytest.mark.long
def test_every_row_of_the_table_is_compiled_for_every_target(found):
    seen = {(row["work"]["head_dim"], row["block_m"], row["work"]["mask"], row["target"]) for row in of_table(found)}
    expected = {(work.head_dim, work.rows, work.mask, target) for work in compiled.table_works() for target in PRODUCTS}
    assert seen == expected
    assert len(seen) == 3 * 2 * (4 + 4 + 3 + 2)
    assert all(row["compiles"] for row in found["amd"])


@pytest.mark.long
def test_nothing_spills(found):
    spilled = [named(row) for row in found["rows"] if row["spill_bytes"] or row["stack_bytes"]]
    assert spilled == []


@pytest.mark.long
def test_products_are_those_of_the_generation(found):
    for row in found["rows"]:
        expected = PRODUCTS[row["target"]] if row["block_m"] >= 64 else "HMMA"
        assert row["products"] == [expected], named(row)


@pytest.mark.long
def test_keys_and_values_come_as_wide_asynchronous_copies_two_tiles_ahead(found):
    """Page ids are the only narrow loads; products that read shared memory themselves need one buffer more."""
    for row in found["rows"]:
        wide = sum(n for op, n in row["copies"].items() if op.startswith("LDGSTS") and op.endswith(".128"))
        narrow = sum(n for op, n in row["copies"].items() if not op.endswith(".128"))
        work = row["work"]
        columns = work["head_dim"] + (0 if work["latent"] else work["head_dim_v"] or work["head_dim"])
        assert wide * 16 * 32 * row["num_warps"] >= row["block_n"] * columns * 2, named(row)
        assert narrow <= 4, named(row)
        assert not any(op.startswith(("LDL", "STL")) for op in row["copies"]), named(row)
        assert row["buffers"] >= (3 if row["products"] in (["HGMMA"], ["UTCHMMA"]) else 2), named(row)


@pytest.mark.long
def test_main_loops_issue_few_instructions_per_byte(found):
    for row in of_table(found):
        bounds = ISSUE_SM80 if row["target"] == "sm_80" else ISSUE
        bound = bounds.get((row["work"]["head_dim"], row["block_m"]))
        assert row["loop_instructions"] > 0, named(row)
        assert bound is None or row["issue"] <= bound, named(row)


@pytest.mark.long
def test_merges_have_few_registers_and_wide_loads(found):
    assert {row["kernel"] for row in found["merges"]} == {"merge_pair_kernel", "merge_many_kernel"}
    for row in found["merges"]:
        assert row["registers"] <= 40
        assert row["spill_bytes"] == 0
        assert any(op.startswith("LDG") and op.endswith(".128") for op in row["copies"])


@pytest.mark.long
def test_the_worked_example_in_one_number(found):
    """L = 2000, topk = 4, S = 5, node rows, 8 query heads on 2 KV heads of 64, sm_90."""
    example = found["worked example"]
    assert example["issue x loaded / compulsory"] <= 0.20
    assert (example["launches without splits"], example["launches"]) == (1, 2)
    assert example["partials over KV bytes"] <= 0.25
    assert compiled.table(found).splitlines()[-1] == (
        f"issue x K tokens loaded / compulsory: {example['issue x loaded / compulsory']:.4f}"
    )


def test_interpreted_mode_is_refused():
    if runtime.triton_mode() == "interpreted":
        with pytest.raises(RuntimeError, match=runtime.SWITCH):
            compiled.inspect_attention(compiled.Work(64, 16), "sm_90")


def test_the_command_prints_the_table_and_writes_the_record(tmp_path, capsys, monkeypatch):
    recorded = json.loads((CHECKOUT / "figures" / "measured" / "compiled.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(compiled, "in_child", lambda expression: recorded)
    assert main(["bench", "--compiled", "--output", str(tmp_path / "compiled.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    number = recorded["worked example"]["issue x loaded / compulsory"]
    assert lines[-1] == f"issue x K tokens loaded / compulsory: {number:.4f}"
    assert len(lines) == 1 + len(recorded["rows"]) + len(recorded["merges"]) + 2
    assert json.loads((tmp_path / "compiled.json").read_text(encoding="utf-8")) == recorded


@pytest.mark.long
def test_the_record_is_of_the_present_table(found):
    recorded = json.loads((CHECKOUT / "figures" / "measured" / "compiled.json").read_text(encoding="utf-8"))
    tiles = ("work", "target", "block_m", "block_n", "num_warps")
    assert [[row[key] for key in tiles] for row in recorded["rows"]] == [
        [row[key] for key in tiles] for row in found["rows"]
    ]
