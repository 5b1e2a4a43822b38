"""Timed ratios: calls take turns, the first is the unit, one thread works, and the spread is of the rounds."""

import pytest
import torch

from cascade_lab.evidence import timing
from cascade_lab.evidence.timing import Ratio, ratios


class Clock:
    """A clock that only the calls move."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def call(self, name, seconds):
        durations = iter(seconds)

        def run():
            self.log.append((name, torch.get_num_threads()))
            self.now += next(durations)

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "_clock", lambda: lambda: clock.now)
    return clock


def test_ratio_is_taken_within_each_round_so_that_a_slow_round_cancels(clock):
    # the first run of each is untimed; the third round is ten times slower for both
    unit = clock.call("unit", [9.0, 2.0, 2.0, 20.0])
    half = clock.call("half", [9.0, 1.0, 1.0, 10.0])
    assert ratios({"unit": unit, "half": half}, rounds=3) == {"unit": Ratio(1, 1, 1), "half": Ratio(0.5, 0.5, 0.5)}


def test_median_and_quartiles_over_rounds(clock):
    calls = {0: clock.call(0, [1.0] * 6), 1: clock.call(1, [1.0, 0.5, 0.1, 0.3, 0.2, 0.4])}
    found = ratios(calls, rounds=5)[1]
    assert (found.low, found.median, found.high) == pytest.approx((0.2, 0.3, 0.4))


def test_calls_take_turns_on_one_thread_and_the_thread_count_comes_back(clock):
    before = torch.get_num_threads()
    ratios({"a": clock.call("a", [1.0] * 3), "b": clock.call("b", [1.0] * 3)}, rounds=2)
    assert clock.log == [("a", 1), ("b", 1)] * 3
    assert torch.get_num_threads() == before


def test_the_real_clock_tells_a_quarter_of_the_work_from_the_whole():
    x = torch.ones(1024, 1024)
    found = ratios({1: lambda: x @ x, 4: lambda: x[:256] @ x}, rounds=7)[4]
    assert 0.15 < found.median < 0.4


@pytest.mark.parametrize(("calls", "rounds", "named"), [({}, 3, "calls"), ({1: int}, 1, "rounds")])
def test_nothing_to_time_is_refused(calls, rounds, named):
    with pytest.raises(ValueError, match=named):
        ratios(calls, rounds)
