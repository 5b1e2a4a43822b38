"""The command `cascade-lab bench`: its options, and which of the benchmarks they ask for."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from cascade_lab import runtime
from cascade_lab.bench import cpu
from cascade_lab.bench.record import place, read_gpu_record, write_record
from cascade_lab.files import UsageError

CPU_OUTPUT = Path("figures/measured/cpu.json")
COMPILED_OUTPUT = Path("figures/measured/compiled.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `cascade-lab bench`."""
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--cpu",
        action="store_true",
        help="measure the CPU instead of a GPU: import, torch backend against SDPA, plans, regions, memory, host time "
        "of calls, merges over ranks, notebook",
    )
    kind.add_argument(
        "--smoke", action="store_true", help="run every section at tiny sizes, without a GPU too; times mean nothing"
    )
    kind.add_argument(
        "--compiled",
        action="store_true",
        help="compile every kernel for eight targets and count its instructions; needs no GPU, and no clock",
    )
    kind.add_argument(
        "--judge",
        type=Path,
        metavar="FILE",
        help="print a recorded GPU run and its bounds, of a run that was stopped too; measure nothing",
    )
    kind.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the figures of a recorded GPU run, measure nothing"
    )
    parser.add_argument(
        "--quick", action="store_true", help="three minutes: fewer points, rounds and checks; bounds stay"
    )
    parser.add_argument(
        "--max-autotune", action="store_true", help="let FlexAttention be tuned, minutes for each shape (GPU)"
    )
    parser.add_argument(
        "--budget",
        type=_budget,
        metavar="S",
        help="seconds for a whole GPU run, checks and compilation included (default: 540, with --quick 180); what does "
        "not fit is skipped and named in the record",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help=f"folder for the record, or its file where PATH ends in .json (default: {CPU_OUTPUT.as_posix()}, on a GPU "
        "gpu_<name>.json beside it); it is written from the start and kept up to date, so where the checkout cannot be "
        "written, or only one folder outlives the machine, give that folder; with --plot the folder of the figures "
        "(default: figures/)",
    )


def _budget(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, given {text!r}")
    return seconds


def carry_out(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON file. 0 when no bound is missed, 1 otherwise or when nothing ran."""
    if args.plot is not None:
        from cascade_lab.pictures import gpu as gpu_pictures

        if not args.plot.is_file():
            raise UsageError(f"--plot: expected the record of a GPU run, given {args.plot.as_posix()}: no such file")
        for path in gpu_pictures.draw_record(args.plot, args.output or Path("figures")):
            print(path.as_posix())
        return 0
    if args.judge is not None:
        from cascade_lab.bench.gpu import run

        return run.print_again(read_gpu_record(args.judge, "--judge"))
    if args.compiled:
        return _run_compiled(place(args.output, COMPILED_OUTPUT))
    if not args.cpu:
        return _run_gpu(args)
    return cpu.measure_cpu(place(args.output, CPU_OUTPUT), quick=args.quick)


def _run_gpu(args: argparse.Namespace) -> int:
    if not args.smoke and runtime.device().type != "cuda":
        reason = runtime.device_reason()
        print(
            f"bench: kernels are measured on a GPU, and {reason}; measure the CPU with: bench --cpu, "
            "or try the GPU's benchmark at tiny sizes with: bench --smoke"
        )
        return 1
    if runtime.triton_mode() == "executed":
        print(f"bench: {runtime.device_reason()}, which takes no time of a GPU; unset {runtime.TARGET}")
        return 1
    if runtime.triton_mode() == "absent":
        print("bench: the kernels need Triton, which is not installed; measure the CPU with: bench --cpu")
        return 1
    from cascade_lab.bench.gpu import run
    from cascade_lab.bench.gpu.session import PRESETS

    scale = PRESETS["smoke" if args.smoke else "quick" if args.quick else "full"]
    if args.budget is not None:
        scale = replace(scale, budget_s=args.budget)
    return run.measure_gpu(scale, args.output, quick=args.quick, smoke=args.smoke, max_autotune=args.max_autotune)


def _run_compiled(output: Path) -> int:
    """Inspect the compiled kernels in a child process, for this one may interpret them; the last line sums them up."""
    from cascade_lab.evidence import compiled

    if runtime.triton_mode() == "absent":
        print("bench: --compiled needs Triton, which is not installed", file=sys.stderr)
        return 1
    found = compiled.in_child("survey()")
    write_record(output, found)
    print(compiled.table(found))
    return 0
