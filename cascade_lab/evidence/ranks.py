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
import queue
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

from cascade_lab import _checks, runtime
from cascade_lab.evidence.claims import AtLeast, AtMost, claim

HEADER = "from __future__ import annotations\n"
# One machine, no GPU: no host name to look up, one thread for each rank that shares the cores; kernels interpreted,
# unless the process at hand executes compiled code.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
}
_BOUNDS = {"AtMost": AtMost, "AtLeast": AtLeast}


class Ranks:
    """`world_size` processes on this machine in one gloo group, from here to `close` or the end of a with block.

    Args:
        world_size: number of ranks.
        timeout: seconds that the start, and then each program, may take.
    """

    def __init__(self, world_size: int, *, timeout: float = 90):
        _checks.integer("world_size", world_size, 1)
        self.world_size, self.timeout = world_size, timeout
        self._processes: list[subprocess.Popen] = []
        self.open()

    def open(self) -> None:
        """Start the ranks again where they have been closed; those that run are left alone."""
        if self._processes:
            return
        self._runs = 0
        self._place = tempfile.TemporaryDirectory(prefix="cascade-ranks-")
        self._folder = Path(self._place.name)
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        arguments = [str(self._folder), str(self.world_size), str(self.timeout)]
        # ranks of a process that executes compiled code inherit its target
        mode = {runtime.SWITCH: "0"} if runtime.environment_executes() else {}
        try:
            for rank in range(self.world_size):
                with (self._folder / f"stderr.{rank}").open("wb") as stderr:
                    self._processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "cascade_lab.evidence.ranks", str(rank), *arguments],
                            env=os.environ | ENVIRONMENT | mode | {"PYTHONPATH": path},
                            stdin=subprocess.PIPE,
                            stdout=subprocess.DEVNULL,
                            stderr=stderr,
                        )
                    )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, program: Callable, **arguments: object) -> list:
        """Run `program(**arguments)` on every rank, and judge the claims that they make.

        Args:
            program: a function whose source can be read, of a notebook cell or a module. It sees what it imports
                itself, and `claim`, which takes the arguments of `cascade_lab.evidence.claims.claim`.
            arguments: keyword arguments, JSON values.

        Returns:
            What each rank returned, JSON values, by rank. A claim is made here once for all ranks: with the values of
            each rank, or the one value that all share; a bound is judged on the worst.

        Raises:
            RuntimeError: a rank failed (the first is named), or ranks claim different things. TimeoutError: they took
                too long. Ranks of which one failed or was late are all stopped.
        """
        source = HEADER + textwrap.dedent(inspect.getsource(program))
        task = json.dumps({"name": program.__name__, "source": source, "arguments": arguments}).encode() + b"\n"
        number, self._runs = self._runs, self._runs + 1
        results = [self._folder / f"result.{number}.{rank}.json" for rank in range(self.world_size)]
        try:
            for process in self._processes:
                with contextlib.suppress(BrokenPipeError):  # a rank that is gone is noticed below
                    process.stdin.write(task)
                    process.stdin.flush()
            self._await(results)
        except BaseException:
            self.close()
            raise
        found = [json.loads(path.read_text(encoding="utf-8")) for path in results]
        _judge([result["claims"] for result in found])
        return [result["returned"] for result in found]

    def close(self) -> None:
        """Stop the ranks; none is left when this returns."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
        self._processes = []
        self._place.cleanup()

    def _await(self, results: Sequence[Path]) -> None:
        deadline = time.monotonic() + self.timeout
        while not all(path.exists() for path in results):
            self._check_running()
            if time.monotonic() > deadline:
                late = [rank for rank, path in enumerate(results) if not path.exists()]
                raise TimeoutError(f"ranks {late} took longer than {self.timeout:g} s")
            time.sleep(0.005)

    def _check_running(self) -> None:
        if not self._processes:
            raise RuntimeError("these ranks are closed")
        failed = [rank for rank, process in enumerate(self._processes) if process.poll() is not None]
        if not failed:
            return
        time.sleep(0.2)  # ranks that fall together do not end in the order of cause and effect
        reasons = {}
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                text = (self._folder / f"stderr.{rank}").read_text(errors="replace").replace(f"[rank{rank}]: ", "")
                status = process.returncode
                by_signal = signal.Signals(-status).name if status < 0 else None
                reasons[rank] = by_signal or _last_error(text) or f"exit status {status}"
        # a rank that lost another one comes second, be it noticed by the package or by the transport
        lost = ("lost another rank", "gloo", "onnection")
        first = min(reasons, key=lambda rank: (any(word in reasons[rank] for word in lost), rank))
        raise RuntimeError(f"rank {first} of {self.world_size} failed: {reasons[first]}")


def _last_error(stderr: str) -> str:
    """The first line of the last exception that was printed, else the last line."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    told = [line for line in lines[starts[-1] + 1 :] if not line.startswith(" ")] if starts else lines[-1:]
    return told[0] if told else ""


def run_ranks(program: Callable, world_size: int, *, timeout: float = 90, **arguments: object) -> list:
    """`Ranks.run` on ranks that are started for this one program and stopped after it."""
    with Ranks(world_size, timeout=timeout) as ranks:
        return ranks.run(program, **arguments)


def bytes_sent() -> int:
    """Bytes that this process has sent over TCP so far, each once, as the kernel of a Linux system counts them.

    Raises:
        NotImplementedError: the system keeps no such count.
    """
    total, seen = 0, False
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # no TCP socket, or closed since
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    counters = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(counters) < 216:  # an older kernel's
                    continue
                sent, repeated = struct.unpack_from("<QQ", counters, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
                total += sent - repeated
                seen = True
    if not seen:
        raise NotImplementedError("no TCP connection of this process says how many bytes it sent")
    return total


def _judge(by_rank: Sequence[Sequence[dict]]) -> None:
    told = [[(made["id"], made["statement"], made["options"]) for made in claims] for claims in by_rank]
    if any(one != told[0] for one in told):
        raise RuntimeError(f"ranks claim different things: {[[made[0] for made in one] for one in told]}")
    for same in zip(*by_rank, strict=True):
        measured, expected = ([_decode(made[name]) for made in same] for name in ("measured", "expected"))
        if any(isinstance(x, (AtMost, AtLeast)) for x in expected):
            if any(x != expected[0] for x in expected):
                raise RuntimeError(f"ranks claim different things: {same[0]['id']} {', '.join(map(str, expected))}")
            values = {"measured": _worst(measured, expected[0]), "expected": expected[0]}
        elif all(x == measured[0] for x in measured) and all(x == expected[0] for x in expected):
            values = {"measured": measured[0], "expected": expected[0]}
        else:
            values = {"measured": measured, "expected": expected}
        options = {name: _decode(value) for name, value in same[0]["options"].items()}
        claim(same[0]["id"], same[0]["statement"], **values, **options)


def _worst(measured: Sequence, bound: AtMost | AtLeast) -> object:
    """What breaks the bound first: a rank that could not measure, one that measured NaN, or the extreme."""
    for value in measured:
        if value is None or value != value:
            return value
    return max(measured) if isinstance(bound, AtMost) else min(measured)


def _encode(value: object) -> object:
    """A claim's value as JSON."""
    if isinstance(value, (AtMost, AtLeast)):
        return {type(value).__name__: _encode(value.bound)}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, Fraction):
        return {"Fraction": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"claim: expected numbers, texts, or lists of them, given {type(value).__name__}")


def _decode(value: object) -> object:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        return Fraction(inner) if kind == "Fraction" else _BOUNDS[kind](_decode(inner))
    return value


def _serve(rank: int, folder: Path, world_size: int, timeout: float) -> None:
    """A rank process: join the group, then run each program that comes, and write down what it returned and claimed."""
    import datetime

    import torch
    import torch.distributed as dist

    tasks: queue.SimpleQueue[dict] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(tasks, folder), daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world_size),  # a path in a URL would have to be quoted
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    number = 0
    while True:
        result = json.dumps(_run(tasks.get()))
        dist.barrier()  # all have what they wanted from each other
        unfinished = folder / f"unfinished.{rank}"
        unfinished.write_text(result, encoding="utf-8")
        unfinished.rename(folder / f"result.{number}.{rank}.json")
        number += 1


def _listen(tasks: queue.SimpleQueue, folder: Path) -> None:
    with os.fdopen(os.dup(0)) as lines:
        for line in lines:
            tasks.put(json.loads(line))
    shutil.rmtree(folder, ignore_errors=True)  # the other end is gone, and its process with it
    os._exit(1)


def _run(task: dict) -> dict:
    claims: list[dict] = []

    def note(id: str, statement: str, *, measured: object, expected: object, **options: object) -> None:
        values = {"measured": _encode(measured), "expected": _encode(expected)}
        encoded = {name: _encode(value) for name, value in options.items()}
        claims.append({"id": id, "statement": statement, **values, "options": encoded})

    names: dict[str, object] = {"claim": note, "__name__": "rank_program"}
    exec(compile(task["source"], task["name"], "exec"), names)
    return {"returned": names[task["name"]](**task["arguments"]), "claims": claims}


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
