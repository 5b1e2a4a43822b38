"""Small notebooks for tests: cells, a file with a parameters cell, and a claim that no kernel has to import."""

from pprint import pformat

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from cascade_lab.evidence.claims import MIME

PARAMETERS = "rows: int = 3  # query rows\nscale: float = 0.5\nnames: list[str] = ['a']"
FIELDS = {"statement": "rows arrive", "instrument": "derived", "expected": "3", "measured": "3", "verdict": "holds"}


def shown_claim(id):
    """A cell's text that shows a claim as the package does, without the second that importing it takes in a kernel."""
    data, measured = {MIME: {"id": id, **FIELDS}, "text/plain": "claim"}, {MIME: {"measured": 3}}
    shown = f"data = {pformat(data, width=80)}\nmeasured = {pformat(measured, width=80)}"
    return f"from IPython.display import display\n{shown}\ndisplay(data, raw=True, metadata=measured)"


CLAIM = shown_claim("1.1")


def code(source, *tags, outputs=(), count=None):
    """A code cell with these tags."""
    cell = new_code_cell(source, outputs=list(outputs), execution_count=count)
    if tags:
        cell.metadata["tags"] = list(tags)
    return cell


def write(folder, name, *cells, parameters=PARAMETERS, metadata=None):
    """A notebook file of a title, a parameters cell unless that is None, and these cells, texts being code."""
    folder.mkdir(parents=True, exist_ok=True)
    head = [new_markdown_cell("# A title")]
    if parameters is not None:
        head.append(code(parameters, "parameters"))
    notebook = new_notebook(cells=[*head, *(code(c) if isinstance(c, str) else c for c in cells)])
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    notebook.metadata.update(metadata or {})
    path = folder / f"{name}.ipynb"
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    return path
