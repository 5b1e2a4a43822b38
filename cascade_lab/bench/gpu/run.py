"""The command: check the kernels, take the sections in turn, and write and print one record."""

from __future__ import annotations

import datetime
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from cascade_lab import runtime
from cascade_lab.bench.clock import Clock, clock
from cascade_lab.bench.gpu.answers import WrongAnswer
from cascade_lab.bench.gpu.comparison import time_peers
from cascade_lab.bench.gpu.costs import time_ceilings, time_costs
from cascade_lab.bench.gpu.counters import count_traffic
from cascade_lab.bench.gpu.prefill import time_linear, time_prefill
from cascade_lab.bench.gpu.report import break_even_rows, judge, print_summary
from cascade_lab.bench.gpu.session import Scale, Session
from cascade_lab.bench.gpu.verify import compile_ahead, time_verify
from cascade_lab.bench.record import PACKAGE_ROOT, progress, write_record
from cascade_lab.evidence import checks
from cascade_lab.evidence.claims import FAILS

# section -> its share of the time
SECTIONS: dict[str, tuple[float, Callable[[Session], Iterator[dict]]]] = {
    "compile": (20, compile_ahead),
    "ceilings": (4, time_ceilings),
    "verify": (40, time_verify),
    "peers": (22, time_peers),
    "prefill": (22, time_prefill),
    "linear": (4, time_linear),
    "costs": (8, time_costs),
    "counters": (16, count_traffic),
}


def measure_gpu(scale: Scale, output: Path | None, *, quick: bool, smoke: bool, max_autotune: bool) -> int:
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
    bench = Session(clock(), scale, max_autotune)
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
    wrong = _check_kernels(record, smoke, quick)
    write_record(output, record)
    if wrong:
        print(f"stopped: {wrong}")
        return 1
    try:
        with torch.no_grad():
            _take_sections(bench, record, output)
    except WrongAnswer as error:
        record["stopped"] = str(error)
        print(f"stopped at a wrong answer: {error}")
        return 1
    except BaseException as error:
        record["stopped"] = repr(error)
        raise
    finally:
        write_record(output, record)
    record["complete"] = True
    record["break_even"] = {plan: break_even_rows(record, plan) for plan in ("cascade", "fused")}
    record["bounds"] = judge(record) if bench.clock.meaningful and not smoke else []
    write_record(output, record)
    print_summary(record)
    print(f"written to {output.as_posix()}")
    return 1 if any(bound["verdict"] == FAILS for bound in record["bounds"]) else 0


def _meaning(clock: Clock, smoke: bool) -> str:
    if not clock.meaningful:
        return "not meaningful: no GPU, kernels interpreted"
    return "not meaningful: tiny sizes" if smoke else "device events"


def _check_kernels(record: dict, smoke: bool, quick: bool) -> str | None:
    """Run the correctness checks into the record; what is wrong first, or None."""
    start = time.monotonic()
    todo = checks.checks(small=smoke) if not quick else checks.checks(dtypes=("bfloat16",), small=smoke)
    done: list[str] = []
    wrong = None
    for check, problem in checks.run_all(todo):
        progress(f"checking {len(done) + 1} of {len(todo)}: {check}")
        if problem is not None:
            wrong = f"{check}: {problem}"
            break
        done.append(str(check))
    if wrong is None and not smoke:
        wrong = checks.run_marked_tests(PACKAGE_ROOT / "tests")
    record["checks"] = {"passed": sorted(done), "wrong": wrong, "seconds": time.monotonic() - start}
    progress("")
    print(f"checks: {len(done)} of {len(todo)} right, {time.monotonic() - start:.0f} s", flush=True)
    return wrong


def _take_sections(bench: Session, record: dict, output: Path) -> None:
    """All sections in turn. A section may use its share of what is left, and leaves what it does not need to others."""
    budget = bench.scale.budget_s
    end = math.inf if budget is None else time.monotonic() + budget
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
        write_record(output, record)
        progress("")
        print(f"{name}: {len(rows)} rows, {len(bench.skipped)} skipped, {time.monotonic() - start:.0f} s", flush=True)


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
