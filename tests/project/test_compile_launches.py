"""The long command over launches: it records under a hook, compiles in parts, and claims no more than what was done."""

import json
import os
import subprocess
import sys

import pytest

from cascade_lab import runtime
from cascade_lab.evidence.launches import gathered
from tools import compile_launches as tool

pytestmark = pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")

MERGES = """
import torch
import cascade_lab

for heads in (2, 2, 3):
    o, lse = torch.zeros(5, 3, heads, 8), torch.zeros(5, 3, heads)
    cascade_lab.merge_states(o, lse, backend="triton")
"""


def test_a_program_under_the_hook_records_its_calls_once(tmp_path):
    hook, calls = tmp_path / "hook", tmp_path / "calls"
    hook.mkdir()
    calls.mkdir()
    environment = os.environ | tool.watching(hook, calls)
    subprocess.run([sys.executable, "-c", MERGES], env=environment, cwd=tmp_path, check=True)
    found = gathered(calls)
    assert [(call["function"], call["os"][1]) for call in found] == [
        ("merge_many", [5, 3, 2, 8]),
        ("merge_many", [5, 3, 3, 8]),
    ]


def test_a_notebook_that_fails_leaves_no_record_that_lacks_its_calls(tmp_path):
    with pytest.raises(RuntimeError, match='04_other_regions {"hit_ratio": 2.0} failed'):
        tool.record_calls({"04_other_regions": [{"hit_ratio": 2.0}]}, (), tmp_path)
    assert list(tmp_path.glob("*whole")) == []


def test_a_recording_that_was_broken_off_goes_on_behind_its_last_step(tmp_path, monkeypatch):
    """One of two sets fails the first time; the second recording takes that set alone, and has the calls of both."""
    ran, failing = [], [True]

    def run(names, parameters, *, environment, **options):
        ran.append(parameters["seed"])
        if parameters["seed"] == 2 and failing:
            failing.clear()
            return 1
        (tmp_path / f"{parameters['seed']}.jsonl").write_text(json.dumps({"seed": parameters["seed"]}) + "\n")
        return 0

    monkeypatch.setattr(tool.runner, "run", run)
    sets = {"01_lse_splitting": [{"seed": 1}, {"seed": 2}]}
    with pytest.raises(RuntimeError, match='{"seed": 2} failed'):
        tool.record_calls(sets, (), tmp_path)
    assert tool.record_calls(sets, (), tmp_path) == [{"seed": 1}, {"seed": 2}]
    assert ran == [1, 2, 2]


def test_the_tests_that_are_recorded_launch_kernels():
    assert {"tests/core/test_attention.py", "tests/core/test_states.py"} < set(tool.KERNEL_TESTS)
    assert "tests/core/test_traces.py" not in tool.KERNEL_TESTS


def merge(dtype, dim):
    return {
        "function": "merge_many",
        "os": [dtype, [5, 3, 2, dim], [6 * dim, 2 * dim, dim, 1], 0],
        "lses": ["float32", [5, 3, 2], [6, 2, 1], 0],
        "o": [dtype, [5, 2, dim], [2 * dim, dim, 1], 0],
        "lse": ["float32", [5, 2], [2, 1], 0],
    }


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "WORK", tmp_path / "kept")
    monkeypatch.setattr(tool, "PIECES", 1)
    calls, output = tmp_path / "calls.jsonl", tmp_path / "launches.json"

    def run(made, *options):
        tool._write_lines(calls, made)
        status = tool.main(["--calls", str(calls), "--output", str(output), *options])
        return status, json.loads(output.read_text())

    return run


def test_slices_of_one_target_add_up_and_say_which_they_are(command, capsys):
    """Three calls, two kernels: one in each slice, and nothing is said of the target that was not asked for."""
    calls = [merge("bfloat16", 8), merge("bfloat16", 8), merge("float32", 16)]
    options = ("--targets", "sm_80", "--slice")
    status, record = command(calls, *options, "1/2")
    (row,) = record["targets"]
    assert (status, record["devices"], record["calls"]) == (0, ["sm_80"], 3)
    assert (row["slices"], row["of"], row["kernels"]) == ([1], 2, 1)
    assert row["spilling"] == {"bfloat16": {"kernels": 1, "spilling": 0, "bytes": 0}}
    assert "sm_80   slices [1] of 2: 1 kernels, 1024 of 166912 bytes shared memory" in capsys.readouterr().out
    status, record = command(calls, *options, "2/2")
    (row,) = record["targets"]
    assert (status, row["slices"], row["kernels"], row["faults"]) == (0, [1, 2], 2, [])
    assert set(row["spilling"]) == {"bfloat16", "float32"}
    assert "sm_80   whole: 2 kernels" in capsys.readouterr().out
    assert all(record[key] for key in ("source", "devices", "date"))


def test_a_kernel_that_does_not_fit_ends_with_1_and_is_named(command, monkeypatch, capsys):
    """Kept parts count as compiled: here one whose kernel needs more than a T4 has."""
    kernel = {"hash": "a", "kernel": "attention_kernel", "dtype": "bfloat16", "local": 0, "constants": {"D": 256}}
    made = {"compiled_slice": [kernel | {"shared": 70000}], "refused": {"no such dtype": 2}}
    monkeypatch.setattr(tool, "in_child", lambda expression, **_: made[expression.split("(")[0]])
    status, record = command([merge("bfloat16", 8)], "--targets", "sm_75")
    fault = "attention_kernel bfloat16 (D=256): 70000 bytes of 65536 shared memory"
    assert (status, record["targets"][0]["faults"]) == (1, [fault])
    assert record["targets"][0]["refused calls"] == {"no such dtype": 2}
    assert fault in capsys.readouterr().out


@pytest.mark.parametrize("options", [("--slice", "0/2"), ("--slice", "3/2"), ("--slice", "2"), ("--targets", "sm_81")])
def test_a_part_that_there_is_not_is_refused(options, capsys):
    with pytest.raises(SystemExit) as stopped:
        tool.main(options)
    assert stopped.value.code == 2
    assert "expected" in capsys.readouterr().err
