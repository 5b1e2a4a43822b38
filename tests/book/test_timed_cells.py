"""Cells that a clock times run kernels of ours where there is a GPU, and compiled code of torch where there is none."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cascade_lab import runtime
from cascade_lab.book.execution import load
from cascade_lab.evidence import timing
from cascade_lab.evidence.claims import AtLeast, gather

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
TIMED = {
    "02_cascade_read_volume": ("clock", {"clock_mebibytes": 1, "clock_branches": 4, "clock_rounds": 2}),
    "03_prefix_hit_area": ("time", {"timed_tokens": 640}),
}


def run_timed_cell(name, device, monkeypatch):
    """Run one cell for `device`, with calls of attention and clocks that only note what they are given."""
    calls, clocks, claims = [], [], []

    def call(*tensors, backend, **options):
        flat = [x for x in (*tensors, *options.values()) if isinstance(x, torch.Tensor)]
        calls.append((backend, {x.device.type for x in flat}, flat[1]))

    def ratios(timed, rounds, *, spread, device):
        clocks.append(device.type)
        for each in timed.values():
            each()
        return dict.fromkeys(timed, timing.Ratio(2.5, 2.4, 2.6))

    def levels(prompts, hits, page_size, *, split, device):
        return [device.type]

    cell, parameters = TIMED[name]
    monkeypatch.setattr(runtime, "device", lambda: torch.device(device))
    monkeypatch.setattr(timing, "ratios", ratios)
    names = {
        "cl": SimpleNamespace(attention=call, cascade_attention=call, prefix_hit_levels=levels),
        "timed": lambda id, text, **numbers: claims.append(numbers),
        "g": torch.Generator().manual_seed(0),
    }
    names |= {"torch": torch, "timing": timing, "partial": partial, "AtLeast": AtLeast} | parameters
    (source,) = (each.source for each in load(NOTEBOOKS / f"{name}.ipynb").cells if each.id == cell)
    exec(compile(source, f"{name}.{cell}", "exec"), names)
    return calls, clocks, claims


@pytest.mark.parametrize("name", TIMED)
def test_on_a_gpu_the_clock_times_kernels_of_this_project(name, monkeypatch):
    """F22 of tests/known_faults.md; meta tensors stand for those of a GPU."""
    here, clocks_here, claims_here = run_timed_cell(name, "cpu", monkeypatch)
    there, clocks_there, claims_there = run_timed_cell(name, "meta", monkeypatch)
    assert {(backend, *devices) for backend, devices, _ in here} == {("torch", "cpu")}
    assert {(backend, *devices) for backend, devices, _ in there} == {("triton", "meta")}
    assert len(here) == len(there) >= 2
    assert (set(clocks_here), set(clocks_there)) == ({"cpu"}, {"meta"})
    # a call has to take longer there than its launch
    for (_, _, k_here), (_, _, k_there) in zip(here, there, strict=True):
        assert (k_here.dtype, k_there.dtype) == (torch.float32, torch.float16)
        assert k_there.numel() >= 8 * k_here.numel()
    # four branches: three tenths of the way to 4, or to 4/3 where the L2 may serve the repeated reads
    bounds = [found["expected"].bound for found in (*claims_here, *claims_there)]
    assert bounds == (pytest.approx([1.9, 1.1]) if name.startswith("02") else [])


@pytest.mark.parametrize(("name", "id"), [("02_cascade_read_volume", "2.44-gpu"), ("03_prefix_hit_area", "3.44-gpu")])
def test_runs_of_our_kernels_on_gpus_are_claimed_or_said_to_be_missing(name, id):
    """F22 of tests/known_faults.md."""
    notebook = load(NOTEBOOKS / f"{name}.ipynb")
    (found,) = (each for each in gather(notebook) if each.id == id)
    recorded = list((NOTEBOOKS.parent / "figures" / "measured").glob("gpu_*.json"))
    assert (found.instrument, found.verdict) == ("recorded", "holds" if recorded else "not measured here")
    lines = [
        output.get("data", {}).get("text/plain", "") for each in notebook.cells for output in each.get("outputs", ())
    ]
    (line,) = (each for each in lines if each.startswith(f"{id} "))
    assert ("Reason: figures/measured holds no run of cascade-lab bench on a GPU." in line) is not bool(recorded)


def test_the_worked_batch_of_the_traces_runs_through_the_kernel():
    """F22 of tests/known_faults.md: all pairs of a prompt of n tokens but those of its hit."""
    found = {each.id: each for each in gather(load(NOTEBOOKS / "05_hit_ratio_on_traces.ipynb"))}
    pairs = tuple(1000 * 1001 // 2 + 100 * 101 // 2 - hit * (hit + 1) // 2 for hit in (90, 900))
    assert (found["5.3-pairs"].instrument, found["5.3-pairs"].measured) == ("counted", str(pairs))
    assert found["5.3-loads"].measured == str((3584 + 1000 + 100, 1000 + 100))
