"""The only lines of the benchmark that speak to a GPU: its clock, its cache, its memory.

A call is captured into a CUDA graph and replayed between two events, after a read of a buffer several times the size
of the L2, so that neither the host's launches nor a warm cache are in the time. What a caller waits for, host included,
is measured beside it. `HostClock` offers the same methods on a CPU, so that everything above runs without a GPU;
its times say nothing about kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cascade_lab import runtime
from cascade_lab.evidence.timing import take_turns

MIN_REPEATS, MAX_REPEATS = 5, 30
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Timing:
    """One call, timed.

    Attributes:
        seconds: median time on the device, cold L2.
        low, high: quartiles.
        repeats: timed runs behind the median.
        call_seconds: median time from the call on the host until the device is done, launches from Python included.
        graph: whether the device time is that of a replayed CUDA graph; else the host's gaps are in it.
    """

    seconds: float
    low: float
    high: float
    repeats: int
    call_seconds: float
    graph: bool


class GpuClock:
    """Times calls on the current CUDA device."""

    meaningful = True

    def __init__(self) -> None:
        self.device = runtime.device()
        properties = torch.cuda.get_device_properties(self.device)
        self.name: str = properties.name
        self.num_sms: int = properties.multi_processor_count
        self.l2_bytes: int = properties.L2_cache_size
        size = max(_FLUSH_BYTES, 4 * self.l2_bytes)
        self._flush = torch.zeros(size // 4, dtype=torch.float32, device=self.device)
        self._sink = torch.zeros((), dtype=torch.float32, device=self.device)

    def flush(self) -> None:
        """Evict the L2 by reading: a write would leave dirty lines whose way out falls into the timed call."""
        torch.sum(self._flush, dim=0, out=self._sink)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def release(self) -> None:
        """Give cached memory back to the driver."""
        torch.cuda.empty_cache()

    def measure(self, call: Callable[[], object], *, seconds: float = 0.1, capture: str = "required") -> Timing:
        """Time `call`, on the same tensors every time.

        Args:
            call: the work; run a few times first, so that compilation is over.
            seconds: about how much device time to spend.
            capture: "required" into a graph; "tried", for foreign code; or "off", for calls that read values back.

        Raises:
            RuntimeError: capture is required and the call cannot be captured.
        """
        for _ in range(3):
            call()
        self.wait()
        run, graph = (call, False) if capture == "off" else self._captured(call, capture == "required")
        once = self._events(run, 2)[-1]
        repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(seconds / max(once, 1e-6))))
        low, median, high = statistics.quantiles(self._events(run, repeats), n=4, method="inclusive")
        calls = {"call": lambda: (call(), self.wait())}
        waits = take_turns(calls, MIN_REPEATS, clock=time.perf_counter, before=lambda: (self.flush(), self.wait()))
        # a graph has memory of its own, which outlives it in the allocator
        del run
        self.release()
        return Timing(median, low, high, repeats, statistics.median(waits.seconds["call"]), graph)

    def _captured(self, call: Callable[[], object], required: bool) -> tuple[Callable[[], object], bool]:
        # warm-up on another stream, as capture asks for, so that no lazy initialisation falls into it
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.wait()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                call()
        except RuntimeError:
            if required:
                raise
            self.wait()
            return call, False
        graph.replay()
        self.wait()
        return graph.replay, True

    def _events(self, run: Callable[[], object], repeats: int) -> list[float]:
        """Device seconds of each run; all are queued before any is read, so the host stays ahead."""
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in pairs:
            self.flush()
            start.record()
            run()
            end.record()
        self.wait()
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs]


class HostClock:
    """The same methods on a CPU, where kernels run interpreted: for trying the benchmark, not for numbers."""

    meaningful = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = "CPU"
        self.num_sms, self.l2_bytes = 1, 1 << 20

    def flush(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 1 << 30

    def release(self) -> None:
        pass

    def measure(self, call: Callable[[], object], *, seconds: float = 0.1, capture: str = "required") -> Timing:
        taken = take_turns({"call": call}, 2, clock=time.perf_counter).seconds["call"]
        low, median, high = statistics.quantiles(taken, n=4, method="inclusive")
        return Timing(median, low, high, len(taken), median, False)


Clock = GpuClock | HostClock


def clock() -> Clock:
    """The clock of the device on which kernels run in this process."""
    return GpuClock() if runtime.device().type == "cuda" else HostClock()
