"""The one form in which notebooks are committed: what a reader sees, not who ran it, where or when.

`canonical` drops run metadata, `problems` names every rule a file breaks, and `differences` compares two
runs cell by cell: images by presence, cells tagged nbval-ignore-output not at all. nbval beside it notices what runs
only under this package's runner; order of outputs, run counts and missing pictures only `differences` notices.

Code that is not part of the story has its source hidden (`jupyter.source_hidden`): JupyterLab shows the first line of
such a cell, and a page folds it under that line, so the line is a comment that says what the cell does.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cascade_lab.book.execution import load
from cascade_lab.book.parameters import NotebookError
from cascade_lab.book.refusals import check_runnable
from cascade_lab.evidence.claims import MIME, gather

if TYPE_CHECKING:
    from nbformat import NotebookNode

IGNORE_TAG, CHECK_TAG = "nbval-ignore-output", "nbval-check-output"
# of a cell whose source is folded, of one that is shown, of a whole kernel, which is read as one, and the width of all
MAX_CODE_LINES, MAX_SHOWN_LINES, MAX_KERNEL_LINES, MAX_COLUMNS = 25, 15, 35, 88
KERNEL_TAG = "kernel"
# What JupyterLab writes of the kernel that `pip install ipykernel` brings, so that opening and saving changes nothing.
# The version is that of the Python that saved last, for JupyterLab puts its own there.
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
    "version": "3.11.7",
}
_VERSION = re.compile(r"3\.\d{1,3}\.\d{1,3}[a-z0-9+]{0,12}")
_KEPT_METADATA = ("tags", "jupyter")
_IMAGES = ("image/png", "image/jpeg", "image/svg+xml", "image/gif", "image/webp")
_BITMAPS = tuple(kind for kind in _IMAGES if kind != "image/svg+xml")
_COMPARED_BY_MACHINE = ("timed", "recorded")
_ABSOLUTE = re.compile(
    r"(?<![\w.:/~<])(/(home|root|tmp|work|usr|opt|var|mnt|media|srv|private|Users|content|workspaces?)/[^\s'\"`)]+"
    r"|[A-Za-z]:\\\\?[\w.]+\\)"
)


def canonical(notebook: NotebookNode, *, keep_measurements: bool = False) -> NotebookNode:
    """A copy without run metadata: the kernel as JupyterLab names it, counts 1..n, merged streams, tags and ids kept.

    Args:
        notebook: valid nbformat 4.
        keep_measurements: keep the raw numbers in the metadata of claim outputs.
    """
    notebook = copy.deepcopy(notebook)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    version = str(notebook.metadata.get("language_info", {}).get("version"))
    language = LANGUAGE | ({"version": version} if _VERSION.fullmatch(version) else {})
    notebook.metadata = type(notebook)(kernelspec=dict(KERNEL), language_info=language)
    count = 0
    for cell in notebook.cells:
        kept = {name: value for name, value in cell.metadata.items() if name in _KEPT_METADATA and value}
        cell.metadata = type(notebook)(kept)
        if cell.cell_type != "code":
            continue
        if cell.execution_count is not None:
            count += 1
            cell.execution_count = count
        cell.outputs = _merged_streams(cell.outputs)
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = cell.execution_count
            output.pop("transient", None)
            if not keep_measurements and "metadata" in output:
                output.metadata.pop(MIME, None)
    return notebook


def is_folded(cell: NotebookNode) -> bool:
    """Whether a cell's source is hidden until a reader asks for it."""
    return cell.cell_type == "code" and cell.metadata.get("jupyter", {}).get("source_hidden") is True


def outputs_folded(cell: NotebookNode) -> bool:
    """Whether a cell's outputs, all of them claims, are hidden until a reader asks for them."""
    return cell.cell_type == "code" and cell.metadata.get("jupyter", {}).get("outputs_hidden") is True


def purpose(cell: NotebookNode) -> str:
    """What the comment on the first line of a code cell says, "" where no comment stands there."""
    first = cell.source.partition("\n")[0]
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""


def text_of(notebook: NotebookNode) -> str:
    """The file's text: sorted keys, one-space indent, one line break at the end."""
    import nbformat

    return nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"


def problems(path: Path, notebook: NotebookNode | None = None) -> list[str]:
    """Every rule of a committed notebook that the file breaks; empty when it breaks none.

    Args:
        path: the file.
        notebook: what `load` read from it, where that was done already.
    """
    try:
        notebook = load(path) if notebook is None else notebook
        text = path.read_text(encoding="utf-8")
    except (NotebookError, OSError) as error:
        return [str(error)]
    found = broken_rules(notebook)
    if text != text_of(canonical(notebook)):
        found.append("not in canonical form (metadata, ids, counts or layout); `cascade-lab refresh` writes it")
    return found


def broken_rules(notebook: NotebookNode) -> list[str]:
    """Every rule that a notebook breaks by what it holds, whatever the layout of its file."""
    found = []
    try:
        check_runnable(notebook)
    except NotebookError as error:
        found.append(str(error))
    found += _heading_problems(notebook)
    if not any(cell.get("execution_count") for cell in notebook.cells):
        return [*found, "was never run; `cascade-lab refresh` writes its outputs"]
    claims = 0
    for number, cell in enumerate(notebook.cells, 1):
        claims += len(_claims(cell))
        found += [f"cell {number}: {problem}" for problem in _cell_problems(cell)]
    if not claims:
        found.append("makes no claim")
    return found


def differences(committed: NotebookNode, fresh: NotebookNode) -> list[str]:
    """Where a fresh run shows something else than the committed notebook; both canonical, same cells.

    Bitmaps are compared by presence: their bytes follow font and drawing libraries, not results.
    """
    found = []
    for number, (old, new) in enumerate(zip(committed.cells, fresh.cells, strict=True), 1):
        if old.cell_type != "code" or IGNORE_TAG in old.metadata.get("tags", []):
            continue
        before, after = (list(map(_comparable, cell.outputs)) for cell in (old, new))
        if old.execution_count != new.execution_count:
            found.append(f"cell {number}: run count {old.execution_count}, a fresh run has {new.execution_count}")
        elif before != after:
            found.append(f"cell {number}: output differs from a fresh run: {_first_difference(before, after)}")
    return found


def same_but_ignored(committed: NotebookNode, fresh: NotebookNode) -> bool:
    """Whether two canonical notebooks are equal, bitmaps included, outside cells nbval does not compare."""

    def reduced(notebook: NotebookNode) -> NotebookNode:
        notebook = copy.deepcopy(notebook)
        for cell in notebook.cells:
            if cell.cell_type == "code" and IGNORE_TAG in cell.metadata.get("tags", []):
                cell.outputs = []
        return notebook

    return reduced(committed) == reduced(fresh)


def _cell_problems(cell: NotebookNode) -> Iterable[str]:
    if match := _ABSOLUTE.search(cell.source):
        yield f"absolute path {match[0]!r}"
    if cell.cell_type != "code":
        for image in re.findall(r"!\[\s*\]\(|<img(?![^>]*\balt=\"[^\"]+\")[^>]*>", cell.source):
            yield f"image without alternative text: {image}"
        for block in re.findall(r"^```python\n(.*?)^```", cell.source, re.MULTILINE | re.DOTALL):
            if wide := [line for line in block.splitlines() if len(line) > MAX_COLUMNS]:
                yield f"a line of {len(wide[0])} columns, at most {MAX_COLUMNS}: {wide[0][:40]!r}..."
        return
    lines, folded = cell.source.splitlines(), is_folded(cell)
    whole = KERNEL_TAG in cell.metadata.get("tags", [])
    most = MAX_KERNEL_LINES if whole else MAX_CODE_LINES if folded else MAX_SHOWN_LINES
    if len(lines) > most:
        kind = "a kernel" if whole else "folded code" if folded else "code"
        yield f"{len(lines)} lines of {kind}, at most {most}"
    if wide := [line for line in lines if len(line) > MAX_COLUMNS]:
        yield f"a line of {len(wide[0])} columns, at most {MAX_COLUMNS}: {wide[0][:40]!r}..."
    if folded and not purpose(cell):
        yield "folded, and its first line is no comment that says what it does"
    if outputs_folded(cell) and (not cell.outputs or any(MIME not in x.get("data", {}) for x in cell.outputs)):
        yield "its outputs are folded, and not all of them are claims"
    if not cell.source.strip():
        yield "empty code cell"
    elif cell.execution_count is None:
        yield "never ran"
    if re.search(r"^\s*[%!]+(pip|conda|mamba)\b", cell.source, re.MULTILINE):
        yield "installs packages"
    if re.search(r"#\s*(NBVAL|PYTEST_VALIDATE)_", cell.source, re.IGNORECASE):
        yield "an nbval comment; use a tag"
    tags = cell.metadata.get("tags", [])
    compared = [c for c in _claims(cell) if c.instrument not in _COMPARED_BY_MACHINE]
    if compared and IGNORE_TAG in tags:
        yield f"claim {compared[0].id} is not compared: tagged {IGNORE_TAG!r}"
    elif compared and CHECK_TAG not in tags:
        yield f"claim {compared[0].id} needs the tag {CHECK_TAG!r}"
    for output in cell.outputs:
        yield from _output_problems(output)


def _output_problems(output: NotebookNode) -> Iterable[str]:
    if output.output_type == "error":
        yield f"error output {output.ename}"
        return
    if output.output_type == "stream":
        if output.name == "stderr":
            yield f"stderr output {output.text.strip().splitlines()[0] if output.text.strip() else ''!r}"
        shown = [output.text]
    else:
        shown = [value for kind, value in output.data.items() if kind not in _BITMAPS and isinstance(value, str)]
        for kind in output.data:
            if kind in _IMAGES and not _alt(output, kind):
                yield f"{kind} output without alternative text"
            if "widget" in kind:
                yield "widget output"
    for text in shown:
        if match := _ABSOLUTE.search(text):
            yield f"absolute path {match[0]!r} in the output"
        if match := re.search(r"\bat 0x[0-9a-f]{6,}", text):
            yield f"object address {match[0]!r} in the output"


def _alt(output: NotebookNode, kind: str) -> str:
    own = output.metadata.get(kind)
    alt = (own.get("alt") if isinstance(own, dict) else None) or output.metadata.get("alt")
    return alt.strip() if isinstance(alt, str) else ""


def _heading_problems(notebook: NotebookNode) -> list[str]:
    found, titles, level = [], 0, 0
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "markdown":
            continue
        prose = re.sub(r"^(```|~~~).*?^\1", "", cell.source, flags=re.MULTILINE | re.DOTALL)
        for marks, title in re.findall(r"^(#{1,6})[ \t]+(.+)$", prose, re.MULTILINE):
            titles += len(marks) == 1
            if len(marks) > level + 1:
                found.append(f"cell {number}: heading {title.strip()!r} of level {len(marks)} follows level {level}")
            level = len(marks)
    if titles != 1:
        found.append(f"expected exactly one level-1 heading, found {titles}")
    return found


def _claims(cell: NotebookNode) -> list:
    try:
        return gather({"cells": [cell]})
    except ValueError:
        return []


def _merged_streams(outputs: Iterable[NotebookNode]) -> list[NotebookNode]:
    # One print may arrive in several messages.
    merged: list[NotebookNode] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if output.output_type == "stream" and last is not None and last.get("name") == output.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged


def _comparable(output: NotebookNode) -> dict:
    if output.output_type == "stream":
        return {output.name: output.text}
    return {kind: "" if kind in _BITMAPS else value for kind, value in output.get("data", {}).items()}


def _first_difference(before: list[dict], after: list[dict]) -> str:
    if len(before) != len(after):
        return f"{len(before)} outputs committed, {len(after)} now"
    old, new = next((o, n) for o, n in zip(before, after, strict=True) if o != n)
    kind = next(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    pair = [str(each.get(kind, "nothing")).splitlines() for each in (old, new)]
    lines = next(((o, n) for o, n in zip(*pair, strict=False) if o != n), ("", ""))
    return f"{kind}: {lines[0][:120]!r} committed, {lines[1][:120]!r} now"
