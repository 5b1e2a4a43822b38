"""Timed ratios: calls take turns, the first is the unit, one thread works, and the spread is of the rounds."""

import pytest
import torch

from cascade_lab.evidence import timing
from cascade_lab.evidence.timing import Ratio, ratios, take_turns


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
    monkeypatch.setattr(timing, "_clock", lambda device: lambda: clock.now)
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


def test_each_round_times_each_call_in_order_with_what_runs_before_it_untimed():
    clock = Clock()
    calls = {name: clock.call(name, seconds) for name, seconds in {"a": [1.0, 2.0], "b": [3.0, 5.0]}.items()}
    turns = take_turns(calls, 2, clock=lambda: clock.now, before=clock.call("before", [7.0] * 4))
    assert turns.seconds == {"a": [1.0, 2.0], "b": [3.0, 5.0]}
    assert turns.disturbed == 0
    assert turns.over("b", "a") == [3.0, 2.5]
    assert [name for name, _ in clock.log] == ["before", "a", "before", "b"] * 2


def test_disturbed_rounds_do_not_count_and_too_many_end_it():
    clock, seen = Clock(), [0]

    def disturbed(durations):
        run = clock.call("a", durations)

        def call():
            before = clock.now
            run()
            seen[0] += clock.now - before > 50

        return {"a": call}

    turns = take_turns(disturbed([1.0, 99.0, 2.0, 99.0, 3.0]), 3, clock=lambda: clock.now, disturbances=lambda: seen[0])
    assert (turns.seconds, turns.disturbed) == ({"a": [1.0, 2.0, 3.0]}, 2)
    turns = take_turns(disturbed([4.0] + [99.0] * 6), 2, clock=lambda: clock.now, disturbances=lambda: seen[0])
    assert (turns.seconds, turns.disturbed) == ({"a": [4.0]}, 6)


def test_the_real_clock_tells_a_quarter_of_the_work_from_the_whole():
    x = torch.ones(1024, 1024)
    found = ratios({1: lambda: x @ x, 4: lambda: x[:256] @ x}, rounds=7)[4]
    # far from both 0 and 1, whatever else the machine does
    assert 0.05 < found.median < 0.7


@pytest.mark.parametrize(("calls", "rounds", "named"), [({}, 3, "calls"), ({1: int}, 1, "rounds")])
def test_nothing_to_time_is_refused(calls, rounds, named):
    with pytest.raises(ValueError, match=named):
        ratios(calls, rounds)


def test_a_measurement_that_is_too_wide_is_made_again_and_the_narrowest_counts(clock):
    def made(times, **options):
        units = clock.call("unit", [1.0] * len(times))
        return ratios({"unit": units, "other": clock.call("other", times)}, rounds=2, **options)["other"]

    wide, narrow, wider = [1.0, 3.0], [2.0, 2.2], [1.0, 9.0]
    assert made([1.0, *wide]).median == 2.0  # as it comes
    assert made([1.0, *wide, *narrow], spread=0.2).median == pytest.approx(2.1)
    assert made([1.0, *wide, *wider, *narrow], spread=0.01, tries=3).median == pytest.approx(2.1)
    assert made([1.0, *wide, *wider], spread=0.01, tries=2).median == 2.0


def test_kernels_are_timed_on_a_gpu_where_there_is_one_and_torch_elsewhere(monkeypatch):
    monkeypatch.setattr(timing.runtime, "device", lambda: torch.device("cuda", 1))
    assert timing.place(8) == timing.Place(torch.device("cuda", 1), "triton", torch.float16, 8)
    monkeypatch.setattr(timing.runtime, "device", lambda: torch.device("cpu"))
    assert timing.place(8) == timing.Place(torch.device("cpu"), "torch", torch.float32, 1)


def test_a_time_on_a_gpu_runs_until_the_device_has_finished(monkeypatch):
    """Calls only queue work: a quarter of it takes a quarter of the time, which passes while the clock waits."""
    now, queued, waits = [0.0], [], []

    def wait(device):
        waits.append(device)
        now[0] += sum(queued)
        queued.clear()

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    calls = {1: lambda: queued.append(8.0), 4: lambda: queued.append(2.0)}
    found = ratios(calls, rounds=3, device="cuda:1")
    assert (found[1].median, found[4].median) == (1, 0.25)
    assert set(waits) == {torch.device("cuda", 1)}
