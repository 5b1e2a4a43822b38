"""One notebook, executed by papermill in a kernel of this interpreter, and judged before it is believed.

papermill reports an exception but not everything that can go wrong: `sys.exit(0)`, an unknown magic, a cell
that never ran, a swallowed failing claim. `execute` returns only a notebook of which every cell ran and
every claim stands.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import re
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cascade_lab.evidence.claims import FAILS, gather
from cascade_lab.evidence.parameters import NotebookError, bind, read_parameters

if TYPE_CHECKING:
    from nbformat import NotebookNode

# A cell with one of these tags would be passed over, or its error taken for a success.
REFUSED_TAGS = ("nbval-skip", "nbval-raises-exception", "raises-exception", "skip-execution")
_REFUSED_MARKERS = re.compile(r"#\s*(NBVAL_SKIP|NBVAL_RAISES_EXCEPTION)\b", re.IGNORECASE)
# How IPython spells shell commands whose exit status it drops.
_UNNOTICED = re.compile(
    r"get_ipython\(\)\.(system\(|getoutput\(|run_line_magic\('(sx|sc|system)'"
    r"|run_cell_magic\('\w+', '[^']*--(no-raise-error|bg)\b)"
)
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
        notebook = nbformat.from_dict(nbformat.reader.reads(path.read_text(encoding="utf-8")))
        if notebook.nbformat != 4:
            notebook = nbformat.convert(notebook, 4)
    except (OSError, ValueError, AttributeError, KeyError, nbformat.ValidationError) as error:
        raise NotebookError(f"not readable as a notebook: {_first_line(error)}") from None
    notebook.nbformat_minor = max(notebook.nbformat_minor, 5)
    seen: set[str] = set()
    for cell in notebook.cells:
        if cell.get("id") is None or cell.id in seen:
            cell["id"] = uuid.uuid4().hex[:8]
        seen.add(cell.id)
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        raise NotebookError(f"not a valid notebook: {_first_line(error)}") from None
    return notebook


def check_runnable(notebook: NotebookNode) -> None:
    """Refuse what would make a cell's failure invisible.

    Raises:
        NotebookError: naming the first such cell.
    """
    from IPython.core.inputtransformer2 import TransformerManager

    read_parameters(notebook)
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        for tag in cell.metadata.get("tags", []):
            if tag in REFUSED_TAGS:
                raise NotebookError(f"tag {tag!r} would hide a failure of this cell", number)
        if marker := _REFUSED_MARKERS.search(cell.source):
            raise NotebookError(f"comment {marker[0]!r} would hide a failure of this cell", number)
        plain = TransformerManager().transform_cell(cell.source)
        if _UNNOTICED.search(plain):
            raise NotebookError("a failing shell command is not noticed here; use a plain %%bash cell", number)
        if _leaves(plain):
            raise NotebookError("exit and quit leave the kernel before the notebook ends", number)


def _leaves(source: str) -> bool:
    # IPython's own exit and quit raise nothing: the kernel answers "ok" and stops later.
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    called = [node.func if isinstance(node, ast.Call) else node for node in statements]
    return any(isinstance(node, ast.Name) and node.id in ("exit", "quit") for node in called)


def execute(
    path: Path,
    parameters: Mapping[str, object],
    *,
    scratch: Path,
    environment: Mapping[str, str],
    start_timeout: int = 60,
    cell_timeout: int = 120,
    progress_bar: bool = False,
) -> NotebookNode:
    """Run one notebook from top to bottom, in the folder it lies in.

    Args:
        path: the notebook; it is only read.
        parameters: values for its parameters cell, already of the right type or as text.
        scratch: an existing folder for what the run writes on its way.
        environment: variables set for the kernel over those of this process.
        start_timeout: seconds the kernel has to answer.
        cell_timeout: seconds each cell has.
        progress_bar: show one on stderr.

    Raises:
        UsageError: unknown parameter or value of the wrong type; nothing was run.
        NotebookError: the notebook is refused before it runs, or as ExecutionFailure, it ran and gave no
            result.
    """
    import nbformat
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    path, scratch = path.resolve(), scratch.resolve()
    notebook = load(path)
    check_runnable(notebook)
    values = bind(read_parameters(notebook), parameters, path.name)
    position = {cell.id: number for number, cell in enumerate(notebook.cells, 1)}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    output = scratch / path.name
    started: list[str | None] = [None]

    def failure(cause: str, cell_id: str | None) -> ExecutionFailure:
        partial = nbformat.read(output, as_version=4) if output.exists() else None
        return ExecutionFailure(cause, position.get(cell_id), partial)

    with _kernel(scratch, environment) as (kernel_manager_class, log), _quiet("papermill", "traitlets"):
        try:
            executed = papermill.execute_notebook(
                notebook,
                # papermill formats paths like templates.
                str(output).replace("{", "{{").replace("}", "}}"),
                parameters=values,
                engine_name="nbclient",
                kernel_name="python3",
                language="python",
                cwd=str(path.parent),
                start_timeout=start_timeout,
                execution_timeout=cell_timeout,
                progress_bar={"desc": path.stem} if progress_bar else False,
                kernel_manager_class=kernel_manager_class,
                on_cell_start=lambda cell, cell_index: started.append(cell.id),
            )
        except PapermillExecutionError as error:
            executed = nbformat.read(output, as_version=4)
            at_fault = next(c for c in executed.cells if c.cell_type == "code" and _went_wrong(c))
            raise failure(_cause(at_fault, error), at_fault.id) from None
        except CellTimeoutError:
            raise failure(f"took longer than {cell_timeout} s (TimeoutError)", started[-1]) from None
        except DeadKernelError:
            raise failure(f"the kernel died (DeadKernelError){_last_words(log)}", started[-1]) from None
        except (RuntimeError, OSError) as error:
            cause = f"{type(error).__name__}: {_first_line(error)}{_last_words(log)}"
            raise failure(cause, started[-1]) from None
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
    if not seen:
        raise failure("makes no claim", None)


@contextlib.contextmanager
def _kernel(scratch: Path, environment: Mapping[str, str]) -> Iterator[tuple[type, Path]]:
    """A kernel manager class that starts this interpreter, whatever kernels are installed under any name.

    Connection files lie in a short-named temporary folder: sockets there need no port, and their paths have
    a limit.
    """
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec

    log = scratch / "kernel.log"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONSTARTUP"}
    variables |= {
        # The reader's own profile neither changes a run nor is written to by one.
        "IPYTHONDIR": str(scratch / "ipython"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    # A notebook uses the package that runs it, from a checkout as well; an installed one is found anyhow, and
    # the folder of all installed packages must not come before the standard library.
    package_parent = Path(__file__).resolve().parents[2]
    if str(package_parent) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        inherited = os.environ.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join([str(package_parent), *([inherited] if inherited else [])])
    variables |= environment

    with tempfile.TemporaryDirectory(prefix="cascade-") as folder, log.open("wb") as stderr:
        connection = Path(folder) / "k.json"

        class ThisInterpreter(AsyncKernelManager):
            def __init__(self, **options):
                transport = "ipc" if os.name == "posix" and len(str(connection)) < 80 else "tcp"
                super().__init__(**options, transport=transport, connection_file=str(connection))
                self.shutdown_wait_time = 2.0

            @property
            def kernel_spec(self) -> KernelSpec:
                argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
                return KernelSpec(argv=argv, display_name="Python 3", language="python")

            async def start_kernel(self, **options):
                await super().start_kernel(**options, env=variables, stderr=stderr)

        yield ThisInterpreter, log


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
    lines = [line.strip() for line in _ANSI.sub("", str(error)).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"; its last line was: {lines[-1].strip()}" if lines else ""
