"""The benchmark's arithmetic and bookkeeping. Nothing here asserts a time."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from cascade_lab import files, runtime
from cascade_lab.bench import clock as clocks
from cascade_lab.bench import command, cpu, peers
from cascade_lab.bench.cpu import Row
from cascade_lab.bench.gpu import ahead, comparison, report, run, session, verify
from cascade_lab.bench.record import place, write_record
from cascade_lab.cli import main
from cascade_lab.evidence import checks, compiled
from cascade_lab.pictures import gpu as gpu_pictures
from tests.bench.perfect import CARD, record_of
from tests.limits import HANGS_LONG_S

DTYPES = ["bfloat16", "float16", "float32"]
SMOKE = session.PRESETS["smoke"]
needs_triton = pytest.mark.skipif(runtime.triton_mode() != "interpreted", reason="tries the GPU's benchmark on a CPU")


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("value", "bound", "verdict"),
    [
        (1.5, 1.5, "holds"),
        (1.51, 1.5, "fails"),
        (float("nan"), 1.5, "fails"),
        (9.0, None, "recorded"),
        (None, 1.5, "not measured here"),
        (None, None, "not measured here"),
    ],
)
def test_a_row_is_judged_by_its_bound(value, bound, verdict):
    assert Row("speed", "x", value, "x", bound).verdict == verdict


def test_one_missed_bound_makes_the_exit_status_1_and_is_written(tmp_path, capsys):
    def sections(slow: float):
        return (
            ("first", lambda: iter([Row("first", "fast", 1.0, "x", 1.5)])),
            (
                "second",
                lambda: iter([Row("second", "slow", slow, "x", 1.5), Row("second", "unknown", None, "x", 1.5)]),
            ),
        )

    output = tmp_path / "new" / "cpu.json"
    assert cpu.report(sections(1.4), output, {"quick": True}) == 0
    assert cpu.report(sections(1.6), output, {"quick": True}) == 1
    written = json.loads(output.read_text())
    assert [(row["name"], row["verdict"]) for row in written["rows"]] == [
        ("fast", "holds"),
        ("slow", "fails"),
        ("unknown", "not measured here"),
    ]
    assert written["quick"] is True
    assert "1 bounds missed, 1 rows not measured here" in capsys.readouterr().out


def test_rows_are_on_disk_when_a_later_section_breaks(tmp_path):
    def broken():
        raise RuntimeError("no clock")
        yield

    output = tmp_path / "cpu.json"
    sections = (("first", lambda: iter([Row("first", "kept", 1.0, "x")])), ("second", broken))
    with pytest.raises(RuntimeError, match="no clock"):
        cpu.report(sections, output, {})
    assert [row["name"] for row in json.loads(output.read_text())["rows"]] == ["kept"]


def test_the_ratio_is_ours_over_theirs_and_disturbed_rounds_do_not_count(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    # Ours takes 3 units and theirs 2, except in rounds that are disturbed, where ours takes 300.
    calls = {"ours": 0}
    preemptions = [0]
    monkeypatch.setattr(cpu, "_preemptions", lambda: preemptions[0])

    def ours():
        calls["ours"] += 1
        disturbed = calls["ours"] > 2 and calls["ours"] % 3 == 0
        preemptions[0] += disturbed
        clock[0] += 300 if disturbed else 3

    def theirs():
        clock[0] += 2

    row = cpu.compare("work", ours, theirs, 6, 1.5)
    assert (row.value, row.low, row.high, row.verdict) == (1.5, 1.5, 1.5, "holds")
    assert "3 of 9 rounds disturbed" in row.note


def test_a_busy_machine_has_measured_nothing(monkeypatch):
    count = iter(range(10**6))
    monkeypatch.setattr(cpu, "_preemptions", lambda: next(count))
    row = cpu.compare("work", lambda: None, lambda: None, 6, 1.5)
    assert row.verdict == "not measured here"
    assert "busy" in row.note


@pytest.mark.parametrize(
    "work",
    [
        cpu.SinglePass(48, 48, causal=True),
        cpu.SinglePass(5, 64, kv_heads=2),
        cpu.SinglePass(32, 96, causal=False, page_size=16),
    ],
    ids=str,
)
def test_both_sides_of_a_comparison_compute_the_same_thing(work):
    ours, theirs = cpu._calls(work)
    torch.testing.assert_close(ours().o, theirs()[0].transpose(0, 1), rtol=0, atol=2e-6)


def test_without_cpu_the_gpu_is_asked_for_and_the_option_is_named(capsys, tmp_path):
    assert command.carry_out(parse("--output", str(tmp_path / "x.json"))) == 1
    assert "--cpu" in capsys.readouterr().out
    assert not (tmp_path / "x.json").exists()


@needs_triton
def test_nothing_is_timed_while_compiled_code_is_executed(monkeypatch, capsys):
    monkeypatch.setenv(runtime.TARGET, "sm_90")
    assert main(["bench", "--smoke"]) == 1
    said = "bench: code compiled for sm_90 is executed on the CPU, which takes no time of a GPU; unset "
    assert capsys.readouterr().out == f"{said}CASCADE_LAB_TARGET\n"


def test_the_notebook_is_not_measured_where_its_tools_or_the_file_are_missing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (row,) = cpu.notebook_time()
    assert row.verdict == "not measured here"
    monkeypatch.setattr(cpu.importlib.util, "find_spec", lambda name: None)
    (row,) = cpu.notebook_time()
    assert row.verdict == "not measured here"
    assert "papermill" in row.note


def test_the_peak_of_a_small_process_is_its_own_when_a_large_one_starts_it():
    ballast = torch.ones(100_000_000)
    code = "from cascade_lab.bench import cpu; a = cpu.resident_peak(); x = bytearray(b'1' * 40_000_000); "
    grown = float(cpu._child(code + "print(cpu.resident_peak() - a)"))
    assert ballast[0] == 1
    assert 39 < grown < 130


def test_extra_memory_counts_the_call_and_not_its_inputs(capsys):
    cpu.print_extra_memory(cpu.SinglePass(8, 512))
    assert 0 <= float(capsys.readouterr().out) < 200


@pytest.mark.parametrize(
    "shape", [cpu.VerifyShape(33, 3, 2, batch=2, shuffled=True), cpu.VerifyShape(64, 1, 5, kv_heads=8)], ids=str
)
def test_plans_and_masked_sdpa_compute_the_same_verify_pass(shape):
    calls, theirs, ratio = cpu._verify_calls(shape)
    for ours in calls.values():
        torch.testing.assert_close(ours().o, theirs(), rtol=0, atol=2e-6)
    rows = shape.batch * shape.topk
    assert ratio == rows * (shape.length + shape.steps) / (shape.batch * shape.length + rows * shape.steps)


def test_verify_plans_and_regions_give_rows_with_their_bounds(monkeypatch):
    monkeypatch.setattr(cpu, "PLANNED", (3, 64, 2, 2))
    monkeypatch.setattr(cpu, "REGION_PAIRS", 50)
    monkeypatch.setattr(cpu, "_preemptions", lambda: 0)
    rows = [*cpu.verify((cpu.VerifyShape(40, 2),), 3), *cpu.plans(3), *cpu.regions(3)]
    names = [row.name.split(",")[0] for row in rows if row.section == "verify"]
    assert names == ["naive / SDPA", "cascade / SDPA", "fused / SDPA", "naive / cascade"]
    assert [(row.unit, row.bound) for row in rows if row.section == "plans"] == [("ms", 50.0)]
    assert {row.bound for row in rows if row.section == "regions"} == {1.0}
    assert all(row.value is not None for row in rows)


def test_merges_over_ranks_are_timed_against_a_bare_all_reduce(monkeypatch):
    monkeypatch.setattr(cpu, "MERGED", (2, 3, 2, 4))
    auto, reduce, gather = cpu.ranks(3)
    assert [row.name.split(":")[0].split(", ")[1] for row in (auto, reduce, gather)] == ["auto", "reduce", "gather"]
    assert (auto.bound, reduce.bound, gather.bound) == (cpu.RANKS_BOUND, None, None)
    assert all(0 < row.low <= row.value <= row.high for row in (auto, reduce, gather))


def test_host_time_is_in_launches_of_one_argument_or_the_reason_is_named(monkeypatch):
    asked = []

    def in_child(expression, module):
        asked.append((expression, module))
        return [
            {"call": "attention", "ratio": 30.5, "low": 29.0, "high": 33.0, "launches": 1},
            {"call": "cascade_attention, cascade", "ratio": 45.0, "low": 44.0, "high": 46.0, "launches": 3},
        ]

    monkeypatch.setattr(compiled, "in_child", in_child)
    one, three = cpu.host(5)
    assert asked == [("host_ratios(5)", "cascade_lab.bench.host")]
    assert one == Row("host", "attention / one-argument launch", 30.5, "x", None, 29.0, 33.0, "1 launch")
    assert (three.value, three.note, three.verdict) == (45.0, "3 launches", "recorded")

    def refused(expression, module):
        raise RuntimeError("host.host_ratios(5) failed: no Triton")

    monkeypatch.setattr(compiled, "in_child", refused)
    (row,) = cpu.host(5)
    assert (row.verdict, row.note) == ("not measured here", "host.host_ratios(5) failed: no Triton")


@pytest.mark.long
@needs_triton
def test_calls_are_launched_up_to_the_launcher_in_a_process_of_their_own():
    rows = {row.name.removesuffix(" / one-argument launch"): row for row in cpu.host(2)}
    launches = {name: int(row.note.split()[0]) for name, row in rows.items()}
    names = ("attention", "cascade_attention, fused", "cascade_attention, cascade", "merge_state")
    plans = ("plan, fused", "plan, cascade")
    assert list(launches) == [*names, *(f"{name}, unchecked" for name in names), *plans]
    assert [launches[name] for name in plans] == [launches[f"cascade_attention, {name[6:]}"] for name in plans]
    assert [launches[name] for name in names] == [launches[f"{name}, unchecked"] for name in names]
    assert launches["attention"] == launches["cascade_attention, fused"] == launches["merge_state"] == 1
    assert launches["cascade_attention, cascade"] > 1
    assert all(0 < row.low <= row.value <= row.high for row in rows.values())


SMOKE_WITHOUT_NOTEBOOK_TOOLS = """
import sys
for name in ("papermill", "nbformat", "nbconvert", "nbclient", "IPython", "ipykernel", "pytest", "tqdm"):
    sys.modules[name] = None
from cascade_lab.cli import main
assert main(["bench", "--smoke", "--output", "smoke.json"]) == 0
assert main(["bench", "--plot", "smoke.json", "--output", "pictures"]) == 0
"""


@pytest.mark.long
@needs_triton
def test_the_whole_gpu_benchmark_runs_on_a_cpu_without_the_notebook_tools(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SMOKE_WITHOUT_NOTEBOOK_TOOLS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS_LONG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "smoke.json").read_text())
    assert record["complete"] is True
    assert record["timings"].startswith("not meaningful")
    assert record["bounds"] == []
    assert record["checks"]["wrong"] is None
    assert len(record["checks"]["passed"]) == len(checks.checks(small=True))
    assert set(record["sections"]) == set(run.SECTIONS)
    for name, section in record["sections"].items():
        assert section["rows"], name
    assert {"device", "torch", "date", "commit", "triton mode"} <= set(record["provenance"])
    for row in record["sections"]["verify"]["rows"]:
        rows_per_request = row["topk"] * (row["steps"] if row["rows"] == "node" else 1)
        loaded = row["plans"]["cascade"]["kv_tokens"]
        paths = row["topk"] * (sum(range(1, row["steps"] + 1)) if row["rows"] == "node" else row["steps"])
        assert loaded == row["batch"] * (row["length"] + paths)
        assert row["plans"]["naive"]["kv_tokens"] == row["batch"] * (rows_per_request * row["length"] + paths)
        assert row["plans"]["fused"]["kv_tokens"] == row["batch"] * (row["length"] + row["topk"] * row["steps"])
    kernels = {row["kernel"]: row for row in record["sections"]["peers"]["rows"]}
    assert kernels["SDPA, dense mask, group packed"]["agrees"] is True
    assert kernels["FlexAttention"]["agrees"] is True
    assert kernels["SDPA flash, virtual requests"]["agrees"] is True
    assert "No module named 'vllm'" in kernels["vLLM flash attention"]["missing"]
    assert record["checks"]["skipped"] == []
    assert record["sensors"] == "no GPU"
    # with launches that cost nothing every section of times has points that are judged, whatever this machine took
    (launch,) = (row for row in record["sections"]["ceilings"]["rows"] if row["what"] == "one-element addition")
    launch["seconds"] = 1e-15
    judged = report.judge(record)
    assert {bound["name"].split(":")[0] for bound in judged if bound["of"]} >= {
        "ours over the fastest other kernel",
        "all sections", "verify, cascade and fused", "batches", "prefill", "merges", "linear layer of most rows"
    }  # fmt: skip
    pictures = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert {"gpu_verify_ratio.svg", "gpu_peers.svg", "gpu_prefill_law.svg", "gpu_merges.svg"} <= pictures


def quiet_run(monkeypatch, tmp_path, scale=SMOKE) -> tuple[int, dict]:
    """The GPU benchmark on a CPU without its checks; exit status and record."""
    monkeypatch.setattr(checks, "run_all", lambda todo, **_: iter(()))
    output = tmp_path / "record.json"
    status = run.measure_gpu(scale, output, quick=False, smoke=True, max_autotune=False)
    return status, json.loads(output.read_text())


@needs_triton
@pytest.mark.parametrize(("part", "error"), [("o", "in o"), ("lse", "in lse")])
def test_a_wrong_answer_stops_the_run_and_is_in_the_record(monkeypatch, tmp_path, part, error):
    planned = session.planned

    def wrong(*arguments):
        call = planned(*arguments)
        return lambda: (lambda state: state._replace(**{part: getattr(state, part) * 1.1}))(call())

    monkeypatch.setattr(verify, "planned", wrong)
    status, record = quiet_run(monkeypatch, tmp_path)
    assert status == 1
    assert record["complete"] is False
    assert "naive: row" in record["stopped"]
    assert error in record["stopped"]
    assert list(record["sections"]) == ["compile", "ceilings", "verify"]
    assert record["sections"]["verify"]["rows"] == []


@needs_triton
def test_a_failed_check_stops_the_run_before_anything_is_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "run_all", lambda todo, **_: iter([(todo[0], None), (todo[1], "AssertionError: off")]))
    output = tmp_path / "record.json"
    assert run.measure_gpu(SMOKE, output, quick=False, smoke=True, max_autotune=False) == 1
    record = json.loads(output.read_text())
    assert record["checks"]["wrong"].endswith("AssertionError: off")
    assert record["sections"] == {}


@needs_triton
def test_what_the_time_does_not_suffice_for_is_listed(monkeypatch, tmp_path):
    status, record = quiet_run(monkeypatch, tmp_path, replace(SMOKE, budget_s=0.0))
    assert (status, record["complete"]) == (0, True)
    skipped = record["sections"]["verify"]["skipped"]
    assert len(skipped) == 6
    assert all(point["why"] == "time" for point in skipped)
    assert {"new": 8, "hit": 16, "why": "time"} in record["sections"]["prefill"]["skipped"]


@needs_triton
def test_a_folded_launch_is_the_launch_of_the_point(monkeypatch):
    """Same shapes and strides, so the same compiled kernel: all that differs is where the pages point."""
    seen = []

    def record(q, k, v, levels):
        tensors = [level.page_table for level in levels] + [level.cache_seqlens for level in levels]
        shapes = [(x.shape, x.stride(), x.dtype) for x in (q, *tensors)]
        seen.append((shapes, k.shape[1:], k.stride(), [level.page_size for level in levels]))
        return lambda: None

    monkeypatch.setattr(ahead, "planned", record)
    scale = replace(SMOKE, coarse_page=2)
    point = verify.verify_points(scale)[0]
    assert ahead.launch_once(scale, [point]) == 3
    bench = session.Session(clocks.HostClock(), scale)
    work = verify.Pool(bench, verify.tokens_needed(scale, **point)).verify(**point)
    for levels in work.plans.values():
        record(work.q, work.k, work.v, levels)
    assert seen[:3] == seen[3:]
    tokens = 16 * scale.coarse_page
    assert work.k.shape[0] * work.k.shape[1] > tokens
    folded = verify.folded(work.plans["fused"][0], tokens)
    assert int(folded.page_table.max()) < tokens // folded.page_size
    assert ahead.launch_once(scale, [{"new": 4, "hit": 16}]) == 1


@needs_triton
def test_flex_attention_is_compiled_ahead_for_the_shapes_in_which_it_is_timed(monkeypatch):
    seen = []

    def record(*tensors, max_autotune):
        seen.append(([(x.shape, x.stride(), x.dtype) for x in tensors], max_autotune))
        return lambda: tensors[0]

    monkeypatch.setattr(peers, "compile_flex_attention", record)
    monkeypatch.setattr(peers, "VERIFY_PEERS", {"FlexAttention": peers.flex_attention})
    monkeypatch.setattr(comparison, "hold", lambda *_: {})
    scale = replace(SMOKE, num_kv_heads=2, peer_lengths=(32, 12), prompts=())
    points = ahead.flex_points(scale)
    assert ahead.launch_once(scale, points, math.inf, True) == len(points) == 6
    assert [row["kernel"] for row in comparison.time_peers(session.Session(clocks.HostClock(), scale, True))][3::4] == (
        ["FlexAttention"] * 6
    )
    assert seen[:6] == seen[6:]
    assert len({str(shapes) for shapes, _ in seen}) > 3


@needs_triton
@pytest.mark.parametrize(
    ("scale", "deadline", "outcome"),
    [
        (replace(SMOKE, lengths=(16,), prompts=(), new_tokens=(4,), hits=(0,), mix_requests=2), math.inf, "done"),
        pytest.param(
            replace(SMOKE, lengths=(16,), prompts=(), new_tokens=(4,), hits=(0,), topks=(-1,)),
            math.inf,
            "failed",
            marks=pytest.mark.long,
        ),
        pytest.param(SMOKE, 0.0, "late", marks=pytest.mark.long),
    ],
)
def test_kernels_are_compiled_in_worker_processes(monkeypatch, scale, deadline, outcome):
    """The workers' own mode is the machine's: here they interpret, and count what they launched."""
    monkeypatch.setattr(runtime, "triton_mode", lambda: "compiled")
    monkeypatch.setattr(ahead, "workers", lambda: 2)
    bench = session.Session(clocks.HostClock(), scale, deadline=deadline)
    (row,) = ahead.compile_ahead(bench)
    if outcome == "done":
        # six batches and two plans of trees; three plans each for rows by branch, by leaf and by node; one prefill
        assert row == {"tasks": 12, "done": 12, "plans": 6 + 2 + 9 + 1, "failed": []}
    elif outcome == "failed":
        assert (row["done"], row["plans"]) == (9, 9)
        assert len(row["failed"]) == 3
        assert "topk" in row["failed"][0]
    else:
        assert row["done"] < row["tasks"]
        assert row["plans"] == 0


@needs_triton
def test_an_interruption_keeps_the_rows_measured_so_far(monkeypatch, tmp_path):
    def interrupted(bench):
        yield {"what": "kept"}
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "SECTIONS", {"first": (1, interrupted)})
    with pytest.raises(KeyboardInterrupt):
        quiet_run(monkeypatch, tmp_path)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["sections"]["first"]["rows"] == [{"what": "kept"}]
    assert (record["complete"], record["stopped"]) == (False, "KeyboardInterrupt()")


@needs_triton
def test_a_run_that_is_killed_leaves_the_record_of_what_was_done(monkeypatch, tmp_path):
    """What is on disk while a section runs: no handler of this process has a say when it is killed."""
    output, seen = tmp_path / "record.json", []

    def rows(bench):
        for i in range(3):
            seen.append(files.read_json(output))
            yield {"what": f"row {i}"}

    now = iter(range(0, 10**6, 10))
    monkeypatch.setattr(run, "SECTIONS", {"first": (1, lambda bench: iter([{"what": "done"}])), "second": (1, rows)})
    monkeypatch.setattr(run.time, "monotonic", lambda: float(next(now)))
    status, record = quiet_run(monkeypatch, tmp_path)
    assert (status, record["complete"]) == (0, True)
    assert [x["sections"].get("second", {"rows": []})["rows"] for x in seen] == [
        [],
        [{"what": "row 0"}],
        [{"what": "row 0"}, {"what": "row 1"}],
    ]
    for x in seen:
        assert x["sections"]["first"]["rows"] == [{"what": "done"}]
        assert (x["complete"], "stopped" in x) == (False, False)


@needs_triton
def test_the_output_is_written_before_the_first_check(monkeypatch, tmp_path):
    seen = []

    def look(todo, **options):
        seen.append(files.read_json(tmp_path / "record.json"))
        return iter(())

    monkeypatch.setattr(run, "SECTIONS", {})
    monkeypatch.setattr(checks, "run_all", look)
    assert run.measure_gpu(SMOKE, tmp_path / "record.json", quick=False, smoke=True, max_autotune=False) == 0
    assert [(x["complete"], x["sections"]) for x in seen] == [(False, {})]


@needs_triton
def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(checks, "run_all", lambda todo, **_: pytest.fail("checked"))
    assert main(["bench", "--smoke", "--output", str(tmp_path / "file" / "below")]) == 2
    said = capsys.readouterr().err
    assert "--output: " in said
    assert "give a folder that can: --output DIR" in said


@pytest.mark.parametrize(
    ("given", "file"),
    [(None, "a/default.json"), ("x.json", "x.json"), ("folder", "folder/default.json"), ("v1.2", "v1.2/default.json")],
)
def test_the_output_is_a_file_or_a_folder_for_it(monkeypatch, tmp_path, given, file):
    monkeypatch.chdir(tmp_path)
    found = place(None if given is None else Path(given), Path("a/default.json"))
    assert found == Path(file)
    (tmp_path / "x.json").mkdir()
    assert place(Path("x.json"), Path("a/default.json")) == Path("x.json/default.json")


@needs_triton
@pytest.mark.parametrize("budget", [100.0, 1000.0])
def test_checks_are_inside_the_budget_and_what_they_leave_out_is_named(monkeypatch, tmp_path, capsys, budget):
    """On a clock of its own: a check takes 10 s, and the tests marked for a GPU do not end."""
    now, given, deadlines = [0.0], [], []

    def run_all(todo, *, deadline):
        given.extend(todo)
        for check in todo:
            if now[0] + 10 > deadline:
                return
            now[0] += 10
            yield check, None

    def marked(folder, seconds):
        now[0] += seconds
        raise TimeoutError(f"not ended within {seconds:.0f} s")

    def section(bench):
        deadlines.append((now[0], bench.deadline))
        return iter(())

    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(checks, "run_all", run_all)
    monkeypatch.setattr(checks, "run_marked_tests", marked)
    monkeypatch.setattr(run, "SECTIONS", {"first": (1, section), "second": (3, section)})
    scale = replace(SMOKE, budget_s=budget)
    output = tmp_path / "record.json"
    assert run.measure_gpu(scale, output, quick=False, smoke=False, max_autotune=False) == 0
    record = files.read_json(output)["checks"]
    passed = int(0.7 * 0.25 * 0.95 * budget / 10)
    assert [str(check) for check in given[:passed]] == sorted(record["passed"], key=[str(c) for c in given].index)
    assert record["skipped"][:-1] == [str(check) for check in given[passed:]]
    assert record["skipped"][-1].startswith("tests marked for a GPU: not ended within ")
    assert record["seconds"] == pytest.approx(0.25 * 0.95 * budget)
    # what is timed is checked first, and float32 last
    assert [check.dtype for check in given] == sorted((check.dtype for check in given), key=DTYPES.index)
    spoken = capsys.readouterr().out
    assert f"  no time for: {given[passed]}" in spoken
    # a quarter of the rest for the first section, all of it for the last
    (start, first), (_, second) = deadlines
    assert first == pytest.approx(start + (0.95 * budget - start) / 4)
    assert second == pytest.approx(0.95 * budget)


class Constant(clocks.HostClock):
    """A clock of a GPU by its own account: the sixth time, which is that of a launch, is tiny, all others the same."""

    meaningful = True

    def __init__(self):
        super().__init__()
        self.times = iter([1e-3] * 5 + [1e-12])

    def measure(self, call, *, seconds=0.1, capture="required"):
        call()
        time = next(self.times, 1e-3)
        return clocks.Timing(time, time, time, 5, 2 * time, capture == "required")


@needs_triton
@pytest.mark.parametrize(
    ("sections", "status", "verdict"),
    [(("ceilings", "batches", "linear"), 1, "fails"), (("ceilings",), 0, "not measured here")],
)
def test_a_run_on_a_gpu_ends_with_its_bounds_and_the_status_that_they_give(
    monkeypatch, tmp_path, capsys, sections, status, verdict
):
    """Tiny batches, whose millisecond is far beyond what the ceilings of the same clock allow, and no batches."""
    monkeypatch.setattr(checks, "run_all", lambda todo, **_: iter([(check, None) for check in todo]))
    monkeypatch.setattr(checks, "run_marked_tests", lambda folder, seconds: None)
    monkeypatch.setattr(run, "clock", Constant)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(run, "SECTIONS", {name: run.SECTIONS[name] for name in sections})
    scale = replace(SMOKE, mix_requests=2)
    assert run.measure_gpu(scale, tmp_path, quick=True, smoke=False, max_autotune=False) == status
    record = files.read_json(tmp_path / "gpu_cpu.json")
    assert (record["timings"], record["complete"]) == ("device events", True)
    assert (record["checks"]["skipped"], set(record["sections"])) == ([], set(sections))
    assert record["sensors"].startswith("no nvidia-smi, and torch: ")
    assert set(record["sections"]["ceilings"]["sensors"]) == {"missing"}
    found = {bound["name"]: bound["verdict"] for bound in record["bounds"]}
    assert found["batches: time over the limit and launches"] == verdict
    assert found["all sections: limit of the card over the time"] == ("holds" if status else "not measured here")
    assert f"written to {(tmp_path / 'gpu_cpu.json').as_posix()} after" in capsys.readouterr().out


def test_a_budget_is_a_time(capsys):
    assert parse("--budget", "280").budget == 280
    for text in ("0", "-1", "nan", "inf", "soon"):
        with pytest.raises(SystemExit):
            parse("--budget", text)
        assert "expected seconds above 0" in capsys.readouterr().err


def test_a_record_is_judged_again_whole_or_not(tmp_path, capsys):
    record = record_of(session.PRESETS["quick"], CARD, {"batches": 1.5})
    write_record(tmp_path / "x.json", record)
    assert main(["bench", "--judge", str(tmp_path / "x.json")]) == 1
    said = capsys.readouterr().out
    assert "batches: time over the limit and launches: worst 1.50, at most 1.4, 0 of 8: fails" in said
    assert "prefill: time over the model: worst -, at most 1.4, 0 of 0: not measured here" in said
    record["complete"] = False
    del record["sections"]["batches"]
    write_record(tmp_path / "x.json", record)
    assert main(["bench", "--judge", str(tmp_path / "x.json")]) == 0
    assert "stopped early: killed; sections: ceilings" in capsys.readouterr().out
    write_record(tmp_path / "x.json", {"rows": []})
    assert main(["bench", "--judge", str(tmp_path / "x.json")]) == 2
    assert "--judge: expected the record of a GPU run" in capsys.readouterr().err


def test_a_record_is_json_in_lines_with_every_digit(tmp_path):
    rows = [{"a": 1.23456789, "plans": {"naive": {"n": 2**40}}}, {"a": None}]
    written = {"provenance": {"x": "y"}, "sections": {"one": {"rows": rows, "skipped": []}}, "scale": asdict(SMOKE)}
    write_record(tmp_path / "new" / "x.json", written)
    text = (tmp_path / "new" / "x.json").read_text()
    assert '     "a": 1.23456789,' in text.splitlines()
    found = files.read_json(tmp_path / "new" / "x.json")
    assert found["sections"] == written["sections"]
    assert (found["scale"]["budget_s"], found["scale"]["lengths"]) == (None, [16, 32])


def test_a_peer_that_fails_is_noted_and_passed_over():
    def make():
        raise ImportError("no such kernel\nsecond line")

    bench = session.Session(clocks.HostClock(), SMOKE)
    assert comparison._peer_row(bench, "theirs", make, None) == {
        "kernel": "theirs",
        "missing": "ImportError: no such kernel",
    }


def test_a_peer_with_another_answer_is_marked():
    from cascade_lab import State
    from cascade_lab.bench.peers import Peer

    o = torch.randn(3, 2, 4)
    bench = session.Session(clocks.HostClock(), SMOKE)
    rows = [
        comparison._peer_row(bench, "x", lambda factor=factor: Peer("x", lambda: o * factor), State(o, o[..., 0]))
        for factor in (1.0, 1.2)
    ]
    assert [row["agrees"] for row in rows] == [True, False]


class FakeEvent:
    """An event that reads a counter of fake milliseconds."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = FakeEvent.now

    def elapsed_time(self, end):
        return end.at - self.at


class FakeGraph:
    """A graph that repeats the call it was captured around."""

    capturing = None

    def __init__(self):
        self.call = None

    def replay(self):
        FakeEvent.now += 2.0


class FakeContext:
    def __init__(self, *arguments, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


@pytest.fixture
def fake_cuda(monkeypatch):
    """The entry points of torch.cuda that the clock uses, faked on the CPU; a name that torch lacks fails the test."""
    assert "capture_error_mode" in inspect.signature(torch.cuda.graph.__init__).parameters

    class Stream:
        def __init__(self, *arguments):
            pass

        def wait_stream(self, other):
            assert isinstance(other, Stream)

    class Properties:
        name, multi_processor_count, L2_cache_size = "Fake GPU", 7, 1 << 10

    fakes = {
        "get_device_properties": lambda device: Properties,
        "synchronize": lambda device: None,
        "mem_get_info": lambda device: (5, 10),
        "empty_cache": lambda: None,
        "Stream": Stream,
        "current_stream": lambda device: Stream(),
        "stream": FakeContext,
        "CUDAGraph": FakeGraph,
        "graph": FakeContext,
        "Event": FakeEvent,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(clocks, "_FLUSH_BYTES", 1 << 12)
    monkeypatch.setattr(FakeEvent, "now", 0.0)
    return fakes


def test_the_gpu_clock_replays_a_graph_between_events(fake_cuda):
    clock = clocks.GpuClock()
    assert (clock.name, clock.num_sms, clock.l2_bytes, clock.free_bytes()) == ("Fake GPU", 7, 1024, 5)
    calls = []
    timing = clock.measure(lambda: calls.append(1), seconds=0.02)
    assert (timing.seconds, timing.low, timing.high) == (2e-3, 2e-3, 2e-3)
    assert (timing.repeats, timing.graph) == (10, True)
    # three to warm up, one on the side stream, one captured, five waited for
    assert len(calls) == 10


def test_the_gpu_clock_times_without_a_graph_only_where_that_is_allowed(fake_cuda, monkeypatch):
    class Refused(FakeContext):
        def __enter__(self):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", Refused)
    clock = clocks.GpuClock()

    def call():
        FakeEvent.now += 3.0

    assert clock.measure(call, capture="tried").graph is False
    assert clock.measure(call, capture="off").seconds == pytest.approx(3e-3)
    with pytest.raises(RuntimeError, match="capturing"):
        clock.measure(call)


def verified(length, ratio, topk=4, rows="branch"):
    """A point of section verify whose cascade and fused plan take twice the card's limit."""
    seconds = 2 * (length + 4 * topk) * 4096 / 4e12
    plan = {"seconds": seconds, "ratio_measured": ratio, "ratio_predicted": 4.0, "share_of_copy": 0.5}
    return {
        "length": length, "topk": topk, "batch": 1, "group": 4, "rows": rows, "steps": 4,
        "plans": {"naive": plan | {"ratio_measured": 1.0, "seconds": seconds * ratio}, "cascade": plan, "fused": plan},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({1024: 0.5, 2048: 2.0, 4096: 3.0}, 1024 * 2**0.5),
        ({1024: 1.5, 2048: 2.0}, 0),
        ({1024: 0.5, 2048: 1.0}, None),
        ({1024: 2.0, 2048: 0.5, 4096: 2.0}, 2048 * 2**0.5),
    ],
)
def test_break_even_lies_between_the_last_loss_and_the_first_win(ratios, expected):
    (found,) = report.break_even_lengths([verified(length, ratio) for length, ratio in ratios.items()])
    assert found["length"] == (expected if expected is None else pytest.approx(expected))


def gpu_record(flex_seconds=3e-5, ratio=4.1):
    timing = {"seconds": 2e-5, "call_seconds": 9e-5}
    where = {"length": 16384, "topk": 4, "batch": 1, "group": 4, "rows": "branch"}
    prefills = [
        {"new": 8192 - hit, "hit": hit, "group": 4, "seconds": 1e-3 * (1 - (hit / 8192) ** 2), "share_of_matmul": 0.6,
         "remaining": 1 - (hit / 8192) ** 2, "tile_remaining": 1 - (hit / 8192) ** 2}
        for hit in (0, 2048, 4096)
    ]  # fmt: skip
    record = {
        "provenance": {"device": "cuda (x)", "date": "2026-01-01", "L2 bytes": "1000", "multiprocessors": "132"},
        "timings": "device events",
        "scale": {
            "centre": [16384, 4, 1, 4, "branch"], "prompts": [8192], "new_tokens": [4096, 8192], "hits": [0, 4096],
            "merge_heads": 32, "num_kv_heads": 8, "head_dim": 128, "steps": 4,
        },
        "sections": {
            "ceilings": {
                "rows": [
                    {"what": "copy memory", "bytes_per_s": 4e12, "seconds": 1e-3},
                    {"what": "copy L2", "bytes_per_s": 8e12, "seconds": 1e-5},
                    {"what": "matmul 8192", "flops_per_s": 7e14, "seconds": 1e-3},
                    {"what": "one-element addition", "seconds": 2e-6},
                ]
            },
            "verify": {"rows": [verified(1024, 0.8), verified(16384, ratio)]},
            "peers": {
                "rows": [
                    where | {"kernel": "cascade_lab fused"} | timing,
                    where | {"kernel": "FlexAttention, default", "agrees": True} | timing | {"seconds": flex_seconds},
                    where | {"kernel": "flashinfer_tree", "missing": "ModuleNotFoundError"},
                ]
            },
            "prefill": {"rows": prefills},
            "linear": {"rows": [{"rows": m, "width": 8, "out_width": 8, "seconds": m * 1e-6} for m in (1, 8)]},
            "costs": {"rows": [{"what": "merge_states", "parts": 2, "rows": 4, "seconds": 1e-6}]},
            "counters": {"rows": [{"missing": "ncu (Nsight Compute) is not installed"}]},
        },
    }  # fmt: skip
    record["break_even"] = {plan: report.break_even_rows(record, plan) for plan in ("cascade", "fused")}
    return record


def test_pictures_of_a_record_carry_its_numbers_and_its_device():
    record = gpu_record()
    drawn = dict(gpu_pictures.draw(record))
    assert set(drawn) == {
        "verify_bandwidth", "verify_ratio", "break_even", "peers", "prefill_law", "prefill_rate", "linear", "merges",
    }  # fmt: skip
    for fig in drawn.values():
        assert "cuda (x), 2026-01-01" in fig.axes[0].get_title(loc="left") + fig.axes[0].get_title()
    assert gpu_pictures.verify_ratio(record)[1] == {4: {1024: (0.8, 4.0), 16384: (4.1, 4.0)}}
    assert gpu_pictures.verify_bandwidth(record)[1]["fused"] == {1024: 0.5, 16384: 0.5}
    assert gpu_pictures.prefill_law(record)[1][8192][0.5] == pytest.approx((0.75, 0.75, 0.75))
    assert gpu_pictures.peers(record)[1] == {
        "L = 16384, batch 1, rows by branch": {"cascade_lab fused": 2e-5, "FlexAttention, default": 3e-5}
    }
    measured, predicted = gpu_pictures.break_even_prefixes(record)[1][4, 1, 4]
    assert 1024 < measured < 16384
    assert predicted is not None


def test_a_run_that_was_stopped_is_drawn_as_far_as_it_came(tmp_path):
    record = gpu_record() | {"complete": False}
    del record["break_even"]
    for name in ("peers", "linear", "costs", "counters"):
        del record["sections"][name]
    write_record(tmp_path / "x.json", record)
    assert main(["bench", "--plot", str(tmp_path / "x.json"), "--output", str(tmp_path / "pictures")]) == 0
    drawn = {path.stem for path in (tmp_path / "pictures").iterdir()}
    assert drawn == {"gpu_verify_bandwidth", "gpu_verify_ratio", "gpu_prefill_law", "gpu_prefill_rate"}


@pytest.mark.parametrize(
    "content", [None, "not json", '{"rows": []}', '{"sections": {}}', "[1]", '{"sections": ["ceilings"]}']
)
def test_a_file_that_is_no_gpu_record_is_a_wrong_use(tmp_path, capsys, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert main(["bench", "--plot", str(path), "--output", str(tmp_path / "pictures")]) == 2
    assert "--plot: expected the record of a GPU run" in capsys.readouterr().err
    assert not (tmp_path / "pictures").exists()
