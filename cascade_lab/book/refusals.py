"""What a notebook may not hold, because a failure of the cell would go unseen: tags, markers, magics and ways out."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from cascade_lab.book.parameters import NotebookError, parse, read_parameters

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
_OTHER_NOTEBOOK = re.compile(r"get_ipython\(\)\.run_line_magic\('run', .*\.ipynb\b")


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
        try:
            plain = TransformerManager().transform_cell(cell.source)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise NotebookError(f"not readable as code: {error}", number) from None
        if _OTHER_NOTEBOOK.search(plain):
            raise NotebookError("another notebook's claims would go unjudged; run it by its own name", number)
        if _UNNOTICED.search(plain):
            raise NotebookError("a failing shell command is not noticed here; use a plain %%bash cell", number)
        if _leaves(plain):
            raise NotebookError("exit and quit leave the kernel before the notebook ends", number)


def _leaves(source: str) -> bool:
    # IPython's own exit and quit raise nothing: the kernel answers "ok" and stops later.
    try:
        tree = parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    called = [node.func if isinstance(node, ast.Call) else node for node in statements]
    return any(isinstance(node, ast.Name) and node.id in ("exit", "quit") for node in called)
