"""The benchmark's arithmetic and bookkeeping. Nothing here asserts a time."""

from __future__ import annotations

import argparse
import json
import time

import pytest
import torch

from cascade_lab.evidence import bench
from cascade_lab.evidence.bench import Row


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
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
    assert bench.report(sections(1.4), output, {"quick": True}) == 0
    assert bench.report(sections(1.6), output, {"quick": True}) == 1
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
        bench.report(sections, output, {})
    assert [row["name"] for row in json.loads(output.read_text())["rows"]] == ["kept"]


def test_the_ratio_is_ours_over_theirs_and_disturbed_rounds_do_not_count(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    # Ours takes 3 units and theirs 2, except in rounds that are disturbed, where ours takes 300.
    calls = {"ours": 0}
    preemptions = [0]
    monkeypatch.setattr(bench, "_preemptions", lambda: preemptions[0])

    def ours():
        calls["ours"] += 1
        disturbed = calls["ours"] > 2 and calls["ours"] % 3 == 0
        preemptions[0] += disturbed
        clock[0] += 300 if disturbed else 3

    def theirs():
        clock[0] += 2

    row = bench.compare("work", ours, theirs, 6, 1.5)
    assert (row.value, row.low, row.high, row.verdict) == (1.5, 1.5, 1.5, "holds")
    assert "3 of 9 rounds disturbed" in row.note


def test_a_busy_machine_has_measured_nothing(monkeypatch):
    count = iter(range(10**6))
    monkeypatch.setattr(bench, "_preemptions", lambda: next(count))
    row = bench.compare("work", lambda: None, lambda: None, 6, 1.5)
    assert row.verdict == "not measured here"
    assert "busy" in row.note


@pytest.mark.parametrize(
    "work",
    [
        bench.Work(48, 48, causal=True),
        bench.Work(5, 64, kv_heads=2),
        bench.Work(32, 96, causal=False, page_size=16),
    ],
    ids=str,
)
def test_both_sides_of_a_comparison_compute_the_same_thing(work):
    ours, theirs = bench._calls(work)
    torch.testing.assert_close(ours().o, theirs()[0].transpose(0, 1), rtol=0, atol=2e-6)


def test_without_cpu_the_gpu_is_asked_for_and_the_option_is_named(capsys, tmp_path):
    assert bench.run(parse("--output", str(tmp_path / "x.json"))) == 1
    assert "--cpu" in capsys.readouterr().out
    assert not (tmp_path / "x.json").exists()


def test_the_notebook_is_not_measured_where_its_tools_or_the_file_are_missing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (row,) = bench.notebook_time()
    assert row.verdict == "not measured here"
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    (row,) = bench.notebook_time()
    assert row.verdict == "not measured here"
    assert "papermill" in row.note


def test_extra_memory_counts_the_call_and_not_its_inputs(capsys):
    bench.print_extra_memory(bench.Work(8, 512))
    assert 0 <= float(capsys.readouterr().out) < 200
