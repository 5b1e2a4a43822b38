"""What the sections of the GPU's benchmark share: sizes, clock, time left, and the ceilings once they are measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cascade_lab import runtime
from cascade_lab.bench.clock import Clock
from cascade_lab.bench.record import progress
from cascade_lab.levels import Level, cascade_attention
from cascade_lab.states import State

DTYPE = torch.bfloat16
# no more than this part of the free memory for caches
MEMORY_SHARE = 0.4


@dataclass(frozen=True)
class Scale:
    """Sizes of one run: what the sections measure, and in how many seconds all of them together."""

    budget_s: float | None  # of the whole run, checks and compilation included; None: no limit
    head_dim: int = 128
    num_kv_heads: int = 8
    page: int = 16
    coarse_page: int = 256
    steps: int = 4
    lengths: tuple[int, ...] = tuple(1 << n for n in range(10, 18))
    topks: tuple[int, ...] = (1, 2, 4, 8, 16)
    batches: tuple[int, ...] = (1, 4, 16, 64)
    groups: tuple[int, ...] = (1, 4, 8)
    # where the sweeps cross: prefix length, topk, batch, group, rows
    centre: tuple[int, int, int, int, str] = (16384, 4, 16, 4, "branch")
    peer_lengths: tuple[int, ...] = (16384, 2048, 65536)
    peer_batches: tuple[int, ...] = (1, 16)
    new_tokens: tuple[int, ...] = tuple(1 << n for n in range(4, 15))
    hits: tuple[int, ...] = (0, *(1 << n for n in range(10, 18)))
    prompts: tuple[int, ...] = (8192, 2048, 32768)
    # unit of length and number of requests of the ragged batches
    mix_length: int = 16384
    mix_requests: int = 16
    eighths: tuple[int, ...] = tuple(range(8))
    linear: tuple[int, int] = (4096, 14336)
    linear_rows: tuple[int, ...] = tuple(1 << n for n in range(0, 15))
    copy_bytes: int = 2 << 30
    small_copy_bytes: int = 8 << 20
    matmul_sides: tuple[int, ...] = (8192, 4096)
    merge_rows: tuple[int, ...] = (1, 16, 256, 4096)
    merge_parts: tuple[int, ...] = (2, 8, 32)
    merge_heads: int = 32
    splits_length: int = 32768
    splits: tuple[int | None, ...] = (None, 1, 2, 4, 8, 16, 32, 64)
    counter_lengths: tuple[int, ...] = (2048, 8192, 32768)
    counter_batch: int = 4


PRESETS = {
    "full": Scale(budget_s=540),
    "quick": Scale(
        budget_s=180,
        lengths=(1024, 4096, 16384, 65536),
        topks=(1, 4, 16),
        batches=(1, 16, 64),
        peer_lengths=(16384, 65536),
        peer_batches=(16,),
        new_tokens=(16, 64, 256, 1024, 4096, 16384),
        hits=(0, 4096, 32768, 131072),
        prompts=(8192,),
        linear_rows=(1, 16, 256, 1024, 4096, 16384),
        matmul_sides=(8192,),
        splits=(None, 1, 4, 16, 64),
        counter_lengths=(8192,),
    ),
    # tiny and without a limit: what it does must not depend on the machine's speed
    "smoke": Scale(
        budget_s=None,
        head_dim=16,
        num_kv_heads=1,
        page=4,
        coarse_page=8,
        steps=2,
        lengths=(16, 32),
        topks=(2,),
        batches=(2,),
        groups=(2,),
        centre=(32, 2, 2, 2, "branch"),
        peer_lengths=(32,),
        peer_batches=(2,),
        new_tokens=(4, 8),
        hits=(0, 16),
        prompts=(32,),
        mix_length=32,
        mix_requests=3,
        eighths=(0, 4),
        linear=(16, 32),
        linear_rows=(1, 8),
        copy_bytes=1 << 20,
        small_copy_bytes=1 << 16,
        matmul_sides=(64,),
        merge_rows=(1, 5),
        merge_parts=(2, 3),
        merge_heads=2,
        splits_length=64,
        splits=(None, 1, 2),
        counter_lengths=(16, 32),
        counter_batch=2,
    ),
}


@dataclass
class Session:
    """What the sections share: the clock, the sizes, the time left, and the ceilings once they are measured."""

    clock: Clock
    scale: Scale
    max_autotune: bool = False
    deadline: float = math.inf
    skipped: list[dict[str, object]] = field(default_factory=list)
    copy_rate: float = math.nan
    matmul_rate: float = math.nan

    def visit(self, points: Iterable[dict]) -> Iterator[dict]:
        """The points that the section's time suffices for; the others are noted as skipped."""
        for point in points:
            if time.monotonic() >= self.deadline:
                self.skipped.append(point | {"why": "time"})
            else:
                progress(", ".join(f"{name} {value}" for name, value in point.items()))
                yield point

    def random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=DTYPE, device=self.clock.device).normal_()


def planned(q: Tensor, k_cache: Tensor, v_cache: Tensor, levels: Sequence[Level]) -> Callable[[], State]:
    """A plan that is only launched, its values trusted, as an engine does: safe to capture into a CUDA graph."""

    def call() -> State:
        with runtime.unchecked():
            return cascade_attention(q, k_cache, v_cache, levels, backend="triton")

    return call
