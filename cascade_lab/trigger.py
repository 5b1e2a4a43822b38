"""When to cascade: the predicted time of each plan, from the bytes it loads and the rates of a device (claim 2).

Reading a prefix once instead of topk times saves bytes, and bytes are not time: a cascade pays launches and a merge for
them, and repeated reads are cheaper than first ones. With u the bytes a level must fetch once, a the bytes it loads
again, and f its share of busy multiprocessors,

    t(plan) = launches * launch + sum over levels of max((u + q) / bandwidth + a / reread, flops / rate) / f + merge,

where q are queries and outputs, reread is the bandwidth of the L2 cache if the repeated reads find it warm, else that
of memory, and one program on one multiprocessor is assumed to draw that multiprocessor's share of all rates. This is a
roofline, good for the sign of a decision and poor for its microseconds; beside published measurements even the sign is
wrong in places (notebook 02).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np
import torch

from cascade_lab import _checks
from cascade_lab.backends.triton.config import MAX_HEAD_DIM, splits_for, tile_for
from cascade_lab.drafts import PLANS, ROWS, Plan, Rows, VerifyBatch
from cascade_lab.levels import PassShape

__all__ = [
    "A100",
    "B200",
    "DEVICES",
    "Decision",
    "DeviceModel",
    "H100",
    "H200",
    "Prediction",
    "break_even_prefix",
    "calibrate",
    "predict_branches",
    "should_cascade",
]


@dataclass(frozen=True)
class DeviceModel:
    """What the prediction knows of a device; all of it explicit data.

    Attributes:
        name: for tables.
        bandwidth: bytes per second from memory.
        l2_bandwidth: bytes per second of reads that hit the last-level cache.
        l2_bytes: size of that cache.
        launch: seconds per kernel launch, its start and drain included.
        matmul_rate: dense 16-bit flop per second of the matrix units (or what `calibrate` measured).
        num_sms: multiprocessors that must be busy to reach these rates (threads, on a CPU).
        source: where each number comes from, and which of them are assumptions.

    Example:
        >>> from dataclasses import replace
        >>> slow = replace(cl.trigger.H100, name="half an H100", bandwidth=cl.trigger.H100.bandwidth / 2)
        >>> slow.bandwidth / cl.trigger.H100.bandwidth
        0.5
    """

    name: str
    bandwidth: float
    l2_bandwidth: float
    l2_bytes: int
    launch: float
    matmul_rate: float
    num_sms: int
    source: str

    def __post_init__(self) -> None:
        for name in ("bandwidth", "l2_bandwidth", "launch", "matmul_rate", "l2_bytes", "num_sms"):
            kind = _checks.integer if name in ("l2_bytes", "num_sms") else _checks.number
            value = kind(name, getattr(self, name))
            object.__setattr__(self, name, value)
            least = 1 if name == "num_sms" else 0
            if not math.isfinite(value) or value < least or (value == 0 and name not in ("launch", "l2_bytes")):
                raise ValueError(f"{name}: expected a positive finite number, given {value}")


_MiB = 1 << 20
_ASSUMED = "assumptions: launch 4 us (a stream launch outside a graph)"
A100 = DeviceModel(
    "A100 SXM 80 GB", 2.039e12, 4.3e12, 40 * _MiB, 4e-6, 312e12, 108,
    "NVIDIA A100 80GB datasheet: 2039 GB/s, 312 TFLOPS dense bf16; A100 architecture whitepaper: 108 SMs, 40 MB L2; "
    f"{_ASSUMED}, L2 4.3 TB/s (60% of 5120 bytes per clock at 1.41 GHz)",
)  # fmt: skip
"""An A100 SXM of 80 GB, from its data sheets."""
H100 = DeviceModel(
    "H100 SXM", 3.35e12, 5.5e12, 50 * _MiB, 4e-6, 989e12, 132,
    "NVIDIA H100 datasheet: 3.35 TB/s, 1979 TFLOPS bf16 with sparsity (989 dense); H100 architecture whitepaper: "
    f"132 SMs, 50 MB L2; {_ASSUMED}, L2 5.5 TB/s (no datasheet states it)",
)  # fmt: skip
"""An H100 SXM, from its data sheets."""
H200 = DeviceModel(
    "H200 SXM", 4.8e12, 5.5e12, 50 * _MiB, 4e-6, 989e12, 132,
    "NVIDIA H200 datasheet: 4.8 TB/s, 1979 TFLOPS bf16 with sparsity (989 dense); SMs and L2 as the H100, whose chip "
    f"it is; {_ASSUMED}, L2 5.5 TB/s as for the H100",
)  # fmt: skip
"""An H200 SXM, from its data sheets."""
B200 = DeviceModel(
    "B200", 8.0e12, 10e12, 126 * _MiB, 4e-6, 2250e12, 148,
    "NVIDIA HGX B200 datasheet: 8 TB/s, 4.5 PFLOPS bf16 with sparsity (2.25 dense) per GPU; 148 SMs as the driver "
    f"reports; {_ASSUMED}, L2 126 MB and 10 TB/s (neither is in the datasheet)",
)  # fmt: skip
"""A B200, from its data sheets."""
DEVICES = {"A100": A100, "H100": H100, "H200": H200, "B200": B200}
"""The four devices above by name."""


@dataclass(frozen=True)
class Prediction:
    """What one plan is predicted to cost.

    Attributes:
        plan: "naive", "cascade" or "fused".
        bytes: KV bytes that the launches load, row tiles counted: compulsory_bytes + reread_bytes.
        compulsory_bytes: distinct KV bytes, which must come from memory once.
        reread_bytes: KV bytes loaded again.
        launches: kernel launches, the merge included.
        flops: of the matrix products, rows padded to their tile.
        seconds: the sum of terms.
        terms: seconds by cause: "launch", "memory" (compulsory KV, queries and outputs), "reread", "compute" (what the
            matrix products take beyond the loads they overlap with), "merge" (partial states, written and read).

    Example:
        >>> case = dict(device_model=cl.trigger.H100, num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> plans = cl.trigger.predict_branches(2000, 4, 5, 1, **case)
        >>> plans["naive"].bytes, plans["cascade"].bytes  # 8020 and 2020 tokens x 8 heads x 256 numbers x 2 bytes
        (32849920, 8273920)
        >>> plans["naive"].reread_bytes // (8 * 256 * 2)  # three of four readers find the prefix in the cache
        6000
    """

    plan: Plan
    bytes: int
    compulsory_bytes: int
    reread_bytes: int
    launches: int
    flops: int
    seconds: float
    terms: Mapping[str, float]


@dataclass(frozen=True)
class Decision:
    """Whether to cascade, and why.

    Attributes:
        cascade: the cascade is predicted faster than the naive expansion, and a prefix has more than one reader.
        plan: the fastest of the three. "fused" needs a kernel with a tree mask; an engine without one chooses between
            the other two by `cascade`.
        reason: one sentence with the numbers.
        predictions: by plan.

    Example:
        >>> decision = cl.should_cascade(cl.VerifyBatch([100], [cl.DraftTree.chain(4)]), cl.trigger.H100)
        >>> decision.cascade, decision.reason[:40]
        (False, 'topk = 1: each prefix has one reader, so')
    """

    cascade: bool
    plan: Plan
    reason: str
    predictions: Mapping[Plan, Prediction]


def should_cascade(
    batch: VerifyBatch,
    device_model: DeviceModel,
    *,
    num_q_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    launches: Mapping[str, int] | None = None,
) -> Decision:
    """Decide for one batch on one device, from lengths alone: no page table is built and no tensor is read.

    Args:
        batch: what is to be verified.
        device_model: one of `DEVICES`, or what `calibrate` returns.
        num_q_heads, num_kv_heads, head_dim: of one layer on one device, those of an 8-billion Llama 3 by default;
            head_dim_v defaults to head_dim.
        dtype: of the cache.
        launches: launches per plan of another implementation; those of this package by default.

    Returns:
        Decision. With one branch per request and no prefix shared by requests it is never a cascade: the prefix has
        one reader, so one causal call loads the same bytes and needs no merge.

    Raises:
        ValueError: head counts that do not divide, a head dim below 1, or launches of an unknown plan.
        TypeError: another batch or device model than a `VerifyBatch` and a `DeviceModel`, or numbers that are no
            integers.

    Example:
        >>> batch = cl.VerifyBatch([8000] * 32, [cl.DraftTree.branches(4, 5)] * 32, rows="branch")
        >>> decision = cl.should_cascade(batch, cl.trigger.H100)
        >>> decision.cascade, decision.predictions["cascade"].seconds < decision.predictions["naive"].seconds
        (True, True)
    """
    if not isinstance(batch, VerifyBatch):
        raise TypeError(f"batch: expected a VerifyBatch, given {_checks.shown(batch)}")
    _check_device(device_model)
    shape = _Shape.of(batch)
    heads = _Heads.check(num_q_heads, num_kv_heads, head_dim, head_dim_v, dtype)
    predictions = _predict(shape, device_model, heads, launches)
    naive, cascade, fused = (predictions[plan] for plan in PLANS)
    if shape.num_rows == 0:
        return Decision(False, "fused", "no query rows, nothing to read", predictions)
    if shape.shared == 0 and all(tree is None or len(tree.leaves) == 1 for tree in batch.trees):
        plan = min((fused, naive), key=lambda p: p.seconds).plan
        reason = (
            f"topk = 1: each prefix has one reader, so one causal call loads the {_size(fused.bytes)} that a cascade "
            f"would, with {_count(fused.launches, 'launch')} instead of {cascade.launches} and no second "
            f"level to merge; predicted fastest is the {plan} plan ({_micros(predictions[plan].seconds)})"
        )
        return Decision(False, plan, reason, predictions)
    best = min(predictions.values(), key=lambda p: p.seconds)
    pays = cascade.seconds < naive.seconds
    reason = (
        f"on {device_model.name} the cascade is predicted {naive.seconds / cascade.seconds:.2f}x as fast as the naive "
        f"expansion ({_micros(cascade.seconds)} against {_micros(naive.seconds)}): it loads {_size(cascade.bytes)} of "
        f"KV instead of {_size(naive.bytes)}, of which {_size(naive.compulsory_bytes)} are compulsory, in "
        f"{_count(cascade.launches, 'launch')} instead of {naive.launches}; the fused plan would take "
        f"{_micros(fused.seconds)}"
    )
    return Decision(pays, best.plan, reason, predictions)


def break_even_prefix(
    topk: int,
    steps: int,
    batch: int,
    *,
    device_model: DeviceModel,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rows: Rows = "branch",
    plan: Literal["cascade", "fused"] = "cascade",
    launches: Mapping[str, int] | None = None,
    max_prefix: int = 1 << 20,
) -> int | None:
    """Smallest prefix length at which `plan` is predicted faster than the naive expansion, or None up to max_prefix.

    Args:
        topk, steps: disjoint branches per request, and tokens of each.
        batch: requests, each with a prefix of its own.
        rows: "branch", "leaf" or "node", as in `VerifyBatch`.
        plan: "cascade" or "fused".
        device_model and the other arguments: as in `should_cascade`.

    Lengths are doubled until the plan wins, then bisected; KV splits make times jump, so a plan may lose again shortly
    above. With topk = 1 the answer is None: there is nothing to share.

    Raises:
        TypeError, ValueError: numbers that are no integers in range, an unknown plan, or as `should_cascade`.

    Example:
        >>> case = dict(steps=5, batch=32, device_model=cl.trigger.H100, num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> two, eight = cl.trigger.break_even_prefix(2, **case), cl.trigger.break_even_prefix(8, **case)
        >>> eight < two, cl.trigger.break_even_prefix(1, **case)  # one branch has nothing to share
        (True, None)
    """
    topk, steps = _checks.integer("topk", topk, 1), _checks.integer("steps", steps, 1)
    batch = _checks.integer("batch", batch, 1)
    max_prefix = _checks.integer("max_prefix", max_prefix, 0)
    _check_device(device_model)
    if rows not in ROWS:
        raise ValueError(f"rows: expected one of {ROWS}, given {rows!r}")
    if plan not in ("cascade", "fused"):
        raise ValueError(f"plan: expected 'cascade' or 'fused', given {plan!r}")
    heads = _Heads.check(num_q_heads, num_kv_heads, head_dim, head_dim_v, dtype)
    if topk == 1:
        return None

    def wins(length: int) -> bool:
        predictions = _predict(_Shape.branches(length, topk, steps, batch, rows), device_model, heads, launches)
        return predictions[plan].seconds < predictions["naive"].seconds

    if wins(0):
        return 0
    low, high = 0, 1
    while not wins(high):
        if high >= max_prefix:
            return None
        low, high = high, min(2 * high, max_prefix)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def predict_branches(
    prefix_len: int,
    topk: int,
    steps: int,
    batch: int,
    *,
    device_model: DeviceModel,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rows: Rows = "branch",
    launches: Mapping[str, int] | None = None,
) -> dict[Plan, Prediction]:
    """The predictions of `should_cascade` for equal requests of disjoint branches, however many: no tree is built.

    Args:
        prefix_len: tokens of each request's own prefix.
        topk, steps, batch, rows: as in `break_even_prefix`.
        device_model and the other arguments: as in `should_cascade`.

    Returns:
        A Prediction per plan.

    Raises:
        TypeError, ValueError: a negative prefix, no branch, step or request, other rows, or as in `should_cascade`.

    Example:
        >>> heads = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> plans = cl.trigger.predict_branches(2000, 4, 5, 1, device_model=cl.trigger.H100, **heads)
        >>> sorted(plans), plans["naive"].bytes / plans["cascade"].bytes == 8020 / 2020
        (['cascade', 'fused', 'naive'], True)
    """
    prefix_len, topk = _checks.integer("prefix_len", prefix_len, 0), _checks.integer("topk", topk, 1)
    steps, batch = _checks.integer("steps", steps, 1), _checks.integer("batch", batch, 1)
    _check_device(device_model)
    if rows not in ROWS:
        raise ValueError(f"rows: expected one of {ROWS}, given {rows!r}")
    heads = _Heads.check(num_q_heads, num_kv_heads, head_dim, head_dim_v, dtype)
    return _predict(_Shape.branches(prefix_len, topk, steps, batch, rows), device_model, heads, launches)


def _check_device(device_model: DeviceModel) -> None:
    if not isinstance(device_model, DeviceModel):
        named = [device_model] if device_model in list(DEVICES) else list(DEVICES)
        raise TypeError(
            f"device_model: expected a DeviceModel such as trigger.{' or trigger.'.join(named)}, "
            f"given {_checks.shown(device_model)}"
        )


@dataclass(frozen=True)
class _Heads:
    """One layer's heads: query heads per KV head, KV heads, head dims and bytes per element."""

    group: int
    num_kv: int
    dim: int
    dim_v: int
    itemsize: int

    @classmethod
    def check(cls, num_q_heads: int, num_kv_heads: int, head_dim: int, head_dim_v: int | None, dtype) -> _Heads:
        num_q_heads, num_kv_heads = _checks.heads(num_q_heads, num_kv_heads)
        head_dim = _checks.integer("head_dim", head_dim, 1, MAX_HEAD_DIM)
        head_dim_v = head_dim if head_dim_v is None else _checks.integer("head_dim_v", head_dim_v, 1, MAX_HEAD_DIM)
        return cls(
            num_q_heads // num_kv_heads, num_kv_heads, head_dim, head_dim_v, _checks.dtype("dtype", dtype).itemsize
        )

    @property
    def token_bytes(self) -> int:
        return self.num_kv * (self.dim + self.dim_v) * self.itemsize


@dataclass(frozen=True)
class _Pass:
    """One level: rows and keys of its requests, and how many distinct tokens they read."""

    shape: PassShape
    unique: int


@dataclass(frozen=True)
class _Shape:
    """Lengths of the requests that have rows: prefix, nodes and rows; tokens shared by all of them.

    Of the virtual requests that they are expanded into: the place of its request among these, its rows, its path; and
    whether its rows are causal.
    """

    prefix: np.ndarray
    nodes: np.ndarray
    rows: np.ndarray
    shared: int
    request: np.ndarray
    virtual_rows: np.ndarray
    paths: np.ndarray
    causal: bool

    @classmethod
    def of(cls, batch: VerifyBatch) -> _Shape:
        rows = np.asarray(batch.row_counts, np.int64)
        prefix = np.asarray(batch.prefix_lens, np.int64)
        nodes = np.asarray([0 if tree is None else tree.size for tree in batch.trees], np.int64)
        active = rows > 0
        request, virtual_rows, paths = (x.numpy() for x in batch.virtual_requests)
        request = (active.cumsum() - 1)[request]
        lengths = prefix[active], nodes[active], rows[active], batch.shared_prefix_len
        return cls(*lengths, request, virtual_rows, paths, batch.rows == "branch")

    @classmethod
    def branches(cls, length: int, topk: int, steps: int, batch: int, rows: Rows) -> _Shape:
        """`batch` requests of topk disjoint branches of as many steps."""
        path = np.tile(np.arange(1, steps + 1), topk) if rows == "node" else np.full(topk, steps)
        own = path if rows == "branch" else np.ones_like(path)
        ones = np.ones(batch, np.int64)
        request = np.repeat(np.arange(batch), len(path))
        lengths = length * ones, topk * steps * ones, own.sum() * ones, 0
        return cls(*lengths, request, np.tile(own, batch), np.tile(path, batch), rows == "branch")

    @property
    def num_rows(self) -> int:
        return int(self.rows.sum())

    def passes(self, plan: Plan) -> tuple[_Pass, ...]:
        """The levels that `VerifyBatch.levels` would build, without their page tables."""
        drafts = int(self.nodes.sum())
        own = self.prefix - self.shared
        everything = (self.shared if self.num_rows else 0) + int(own.sum()) + drafts
        if plan == "naive":
            keys = self.prefix[self.request] + self.paths
            return (_Pass(PassShape(self.virtual_rows, keys, self.causal), everything),)
        if plan == "fused":
            return (_Pass(PassShape(self.rows, self.prefix + self.nodes, False), everything),)
        levels = (
            _Pass(PassShape(self.rows, own, False), int(own.sum())),
            _Pass(PassShape(self.virtual_rows, self.paths, self.causal), drafts),
        )
        if self.shared == 0:
            return levels
        together = PassShape(np.asarray([self.num_rows]), np.asarray([self.shared]), False)
        return (_Pass(together, self.shared), *levels)


def _predict(
    shape: _Shape, device: DeviceModel, heads: _Heads, launches: Mapping[str, int] | None
) -> dict[Plan, Prediction]:
    if launches is not None and not isinstance(launches, Mapping):
        raise TypeError(f"launches: expected a mapping from plans to numbers, given {_checks.shown(launches)}")
    unknown = set(launches or {}) - set(PLANS)
    if unknown:
        raise ValueError(f"launches: expected plans of {PLANS}, given {sorted(unknown)}")
    launches = {plan: _checks.integer(f"launches[{plan!r}]", n, 0) for plan, n in (launches or {}).items()}
    return {plan: _predict_plan(shape, plan, device, heads, launches.get(plan)) for plan in PLANS}


def _predict_plan(shape: _Shape, plan: Plan, device: DeviceModel, heads: _Heads, launches: int | None) -> Prediction:
    passes = shape.passes(plan) if shape.num_rows else ()
    state_rows = shape.num_rows * heads.group * heads.num_kv
    query_bytes = state_rows * heads.dim * heads.itemsize
    terms = dict.fromkeys(("launch", "memory", "reread", "compute", "merge"), 0.0)
    loaded = unique = flops = parts = 0
    for one in passes:
        rows, keys = one.shape.rows, one.shape.keys
        tile = tile_for(int(rows.max()) * heads.group, max(heads.dim, heads.dim_v), torch.bfloat16)
        tiles = -(-rows * heads.group // tile.block_m)
        programs = int(tiles.sum()) * heads.num_kv
        splits = splits_for(
            programs,
            rows=int(rows.max()) * heads.group,
            max_keys=int(keys.max()),
            kv_width=(heads.dim + heads.dim_v) * heads.itemsize,
            out_width=heads.dim_v * 4,
            tile=tile,
            num_sms=device.num_sms,
        )
        busy = min(1.0, programs * splits / device.num_sms)
        tokens = one.shape.tile_tokens(tile.block_m, heads.group)
        first, again = one.unique * heads.token_bytes, (tokens - one.unique) * heads.token_bytes
        work = tokens * tile.block_m * heads.num_kv * 2 * (heads.dim + heads.dim_v)
        memory = (first + query_bytes) / device.bandwidth / busy
        reread = again / _reread_bandwidth(tokens, one.unique, first, device) / busy
        terms["memory"] += memory
        terms["reread"] += reread
        terms["compute"] += max(0.0, work / device.matmul_rate / busy - memory - reread)
        loaded, unique, flops, parts = loaded + tokens, unique + one.unique, flops + work, parts + splits
    terms["memory"] += state_rows * heads.dim_v * heads.itemsize / device.bandwidth
    if parts > 1:
        terms["merge"] = 2 * parts * state_rows * (heads.dim_v + 1) * 4 / device.bandwidth
    count = len(passes) + (parts > 1) if launches is None else launches
    terms["launch"] = count * device.launch
    return Prediction(
        plan,
        loaded * heads.token_bytes,
        unique * heads.token_bytes,
        (loaded - unique) * heads.token_bytes,
        count,
        flops,
        math.fsum(terms.values()),
        terms,
    )


def _reread_bandwidth(tokens: int, unique: int, unique_bytes: int, device: DeviceModel) -> float:
    """Rate of repeated reads. They hit the cache when all of a pass fits in it, or when its readers run in step.

    Readers of one prefix are neighbours in the launch grid. As long as they are no more than the multiprocessors they
    run at the same time and follow each other through the keys, so what has to stay in the cache is the distance
    between them and not the prefix.
    """
    readers = tokens / max(unique, 1)
    in_step = readers <= device.num_sms
    return device.l2_bandwidth if in_step or unique_bytes <= device.l2_bytes else device.bandwidth


def calibrate(
    device: torch.device | str = "cpu",
    *,
    large_bytes: int | None = None,
    small_bytes: int | None = None,
    l2_bytes: int | None = None,
    matmul_size: int | None = None,
    dtype: torch.dtype | None = None,
    repeats: int = 7,
) -> DeviceModel:
    """A `DeviceModel` measured on this machine in a few seconds: medians of `repeats` timings after a warm-up.

    Args:
        device: CPU or CUDA.
        large_bytes: of the tensor whose copy gives the bandwidth, far beyond any cache; 1 GiB on CUDA, 256 MiB on CPU.
        small_bytes: of the tensor whose copy gives the cache's; 8 MiB on CUDA, 1 MiB on CPU.
        l2_bytes: size of the cache; as the driver reports it on CUDA, else 16 MiB, an assumption.
        matmul_size: side of the square product that gives the rate; 8192 on CUDA, 512 on CPU.
        dtype: of the product; bfloat16 on CUDA, float32 on CPU.
        repeats: timings of each, at least 1.

    A copy reads and writes, so both count. On a CPU the per-call cost is that of a small torch operation, and num_sms
    is the number of torch's threads.

    Raises:
        TypeError, ValueError: sizes or repeats that are no integers >= 1, or another device.

    Example:
        >>> small = dict(large_bytes=1 << 20, small_bytes=1 << 14, matmul_size=32, repeats=1)  # without it, to measure
        >>> device = cl.trigger.calibrate("cpu", **small)
        >>> device.name, device.num_sms == torch.get_num_threads(), device.bandwidth > 0
        ('CPU', True, True)
    """
    sizes = dict(large_bytes=large_bytes, small_bytes=small_bytes, l2_bytes=l2_bytes, matmul_size=matmul_size)
    given = (None if n is None else _checks.integer(name, n, 1) for name, n in sizes.items())
    large_bytes, small_bytes, l2_bytes, matmul_size = given
    repeats = _checks.integer("repeats", repeats, 1)
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, given {device}")
    large_bytes = large_bytes or (1 << 30 if on_gpu else 256 * _MiB)
    small_bytes = small_bytes or (8 * _MiB if on_gpu else _MiB)
    matmul_size = matmul_size or (8192 if on_gpu else 512)
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    if on_gpu:
        properties = torch.cuda.get_device_properties(device)
        name, num_sms = properties.name, properties.multi_processor_count
        cache = "driver" if l2_bytes is None else "argument"
        l2_bytes = l2_bytes or properties.L2_cache_size
    else:
        name, num_sms = "CPU", torch.get_num_threads()
        cache = "assumption" if l2_bytes is None else "argument"
        l2_bytes = l2_bytes or 16 * _MiB

    def seconds(run: Callable[[], object], calls: int) -> float:
        def once() -> float:
            if on_gpu:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                run()
            if on_gpu:
                torch.cuda.synchronize(device)
            return (time.perf_counter() - start) / calls

        once()
        return median(once() for _ in range(repeats))

    one = torch.zeros(1, device=device)
    launch = seconds(lambda: one.add_(1.0), 200)

    def copy_rate(size: int, calls: int) -> float:
        # written, for the pages of untouched zeros are one page
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        # the cost of a call is counted by itself, and must not pass for bytes; half the time bounds its share
        elapsed = seconds(lambda: target.copy_(source), calls)
        return 2 * size / max(elapsed - launch, elapsed / 2)

    bandwidth = copy_rate(large_bytes, 2)
    l2_bandwidth = max(bandwidth, copy_rate(small_bytes, 50))
    a = torch.ones(matmul_size, matmul_size, dtype=dtype, device=device)
    rate = 2 * matmul_size**3 / seconds(lambda: a @ a, 3)
    source = (
        f"measured with torch {torch.__version__}: copies of {large_bytes // _MiB} MiB and {small_bytes // 1024} KiB, "
        f"one-element additions, a {matmul_size} x {matmul_size} {str(dtype).removeprefix('torch.')} product; "
        f"cache size: {cache}"
    )
    return DeviceModel(name, bandwidth, l2_bandwidth, l2_bytes, launch, rate, num_sms, source)


def _size(n: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n} bytes"


def _micros(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "es")
