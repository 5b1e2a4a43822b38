"""What the kernels become on each target, read from the assembler's report and the disassembly; no GPU is needed."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cascade_lab import runtime
from cascade_lab.cli import main
from cascade_lab.evidence import compiled

CHECKOUT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")

RECORD = CHECKOUT / "figures" / "measured" / "compiled.json"
# issue: warp-instructions of the main loop per K and V byte, by (head dim, rows); without products of warp groups more
ISSUE = {
    **{(64, 16): 0.063, (64, 32): 0.09, (64, 64): 0.071, (64, 128): 0.126},
    **{(128, 16): 0.044, (128, 32): 0.059, (128, 64): 0.059, (128, 128): 0.077},
    **{(192, 64): 0.133, (256, 16): 0.043, (256, 32): 0.066, (256, 64): 0.093, (576, 16): 0.063, (576, 32): 0.127},
}
ISSUE_MMA = ISSUE | {
    (64, 16): 0.07,
    (64, 32): 0.095,
    (128, 16): 0.045,
    (64, 64): 0.11,
    (64, 128): 0.18,
    (128, 64): 0.15,
    (128, 128): 0.21,
    (128, 32): 0.06,
    (192, 64): 0.2,
    (256, 16): 0.05,
    (256, 32): 0.07,
    (256, 64): 0.16,
    (576, 16): 0.067,
    (576, 32): 0.22,
}
# programs side by side where a row was chosen for it, (head dim, rows) at least
TWO = {"sm_90": [(64, 64), (128, 16), (128, 32), (128, 64), (256, 32)]}
TWO["sm_100"] = TWO["sm_90"]
PRODUCTS = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}
FRESH = ("sm_80", "sm_90", "sm_100")


@pytest.fixture(scope="module", params=["recorded", pytest.param("fresh", marks=pytest.mark.long)])
def found(request):
    """The committed survey, and a new one of three targets; the driver's tests compile for the others too."""
    if request.param == "recorded":
        return json.loads(RECORD.read_text(encoding="utf-8"))
    return compiled.in_child(f"survey(targets={FRESH})")


def of_kind(found, *kinds):
    return [row for row in found["rows"] if row["kind"] in kinds]


def shape(row):
    return row["work"]["head_dim"], row["block_m"]


def named(row):
    work = row["work"]
    return f"D={work['head_dim']} rows={work['rows']} {work['mask']} page={work['page_size']} {row['target']}"


def test_every_row_of_the_table_is_compiled_for_every_target(found):
    rows = of_kind(found, "table")
    targets = [name for name in found["devices"] if name != "gfx942"]
    assert targets in ([*compiled.NVIDIA_TARGETS], [*FRESH])
    seen = [(row["work"]["head_dim"], row["work"]["rows"], row["work"]["mask"], row["target"]) for row in rows]
    works = compiled.table_works()
    assert len(works) == 2 * (4 + 4 + 3 + 2) + 3
    assert seen == [(work.head_dim, work.rows, work.mask, target) for target in targets for work in works]
    assert all(row["block_m"] == row["work"]["rows"] for row in rows if row["target"] != "sm_75")
    assert len(found["amd"]) == len(works[::2])
    assert all(0 < row["shared_bytes"] <= 65536 for row in found["amd"])


# bytes a thread that are left: with 3 stages, 16 or 64 keys, 4 or 16 warps these 64 rows spill as much or more
SPILLED = {("sm_90", "capped", 256, 64): 40}


def test_nothing_spills(found):
    """In half precision, in float32, and where scores are capped under a window, but for one row."""
    assert {row["kind"] for row in found["rows"]} == {"table", "capped", "float32", "odd"}
    for row in found["rows"]:
        most = SPILLED.get((row["target"], row["kind"], *shape(row)), 0)
        assert row["spill_bytes"] <= most, named(row)
        assert row["stack_bytes"] <= most, named(row)


def test_every_row_fits_its_target(found):
    for row in found["rows"]:
        assert 0 < row["shared_bytes"] <= runtime.TARGETS[row["target"]].shared_bytes, named(row)
        assert row["programs"] >= 1, named(row)


def test_products_are_those_of_the_generation(found):
    """A T4 has no tensor cores that Triton would use, and float32 has none anywhere."""
    for row in found["rows"]:
        expected = [PRODUCTS.get(row["target"], "HMMA") if row["block_m"] >= 64 else "HMMA"]
        if row["kind"] == "float32" or row["target"] == "sm_75":
            expected = []
        assert row["products"] == expected, named(row)


def test_keys_and_values_come_as_wide_asynchronous_copies_two_tiles_ahead(found):
    """Page ids are the only narrow loads; products that read shared memory themselves need one buffer more. Where 99
    KiB leave room for a single tile of 64 x 32 of head dim 256, it is one tile ahead."""
    for row in of_kind(found, "table", "odd"):
        if row["target"] == "sm_75":
            continue
        copies = {op: n for op, n in row["copies"].items() if op.startswith("LDGSTS")}
        # the second block of a head dim may have less than 16 bytes for each thread
        wide = sum(n * (2 if op.endswith(".128") else op.endswith(".64")) for op, n in copies.items())
        narrow = sum(n for op, n in row["copies"].items() if not op.endswith(".128"))
        work = row["work"]
        columns = work["head_dim"] + (0 if work["latent"] else work["head_dim_v"] or work["head_dim"])
        assert wide * 8 * 32 * row["num_warps"] >= row["block_n"] * columns * 2, named(row)
        assert narrow <= 4, named(row)
        assert not any(op.startswith(("LDL", "STL")) for op in row["copies"]), named(row)
        buffers = 3 if row["products"] in (["HGMMA"], ["UTCHMMA"]) else 2
        if row["target"] in ("sm_86", "sm_89", "sm_120") and shape(row) == (256, 64):
            buffers = 1
        assert row["buffers"] >= buffers, named(row)


def test_main_loops_issue_few_instructions_per_byte(found):
    for row in of_kind(found, "table"):
        assert row["loop_instructions"] > 0, named(row)
        bound = (ISSUE if row["target"] in PRODUCTS else ISSUE_MMA).get(shape(row))
        assert bound is None or row["target"] == "sm_75" or row["issue"] <= bound, (named(row), row["issue"])


def test_rows_leave_room_for_a_second_program(found):
    for row in of_kind(found, "table"):
        if shape(row) in TWO.get(row["target"], []):
            assert row["programs"] >= 2, (named(row), row["programs"])


def test_long_pages_and_dense_caches_cost_no_more_than_pages_of_16(found):
    """Of a tile and more, of a power of two or not; one page a request is a dense cache."""
    for target in FRESH:
        of_target = [row for row in found["rows"] if row["target"] == target and shape(row) == (128, 64)]
        plain = [row for row in of_target if row["kind"] == "table" and row["work"]["mask"] == "tree"]
        pages = {row["work"]["page_size"]: row["issue"] for row in of_target if row["work"]["page_size"] > 16}
        assert sorted(pages) == [64, 256, 2000, 2048]
        assert max(pages.values()) <= plain[0]["issue"], (target, pages)


def test_merges_have_few_registers_and_wide_loads(found):
    assert {row["kernel"] for row in found["merges"]} == {"merge_pair_kernel", "merge_many_kernel"}
    for row in found["merges"]:
        assert row["registers"] <= 48
        assert row["spill_bytes"] == 0
        assert any(op.startswith("LDG") and ".128" in op for op in row["copies"])


def test_the_worked_example_in_one_number(found):
    """L = 2000, topk = 4, S = 5, node rows, 8 query heads on 2 KV heads of 64, sm_90."""
    example = found["worked example"]
    assert example["issue x loaded / compulsory"] <= 0.126
    assert (example["launches without splits"], example["launches"]) == (1, 2)
    assert example["partials over KV bytes"] <= 0.25
    assert compiled.table(found).splitlines()[-1] == (
        f"issue x K tokens loaded / compulsory: {example['issue x loaded / compulsory']:.4f}"
    )


COMPILED_HERE = """[vars(inspect_attention(work, target)) for work, target in (
    (Work(128, 64), 'sm_90'), (Work(128, 64, page_size=2000), 'sm_90'),
    (Work(128, 128, 'causal'), 'sm_90'), (Work(64, 64, 'causal', dtype='float32'), 'sm_90'))]"""


def test_a_few_rows_compiled_anew_are_as_recorded():
    """The verify tile, also on a dense cache, and causal prefill of head dim 128; float32 at 64 rows."""
    verify, dense, prefill, full = compiled.in_child(COMPILED_HERE)
    for row in (verify, dense, prefill, full):
        assert (row["spill_bytes"], row["stack_bytes"]) == (0, 0)
    assert verify["issue"] <= ISSUE[128, 64]
    assert verify["programs"] == 2
    assert dense["issue"] <= verify["issue"]
    assert prefill["issue"] <= ISSUE[128, 128]
    assert (verify["products"], full["products"]) == (["HGMMA"], [])


def test_interpreted_mode_is_refused():
    if runtime.triton_mode() == "interpreted":
        with pytest.raises(RuntimeError, match=runtime.SWITCH):
            compiled.inspect_attention(compiled.Work(64, 16), "sm_90")


def test_the_command_prints_the_table_and_writes_the_record(tmp_path, capsys, monkeypatch):
    work = {"work": asdict(compiled.Work(64, 16))}
    report = compiled.Report("attention_kernel", "sm_90", 16, 64, 4, 90, 0, 0, 37376, 249, 0.0608, ("HMMA",), {}, 2, 5)
    example = {"launches": 2, "launches without splits": 1, "partials over KV bytes": 0.24}
    recorded = {
        "rows": [{"kind": kind, **work, **asdict(report)} for kind in ("table", "capped", "float32")],
        "merges": [{"head_dim": 64, **asdict(report)}],
        "amd": [work | {"shared_bytes": 16384}],
        "worked example": example | {"issue x loaded / compulsory": 0.1228},
    }
    recorded = json.loads(json.dumps(recorded))
    monkeypatch.setattr(compiled, "in_child", lambda expression: recorded)
    assert main(["bench", "--compiled", "--output", str(tmp_path / "compiled.json")]) == 0
    head, *rows, merge, sums, last = capsys.readouterr().out.splitlines()
    assert last == "issue x K tokens loaded / compulsory: 0.1228"
    assert sums.endswith("1 rows compile for gfx942, with at most 16384 bytes of shared memory")
    assert [("capped window" in row, "float32" in row) for row in rows] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert (head.split()[0], merge.split()[1]) == ("D", "attention")
    assert json.loads((tmp_path / "compiled.json").read_text(encoding="utf-8")) == recorded


@pytest.mark.parametrize("target", compiled.NVIDIA_TARGETS)
def test_the_record_has_what_a_survey_would_inspect(target):
    rows = [row for row in json.loads(RECORD.read_text(encoding="utf-8"))["rows"] if row["target"] == target]
    assert [(row["kind"], row["work"]) for row in rows] == [
        (kind, asdict(work)) for kind, work in compiled.works_of(target)
    ]
