"""Compile every launch of the notebooks and of the kernel tests for every target; makes figures/measured/launches.json.

`make compiled`, or `python -m tools.compile_launches`, runs the notebooks, at their defaults and at the other
parameters that their tests know, and the kernel tests, all in the interpreter, and records what they ask of the Triton
backend. Each distinct kernel that those calls need on a target is then compiled for it, without a card, by the
package's own launch code. It ends with 1 when a kernel does not compile, needs more shared memory than the target has,
or spills in half precision on sm_80 or later. Nothing is executed, and no time is taken.

`--targets sm_80,sm_90` and `--slice 2/8` split the work: calls are kept in build/launches until a source changes, what
was compiled until a kernel or the calls do, and the record says of which slices of which targets it is.
`--sample` writes tests/data/launches.jsonl instead, the few calls that `make test` compiles.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

from cascade_lab import runtime
from cascade_lab.bench.record import write_record
from cascade_lab.book import runner
from cascade_lab.evidence import launches
from cascade_lab.evidence.compiled import in_child

CHECKOUT = Path(__file__).resolve().parents[1]
WORK = CHECKOUT / "build" / "launches"
RECORD = CHECKOUT / "figures" / "measured" / "launches.json"
SAMPLE = CHECKOUT / "tests" / "data" / "launches.jsonl"
# those of compiled code, beside them, compile what they launch themselves, and property suites draw shapes at random
KERNEL_TESTS = sorted(
    str(path.relative_to(CHECKOUT))
    for path in (*CHECKOUT.glob("tests/core/test_*.py"), CHECKOUT / "tests/evidence/test_reads.py")
    if "backend" in path.read_text(encoding="utf-8")
)
CELL_TIMEOUT_S = 1800
"""A cell's seconds, on a machine that does other work."""
PIECES = 4
"""Children that one slice of one target is compiled in, two at a time."""
HOOK = '''
import importlib.machinery
import sys
from pathlib import Path


class Watch:
    """Watches the modules that launch from the moment they are loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in {modules!r}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            from cascade_lab.evidence.launches import watch

            watch(module, Path({folder!r}))

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Watch)
'''


def watching(hook: Path, folder: Path) -> dict[str, str]:
    """Variables under which every Python records its calls in `folder`, interpreted; the hook is put into `hook`."""
    text = HOOK.format(modules=tuple(launches.ENTRIES), folder=str(folder))
    (hook / "sitecustomize.py").write_text(text, encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(hook), str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, runtime.SWITCH: "1", runtime.TARGET: ""}


def record_calls(
    notebooks: Mapping[str, Iterable[Mapping[str, object]]], tests: Sequence[str], folder: Path
) -> list[dict[str, object]]:
    """The distinct calls of notebooks, each at its sets of parameters, and of tests.

    They are kept in `folder` as they come, and a recording that was broken off goes on behind the last whole step.

    Raises:
        RuntimeError: one of them failed, so that calls would be missing.
    """

    def once(step: str, take: Callable[[dict[str, str]], int]) -> None:
        done = folder / f"{_digest((), step)}.whole"
        if done.exists():
            return
        print(f"recording {step}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as hook:
            if take(watching(Path(hook), folder)):
                raise RuntimeError(f"{step} failed")
        done.touch()

    def notebook(name: str, parameters: Mapping[str, object]) -> Callable[[dict[str, str]], int]:
        def take(environment: dict[str, str]) -> int:
            with tempfile.TemporaryDirectory() as output:
                options = {"folder": CHECKOUT / "notebooks", "output": Path(output), "environment": environment}
                return runner.run([name], parameters, **options, quiet=True, cell_timeout=CELL_TIMEOUT_S)

        return take

    def suite(environment: dict[str, str]) -> int:
        command = [sys.executable, "-m", "pytest", *tests, "-n", "2", "-q", "-p", "no:cacheprovider"]
        return subprocess.run(command, cwd=CHECKOUT, env=os.environ | environment, check=False).returncode

    folder.mkdir(parents=True, exist_ok=True)
    for name, sets in notebooks.items():
        for parameters in sets:
            once(f"{name} {json.dumps(dict(parameters))}", notebook(name, parameters))
    if tests:
        once("tests", suite)
    return launches.gathered(folder)


def _digest(paths: Iterable[Path], text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def all_calls() -> Path:
    """The file of all calls, recorded anew when a source is another than when it was."""
    from tests.book.test_notebooks import PARAMETER_SETS

    sources = [path for room in ("cascade_lab", "tests") for path in (CHECKOUT / room).rglob("*.py")]
    sources += (CHECKOUT / "notebooks").glob("*.ipynb")
    digest = _digest(sources)
    path = WORK / f"calls-{digest}.jsonl"
    if not path.is_file():
        sets = {name: [{}, *sets.values()] for name, sets in PARAMETER_SETS.items()}
        calls = record_calls(sets, KERNEL_TESTS, WORK / f"recorded-{digest}")
        _write_lines(path, calls)
    return path


def _write_lines(path: Path, values: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(value, separators=(",", ":")) + "\n" for value in values)
    path.write_text(lines, encoding="utf-8")


def compile_slice(calls: Path, target: str, slice_: tuple[int, int], kept: Path) -> None:
    """Compile slice i of n of what the calls need on a target, and keep what came of it, unless it is kept already."""
    part = kept / f"{target}-{slice_[0]}-of-{slice_[1]}.json"
    if part.is_file():
        return
    first, step = slice_[0] - 1, slice_[1]

    def piece(j: int) -> list[dict[str, object]]:
        expression = f"compiled_slice({str(calls)!r}, {target!r}, {first + step * j}, {step * PIECES})"
        found = in_child(expression, module="cascade_lab.evidence.launches")
        print(f"{target}, slice {slice_[0]} of {step}: {len(found)} kernels more", file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(2) as pool:
        found = [one for piece_found in pool.map(piece, range(PIECES)) for one in piece_found]
    kept.mkdir(parents=True, exist_ok=True)
    refused = in_child(f"refused({str(calls)!r}, {target!r})", module="cascade_lab.evidence.launches")
    write_record(part, {"kernels": found, "refused": refused})


def summary(kept: Path, targets: Sequence[str], of: int) -> list[dict[str, object]]:
    """For each target what its slices that were compiled came to, in the order of the targets."""
    rows = []
    for target in targets:
        parts = {i: kept / f"{target}-{i}-of-{of}.json" for i in range(1, of + 1)}
        done = [i for i, path in parts.items() if path.is_file()]
        if not done:
            continue
        found = {}
        for one in (one for i in done for one in json.loads(parts[i].read_text(encoding="utf-8"))["kernels"]):
            found[one.get("hash") or json.dumps(one["call"])] = one
        whole = [one for one in found.values() if "error" not in one]
        largest = max(whole, key=lambda one: one["shared"], default=None)
        rows.append(
            {
                "target": target,
                "slices": done,
                "of": of,
                "kernels": len(whole),
                "shared bytes": largest and largest["shared"],
                "shared bytes of": largest and launches.kernel_name(largest),
                "limit": runtime.TARGETS[target].shared_bytes,
                "spilling": _spills(whole),
                "refused calls": json.loads(parts[done[0]].read_text(encoding="utf-8"))["refused"],
                "faults": launches.faults(found.values(), target),
            }
        )
    return rows


def _spills(kernels: Sequence[Mapping[str, object]]) -> dict[str, dict[str, int]]:
    """By dtype: kernels, those that use local memory, and the most bytes of it a thread."""
    found: dict[str, dict[str, int]] = {}
    for dtype in sorted({one["dtype"] for one in kernels}):
        local = [one["local"] for one in kernels if one["dtype"] == dtype]
        found[dtype] = {"kernels": len(local), "spilling": sum(map(bool, local)), "bytes": max(local)}
    return found


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """One line for each target, and one for each fault."""
    lines = []
    for row in rows:
        slices = "whole" if len(row["slices"]) == row["of"] else f"slices {row['slices']} of {row['of']}"
        spills = ", ".join(
            f"{one['spilling']} of {one['kernels']} {dtype} spill, at most {one['bytes']} bytes"
            for dtype, one in row["spilling"].items()
        )
        shared = f"{row['shared bytes']} of {row['limit']} bytes shared memory"
        lines.append(f"{row['target']:7} {slices}: {row['kernels']} kernels, {shared}; {spills}")
        lines += [f"        {fault}" for fault in row["faults"]]
    return "\n".join(lines)


def _slice(text: str) -> tuple[int, int]:
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise argparse.ArgumentTypeError(f"expected i/n with 1 <= i <= n, given {text!r}")
    return int(i), int(n)


def _targets(text: str) -> list[str]:
    names = text.replace(",", " ").split()
    if not names or not set(names) <= set(runtime.TARGETS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(runtime.TARGETS)}, given {text!r}")
    return [name for name in runtime.TARGETS if name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, compile, write, and judge: 1 when a kernel has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--targets", type=_targets, default=list(runtime.TARGETS), metavar="NAME,NAME")
    parser.add_argument("--slice", type=_slice, default=(1, 1), metavar="I/N")
    parser.add_argument("--calls", type=Path, metavar="FILE", help="calls recorded before; record none")
    parser.add_argument("--sample", action="store_true", help=f"write {SAMPLE.relative_to(CHECKOUT).as_posix()}")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the record, or the sample")
    args = parser.parse_args(arguments)
    if runtime.triton_mode() == "absent":
        print("compile_launches: needs Triton, which is not installed", file=sys.stderr)
        return 1
    calls = args.calls or all_calls()
    if args.sample:
        found = in_child(f"sample_of_file({str(calls)!r})", module="cascade_lab.evidence.launches")
        _write_lines(args.output or SAMPLE, found)
        print(f"{len(found)} calls")
        return 0
    provenance = runtime.provenance()
    kernels = (CHECKOUT / "cascade_lab").glob("backends/triton/*.py")
    kept = WORK / _digest([calls, *kernels], str(provenance.get("triton")))
    for target in args.targets:
        compile_slice(calls, target, args.slice, kept)
    rows = summary(kept, tuple(runtime.TARGETS), args.slice[1])
    record = {
        "source": "make compiled: compiled for each target without a card, not executed",
        "devices": [row["target"] for row in rows],
        "date": date.today().isoformat(),
        "calls": len(calls.read_text(encoding="utf-8").splitlines()),
        "targets": rows,
        "provenance": provenance,
    }
    write_record(args.output or RECORD, record)
    print(table(rows))
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
