"""Measurements with a clock: ratios against something that the reader's own machine runs beside them.

A time says little on another machine; a ratio of two times, taken in turns in one process, says how far an
implementation is from what else could be called. Every row is printed beside its bound, and rows, versions and device
go to a JSON file after each section. Rounds in which the operating system took a core away are set aside; a machine
too busy to give enough others has measured nothing, and says so.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cascade_lab import runtime
from cascade_lab.bench.record import PACKAGE_ROOT, begin_record, progress, write_record
from cascade_lab.evidence.claims import FAILS, HOLDS, NOT_MEASURED
from cascade_lab.evidence.timing import take_turns

NO_BOUND = "recorded"
IMPORT_BOUND_S = 0.3
SDPA_BOUND = 1.5
PLANS_BOUND_MS = 50.0
RANKS_BOUND = 1.3
REGIONS_BOUND_S = 1.0
NOTEBOOK_BOUND_S = 30.0
# Extra memory at the longest cache over that at the shortest; a row of scores alone would grow as the length does.
MEMORY_GROWTH_BOUND = 1.25
MIN_ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """One measurement: a value with its quartiles, in `unit`, and the bound it is judged by (None: only recorded)."""

    section: str
    name: str
    value: float | None
    unit: str
    bound: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return NOT_MEASURED
        if self.bound is None:
            return NO_BOUND
        return HOLDS if self.value <= self.bound else FAILS


@dataclass(frozen=True)
class SinglePass:
    """One attention call of a single request that `scaled_dot_product_attention` can do as well."""

    rows: int
    keys: int
    heads: int = 8
    kv_heads: int = 8
    causal: bool = False
    dtype: str = "float32"
    page_size: int | None = None  # None: a dense cache, one page

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads"
        mask = ", causal" if self.causal else ""
        layout = f", page {self.page_size} shuffled" if self.page_size else ""
        return f"T={self.rows} L={self.keys} {heads} {self.dtype}{mask}{layout}"


HEAD_DIM = 64
BOUNDED_WORKS = (
    SinglePass(2048, 2048, causal=True),
    SinglePass(32, 32768),
    SinglePass(32, 32768, kv_heads=2),
)
RECORDED_WORKS = (
    SinglePass(2048, 2048, causal=True, page_size=16),
    SinglePass(32, 32768, page_size=16),
    SinglePass(32, 32768, kv_heads=2, page_size=16),
    SinglePass(2048, 2048, causal=True, dtype="bfloat16"),
    SinglePass(32, 32768, dtype="bfloat16"),
    SinglePass(32, 32768, kv_heads=2, dtype="bfloat16"),
)
MEMORY_LENGTHS = (8192, 32768, 131072)


@dataclass(frozen=True)
class VerifyShape:
    """A batch of equal requests with draft trees; rows as in `VerifyBatch`, pages in order or shuffled."""

    length: int
    topk: int
    steps: int = 4
    batch: int = 1
    heads: int = 8
    kv_heads: int = 2
    shuffled: bool = False
    rows: str = "branch"

    def __str__(self) -> str:
        layout = ", page 16 shuffled" if self.shuffled else ""
        heads = f"{self.heads}/{self.kv_heads} heads"
        return f"{self.rows} rows, L={self.length} topk={self.topk} B={self.batch} {heads}{layout}"


VERIFY_SHAPES = (
    VerifyShape(32768, 4),
    VerifyShape(8192, 4, batch=4),
    VerifyShape(32768, 16),
    VerifyShape(32768, 4, shuffled=True),
    VerifyShape(32768, 4, rows="leaf"),
    VerifyShape(32768, 4, rows="node"),
)
# requests, prefix tokens, branches and steps of the batch whose plans are built
PLANNED = (256, 32768, 4, 16)
REGION_PAIRS = 10**6
VERIFY_PAGE = 16
# ranks, rows, heads and head dim of the states that are merged
MERGED = (4, 256, 32, 128)


def measure_cpu(output: Path, *, quick: bool) -> int:
    """Measure everything on this CPU; 0 when no bound is missed, else 1.

    Args:
        output: the JSON file to write.
        quick: fewer points and rounds.
    """
    sections = (
        ("import", lambda: import_time(3 if quick else 7)),
        ("speed", lambda: speed(7 if quick else 21)),
        ("verify", lambda: verify(VERIFY_SHAPES[:1] if quick else VERIFY_SHAPES, 7 if quick else 21)),
        ("plans", lambda: plans(3 if quick else 7)),
        ("regions", lambda: regions(3 if quick else 7)),
        ("memory", lambda: memory(MEMORY_LENGTHS[:2] if quick else MEMORY_LENGTHS)),
        ("host", lambda: host(5 if quick else 15)),
        ("ranks", lambda: ranks(7 if quick else 41)),
        ("notebook", notebook_time),
    )
    return report(sections, output, {"provenance": runtime.provenance(), "quick": quick})


def report(
    sections: tuple[tuple[str, Callable[[], Iterator[Row]]], ...], output: Path, record: dict[str, object]
) -> int:
    """Print each row as it comes, write all rows so far to `output` after each section, and return the exit status."""
    rows: list[Row] = []
    begin_record(output, record | {"rows": []})
    print(f"{'what':<84}{'measured':>12}  {'quartiles':<16}{'bound':>8}  verdict")
    for name, measure in sections:
        progress(f"measuring {name} ...")
        for row in measure():
            progress("")
            rows.append(row)
            print(_line(row), flush=True)
            progress(f"measuring {name} ...")
        progress("")
        write_record(output, record | {"rows": [asdict(row) | {"verdict": row.verdict} for row in rows]})
    missed = [row for row in rows if row.verdict == FAILS]
    unknown = [row for row in rows if row.verdict == NOT_MEASURED]
    print(f"{len(missed)} bounds missed, {len(unknown)} rows not measured here; written to {output.as_posix()}")
    return 1 if missed else 0


def import_time(repeats: int) -> Iterator[Row]:
    """Seconds that `import cascade_lab` adds to `import torch`, in fresh processes."""
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); import cascade_lab; "
        "print(b - a, time.perf_counter() - b)"
    )
    torch_s, package_s = zip(*(map(float, _child(code).split()) for _ in range(repeats)), strict=True)
    note = f"import torch alone {statistics.median(torch_s):.2f} s"
    yield _spread("import", "import cascade_lab after torch", package_s, "s", IMPORT_BOUND_S, note)


def speed(rounds: int) -> Iterator[Row]:
    """Time of the torch backend over that of `scaled_dot_product_attention`, called in turns on the same numbers."""
    for works, bound in ((BOUNDED_WORKS, SDPA_BOUND), (RECORDED_WORKS, None)):
        for work in works:
            ours, theirs = _calls(work)
            yield compare(f"torch backend / SDPA, {work}", ours, theirs, rounds, bound)


def compare(
    name: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rounds: int,
    bound: float | None,
    section: str = "speed",
) -> Row:
    """Median over rounds of time(ours) / time(theirs), from the rounds that ran undisturbed."""
    for call in (ours, theirs, ours, theirs):
        call()
    gc.collect()
    calls = {"ours": ours, "theirs": theirs}
    turns = take_turns(calls, rounds, clock=time.perf_counter, disturbances=_preemptions)
    ratios = turns.over("ours", "theirs")
    note = f"{turns.disturbed} of {turns.disturbed + len(ratios)} rounds disturbed"
    if len(ratios) < min(rounds, MIN_ROUNDS):
        return Row(section, name, None, "x", bound, note=f"machine too busy: {note}")
    own = statistics.median(turns.seconds["ours"])
    return _spread(section, name, ratios, "x", bound, f"{own * 1e3:.1f} ms, {note}")


def verify(shapes: tuple[VerifyShape, ...], rounds: int) -> Iterator[Row]:
    """Time of each plan on the torch backend over SDPA with a dense mask, and of naive over cascade: the same work."""
    for shape in shapes:
        calls, theirs, ratio = _verify_calls(shape)
        for plan, ours in calls.items():
            yield compare(f"{plan} / SDPA, {shape}", ours, theirs, rounds, None, "verify")
        name = f"naive / cascade, {shape}; the ledger says {ratio:.2f}"
        yield compare(name, calls["naive"], calls["cascade"], rounds, None, "verify")


def plans(rounds: int) -> Iterator[Row]:
    """Milliseconds to build the three plans of a large batch, beyond those to allocate and fill the same tensors."""
    import torch

    from cascade_lab import DraftTree, VerifyBatch

    requests, length, topk, steps = PLANNED
    trees = [DraftTree.branches(topk, steps)] * requests

    def build() -> list[object]:
        batch = VerifyBatch([length] * requests, trees, 16, "branch")
        return [level for plan in ("naive", "cascade", "fused") for level in batch.levels(plan)]

    tensors = [x for level in build() for x in vars(level).values() if isinstance(x, torch.Tensor)]

    def fill() -> list[object]:
        return [torch.full_like(x, 7) for x in tensors]

    build(), fill()
    seconds = take_turns({"build": build, "fill": fill}, rounds, clock=time.perf_counter).seconds
    beyond = [(built - filled) * 1e3 for built, filled in zip(*seconds.values(), strict=True)]
    size = sum(x.numel() * x.element_size() for x in tensors) / 1e6
    name = f"three plans, B={requests} L={length} {topk * steps} nodes in {topk} branches, page 16"
    yield _spread("plans", name, beyond, "ms", PLANS_BOUND_MS, f"beyond filling their {size:.0f} MB of tensors")


def regions(rounds: int) -> Iterator[Row]:
    """Seconds for the totals of many (prompt, hit) pairs, for each kind of region."""
    import numpy as np

    from cascade_lab import regions as rules

    draw = np.random.default_rng(0)
    n = draw.integers(1, 1 << 20, REGION_PAIRS)
    hit = (n * draw.random(REGION_PAIRS)).astype(np.int64)
    kinds = (
        rules.Dense(),
        rules.SlidingWindow(4096),
        rules.SinkWindow(4, 4096),
        rules.Chunked(8192),
        rules.TopK(2048),
        rules.TopKBlocks(128, 16),
        rules.NSA(32, 16, 64, 16, 512),
        rules.CSA(4, 512, 128),
        rules.HCA(128, 128),
    )
    for kind in kinds:
        calls = {kind: lambda kind=kind: kind.total(n) - kind.total(hit)}
        seconds = take_turns(calls, rounds, clock=time.perf_counter).seconds[kind]
        name = f"totals of {REGION_PAIRS} (N, H) pairs, {type(kind).__name__}"
        yield _spread("regions", name, seconds, "s", REGIONS_BOUND_S, "")


def memory(lengths: tuple[int, ...]) -> Iterator[Row]:
    """Growth of the resident peak during one call beyond its inputs, in a fresh process for each length."""
    if importlib.util.find_spec("resource") is None:
        yield Row("memory", "peak extra memory", None, "MB", note="this system has no resource module")
        return
    for page_size in (None, 16):
        extra = []
        for length in lengths:
            work = SinglePass(32, length, page_size=page_size)
            extra.append(float(_child(f"from cascade_lab.bench import cpu; cpu.print_extra_memory(cpu.{work!r})")))
            yield Row("memory", f"peak extra memory, {work}", extra[-1], "MB")
        layout = "dense" if page_size is None else f"page {page_size}"
        growth = extra[-1] / max(extra[0], 1.0)
        name = f"the same at L={lengths[-1]} over L={lengths[0]}, {layout}"
        yield Row("memory", name, growth, "x", MEMORY_GROWTH_BOUND)


def print_extra_memory(work: SinglePass) -> None:
    """Print the MB by which one call raises this process's resident peak above its inputs and loaded libraries."""
    _calls(SinglePass(1, 64, page_size=work.page_size))[0]()
    ours, _ = _calls(work)
    before = resident_peak()
    ours()
    print(resident_peak() - before)


def resident_peak() -> float:
    """The largest resident size of this process so far, in MB."""
    status = Path("/proc/self/status")
    if status.is_file():
        # the figure of getrusage would do, but a process starts with that of the one that started it
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if "VmHWM" in line) * 1024 / 1e6
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def ranks(rounds: int) -> Iterator[Row]:
    """Merges over gloo ranks on this machine, over an all-reduce in place that sends as many bytes as the exchange."""
    from cascade_lab.evidence.ranks import run_ranks

    world_size, T, H, D = MERGED
    seconds = run_ranks(_time_merges, world_size, timeout=300, rounds=rounds, shape=[T, H, D])[0]
    unit = seconds.pop("all_reduce")
    for name, found in seconds.items():
        ratios = [x / y for x, y in zip(found, unit, strict=True)]
        title = f"merge_across_ranks, {name}: W={world_size} T={T} H={H} D={D}"
        yield _spread("ranks", title, ratios, "x", RANKS_BOUND if name == "auto" else None, "over a bare all-reduce")


def _time_merges(rounds: int, shape: list[int]) -> dict[str, list[float]]:
    """On each rank: seconds of each way, taken in turns, from one barrier to the next."""
    import time

    import torch
    import torch.distributed as dist

    from cascade_lab.distributed import merge_across_ranks
    from cascade_lab.evidence.timing import take_turns
    from cascade_lab.states import State

    T, H, D = shape
    # sums of sums of zeros stay finite
    state, buffer = State(torch.randn(T, H, D), torch.randn(T, H)), torch.zeros(T * H * (D + 1))
    calls = {"all_reduce": lambda: dist.all_reduce(buffer), "auto": lambda: merge_across_ranks(state)}
    for algorithm in ("reduce", "gather"):
        calls[algorithm] = lambda algorithm=algorithm: merge_across_ranks(state, algorithm=algorithm)
    together = {name: lambda call=call: (call(), dist.barrier()) for name, call in calls.items()}
    for call in together.values():  # opens connections
        call()
    return dict(take_turns(together, rounds, clock=time.perf_counter, before=dist.barrier).seconds)


def host(rounds: int) -> Iterator[Row]:
    """What the host pays for a call, in launches of a one-argument kernel; compiled for a GPU that need not be here."""
    from cascade_lab.evidence import compiled

    try:
        found = compiled.in_child(f"host_ratios({rounds})", module="cascade_lab.bench.host")
    except RuntimeError as error:
        yield Row("host", "calls / one-argument launch", None, "x", note=str(error))
        return
    for one in found:
        name = f"{one['call']} / one-argument launch"
        note = f"{one['launches']} launch{'es' if one['launches'] > 1 else ''}"
        yield Row("host", name, one["ratio"], "x", low=one["low"], high=one["high"], note=note)


def notebook_time() -> Iterator[Row]:
    """Seconds that `cascade-lab run 01_lse_splitting` takes, process start to end."""
    name = "cascade-lab run 01_lse_splitting"
    missing = [tool for tool in ("papermill", "nbconvert", "ipykernel") if importlib.util.find_spec(tool) is None]
    if missing:
        yield Row("notebook", name, None, "s", NOTEBOOK_BOUND_S, note=f"needs {', '.join(missing)}")
        return
    if not Path("notebooks/01_lse_splitting.ipynb").is_file():
        yield Row("notebook", name, None, "s", NOTEBOOK_BOUND_S, note="no notebooks/01_lse_splitting.ipynb here")
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cascade_lab", "run", "01_lse_splitting", "--output", folder]
        start = time.perf_counter()
        done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
        seconds = time.perf_counter() - start
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        yield Row("notebook", name, float("inf"), "s", NOTEBOOK_BOUND_S, note=f"the run failed: {reason}")
        return
    yield Row("notebook", name, seconds, "s", NOTEBOOK_BOUND_S)


def _calls(work: SinglePass) -> tuple[Callable[[], object], Callable[[], object]]:
    """The pass as this package does it and as SDPA does it, on the same random numbers."""
    import torch

    from cascade_lab import attention

    dtype = getattr(torch, work.dtype)
    gen = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float32).to(dtype)

    q = random(work.rows, work.heads, HEAD_DIM)
    page_size = work.page_size or work.keys
    num_pages = work.keys // page_size
    k, v = (random(num_pages, page_size, work.kv_heads, HEAD_DIM) for _ in range(2))
    order = torch.randperm(num_pages, generator=gen)
    table = order[None].int()
    lengths = torch.tensor([work.keys], dtype=torch.int32)
    cu_seqlens_q = torch.tensor([0, work.rows], dtype=torch.int32)

    def ours() -> object:
        return attention(q, k, v, table, lengths, cu_seqlens_q=cu_seqlens_q, causal=work.causal, backend="torch")

    dense: list[torch.Tensor] = []

    def theirs() -> object:
        # SDPA gets its own favourite layout, [1, H, L, D] contiguous, with the pages already in order.
        if not dense:
            tokens = (x[order].flatten(0, 1) for x in (k, v))
            dense.extend(x.transpose(0, 1)[None].contiguous() for x in (q, *tokens))
        return torch.nn.functional.scaled_dot_product_attention(
            *dense, is_causal=work.causal, enable_gqa=work.heads != work.kv_heads
        )

    return ours, theirs


def _verify_calls(shape: VerifyShape) -> tuple[dict[str, Callable[[], object]], Callable[[], object], float]:
    """The plans on the torch backend, SDPA on the same numbers, and the ledger's naive / cascade ratio."""
    import torch

    from cascade_lab import DraftTree, VerifyBatch, cascade_attention, ledger
    from cascade_lab.bench import peers

    gen = torch.Generator().manual_seed(0)
    trees = [DraftTree.branches(shape.topk, shape.steps)] * shape.batch
    pages = -(-(shape.length + trees[0].size) // VERIFY_PAGE)
    order = torch.randperm if shape.shuffled else torch.arange
    options = {"generator": gen} if shape.shuffled else {}
    table = order(shape.batch * pages, **options).view(shape.batch, pages).int()
    batch = VerifyBatch([shape.length] * shape.batch, trees, VERIFY_PAGE, shape.rows, page_table=table)
    cache = (batch.num_pages, VERIFY_PAGE, shape.kv_heads, HEAD_DIM)
    k, v = (torch.randn(cache, generator=gen) for _ in range(2))
    q = torch.randn(batch.num_rows, shape.heads, HEAD_DIM, generator=gen)
    levels = {plan: batch.levels(plan) for plan in ("naive", "cascade", "fused")}

    def call(plan: str) -> Callable[[], object]:
        return lambda: cascade_attention(q, k, v, levels[plan], backend="torch")

    work = peers.VerifyWork(q, k, v, batch, levels["naive"][0])
    ratio = ledger(levels["naive"]).kv_tokens / ledger(levels["cascade"]).kv_tokens
    return {plan: call(plan) for plan in levels}, peers.sdpa(work, False).call, ratio


def _preemptions() -> int:
    """How often the system has taken a core from this process so far; 0 where it does not say."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _spread(
    section: str,
    name: str,
    values: list[float] | tuple[float, ...],
    unit: str,
    bound: float | None,
    note: str,
) -> Row:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Row(section, name, median, unit, bound, low, high, note)


def _environment() -> dict[str, str]:
    paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def _child(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"bench: a measuring process failed:\n{done.stderr.strip()}")
    return done.stdout


def _line(row: Row) -> str:
    value = "-" if row.value is None else f"{row.value:.2f} {row.unit}"
    quartiles = "" if row.low is None else f"{row.low:.2f} to {row.high:.2f}"
    bound = "" if row.bound is None else f"{row.bound:g} {row.unit}"
    note = f"  ({row.note})" if row.note else ""
    return f"{row.name:<84}{value:>12}  {quartiles:<16}{bound:>8}  {row.verdict}{note}"
