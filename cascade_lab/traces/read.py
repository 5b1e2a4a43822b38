"""Requests of log files, as they are: which format, how each field was read, and then request by request.

A file is told from its first records, and every field of a request is an expression over the file's own names
(`mapping`), so that the account of a log is the mapping itself. Requests come in the order of their times where the
files have times; an answer is never guessed: what a file does not say is None, and a row without what is needed is a
fault that names line and field.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from cascade_lab import _checks
from cascade_lab.files import UsageError, one_line
from cascade_lab.traces import mapping
from cascade_lab.traces.blocks import Sessions, as_text, chained, ids_of_text, ids_of_tokens
from cascade_lab.traces.formats import FORMATS, looks_like_log, near_miss, recognise
from cascade_lab.traces.formats.form import Format, Gives
from cascade_lab.traces.records import Complain, Source, complaints, open_records, short, shown_path
from cascade_lab.traces.request import BLOCK_SIZE, Fault, HeaderFault, Request, Totals, TraceError

OnError = Literal["raise", "skip"]
Turns = Literal["whole", "delta"]
# requests, and block ids, that are held to put them in order
_WINDOW, _WINDOW_IDS = 2048, 1 << 20
_LOCAL = 40


@dataclass
class Log:
    """A log that is read as it is asked for.

    Attributes:
        format: what it was recognised as; None for an empty log.
        fields: `mapping.FIELDS` to the expressions that read them in this log.
        gives: "block ids", "hits", "lengths" alone, or "sums" of hits.
        block_size: tokens per block id; None without ids.
        account: how it is read, in lines for a reader.
        requests: the requests; of "sums" there are none.
        totals: the sums; only of "sums" there are any.
        warnings: what is found while reading.

    Example:
        >>> log = cl.traces.read_table({"input_tokens": [8, 6], "hit_tokens": [4, 0]})
        >>> log.gives, [(one.input_tokens, one.hit_tokens) for one in log.requests]
        ('hits', [(8, 4), (6, 0)])
    """

    format: Format | None
    fields: Mapping[str, str]
    gives: Gives
    block_size: int | None
    account: tuple[str, ...]
    requests: Iterator[Request]
    totals: Iterator[Totals]
    warnings: list[str] = field(default_factory=list)


def read_logs(
    paths: Sequence[str | Path],
    *,
    format: str | None = None,
    fields: Mapping[str, str] | None = None,
    block_size: int | None = None,
    turns: Turns | None = None,
    content_ids: bool | None = None,
    on_error: OnError = "raise",
    skipped: list[TraceError] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Log:
    """Logs of one format, recognised, or as `format` and `fields` say.

    Args:
        paths: files, "-" for standard input; each may be gzipped, or Parquet where pyarrow is installed.
        format: a name in `FORMATS`; recognised where None.
        fields: names of `mapping.FIELDS` to expressions over the file's own names, beside or instead of the format's.
        block_size: tokens per block id; the format's or the file's own where None.
        turns: whether rows of sessions hold "whole" prompts or the "delta" of each turn; as the format has it where
            None.
        content_ids: whether an id stands for its block alone, so that ids have to be chained; as the format has it
            where None.
        on_error: "raise" at the first bad line, or "skip" it.
        skipped: collects the errors of skipped lines.
        progress: called with the bytes of each line read.

    Raises:
        TypeError, ValueError: a block size that is no integer >= 1, an unknown word or name, or files of two formats.
        TraceError: a file of no known format, which lists those there are; while reading, a line that is no request.
        OSError: a file that cannot be read.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> _ = Path("log.jsonl").write_text(json.dumps({"input_length": 1024, "hash_ids": [1, 2]}))
        >>> log = cl.traces.read_logs(["log.jsonl"])
        >>> log.format.name, log.gives, list(cl.traces.replay(log.requests))
        ('mooncake', 'block ids', [(1024, 0)])
    """
    _check_on_error(on_error)
    block_size, fields = _checked(format, fields, block_size, turns)
    if not paths:
        raise ValueError("paths: expected at least one file, given none")
    given = FORMATS[format] if format else None
    files = [_open(Path(path), given, fields, on_error, skipped, progress) for path in paths]
    return _log(files, block_size, turns, content_ids)


def read_table(
    table: object,
    *,
    format: str | None = None,
    fields: Mapping[str, str] | None = None,
    block_size: int | None = None,
    turns: Turns | None = None,
    content_ids: bool | None = None,
) -> Log:
    """Requests of arrays or of a data frame, by the names of their columns, as `read_logs` reads them from a file.

    Args:
        table: a mapping of names to sequences, arrays or tensors of one length, or a data frame of pandas, Polars or
            pyarrow. Columns may have the names of `mapping.FIELDS`, those of a format, or be mapped by `fields`. A
            value that is NaN or None is missing.
        format, fields, block_size, turns, content_ids: as in `read_logs`.

    Raises:
        TypeError, ValueError: no such table, columns of different lengths, or as `read_logs`.
        TraceError: columns of no known format; while reading, a row that is no request.

    Example:
        >>> table = {"prompt": [8, 6], "cached": [4, 1]}
        >>> log = cl.traces.read_table(table, fields={"input_tokens": "prompt", "hit_tokens": "cached"})
        >>> cl.traces.summarize((one.input_tokens, one.hit_tokens) for one in log.requests).linear_remaining
        Fraction(9, 14)
    """
    block_size, fields = _checked(format, fields, block_size, turns)
    columns = _columns(table)
    if not fields and format is None and "input_tokens" in columns and columns.keys() & {"hit_tokens", "block_ids"}:
        fields = {name: name for name in mapping.FIELDS if name in columns}
    rows = enumerate((dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)), 1)
    head = list(islice(rows, 1))
    source = Source("parquet", head, chain(head, rows), "row")
    complain = complaints("table", "raise", None, "row")
    file = _recognised_file("table", source, FORMATS[format] if format else None, fields, complain, ExitStack())
    return _log([file], block_size, turns, content_ids)


def _checked(
    format: str | None, fields: Mapping[str, str] | None, block_size: int | None, turns: str | None
) -> tuple[int | None, dict[str, str]]:
    block_size = None if block_size is None else _checks.integer("block_size", block_size, 1)
    if format is not None and format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, given {format!r}")
    if turns not in (None, "whole", "delta"):
        raise ValueError(f"turns: expected 'whole' or 'delta', given {turns!r}")
    if unknown := next((name for name in fields or {} if name not in mapping.FIELDS), None):
        raise ValueError(f"fields: expected names among {', '.join(mapping.FIELDS)}, given {unknown!r}")
    return block_size, dict(fields or {})


def _columns(table: object) -> dict[str, list]:
    """The columns of a table as lists of Python's own values."""
    names = getattr(table, "column_names", None) or getattr(table, "columns", None)
    if isinstance(table, Mapping):
        names = table.keys()
    if names is None:
        raise TypeError(f"table: expected a mapping of columns or a data frame, given {_checks.shown(table)}")
    columns = {}
    for name in names:
        column = table[name]
        unpack = next(
            (getattr(column, one) for one in ("tolist", "to_pylist", "to_list") if hasattr(column, one)), None
        )
        columns[str(name)] = [_cell(value) for value in (unpack() if unpack else list(column))]
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"table: expected columns of one length, given {lengths}")
    return columns


def _cell(value: object) -> object:
    """A value of a table as a file would have it: None for NaN, lists for arrays, whole numbers as integers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return None if value != value else int(value) if value.is_integer() else value
    return value


def _log(files: Sequence[_File], block_size: int | None, turns: Turns | None, content_ids: bool | None) -> Log:
    known = [one for one in files if one.format is not None]
    if not known:
        return Log(None, {}, "hits", block_size, (), iter(()), iter(()))
    first = known[0]
    if other := next((one for one in known if one.format.name != first.format.name), None):
        raise UsageError(
            f"paths: expected files of one format, given {first.path} as {first.format.name} and {other.path} as "
            f"{other.format.name}"
        )
    made = _arranged(first.format, first.fields, turns)
    size = _block_size(known, made, block_size)
    content = made.content_ids if content_ids is None else content_ids
    warnings: list[str] = []
    account = _account(known, made, size, content)
    if made.gives == "sums":
        totals = chain.from_iterable(_totals(one, made) for one in known)
        return Log(made, first.fields, "sums", None, account, iter(()), totals, warnings)
    reader = _Reader(made, size, content, turns)
    runs = [reader.requests(one) for one in known]
    # without ids the order of requests changes nothing
    ordered = made.gives == "block ids"
    timed = all(mapping.resolve(one.fields.get("time", ""), one.sample) for one in known if one.sample)
    if ordered and timed and not made.session_clock:
        runs = [_in_order(run, one.path, warnings) for run, one in zip(runs, known, strict=True)]
        requests = heapq.merge(*runs, key=_when) if len(runs) > 1 else runs[0]
    else:
        requests = chain.from_iterable(runs)
        if ordered and made.session_clock:
            warnings.append("times count from each session's start, so that sessions are taken one after another")
        elif ordered and len(runs) > 1:
            warnings.append("without times the files are taken one after another, in the order given")
    return Log(
        made,
        first.fields,
        made.gives,
        size if made.gives == "block ids" else None,
        account,
        requests,
        iter(()),
        warnings,
    )


def read_trace(
    path: str | Path,
    *,
    block_size: int | None = None,
    on_error: OnError = "raise",
    skipped: list[TraceError] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[Request]:
    r"""Requests of one file of any format that gives them, in the file's order.

    Args:
        block_size: tokens per block id; the format's or the file's own where None.

    Raises:
        As `read_logs`, and TraceError for a log of sums.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("hits.csv").write_text("input_tokens,prefix_hit_tokens\n8,4\n6,0\n")
        >>> [(one.input_tokens, one.hit_tokens) for one in cl.traces.read_trace("hits.csv")]
        [(8, 4), (6, 0)]
    """
    _check_on_error(on_error)
    block_size = None if block_size is None else _checks.integer("block_size", block_size, 1)
    return _lazily(path, None, block_size, on_error, skipped, progress)


def read_mooncake(
    path: str | Path,
    *,
    block_size: int = BLOCK_SIZE,
    on_error: OnError = "raise",
    skipped: list[TraceError] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[Request]:
    """Requests of a Mooncake trace, one JSON object a line, read as they are asked for.

    A line has input_length (tokens) and hash_ids: floor or ceil of input_length / block_size integers or strings, where
    equal leading ids mean an equal prefix; timestamp (ms) and output_length where there are any. Other fields and blank
    lines are passed over, and so is a byte order mark. The file is read as data, line by line: no more than one line
    is in memory.

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

    Example:
        >>> from pathlib import Path
        >>> _ = Path("trace.jsonl").write_text('{"timestamp": 0, "input_length": 1024, "hash_ids": [1, 2]}')
        >>> [(one.input_tokens, one.block_ids) for one in cl.traces.read_mooncake("trace.jsonl")]
        [(1024, (1, 2))]
    """
    _check_on_error(on_error)
    block_size = _checks.integer("block_size", block_size, 1)
    return _lazily(path, FORMATS["mooncake"], block_size, on_error, skipped, progress)


def read_hits_csv(
    path: str | Path,
    *,
    on_error: OnError = "raise",
    skipped: list[TraceError] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[Request]:
    r"""Requests of a CSV whose first line names, among others, the columns input_tokens and prefix_hit_tokens.

    Args:
        path, on_error, skipped, progress: as in `read_mooncake`. The first line is never skipped.

    Raises:
        ValueError: an unknown `on_error`; while reading, a directory, pipe or device.
        TraceError: while reading, for a column missing or named twice, a line with fields too few or too many, a
            length that is no integer in range, or a hit above its length.
        OSError: a file that cannot be read.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("hits.csv").write_text("input_tokens,prefix_hit_tokens\n8,4\n6,0\n")
        >>> [(one.input_tokens, one.hit_tokens) for one in cl.traces.read_hits_csv("hits.csv")]
        [(8, 4), (6, 0)]
    """
    _check_on_error(on_error)
    return _lazily(path, FORMATS["hits"], None, on_error, skipped, progress, "csv")


def write_mooncake(requests: Iterable[Request], path: str | Path) -> None:
    """Write requests with block ids as a Mooncake trace; `read_mooncake` gives them back.

    Raises:
        ValueError: a request without block ids.

    Example:
        >>> requests = cl.traces.generate(requests=20)
        >>> cl.traces.write_mooncake(requests, "trace.jsonl")
        >>> list(cl.traces.read_mooncake("trace.jsonl")) == requests
        True
    """
    with Path(path).open("w", encoding="utf-8") as file:
        for number, request in enumerate(requests):
            if request.block_ids is None:
                raise ValueError(f"requests[{number}]: expected block_ids, given None")
            record: dict[str, object] = {"input_length": request.input_tokens, "hash_ids": request.block_ids}
            if request.output_tokens is not None:
                record = {"output_length": request.output_tokens} | record
            if (when := request.timestamp) is not None:
                record = {"timestamp": int(when) if float(when).is_integer() else when} | record
            file.write(json.dumps(record) + "\n")


@dataclass
class _File:
    """A file with its format, the expressions that read it, and its rows."""

    path: str
    format: Format | None
    fields: Mapping[str, str]
    typed: bool
    rows: Iterator[tuple[int, Mapping]]
    sample: Mapping
    complain: Complain
    stack: ExitStack


def _open(
    path: Path,
    format: Format | None,
    fields: Mapping[str, str],
    on_error: OnError,
    skipped: list[TraceError] | None,
    progress: Callable[[int], object] | None,
    kind: str | None = None,
) -> _File:
    stack = ExitStack()
    complain = complaints(path, on_error, skipped)
    if format is not None and format.pattern:
        kind = "text"
    source = open_records(
        path,
        complain,
        kind=kind,
        looks_like_text=looks_like_log,
        forced=format is not None,
        progress=progress,
        stack=stack,
    )
    if source.unit != "line":
        complain = complaints(path, on_error, skipped, source.unit)
    return _recognised_file(shown_path(path), source, format, fields, complain, stack)


def _recognised_file(
    name: str, source: Source, format: Format | None, fields: Mapping[str, str], complain: Complain, stack: ExitStack
) -> _File:
    typed = source.kind in ("json", "parquet")
    if source.columns:
        header = dict.fromkeys(source.columns, "")
        if format is None:
            format = _recognised(source._replace(head=[(1, header)]), fields, name)
        for one in ("input_tokens", "hit_tokens", "block_ids"):
            text = fields.get(one, format.fields.get(one))
            if text and mapping.resolve(text, header) is None:
                gone = next(term for term in mapping.terms(text) if term not in header)
                complain(1, HeaderFault(gone, "expected one column of this name in the first line, given 0"))
    if not source.head:
        return _File(name, None, {}, typed, iter(()), {}, complain, stack)
    if format is None:
        format = _recognised(source, fields, name)
    expressions = dict(format.fields) | dict(fields)
    if "hit_tokens" in fields:
        expressions = {one: text for one, text in expressions.items() if one not in ("block_ids", "token_ids", "text")}
    rows = source.records if format.rows is None else format.rows(source.records, complain)
    sample = next(rows, None)
    if sample is None:
        return _File(name, None, {}, typed, iter(()), {}, complain, stack)
    resolved = {one: mapping.resolve(text, sample[1]) or text.split(" | ")[0] for one, text in expressions.items()}
    return _File(name, format, resolved, typed, chain([sample], rows), sample[1], complain, stack)


def _recognised(source: Source, fields: Mapping[str, str], path: str) -> Format:
    """The format of a source, or one made of `fields` alone."""
    found = None
    if "input_tokens" not in fields or not fields.keys() & {"hit_tokens", "block_ids"}:
        found = recognise(source.head)
    if found is not None:
        return found[0]
    if fields.keys() & {"input_tokens", "token_ids", "text"}:
        return Format("fields", "as the fields given say", "the user", fields=fields)
    line, record = source.head[0]
    given = ", ".join(list(record)[:8]) if isinstance(record, Mapping) else short(record)
    name, gone = near_miss(record)
    lacking = "; ".join(f"lacks {one}" if not one.startswith("no ") else f"has {one[3:]}" for one in gone[:3])
    raise TraceError(
        path,
        line,
        "line",
        one_line(
            f"expected a known format ({', '.join(FORMATS)}), given {one_line(given, 160)}; nearest is {name}, of "
            f"which it {lacking}; --list-formats shows all columns, --field input_tokens=NAME maps them",
            700,
        ),
        source.unit,
    )


def _arranged(format: Format, fields: Mapping[str, str], turns: Turns | None) -> Format:
    """The format with what the options make of it."""
    deltas = format.deltas if turns is None else turns == "delta"
    if deltas and "session" not in fields:
        raise UsageError("turns: expected a log whose rows name their session, given one without")
    return replace(format, fields=fields, deltas=deltas)


def _block_size(files: Sequence[_File], format: Format, given: int | None) -> int:
    if given is not None:
        return given
    size = format.block_size
    for one in files:
        if one.sample and (expression := one.fields.get("block_size")):
            found = mapping.resolve(expression, one.sample)
            if found is not None:
                size = mapping.count(found, one.typed, 1)(one.sample)
    if size is None and format.gives == "block ids":
        raise UsageError(f"block_size: a log of format {format.name} does not say it; give --block-size")
    return size or BLOCK_SIZE


class _Reader:
    """Rows to requests, with what has to be remembered from row to row."""

    def __init__(self, format: Format, block_size: int, content_ids: bool, turns: Turns | None) -> None:
        self._format, self._size, self._content = format, block_size, content_ids
        self._sessions = Sessions(block_size) if format.deltas else None
        self._scopes: dict[object, int] = {}
        # the first id of each session, where rows should repeat it
        self._firsts: dict[str, int | str] | None = {} if format.name == "sessions" and turns is None else None

    def requests(self, file: _File) -> Iterator[Request]:
        build = self._builder(file)
        with file.stack:
            for line, row in file.rows:
                try:
                    request = build(row)
                except Fault as fault:
                    file.complain(line, fault)
                else:
                    yield request

    def _builder(self, file: _File) -> Callable[[Mapping], Request]:
        fields, typed = file.fields, file.typed
        when = mapping.time(fields["time"], typed) if "time" in fields else _nothing
        answer = mapping.optional_count(fields["output_tokens"], typed) if "output_tokens" in fields else _nothing
        session, model, tenant = (
            mapping.label(fields[name]) if name in fields else _nothing for name in ("session", "model", "tenant")
        )
        n_of = mapping.count(fields["input_tokens"], typed, 1) if "input_tokens" in fields else None
        hit_of = mapping.count(fields["hit_tokens"], typed) if "hit_tokens" in fields else None
        ids_of = self._ids(file, n_of)

        if self._format.deltas:
            return self._delta_builder(n_of, ids_of, answer, when, session, model, tenant)

        def build(row: Mapping) -> Request:
            hit = ids = None
            if ids_of is not None:
                n, ids = ids_of(row)
            else:
                n = n_of(row)
                if hit_of is not None:
                    hit = hit_of(row)
                    if hit > n:
                        raise Fault(
                            fields["hit_tokens"], f"expected at most {fields['input_tokens']} = {n}, given {hit}"
                        )
            return Request(when(row), n, answer(row), ids, hit, session(row), model(row), tenant(row))

        if self._firsts is None:
            return build

        def checked(row: Mapping) -> Request:
            request = build(row)
            if request.block_ids and request.session is not None:
                first = self._firsts.setdefault(request.session, request.block_ids[0])
                if first != request.block_ids[0]:
                    raise Fault(
                        fields["block_ids"],
                        f"expected to begin with {short(first)} as the session did, given "
                        f"{short(request.block_ids[0])}: --turns delta if rows hold new tokens alone, --turns whole if "
                        f"a session may begin anew",
                    )
            return request

        return checked

    def _delta_builder(self, n_of, ids_of, answer, when, session, model, tenant) -> Callable[[Mapping], Request]:
        def build(row: Mapping) -> Request:
            n, ids = ids_of(row) if ids_of is not None else (n_of(row), ())
            who, answered = session(row), answer(row)
            if who is None or answered is None:
                name = "session" if who is None else "output_tokens"
                raise Fault(self._format.fields.get(name, name), "missing, and the next turn's prompt depends on it")
            whole, made = self._sessions.turn(who, n, answered, ids)
            return Request(when(row), whole, answered, made, None, who, model(row), tenant(row))

        return build

    def _ids(self, file: _File, n_of) -> Callable[[Mapping], tuple[int, tuple[int | str, ...]]] | None:
        """A getter of a prompt's length and ids; None for a log without ids."""
        fields, typed, size = file.fields, file.typed, self._size
        if "block_ids" in fields:
            path = fields["block_ids"]
            get = mapping.present(path)
            scope_of = mapping.present(fields["scope"]) if "scope" in fields else None
            size_of = None
            if "block_size" in fields and mapping.resolve(fields["block_size"], file.sample):
                size_of = mapping.count(fields["block_size"], typed, 1)

            def by_ids(row: Mapping) -> tuple[int, tuple[int | str, ...]]:
                n, ids = n_of(row), get(row)
                if type(ids) is not list:
                    ids = mapping.as_list(path, ids, typed)
                kinds = set(map(type, ids))
                if not (kinds <= {int} or kinds <= {str}):
                    raise Fault(path, f"expected a list of integers or strings, given {short(ids)}")
                if size_of is not None and (said := size_of(row)) != size:
                    raise Fault(fields["block_size"], f"expected {size} as in all rows, given {said}")
                if fault := unfit(ids, n, size):
                    raise Fault(path, fault)
                if scope_of is not None and mapping.lookup(row, fields["scope"]) is not None:
                    ids = self._scoped(scope_of(row), ids)
                return n, chained(ids) if self._content else tuple(ids)

            return by_ids
        if "token_ids" in fields:
            get = mapping.present(fields["token_ids"])

            def by_tokens(row: Mapping) -> tuple[int, tuple[int, ...]]:
                found = mapping.as_list(fields["token_ids"], get(row), True)
                if not found or set(map(type, found)) != {int}:
                    raise Fault(fields["token_ids"], f"expected a list of token ids, given {short(found)}")
                return len(found), ids_of_tokens(found, size)

            return by_tokens
        if "text" in fields:
            get = mapping.present(fields["text"])

            def by_text(row: Mapping) -> tuple[int, tuple[int, ...]]:
                text = as_text(get(row))
                if not text:
                    raise Fault(fields["text"], f"expected text or messages, given {short(get(row))}")
                return ids_of_text(text, size)

            return by_text
        return None

    def _scoped(self, scope: object, ids: Sequence[int | str]) -> list[int]:
        """Ids that are unique within a scope alone, as ids that are unique."""
        number = self._scopes.setdefault(str(scope), len(self._scopes) + 1)
        if all(type(one) is int and 0 <= one < 1 << _LOCAL for one in ids):
            return [(number << _LOCAL) + one for one in ids]
        return [hash((number, one)) for one in ids]


def unfit(ids: Sequence[int | str], n: int, block_size: int) -> str:
    """Why so many ids cannot be the blocks of n tokens; empty when they can."""
    low, high = n // block_size, -(-n // block_size)
    if low <= len(ids) <= high:
        return ""
    wanted = f"{low} or {high}" if low < high else f"{low}"
    fits = next((2**k for k in range(12) if n // 2**k <= len(ids) <= -(-n // 2**k)), None)
    hint = f"; --block-size {fits} would fit" if fits else ""
    return f"expected {wanted} ids for {n} tokens in blocks of {block_size}, given {len(ids)}{hint}"


def _totals(file: _File, format: Format) -> Iterator[Totals]:
    fields, typed = file.fields, file.typed
    n_of = mapping.count(fields["input_tokens"], typed)
    hit_of = mapping.count(fields["hit_tokens"], typed)
    many_of = mapping.count(fields["requests"], typed)
    when = mapping.time(fields["time"], typed) if "time" in fields else _nothing
    model, tenant = (mapping.label(fields[name]) if name in fields else _nothing for name in ("model", "tenant"))
    with file.stack:
        for line, row in file.rows:
            try:
                n, hit = n_of(row), hit_of(row)
                if hit > n:
                    raise Fault(fields["hit_tokens"], f"expected at most {fields['input_tokens']} = {n}, given {hit}")
                # a batch that goes on with a prompt begins none
                many = (many_of(row) or None) if mapping.resolve(fields["requests"], row) else None
                if many is not None and many > n:
                    raise Fault(fields["requests"], f"expected at most {fields['input_tokens']} = {n}, given {many}")
                if n:
                    yield Totals(when(row), many, n, hit, model(row), tenant(row))
            except Fault as fault:
                file.complain(line, fault)


def _account(files: Sequence[_File], format: Format, block_size: int, content_ids: bool) -> tuple[str, ...]:
    """How the files are read, in lines."""
    first = files[0]
    names = first.path if len(files) == 1 else f"{first.path} and {len(files) - 1} more"
    lines = [f"{names}: {format.name}, {format.about} ({format.source})"]
    for name in mapping.FIELDS:
        if name not in format.fields or name in ("block_size", "scope"):
            continue
        expression, unit = mapping.split_unit(first.fields[name])
        there = mapping.resolve(first.fields[name], first.sample)
        if name == "time" and there:
            value = mapping.lookup(first.sample, expression)
            unit = unit or ("iso" if isinstance(value, str) and first.typed else "")
            if not unit and isinstance(value := mapping.number(value), int | float):
                unit = mapping.told_unit(value)
            expression += {"iso": " (date)", "": " (date)"}.get(unit, f" ({unit})")
        lines.append(f"  {name.replace('_', ' ')} = {expression}" + ("" if there else ", which the first row lacks"))
    if format.gives == "block ids":
        kind = "of blocks alone, chained here" if content_ids else "as they are"
        kind = f"unique within a {scope}" if (scope := first.fields.get("scope")) in first.sample else kind
        if "block_ids" not in format.fields:
            kind = "made here from whole blocks"
        lines.append(f"  ids {kind}, {block_size} tokens each")
    if format.deltas:
        lines.append("  a prompt is its session's turns and answers so far, and the row's new tokens")
    if format.gives == "lengths":
        lines.append("  hits are unknown: nothing here says which tokens were cached")
    if format.gives == "sums":
        lines.append("  a row sums up requests, so that hits of single requests are unknown")
    if format.estimated:
        lines.append(f"  estimated: {format.estimated}")
    return tuple(lines)


def _in_order(requests: Iterator[Request], path: str, warnings: list[str]) -> Iterator[Request]:
    """Requests by their times: sorted within a window, with a warning where times fall, and another where by more."""
    held: list[Request] = []
    ids = falls = late = 0
    worst, last, given = 0.0, float("-inf"), float("-inf")

    def some(count: int) -> Iterator[Request]:
        nonlocal last, late
        held.sort(key=_when)
        for one in held[:count]:
            late += _when(one) < last
            last = max(last, _when(one))
            yield one
        del held[:count]

    for request in requests:
        if request.timestamp is None:
            warnings.append(f"{path}: some rows have no time, so that from there on they are in the file's order")
            yield from some(len(held))
            yield request
            yield from requests
            break
        when = _when(request)
        if when < given:
            falls += 1
            worst = max(worst, given - when)
        given = max(given, when)
        held.append(request)
        ids += len(request.block_ids or ())
        if len(held) >= 2 * _WINDOW or ids > _WINDOW_IDS:
            yield from some(max(1, len(held) // 2))
            ids = sum(len(one.block_ids or ()) for one in held)
    yield from some(len(held))
    if falls:
        done = f"; {late} are still behind a later one" if late else ", and are put in order"
        warnings.append(f"{path}: times fall at {falls} requests, by up to {worst / 1e3:.3g} s{done}")


def _when(request: Request) -> float:
    return float("-inf") if request.timestamp is None else request.timestamp


def _nothing(row: Mapping) -> None:
    return None


def _lazily(
    path: str | Path,
    format: Format | None,
    block_size: int | None,
    on_error: OnError,
    skipped: list[TraceError] | None,
    progress: Callable[[int], object] | None,
    kind: str | None = None,
) -> Iterator[Request]:
    file = _open(Path(path), format, {}, on_error, skipped, progress, kind)
    if file.format is None:
        return
    format = _arranged(file.format, file.fields, None)
    if format.gives == "sums":
        raise TraceError(file.path, 1, "line", f"expected requests, given sums over requests ({format.name})")
    reader = _Reader(format, _block_size([file], format, block_size), format.content_ids, None)
    yield from reader.requests(file)


def _check_on_error(on_error: str) -> None:
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error: expected 'raise' or 'skip', given {on_error!r}")
