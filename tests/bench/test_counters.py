"""Counters of the memory system, from an executable that stands in for ncu and prints what ncu prints, or fails."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cascade_lab import runtime
from cascade_lab.bench import clock as clocks
from cascade_lab.bench.gpu import counters, report, run, session
from cascade_lab.bench.gpu.counters import ASKED, DRAM, FOUND
from cascade_lab.evidence import checks
from tests.bench.ncu_log import log_of
from tests.bench.perfect import CARD, ceilings
from tests.limits import HANGS_S

SMOKE = replace(session.PRESETS["smoke"], counter_lengths=(16, 40))
needs_kernels = pytest.mark.skipif(runtime.triton_mode() != "interpreted", reason="launches kernels on a CPU")
# runs its child as ncu does, then writes the log of a run in which launch i moved 1000 (i + 1) sectors
NCU = """#!{python}
import csv, json, subprocess, sys
sys.path[:0] = {path!r}
options = sys.argv[1 : sys.argv.index({python!r})]
assert "--csv" in options and "off" == options[options.index("--profile-from-start") + 1]
metrics = options[options.index("--metrics") + 1].split(",")
log = options[options.index("--log-file") + 1]
done = subprocess.run(sys.argv[len(options) + 1 :], stdout=subprocess.PIPE, text=True, check=True)
sys.stdout.write(done.stdout)
kernels = [k for row in json.loads(done.stdout)["rows"] for plan in row["plans"].values() for k in plan["kernels"]]
from tests.bench.ncu_log import log_of
with open(log, "w") as file:
    file.write(log_of(kernels))
"""
FAILING = """#!/bin/sh
log=$(echo "$@" | sed 's/.*--log-file \\([^ ]*\\) .*/\\1/')
{commands}
"""


def install(monkeypatch, folder, script):
    """Put an executable named ncu first on the path."""
    ncu = folder / "ncu"
    ncu.write_text(script)
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def counted(scale=SMOKE, **options):
    bench = session.Session(clocks.HostClock(), scale, **options)
    return list(counters.count_traffic(bench)), bench


@needs_kernels
def test_launches_are_counted_plan_by_plan_beside_the_ledger(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, NCU.format(python=sys.executable, path=sys.path))
    rows, _ = counted()
    assert [(row["length"], row["topk"], row["batch"], row["rows"]) for row in rows] == [
        (16, 2, 2, "branch"),
        (40, 2, 2, "branch"),
    ]
    launch = 0
    for row in rows:
        kernels = {plan: x["kernels"] for plan, x in row["plans"].items()}
        assert kernels == {
            "naive": ["_attention_kernel"],
            "cascade": ["_attention_kernel", "_attention_kernel", "_merge_many_kernel"],
            "fused": ["_attention_kernel"],
        }
        for x in row["plans"].values():
            sectors = [1000 * (launch + i + 1) for i in range(len(x["kernels"]))]
            launch += len(sectors)
            attention = sectors[:2] if len(sectors) == 3 else sectors
            assert x["l2_bytes"] == 32 * sum(sectors)
            assert x["l2_found_bytes"] == 8 * sum(sectors)
            assert x["dram_bytes"] == 24 * sum(sectors)
            assert (x["attention_l2_bytes"], x["attention_dram_bytes"]) == (32 * sum(attention), 24 * sum(attention))
        # per token K and V of one head of 16 in bfloat16; two requests with 2 branches of 2
        length, per_token = row["length"], 2 * 16 * 2
        naive, cascade, fused = (row["plans"][plan] for plan in ("naive", "cascade", "fused"))
        assert naive["kv_bytes"] == naive["kv_bytes_loaded"] == per_token * 2 * 2 * (length + 2)
        for x in (cascade, fused):
            assert x["kv_bytes"] == x["kv_bytes_distinct"] == per_token * 2 * (length + 4)
        assert fused["kv_bytes_distinct"] <= naive["kv_bytes_distinct"] < naive["kv_bytes"]
    assert launch == 10


@needs_kernels
def test_launches_are_noted_and_kernels_left_as_they_were():
    from cascade_lab.backends.triton import attention, merge

    kernels = (attention._attention_kernel, merge._merge_pair_kernel, merge._merge_many_kernel)
    (row,) = counters.launch_plans(SMOKE, [dict(length=16, topk=1, batch=1, group=2, rows="node")])
    assert [len(plan["kernels"]) for plan in row["plans"].values()] == [1, 3, 1]
    assert kernels == (attention._attention_kernel, merge._merge_pair_kernel, merge._merge_many_kernel)


def test_without_ncu_the_section_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    rows, bench = counted()
    assert rows == [{"missing": "ncu (Nsight Compute) is not installed"}]
    assert bench.skipped == []


PERMISSION = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        (f'echo "{PERMISSION} on the target device 0." >"$log"; exit 1', "no permission to read the GPU's counters"),
        # some versions say so on the terminal and end as if nothing were wrong
        (f'echo "{PERMISSION}"', "no permission to read the GPU's counters"),
        ('echo "==ERROR== The application returned an error code (1)." >&2; exit 9',
         "ncu counted nothing (exit status 9): The application returned an error code (1)."),
        ('echo "==WARNING== No kernels were profiled." >"$log"',
         "ncu counted nothing (exit status 0): No kernels were profiled."),
        ("exit 3", "ncu counted nothing (exit status 3): no output"),
    ],
)  # fmt: skip
def test_a_profiler_that_counts_nothing_says_why(monkeypatch, tmp_path, commands, said):
    install(monkeypatch, tmp_path, FAILING.format(commands=commands))
    (row,), _ = counted()
    assert list(row) == ["missing"]
    assert row["missing"].startswith(said)


def test_a_profiler_that_does_not_end_is_ended_with_its_children(monkeypatch, tmp_path):
    pids = tmp_path / "pids"
    commands = f'sleep {HANGS_S} & echo "$$ $!" >"{pids}.new"; mv "{pids}.new" "{pids}"; wait'
    install(monkeypatch, tmp_path, FAILING.format(commands=commands))
    # the clock of the section, not of the machine: it runs out once the profiler's child is there
    communicate = counters.subprocess.Popen.communicate

    def when_started(process, timeout=None):
        while timeout is not None and not pids.exists():
            time.sleep(0.01)
        return communicate(process, timeout=None if timeout is None else 0.01)

    monkeypatch.setattr(counters.subprocess.Popen, "communicate", when_started)
    (row,), _ = counted(deadline=time.monotonic() + HANGS_S)
    assert row["missing"].startswith("ncu took longer than the ")
    for pid in map(int, pids.read_text().split()):
        # killed processes are gone, or wait for init to take note
        stat, limit = Path(f"/proc/{pid}/stat"), time.monotonic() + HANGS_S
        while stat.exists() and stat.read_text().split()[2] not in "ZX":
            assert time.monotonic() < limit
            time.sleep(0.01)


def test_points_beyond_the_sections_time_are_skipped(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, FAILING.format(commands="exit 3"))
    rows, bench = counted(deadline=0.0)
    assert rows == []
    assert [(point["length"], point["why"]) for point in bench.skipped] == [(16, "time"), (40, "time")]


def test_a_log_is_read_launch_by_launch():
    found = counters.parse(log_of(["_attention_kernel", "_merge_many_kernel(float *, int)"]))
    assert found == [
        {"kernel": "_attention_kernel", DRAM: 24_000, ASKED: 1000, FOUND: 250},
        {"kernel": "_merge_many_kernel", DRAM: 48_000, ASKED: 2000, FOUND: 500},
    ]
    assert counters.parse("") == counters.parse("==PROF== Connected\n") == counters.parse(log_of([])) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"unit": "Mbyte"}, "ncu gave dram__bytes_read.sum in Mbyte"),
        ({"value": "n/a"}, "ncu gave n/a as dram__bytes_read.sum"),
        ({"value": ""}, "ncu gave nothing as dram__bytes_read.sum"),
        ({"value": "inf"}, "ncu gave inf as dram__bytes_read.sum"),
    ],
)
def test_values_that_are_no_counts_are_refused(options, said):
    with pytest.raises(counters.NotCounted, match=f"^{said}$"):
        counters.parse(log_of(["_attention_kernel"], **options))


@pytest.mark.parametrize(
    ("kernels", "options"),
    [
        (["_attention_kernel"], {}),
        (["_attention_kernel", "_attention_kernel"], {}),
        (["_attention_kernel", "_merge_many_kernel", "_attention_kernel"], {}),
        (["_attention_kernel", "_merge_many_kernel"], {"drop": FOUND}),
    ],
)
def test_counters_of_other_launches_are_refused(kernels, options):
    made = [{"length": 8, "plans": {"naive": {"kernels": ["_attention_kernel", "_merge_many_kernel"]}}}]
    assert list(counters.joined(made, counters.parse(log_of(made[0]["plans"]["naive"]["kernels"]))))
    with pytest.raises(counters.NotCounted, match="other launches than the 2 that were made"):
        list(counters.joined(made, counters.parse(log_of(kernels, **options))))


@pytest.mark.parametrize("said", ["", "no JSON", "[]", "{}", '{"rows": 1}'])
def test_what_the_child_says_wrong_is_not_taken_for_counters(monkeypatch, tmp_path, said):
    (tmp_path / "log").write_text(log_of(["_attention_kernel"]))
    install(monkeypatch, tmp_path, FAILING.format(commands=f"cp '{tmp_path}/log' \"$log\"; echo '{said}'"))
    (row,), _ = counted()
    assert row == {"missing": "the launching process did not say what it launched"}


def test_the_whole_run_has_the_section_and_prints_it(monkeypatch, tmp_path, capsys):
    install(monkeypatch, tmp_path, FAILING.format(commands=f'echo "{PERMISSION}" >"$log"; exit 1'))
    monkeypatch.setattr(checks, "run_all", lambda todo, **_: iter(()))
    monkeypatch.setattr(run, "SECTIONS", {"counters": run.SECTIONS["counters"]})
    monkeypatch.setattr(run, "break_even_rows", lambda record, plan: [])
    monkeypatch.setattr(run, "print_summary", lambda record: None)
    output = tmp_path / "record.json"
    assert run.measure_gpu(SMOKE, output, quick=False, smoke=True, max_autotune=False) == 0
    section = json.loads(output.read_text())["sections"]["counters"]
    assert section["rows"][0]["missing"].startswith("no permission")
    assert "counters: 1 rows, 0 skipped" in capsys.readouterr().out


def plan(asked, loaded=1000, dram=500):
    return {"attention_l2_bytes": asked, "kv_bytes_loaded": loaded, "l2_bytes": asked, "l2_found_bytes": asked // 2,
            "dram_bytes": asked // 2, "attention_dram_bytes": dram, "kv_bytes_distinct": loaded // 2}  # fmt: skip


def bounds_of(rows):
    record = {"scale": {}, **ceilings(CARD)}
    record["sections"]["counters"] = {"rows": rows}
    return report.judge(record)[-2:]


def test_counted_sectors_are_judged_against_the_ledger():
    assert {bound["verdict"] for bound in bounds_of([{"missing": "x"}])} == {"not measured here"}
    assert bounds_of([{"plans": {"naive": plan(1049), "fused": plan(951)}}])[0]["verdict"] == "holds"
    missed = bounds_of([{"plans": {"naive": plan(1000), "fused": plan(930)}}])[0]
    assert (missed["verdict"], missed["met"], missed["of"]) == ("fails", 1, 2)
    assert missed["worst"] == pytest.approx(0.07)


def test_bytes_from_memory_are_judged_against_the_distinct_ones_of_the_plans_that_read_them_once():
    held = {"plans": {"naive": plan(1000, dram=5000), "cascade": plan(1000, dram=505), "fused": plan(1000, dram=549)}}
    assert bounds_of([held])[1]["verdict"] == "holds"
    missed = bounds_of([{"plans": {"cascade": plan(1000, dram=750)}}])[1]
    assert (missed["verdict"], missed["worst"]) == ("fails", 1.5)


def test_the_summary_shows_counters_or_why_there_are_none(capsys):
    ceiling = {"what": "one-element addition", "seconds": 1e-6}
    where = {"length": 64, "topk": 2, "batch": 3, "group": 4, "rows": "branch"}
    record = {
        "sections": {name: {"rows": []} for name in ("verify", "prefill", "peers")},
        "break_even": {"cascade": []},
    }
    record["sections"]["ceilings"] = {"rows": [ceiling]}
    record["scale"] = {"centre": [64, 2, 3, 4, "branch"]}
    record["sections"]["counters"] = {"rows": [where | {"plans": {"naive": plan(4_000_000, 3_990_000)}}]}
    report.print_summary(record)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.endswith("2.00"))
    assert line.split() == ["L=64", "topk=2", "B=3", "G=4", "branch", "naive", "4.00", "3.99", *["2.00"] * 3]
    record["sections"]["counters"] = {"rows": [{"missing": "ncu (Nsight Compute) is not installed"}]}
    report.print_summary(record)
    assert "missing: ncu (Nsight Compute) is not installed" in capsys.readouterr().out
