"""Kernels on a GPU against its own limits and against other kernels, in one command and a bounded time.

The limits are measured first, on the same card: the rate of a copy and of a matrix product. Then every time is a share
of one of them: a verify pass moves at least `bytes = tokens x KV heads x (D + D_v) x itemsize` and its bandwidth is
bytes / time; a prefill computes `4 D pairs` operations per query head. A wrong answer stops the run, a missing peer
does not, and what the time did not suffice for is listed. Results are on disk after each section; `gpu_report` judges
them.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from cascade_lab import runtime
from cascade_lab.attention import attention
from cascade_lab.bench import peers as others
from cascade_lab.bench.clock import Clock, clock
from cascade_lab.bench.report import FAILS, bounds, break_even_rows, print_summary
from cascade_lab.drafts import DraftTree, VerifyBatch
from cascade_lab.evidence import checks
from cascade_lab.files import put_in_place
from cascade_lab.levels import Ledger, Level, cascade_attention, ledger
from cascade_lab.prefix import executed_tiles, interactions, prefix_hit_levels, remaining
from cascade_lab.states import State, merge_state, merge_states

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
# o relative to its largest element, in bfloat16; lse in absolute terms
O_TOLERANCE, LSE_TOLERANCE = 2e-2, 1e-3
DTYPE = torch.bfloat16
# no more than this part of the free memory for caches
MEMORY_SHARE = 0.4
WARM_REPEATS = 50


class WrongAnswer(AssertionError):
    """A kernel of this package disagrees with the reference: nothing after it would be worth timing."""


@dataclass(frozen=True)
class Scale:
    """Sizes of one run: what the sections measure, and in how many seconds all of them together."""

    budget_s: float
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


FULL = Scale(budget_s=380)
QUICK = Scale(
    budget_s=100,
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
)
SMOKE = Scale(
    budget_s=30,
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
)


@dataclass
class Run:
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
                _progress(", ".join(f"{name} {value}" for name, value in point.items()))
                yield point

    def random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=DTYPE, device=self.clock.device).normal_()


def run(scale: Scale, output: Path | None, *, quick: bool, smoke: bool, max_autotune: bool) -> int:
    """Check, measure, print, and write one JSON file.

    Args:
        scale: sizes and time budget.
        output: file to write; by default named after the device, under figures/measured/.
        quick, smoke: for the record, and for which checks run first.
        max_autotune: let FlexAttention be tuned, which takes minutes.

    Returns:
        0 when all answers are right and no bound is missed, else 1.
    """
    torch.manual_seed(0)
    bench = Run(clock(), scale, max_autotune)
    slug = "_".join(bench.clock.name.lower().split())
    output = output or Path("build/bench_smoke.json" if smoke else f"figures/measured/gpu_{slug}.json")
    record: dict[str, object] = {
        "provenance": runtime.provenance()
        | {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": _commit(),
            "multiprocessors": str(bench.clock.num_sms),
            "L2 bytes": str(bench.clock.l2_bytes),
        },
        "settings": {"quick": quick, "smoke": smoke, "max_autotune": max_autotune, "budget_s": scale.budget_s},
        "scale": asdict(scale),
        "timings": _meaning(bench.clock, smoke),
        "complete": False,
        "sections": {},
    }
    print(f"device: {bench.clock.name}; {record['timings']}; results go to {output.as_posix()}", flush=True)
    wrong = _check(record, smoke, quick)
    _write(output, record)
    if wrong:
        print(f"stopped: {wrong}")
        return 1
    try:
        with torch.no_grad():
            _measure(bench, record, output)
    except WrongAnswer as error:
        record["stopped"] = str(error)
        print(f"stopped at a wrong answer: {error}")
        return 1
    except BaseException as error:
        record["stopped"] = repr(error)
        raise
    finally:
        _write(output, record)
    record["complete"] = True
    record["break_even"] = {plan: break_even_rows(record, plan) for plan in ("cascade", "fused")}
    record["bounds"] = bounds(record) if bench.clock.meaningful and not smoke else []
    _write(output, record)
    print_summary(record)
    print(f"written to {output.as_posix()}")
    return 1 if any(bound["verdict"] == FAILS for bound in record["bounds"]) else 0


def _meaning(clock: Clock, smoke: bool) -> str:
    if not clock.meaningful:
        return "not meaningful: no GPU, kernels interpreted"
    return "not meaningful: tiny sizes" if smoke else "device events"


def _check(record: dict, smoke: bool, quick: bool) -> str | None:
    """Run the correctness checks into the record; what is wrong first, or None."""
    start = time.monotonic()
    todo = checks.checks(small=smoke) if not quick else checks.checks(dtypes=("bfloat16",), small=smoke)
    done: list[str] = []
    wrong = None
    for check, problem in checks.run_all(todo):
        _progress(f"checking {len(done) + 1} of {len(todo)}: {check}")
        if problem is not None:
            wrong = f"{check}: {problem}"
            break
        done.append(str(check))
    if wrong is None and not smoke:
        wrong = checks.run_marked_tests(PACKAGE_ROOT / "tests")
    record["checks"] = {"passed": sorted(done), "wrong": wrong, "seconds": time.monotonic() - start}
    _progress("")
    print(f"checks: {len(done)} of {len(todo)} right, {time.monotonic() - start:.0f} s", flush=True)
    return wrong


def _measure(bench: Run, record: dict, output: Path) -> None:
    """All sections in turn. A section may use its share of what is left, and leaves what it does not need to others."""
    end = time.monotonic() + bench.scale.budget_s
    shares = {name: share for name, (share, _) in SECTIONS.items()}
    for name, (share, section) in SECTIONS.items():
        start = time.monotonic()
        bench.deadline = start + (end - start) * share / sum(shares.values())
        del shares[name]
        bench.skipped = []
        rows: list[dict] = []
        record["sections"][name] = {"rows": rows, "skipped": bench.skipped}
        for row in section(bench):
            rows.append(row)
        bench.clock.release()
        record["sections"][name]["seconds"] = time.monotonic() - start
        _write(output, record)
        _progress("")
        print(f"{name}: {len(rows)} rows, {len(bench.skipped)} skipped, {time.monotonic() - start:.0f} s", flush=True)


def ceilings(bench: Run) -> Iterator[dict]:
    """(a) What the card can do: copy and read rates beyond and within the L2, and a matrix product."""
    scale, device = bench.scale, bench.clock.device
    rates = {}
    for name, size, times in (("memory", scale.copy_bytes, 1), ("L2", scale.small_copy_bytes, WARM_REPEATS)):
        source = torch.empty(size // 2, dtype=DTYPE, device=device).normal_()
        target, wide, total = torch.empty_like(source), source.view(torch.float32), torch.zeros((), device=device)
        calls = {
            "copy": (2, partial(target.copy_, source)),
            "read": (1, partial(torch.sum, wide, dim=0, out=total)),
        }
        for what, (passes, once) in calls.items():
            # only the first of many finds a cold cache
            timing = bench.clock.measure(lambda once=once, times=times: [once() for _ in range(times)])
            moved = passes * size * times
            rates[f"{what} {name}"] = moved / timing.seconds
            yield {"what": f"{what} {name}", "bytes": moved, "bytes_per_s": moved / timing.seconds} | asdict(timing)
    for side in scale.matmul_sides:
        a, b = bench.random(side, side), bench.random(side, side)
        out = torch.empty_like(a)
        timing = bench.clock.measure(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), seconds=0.3)
        flops = 2 * side**3
        rates["matmul"] = max(rates.get("matmul", 0.0), flops / timing.seconds)
        yield {"what": f"matmul {side}", "flops": flops, "flops_per_s": flops / timing.seconds} | asdict(timing)
    one = torch.zeros(1, device=device)
    yield {"what": "one-element addition"} | asdict(bench.clock.measure(lambda: one.add_(1.0)))
    bench.copy_rate, bench.matmul_rate = rates["copy memory"], rates["matmul"]


@dataclass(frozen=True)
class Verify:
    """One verify batch on the pool's tensors, with its plans."""

    batch: VerifyBatch
    q: Tensor
    k: Tensor
    v: Tensor
    plans: dict[str, Sequence[Level]]


def verify(bench: Run) -> Iterator[dict]:
    """(b) The three plans over prefix length, topk, batch, group and kind of rows."""
    scale = bench.scale
    points = _verify_points(scale)
    pool = _Pool(bench, max(_tokens(scale, **point) for point in points))
    for point in bench.visit(points):
        if _tokens(scale, **point) > pool.tokens:
            bench.skipped.append(point | {"why": "memory"})
            continue
        work = pool.verify(**point)
        yield point | {"steps": scale.steps, "plans": _time_plans(bench, work)}


def _verify_points(scale: Scale) -> list[dict]:
    """The grid, the sweeps through its crossing first, then what differs from it along more and more axes."""
    axes = (scale.lengths, scale.topks, scale.batches, scale.groups, ("branch", "node"))
    names = ("length", "topk", "batch", "group", "rows")
    points = sorted(
        itertools.product(*axes), key=lambda point: sum(x != y for x, y in zip(point, scale.centre, strict=True))
    )
    return [dict(zip(names, point, strict=True)) for point in points]


def _tokens(scale: Scale, length: int, topk: int, batch: int, group: int, rows: str) -> int:
    """Slots that a point needs: prefix and drafts in whole pages, and the naive plan's own pages per row."""
    nodes = topk * scale.steps
    own_pages = (nodes if rows == "node" else topk) * -(-scale.steps // scale.page)
    return batch * scale.page * (-(-(length + nodes) // scale.page) + own_pages)


class _Pool:
    """One pair of random caches for all points of a section: pages are dealt anew for each, in random order.

    A folded pool is a few pages that stand for any number, for launches whose answer nobody looks at.
    """

    def __init__(self, bench: Run, tokens: int, *, folded: bool = False):
        scale = bench.scale
        self.bench, self.folded = bench, folded
        per_token = 2 * scale.num_kv_heads * scale.head_dim * DTYPE.itemsize
        most = int(MEMORY_SHARE * bench.clock.free_bytes()) // per_token
        self.tokens = min(-(-tokens // scale.coarse_page), most // scale.coarse_page) * scale.coarse_page
        shape = (self.tokens // scale.page, scale.page, scale.num_kv_heads, scale.head_dim)
        self.k, self.v = bench.random(*shape), bench.random(*shape)

    def verify(self, length: int, topk: int, batch: int, group: int, rows: str) -> Verify:
        scale, device = self.bench.scale, self.bench.clock.device
        pages = -(-(length + topk * scale.steps) // scale.page)
        table = torch.randperm(batch * pages).view(batch, pages).int()
        trees = [DraftTree.branches(topk, scale.steps)] * batch
        work = VerifyBatch([length] * batch, trees, scale.page, rows, page_table=table, device=device)
        naive = work.copied_tails("naive")
        q = self.bench.random(work.num_rows, group * scale.num_kv_heads, scale.head_dim)
        plans = {"naive": naive.levels, "cascade": work.levels("cascade"), "fused": work.levels("fused")}
        if self.folded:
            plans = {plan: [_folded(level, self.tokens) for level in levels] for plan, levels in plans.items()}
        else:
            self.copy(naive.src, naive.dst)
        return Verify(work, q, self.k, self.v, plans)

    def copy(self, src: Tensor, dst: Tensor) -> None:
        for cache in (self.k, self.v):
            flat = cache.view(-1, *cache.shape[2:])
            flat[dst] = flat[src]


def _folded(level: Level, tokens: int) -> Level:
    """The level with its pages wrapped into a cache of `tokens`: the same launch, other addresses."""
    return replace(level, page_table=level.page_table.clamp(min=0) % (tokens // level.page_size))


def compile_ahead(bench: Run) -> Iterator[dict]:
    """Launch every plan of the grids once in worker processes, whose compiled kernels this process finds on disk.

    Points that differ in lengths and batch share most kernels, so one worker takes them together.
    """
    tasks: dict[tuple, list[dict]] = {}
    for point in _verify_points(bench.scale):
        tasks.setdefault((point["topk"], point["group"], point["rows"]), []).append(point)
    for point in _prefill_points(bench.scale):
        tasks.setdefault((point["new"],), []).append(point)
    parts = [points[i::4] for points in tasks.values() for i in range(min(4, len(points)))]
    if runtime.triton_mode() != "compiled":
        yield {"tasks": 1, "done": 1, "plans": launch_once(bench.scale, parts[0][:1]), "failed": []}
        return
    plans, failed = [], []
    with ProcessPoolExecutor(checks.workers(), mp_context=get_context("spawn")) as pool:
        running = [pool.submit(launch_once, bench.scale, part, bench.deadline) for part in parts]
        try:
            for done in as_completed(running, timeout=max(0.0, bench.deadline - time.monotonic())):
                # what fails here fails again where it is timed, and stops the run there
                error = done.exception()
                (failed if error else plans).append(repr(error) if error else done.result())
                _progress(f"compiling, {len(plans)} of {len(parts)}")
        except TimeoutError:
            pool.shutdown(cancel_futures=True)
    yield {"tasks": len(parts), "done": len(plans), "plans": sum(plans), "failed": failed}


def launch_once(scale: Scale, points: Sequence[dict], deadline: float = math.inf) -> int:
    """Launch the plans of verify or prefill points on a few pages until the deadline, and return how many."""
    bench = Run(clock(), scale)
    launched = 0
    with torch.no_grad():
        pool = _Pool(bench, 16 * scale.coarse_page, folded=True)
        for point in points:
            if time.monotonic() >= deadline:
                break
            if "topk" in point:
                work = pool.verify(**point)
                plans = [(work.q, levels) for levels in work.plans.values()]
            else:
                m, hit = point.values()
                group = scale.centre[3]
                table = torch.arange(-(-(m + hit) // scale.page), dtype=torch.int32, device=bench.clock.device)
                levels = prefix_hit_levels([m + hit], [hit], scale.page, page_table=table[None])
                q = bench.random(m, group * scale.num_kv_heads, scale.head_dim)
                plans = [(q, [_folded(level, pool.tokens) for level in levels])]
            for q, levels in plans:
                planned(q, pool.k, pool.v, levels)()
                launched += 1
        bench.clock.wait()
    return launched


def _time_plans(bench: Run, work: Verify) -> dict[str, dict]:
    """Every plan's answer held against float64, its time, what it must move, and its ratio to the naive plan."""
    q, k = work.q, work.k
    heads = dict(num_q_heads=q.shape[1], num_kv_heads=k.shape[2])
    reference = _reference(work)
    token_bytes = 2 * k.shape[2] * k.shape[3] * k.element_size()
    other_bytes = 2 * q.numel() * q.element_size() + q.shape[0] * q.shape[1] * 4
    ledgers = {plan: ledger(levels, **heads) for plan, levels in work.plans.items()}
    # copied pages are the naive plan's own: what any plan must load is what the shared pages hold
    compulsory = ledgers["fused"].kv_tokens_unique
    found, first = {}, None
    for plan, levels in work.plans.items():
        call = planned(q, work.k, work.v, levels)
        state = call()
        errors = _hold(state, reference, plan)
        first = state if first is None else first
        _agree(state, first, plan)
        timing = bench.clock.measure(call)
        must_move = compulsory * token_bytes + other_bytes
        row = asdict(timing) | errors
        row |= {
            "kv_tokens": ledgers[plan].kv_tokens,
            "kv_tokens_loaded": sum(_loaded(*x, q) for x in zip(ledgers[plan].levels, levels, strict=True)),
            "bytes_must_move": must_move,
            "bytes_per_s": must_move / timing.seconds,
            "share_of_copy": must_move / timing.seconds / bench.copy_rate,
        }
        found[plan] = row
    for row in found.values():
        row["ratio_measured"] = found["naive"]["seconds"] / row["seconds"]
        row["ratio_predicted"] = found["naive"]["kv_tokens"] / row["kv_tokens"]
        row["ratio_loaded"] = found["naive"]["kv_tokens_loaded"] / row["kv_tokens_loaded"]
    return found


def planned(q: Tensor, k_cache: Tensor, v_cache: Tensor, levels: Sequence[Level]) -> Callable[[], State]:
    """A plan that is only launched, its values trusted, as an engine does: safe to capture into a CUDA graph."""

    def call() -> State:
        with runtime.unchecked():
            return cascade_attention(q, k_cache, v_cache, levels, backend="triton")

    return call


def _loaded(part: Ledger, level: Level, q: Tensor) -> int:
    """Tokens per KV head that the launch of one level loads, its row tiles counted."""
    rows = int(torch.diff(level.cu_seqlens_q).max())
    tile = checks.launch_tile(rows * part.num_q_heads // part.num_kv_heads, q.shape[2], q.dtype)
    return part.tile_tokens(tile.block_m)


def _reference(work: Verify) -> tuple[int, Tensor, Tensor]:
    """One random row of the batch in float64, from parent links and slots alone: (row, o [H_q, D], lse [H_q])."""
    batch, q = work.batch, work.q
    row = int(torch.randint(batch.num_rows, ()))
    request, i = next((r, row - n) for r, n, m in _spans(batch.row_counts) if n <= row < n + m)
    tree = batch.trees[request]
    node = tree.leaves[i] if batch.rows == "branch" else i
    path = torch.tensor([*tree.ancestors(node), node], device=q.device)
    slots = torch.cat((batch.prefix_slots(request), batch.draft_slots(request)[path]))
    k, v = (x.view(-1, *x.shape[2:])[slots] for x in (work.k, work.v))
    return row, *_row_in_float64(q[row], k, v)


def _row_in_float64(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """o [H_q, D] and lse [H_q] of one row over k, v [n, H_kv, D]."""
    k, v = k.double(), v.double()
    scores = torch.einsum("hgd,nhd->hgn", q.double().view(k.shape[1], -1, k.shape[2]), k) * k.shape[2] ** -0.5
    o = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v)
    return o.flatten(0, 1), scores.logsumexp(-1).flatten()


def _spans(counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    start = 0
    for r, count in enumerate(counts):
        yield r, start, count
        start += count


def _hold(state: State, reference: tuple[int, Tensor, Tensor], what: str) -> dict[str, float]:
    row, o, lse = reference
    o_error = float((state.o[row].double() - o).abs().max() / o.abs().max())
    lse_error = float((state.lse[row].double() - lse).abs().max())
    if not (o_error <= O_TOLERANCE and lse_error <= LSE_TOLERANCE):
        raise WrongAnswer(f"{what}: row {row} differs from float64 by {o_error:.2e} in o, {lse_error:.2e} in lse")
    return {"o_error": o_error, "lse_error": lse_error}


def _agree(state: State, other: State, what: str) -> None:
    o_error = float((state.o.float() - other.o.float()).abs().max() / other.o.float().abs().max())
    lse_error = float((state.lse - other.lse).abs().max())
    if not (o_error <= 2 * O_TOLERANCE and lse_error <= LSE_TOLERANCE):
        raise WrongAnswer(f"{what}: differs from the first plan by {o_error:.2e} in o, {lse_error:.2e} in lse")


def peers(bench: Run) -> Iterator[dict]:
    """(c) The same work by other kernels, on the same numbers in the layout each likes best, answers compared."""
    scale = bench.scale
    _, topk, _, group, _ = scale.centre
    shapes = [
        {"length": length, "topk": topk, "batch": batch, "group": group, "rows": rows}
        for rows in ("branch", "node")
        for batch in scale.peer_batches
        for length in scale.peer_lengths
    ]
    pool = _Pool(bench, max(_tokens(scale, **shape) + _coarse_tokens(scale, **shape) for shape in shapes))
    for shape in bench.visit(shapes):
        if _tokens(scale, **shape) + _coarse_tokens(scale, **shape) > pool.tokens:
            bench.skipped.append(shape | {"why": "memory"})
            continue
        yield from _peers_of(bench, pool, shape)
    for n in scale.prompts[:2]:
        for shape in bench.visit([{"prompt": n, "hit": 0, "group": group}]):
            work = _prefill(bench, n, 0, group)
            ours = planned(work.q, work.k, work.v, work.levels)
            yield shape | {"kernel": "cascade_lab prefill"} | asdict(bench.clock.measure(ours))
            make = partial(others.sdpa_causal, work.q, work.k, work.v, work.levels[0])
            yield shape | _peer_row(bench, "sdpa_causal", make, ours())


def _coarse_tokens(scale: Scale, length: int, topk: int, batch: int, group: int, rows: str) -> int:
    nodes = topk * scale.steps
    own_pages = (nodes if rows == "node" else topk) * -(-scale.steps // scale.coarse_page)
    return batch * scale.coarse_page * (1 + -(-(length + nodes) // scale.coarse_page) + own_pages)


def _peers_of(bench: Run, pool: _Pool, shape: dict) -> Iterator[dict]:
    """Our plans and every peer on one batch, whose pages are coarse for the kernels that take no small ones."""
    scale, device = bench.scale, bench.clock.device
    length, topk, batch, group, rows = shape.values()
    trees = [DraftTree.branches(topk, scale.steps)] * batch
    pages = -(-(length + topk * scale.steps) // scale.coarse_page)
    table = torch.randperm(batch * pages).view(batch, pages).int()
    parts = scale.coarse_page // scale.page
    fine_table = (table[:, :, None] * parts + torch.arange(parts)).flatten(1).int()
    coarse = VerifyBatch([length] * batch, trees, scale.coarse_page, rows, page_table=table, device=device)
    fine = VerifyBatch([length] * batch, trees, scale.page, rows, page_table=fine_table, device=device)
    naive = coarse.copied_tails("naive")
    pool.copy(naive.src, naive.dst)
    q = bench.random(fine.num_rows, group * scale.num_kv_heads, scale.head_dim)
    k, v = (x.view(-1, scale.coarse_page, *x.shape[2:]) for x in (pool.k, pool.v))
    work = Verify(fine, q, pool.k, pool.v, {plan: fine.levels(plan) for plan in ("cascade", "fused")})
    reference = _reference(work)
    state = None
    for plan, levels in (("naive", naive.levels), *work.plans.items()):
        call = planned(q, *((k, v) if plan == "naive" else (pool.k, pool.v)), levels)
        state = call()
        _hold(state, reference, plan)
        yield shape | {"kernel": f"cascade_lab {plan}"} | asdict(bench.clock.measure(call))
    verify_work = others.VerifyWork(q, k, v, coarse, naive.levels[0])
    for make in others.VERIFY_PEERS:
        if time.monotonic() >= bench.deadline:
            bench.skipped.append(shape | {"kernel": make.__name__, "why": "time"})
            continue
        _progress(f"{make.__name__}, " + ", ".join(f"{name} {value}" for name, value in shape.items()))
        yield shape | _peer_row(bench, make.__name__, partial(make, verify_work, bench.max_autotune), state)


def _peer_row(bench: Run, name: str, make: Callable[[], others.Peer], expected: State) -> dict:
    """A peer's time, or why there is none. Whatever goes wrong in foreign code is noted and passed over."""
    try:
        peer = make()
        o = peer.call()
        error = float((o.float() - expected.o.float()).abs().max() / expected.o.float().abs().max())
        row = {"kernel": peer.name, "o_difference": error, "agrees": error <= 2 * O_TOLERANCE}
        return row | asdict(bench.clock.measure(peer.call, capture="tried"))
    except Exception as error:
        return {"kernel": name, "missing": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


@dataclass(frozen=True)
class Prefill:
    """One prompt's suffix over its whole cache."""

    q: Tensor
    k: Tensor
    v: Tensor
    levels: Sequence[Level]


def _prefill(bench: Run, n: int, hit: int, group: int) -> Prefill:
    scale, device = bench.scale, bench.clock.device
    pages = -(-n // scale.page)
    table = torch.randperm(pages)[None].int().to(device)
    levels = prefix_hit_levels([n], [hit], scale.page, page_table=table)
    k, v = (bench.random(pages, scale.page, scale.num_kv_heads, scale.head_dim) for _ in range(2))
    return Prefill(bench.random(n - hit, group * scale.num_kv_heads, scale.head_dim), k, v, levels)


def prefill(bench: Run) -> Iterator[dict]:
    """(d) New tokens M over a hit H, dense causal: time against pairs, executed tiles and the matrix rate."""
    scale = bench.scale
    group = scale.centre[3]
    for point in bench.visit(_prefill_points(scale)):
        m, hit = point.values()
        n = m + hit
        if 2 * n * scale.num_kv_heads * scale.head_dim * DTYPE.itemsize > MEMORY_SHARE * bench.clock.free_bytes():
            bench.skipped.append(point | {"why": "memory"})
            continue
        work = _prefill(bench, n, hit, group)
        call = planned(work.q, work.k, work.v, work.levels)
        errors = _hold(call(), _prefill_reference(work, hit), f"prefill M={m} H={hit}")
        timing = bench.clock.measure(call)
        tile = checks.launch_tile(m * group, scale.head_dim, DTYPE)
        pairs = interactions(n, hit)
        tiles = executed_tiles(n, hit, tile.block_m, tile.block_n, group)
        flops = 4 * scale.head_dim * pairs * group * scale.num_kv_heads
        yield point | {
            "group": group,
            "pairs": pairs,
            "tiles": tiles,
            "block_m": tile.block_m,
            "block_n": tile.block_n,
            "remaining": float(remaining(n, hit)),
            "tile_remaining": tiles / executed_tiles(n, 0, tile.block_m, tile.block_n, group),
            "flops": flops,
            "flops_per_s": flops / timing.seconds,
            "share_of_matmul": flops / timing.seconds / bench.matmul_rate,
        } | asdict(timing) | errors  # fmt: skip


def _prefill_points(scale: Scale) -> list[dict]:
    """Prompts cut at eighths, for the law; then the grid, every other line first, so that cut short it is coarser."""
    law = [(n - n * e // 8, n * e // 8) for n in scale.prompts for e in scale.eighths]
    grid = sorted(
        itertools.product(scale.new_tokens, scale.hits),
        key=lambda x: scale.new_tokens.index(x[0]) % 2 + scale.hits.index(x[1]) % 2,
    )
    return [{"new": m, "hit": hit} for m, hit in dict.fromkeys((*law, *grid))]


def _prefill_reference(work: Prefill, hit: int) -> tuple[int, Tensor, Tensor]:
    """One random suffix row in float64."""
    q, table = work.q, work.levels[0].page_table[0].long()
    row = int(torch.randint(len(q), ()))
    k, v = (x[table].flatten(0, 1)[: hit + row + 1] for x in (work.k, work.v))
    return row, *_row_in_float64(q[row], k, v)


def linear(bench: Run) -> Iterator[dict]:
    """(e) A linear layer over M rows: what a hit leaves of everything that is linear in tokens."""
    width, out_width = bench.scale.linear
    weight = bench.random(out_width, width)
    for point in bench.visit({"rows": m} for m in bench.scale.linear_rows):
        x = bench.random(point["rows"], width)
        timing = bench.clock.measure(lambda x=x: torch.nn.functional.linear(x, weight))
        flops = 2 * point["rows"] * width * out_width
        yield (
            point
            | {
                "width": width,
                "out_width": out_width,
                "flops": flops,
                "flops_per_s": flops / timing.seconds,
                "share_of_matmul": flops / timing.seconds / bench.matmul_rate,
            }
            | asdict(timing)
        )


def costs(bench: Run) -> Iterator[dict]:
    """(f) What is not attention: launches, host time, merges, and the choice of splits."""
    scale = bench.scale
    yield from _small_calls(bench)
    heads, dim = scale.merge_heads, scale.head_dim
    points = [{"rows": t, "parts": s} for s in scale.merge_parts for t in scale.merge_rows]
    for point in bench.visit(points):
        t, s = point.values()
        o = torch.empty(t, s, heads, dim, device=bench.clock.device).normal_()
        lse = torch.empty(t, s, heads, device=bench.clock.device).normal_()
        moved = o.numel() * 4 + lse.numel() * 4 + t * heads * (dim * DTYPE.itemsize + 4)
        calls = {"merge_states": lambda o=o, lse=lse: merge_states(o, lse, out_dtype=DTYPE, backend="triton")}
        if s == 2:
            calls["merge_state"] = lambda o=o, lse=lse: merge_state(
                o[:, 0], lse[:, 0], o[:, 1], lse[:, 1], out_dtype=DTYPE, backend="triton"
            )
        for name, call in calls.items():
            timing = bench.clock.measure(call)
            yield {"what": name, "bytes": moved, "bytes_per_s": moved / timing.seconds} | point | asdict(timing)
    yield from _splits(bench)


def _small_calls(bench: Run) -> Iterator[dict]:
    """The same tiny work through every way in: the difference is the host's."""
    scale, device = bench.scale, bench.clock.device
    group = scale.centre[3]
    batch = VerifyBatch([scale.page], [DraftTree.branches(2, 2)], scale.page, "branch", device=device)
    k, v = (bench.random(batch.num_pages, scale.page, scale.num_kv_heads, scale.head_dim) for _ in range(2))
    q = bench.random(batch.num_rows, group * scale.num_kv_heads, scale.head_dim)
    (fused,) = batch.levels("fused")
    cascade = batch.levels("cascade")

    def one_pass() -> State:
        return attention(
            q,
            k,
            v,
            fused.page_table,
            fused.cache_seqlens,
            cu_seqlens_q=fused.cu_seqlens_q,
            max_seqlen_q=batch.num_rows,
            tree_mask=fused.tree_mask,
            tail_seqlens=fused.tail_seqlens,
            backend="triton",
        )

    def one_pass_unchecked() -> State:
        with runtime.unchecked():
            return one_pass()

    def all_levels() -> State:
        return cascade_attention(q, k, v, cascade, backend="triton")

    calls = {
        "attention": (one_pass, False),
        "attention, unchecked": (one_pass_unchecked, True),
        "cascade_attention": (all_levels, False),
        "cascade_attention, unchecked": (planned(q, k, v, cascade), True),
    }
    for point in bench.visit({"what": name} for name in calls):
        call, capturable = calls[point["what"]]
        yield point | asdict(bench.clock.measure(call, capture="required" if capturable else "off"))


def _splits(bench: Run) -> Iterator[dict]:
    """One request, few programs: the time at given numbers of splits beside the automatic choice."""
    scale = bench.scale
    length, group = scale.splits_length, scale.centre[3]
    pages = length // scale.page
    table = torch.randperm(pages)[None].int().to(bench.clock.device)
    lengths = torch.tensor([length], dtype=torch.int32, device=bench.clock.device)
    k, v = (bench.random(pages, scale.page, scale.num_kv_heads, scale.head_dim) for _ in range(2))
    q = bench.random(1, group * scale.num_kv_heads, scale.head_dim)
    for point in bench.visit({"what": "splits", "splits": n, "length": length} for n in scale.splits):

        def call(n=point["splits"]) -> State:
            with runtime.unchecked():
                return attention(q, k, v, table, lengths, num_splits=n, backend="triton")

        yield point | asdict(bench.clock.measure(call))


# section -> its share of the time
SECTIONS: dict[str, tuple[float, Callable[[Run], Iterator[dict]]]] = {
    "compile": (20, compile_ahead),
    "ceilings": (4, ceilings),
    "verify": (40, verify),
    "peers": (22, peers),
    "prefill": (22, prefill),
    "linear": (4, linear),
    "costs": (8, costs),
}


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE_ROOT), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _progress(text: str) -> None:
    """Replace the last line on a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:110]}", end="", file=sys.stderr, flush=True)


def _write(path: Path, record: dict) -> None:
    """One line per row, numbers to five digits, so that a record can be read and compared as text."""
    sections = {}
    for name, section in record["sections"].items():
        rows = ",\n".join(json.dumps(_rounded(row)) for row in section["rows"])
        sections[name] = _object(
            {key: json.dumps(_rounded(section[key])) for key in section} | {"rows": f"[\n{rows}\n]"}
        )
    parts = {key: json.dumps(_rounded(value)) for key, value in record.items()}
    text = _object(parts | {"sections": _object(sections)}) + "\n"
    put_in_place({path: text.encode()})


def _object(members: dict[str, str]) -> str:
    """A JSON object of values that are JSON already, a line each."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {value}" for key, value in members.items()) + "\n}"


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(x) for key, x in value.items()}
    return [_rounded(x) for x in value] if isinstance(value, list | tuple) else value
