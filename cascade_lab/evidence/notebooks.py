"""Run, refresh and check the notebooks: what the three commands do with executed notebooks.

`run` publishes results into an output folder, `refresh` rewrites the committed files from the CPU
interpreter, and `check` says whether those are canonical and fresh. Nothing is put in place before
everything it belongs to succeeded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cascade_lab.evidence import canonical
from cascade_lab.evidence.claims import FAILS, VERDICTS, gather, print_table
from cascade_lab.evidence.execution import execute, load
from cascade_lab.evidence.export import to_html
from cascade_lab.evidence.figures import FOLDER as FIGURES_FOLDER
from cascade_lab.evidence.parameters import NotebookError, UsageError, bind, read_parameters

if TYPE_CHECKING:
    from nbformat import NotebookNode

CLAIMS_FILE = "claims.json"
CELL_TIMEOUT, START_TIMEOUT = 120, 60
# Committed outputs come from one place that every machine has.
_ON_CPU = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def find_folder(given: Path | None = None) -> Path:
    """The notebooks folder: the given one, else `notebooks/` here or above, else that of the checkout.

    Raises:
        UsageError: there is none.
    """
    if given is not None:
        if not given.is_dir():
            raise UsageError(f"--notebooks: no such folder: {given}")
        return given.resolve()
    here = Path.cwd()
    checkout = Path(__file__).resolve().parents[2]
    for folder in [
        here / "notebooks",
        here,
        *(above / "notebooks" for above in here.parents),
        checkout / "notebooks",
    ]:
        if folder.name == "notebooks" and any(folder.glob("*.ipynb")):
            return folder.resolve()
    raise UsageError(f"no notebooks/ folder in {here} or above it; name one with --notebooks DIR")


def select(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """The notebooks of a folder in order, or those named: by file, stem, or a beginning that only one has.

    Raises:
        UsageError: a name that fits none or several, or a folder without notebooks.
    """
    known = sorted(path for path in folder.glob("*.ipynb") if not path.name.startswith("."))
    if not known:
        raise UsageError(f"no notebooks in {folder}")
    if not names:
        return known
    chosen = []
    for name in names:
        stem = Path(name).name.removesuffix(".ipynb")
        fits = [p for p in known if p.stem == stem] or [p for p in known if stem and p.stem.startswith(stem)]
        if len(fits) != 1:
            which = f"fits {', '.join(p.stem for p in fits)}" if fits else "is no notebook"
            raise UsageError(f"{name!r} {which}; the notebooks are {', '.join(p.stem for p in known)}")
        chosen += [fits[0]] if fits[0] not in chosen else []
    return chosen


def run(
    names: Sequence[str] = (),
    parameters: Mapping[str, object] | None = None,
    *,
    folder: Path,
    output: Path,
    cell_timeout: int = CELL_TIMEOUT,
    start_timeout: int = START_TIMEOUT,
) -> int:
    """Execute notebooks, publish each good one as NAME.ipynb and NAME.html, and print a table of claims.

    A notebook that fails leaves its output in `output`/failed and its last good result as it was; in
    claims.json it then has its failing claims and no others, so that nothing of a failed run reads as a
    result. The other notebooks run all the same.

    Args:
        names: as for `select`; none means all.
        parameters: values for the parameters cells, typed or as text; every chosen notebook must know each
            name.
        folder: the notebooks folder; only read.
        output: where results go; created if needed.
        cell_timeout: seconds for each cell.
        start_timeout: seconds for the kernel to start.

    Returns:
        0 when every notebook gave a result, else 1, after one message on stderr for each that did not.

    Raises:
        UsageError: unknown notebook or parameter, a value of the wrong type, or an output folder that
            cannot be written.
    """
    paths = select(folder, names)
    for path in paths:
        # A notebook that cannot be read is reported when its turn comes, a wrong value before anything runs.
        with contextlib.suppress(NotebookError):
            bind(read_parameters(load(path)), parameters or {}, path.name)
    records = read_claims(output) if names else []
    status = 0
    for path in paths:
        with _scratch(output) as scratch:
            figures = scratch / "figures"
            try:
                executed = execute(
                    path,
                    parameters or {},
                    scratch=scratch,
                    environment={FIGURES_FOLDER: str(figures)},
                    cell_timeout=cell_timeout,
                    start_timeout=start_timeout,
                    progress_bar=_on_terminal(),
                )
                page = to_html(canonical.canonical(executed, keep_measurements=True), path)
            except NotebookError as error:
                status = 1
                partial = getattr(error, "executed", None)
                kept = _keep_failure(partial, path, output)
                print(
                    f"{path.name}, {error}{kept}" if error.cell else f"{path.name}: {error}{kept}",
                    file=sys.stderr,
                )
                claims = [claim for claim in _reached(partial) if claim.verdict == FAILS]
            else:
                claims = gather(executed)
                _publish(executed, page, figures, path, output)
        records = [r for r in records if r["notebook"] != path.stem] + [c.record(path.stem) for c in claims]
        records.sort(key=lambda record: record["notebook"])
        _write(output / CLAIMS_FILE, json.dumps(records, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    chosen = {path.stem for path in paths}
    print_table(record for record in records if record["notebook"] in chosen)
    return status


def read_claims(output: Path) -> list[dict[str, object]]:
    """The claims of the last runs, or none when nothing was run yet.

    Raises:
        UsageError: claims.json is damaged.
    """
    path = output / CLAIMS_FILE
    if not path.exists():
        return []
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        if any(record["verdict"] not in VERDICTS or not isinstance(record["notebook"], str) for record in records):
            raise ValueError("unknown verdict")
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is damaged ({error}); remove it and run again") from None
    return records


def refresh(names: Sequence[str] = (), *, folder: Path, figures: Path, cell_timeout: int = CELL_TIMEOUT) -> int:
    """Execute the committed notebooks with default parameters on the CPU interpreter and rewrite them.

    Files are written when all notebooks succeeded. One in which nothing but cells tagged
    nbval-ignore-output changed stays as it is, byte for byte.

    Args:
        names, folder: as for `run`; the folder is written to.
        figures: where the pictures saved by the notebooks go.
        cell_timeout: seconds for each cell.

    Returns:
        0, or 1 after one message on stderr for each notebook that failed.
    """
    with tempfile.TemporaryDirectory(prefix="cascade-") as scratch:
        fresh, status = _rerun(select(folder, names), Path(scratch), cell_timeout)
        if status:
            return status
        for path, notebook in fresh.items():
            committed = canonical.canonical(load(path))
            kept = committed if canonical.same_but_ignored(committed, notebook) else notebook
            _write_if_changed(path, canonical.text_of(kept).encode())
            for problem in canonical.problems(path):
                print(f"{path.name}, {problem}", file=sys.stderr)
        for picture in _files(Path(scratch) / "figures"):
            _write_if_changed(figures / picture.name, picture.read_bytes())
    return 0


def check(
    names: Sequence[str] = (),
    *,
    folder: Path,
    figures: Path,
    execute_notebooks: bool = True,
    cell_timeout: int = CELL_TIMEOUT,
) -> int:
    """Say whether the committed notebooks are canonical and, by running them, fresh. Writes nothing.

    Args:
        names, folder, figures, cell_timeout: as for `refresh`.
        execute_notebooks: False checks the form alone.

    Returns:
        0, or 1 after one line on stderr for each problem.
    """
    paths = select(folder, names)
    found = [f"{path.name}, {problem}" for path in paths for problem in canonical.problems(path)]
    status = 1 if found else 0
    if execute_notebooks and not found:
        with tempfile.TemporaryDirectory(prefix="cascade-") as scratch:
            fresh, status = _rerun(paths, Path(scratch), cell_timeout)
            for path, notebook in fresh.items():
                found += [f"{path.name}, {each}" for each in canonical.differences(load(path), notebook)]
            for picture in _files(Path(scratch) / "figures"):
                committed = figures / picture.name
                if picture.suffix == ".svg" and not (
                    committed.exists() and committed.read_bytes() == picture.read_bytes()
                ):
                    found.append(f"{figures.name}/{picture.name} is not what a fresh run draws")
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else status


def _rerun(paths: Iterable[Path], scratch: Path, cell_timeout: int) -> tuple[dict[Path, NotebookNode], int]:
    fresh, status = {}, 0
    for path in paths:
        place = scratch / path.stem
        place.mkdir()
        try:
            executed = execute(
                path,
                {},
                scratch=place,
                environment=_ON_CPU | {FIGURES_FOLDER: str(scratch / "figures")},
                cell_timeout=cell_timeout,
                progress_bar=_on_terminal(),
            )
        except NotebookError as error:
            print(f"{path.name}, {error}" if error.cell else f"{path.name}: {error}", file=sys.stderr)
            status = 1
        else:
            fresh[path] = canonical.canonical(executed)
    return fresh, status


def _publish(executed: NotebookNode, page: str, figures: Path, path: Path, output: Path) -> None:
    for picture in _files(figures):
        _write(output / "figures" / picture.name, picture.read_bytes())
    _write(output / f"{path.stem}.html", page)
    _write(output / path.name, canonical.text_of(canonical.canonical(executed, keep_measurements=True)))
    (output / "failed" / path.name).unlink(missing_ok=True)


def _keep_failure(partial: NotebookNode | None, path: Path, output: Path) -> str:
    if partial is None:
        return ""
    kept = output / "failed" / path.name
    _write(kept, canonical.text_of(canonical.canonical(partial, keep_measurements=True)))
    return f" (output kept in {os.path.relpath(kept)})"


def _reached(partial: NotebookNode | None) -> list:
    try:
        return [] if partial is None else gather(partial)
    except ValueError:
        return []


@contextlib.contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    # Beside the results, so that moving them into place is one rename.
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".running-", dir=output))
    except OSError as error:
        raise UsageError(f"cannot write to {output} ({error.strerror}); name a place with --output DIR") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(fresh, path)


def _write_if_changed(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        _write(path, content)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.is_file())


def _on_terminal() -> bool:
    return sys.stderr.isatty() and not os.environ.get("CI")
