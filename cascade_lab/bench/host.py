"""What the host pays for a call: its time over that of the smallest launch Triton can make, in one process.

    ratio = t(call, up to the launcher) / t(launch of a kernel of one argument, up to the launcher)

Calls go through checks, small tensors and Triton's own launch path, for a target that need not be here; the launcher,
which would hand arguments to the device, returns at once, so no kernel runs. The ratio says how many launches' worth of
Python a call is, on any machine; it says nothing of time on a device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from cascade_lab import runtime
from cascade_lab.attention import attention
from cascade_lab.drafts import DraftTree, VerifyBatch
from cascade_lab.evidence.driver import fake_device
from cascade_lab.evidence.timing import ratios
from cascade_lab.levels import cascade_attention
from cascade_lab.planning import plan
from cascade_lab.states import merge_state

TARGET = "sm_90"
UNIT = "one-argument launch"
# within one timing, for a launch is a few times what a clock resolves
REPEATS = 10


@triton.jit
def _one_argument_kernel(x_ptr):
    tl.store(x_ptr, 1.0)


class _Launcher:
    """Stands for the compiled launcher of a kernel: counts the launch and returns."""

    count = 0

    def __init__(self, source, metadata):
        pass

    def __call__(self, *arguments) -> None:
        _Launcher.count += 1


def host_ratios(rounds: int) -> list[dict]:
    """Per call its "ratio" to the unit with quartiles "low" and "high", and its "launches"; in compiled mode.

    Raises:
        RuntimeError: Triton is missing, or kernels are interpreted in this process.
    """
    from triton.runtime import driver

    with fake_device(TARGET):
        # before any kernel is compiled, for each keeps the launcher that it got
        driver.active.launcher_cls = _Launcher
        calls = {UNIT: _smallest(), **_calls()}
        launches = {name: _launches_of(call) for name, call in calls.items()}
        found = ratios({name: _repeated(call) for name, call in calls.items()}, rounds, spread=1.0)
    return [
        {"call": name, "ratio": ratio.median, "low": ratio.low, "high": ratio.high, "launches": launches[name]}
        for name, ratio in found.items()
        if name != UNIT
    ]


def _smallest() -> Callable[[], object]:
    one = torch.zeros(16)
    return lambda: _one_argument_kernel[(1,)](one)


def _calls() -> dict[str, Callable[[], object]]:
    """The public calls on two requests of different length, with and without looking at values."""
    batch = VerifyBatch([40, 17], [DraftTree.branches(2, 2), DraftTree.chain(3)])
    gen = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen).bfloat16()

    k, v = (random(batch.num_pages, batch.page_size, 2, 64) for _ in range(2))
    q = random(batch.num_rows, 8, 64)
    (fused,), cascade = batch.levels("fused"), batch.levels("cascade")
    a, b = ((random(batch.num_rows, 8, 64), random(batch.num_rows, 8).float()) for _ in range(2))

    def one_pass() -> object:
        return attention(
            q,
            k,
            v,
            fused.page_table,
            fused.cache_seqlens,
            cu_seqlens_q=fused.cu_seqlens_q,
            max_seqlen_q=fused.max_seqlen_q,
            tree_mask=fused.tree_mask,
            tail_seqlens=fused.tail_seqlens,
            backend="triton",
        )

    calls = {
        "attention": one_pass,
        "cascade_attention, fused": lambda: cascade_attention(q, k, v, [fused], backend="triton"),
        "cascade_attention, cascade": lambda: cascade_attention(q, k, v, cascade, backend="triton"),
        "merge_state": lambda: merge_state(*a, *b, backend="triton"),
    }
    plans = {
        name: plan(q, k, v, levels, backend="triton") for name, levels in (("fused", [fused]), ("cascade", cascade))
    }
    planned = {f"plan, {name}": lambda made=made: made(q, k, v) for name, made in plans.items()}
    return {**calls, **{f"{name}, unchecked": _unchecked(call) for name, call in calls.items()}, **planned}


def _unchecked(call: Callable[[], object]) -> Callable[[], object]:
    def unchecked() -> object:
        with runtime.unchecked():
            return call()

    return unchecked


def _launches_of(call: Callable[[], object]) -> int:
    """Launches of one call, after one that compiles."""
    call()
    before = _Launcher.count
    call()
    return _Launcher.count - before


def _repeated(call: Callable[[], object]) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(REPEATS):
            call()

    return repeated
