"""What the memory system counted while plans were launched: Nsight Compute's counters beside the ledger's bytes.

    L2 -> multiprocessors = 32 bytes x lts__t_sectors_srcunit_tex_op_read       to stand beside the ledger
    DRAM -> L2            = dram__bytes_read                                    to stand beside the distinct bytes

A child process makes the launches under `ncu`, each kernel with an empty L2, so that what one launch leaves to the next
counts as read again. Where ncu is not installed, may not read the counters or takes too long, the section says so and
measures nothing; nothing here is timed.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from cascade_lab.bench.clock import clock
from cascade_lab.bench.gpu.session import DTYPE, Scale, Session, planned
from cascade_lab.bench.gpu.verify import Pool, VerifyPlans, kv_tokens_loaded, tokens_needed
from cascade_lab.bench.record import PACKAGE_ROOT, progress
from cascade_lab.evidence.workers import end_group
from cascade_lab.levels import ledger

SECTOR = 32
DRAM, ASKED, FOUND = METRICS = (
    "dram__bytes_read.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_read_lookup_hit.sum",
)
KERNELS = "regex:^_[a-z_]+_kernel"


class NotCounted(Exception):
    """Why there are no counters; the text is for the record."""


def count_traffic(bench: Session) -> Iterator[dict]:
    """(g) DRAM bytes and L2 sectors of the plans' launches at a few prefix lengths, topk and group as in the sweeps."""
    scale = bench.scale
    _, topk, _, group, rows = scale.centre
    points = [
        {"length": length, "topk": topk, "batch": scale.counter_batch, "group": group, "rows": rows}
        for length in scale.counter_lengths
    ]
    points = list(bench.visit(points))
    if not points:
        return
    progress(f"counting at {len(points)} prefix lengths")
    bench.clock.release()
    left = None if bench.deadline == math.inf else max(0.0, bench.deadline - time.monotonic())
    try:
        made, counted = _profile(scale, points, left)
        yield from joined(made, counted)
    except NotCounted as error:
        yield {"missing": str(error)}


def command(log: str, scale: Scale, points: Sequence[dict]) -> list[str]:
    """The command line: ncu around this module, which makes the launches once.

    Raises:
        NotCounted: ncu is not installed.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NotCounted("ncu (Nsight Compute) is not installed")
    profiler = [
        "--csv",
        "--page",
        "details",
        "--print-units",
        "base",
        "--log-file",
        log,
        "--metrics",
        ",".join(METRICS),
    ]
    profiler += ["--kernel-name", KERNELS, "--profile-from-start", "off", "--cache-control", "all"]
    work = json.dumps({"scale": asdict(scale), "points": list(points)})
    return [ncu, *profiler, "--clock-control", "none", sys.executable, "-m", __spec__.name, work]


def _profile(scale: Scale, points: Sequence[dict], seconds: float | None) -> tuple[list[dict], list[dict]]:
    """What the child says it launched, and what ncu counted, launch by launch.

    Raises:
        NotCounted: ncu is missing, failed, counted nothing, or took longer than `seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "ncu.csv")
        paths = os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        options = {"env": os.environ | {"PYTHONPATH": paths}, "start_new_session": True}
        with subprocess.Popen(command(str(log), scale, points), **pipes, **options) as process:
            try:
                said, errors = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                raise NotCounted(f"ncu took longer than the {seconds:.0f} s that were left") from None
            finally:
                # ncu's own child outlives a killed ncu
                end_group(process)
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    counted = parse(text)
    if process.returncode or not counted:
        raise NotCounted(_reason(f"{text}\n{said}\n{errors}", process.returncode))
    try:
        made = json.loads(said.strip().splitlines()[-1])["rows"]
    except (ValueError, LookupError, TypeError):
        made = None
    if not isinstance(made, list):
        raise NotCounted("the launching process did not say what it launched")
    return made, counted


def _reason(text: str, status: int) -> str:
    """Why ncu counted nothing, from what it and the launching process printed."""
    if "ERR_NVGPUCTRPERM" in text:
        return "no permission to read the GPU's counters (ERR_NVGPUCTRPERM); an administrator can give it"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("==ERROR==")] or [
        line for line in lines if line.startswith("==WARNING==")
    ]
    last = (said or lines[-1:] or ["no output"])[0].replace("==ERROR==", "").replace("==WARNING==", "").strip()
    return f"ncu counted nothing (exit status {status}): {last[:200]}"


def parse(text: str) -> list[dict]:
    """Launches in order, each with its "kernel" and the METRICS, from the CSV that ncu prints: one line per metric.

    Raises:
        NotCounted: a value that is no number, or a unit that is not the base unit of its metric.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, dict] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        name, value, unit = (row.get(f"Metric {part}") or "" for part in ("Name", "Value", "Unit"))
        if name not in METRICS:
            continue
        if unit != ("byte" if name == DRAM else "sector"):
            raise NotCounted(f"ncu gave {name} in {unit or 'no unit'}")
        try:
            number = int(float(value.replace(",", "")))
        except (ValueError, OverflowError):
            raise NotCounted(f"ncu gave {value or 'nothing'} as {name}") from None
        launch = launches.setdefault(row["ID"], {"kernel": (row.get("Kernel Name") or "").split("(")[0]})
        launch[name] = number
    return list(launches.values())


def joined(made: Sequence[dict], counted: Sequence[dict]) -> Iterator[dict]:
    """Rows of the section: the launches of each point and plan with their counters.

    Args:
        made: per point its "plans", each with its "kernels" in order and bytes by the ledger.
        counted: from `parse`, in the order of the launches.

    Raises:
        NotCounted: other launches were counted than were made, or one lacks a metric.
    """
    names = [name for row in made for plan in row["plans"].values() for name in plan["kernels"]]
    if names != [launch["kernel"] for launch in counted] or any(m not in x for x in counted for m in METRICS):
        raise NotCounted(f"ncu counted other launches than the {len(names)} that were made")
    rest = iter(counted)
    for row in made:
        plans = {}
        for name, plan in row["plans"].items():
            launches = [next(rest) for _ in plan["kernels"]]
            attention = [launch for launch in launches if "attention" in launch["kernel"]]
            plans[name] = plan | {
                "dram_bytes": sum(x[DRAM] for x in launches),
                "l2_bytes": SECTOR * sum(x[ASKED] for x in launches),
                "l2_found_bytes": SECTOR * sum(x[FOUND] for x in launches),
                "attention_dram_bytes": sum(x[DRAM] for x in attention),
                "attention_l2_bytes": SECTOR * sum(x[ASKED] for x in attention),
            }
        yield row | {"plans": plans}


def launch_plans(scale: Scale, points: Sequence[dict]) -> list[dict]:
    """Launch every plan of every point once where the profiler looks, after once where it does not.

    Returns:
        Per point its plans, each with the "kernels" launched and bytes of K and V: "kv_bytes" as the ledger counts,
        "kv_bytes_loaded" with row tiles, "kv_bytes_distinct" in distinct slots.
    """
    bench = Session(clock(), scale)
    rows = []
    with torch.no_grad():
        pool = Pool(bench, max(tokens_needed(scale, **point) for point in points))
        for point in points:
            work = pool.verify(**point)
            calls = {plan: planned(work.q, work.k, work.v, levels) for plan, levels in work.plans.items()}
            for call in calls.values():
                call()
            bench.clock.wait()
            plans = {plan: {"kernels": _profiled(bench, call)} | _bytes(work, plan) for plan, call in calls.items()}
            rows.append(point | {"plans": plans})
    return rows


def _bytes(work: VerifyPlans, plan: str) -> dict[str, int]:
    levels, num_kv_heads, head_dim = work.plans[plan], work.k.shape[2], work.k.shape[3]
    counted = ledger(levels, num_q_heads=work.q.shape[1], num_kv_heads=num_kv_heads)
    per_token = 2 * num_kv_heads * head_dim * DTYPE.itemsize
    return {
        "kv_bytes": counted.kv_bytes(head_dim, DTYPE),
        "kv_bytes_loaded": per_token * kv_tokens_loaded(counted, levels, work.q),
        "kv_bytes_distinct": per_token * counted.kv_tokens_unique,
    }


def _profiled(bench: Session, call: Callable[[], object]) -> list[str]:
    """Make a call under the profiler's eyes; the names of the kernels it launched."""
    on_gpu = bench.clock.device.type == "cuda"
    with _launches() as names:
        if on_gpu:
            torch.cuda.profiler.start()
        call()
        bench.clock.wait()
        if on_gpu:
            torch.cuda.profiler.stop()
    return names


class _Noted:
    """A kernel whose launches are noted by name."""

    def __init__(self, kernel, names: list[str]):
        self.kernel, self.names = kernel, names

    def __getitem__(self, grid):
        self.names.append(self.kernel.fn.__name__)
        return self.kernel[grid]


@contextmanager
def _launches() -> Iterator[list[str]]:
    """Names of the kernels launched inside, compiled or interpreted, whatever module of the backend they are in."""
    names: list[str] = []
    package = "cascade_lab.backends.triton"
    modules = [module for name, module in sys.modules.items() if name == package or name.startswith(f"{package}.")]
    kernels = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_kernel") and hasattr(value, "fn")
    ]
    for module, name, kernel in kernels:
        setattr(module, name, _Noted(kernel, names))
    try:
        yield names
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps({"rows": launch_plans(Scale(**asked["scale"]), asked["points"])}))
