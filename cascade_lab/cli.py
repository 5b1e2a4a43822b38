"""The `cascade-lab` command: run the notebooks, refresh and check them, publish them, measure, read traces.

The notebook tools are imported where they are used, so that help, claims, bench and trace work without them. Exit
status: 0 all well, 1 something failed, 2 wrong usage; 129, 130 and 143 hung up, interrupted and terminated.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import cascade_lab
from cascade_lab import runtime, trace_report
from cascade_lab.book import modes, runner
from cascade_lab.evidence.claims import COLUMNS, FAILS, print_table
from cascade_lab.files import Stopped, UsageError, as_exceptions, one_line

_EXAMPLES = """\
examples:
  cascade-lab run                              every notebook, results in build/
  cascade-lab run 01 -p seed 3                 one notebook with another value of its parameter `seed`
  cascade-lab run --output ../results          from a checkout that cannot be written
  cascade-lab run --target sm_90               with compiled code, executed without a GPU; results in build/sm_90/
  cascade-lab claims                           the table of the last run again
  cascade-lab check                            are the committed notebooks canonical and fresh?
  cascade-lab trace requests.jsonl             what the prefix hits of a trace are worth

exit status: 0 all well, 1 something failed, 2 wrong usage
"""
_INSTALL = "the tools for that come with: pip install 'cascade-lab[{extra}]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command line and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    status = 0
    try:
        with as_exceptions():
            status = options.carry_out(options)
            if sys.stdout is not None:
                sys.stdout.flush()
        return status
    except UsageError as error:
        print(one_line(f"cascade-lab {options.command}: {error}", 1000), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        hint = _INSTALL.format(extra="site" if options.command == "site" else "notebooks")
        print(f"cascade-lab {options.command}: {error}; {hint}", file=sys.stderr)
        return 1
    except Stopped as stop:
        print(stop, file=sys.stderr)
        return stop.status
    except BrokenPipeError:
        # The reader of a pipe left early; Python would complain once more when it flushes at exit.
        sys.stdout = None
        return status
    except OSError as error:
        sys.stdout = None
        where = f"{error.filename}: " if error.filename else ""
        print(one_line(f"cascade-lab {options.command}: {where}{error.strerror or error}", 1000), file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cascade-lab",
        description="Run, refresh and check the notebooks of cascade_lab, show their claims, measure kernels, and read "
        "request traces.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cascade-lab {cascade_lab.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    names = argparse.ArgumentParser(add_help=False)
    names.add_argument("names", nargs="*", metavar="NAME", help="notebook by name or its beginning (default: all)")
    source = argparse.ArgumentParser(add_help=False)
    source.add_argument(
        "--notebooks", type=Path, metavar="DIR", help="notebooks folder (default: notebooks/, here or above)"
    )
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for results (default: build/ beside the notebooks folder)"
    )
    target = argparse.ArgumentParser(add_help=False)
    target.add_argument(
        "--target",
        default=os.environ.get(runtime.TARGET) or None,
        metavar="SM",
        help="sm_80 or sm_90: kernels are compiled for it and what was compiled is executed on the CPU; results lie in "
        "a folder of that name in the output folder",
    )
    timeout = argparse.ArgumentParser(add_help=False)
    timeout.add_argument(
        "--timeout", type=_seconds, default=120, metavar="S", help="seconds for each cell (default: %(default)s)"
    )

    run = commands.add_parser(
        "run",
        parents=[names, source, output, target, timeout],
        help="execute notebooks and print their claims",
        description="Execute notebooks into the output folder as NAME.ipynb and NAME.html, write claims.json, and "
        "print the table of claims. A notebook that fails is kept in failed/ and makes the exit status 1; so does a "
        "cell that takes longer than its time or prints more than 1 MiB. Only notebooks of the one folder are run.",
        epilog="example: cascade-lab run 01_lse_splitting -p seed 3",
    )
    run.add_argument(
        "-p",
        "--parameter",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set a parameter; its type is that of the notebook's parameters cell, a list is written as in Python "
        "(repeatable)",
    )
    run.set_defaults(carry_out=_run)

    refresh = commands.add_parser(
        "refresh",
        parents=[names, source, timeout],
        help="re-execute the committed notebooks and rewrite them",
        description="Execute the committed notebooks with default parameters on the CPU interpreter and write them "
        "back in canonical form; byte-identical when nothing changed, untouched when anything fails.",
    )
    refresh.set_defaults(carry_out=_refresh)

    check = commands.add_parser(
        "check",
        parents=[names, source, timeout],
        help="are the committed notebooks canonical and fresh?",
        description="Check the form of the committed notebooks, then execute them on the CPU interpreter and compare "
        "their outputs. Writes nothing.",
    )
    check.add_argument("--no-run", action="store_true", help="check the form alone")
    check.set_defaults(carry_out=_check)

    claims = commands.add_parser(
        "claims",
        parents=[source, output, target],
        help="print the claims of the last runs",
        description="Print the table of claims from claims.json in the output folder, each with the modes of Triton "
        "that figures/measured/modes.json records it to hold in.",
    )
    claims.set_defaults(carry_out=_claims)

    recorded = commands.add_parser(
        "modes",
        parents=[source, timeout],
        help="run all notebooks in every mode of Triton and record which claims hold in which",
        description="Run all notebooks with default parameters as code compiled for sm_80 and for sm_90, executed on "
        "the CPU, and on a GPU where there is one. Which claims held where is written to figures/measured/modes.json; "
        "the interpreter's verdicts are those of the committed notebooks.",
    )
    recorded.set_defaults(carry_out=_modes)

    site = commands.add_parser(
        "site",
        parents=[source],
        help="make web pages of the notebooks, their claims and the package",
        description="Make a site of the committed notebooks as they are: home page, pages, the table of claims, an "
        "explorer of the two ledgers, API reference. It needs no network and no server.",
    )
    site.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of the site (default: build/site/ beside the notebooks folder)",
    )
    site.set_defaults(carry_out=_site)

    edition = commands.add_parser(
        "edition",
        parents=[source, output],
        help="which passages of the Chinese edition lag behind the English text",
        description="Compare the translations, README.zh.md, SHEET.zh.md and notebooks/zh/, with the English text, and "
        "print a line for each passage that lags behind, is missing, or differs in formulas, code, numbers or links. "
        "With --mark or --write, first do that.",
    )
    edition.add_argument(
        "--mark",
        nargs="*",
        metavar="ID",
        help="note that these passages, or all, translate today's English text, once they were brought up to date",
    )
    edition.add_argument(
        "--write",
        action="store_true",
        help="write the notebooks with Chinese text, and the same code and outputs, into zh/ in the output folder",
    )
    edition.set_defaults(carry_out=_edition)

    bench = commands.add_parser(
        "bench",
        help="measure on this machine",
        description="Time the kernels on this machine and print ratios beside their bounds.",
    )
    try:
        from cascade_lab.bench.command import add_arguments
    except ImportError as error:
        bench.epilog = f"not available here: {error}"
    else:
        add_arguments(bench)
    bench.set_defaults(carry_out=_bench)

    trace = commands.add_parser(
        "trace",
        help="what the prefix hits of a request trace are worth",
        description="Read a trace of requests, replay a prefix cache over it, and print the hit ratios, the work that "
        "is left, and the error of each formula that knows the trace by a mean alone.",
        epilog="example: cascade-lab trace conversation_trace.jsonl --capacity 3000000 --json report.json",
    )
    trace_report.add_arguments(trace)
    trace.set_defaults(carry_out=trace_report.carry_out)
    return parser


def _run(options: argparse.Namespace) -> int:
    parameters: dict[str, object] = {}
    for name, text in options.parameter:
        if name in parameters:
            raise UsageError(f"parameter {name!r} is given twice")
        parameters[name] = text
    folder = runner.find_folder(options.notebooks)
    return runner.run(
        options.names,
        parameters,
        folder=folder,
        output=_output(options, folder),
        environment=_executing(options.target) if options.target else None,
        cell_timeout=options.timeout,
    )


def _executing(target: str) -> dict[str, str]:
    """The variables of a process that executes what is compiled for `target`."""
    from cascade_lab.evidence.ptx.launch import executed_target

    try:
        name = executed_target(target).name
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    if runtime.triton_mode() == "absent":
        raise UsageError("--target: compiling needs the triton package, which is not installed")
    return {runtime.TARGET: name, runtime.SWITCH: "0", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def _modes(options: argparse.Namespace) -> int:
    import torch

    folder = runner.find_folder(options.notebooks)
    environments = {mode: _executing(target) for target, mode in modes.EXECUTED.items()}
    devices = list(modes.EXECUTED)
    if torch.cuda.device_count():
        environments[modes.ON_A_GPU] = {runtime.TARGET: "", runtime.SWITCH: "0"}
        devices.append(torch.cuda.get_device_name())
    return modes.record(
        environments,
        folder=folder,
        devices=devices,
        provenance={name: value for name, value in runtime.provenance().items() if name != "triton mode"},
        cell_timeout=options.timeout,
    )


def _refresh(options: argparse.Namespace) -> int:
    folder = runner.find_folder(options.notebooks)
    return runner.refresh(options.names, folder=folder, figures=folder.parent / "figures", cell_timeout=options.timeout)


def _check(options: argparse.Namespace) -> int:
    folder = runner.find_folder(options.notebooks)
    return runner.check(
        options.names,
        folder=folder,
        figures=folder.parent / "figures",
        execute_notebooks=not options.no_run,
        cell_timeout=options.timeout,
    )


def _claims(options: argparse.Namespace) -> int:
    if options.target:
        _executing(options.target)
    try:
        folder = runner.find_folder(options.notebooks)
    except UsageError:
        if options.notebooks or not options.output:
            raise
        folder = None
    output = _output(options, folder)
    records = runner.read_claims(output)
    if not records:
        print(f"no claims in {output} yet; `cascade-lab run` makes them", file=sys.stderr)
        return 1
    known = modes.held(folder) if folder else {}
    columns = (*COLUMNS, modes.COLUMN) if known else COLUMNS
    print_table(modes.with_modes(records, known), columns)
    return 1 if any(record["verdict"] == FAILS for record in records) else 0


def _site(options: argparse.Namespace) -> int:
    from cascade_lab.book import site

    folder = runner.find_folder(options.notebooks)
    return site.build(folder, (options.output or folder.parent / "build" / "site").resolve())


def _edition(options: argparse.Namespace) -> int:
    from cascade_lab.book import editions

    folder = runner.find_folder(options.notebooks)
    if options.write:
        place = _output(options, folder) / editions.EDITION
        print(f"{len(editions.write(folder, place))} notebooks in {place}")
    documents = editions.documents(folder)
    if not documents:
        raise UsageError(f"no translations in {folder / editions.EDITION} and beside {folder}")
    marked = options.mark is not None
    judged = [editions.mark(one, options.mark) if marked else editions.problems(one) for one in documents]
    found = [line for lines in judged for line in lines]
    count = sum(len(document.translation) for document in documents)
    print(*found or [f"{len(documents)} texts, {count} passages, up to date"], sep="\n")
    return 1 if found else 0


def _bench(options: argparse.Namespace) -> int:
    from cascade_lab.bench import command

    return command.carry_out(options)


def _output(options: argparse.Namespace, folder: Path | None) -> Path:
    output = (options.output or folder.parent / "build").resolve()
    return output / options.target if getattr(options, "target", None) else output


def _seconds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected whole seconds from 1, given {text!r}")
    return int(text)
