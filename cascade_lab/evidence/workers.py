"""Processes that work side by side until a deadline, and none of which is left behind when it passes.

A compilation cannot be interrupted from within, so what is late is killed: what the others finished counts, and what
they did not is for the caller to name.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

MAX_WORKERS = 8


def workers() -> int:
    """Processes that compile side by side on one device."""
    return min(MAX_WORKERS, os.cpu_count() or 1)


def finished(
    function: Callable, tasks: Sequence[tuple], *, processes: int, deadline: float = math.inf
) -> Iterator[tuple[int, Future]]:
    """Call `function(*task)` in fresh processes; each task's place and its finished future, the first to end first.

    Args:
        function, tasks: both can be pickled.
        processes: at most so many at a time.
        deadline: on `time.monotonic`; tasks that have not ended by then are killed, and nothing is yielded for them.
    """
    if time.monotonic() >= deadline:
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        places = {pool.submit(function, *task): place for place, task in enumerate(tasks)}
        # no wait of the operating system is infinite
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        try:
            for done in as_completed(places, timeout=left):
                yield places[done], done
        except TimeoutError:
            return
    finally:
        started = set(multiprocessing.active_children()) - others
        pool.shutdown(wait=False, cancel_futures=True)
        for process in started:
            process.kill()


def end_group(process: subprocess.Popen) -> None:
    """Leave nothing running of a process that was started in a session of its own, its children included."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
