"""Processes side by side: what ends is reported, and nothing is left when nobody waits any more."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time

from cascade_lab.evidence import workers
from tests.limits import HANGS_S


def test_what_has_not_ended_is_killed_when_no_more_is_asked_for():
    others = set(multiprocessing.active_children())
    running = workers.finished(time.sleep, [(HANGS_S,), (0,)], processes=2)
    place, done = next(running)
    assert (place, done.result()) == (1, None)
    started = set(multiprocessing.active_children()) - others
    assert len(started) == 2
    running.close()
    for process in started:
        # the pool waits for it as well, and whoever comes second is told nothing until the first has noted the status
        while process.exitcode is None:
            process.join(0.01)
    assert {process.exitcode for process in started} <= {-signal.SIGKILL, 0}
    assert -signal.SIGKILL in {process.exitcode for process in started}


def test_what_has_not_ended_by_the_deadline_is_killed_and_not_reported(monkeypatch):
    started = []

    def late(futures, timeout):
        assert timeout > 0
        started.extend(multiprocessing.active_children())
        raise TimeoutError

    monkeypatch.setattr(workers, "as_completed", late)
    deadline = time.monotonic() + HANGS_S
    assert list(workers.finished(time.sleep, [(HANGS_S,)], processes=1, deadline=deadline)) == []
    assert started
    for process in started:
        process.join()


def test_nothing_is_started_after_the_deadline(monkeypatch):
    monkeypatch.setattr(workers, "ProcessPoolExecutor", None)
    assert list(workers.finished(time.sleep, [(0,)], processes=1, deadline=0.0)) == []


def test_a_task_that_fails_is_reported_with_its_error():
    ((place, done),) = workers.finished(int, [("no number",)], processes=1)
    assert place == 0
    assert "no number" in str(done.exception())


def test_a_group_is_ended_with_its_children():
    code = f"import subprocess; p = subprocess.Popen(['sleep', '{HANGS_S}']); print(p.pid, flush=True); p.wait()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert int(process.stdout.readline()) > 0
        workers.end_group(process)
        assert process.returncode == -signal.SIGKILL
        # the pipe ends when the child, which holds its other end too, is gone
        assert process.stdout.read() == ""
        workers.end_group(process)
