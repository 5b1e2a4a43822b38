"""Times of calls that take turns, and their ratios: r_i = t_i / t_0 within one round, then the median over rounds.

A machine that slows down slows all calls of a round alike, so it leaves their ratio. `take_turns` is the loop, with any
clock; `ratios` takes the CPU time of one thread, which stops while another program has the core, or on a GPU the time
until the device has finished. `place` says where kernels are to be timed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from cascade_lab import runtime

Key = TypeVar("Key", bound=Hashable)
COARSEST_S = 1e-3


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of a ratio over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Place:
    """Where a clock times attention.

    Attributes:
        device: of the tensors.
        backend: the kernels of this project on a GPU, and torch on a CPU, where they would be interpreted.
        dtype: float16 on a GPU, whose kernels are made for it, and float32 on a CPU.
        scale: what to multiply a size by that is large enough for a CPU: 1 there, more on a GPU, where a call has to
            take longer than its launch.
    """

    device: torch.device
    backend: str
    dtype: torch.dtype
    scale: int


def place(gpu_scale: int = 1) -> Place:
    """Where a clock times attention in this process, by `runtime.device`; `gpu_scale` is the scale on a GPU."""
    device = runtime.device()
    if device.type == "cpu":
        return Place(device, "torch", torch.float32, 1)
    return Place(device, "triton", torch.float16, gpu_scale)


@dataclass(frozen=True)
class Turns(Generic[Key]):
    """Times of calls, round by round.

    Attributes:
        seconds: per call its time in each round that counts.
        disturbed: rounds that do not count.
    """

    seconds: Mapping[Key, list[float]]
    disturbed: int

    def over(self, key: Key, unit: Key) -> list[float]:
        """The time of one call over that of another, round by round."""
        return [taken / one for taken, one in zip(self.seconds[key], self.seconds[unit], strict=True)]


def take_turns(
    calls: Mapping[Key, Callable[[], object]],
    rounds: int,
    *,
    clock: Callable[[], float],
    before: Callable[[], object] | None = None,
    disturbances: Callable[[], int] | None = None,
) -> Turns[Key]:
    """Time each call once a round.

    Args:
        calls: what to run, in this order; nothing is run to warm up.
        rounds: that count.
        clock: its difference across a call is the call's time.
        before: run ahead of each call, untimed.
        disturbances: a count, and a round in which it changes does not count; after 3 x rounds of these no more are
            tried, so that fewer may be returned.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    counted = disturbed = 0
    while counted < rounds and disturbed < 3 * rounds:
        seen = disturbances() if disturbances else 0
        taken = {}
        for key, call in calls.items():
            if before is not None:
                before()
            start = clock()
            call()
            taken[key] = clock() - start
        if disturbances and disturbances() != seen:
            disturbed += 1
            continue
        counted += 1
        for key, time_of_call in taken.items():
            seconds[key].append(time_of_call)
    return Turns(seconds, disturbed)


def ratios(
    calls: Mapping[Key, Callable[[], object]],
    rounds: int = 9,
    *,
    spread: float = math.inf,
    tries: int = 4,
    device: torch.device | str = "cpu",
) -> dict[Key, Ratio]:
    """Time of each call over that of the first one, on one CPU thread or on a GPU.

    Args:
        calls: what to run, on `device` alone; the first entry is the unit.
        rounds: how often each is timed, after one untimed run of all; at least 2.
        spread: what the quartiles of every ratio should be within. Another program may take the caches for a while, so
            a measurement that is wider is made again, `tries` times at most, and the narrowest counts.
        device: where the calls compute. On a GPU a time runs until the device has finished.

    Returns:
        A Ratio per key; the first is 1.

    Raises:
        ValueError: no calls, or fewer than 2 rounds.
    """
    if not calls:
        raise ValueError("calls: expected at least one, given none")
    if rounds < 2:
        raise ValueError(f"rounds: expected at least 2, given {rounds}")
    with _one_thread():
        for call in calls.values():
            call()
        unit, found = next(iter(calls)), []
        while len(found) < tries and (not found or _width(found[-1]) > spread):
            turns = take_turns(calls, rounds, clock=_clock(torch.device(device)))
            found.append({key: _ratio(turns.over(key, unit)) for key in calls})
    return min(found, key=_width)


def _width(found: Mapping[Key, Ratio]) -> float:
    return max(ratio.high - ratio.low for ratio in found.values())


def _ratio(values: list[float]) -> Ratio:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Ratio(median, low, high)


def _clock(device: torch.device) -> Callable[[], float]:
    if device.type == "cuda":
        return lambda: (torch.cuda.synchronize(device), time.perf_counter())[1]
    # some systems advance the CPU time of a thread only with the scheduler's tick
    fine = hasattr(time, "thread_time") and time.get_clock_info("thread_time").resolution <= COARSEST_S
    return time.thread_time if fine else time.perf_counter


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
