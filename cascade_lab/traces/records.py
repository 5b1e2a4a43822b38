"""Files as records: lines of JSON, of CSV or of a log, entries of a JSON array, rows of Parquet; plain, .gz or stdin.

A file is read as data and line by line, so that no more than one line and the first few are in memory. What a record
means is not known here.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cascade_lab.files import MAX_JSON, UsageError, one_line, open_regular, parse_json, text_fault, unique_keys
from cascade_lab.traces.request import Fault, HeaderFault, TraceError

# a million tokens in blocks of one, with room; what a line can make of it in memory is some 20 times that
MAX_LINE = 1 << 24
"""The most bytes that a line of a file may have; a line that holds a whole session may have `MAX_SESSION`."""
MAX_SESSION = 1 << 29
STDIN = "-"
"""The path that stands for standard input."""
_BOM = b"\xef\xbb\xbf"
_HEAD_LINES, _HEAD_BYTES = 1000, MAX_LINE
_SESSION = re.compile(rb'"hash_id_scope"|"requests"')
_DATED = re.compile(rb"\[\d{4}-\d\d-\d\d")
_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)
Complain = Callable[[int, Fault], None]
Record = tuple[int, dict[str, object] | str]


class Source(NamedTuple):
    """A file opened as records.

    Attributes:
        kind: "json", "csv", "text" or "parquet".
        head: its first records, for recognition.
        records: all of them, those of the head too, each with its line.
        columns: the names in the first line of a CSV.
        unit: what the numbers count, "line" or "entry".
    """

    kind: str
    head: Sequence[Record]
    records: Iterator[Record]
    unit: str = "line"
    columns: Sequence[str] = ()


def complaints(
    path: Path | str, on_error: str, skipped: list[TraceError] | None, unit: str = "line"
) -> Callable[[int, Fault], None]:
    """What is done about a bad line: raised, or kept in `skipped` where `on_error` says so."""
    name = shown_path(path)

    def complain(line: int, fault: Fault) -> None:
        error = TraceError(name, line, fault.field, fault.fault, unit)
        if on_error == "raise" or isinstance(fault, HeaderFault):
            raise error from None
        if skipped is not None:
            skipped.append(error)

    return complain


def shown_path(path: Path | str) -> str:
    """A path as messages name it."""
    return "standard input" if str(path) == STDIN else Path(path).as_posix()


def open_records(
    path: Path | str,
    complain: Complain,
    *,
    kind: str | None = None,
    looks_like_text: Callable[[str], bool] = lambda line: False,
    forced: bool = False,
    progress: Callable[[int], object] | None = None,
    stack: ExitStack,
) -> Source:
    """The records of a file.

    Args:
        path: the file, or "-" for standard input.
        complain: called with the line and fault of what is no record.
        kind: forces "json", "csv" or "text".
        looks_like_text: whether a line is of a log in plain text.
        forced: the format is given, so that the head is one record.
        progress: called with the bytes of each line.
        stack: closes the file in the end.

    Raises:
        UsageError: Parquet without pyarrow.
        TraceError: through `complain`.
        OSError: a file that cannot be read.
    """
    file = sys.stdin.buffer if str(path) == STDIN else stack.enter_context(open_regular(Path(path)))
    if file.peek(4)[:4] == b"PAR1":
        return _parquet(path, stack)
    if file.peek(2)[:2] == b"\x1f\x8b":
        file = stack.enter_context(io.BufferedReader(gzip.GzipFile(fileobj=file)))
    lines = _lines(file, complain, progress)
    head: list[tuple[int, bytes]] = []
    size = 0
    for number, line in lines:
        head.append((number, line))
        size += len(line)
        if len(head) == (1 if forced else _HEAD_LINES) or size >= _HEAD_BYTES:
            break
    every = chain(head, lines)
    suffix = "".join(s for s in Path(path).suffixes[-2:] if s != ".gz")[-6:].lower()
    kind = kind or _kind(head, suffix, looks_like_text)
    if kind == "text":
        return _peeked("text", _text(every), len(head))
    if kind == "csv":
        columns = _columns(next(every, None), complain)
        return _peeked("csv", _rows_of_csv(every, columns, complain), len(head))._replace(columns=columns)
    if head and (head[0][1].startswith(b"[") or not _is_object(head[0][1])):
        whole = _document(head, lines)
        if whole is not None:
            entries = list(enumerate(whole, 1))
            return Source("json", entries[:_HEAD_LINES], iter(entries), "entry")
    return _peeked("json", _objects(every, complain), len(head))


def _peeked(kind: str, records: Iterator[Record], count: int) -> Source:
    head = []
    for record in records:
        head.append(record)
        if len(head) >= count:
            break
    return Source(kind, head, chain(head, records))


def _kind(head: Sequence[tuple[int, bytes]], suffix: str, looks_like_text: Callable[[str], bool]) -> str:
    first = head[0][1] if head else b""
    if suffix in (".jsonl", ".json") or first.startswith(b"{") or (first[:1] == b"[" and not _DATED.match(first)):
        return "json"
    if suffix != ".csv" and any(looks_like_text(line.decode("utf-8", "replace")) for _, line in head):
        return "text"
    return "csv"


def _lines(file: BinaryIO, complain: Complain, progress: Callable[[int], object] | None) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, none blank, none too long, without byte order mark and white space at the ends."""
    number = 0
    while True:
        number += 1
        try:
            line = file.readline(MAX_LINE)
            too_long = len(line) == MAX_LINE and not line.endswith(b"\n")
            if too_long and _SESSION.search(line[:4096]):
                line += file.readline(MAX_SESSION - MAX_LINE)
                too_long = len(line) == MAX_SESSION and not line.endswith(b"\n")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            complain(number, HeaderFault("line", f"expected gzip-compressed data, given damaged ones ({error})"))
            return
        if not line:
            return
        if progress is not None:
            progress(len(line))
        if number == 1:
            if what := text_fault(line):
                complain(number, HeaderFault("line", f"expected UTF-8 text, given {what}"))
            line = line.removeprefix(_BOM)
        if too_long:
            complain(number, Fault("line", f"expected at most {MAX_LINE} bytes"))
            while (more := file.readline(MAX_LINE)) and not more.endswith(b"\n"):
                pass
            continue
        if line := line.strip():
            yield number, line


def _text(lines: Iterator[tuple[int, bytes]]) -> Iterator[Record]:
    for number, line in lines:
        yield number, line.decode("utf-8", "replace")


def _objects(lines: Iterator[tuple[int, bytes]], complain: Complain) -> Iterator[Record]:
    for number, line in lines:
        try:
            record = json_object(line)
        except Fault as fault:
            complain(number, fault)
        else:
            yield number, record


def json_object(line: bytes) -> dict:
    """The JSON object of a line.

    Raises:
        Fault: the line is none.
    """
    try:
        record = _DECODER.decode(line.decode())
    except RecursionError:
        raise Fault("line", "expected a flat JSON object, given one nested too deep") from None
    except ValueError as error:
        cut = "cut short or no JSON" if not line.endswith(b"}") else "no JSON"
        raise Fault("line", f"expected a JSON object, given a line that is {cut} ({one_line(error, 150)})") from None
    if type(record) is not dict:
        raise Fault("line", f"expected a JSON object, given {short(record)}")
    return record


def _is_object(line: bytes) -> bool:
    try:
        json_object(line)
    except Fault:
        return False
    return True


def _document(head: list[tuple[int, bytes]], lines: Iterator[tuple[int, bytes]]) -> list[dict] | None:
    """The entries of one JSON value that spans the file; None if it is none. Lines that it reads join `head`."""
    if len(head) == 1 and not head[0][1].startswith(b"["):
        return None
    # a first line that opens nothing, before a line that is an object, is a bad line among lines of JSON
    opens = head[0][1].endswith((b"[", b"{", b","))
    if not opens and any(_is_object(line) for _, line in head[1:4]):
        return None
    size = sum(len(line) for _, line in head)
    for number, line in lines:
        head.append((number, line))
        size += len(line) + 1
        if size > MAX_JSON:
            if head[0][1].startswith(b"["):
                raise UsageError(f"a JSON array of over {MAX_JSON >> 20} MiB: write one entry a line")
            return None
    try:
        value = parse_json(b"\n".join(line for _, line in head).decode())
    except ValueError:
        return None
    entries = value if isinstance(value, list) else [value]
    return entries if entries and all(isinstance(entry, dict) for entry in entries) else None


def _columns(first: tuple[int, bytes] | None, complain: Complain) -> list[str]:
    """The names in the first line of a CSV."""
    if first is None:
        return []
    try:
        columns = [name.strip() for name in next(csv.reader([first[1].decode("utf-8", "replace")], strict=True))]
    except csv.Error as error:
        complain(first[0], HeaderFault("line", f"expected comma-separated values, {error}"))
        return []
    for name in columns:
        if name and (found := columns.count(name)) > 1:
            fault = f"expected one column of this name in the first line, given {found}"
            complain(first[0], HeaderFault(name, fault))
    return columns


def _rows_of_csv(lines: Iterator[tuple[int, bytes]], columns: Sequence[str], complain: Complain) -> Iterator[Record]:
    for number, line in lines:
        try:
            # only numbers are read, so a foreign byte elsewhere does no harm
            row = next(csv.reader([line.decode("utf-8", "replace")], strict=True))
        except csv.Error as error:
            complain(number, Fault("line", f"expected comma-separated values, {error}"))
            continue
        if len(row) != len(columns):
            fault = f"expected {len(columns)} fields as in the first line, given {len(row)}"
            complain(number, Fault("line", fault))
            continue
        yield number, dict(zip(columns, row, strict=True))


def _parquet(path: Path | str, stack: ExitStack) -> Source:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise UsageError(f"{path}: reading Parquet needs pyarrow: pip install 'cascade-lab[parquet]'") from None
    if str(path) == STDIN:
        raise UsageError("standard input: expected text, given Parquet; name the file")
    file = stack.enter_context(parquet.ParquetFile(path))

    def rows() -> Iterator[Record]:
        number = 0
        for batch in file.iter_batches(batch_size=4096):
            for row in batch.to_pylist():
                number += 1
                yield number, row

    peeked = _peeked("parquet", rows(), 1)
    return peeked._replace(unit="entry")


def short(value: object) -> str:
    """A value of a file as a message may show it."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "an integer of over 30 digits"
    if isinstance(value, (list, dict)) and len(value) > 20:
        return f"a {type(value).__name__} of {len(value)}"
    try:
        return one_line(repr(value), 60)
    except RecursionError:
        return "a value nested too deep"
