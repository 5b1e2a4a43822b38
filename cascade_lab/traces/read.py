"""Requests of a trace file, line by line: as data, within bounds, with the line and the field of every fault."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

from cascade_lab import _checks
from cascade_lab.files import one_line, open_regular, text_fault, unique_keys

BLOCK_SIZE = 512
"""Tokens per id in Mooncake's published traces."""
MAX_TOKENS = 10**9
"""The most tokens that a request of a file may have."""
# a million tokens in blocks of one, with room; what a line can make of it in memory is some 20 times that
MAX_LINE = 1 << 24
"""The most bytes that a line of a file may have."""
OnError = Literal["raise", "skip"]
_BOM = b"\xef\xbb\xbf"
_mooncake_fields = itemgetter("timestamp", "input_length", "output_length", "hash_ids")


class Request(NamedTuple):
    """One request of a trace.

    Attributes:
        timestamp: milliseconds since the trace began; 0.0 where the file has none.
        input_tokens: prompt length N >= 1.
        output_tokens: generated tokens; 0 where the file has none.
        block_ids: one id per block of the prompt, an id standing for the block and all before it; None if hits are
            given.
        hit_tokens: the hit where the trace records it; None if block ids are given.
    """

    timestamp: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] | None
    hit_tokens: int | None


class TraceError(ValueError):
    """A line that is no request.

    Attributes:
        path: the file as given.
        line: its number from 1.
        field: the field at fault, or "line" for the line as a whole.
    """

    def __init__(self, path: str, line: int, field: str, fault: str) -> None:
        super().__init__(f"{path}, line {line}, {field}: {fault}")
        self.path, self.line, self.field = path, line, field


def read_trace(
    path: str | Path,
    *,
    block_size: int = BLOCK_SIZE,
    on_error: OnError = "raise",
    skipped: list[TraceError] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[Request]:
    """Requests of a file in either format: by its suffix (.jsonl, .json, .csv), else by its first character.

    Args, Raises: as `read_mooncake`.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".jsonl", ".json", ".csv"):
        with open_regular(path) as file:
            kind = ".jsonl" if file.read(64).removeprefix(_BOM).lstrip().startswith(b"{") else ".csv"
    if kind == ".csv":
        return read_hits_csv(path, on_error=on_error, skipped=skipped, progress=progress)
    return read_mooncake(path, block_size=block_size, on_error=on_error, skipped=skipped, progress=progress)


def read_mooncake(
    path: str | Path,
    *,
    block_size: int = BLOCK_SIZE,
    on_error: OnError = "raise",
    skipped: list[TraceError] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[Request]:
    """Requests of a Mooncake trace, one JSON object a line, read as they are asked for.

    A line has timestamp (ms), input_length, output_length (tokens) and hash_ids: floor or ceil of input_length /
    block_size integers, where equal leading ids mean an equal prefix. Other fields and blank lines are passed over, and
    so is a byte order mark. The file is read as data, line by line: no more than one line is in memory.

    Args:
        path: the file.
        block_size: tokens per id; 512 in the traces published with the Mooncake paper.
        on_error: "raise" at the first bad line, or "skip" it.
        skipped: collects the errors of skipped lines.
        progress: called with the bytes of each line read.

    Raises:
        TypeError, ValueError: a block size that is no integer >= 1, or an unknown `on_error`; while reading, a
            directory, pipe or device.
        TraceError: while reading, for a line cut short, no UTF-8, no JSON object, longer than 16 MiB, without a field,
            with one twice, with a length that is no integer in range, or with ids that do not fit the length.
        OSError: a file that cannot be read.
    """
    block_size = _checks.integer("block_size", block_size, 1)
    _check_on_error(on_error)

    def parse(line: bytes) -> Request:
        record = _json_object(line)
        try:
            timestamp, length, output, ids = _mooncake_fields(record)
        except KeyError as missing:
            raise _Fault(missing.args[0], "missing") from None
        if type(timestamp) not in (int, float) or not -1e18 < timestamp < 1e18:
            raise _Fault("timestamp", f"expected a finite number of milliseconds, given {_short(timestamp)}")
        n = _tokens("input_length", length, 1)
        if type(ids) is not list or not set(map(type, ids)) <= {int}:
            raise _Fault("hash_ids", f"expected a list of integers, given {_short(ids)}")
        if fault := _unfit(ids, n, block_size):
            raise _Fault("hash_ids", fault)
        return Request(float(timestamp), n, _tokens("output_length", output, 0), tuple(ids), None)

    return _read(Path(path), parse, on_error, skipped, progress)


def read_hits_csv(
    path: str | Path,
    *,
    on_error: OnError = "raise",
    skipped: list[TraceError] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[Request]:
    """Requests of a CSV whose first line names, among others, the columns input_tokens and prefix_hit_tokens.

    Args:
        path, on_error, skipped, progress: as in `read_mooncake`. The first line is never skipped.

    Raises:
        ValueError: an unknown `on_error`; while reading, a directory, pipe or device.
        TraceError: while reading, for a column missing or named twice, a line with fields too few or too many, a
            length that is no integer in range, or a hit above its length.
        OSError: a file that cannot be read.
    """
    _check_on_error(on_error)
    path = Path(path)
    columns: list[str] = []

    def parse(line: bytes) -> Request | None:
        # only numbers are read, so a foreign byte elsewhere does no harm
        try:
            row = next(csv.reader([line.decode("utf-8", "replace").rstrip("\r\n")], strict=True))
        except csv.Error as error:
            raise _Fault("line", f"expected comma-separated values, {error}") from None
        if not columns:
            columns.extend(name.strip() for name in row)
            for name in ("input_tokens", "prefix_hit_tokens"):
                if (found := columns.count(name)) != 1:
                    raise _HeaderFault(name, f"expected one column of this name in the first line, given {found}")
            return None
        if len(row) != len(columns):
            raise _Fault("line", f"expected {len(columns)} fields as in the first line, given {len(row)}")
        n = _tokens("input_tokens", _number(row[columns.index("input_tokens")]), 1)
        hit = _tokens("prefix_hit_tokens", _number(row[columns.index("prefix_hit_tokens")]), 0)
        if hit > n:
            raise _Fault("prefix_hit_tokens", f"expected at most input_tokens = {n}, given {hit}")
        return Request(0.0, n, 0, None, hit)

    return _read(path, parse, on_error, skipped, progress)


def write_mooncake(requests: Iterable[Request], path: str | Path) -> None:
    """Write requests with block ids as a Mooncake trace; `read_mooncake` gives them back.

    Raises:
        ValueError: a request without block ids.
    """
    with Path(path).open("w", encoding="utf-8") as file:
        for number, request in enumerate(requests):
            if request.block_ids is None:
                raise ValueError(f"requests[{number}]: expected block_ids, given None")
            whole = float(request.timestamp).is_integer()
            record = {
                "timestamp": int(request.timestamp) if whole else request.timestamp,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.block_ids,
            }
            file.write(json.dumps(record) + "\n")


class _Fault(ValueError):
    """What is wrong with which field; the reader adds file and line."""

    def __init__(self, field: str, fault: str) -> None:
        super().__init__(field, fault)
        self.field, self.fault = field, fault


class _HeaderFault(_Fault):
    """Nothing after it can be read."""


def _read(
    path: Path,
    parse: Callable[[bytes], Request | None],
    on_error: OnError,
    skipped: list[TraceError] | None,
    progress: Callable[[int], object] | None,
) -> Iterator[Request]:
    with open_regular(path) as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if progress is not None:
                progress(len(line))
            too_long = len(line) == MAX_LINE and not line.endswith(b"\n")
            try:
                if number == 1:
                    if what := text_fault(line):
                        raise _HeaderFault("line", f"expected UTF-8 text, given {what}")
                    line = line.removeprefix(_BOM)
                if too_long:
                    raise _Fault("line", f"expected at most {MAX_LINE} bytes")
                request = parse(line) if line.strip() else None
            except _Fault as fault:
                error = TraceError(path.as_posix(), number, fault.field, fault.fault)
                if on_error == "raise" or isinstance(fault, _HeaderFault):
                    raise error from None
                if skipped is not None:
                    skipped.append(error)
                while too_long and (more := file.readline(MAX_LINE)) and not more.endswith(b"\n"):
                    pass
                continue
            if request is not None:
                yield request


def _json_object(line: bytes) -> dict:
    try:
        record = json.loads(line.decode(), object_pairs_hook=unique_keys)
    except RecursionError:
        raise _Fault("line", "expected a flat JSON object, given one nested too deep") from None
    except ValueError as error:
        cut = "cut short or no JSON" if not line.rstrip().endswith(b"}") else "no JSON"
        raise _Fault("line", f"expected a JSON object, given a line that is {cut} ({one_line(error, 150)})") from None
    if type(record) is not dict:
        raise _Fault("line", f"expected a JSON object, given {_short(record)}")
    return record


def _number(text: str) -> object:
    """The integer that a CSV field spells in plain digits, else the text itself."""
    digits = text.strip()
    plain = digits.removeprefix("-")
    return int(digits) if plain.isascii() and plain.isdigit() and len(plain) < 20 else text


def _tokens(name: str, value: object, low: int) -> int:
    if type(value) is not int or not low <= value <= MAX_TOKENS:
        raise _Fault(name, f"expected an integer from {low} to {MAX_TOKENS}, given {_short(value)}")
    return value


def _unfit(ids: Sequence[int], n: int, block_size: int) -> str:
    """Why so many ids cannot be the blocks of n tokens; empty when they can."""
    low, high = n // block_size, -(-n // block_size)
    if low <= len(ids) <= high:
        return ""
    wanted = f"{low} or {high}" if low < high else f"{low}"
    return f"expected {wanted} ids for {n} tokens in blocks of {block_size}, given {len(ids)}"


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**30:
        return "an integer of over 30 digits"
    if isinstance(value, (list, dict)) and len(value) > 20:
        return f"a {type(value).__name__} of {len(value)}"
    try:
        return one_line(repr(value), 60)
    except RecursionError:
        return "a value nested too deep"


def _check_on_error(on_error: str) -> None:
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error: expected 'raise' or 'skip', given {on_error!r}")
