"""A figure has the same bytes on every supported Python."""

import builtins
import math
from types import SimpleNamespace

import pytest
import torch

from cascade_lab.pictures import cascade, traces
from cascade_lab.pictures.style import save


def compensated(values, start=0):
    """`sum` as Python 3.12 and later have it: floats without the rounding of every step."""
    values = list(values)
    floats = any(isinstance(x, float) for x in values)
    return math.fsum([start, *values]) if floats else builtins.sum(values, start)


def stepwise(values, start=0):
    """`sum` as Python 3.11 has it."""
    for value in values:
        start = start + value
    return start


def programs():
    """Three plans of 1, 8 and 1 programs, whose heights add up to 3.41 or to less, as they are added."""
    plans = {}
    for count in (1, 8, 1):
        found = {Program(i): torch.arange(i, 2 * i + 2) for i in range(count)}
        plans[f"plan {len(plans)}"] = SimpleNamespace(rows_by_program=lambda found=found: found)
    fig, _ = cascade.program_reads(plans, [3, 4, 7])
    return fig, tuple(fig.get_size_inches())


class Program:
    """One program of one launch."""

    def __init__(self, i):
        self.launch, self.index = 0, (i,)


def chords():
    return traces.chords({"a": [(11, 1), (13, 1), (9, 1), (10, 2)], "b": [(3, 1), (7, 2)]})


@pytest.mark.parametrize(("module", "draw"), [(cascade, programs), (traces, chords)])
def test_a_figure_does_not_depend_on_how_python_adds_floats(module, draw, tmp_path, monkeypatch):
    """F25 of tests/known_faults.md."""
    drawn = {}
    for added in (compensated, stepwise):
        monkeypatch.setattr(module, "sum", added, raising=False)
        path = tmp_path / f"{added.__name__}.svg"
        fig, numbers = draw()
        save(fig, path)
        drawn[added] = path.read_bytes(), numbers
    assert drawn[compensated] == drawn[stepwise]
    assert compensated([0.1] * 10) != stepwise([0.1] * 10)
