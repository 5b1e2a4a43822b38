"""Run, refresh and check the notebooks: what the three commands do with executed notebooks.

`run` publishes results into an output folder, `refresh` rewrites the committed files from the CPU
interpreter, and `check` says whether those are canonical and fresh. A notebook is read once and put in
canonical form once. Nothing is put in place before everything it belongs to succeeded, and then all of it at once: a
signal waits, and runs beside each other take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cascade_lab.book import canonical
from cascade_lab.book.execution import execute, load, temporary_folder
from cascade_lab.book.export import to_html
from cascade_lab.book.parameters import NotebookError, bind, read_parameters
from cascade_lab.evidence.claims import FAILS, NOT_MEASURED, Claim, check_record, gather, print_table
from cascade_lab.files import FIGURES, UsageError, one_line, put_in_place, read_json

try:
    import fcntl
except ImportError:  # Windows, where runs beside each other may lose one another's claims
    fcntl = None

if TYPE_CHECKING:
    from nbformat import NotebookNode

CLAIMS_FILE = "claims.json"
CELL_TIMEOUT, START_TIMEOUT = 120, 60
# Committed outputs come from one place that every machine has.
_ON_CPU = {"TRITON_INTERPRET": "1", "CASCADE_LAB_TARGET": "", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


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

    No other file is ever meant: a path must lead to a notebook of the folder itself, and no notebook may be a link
    to a place outside it.

    Raises:
        UsageError: a name that fits none or several, a path or link to another place, or a folder without notebooks.
    """
    known = sorted(path for path in folder.glob("*.ipynb") if not path.name.startswith("."))
    if not known:
        raise UsageError(f"no notebooks in {folder}")
    chosen = [] if names else known
    for name in names:
        path = Path(name)
        places = [path.parent] if path.exists() else [path.parent, folder.parent / path.parent]
        if path.name != name and not any(_same_folder(place, folder) for place in places):
            raise UsageError(f"{name!r} is not in {folder}; name its folder with --notebooks DIR")
        stem = path.name.removesuffix(".ipynb")
        fits = [p for p in known if p.stem == stem] or [p for p in known if stem and p.stem.startswith(stem)]
        if len(fits) != 1:
            which = f"fits {', '.join(p.stem for p in fits)}" if fits else "is no notebook"
            raise UsageError(f"{name!r} {which}; the notebooks are {', '.join(p.stem for p in known)}")
        chosen += [fits[0]] if fits[0] not in chosen else []
    for path in chosen:
        if path.resolve().parent != folder.resolve():
            raise UsageError(f"{path.name} is a link to {path.resolve()}, outside {folder}")
    return chosen


def run(
    names: Sequence[str] = (),
    parameters: Mapping[str, object] | None = None,
    *,
    folder: Path,
    output: Path,
    environment: Mapping[str, str] | None = None,
    cell_timeout: int = CELL_TIMEOUT,
    start_timeout: int = START_TIMEOUT,
    quiet: bool = False,
) -> int:
    """Execute notebooks, publish each good one as NAME.ipynb and NAME.html, and print a table of claims.

    A notebook that fails leaves its output in `output`/failed and its last good result as it was; in
    claims.json it then has its failing claims and no others, so that nothing of a failed run reads as a
    result. The other notebooks run all the same. A run that is stopped leaves what it published before.
    A claim that the notebook shows and that this machine or mode of Triton cannot make is listed as not measured
    here; with other parameters claims may be others, and none is missed. A notebook without claims is published,
    and a line says so.

    Args:
        names: as for `select`; none means all.
        parameters: values for the parameters cells, typed or as text; every chosen notebook must know each
            name.
        folder: the notebooks folder; only read.
        output: where results go; created if needed.
        environment: variables that bring about another mode of Triton than that of this process.
        cell_timeout: seconds for each cell.
        start_timeout: seconds for the kernel to start.
        quiet: print no table.

    Returns:
        0 when every notebook gave a result, else 1, after one message on stderr for each that did not.

    Raises:
        UsageError: unknown notebook or parameter, a value of the wrong type, or an output folder that
            cannot be written or holds the notebooks or the committed figures.
    """
    paths = select(folder, names)
    for kept in (folder, folder.parent):
        if _same_folder(output, kept):
            raise UsageError(f"--output: results would overwrite committed files in {kept}; name another folder")
    opened = {path: _opened(path, parameters or {}) for path in paths}
    # A full run begins the list again; one of some notebooks would only lose what is there.
    complete = {path.stem for path in paths} if not names else None
    if names:
        read_claims(output)
    _check_writable(output)
    status, shown = 0, []
    for path, found in opened.items():
        with temporary_folder() as scratch:
            figures, place = scratch / "figures", scratch.parent
            try:
                if isinstance(found, NotebookError):
                    raise found
                executed = execute(
                    *found,
                    path=path,
                    scratch=scratch,
                    environment={**(environment or {}), FIGURES: str(figures)},
                    cell_timeout=cell_timeout,
                    start_timeout=start_timeout,
                    progress_bar=_on_terminal(),
                )
                claims = [claim.record(path.stem) for claim in gather(executed)]
                if not parameters:
                    claims = _with_unmeasured(claims, gather(found[0]), path.stem)
                executed = canonical.canonical(executed, keep_measurements=True)
                place = output
                _publish(_results(executed, figures, path, output), claims, path, output, complete)
                if not claims:
                    _tell(f"{path.name}: executed, makes no claim")
            except (NotebookError, OSError) as error:
                status = 1
                partial = getattr(error, "executed", None)
                claims = [claim.record(path.stem) for claim in _reached(partial) if claim.verdict == FAILS]
                if isinstance(error, NotebookError):
                    _complain(path, error, _keep_failure(partial, claims, path, output, complete))
                else:
                    _say(f"{path.name}: no results: {error.strerror or error}: {error.filename or place}")
        shown += claims
    try:
        if not quiet:
            print_table(sorted(shown, key=lambda record: record["notebook"]))
    except BrokenPipeError:
        # The reader of a pipe left early; Python would complain once more when it flushes at exit.
        sys.stdout = None
    return status


def _with_unmeasured(claims: Sequence[dict], committed: Sequence[Claim], notebook: str) -> list[dict]:
    """The claims of a run, and in their places those of the committed notebook that it could not make."""
    made = {claim["id"]: claim for claim in claims}
    absent = [replace(c, verdict=NOT_MEASURED, measured=None, raw_measured=None) for c in committed if c.id not in made]
    made |= {claim.id: claim.record(notebook) for claim in absent}
    order = [claim.id for claim in committed]
    return [made.pop(id) for id in order] + list(made.values())


def read_claims(output: Path) -> list[dict[str, object]]:
    """The claims of the last runs, or none when nothing was run yet.

    Raises:
        UsageError: claims.json is damaged.
    """
    path = output / CLAIMS_FILE
    if not path.exists():
        return []
    try:
        records = read_json(path)
        if not isinstance(records, list):
            raise ValueError("expected a list of claims")
        for number, record in enumerate(records):
            check_record(record, f"claim {number}")
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} is damaged ({one_line(error)}); remove it and run again") from None
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
        0 after one line for each notebook, with the files that were written; or 1 after one message on stderr for
        each that failed.
    """
    paths = select(folder, names)
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{folder} is rewritten, and cannot be")
    before = {path: path.read_bytes() for path in paths if path.is_file()}
    contents: dict[Path, dict[Path, bytes]] = {}
    broken: list[str] = []
    with temporary_folder() as scratch:
        for path in paths:
            committed = _loaded(path)
            fresh = None if committed is None else _rerun(path, committed, scratch, cell_timeout)
            if fresh is None:
                continue
            committed = canonical.canonical(committed)
            kept = committed if canonical.same_but_ignored(committed, fresh) else fresh
            drawn = _files(_drawn(scratch, path))
            contents[path] = {path: canonical.text_of(kept).encode()}
            contents[path] |= {figures / picture.name: picture.read_bytes() for picture in drawn}
            broken += [f"{path.name}, {problem}" for problem in canonical.broken_rules(kept)]
    if len(contents) < len(paths):
        return 1
    changed = {
        path: {place: content for place, content in made.items() if _bytes_of(place) != content}
        for path, made in contents.items()
    }
    for path, made in changed.items():
        if path in made and path in before and path.read_bytes() != before[path]:
            _say(f"{path.name}: was changed while it ran, so nothing was written; refresh it again")
            return 1
    try:
        put_in_place({place: content for made in changed.values() for place, content in made.items()})
    except OSError as error:
        _say(f"nothing refreshed: {error.filename2 or error.filename}: {error.strerror}")
        return 1
    for path, made in changed.items():
        _tell(f"refreshed {_names(made)}" if made else f"unchanged {path.name}")
    for problem in broken:
        _say(problem)
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
        0 after one line for each notebook; or 1 after one line on stderr for each problem.
    """
    notebooks, status = {}, 0
    for path in select(folder, names):
        notebooks[path] = _loaded(path)
        problems = [] if notebooks[path] is None else canonical.problems(path, notebooks[path])
        for problem in problems:
            _say(f"{path.name}, {problem}")
        if problems or notebooks[path] is None:
            status = 1
        elif not execute_notebooks:
            _tell(f"canonical {path.name}")
    if status or not execute_notebooks:
        return status
    with temporary_folder() as scratch:
        for path, committed in notebooks.items():
            fresh = _rerun(path, committed, scratch, cell_timeout)
            if fresh is None:
                status = 1
                continue
            found = [f"{path.name}, {each}" for each in canonical.differences(committed, fresh)]
            drawn = [picture for picture in _files(_drawn(scratch, path)) if picture.suffix == ".svg"]
            for picture in drawn:
                if _bytes_of(figures / picture.name) != picture.read_bytes():
                    found.append(f"{figures.name}/{picture.name} is not what a fresh run draws")
            for problem in found:
                _say(problem)
            if found:
                status = 1
            else:
                _tell(f"canonical and fresh {_names([path, *drawn])}")
    return status


def _opened(path: Path, parameters: Mapping[str, object]) -> tuple[NotebookNode, dict[str, object]] | NotebookError:
    """A notebook and the values for it. One that cannot be read is reported when its turn comes, a wrong value now."""
    try:
        notebook = load(path)
        return notebook, bind(read_parameters(notebook), parameters, path.name)
    except NotebookError as error:
        return error


def _loaded(path: Path) -> NotebookNode | None:
    """The notebook, or nothing after a line on stderr."""
    try:
        return load(path)
    except NotebookError as error:
        _complain(path, error)
        return None


def _rerun(path: Path, committed: NotebookNode, scratch: Path, cell_timeout: int) -> NotebookNode | None:
    """What a run on the CPU interpreter makes of a notebook, canonical, or nothing after a line on stderr."""
    place = scratch / path.stem
    place.mkdir()
    try:
        executed = execute(
            committed,
            {},
            path=path,
            scratch=place,
            environment=_ON_CPU | {FIGURES: str(_drawn(scratch, path))},
            cell_timeout=cell_timeout,
            progress_bar=_on_terminal(),
        )
        # which Python ran it is no result
        executed.metadata.language_info = committed.metadata.get("language_info", {})
        return canonical.canonical(executed)
    except NotebookError as error:
        _complain(path, error)
    except OSError as error:
        _say(f"{path.name}: {error.strerror or error}")
    return None


def _drawn(scratch: Path, path: Path) -> Path:
    """The folder for the pictures of one notebook."""
    return scratch / path.stem / "figures"


def _results(executed: NotebookNode, figures: Path, path: Path, output: Path) -> dict[Path, bytes]:
    contents = {output / "figures" / picture.name: picture.read_bytes() for picture in _files(figures)}
    contents[output / f"{path.stem}.html"] = to_html(executed, path, figures=figures).encode()
    contents[output / path.name] = canonical.text_of(executed).encode()
    return contents


def _publish(
    contents: Mapping[Path, bytes],
    claims: Sequence[Mapping[str, object]],
    path: Path,
    output: Path,
    complete: set[str] | None,
    *,
    succeeded: bool = True,
) -> None:
    """Put the files of one notebook and its claims into place, between those of other runs.

    Args:
        contents: the files.
        claims: what claims.json holds of this notebook from now on.
        path, output: as for `run`.
        complete: in a full run the names of all notebooks; claims of others are dropped.
        succeeded: whether an earlier failure is over.
    """
    with _turn(output):
        try:
            records = read_claims(output)
        except UsageError:
            if complete is None:
                raise
            records = []
        kept = [r for r in records if r["notebook"] != path.stem and (complete is None or r["notebook"] in complete)]
        records = sorted([*kept, *claims], key=lambda record: record["notebook"])
        text = json.dumps(records, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        failed = output / "failed" / path.name
        put_in_place(
            {**contents, output / CLAIMS_FILE: text.encode()},
            (lambda: failed.unlink(missing_ok=True)) if succeeded else None,
        )


def _keep_failure(
    partial: NotebookNode | None,
    claims: Sequence[Mapping[str, object]],
    path: Path,
    output: Path,
    complete: set[str] | None,
) -> str:
    kept = output / "failed" / path.name
    contents = (
        {} if partial is None else {kept: canonical.text_of(canonical.canonical(partial, keep_measurements=True))}
    )
    try:
        _publish({p: text.encode() for p, text in contents.items()}, claims, path, output, complete, succeeded=False)
    except OSError as error:
        return f" (output not kept: {error.strerror})"
    return f" (output kept in {_relative(kept)})" if contents else ""


def _reached(partial: NotebookNode | None) -> list:
    try:
        return [] if partial is None else gather(partial)
    except ValueError:
        return []


def _check_writable(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise UsageError(f"cannot write to {output} ({error.strerror}); name a place with --output DIR") from None


@contextlib.contextmanager
def _turn(output: Path) -> Iterator[None]:
    """One run at a time reads and writes what all of them share. The lock is the folder: no file is left for it."""
    if fcntl is None:
        yield
        return
    mark = os.open(output, os.O_RDONLY)
    try:
        # A file system that knows no locks loses claims of runs beside each other, and nothing else.
        with contextlib.suppress(OSError):
            fcntl.flock(mark, fcntl.LOCK_EX)
        yield
    finally:
        os.close(mark)


def _bytes_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _same_folder(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()


def _relative(path: Path) -> str:
    try:
        return os.path.relpath(path)
    except (OSError, ValueError):  # no working directory any more, or another drive
        return str(path)


def _complain(path: Path, error: NotebookError, kept: str = "") -> None:
    _say(f"{path.name}, {error}{kept}" if error.cell else f"{path.name}: {error}{kept}")


def _say(line: str) -> None:
    print(one_line(line, 1000), file=sys.stderr)


def _tell(line: str) -> None:
    try:
        print(one_line(line, 1000), flush=True)
    except BrokenPipeError:
        # The reader of a pipe left early; what is left to do does not depend on it, and neither does the status.
        sys.stdout = None


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.is_file())


def _on_terminal() -> bool:
    return sys.stderr.isatty() and not os.environ.get("CI")
