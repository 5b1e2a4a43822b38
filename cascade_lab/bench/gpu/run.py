"""The command: check the kernels, take the sections in turn, and write and print one record.

The time of the run is dealt out beforehand, checks and compilation included, and what does not fit is named in the
record. The record is on disk before the first check, after every section, and every few seconds within one, so a run
that is killed leaves what it measured.
"""

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
from cascade_lab.bench.gpu.ahead import compile_ahead
from cascade_lab.bench.gpu.answers import WrongAnswer
from cascade_lab.bench.gpu.batches import time_batches
from cascade_lab.bench.gpu.comparison import time_peers
from cascade_lab.bench.gpu.costs import time_ceilings, time_costs
from cascade_lab.bench.gpu.counters import count_traffic
from cascade_lab.bench.gpu.prefill import time_linear, time_prefill
from cascade_lab.bench.gpu.report import break_even_rows, judge, print_summary
from cascade_lab.bench.gpu.sensors import Sensors, sensors
from cascade_lab.bench.gpu.session import Scale, Session
from cascade_lab.bench.gpu.verify import time_verify
from cascade_lab.bench.record import PACKAGE_ROOT, begin_record, place, progress, write_record
from cascade_lab.evidence import checks
from cascade_lab.evidence.claims import FAILS

# section -> its share of the time
SECTIONS: dict[str, tuple[float, Callable[[Session], Iterator[dict]]]] = {
    "compile": (24, compile_ahead),
    "ceilings": (4, time_ceilings),
    "verify": (36, time_verify),
    "batches": (10, time_batches),
    "peers": (22, time_peers),
    "prefill": (20, time_prefill),
    "linear": (3, time_linear),
    "costs": (8, time_costs),
    "counters": (14, count_traffic),
}
# of the budget: for what overruns its section by one point, and for the checks before all sections
RESERVE, CHECKS_SHARE = 0.05, 0.25
# of the checks' part: the rest is for the tests marked for a GPU
KERNELS_SHARE = 0.7
WRITE_EVERY_S = 5.0
DEVICE_TIMES = "device events"
MARKED_TESTS = "tests marked for a GPU"


def measure_gpu(scale: Scale, output: Path | None, *, quick: bool, smoke: bool, max_autotune: bool) -> int:
    """Check, measure, print, and write one JSON file.

    Args:
        scale: sizes and time budget.
        output: file to write, or a folder for it; by default named after the device, under figures/measured/.
        quick, smoke: for the record, and for which checks run first.
        max_autotune: let FlexAttention be tuned, which takes minutes.

    Returns:
        0 when all answers are right and no bound is missed, else 1.

    Raises:
        UsageError: the output cannot be written; nothing has been measured then.
    """
    start = time.monotonic()
    end = math.inf if scale.budget_s is None else start + (1 - RESERVE) * scale.budget_s
    torch.manual_seed(0)
    bench = Session(clock(), scale, max_autotune)
    slug = "_".join(bench.clock.name.lower().split())
    output = place(output, Path("build/bench_smoke.json" if smoke else f"figures/measured/gpu_{slug}.json"))
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
    begin_record(output, record)
    print(f"device: {bench.clock.name}; {record['timings']}; results go to {output.as_posix()}", flush=True)
    try:
        wrong = _check_kernels(record, smoke, quick, end)
        if wrong:
            record["stopped"] = wrong
            print(f"stopped: {wrong}")
            return 1
        with torch.no_grad(), sensors(bench.clock) as found:
            record["sensors"] = found.source or found.missing
            write_record(output, record)
            _take_sections(bench, record, output, end, found)
        record["complete"] = True
    except WrongAnswer as error:
        record["stopped"] = str(error)
        print(f"stopped at a wrong answer: {error}")
        return 1
    except BaseException as error:
        record["stopped"] = repr(error)
        raise
    finally:
        write_record(output, record)
    record |= judgement(record)
    record["seconds"] = time.monotonic() - start
    write_record(output, record)
    print_summary(record)
    print(f"written to {output.as_posix()} after {record['seconds']:.0f} s")
    return 1 if any(bound["verdict"] == FAILS for bound in record["bounds"]) else 0


def print_again(record: dict) -> int:
    """Judge a record once more, whole or of a run that was stopped, and print it; exit status as of `measure_gpu`."""
    record = record | judgement(record)
    print_summary(record)
    if not record["complete"]:
        print(f"stopped early: {record.get('stopped', 'killed')}; sections: {', '.join(record['sections']) or 'none'}")
    return 1 if any(bound["verdict"] == FAILS for bound in record["bounds"]) else 0


def judgement(record: dict) -> dict:
    """What follows from a record: "break_even" by plan, and "bounds" where its times mean something."""
    measured = all(record["sections"].get(name, {}).get("rows") for name in ("ceilings", "verify"))
    found = {plan: break_even_rows(record, plan) for plan in ("cascade", "fused")} if measured else {}
    return {"break_even": found, "bounds": judge(record) if record["timings"] == DEVICE_TIMES else []}


def _meaning(clock: Clock, smoke: bool) -> str:
    if not clock.meaningful:
        return "not meaningful: no GPU, kernels interpreted"
    return "not meaningful: tiny sizes" if smoke else DEVICE_TIMES


def _check_kernels(record: dict, smoke: bool, quick: bool, end: float) -> str | None:
    """Run the correctness checks into the record until their part of the time is over; what is wrong first, or None.

    The dtype that is timed comes first, so that what is skipped matters least.
    """
    start = time.monotonic()
    part = CHECKS_SHARE * (end - start)
    dtypes = ("bfloat16",) if quick else ("bfloat16", "float16", "float32")
    todo = checks.checks(dtypes=dtypes, small=smoke)
    todo = sorted(todo, key=lambda check: dtypes.index(check.dtype)) if not smoke else list(todo)
    done: list[str] = []
    wrong = None
    for check, problem in checks.run_all(todo, deadline=start + KERNELS_SHARE * part):
        progress(f"checking {len(done) + 1} of {len(todo)}: {check}")
        if problem is not None:
            wrong = f"{check}: {problem}"
            break
        done.append(str(check))
    skipped = [] if wrong else [str(check) for check in todo if str(check) not in done]
    if wrong is None and not smoke:
        left = None if part == math.inf else max(0.0, start + part - time.monotonic())
        try:
            wrong = checks.run_marked_tests(PACKAGE_ROOT / "tests", left)
        except TimeoutError as error:
            skipped.append(f"{MARKED_TESTS}: {error}")
    taken = time.monotonic() - start
    record["checks"] = {"passed": sorted(done), "skipped": skipped, "wrong": wrong, "seconds": taken}
    progress("")
    print(f"checks: {len(done)} of {len(todo)} right, {len(skipped)} skipped, {taken:.0f} s", flush=True)
    for name in skipped:
        print(f"  no time for: {name}")
    return wrong


def _take_sections(bench: Session, record: dict, output: Path, end: float, found: Sensors) -> None:
    """All sections in turn. A section may use its share of what is left, and leaves what it does not need to others."""
    shares = {name: share for name, (share, _) in SECTIONS.items()}
    for name, (share, section) in SECTIONS.items():
        start = written = time.monotonic()
        bench.deadline = start + (end - start) * share / sum(shares.values())
        del shares[name]
        bench.skipped = []
        rows: list[dict] = []
        record["sections"][name] = {"rows": rows, "skipped": bench.skipped}
        for row in section(bench):
            rows.append(row)
            if time.monotonic() - written >= WRITE_EVERY_S:
                write_record(output, record)
                written = time.monotonic()
        bench.clock.release()
        record["sections"][name] |= {"seconds": time.monotonic() - start, "sensors": found.taken()}
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
