"""The report of `cascade-lab trace`: logs as they are, as tables, JSON, CSV and a figure.

A log with block ids is replayed through caches, one per capacity, page size, time to live and number of workers asked
for, all in one reading. A log with hits is summed up. One with lengths alone says that hits are unknown, and what they
would be worth; one with sums alone gives bounds.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import product, tee
from pathlib import Path
from typing import NamedTuple

from cascade_lab.files import UsageError, one_line, write_file
from cascade_lab.regions import Dense, Region
from cascade_lab.traces import (
    AFFINITIES,
    FIELDS,
    FORMATS,
    MODELS,
    OTHER_MODELS,
    Bounds,
    Log,
    ModelShape,
    Request,
    Sums,
    Totals,
    TraceError,
    TraceSummary,
    bounds_of_lengths,
    bounds_of_totals,
    read_logs,
    read_model,
    region,
    replay,
)

DEFAULT_MODEL = "Llama-3.1-8B"
_MODELS = MODELS | OTHER_MODELS
BINS = 20
_SHOWN_ERRORS = 5
_EPOCH_MS = 1e11
_ALL = "all"


class HitHistogram:
    """How often each hit ratio occurs, in `BINS` equal bins: by requests, by tokens N, and by pairs N(N + 1)/2.

    Attributes:
        requests, tokens, pairs: integers per bin; the last bin includes h = 1.
    """

    def __init__(self) -> None:
        self.requests: list[int] = [0] * BINS
        self.tokens: list[int] = [0] * BINS
        self.pairs: list[int] = [0] * BINS

    def count(self, n: int, hit: int) -> None:
        """Count a request."""
        i = min(hit * BINS // n, BINS - 1)
        self.requests[i] += 1
        self.tokens[i] += n
        self.pairs[i] += n * (n + 1) // 2

    def watch(self, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Pass (N, H) on, counting them."""
        for n, hit in pairs:
            self.count(n, hit)
            yield n, hit


class Setting(NamedTuple):
    """A cache, or a hit ratio that is assumed.

    Attributes:
        capacity: tokens; None for no limit.
        page: tokens; None for the log's blocks.
        ttl: seconds; None for ever.
        workers, affinity: as `traces.replay` takes them.
        what_if: hit ratio of every request, where hits are unknown; None otherwise.
    """

    capacity: int | None = None
    page: int | None = None
    ttl: float | None = None
    workers: int = 1
    affinity: str = "none"
    what_if: float | None = None


class Row(NamedTuple):
    """What a group of requests comes to in a setting; `bounds` where single hits are unknown."""

    group: str
    setting: Setting
    summary: TraceSummary | None
    bounds: Bounds | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cascade-lab trace`."""
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE", help="logs of one format, plain or .gz, Parquet with pyarrow; - is stdin")
    add("--list-formats", action="store_true", help="print the formats with their columns")
    add("--format", choices=list(FORMATS), metavar="NAME", help="take the files for this format (default: recognise)")
    add(
        "--field",
        type=_field,
        action="append",
        default=[],
        metavar="NAME=COLUMN",
        help=f"read a field from a column, a path a.b, a sum 'a + b' or a number; NAME is one of {', '.join(FIELDS)}",
    )
    add("--block-size", type=_positive_number, metavar="N", help="tokens per block id (default: the format's)")
    add("--ids", choices=("chain", "content"), help="an id stands for its block and all before it, or for it alone")
    add("--turns", choices=("whole", "delta"), help="rows of sessions hold whole prompts, or what each turn adds")
    add(
        "--capacity",
        type=_several(_whole_number),
        default=[None],
        metavar="TOKENS,...",
        help="tokens that a cache holds, least recently used blocks leave first; none for no limit (default)",
    )
    add(
        "--page-size",
        type=_several(_positive_number),
        default=[None],
        metavar="N,...",
        help="tokens that are cached and found together (default: one block)",
    )
    add(
        "--ttl",
        type=_several(_seconds),
        default=[None],
        metavar="S,...",
        help="seconds after its last use that a block stays (default: none)",
    )
    add(
        "--workers",
        type=_several(_positive_number),
        default=[1],
        metavar="N,...",
        help="number of caches, each of the capacity (default: 1)",
    )
    add(
        "--affinity",
        type=_several(_affinity),
        default=["none"],
        metavar="KIND,...",
        help=f"how requests find their worker: {', '.join(AFFINITIES)} (default: none)",
    )
    add("--group", choices=("model", "tenant", "hour"), help="also report by model, tenant or hour")
    add(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME",
        help=f"whose FLOPs are counted: {', '.join(sorted(_MODELS))}, or a config.json (default: %(default)s)",
    )
    add(
        "--region",
        type=_region,
        metavar="RULE",
        help="keys that a row sees, such as window:4096 or 5*window:1024+1*dense (default: the model's)",
    )
    add(
        "--what-if-hit",
        type=_several(_ratio),
        metavar="H,...",
        help="hit ratios to assume where a log has lengths alone",
    )
    add("--max-tokens", type=_positive_number, metavar="N", help="the longest prompt, for the bounds of sums")
    add("--json", type=Path, metavar="OUT", help="also write the report as JSON")
    add("--csv", type=Path, metavar="OUT", help="also write one line per group and setting")
    add("--figure", type=Path, metavar="OUT", help="also draw it; the suffix says .svg, .png or .pdf")
    add("--skip-bad-lines", action="store_true", help="count and pass over lines that are no request")


def carry_out(options: argparse.Namespace) -> int:
    """Carry out `cascade-lab trace`: 0, or 1 where the trace is at fault.

    Raises:
        UsageError: no such file, an option that the log cannot answer, or a figure of unknown kind.
        ModuleNotFoundError: a figure without matplotlib.
    """
    if options.list_formats:
        print(list_formats())
        return 0
    size = _check_files(options)
    if options.figure is not None:
        if options.figure.suffix.lower() not in (".svg", ".png", ".pdf"):
            raise UsageError(f"--figure: expected a name in .svg, .png or .pdf, given {options.figure.as_posix()}")
        import matplotlib  # noqa: F401  before the trace is read
    skipped, histogram = _Skipped(), HitHistogram()
    name = ", ".join(options.files)
    try:
        model = _model(options.model)
        with _Progress(size) as progress:
            log = read_logs(
                options.files,
                format=options.format,
                fields=dict(options.field),
                block_size=options.block_size,
                turns=options.turns,
                content_ids=None if options.ids is None else options.ids == "content",
                on_error="skip" if options.skip_bad_lines else "raise",
                skipped=skipped,
                progress=progress,
            )
            rows = _rows(log, options, model, histogram)
    except TraceError as error:
        print(one_line(f"cascade-lab trace: {error}", 1000), file=sys.stderr)
        return 1
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        _print_skipped(skipped)
        print(one_line(f"cascade-lab trace: {name}: {error}", 1000), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"cascade-lab trace: {error.filename or name}: {error.strerror or error}", file=sys.stderr)
        return 1
    _print_skipped(skipped)
    for warning in log.warnings:
        print(one_line(f"warning: {warning}", 1000), file=sys.stderr)
    print(
        "\n".join(one_line(line, 500) if i == 0 else "  " + one_line(line, 500) for i, line in enumerate(log.account))
    )
    print()
    print(format_rows(rows, log, options.group))
    return _write(options, log, rows, histogram, skipped.count)


def list_formats() -> str:
    """A line of each format with its columns, and the documentation that they are from."""
    lines = []
    for one in FORMATS.values():
        columns = "; ".join(f"{name.replace('_', ' ')} = {text}" for name, text in one.fields.items())
        lines.append(f"{one.name}: {one.about}; gives {one.gives}; {columns} [{one.source}]")
    return "\n".join(lines)


def measure(
    requests: Iterable[Request],
    settings: Sequence[Setting],
    block_size: int,
    *,
    group: str | None = None,
    model: ModelShape | None = None,
    region: Region | None = None,
    histogram: HitHistogram | None = None,
) -> list[Row]:
    """The requests in every setting, as a whole and by group, in one reading.

    Args:
        requests: in order of arrival.
        settings: caches; requests that bring their hit keep it.
        block_size: tokens per id.
        group: "model", "tenant" or "hour"; None for the whole alone.
        model, region: as `traces.summarize` takes them.
        histogram: counts the hits of the first setting.

    Raises:
        ValueError: no request, or one that cannot be replayed or grouped.
    """
    first, *copies = tee(requests, len(settings) + 1)
    runs = [
        replay(
            copy,
            block_size=block_size,
            capacity_tokens=one.capacity,
            page_size=one.page,
            ttl_ms=None if one.ttl is None else 1e3 * one.ttl,
            workers=one.workers,
            affinity=one.affinity,
            check_chain=True,
        )
        for copy, one in zip(copies, settings, strict=True)
    ]
    sums: dict[tuple[str, int], _Buffer] = {}
    whole = [sums.setdefault((_ALL, i), _Buffer(model, region)) for i in range(len(settings))]
    name_of = _namer(group)
    for request, *pairs in zip(first, *runs, strict=False):
        if histogram is not None:
            histogram.count(*pairs[0])
        name = name_of(request) if name_of else None
        for i, (n, hit) in enumerate(pairs):
            whole[i].add(n, hit)
            if name is not None:
                if (name, i) not in sums:
                    sums[name, i] = _Buffer(model, region)
                sums[name, i].add(n, hit)
    ordered = sorted(sums.items(), key=lambda item: (item[0][0] != _ALL, item[0]))
    return [Row(name, settings[i], buffer.summary()) for (name, i), buffer in ordered]


class _Buffer:
    """Requests of a group in a setting, summed up many at a time."""

    def __init__(self, model: ModelShape | None, region: Region | None) -> None:
        self._sums, self._n, self._hit = Sums(model, region), [], []

    def add(self, n: int, hit: int) -> None:
        self._n.append(n)
        self._hit.append(hit)
        if len(self._n) == 4096:
            self._flush()

    def summary(self) -> TraceSummary:
        self._flush()
        return self._sums.summary()

    def _flush(self) -> None:
        if self._n:
            self._sums.add(self._n, self._hit)
            self._n, self._hit = [], []


def _namer(group: str | None) -> Callable[[Request | Totals], str] | None:
    """Which group a request is of."""
    if group is None:
        return None
    if group == "hour":
        return _hour
    return lambda one: getattr(one, group) or "(not said)"


def _hour(one: Request | Totals) -> str:
    if one.timestamp is None:
        return "(not said)"
    if abs(one.timestamp) < _EPOCH_MS:
        return f"hour {int(one.timestamp // 3.6e6):4d}"
    return datetime.fromtimestamp(one.timestamp / 1e3, UTC).strftime("%Y-%m-%d %H:00")


def _rows(log: Log, options: argparse.Namespace, model: ModelShape, histogram: HitHistogram) -> list[Row]:
    rule = options.region if options.region is not None else model.region
    if log.gives != "lengths" and options.what_if_hit:
        raise UsageError(f"--what-if-hit: expected a log with lengths alone, given {log.gives}")
    if log.gives == "sums":
        return _bounded(log, options)
    if log.gives == "lengths":
        return _assumed(log, options, model, rule, histogram)
    settings = [Setting(*one) for one in product(*(getattr(options, name) for name in _SWEEPS))]
    if log.gives == "hits" and log.format is not None:
        for option, values in (("--capacity", "capacity"), ("--ttl", "ttl"), ("--workers", "workers")):
            if getattr(options, values) not in ([None], [1]):
                raise UsageError(f"{option}: expected a trace with block ids, given one whose hits are recorded")
    return measure(
        log.requests,
        settings,
        log.block_size or 1,
        group=options.group,
        model=model,
        region=rule,
        histogram=histogram,
    )


_SWEEPS = ("capacity", "page_size", "ttl", "workers", "affinity")


def _bounded(log: Log, options: argparse.Namespace) -> list[Row]:
    """Bounds of a log of sums, as a whole and by group."""
    name_of, groups = _namer(options.group), {_ALL: []}
    for one in log.totals:
        groups[_ALL].append(one)
        if name_of:
            groups.setdefault(name_of(one), []).append(one)
    if options.region not in (None, Dense()):
        raise UsageError("--region: expected none with a log of sums, whose bounds are those of dense causal attention")
    return [
        Row(name, Setting(), None, bounds_of_totals(found, options.max_tokens))
        for name, found in sorted(groups.items(), key=lambda item: (item[0] != _ALL, item[0]))
    ]


def _assumed(
    log: Log, options: argparse.Namespace, model: ModelShape, rule: Region, histogram: HitHistogram
) -> list[Row]:
    """A log of lengths without hits, and with hits as assumed: the same ratio in every request, and bounds."""
    name_of = _namer(options.group)
    groups: dict[str, array] = {_ALL: array("q")}
    for request in log.requests:
        groups[_ALL].append(request.input_tokens)
        if name_of:
            groups.setdefault(name_of(request), array("q")).append(request.input_tokens)
    rows = []
    for name, lengths in sorted(groups.items(), key=lambda item: (item[0] != _ALL, item[0])):
        for h in options.what_if_hit or [0.0]:
            pairs = [(n, min(int(h * n), n - 1)) for n in lengths]
            sums = _Buffer(model, rule)
            for n, hit in pairs:
                sums.add(n, hit)
                if name == _ALL and h == (options.what_if_hit or [0.0])[0]:
                    histogram.count(n, hit)
            bounds = None
            if options.what_if_hit and rule == Dense():
                bounds = bounds_of_lengths(lengths, sum(hit for _, hit in pairs))
            rows.append(Row(name, Setting(what_if=h if options.what_if_hit else None), sums.summary(), bounds))
    return rows


def to_json(summary: TraceSummary) -> dict[str, object]:
    """The summary as plain JSON values: fractions as numbers, and once more exactly as text under "exact"."""
    fractions = {
        name: value
        for name in ("linear_remaining", "attention_remaining", "model_remaining")
        if (value := getattr(summary, name)) is not None
    }
    return {
        "requests": summary.requests,
        "tokens": summary.tokens,
        "hit_tokens": summary.hit_tokens,
        "pairs": summary.pairs,
        "pairs_left": summary.pairs_left,
        "token_hit": summary.token_hit,
        "request_hit": summary.request_hit,
        "rms_hit": summary.rms_hit,
        **{name: float(value) for name, value in fractions.items()},
        "model": summary.model.name if summary.model else None,
        # JSON has no infinity
        "errors": {name: error if math.isfinite(error) else None for name, error in summary.errors.items()},
        "exact": {name: str(value) for name, value in fractions.items()},
    }


def format_report(summary: TraceSummary) -> str:
    """The summary as text: sums, means, what is left, and the formulas' errors."""
    rows = [
        ("requests", f"{summary.requests:,}"),
        ("prompt tokens", f"{summary.tokens:,}"),
        ("query-key pairs without hits", f"{summary.pairs:,}"),
        ("", ""),
        ("hit ratio by tokens (token_hit)", f"{summary.token_hit:.4f}"),
        ("hit ratio by requests (request_hit)", f"{summary.request_hit:.4f}"),
        ("hit ratio, root mean square by N(N+1) (rms_hit)", f"{summary.rms_hit:.4f}"),
        ("", ""),
        ("token-linear work left", f"{float(summary.linear_remaining):.4f}"),
        ("attention pairs left", f"{float(summary.attention_remaining):.4f}"),
        ("attention pairs saved", f"{1 - float(summary.attention_remaining):.4f}"),
    ]
    if summary.model is not None and summary.model_remaining is not None:
        rows.append((f"FLOPs left, {summary.model.name}", f"{float(summary.model_remaining):.4f}"))
        rows.append((f"FLOPs saved, {summary.model.name}", f"{1 - float(summary.model_remaining):.4f}"))
    rows += [("", ""), ("formula", "relative error")]
    rows += [(name, f"{error:+.2%}") for name, error in summary.errors.items()]
    return _aligned(rows) + f"\n\n{misleading(summary)}"


def misleading(summary: TraceSummary) -> str:
    """Which mean errs most where it is put into the law of the attention pairs, and by how much, in a sentence."""
    exact = float(summary.attention_remaining)
    law = "1-h^2" if summary.region == Dense() else "1-h"
    means = {"token_hit": summary.token_hit, "request_hit": summary.request_hit}
    errors = {name: summary.errors[f"attention, {law} at {name}"] for name in means}
    name = max(errors, key=lambda one: abs(errors[one]))
    said = 1 - means[name] ** 2 if law == "1-h^2" else 1 - means[name]
    return (
        f"{name} = {means[name]:.4f} would have misled most: {law} of it says {said:.4f} of the attention pairs are "
        f"left, where {exact:.4f} are ({errors[name]:+.1%})"
    )


def format_rows(rows: Sequence[Row], log: Log, group: str | None = None) -> str:
    """The report as text: the whole in its first setting, and a table where there are groups or settings."""
    first = rows[0]
    if first.summary is None:
        return _bounds_table(rows, group)
    if log.gives == "lengths" and first.setting.what_if is None:
        return "\n".join(_lengths_only(row, group) for row in rows)
    parts = [format_report(first.summary)]
    if first.bounds is not None:
        parts.append(
            f"with every request at h = {first.setting.what_if}; if only the sum of hits were known, between "
            f"{float(first.bounds.least):.4f} and {float(first.bounds.most):.4f} of the attention pairs are saved"
        )
    if len(rows) > 1:
        parts.append(_table([_flat(row, group) for row in rows]))
    return "\n\n".join(parts)


def _lengths_only(row: Row, group: str | None) -> str:
    summary = row.summary
    share = 0.0
    if summary.model is not None:
        model = summary.model._replace(region=summary.region)
        linear = model.linear_flops * summary.tokens
        attention = float(model.attention_flops(summary.pairs))
        share = attention / (linear + attention)
    rows = [
        (group, row.group) if group else ("", ""),
        ("requests", f"{summary.requests:,}"),
        ("prompt tokens", f"{summary.tokens:,}"),
        ("query-key pairs", f"{summary.pairs:,}"),
        (f"attention's share of FLOPs, {summary.model.name}" if summary.model else "", f"{share:.4f}"),
        ("hits", "unknown"),
    ]
    text = _aligned([one for one in rows if one[0]])
    return text + ("" if row.group != _ALL else "\n\nwhat hits would be worth: --what-if-hit 0.5, or several ratios")


def _bounds_table(rows: Sequence[Row], group: str | None) -> str:
    table = []
    for row in rows:
        found = row.bounds
        h = found.token_hit
        table.append(
            ({group: row.group} if group else {})
            | {
                "requests": "?" if found.requests is None else f"{found.requests:,}",
                "tokens": f"{found.tokens:,}",
                "token_hit": f"{h:.4f}",
                "linear left": f"{1 - h:.4f}",
                "attention saved, at least": f"{float(found.least):.4f}",
                "all alike, h^2": f"{h * h:.4f}",
                "all or nothing, h": f"{h:.4f}",
                "at most": f"{float(found.most):.4f}",
            }
        )
    return _table(table) + (
        "\n\nthe token-linear work is exact; attention's lies between the bounds, and a whole model's, a weighted mean "
        "of both, between the least and the greatest of all"
    )


def _flat(row: Row, group: str | None) -> dict[str, str]:
    """A row as texts, for the table."""
    summary, setting = row.summary, row.setting
    found = {group: row.group} if group else {}
    found |= {
        "capacity": "no limit" if setting.capacity is None else f"{setting.capacity:,}",
        "page": "" if setting.page is None else str(setting.page),
        "ttl": "" if setting.ttl is None else f"{setting.ttl:g}",
        "workers": "" if setting.workers == 1 else str(setting.workers),
        "affinity": "" if setting.workers == 1 else setting.affinity,
        "what if": "" if setting.what_if is None else f"{setting.what_if:g}",
    }
    found |= {
        "requests": f"{summary.requests:,}",
        "tokens": f"{summary.tokens:,}",
        "token_hit": f"{summary.token_hit:.4f}",
        "request_hit": f"{summary.request_hit:.4f}",
        "rms_hit": f"{summary.rms_hit:.4f}",
        "attention saved": f"{1 - float(summary.attention_remaining):.4f}",
        "FLOPs saved": "" if summary.model_remaining is None else f"{1 - float(summary.model_remaining):.4f}",
    }
    return found


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows under their names, without columns that say nothing or the same default everywhere."""
    names = [name for name in rows[0] if any(row[name] not in ("", "no limit") for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = ["  ".join(f"{name:>{widths[name]}}" for name in names)]
    lines += ["  ".join(f"{one_line(row[name]):>{widths[name]}}" for name in names) for row in rows]
    return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    column = max(len(value) for _, value in rows)
    return "\n".join(f"{name:<{width}}  {value:>{column}}".rstrip() for name, value in rows)


def record(row: Row, group: str | None) -> dict[str, object]:
    """A row as plain JSON values."""
    setting = {
        "capacity_tokens": row.setting.capacity,
        "page_size": row.setting.page,
        "ttl_s": row.setting.ttl,
        "workers": row.setting.workers,
        "affinity": row.setting.affinity,
        "what_if_hit": row.setting.what_if,
    }
    found = {"group": row.group, "grouped_by": group} | setting
    if row.summary is not None:
        found |= to_json(row.summary)
    if row.bounds is not None:
        found |= {
            "requests": row.bounds.requests,
            "tokens": row.bounds.tokens,
            "hit_tokens": row.bounds.hit_tokens,
            "token_hit": row.bounds.token_hit,
            "attention_saved_at_least": float(row.bounds.least),
            "attention_saved_at_most": float(row.bounds.most),
        }
    return found


def _write(options: argparse.Namespace, log: Log, rows: Sequence[Row], histogram: HitHistogram, skipped: int) -> int:
    """Write what is asked for beside the text: 0, or 1 where it cannot be written."""
    names = [Path(path).name for path in options.files]
    place = options.json
    try:
        if options.json is not None:
            head = {
                "trace": names[0] if len(names) == 1 else names,
                "format": log.format.name if log.format else None,
                "gives": log.gives,
                "read": list(log.account),
                "warnings": log.warnings,
                "block_size": log.block_size,
                "skipped_lines": skipped,
            }
            content = head | record(rows[0], options.group)
            if log.gives == "lengths" and rows[0].setting.what_if is None:
                content = head | _without_hits(content)
            elif len(rows) > 1:
                content["rows"] = [record(row, options.group) for row in rows]
            write_file(options.json, (json.dumps(content, indent=1) + "\n").encode())
        place = options.csv
        if options.csv is not None:
            write_file(options.csv, _csv([record(row, options.group) for row in rows], log, rows).encode())
        place = options.figure
        if options.figure is not None:
            _draw(options, log, rows, histogram)
    except OSError as error:
        print(one_line(f"cascade-lab trace: {error.filename or place}: {error.strerror}", 1000), file=sys.stderr)
        return 1
    return 0


def _without_hits(found: Mapping[str, object]) -> dict[str, object]:
    """What is known of lengths alone: a hit that nobody knows is null."""
    known = {
        name: found[name] for name in ("group", "grouped_by", "requests", "tokens", "pairs", "model") if name in found
    }
    return known | {"hit_tokens": None, "token_hit": None, "attention_remaining": None}


def _csv(records: Sequence[Mapping[str, object]], log: Log, rows: Sequence[Row]) -> str:
    if log.gives == "lengths" and rows[0].setting.what_if is None:
        records = [_without_hits(one) for one in records]
    names = [name for name in records[0] if name not in ("errors", "exact")]
    out = io.StringIO()
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def _draw(options: argparse.Namespace, log: Log, rows: Sequence[Row], histogram: HitHistogram) -> None:
    from cascade_lab.pictures.style import save
    from cascade_lab.pictures.traces import hit_report, saved_rows

    if len(rows) == 1 and rows[0].summary is not None and rows[0].bounds is None and log.gives != "lengths":
        figure = hit_report(rows[0].summary, vars(histogram))[0]
    else:
        figure = saved_rows([_drawn(row, options.group) for row in rows])[0]
    save(figure, options.figure)


def _drawn(row: Row, group: str | None) -> tuple[str, float, float, float]:
    """A row as a label, its token-linear work saved, and attention's pairs saved, at least and at most."""
    label = [row.group] if group else []
    setting = row.setting
    label += [f"{setting.capacity:,} tokens"] if setting.capacity is not None else []
    label += [f"page {setting.page}"] if setting.page is not None else []
    label += [f"{setting.ttl:g} s"] if setting.ttl is not None else []
    label += [f"{setting.workers} workers, {setting.affinity}"] if setting.workers > 1 else []
    label += [f"what if {setting.what_if:g}"] if setting.what_if is not None else []
    name = ", ".join(label) or "no limit"
    if row.bounds is not None:
        return name, row.bounds.token_hit, float(row.bounds.least), float(row.bounds.most)
    saved = 1 - float(row.summary.attention_remaining)
    return name, row.summary.token_hit, saved, saved


def _check_files(options: argparse.Namespace) -> int:
    """The bytes of all files; standard input has none."""
    if not options.files:
        raise UsageError("expected at least one FILE, or --list-formats")
    size = 0
    for name in options.files:
        if name == "-":
            continue
        file = Path(name)
        if not file.is_file():
            fault = "expected a file, given something else" if file.exists() else "no such file"
            raise UsageError(f"{fault}: {file.as_posix()}")
        size += file.stat().st_size
    return size


def _model(name: str) -> ModelShape:
    if name in _MODELS:
        return _MODELS[name]
    if not Path(name).is_file():
        raise UsageError(f"--model: expected one of {', '.join(sorted(_MODELS))}, or a config.json, given {name}")
    return read_model(name)


class _Skipped(list[TraceError]):
    """The first bad lines and the number of all, for a file may have any number of them."""

    count = 0

    def append(self, error: TraceError) -> None:
        self.count += 1
        if len(self) < _SHOWN_ERRORS:
            super().append(error)


def _print_skipped(skipped: _Skipped) -> None:
    if not skipped:
        return
    lines = "line" if skipped.count == 1 else "lines"
    print(f"skipped {skipped.count} bad {lines}:", file=sys.stderr)
    for error in skipped:
        print(f"  {one_line(error, 1000)}", file=sys.stderr)
    if skipped.count > len(skipped):
        print(f"  and {skipped.count - len(skipped)} more", file=sys.stderr)


class _Progress:
    """A bar on standard error where that is a terminal, else nothing; called with the bytes of each line."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._shown = max(1, total), 0, -1
        self._visible = sys.stderr.isatty()

    def __enter__(self) -> Callable[[int], object] | None:
        return self._advance if self._visible else None

    def __exit__(self, *failure: object) -> None:
        if self._visible:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _advance(self, size: int) -> None:
        self._done += size
        percent = min(100, 100 * self._done // self._total)
        if percent != self._shown:
            self._shown = percent
            bar = "#" * (percent * 40 // 100)
            print(f"\rreading [{bar:<40}] {percent:3d}%", end="", file=sys.stderr, flush=True)


def _whole_number(text: str, low: int = 0) -> int:
    digits = text.replace("_", "")
    if not (digits.isascii() and digits.isdecimal()) or int(digits) < low:
        raise argparse.ArgumentTypeError(f"expected a whole number of tokens from {low}, given {text!r}")
    return int(digits)


def _positive_number(text: str) -> int:
    return _whole_number(text, 1)


def _real(text: str, low: float, high: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"expected {what}, given {text!r}")
    return value


def _seconds(text: str) -> float:
    return _real(text, 0, 1e12, "seconds from 0")


def _ratio(text: str) -> float:
    return _real(text, 0, 1, "a ratio from 0 to 1")


def _affinity(text: str) -> str:
    if text not in AFFINITIES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(AFFINITIES)}, given {text!r}")
    return text


def _several(one: Callable[[str], object]) -> Callable[[str], list]:
    """Values between commas; "none" for no limit where that is a value."""

    def parse(text: str) -> list:
        plain = one in (_whole_number, _seconds)
        return [None if plain and part.strip() == "none" else one(part.strip()) for part in text.split(",")]

    return parse


def _field(text: str) -> tuple[str, str]:
    name, equals, expression = text.partition("=")
    if not equals or name.strip() not in FIELDS or not expression.strip():
        raise argparse.ArgumentTypeError(f"expected NAME=COLUMN with NAME one of {', '.join(FIELDS)}, given {text!r}")
    return name.strip(), expression.strip()


def _region(text: str) -> Region:
    try:
        return region(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
