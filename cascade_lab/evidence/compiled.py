"""What the kernels become: each row of the configuration table compiled for each target, without a GPU, and read.

The package's own launch code runs on CPU tensors; the launch is intercepted, specialised as Triton's launcher would,
and compiled. The assembler's report gives registers, stack and spills, the disassembly the main loop: its instructions,
its copies, its matrix products. One figure says how near the limit a loop is:

    issue = instructions of the main loop x warps / (K and V bytes that one turn of it loads),

since a kernel cannot stream faster than the machine issues. Registers and shared memory say how many programs run side
by side on a multiprocessor. All of it is counted, not timed. Needs Triton in compiled mode, so
`cascade-lab bench --compiled` and the tests run it in a child process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from cascade_lab import runtime

NVIDIA_TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# KiB of shared memory of a multiprocessor, of which each program takes one beside its own
_SHARED_KIB = {"sm_75": 64, "sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100}
_REGISTERS = 65536
_POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
_POINTERS |= {torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}
_POINTERS |= {torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5"}


@dataclass(frozen=True)
class Work:
    """One launch to look at.

    Attributes:
        head_dim, head_dim_v: D and D_v; V is a view of K's first columns when `latent`.
        rows: packed rows, query rows x group, of each request.
        mask: "tree", "causal" or "none".
        window: keys before its own that a row sees; -1 is all of them.
        softcap: whether scores are capped.
        row_stride: elements between tokens of one KV head in the cache; 0 is contiguous.
        dtype, cache_dtype: of queries and of the cache, where it has another.
    """

    head_dim: int
    rows: int
    mask: str = "tree"
    head_dim_v: int = 0
    latent: bool = False
    page_size: int = 16
    row_stride: int = 0
    num_kv_heads: int = 2
    group: int = 4
    keys: int = 2000
    num_splits: int | None = None
    dtype: str = "bfloat16"
    cache_dtype: str = ""
    window: int = -1
    softcap: bool = False


@dataclass(frozen=True)
class Report:
    """What one kernel became on one target; loop figures are of the main loop, 0 where there is none.

    Attributes:
        registers, stack_bytes, spill_bytes, shared_bytes: per thread or per program, from the assembler.
        loop_instructions: instructions of the innermost loop that copies keys.
        issue: loop_instructions x warps / K and V bytes of one turn.
        products: matrix-product instructions of the loop.
        copies: global-memory instructions of the loop and how often each occurs.
        buffers: K tiles in shared memory; one less than this is in flight (two less for sm_90 and sm_100 products).
        block_m, block_n, num_warps: of the tile.
        programs: that a multiprocessor holds at a time, by registers and shared memory.
    """

    kernel: str
    target: str
    block_m: int
    block_n: int
    num_warps: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    loop_instructions: int
    issue: float
    products: tuple[str, ...]
    copies: dict[str, int]
    buffers: int
    programs: int


_LATENT = dict(head_dim_v=512, latent=True, num_kv_heads=1)
_MLA = dict(head_dim_v=128)


def table_works() -> list[Work]:
    """One work per row of the configuration table, tree and causal: head dims 64, 128, 256 and 576/512, and 192/128,
    which shares the rows of 256, causal alone."""
    shapes = [(head_dim, rows, {}) for head_dim in (64, 128) for rows in (16, 32, 64, 128)]
    shapes += [(256, rows, {}) for rows in (16, 32, 64)] + [(576, rows, _LATENT) for rows in (16, 32)]
    works = [Work(head_dim, rows, mask, **rest) for head_dim, rows, rest in shapes for mask in ("tree", "causal")]
    return works + [Work(192, rows, "causal", **_MLA) for rows in (16, 32, 64)]


def odd_works() -> list[Work]:
    """Shapes that lose wide copies easily: row stride 264, head dims 80, 96 and 192, pages of one token, of a tile and
    more, and a dense cache of any length."""
    return [
        Work(128, 64, row_stride=264),
        Work(80, 64),
        Work(96, 64),
        Work(192, 32),
        *(Work(128, 64, page_size=page) for page in (1, 64, 256, 2000, 2048)),
    ]


def capped_works() -> list[Work]:
    """Scores capped under a sliding window, which keep most alive, at the largest tile of each head dim."""
    shapes = [(64, 128, {}), (128, 128, {}), (192, 64, _MLA), (256, 64, {}), (576, 32, _LATENT)]
    return [Work(head_dim, rows, "causal", window=512, softcap=True, **rest) for head_dim, rows, rest in shapes]


def full_works() -> list[Work]:
    """float32, which notebooks compute in: head dim 16 at all rows, and the others at the rows that they have there."""
    shapes = [(16, 128, {}), *((64, rows, {}) for rows in (16, 32, 64, 128)), (128, 16, {}), (128, 64, {})]
    shapes += [(256, 16, {}), (256, 64, {}), (576, 16, _LATENT)]
    return [Work(head_dim, rows, "causal", dtype="float32", **rest) for head_dim, rows, rest in shapes]


def works_of(target: str) -> list[tuple[str, Work]]:
    """All works of a target by kind; sm_75 has no bfloat16, and odd shapes are tried where copies are asynchronous and
    the rows are no other target's."""
    kinds = {"table": table_works(), "capped": capped_works(), "float32": full_works()}
    if target in ("sm_80", "sm_90", "sm_100"):
        kinds["odd"] = odd_works()
    half = {"dtype": "float16"} if target == "sm_75" else {}
    return [
        (kind, work if kind == "float32" else replace(work, **half)) for kind, works in kinds.items() for work in works
    ]


def inspect_attention(work: Work, target: str) -> Report:
    """Compile the launch that `work` leads to and read it."""
    (launch,) = [one for one in _attention_launches(work, target) if "attention" in one.kernel.fn.__name__]
    columns = work.head_dim + (0 if work.latent else work.head_dim_v or work.head_dim)
    tile_bytes = launch.keywords["BLOCK_N"] * columns * _cache_dtype(work).itemsize
    return _read(launch, target, tile_bytes)


def inspect_merges(head_dim: int, target: str) -> list[Report]:
    """The two-way merge in half precision and the reduction of float32 partials."""
    from cascade_lab.backends.triton import merge

    half, full = torch.bfloat16, torch.float32
    T, S, H = 64, 4, 8
    o, lse = torch.empty(T, H, head_dim, dtype=half), torch.empty(T, H)
    with _captured() as launches:
        merge.merge_pair(o, lse, o.clone(), lse.clone(), torch.empty_like(o), torch.empty_like(lse))
        merge.merge_many(torch.empty(T, S, H, head_dim, dtype=full), torch.empty(T, S, H), o, lse)
    return [_read(launch, target, 0) for launch in launches]


def launches_and_partials(work: Work, target: str) -> tuple[int, float]:
    """Launches of one pass, and its partial states' bytes as a share of the KV bytes."""
    launches = _attention_launches(work, target)
    partial = 0
    if len(launches) > 1:
        os, lses = launches[-1].arguments[:2]
        partial = os.numel() * os.element_size() + lses.numel() * lses.element_size()
    width = work.head_dim + (work.head_dim_v or work.head_dim)
    kv_bytes = work.keys * work.num_kv_heads * width * _cache_dtype(work).itemsize
    return len(launches), partial / kv_bytes


def shared_on_amd(work: Work) -> int:
    """Bytes of shared memory that the launch takes on gfx942, where it was compiled for it."""
    launches = [one for one in _attention_launches(work, "gfx942") if "attention" in one.kernel.fn.__name__]
    return max(_compile(launch, "gfx942").metadata.shared for launch in launches)


@dataclass
class _Launch:
    kernel: Any
    arguments: tuple
    keywords: dict[str, Any]


@contextmanager
def _captured() -> Iterator[list[_Launch]]:
    """Record kernel launches instead of making them."""
    if runtime.triton_mode() != "compiled":
        raise RuntimeError(f"kernels are interpreted in this process; start Python with {runtime.SWITCH}=0")
    runtime.require_triton()
    from triton.runtime.jit import JITFunction

    launches: list[_Launch] = []

    def run(self, *arguments, grid, warmup, **keywords):
        launches.append(_Launch(self, arguments, keywords))

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def _cache_dtype(work: Work) -> torch.dtype:
    return getattr(torch, work.cache_dtype or work.dtype)


def _attention_launches(work: Work, target: str) -> list[_Launch]:
    from cascade_lab._passes import check_pass
    from cascade_lab.backends import Call
    from cascade_lab.backends.triton import attention as kernels

    dtype = getattr(torch, work.dtype)
    rows = work.rows // work.group
    pages = -(-work.keys // work.page_size)
    stride = work.row_stride or work.head_dim
    k = torch.empty(pages, work.page_size, work.num_kv_heads, stride, dtype=_cache_dtype(work))[..., : work.head_dim]
    width = work.head_dim_v or work.head_dim
    v = k[..., :width] if work.latent else torch.empty_like(k.new_empty(*k.shape[:3], stride))[..., :width]
    q = torch.empty(rows, work.num_kv_heads * work.group, work.head_dim, dtype=dtype)
    table = torch.arange(pages, dtype=torch.int32)[None]
    mask = torch.zeros(rows, 1, dtype=torch.int64) if work.mask == "tree" else None
    one = check_pass(
        q,
        k,
        v,
        table,
        torch.tensor([work.keys], dtype=torch.int32),
        torch.tensor([0, rows], dtype=torch.int32),
        causal=work.mask == "causal",
        tree_mask=mask,
        window_size=(work.window, -1),
    )
    num_splits = 1 if work.mask == "causal" and work.num_splits is None else work.num_splits
    with runtime.pretend_target(runtime.TARGETS[target]), _captured() as launches:
        kernels.attend(q, [one], Call(work.head_dim**-0.5, 50.0 * work.softcap, num_splits, dtype, None, "triton"))
    return launches


def _compile(launch: _Launch, target: str):
    """Specialise as the launcher does: 1 is a constant, multiples of 16 and aligned pointers are marked as such."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    options = {k: v for k, v in launch.keywords.items() if k not in launch.kernel.arg_names}
    values = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.keywords
    for i, name in enumerate(launch.kernel.arg_names):
        value = values[name]
        declared = launch.kernel.params[i].is_constexpr
        if declared or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]] if value.data_ptr() % 16 == 0 else []
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            attributes[(i,)] = [["tt.divisibility", 16]] if value % 16 == 0 else []
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    nvidia = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, 64)
    return triton.compile(source, target=gpu, options=options)


def _read(launch: _Launch, target: str, tile_bytes: int) -> Report:
    from triton.backends.nvidia.compiler import get_ptxas

    kernel = _compile(launch, target)
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(kernel.asm["cubin"])
        ptx.write_text(kernel.asm["ptx"])
        listing = _tool(bundled("nvdisasm"), "-c", cubin).stdout
        version = re.search(r"\.target (\w+)", kernel.asm["ptx"])[1]
        limit = launch.keywords.get("maxnreg")
        limits = [] if limit is None else [f"--maxrregcount={limit}"]
        # the assembler that Triton itself takes for the target; which one that is has changed between versions
        assembler = Path(get_ptxas(int(target[3:])).path)
        report = _tool(assembler, "-v", f"--gpu-name={version}", ptx, "-o", Path(folder, "out.cubin"), *limits).stderr
    found = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    lines, labels = _instructions(listing)
    # a merge has no loop over keys: its copies are those of the whole kernel
    loop = _main_loop(lines, labels) if tile_bytes else []
    counts = _counts(loop or lines)
    warps, registers = launch.keywords["num_warps"], int(re.search(r"Used (\d+) registers", report)[1])
    return Report(
        kernel=launch.kernel.fn.__name__.strip("_"),
        target=target,
        block_m=launch.keywords.get("BLOCK_M", 0),
        block_n=launch.keywords.get("BLOCK_N", 0),
        num_warps=warps,
        registers=registers,
        stack_bytes=int(found[1]),
        spill_bytes=int(found[2]) + int(found[3]),
        shared_bytes=kernel.metadata.shared,
        loop_instructions=len(loop),
        issue=round(len(loop) * warps / tile_bytes, 4) if tile_bytes else 0.0,
        products=tuple(sorted({name for op in counts if (name := op.split(".")[0]).endswith("MMA")})),
        copies={op: n for op, n in counts.items() if _is_global(op)},
        buffers=_buffers(kernel.asm.get("ttgir", "")) if tile_bytes else 0,
        programs=_programs(target, registers, warps, kernel.metadata.shared),
    )


def _programs(target: str, registers: int, num_warps: int, shared_bytes: int) -> int:
    """Programs side by side on a multiprocessor: registers come by eights for each thread."""
    by_registers = _REGISTERS // (-(-registers // 8) * 8 * 32 * num_warps)
    return min(by_registers, _SHARED_KIB[target] * 1024 // (shared_bytes + 1024))


def _is_global(operation: str) -> bool:
    return operation.startswith(("LDG", "STG", "LDL", "STL")) and not operation.startswith("LDGDEPBAR")


def _instructions(listing: str) -> tuple[list[str], dict[str, int]]:
    """Instructions of a disassembly in order, and the index that each label stands before."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for text in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", text):
            labels[label[1]] = len(lines)
        elif line := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", text):
            lines.append(line[1])
    return lines, labels


def _counts(lines: list[str]) -> dict[str, int]:
    """How often each operation occurs, predicates aside."""
    operations = Counter(re.sub(r"^@!?U?P\w+\s+", "", line).split()[0] for line in lines)
    return dict(sorted(operations.items()))


def _main_loop(lines: list[str], labels: dict[str, int]) -> list[str]:
    """Instructions of the innermost loop with the most asynchronous copies, the first one where there are none."""
    loops = []
    for i, line in enumerate(lines):
        target = re.search(r"BRA(?:\.U)?.*?`\((\.L_x_\d+)\)", line)
        if target and labels.get(target[1], len(lines)) <= i:
            loops.append((labels[target[1]], i + 1))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    if not inner:
        return []
    start, stop = max(inner, key=lambda span: sum("LDGSTS" in line for line in lines[span[0] : span[1]]))
    return lines[start:stop]


def _buffers(ttgir: str) -> int:
    """K tiles that the pipeliner keeps in shared memory: the leading extent of its multi-buffered allocations."""
    found = re.findall(r"ttg\.local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    return min((int(n) for n in found), default=0)


def bundled(name: str) -> Path:
    """A tool that comes with Triton."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _tool(path: Path, *arguments) -> subprocess.CompletedProcess:
    done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{path.name} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done


def worked_example() -> Work:
    """L = 2000, topk = 4, S = 5, one row per node, 8 query heads on 2 KV heads of 64: 80 packed rows."""
    return Work(64, 80, "tree", keys=2020)


def effective_issue(report: Report, work: Work) -> float:
    """issue x K tokens loaded / compulsory: what a byte that must be read costs in issued instructions."""
    return report.issue * -(-work.rows // report.block_m)


def survey(progress: Callable[[str], None] = lambda _: None, targets: Sequence[str] = NVIDIA_TARGETS) -> dict[str, Any]:
    """Inspect everything, two compilations at a time, and return it as JSON values.

    Returns:
        "rows" of each target and kind of `works_of`, "merges", "amd" (shared memory on gfx942), the "worked example"
        with the sum-up number, and where they come from.
    """
    example = worked_example()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        rows = [
            (kind, work, pool.submit(inspect_attention, work, target))
            for target in targets
            for kind, work in works_of(target)
        ]
        merges = [(D, pool.submit(inspect_merges, D, target)) for D in (64, 128, 512) for target in targets]
        amd = [(work, pool.submit(shared_on_amd, work)) for work in table_works()[::2]]
        found = {"rows": [], "merges": [], "amd": []}
        for kind, work, row in rows:
            found["rows"].append({"kind": kind, "work": asdict(work), **asdict(row.result())})
            progress(f"{len(found['rows'])} of {len(rows)} attention kernels")
        for head_dim, pair in merges:
            found["merges"] += [{"head_dim": head_dim, **asdict(report)} for report in pair.result()]
        found["amd"] = [{"work": asdict(work), "shared_bytes": done.result()} for work, done in amd]
    launches, partials = launches_and_partials(example, "sm_90")
    report = inspect_attention(example, "sm_90")
    found["worked example"] = {
        "work": asdict(example),
        "launches": launches,
        "launches without splits": launches_and_partials(replace(example, num_splits=1), "sm_90")[0],
        "partials over KV bytes": round(partials, 4),
        "issue": report.issue,
        "issue x loaded / compulsory": round(effective_issue(report, example), 4),
    }
    about = {
        "date": date.today().isoformat(),
        "source": "cascade-lab bench --compiled",
        "devices": [*targets, "gfx942"],
    }
    return about | found | {"provenance": runtime.provenance()}


def table(found: dict[str, Any]) -> str:
    """The survey as a table of text, its last line the sum-up number."""
    head = (
        "D",
        "rows",
        "mask",
        "cache",
        "target",
        "tile",
        "registers",
        "spill",
        "programs",
        "issue",
        "products, copies",
    )
    lines = [head]
    for row in found["rows"]:
        work, products = row["work"], ", ".join(row["products"])
        cache = f"stride {work['row_stride']}" if work["row_stride"] else f"page {work['page_size']}"
        mask = "capped window" if row["kind"] == "capped" else work["mask"]
        cache += ", float32" if row["kind"] == "float32" else ""
        tile = f"{row['block_m']}x{row['block_n']} w{row['num_warps']}"
        shown = (work["head_dim"], work["rows"], mask, cache, row["target"], tile)
        counts = (row["registers"], row["spill_bytes"], row["programs"], f"{row['issue']:.3f}")
        lines.append((*shown, *counts, f"{products}; {_listed(row['copies'])}"))
    for row in found["merges"]:
        kernel = row["kernel"].removesuffix("_kernel")
        shown = (row["head_dim"], "", "", kernel, row["target"], f"w{row['num_warps']}")
        lines.append((*shown, row["registers"], row["spill_bytes"], row["programs"], "", _listed(row["copies"])))
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(head))]
    texts = ["  ".join(str(cell).ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    example = found["worked example"]
    texts.append(
        f"launches {example['launches without splits']} without splits, {example['launches']} with; "
        f"partial states {example['partials over KV bytes']:.1%} of the KV bytes; "
        f"{len(found['amd'])} rows compile for gfx942, with at most "
        f"{max(row['shared_bytes'] for row in found['amd'])} bytes of shared memory"
    )
    texts.append(f"issue x K tokens loaded / compulsory: {example['issue x loaded / compulsory']:.4f}")
    return "\n".join(texts)


def _listed(copies: dict[str, int]) -> str:
    return ", ".join(f"{n} {operation}" for operation, n in copies.items())


def in_child(expression: str, module: str = "cascade_lab.evidence.compiled") -> Any:
    """Evaluate an expression with the names of `module` in a child process with compiled mode; returns its JSON value.

    Raises:
        RuntimeError: the child failed; its last line of error is in the message.
    """
    code = f"import json, {module} as module; print(json.dumps(eval({expression!r}, vars(module))))"
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    environment = os.environ | {runtime.SWITCH: "0", runtime.TARGET: "", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{module.split('.')[-1]}.{expression} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
        )
    return json.loads(done.stdout.strip().splitlines()[-1])
