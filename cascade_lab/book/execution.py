"""One notebook, executed by papermill in a kernel of this interpreter, and judged before it is believed.

papermill reports an exception but not everything that can go wrong: `sys.exit(0)`, an unknown magic, a cell
that never ran, a swallowed failing claim. `execute` returns only a notebook of which every cell ran and
every claim stands, and leaves no kernel behind, however it ends.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cascade_lab.book.parameters import NotebookError
from cascade_lab.book.refusals import check_runnable
from cascade_lab.evidence.claims import FAILS, gather
from cascade_lab.files import UsageError, held_back, one_line, parse_json, read_text

if TYPE_CHECKING:
    from nbformat import NotebookNode

# What a file may hold, what one cell may print, and what it may show in all: more is no page that anybody opens.
MAX_NOTEBOOK, MAX_PRINTED, MAX_SHOWN = 1 << 26, 1 << 20, 1 << 24
ENGINE = "cascade-lab"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class ExecutionFailure(NotebookError):
    """A run that gave no result.

    Attributes:
        executed: the notebook as far as it came, or None when no cell was run.
    """

    def __init__(self, cause: str, cell: int | None, executed: NotebookNode | None):
        super().__init__(cause, cell)
        self.executed = executed


def load(path: Path) -> NotebookNode:
    """A notebook file, with an id on every cell.

    Raises:
        NotebookError: the file is not a notebook.
    """
    import nbformat

    try:
        text = read_text(path, MAX_NOTEBOOK)
        parse_json(text)
        return _current(nbformat.from_dict(nbformat.reader.reads(text)))
    except OSError as error:
        raise NotebookError(f"not readable as a notebook: {error.strerror or error}") from None
    except nbformat.ValidationError as error:
        raise NotebookError(f"not a valid notebook: {_first_line(error)}") from None
    except Exception as error:
        # Conversion and validation trust the shape of their input, so a foreign file can raise anything there.
        raise NotebookError(f"not readable as a notebook: {_first_line(error)}") from None


def _current(notebook: NotebookNode) -> NotebookNode:
    """A notebook in today's format, valid, each cell with an id of its own."""
    import nbformat

    if notebook.nbformat != 4:
        notebook = nbformat.convert(notebook, 4)
    notebook.nbformat_minor = max(notebook.nbformat_minor, 5)
    seen: set[str] = set()
    for cell in notebook.cells:
        if not isinstance(cell.get("id"), str) or cell.id in seen:
            cell["id"] = uuid.uuid4().hex[:8]
        seen.add(cell.id)
    nbformat.validate(notebook)
    return notebook


def execute(
    notebook: NotebookNode,
    values: Mapping[str, object],
    *,
    path: Path,
    scratch: Path,
    environment: Mapping[str, str],
    start_timeout: int = 60,
    cell_timeout: int = 120,
    progress_bar: bool = False,
) -> NotebookNode:
    """Run one notebook from top to bottom, in the folder it lies in.

    Args:
        notebook: as `load` reads it; it stays as it is.
        values: what `bind` made of the given parameters.
        path: its file, of which only name and folder are used.
        scratch: an existing folder for what the run writes on its way.
        environment: variables set for the kernel over those of this process.
        start_timeout: seconds the kernel has to answer.
        cell_timeout: seconds each cell has.
        progress_bar: show one on stderr.

    Raises:
        UsageError: there is no place for temporary files; nothing was run.
        NotebookError: the notebook is refused before it runs, or as ExecutionFailure, it ran and gave no
            result.
        OSError: a disk or a quota is full, or there is no starting a kernel.
    """
    import papermill
    import zmq
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    path, scratch = path.resolve(), scratch.resolve()
    check_runnable(notebook)
    position = {cell.id: number for number, cell in enumerate(notebook.cells, 1)}
    started = copy.deepcopy(notebook)
    for cell in started.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    output = scratch / path.name
    progress = _Progress()

    def failure(cause: str, cell_id: str | None) -> ExecutionFailure:
        return ExecutionFailure(cause, position.get(cell_id), _read_partial(output))

    with _kernel(scratch, environment) as (kernel_manager_class, log), _quiet("papermill", "traitlets"):
        _register_engine()
        try:
            executed = papermill.execute_notebook(
                started,
                # papermill formats paths like templates.
                str(output).replace("{", "{{").replace("}", "}}"),
                parameters=dict(values),
                engine_name=ENGINE,
                kernel_name="python3",
                language="python",
                cwd=str(path.parent),
                start_timeout=start_timeout,
                execution_timeout=cell_timeout,
                progress_bar={"desc": path.stem} if progress_bar else False,
                kernel_manager_class=kernel_manager_class,
                progress=progress,
            )
        except PapermillExecutionError as error:
            executed = load(output)
            at_fault = next(c for c in executed.cells if c.cell_type == "code" and _went_wrong(c))
            raise failure(_cause(at_fault, error), at_fault.id) from None
        except CellTimeoutError:
            raise failure(f"took longer than {cell_timeout} s (TimeoutError)", progress.cell_id) from None
        except DeadKernelError:
            cause = progress.too_much or f"the kernel died (DeadKernelError){_last_words(log)}"
            raise failure(cause, progress.cell_id) from None
        except (RuntimeError, zmq.ZMQError) as error:
            cause = f"{type(error).__name__}: {_first_line(error)}{_last_words(log)}"
            raise failure(cause, progress.cell_id) from None
    for cell in executed.cells:
        if cell.cell_type != "code":
            continue
        if _went_wrong(cell):
            raise failure(_cause(cell, None), cell.id)
        if cell.source.strip() and cell.execution_count is None:
            raise failure("never ran", cell.id)
    _judge_claims(executed, failure)
    return executed


def _judge_claims(executed: NotebookNode, failure: Callable[[str, str | None], ExecutionFailure]) -> None:
    seen: set[str] = set()
    for cell in executed.cells:
        try:
            claims = gather({"cells": [cell]})
        except ValueError as error:
            raise failure(str(error), cell.id) from None
        for claim in claims:
            if claim.verdict == FAILS:
                raise failure(f"claim {claim.line}", cell.id)
            if claim.id in seen:
                raise failure(f"claim id {claim.id!r} is used twice", cell.id)
            seen.add(claim.id)


@dataclass
class _Progress:
    """The cell that runs, and how many characters of output it has sent."""

    cell_id: str | None = None
    printed: int = 0
    shown: int = 0

    @property
    def too_much(self) -> str:
        """What is wrong with the amount of output; empty when nothing is."""
        if self.printed > MAX_PRINTED:
            return f"prints more than {MAX_PRINTED >> 20} MiB; print less, or write to a file"
        return f"shows more than {MAX_SHOWN >> 20} MiB" if self.shown > MAX_SHOWN else ""


@cache
def _register_engine() -> None:
    """papermill's engine with its hidden limits set: output is waited for, and counted as it comes.

    An endless cell that prints would fill the memory long before its time is up.
    """
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine, papermill_engines

    class Client(PapermillNotebookClient):
        def __init__(self, nb_man, progress, **options):
            def begin(cell, cell_index):
                progress.cell_id, progress.printed, progress.shown = cell.id, 0, 0

            super().__init__(nb_man, on_cell_start=begin, **options)
            self._progress = progress

        def process_message(self, msg, cell, cell_index):
            size = _length(msg["content"])
            self._progress.shown += size
            self._progress.printed += size if msg["msg_type"] == "stream" else 0
            if self._progress.too_much:
                # ends the cell as a dead kernel does
                self.task_poll_for_reply.cancel()
                return None
            return super().process_message(msg, cell, cell_index)

    class Engine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(
            cls, nb_man, kernel_name, *, start_timeout, execution_timeout, kernel_manager_class, progress, **_
        ):
            return Client(
                nb_man,
                progress,
                kernel_name=kernel_name,
                kernel_manager_class=kernel_manager_class,
                startup_timeout=start_timeout,
                timeout=execution_timeout,
                iopub_timeout=execution_timeout,
                log=logging.getLogger("papermill"),
            ).execute()

    papermill_engines.register(ENGINE, Engine)


@contextlib.contextmanager
def _kernel(scratch: Path, environment: Mapping[str, str]) -> Iterator[tuple[type, Path]]:
    """A kernel manager class that starts this interpreter, whatever kernels are installed under any name.

    Connection files lie in a short-named temporary folder: sockets there need no port, and their paths have
    a limit. The kernel's own temporary files lie there too, so that they go when it is killed.
    """
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec

    log = scratch / "kernel.log"
    managers: list[AsyncKernelManager] = []
    with temporary_folder() as folder, log.open("wb") as stderr:
        connection = folder / "k.json"
        variables = _variables(scratch, folder) | environment

        class ThisInterpreter(AsyncKernelManager):
            def __init__(self, **options):
                transport = "ipc" if os.name == "posix" and len(str(connection)) < 80 else "tcp"
                super().__init__(**options, transport=transport, connection_file=str(connection))
                self.shutdown_wait_time = 2.0
                managers.append(self)

            @property
            def kernel_spec(self) -> KernelSpec:
                argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
                return KernelSpec(argv=argv, display_name="Python 3 (ipykernel)", language="python")

            async def start_kernel(self, **options):
                # A signal between the new process and the note of its number would leave it to nobody.
                with held_back():
                    await super().start_kernel(**options, env=variables, stderr=stderr)
                    self.group = getattr(self.provisioner, "pgid", None)

        try:
            yield ThisInterpreter, log
        finally:
            with held_back():
                for manager in managers:
                    _kill(manager)


def _kill(manager: object) -> None:
    """End what is left of a kernel: one that was never waited for, and the processes that its cells started."""
    process = getattr(getattr(manager, "provisioner", None), "process", None)
    group = getattr(manager, "group", None) or getattr(process, "pid", None)
    if group and hasattr(os, "killpg"):
        # The kernel leads its own session, and while anybody of its group lives no other can get the number.
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    if process is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait(5)


def _can_be_written(folder: Path) -> bool:
    """Whether files could be put into a folder, which may not be there yet."""
    nearest = next(each for each in (folder, *folder.parents) if each.exists() or each.is_symlink())
    return nearest.is_dir() and os.access(nearest, os.W_OK)


def _variables(scratch: Path, temporary: Path) -> dict[str, str]:
    """The kernel's environment: this package, and nothing that writes outside the run's own folders."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONSTARTUP"}
    variables |= {
        # The reader's own profile neither changes a run nor is written to by one.
        "IPYTHONDIR": str(scratch / "ipython"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "TMPDIR": str(temporary),
    }
    # Caches are looked for there, and matplotlib warns in the cell when it finds no place.
    home = Path.home()
    own = {
        "MPLCONFIGDIR": (
            Path(variables.get("XDG_CONFIG_HOME") or home / ".config", "matplotlib"),
            Path(variables.get("XDG_CACHE_HOME") or home / ".cache", "matplotlib"),
        ),
        "TRITON_CACHE_DIR": (Path(variables.get("TRITON_HOME") or home, ".triton"),),
    }
    for name, places in own.items():
        if not all(map(_can_be_written, places)):
            variables.setdefault(name, str(temporary))
    # A notebook uses the package that runs it, from a checkout as well; an installed one is found anyhow, and
    # the folder of all installed packages must not come before the standard library.
    package_parent = Path(__file__).resolve().parents[2]
    if str(package_parent) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        inherited = os.environ.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join([str(package_parent), *([inherited] if inherited else [])])
    return variables


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, whatever happened.

    Raises:
        UsageError: there is no place for one.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="cascade-"))
    except OSError as error:
        raise UsageError(f"no place for temporary files ({error.strerror or error}); name one with TMPDIR") from None
    try:
        yield folder
    finally:
        with held_back():
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Failures are reported once, by the caller."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _went_wrong(cell: NotebookNode) -> bool:
    # SystemExit and UsageError give no error output; papermill notes them in the cell's metadata.
    noted = cell.metadata.get("papermill", {}).get("exception") is True
    return noted or any(output.output_type == "error" for output in cell.outputs)


def _cause(cell: NotebookNode, error: Exception | None) -> str:
    for output in cell.outputs:
        if output.output_type == "error":
            return f"{output.ename}: {_first_line(output.evalue)}" if output.evalue.strip() else output.ename
    printed = "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stderr")
    lines = [line.strip() for line in _ANSI.sub("", printed).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(SystemExit|UsageError)\b", line)]
    return (named or lines[-1:] or [_first_line(error) if error else "the cell failed"])[0]


def _first_line(error: object) -> str:
    lines = [line.strip() for line in _ANSI.sub("", str(error)[:10000]).splitlines() if line.strip()]
    return one_line(lines[0]) if lines else type(error).__name__


def _last_words(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4096))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return f"; its last line was: {one_line(lines[-1])}" if lines else ""


def _read_partial(output: Path) -> NotebookNode | None:
    # Cut short where the disk was full.
    try:
        return load(output) if output.exists() else None
    except NotebookError:
        return None


def _length(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Mapping):
        return sum(map(_length, content.values()))
    return sum(map(_length, content)) if isinstance(content, (list, tuple)) else 0
