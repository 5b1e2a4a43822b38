"""Real ranks for a notebook or a bench: one process each, joined by gloo, and what they found brought together.

A rank program is a plain function. It runs in every process with the process group set up and may call `claim`: ranks
measure, and the caller's process judges what all of them measured as one claim. No port is opened for the meeting (a
file is enough), and a rank never outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from cascade_lab.evidence.claims import AtLeast, AtMost, claim

HEADER = "from __future__ import annotations\n"
_BOUNDS = {"AtMost": AtMost, "AtLeast": AtLeast}


def run_ranks(program: Callable, world_size: int, *, timeout: float = 90, **arguments: object) -> list:
    """Run `program(**arguments)` on `world_size` ranks of one gloo group on this machine, and judge their claims.

    Args:
        program: a function whose source can be read, of a notebook cell or a module. It sees what it imports itself,
            and `claim`, which takes the arguments of `cascade_lab.evidence.claims.claim`.
        world_size: number of ranks.
        timeout: seconds for all of it, after which the ranks are killed.
        arguments: keyword arguments, JSON values.

    Returns:
        What each rank returned, JSON values, by rank. A claim is made here once for all ranks: with the values of each
        rank, or the one value that all share; a bound is judged on the worst.

    Raises:
        RuntimeError: a rank failed (the first is named, the others are stopped), or ranks claim different things.
        TimeoutError: they took too long.
    """
    source = textwrap.dedent(inspect.getsource(program))
    with tempfile.TemporaryDirectory(prefix="cascade-ranks-") as name:
        folder = Path(name)
        (folder / "program.py").write_text(HEADER + source, encoding="utf-8")
        task = {"program": program.__name__, "world_size": world_size, "timeout": timeout, "arguments": arguments}
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        with _started(folder, world_size) as ranks:
            _await(ranks, folder, timeout)
        found = [json.loads((folder / f"result.{rank}.json").read_text()) for rank in range(world_size)]
    _judge([result["claims"] for result in found])
    return [result["returned"] for result in found]


def bytes_sent() -> int:
    """Bytes that this process has handed to its TCP connections so far, as the kernel of a Linux system counts them.

    Raises:
        NotImplementedError: the system keeps no such count.
    """
    total, seen = 0, False
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # no TCP socket, or closed since
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    counters = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("<Q", counters, 200)[0]  # tcpi_bytes_sent, see linux/tcp.h
                seen = True
    if not seen:
        raise NotImplementedError("no TCP connection of this process says how many bytes it sent")
    return total


@contextlib.contextmanager
def _started(folder: Path, world_size: int) -> Iterator[list[subprocess.Popen]]:
    """The rank processes; whatever happens, none is left when this ends."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    # one machine: no name to look up, and one thread for each of the ranks that share its cores
    common = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks: list[subprocess.Popen] = []
    try:
        for rank in range(world_size):
            with (folder / f"stderr.{rank}").open("wb") as stderr:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "cascade_lab.evidence.ranks", str(folder), str(rank)],
                        env=os.environ | common,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        stderr=stderr,
                    )
                )
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.stdin.close()
            process.wait()


def _await(ranks: Sequence[subprocess.Popen], folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in ranks):
        _check_ended(ranks, folder)
        if time.monotonic() > deadline:
            late = [rank for rank, process in enumerate(ranks) if process.poll() is None]
            raise TimeoutError(f"ranks {late} took longer than {timeout:g} s")
        time.sleep(0.01)
    _check_ended(ranks, folder)


def _check_ended(ranks: Sequence[subprocess.Popen], folder: Path) -> None:
    ended = [(rank, process.poll()) for rank, process in enumerate(ranks)]
    failed = [(rank, status) for rank, status in ended if status]
    if not failed:
        return
    # a rank that lost another one comes second, whichever is noticed first
    reasons = {}
    for rank, status in failed:
        lines = (folder / f"stderr.{rank}").read_text(errors="replace").replace(f"[rank{rank}]: ", "").splitlines()
        lines = [line for line in lines if line.strip()]
        reasons[rank] = signal.Signals(-status).name if status < 0 else lines[-1] if lines else f"exit status {status}"
    first = min(reasons, key=lambda rank: ("lost another rank" in reasons[rank], rank))
    raise RuntimeError(f"rank {first} of {len(ranks)} failed: {reasons[first]}")


def _judge(by_rank: Sequence[Sequence[dict]]) -> None:
    told = [[(made["id"], made["statement"], made["options"]) for made in claims] for claims in by_rank]
    if any(one != told[0] for one in told):
        raise RuntimeError(f"ranks claim different things: {[[made[0] for made in one] for one in told]}")
    for same in zip(*by_rank, strict=True):
        measured, expected = ([_decode(made[name]) for made in same] for name in ("measured", "expected"))
        if isinstance(expected[0], (AtMost, AtLeast)):
            worst = max(measured) if isinstance(expected[0], AtMost) else min(measured)
            values = {"measured": worst, "expected": expected[0]}
        elif all(x == measured[0] for x in measured) and all(x == expected[0] for x in expected):
            values = {"measured": measured[0], "expected": expected[0]}
        else:
            values = {"measured": measured, "expected": expected}
        options = {name: _decode(value) for name, value in same[0]["options"].items()}
        claim(same[0]["id"], same[0]["statement"], **values, **options)


def _encode(value: object) -> object:
    """A claim's value as JSON."""
    if isinstance(value, (AtMost, AtLeast)):
        return {type(value).__name__: _encode(value.bound)}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, Fraction):
        return {"Fraction": str(value)}
    if hasattr(value, "item") and not isinstance(value, (bool, int, float, str)):
        return value.item()
    return value


def _decode(value: object) -> object:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        return Fraction(inner) if kind == "Fraction" else _BOUNDS[kind](_decode(inner))
    return value


def _run_one(folder: Path, rank: int) -> None:
    """A rank process: join the group, run the program, write down what it returned and claimed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=task["world_size"],
        timeout=datetime.timedelta(seconds=task["timeout"]),
    )
    claims: list[dict] = []

    def note(id: str, statement: str, *, measured: object, expected: object, **options: object) -> None:
        values = {"measured": _encode(measured), "expected": _encode(expected)}
        encoded = {name: _encode(value) for name, value in options.items()}
        claims.append({"id": id, "statement": statement, **values, "options": encoded})

    path = folder / "program.py"
    names: dict[str, object] = {"claim": note, "__name__": "rank_program"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    returned = names[task["program"]](**task["arguments"])
    (folder / f"result.{rank}.json").write_text(json.dumps({"returned": returned, "claims": claims}), encoding="utf-8")
    dist.barrier()  # nobody closes a connection that another still uses
    dist.destroy_process_group()


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the parent's end is closed
    os._exit(1)


if __name__ == "__main__":
    _run_one(Path(sys.argv[1]), int(sys.argv[2]))
