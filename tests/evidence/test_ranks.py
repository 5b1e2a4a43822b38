"""Ranks that a notebook starts: what they return and claim comes back judged, and none outlives its program."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest

from cascade_lab import runtime
from cascade_lab.evidence import ranks as ranks_module
from cascade_lab.evidence.claims import AtLeast, AtMost, claim
from cascade_lab.evidence.ranks import Ranks, bytes_sent, run_ranks
from tests.limits import HANGS_S

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def temp(tmp_path, monkeypatch) -> Path:
    """Where temporary folders are made; its name needs quoting wherever a path is put into a URL or a shell."""
    folder = tmp_path / "a #b?c %20"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def gone(pid: int, patience: float = HANGS_S) -> bool:
    """Whether the process ends in time; a zombie has ended."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def merged():
    import os

    import torch

    from cascade_lab import merge_state, runtime

    o, lse = torch.full((3, 2, 16), 2.0), torch.zeros(3, 2)
    state = merge_state(o, lse, o, lse, backend="triton")
    return [
        runtime.triton_mode(),
        os.environ[runtime.SWITCH],
        state.o.unique().tolist(),
        round(float(state.lse.max()), 4),
    ]


@pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")
@pytest.mark.parametrize(("target", "mode", "switch"), [("sm_90", "executed", "0"), ("", "interpreted", "1")])
def test_ranks_take_the_target_of_the_process_that_starts_them(target, mode, switch, monkeypatch):
    monkeypatch.setenv(runtime.TARGET, target)
    assert run_ranks(merged, 2) == [[mode, switch, [2.0], 0.6931]] * 2


def where(scale, names):
    import torch
    import torch.distributed as dist

    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "of": dist.get_world_size(), "sum": scale * total.item(), "names": names}


def test_each_rank_returns_its_own(two):
    found = two.run(where, scale=10, names=["a", "ü"])
    assert found == [{"rank": rank, "of": 2, "sum": 30, "names": ["a", "ü"]} for rank in range(2)]


def test_ranks_run_one_program_after_another(two):
    def again():
        import os

        return os.getpid()

    first, second = two.run(again), two.run(again)
    assert first == second
    assert len(set(first)) == 2
    assert os.getpid() not in first


def test_exact_claims_hold_per_rank_or_for_all(two, capsys):
    def program():
        from fractions import Fraction

        import numpy as np
        import torch
        import torch.distributed as dist

        rank = dist.get_rank()
        claim("T.1", "shared", measured=7, expected=7, instrument="counted")
        claim("T.2", "per rank", measured=10 + rank, expected=10 + rank, instrument="counted")
        claim("T.3", "thirds", measured=Fraction(1 + rank, 3), expected=Fraction(1 + rank, 3))
        claim("T.4", "lists", measured=[rank, (1, 2)], expected=(rank, [1, 2]))
        claim("T.5", "tensors", measured=torch.tensor(rank), expected=np.int64(rank))
        claim("T.6", "words", measured="a", expected="a")
        claim("T.7", "truth", measured=True, expected=np.bool_(True))

    assert two.run(program) == [None, None]
    told = capsys.readouterr().out.splitlines()
    assert told[:3] == [
        "T.1 holds: shared (counted: expected 7, measured 7)",
        "T.2 holds: per rank (counted: expected (10, 11), measured (10, 11))",
        "T.3 holds: thirds (oracle: expected (1/3, 2/3), measured (1/3, 2/3))",
    ]
    assert [line.split(":")[0] for line in told[3:]] == ["T.4 holds", "T.5 holds", "T.6 holds", "T.7 holds"]


def test_tolerances_and_bounds_are_judged_on_the_worst_rank(two, capsys):
    def program():
        from fractions import Fraction

        import torch.distributed as dist

        from cascade_lab.evidence.claims import AtLeast, AtMost

        rank = dist.get_rank()
        claim("B.1", "close", measured=1.0 + 1e-9 * rank, expected=1.0, tol=1e-8)
        claim("B.2", "close", measured=Fraction(rank, 7), expected=Fraction(rank + 1, 7), tol=Fraction(1, 7))
        claim("B.3", "low", measured=0.1 + rank, expected=AtMost(1.1))
        claim("B.4", "high", measured=5 - rank, expected=AtLeast(4))
        claim("B.5", "third", measured=rank, expected=AtMost(Fraction(4, 3)))
        claim("B.6", "slow", measured=None, expected=AtMost(3), instrument="timed")

    two.run(program)
    told = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == ["B.1 holds", "B.2 holds", "B.3 holds", "B.4 holds", "B.5 holds", "B.6 not measured here"]


@pytest.mark.parametrize(
    ("first", "second", "bound"),
    [(1.0, 1.2, "AtMost"), (1.2, 1.0, "AtMost"), (1.0, "nan", "AtMost"), ("nan", 1.0, "AtMost"), (1.2, 1.0, "AtLeast"),
     (1.2, "nan", "AtLeast"), (1.2, 1.1, 1.2), (1.2, "nan", 1.2)],
)  # fmt: skip
def test_a_claim_that_one_rank_breaks_fails_here(two, capsys, first, second, bound):
    def program(values, bound):
        import torch.distributed as dist

        from cascade_lab.evidence import claims

        expected = getattr(claims, bound)(1.1) if isinstance(bound, str) else bound
        claim("F.1", "broken by one", measured=float(values[dist.get_rank()]), expected=expected)

    with pytest.raises(AssertionError, match=r"claim F\.1 fails: broken by one"):
        two.run(program, values=[first, second], bound=bound)
    assert capsys.readouterr().out.startswith("F.1 fails: ")
    assert len(two.run(where, scale=1, names=[])) == 2  # ranks are as good as before


def claims_ids(ids, bounds):
    import torch.distributed as dist

    from cascade_lab.evidence.claims import AtMost

    rank = dist.get_rank()
    for id in ids[rank]:
        claim(id, "said by some", measured=1, expected=AtMost(bounds[rank]))


@pytest.mark.parametrize(
    ("ids", "bounds"),
    [([["D.1"], []], [2, 2]), ([["D.1", "D.2"], ["D.2", "D.1"]], [2, 2]), ([["D.1"], ["D.1"]], [2, 3])],
)
def test_ranks_that_claim_different_things_are_refused(two, capsys, ids, bounds):
    with pytest.raises(RuntimeError, match="ranks claim different things: "):
        two.run(claims_ids, ids=ids, bounds=bounds)
    assert capsys.readouterr().out == ""


def test_a_rank_that_dies_is_named_and_ends_the_others(temp):
    def program():
        import os
        import signal

        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    ranks = Ranks(2)
    pids = [process.pid for process in ranks._processes]
    with pytest.raises(RuntimeError, match="^rank 1 of 2 failed: SIGKILL$"):
        ranks.run(program)
    assert all(gone(pid) for pid in pids)
    assert list(temp.iterdir()) == []
    with pytest.raises(RuntimeError, match="these ranks are closed"):
        ranks.run(program)


def test_closed_ranks_start_again_when_they_are_opened_and_running_ones_stay(temp):
    def program(add):
        import torch
        import torch.distributed as dist

        total = torch.tensor([dist.get_rank() + add])
        dist.all_reduce(total)
        return total.item()

    ranks = Ranks(2)
    assert ranks.run(program, add=1) == [3, 3]
    pids = [process.pid for process in ranks._processes]
    ranks.open()
    assert [process.pid for process in ranks._processes] == pids
    ranks.close()
    assert all(gone(pid) for pid in pids)
    ranks.open()
    assert ranks.run(program, add=2) == [5, 5]
    ranks.close()
    assert list(temp.iterdir()) == []


def test_an_error_of_a_rank_is_told_by_its_first_line(temp):
    def program():
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second,\nin two lines")  # noqa: B904

    with pytest.raises(RuntimeError, match="^rank 0 of 1 failed: ValueError: second,$"):
        run_ranks(program, 1)
    assert list(temp.iterdir()) == []


def test_ranks_that_take_too_long_are_ended(temp):
    def program():
        import time

        time.sleep(60)

    ranks = Ranks(2, timeout=0.2)  # less than their start takes
    pids = [process.pid for process in ranks._processes]
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] took longer than 0.2 s"):
        ranks.run(program)
    assert all(gone(pid) for pid in pids)
    assert list(temp.iterdir()) == []


def test_only_the_late_ranks_are_named(temp):
    def program(patience):
        import time

        import torch.distributed as dist

        if dist.get_rank() == 0:
            time.sleep(patience)

    with Ranks(1) as ranks:
        assert ranks.run(program, patience=0) == [None]
        ranks.timeout = 0.3
        with pytest.raises(TimeoutError, match=r"ranks \[0\] took longer than 0.3 s"):
            ranks.run(program, patience=60)
    assert list(temp.iterdir()) == []


def test_an_interrupt_leaves_nothing_behind(temp, monkeypatch):
    ranks = Ranks(2)
    pids = [process.pid for process in ranks._processes]

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks_module.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ranks.run(where, scale=1, names=[])
    monkeypatch.undo()
    assert all(gone(pid) for pid in pids)
    assert list(temp.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_no_rank_outlives_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        "from cascade_lab.evidence.ranks import Ranks\n"
        "def pid(sleep):\n"
        "    import os, time\n"
        "    time.sleep(sleep)\n"
        "    return os.getpid()\n"
        "ranks = Ranks(2)\n"
        "print(*ranks.run(pid, sleep=0), flush=True)\n"
        "ranks.run(pid, sleep=600)\n"
    )
    path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(gone(pid, 0.1) for pid in pids)
        parent.kill()
    assert parent.returncode == -signal.SIGKILL
    assert all(gone(pid) for pid in pids)
    assert [path.name for path in tmp_path.iterdir()] == ["parent.py"]


def test_what_is_no_claim_or_no_program_is_refused(two):
    for world_size, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="world_size: expected"):
            Ranks(world_size)
    with pytest.raises(TypeError, match="JSON"):
        two.run(where, scale=1, names={1, 2})
    with pytest.raises(TypeError, match="module, class, method, function"):
        two.run(len)
    assert len(two.run(where, scale=1, names=[])) == 2


def test_the_last_error_is_found_in_what_was_printed():
    tell = ranks_module._last_error
    assert tell("") == ""
    assert tell("warning\nkilled\n") == "killed"
    traceback = "Traceback (most recent call last):\n  File x\n    call()\nValueError: one\ntwo\n"
    assert tell("note\n" + traceback) == "ValueError: one"
    assert tell(traceback + "\nDuring handling of it:\n\n" + traceback.replace("one", "three")) == "ValueError: three"


def test_bytes_of_connections_are_counted():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sender = stack.enter_context(socket.create_connection(server.getsockname()))
        receiver = stack.enter_context(server.accept()[0])
        try:
            before = bytes_sent()
        except NotImplementedError:
            pytest.skip("this system does not count the bytes of a connection")
        for size in (1000, 50_000):
            reader = threading.Thread(target=_take, args=(receiver, size))
            reader.start()
            sender.sendall(b"x" * size)
            reader.join()
        receiver.sendall(b"yz")
        assert sender.recv(2, socket.MSG_WAITALL) == b"yz"
        assert bytes_sent() - before == 51_002


def _take(connection: socket.socket, size: int) -> None:
    while size:
        size -= len(connection.recv(size))


def test_without_a_connection_nothing_is_counted(monkeypatch):
    monkeypatch.setattr(ranks_module.os, "readlink", lambda _: "pipe:[1]")
    with pytest.raises(NotImplementedError, match="no TCP connection of this process"):
        bytes_sent()


def test_the_values_of_claims_travel_as_json():
    values = (1, 2.5, "a", True, None, [1, [2, Fraction(1, 3)]], Fraction(5, 7), AtMost(Fraction(1, 2)), AtLeast(3))
    for value in values:
        there = json.loads(json.dumps(ranks_module._encode(value)))
        assert ranks_module._decode(there) == value
    with pytest.raises(TypeError, match="claim: expected numbers, texts, or lists of them, given dict"):
        ranks_module._encode({"a": 1})


def fail_between_two_messages(folder):
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from cascade_lab import distributed
    from cascade_lab.states import State

    def full(*_, **__):
        raise RuntimeError("no room here")

    if dist.get_rank() == 1:
        distributed.merge_states = full
    try:
        distributed.merge_across_ranks(State(torch.randn(6, 2, 4), torch.randn(6, 2)), algorithm="exchange")
    except RuntimeError as error:
        Path(folder, str(dist.get_rank())).write_text(str(error))


@pytest.mark.long
def test_a_failure_of_one_rank_is_its_own_and_the_others_do_not_wait(tmp_path):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="failed"), Ranks(3, timeout=HANGS_S) as ranks:
        ranks.run(fail_between_two_messages, folder=str(tmp_path))  # they cannot meet at its end
    assert time.monotonic() - start < 0.9 * HANGS_S
    said = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert said[1] == "no room here"
    assert all("lost another rank" in said[rank] for rank in (0, 2))
