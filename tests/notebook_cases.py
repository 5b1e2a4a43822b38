"""Small notebooks for tests: cells, a file with a parameters cell, and a claim that no kernel has to import.

And what a cell of a notebook sets and takes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pprint import pformat

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from cascade_lab.evidence.claims import MIME

PARAMETERS = "rows: int = 3  # query rows\nscale: float = 0.5\nnames: list[str] = ['a']"
FIELDS = {"statement": "rows arrive", "instrument": "derived", "expected": "3", "measured": "3", "verdict": "holds"}
SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


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


def names_set(node: ast.AST) -> set[str]:
    """Names that a piece of a cell sets in the notebook; what functions and comprehensions set stays in them."""
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.alias):
        return {node.asname or node.name.split(".")[0]}
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Load) else {node.id}
    if isinstance(node, SCOPES):
        return {each.target.id for each in ast.walk(node) if isinstance(each, ast.NamedExpr)}
    return set().union(*map(names_set, ast.iter_child_nodes(node)))


def _reads(node: ast.AST, local: frozenset[str] = frozenset()) -> Iterator[tuple[str, bool]]:
    """Names that a piece of a cell reads from the notebook, and whether a function or comprehension does so, later."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in local:
            yield node.id, bool(local)
    elif isinstance(node, SCOPES):
        inner = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
        inner |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        inner |= {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef) and each is not node}
        for child in ast.iter_child_nodes(node):
            yield from _reads(child, local | inner | {""})
    else:
        for child in ast.iter_child_nodes(node):
            yield from _reads(child, local)


def names_taken(source: str) -> set[str]:
    """Names that a cell reads before it has set them, or that a function of it reads whenever it is called."""
    found: set[str] = set()

    def go(statements, here: set[str]) -> None:
        for statement in statements:
            parts = [part for name, part in ast.iter_fields(statement) if name not in ("body", "orelse", "finalbody")]
            compound = isinstance(statement, (ast.For, ast.While, ast.If, ast.With, ast.Try))
            heads = [
                x for part in parts for x in (part if isinstance(part, list) else [part]) if isinstance(x, ast.AST)
            ]
            for head in heads if compound else [statement]:
                late = isinstance(statement, ast.FunctionDef)
                found.update(name for name, later in _reads(head) if name not in here or (later and late))
                here |= names_set(head)
            if compound:
                for name in ("body", "handlers", "orelse", "finalbody"):
                    for each in [getattr(statement, name, [])]:
                        go([x for h in each for x in (h.body if isinstance(h, ast.ExceptHandler) else [h])], here)

    go(ast.parse(source).body, set())
    return found
