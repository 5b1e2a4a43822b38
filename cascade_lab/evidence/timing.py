"""Ratios of times, for laws that say how work shrinks: r_i = t_i / t_0 within one round, then the median over rounds.

The calls of a round take turns, so a machine that slows down slows numerator and denominator alike. The clock is the
CPU time of one thread, which stops while another program has the core; `bench` measures wall time on all cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
COARSEST_S = 1e-3


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of a ratio over the rounds."""

    median: float
    low: float
    high: float


def ratios(calls: Mapping[Key, Callable[[], object]], rounds: int = 9) -> dict[Key, Ratio]:
    """Time of each call over that of the first one, on one CPU thread.

    Args:
        calls: what to run, CPU work only; the first entry is the unit.
        rounds: how often each is timed, after one untimed run of all; at least 2.

    Returns:
        A Ratio per key; the first is 1.

    Raises:
        ValueError: no calls, or fewer than 2 rounds.
    """
    if not calls:
        raise ValueError("calls: expected at least one, given none")
    if rounds < 2:
        raise ValueError(f"rounds: expected at least 2, given {rounds}")
    clock = _clock()
    found: dict[Key, list[float]] = {key: [] for key in calls}
    with _one_thread():
        for call in calls.values():
            call()
        for _ in range(rounds):
            seconds = {}
            for key, call in calls.items():
                start = clock()
                call()
                seconds[key] = clock() - start
            unit = next(iter(seconds.values()))
            for key, taken in seconds.items():
                found[key].append(taken / unit)
    return {key: _ratio(values) for key, values in found.items()}


def _ratio(values: list[float]) -> Ratio:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Ratio(median, low, high)


def _clock() -> Callable[[], float]:
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
