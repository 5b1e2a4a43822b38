"""The report of `cascade-lab trace`: a user's trace as a table, as JSON and as a figure.

Also the recorded results of public traces, figures/measured/traces.json, as written by
`python -m cascade_lab.trace_report DATA_FOLDER RECORD_FILE`: the traces stay where they are published, only
their sums are kept.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from cascade_lab.files import UsageError, one_line, put_in_place
from cascade_lab.traces import (
    BLOCK_SIZE,
    MODELS,
    ModelShape,
    Request,
    TraceError,
    TraceSummary,
    read_hits_csv,
    read_mooncake,
    read_trace,
    replay,
    summarize,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_MODEL = "Llama-3.1-8B"
BINS = 20
WEIGHTS = ("requests", "tokens", "pairs")
SOURCES = {
    "conversation": {
        "file": "mooncake/conversation_trace.jsonl",
        "repository": "kvcache-ai/Mooncake",
        "published as": "FAST25-release/traces/conversation_trace.jsonl",
        "commit": "3b5a5941",
        "snapshot": "2026-08-22",
        "licence": "Apache-2.0",
        "changes": "none",
    },
    "agentic": {
        "file": "agentic/requests_prefix_hits.csv",
        "repository": "callanjfox/kv-cache-tester",
        "published as": "traces/",
        "commit": "94f6046d",
        "snapshot": "2026-07-12",
        "licence": "Apache-2.0",
        "changes": "hits derived per session: blocks of 64 tokens, unlimited cache, at most N - 1; 710 of 739 sessions",
    },
}
CAPACITIES = (300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000)
_SHOWN_ERRORS = 5


class HitHistogram:
    """How often each hit ratio occurs, in `BINS` equal bins: by requests, by tokens N, and by pairs N(N + 1)/2.

    Attributes:
        requests, tokens, pairs: integers per bin; the last bin includes h = 1.
    """

    def __init__(self) -> None:
        self.requests, self.tokens, self.pairs = [0] * BINS, [0] * BINS, [0] * BINS

    def watch(self, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Pass (N, H) on, counting them."""
        for n, hit in pairs:
            i = min(hit * BINS // n, BINS - 1)
            self.requests[i] += 1
            self.tokens[i] += n
            self.pairs[i] += n * (n + 1) // 2
            yield n, hit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cascade-lab trace`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="trace: Mooncake JSON lines, or CSV with hits")
    parser.add_argument(
        "--block-size",
        type=_positive,
        default=BLOCK_SIZE,
        metavar="N",
        help="tokens per block id of a Mooncake trace (default: %(default)s)",
    )
    parser.add_argument(
        "--capacity",
        type=_count,
        metavar="TOKENS",
        help="tokens that the cache holds, least recently used blocks leave first (default: no limit)",
    )
    parser.add_argument(
        "--model",
        choices=sorted(MODELS),
        default=DEFAULT_MODEL,
        help="whose FLOPs the whole-model errors are for (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the report as JSON")
    parser.add_argument("--figure", type=Path, metavar="OUT", help="also draw it; the suffix says .svg, .png or .pdf")
    parser.add_argument("--skip-bad-lines", action="store_true", help="count and pass over lines that are no request")


def run(options: argparse.Namespace) -> int:
    """Carry out `cascade-lab trace`: 0, or 1 where the trace is at fault.

    Raises:
        UsageError: no such file, a capacity for a trace whose hits are given, or a figure of unknown kind.
        ModuleNotFoundError: a figure without matplotlib.
    """
    file: Path = options.file
    if not file.is_file():
        fault = "expected a file, given something else" if file.exists() else "no such file"
        raise UsageError(f"{fault}: {file.as_posix()}")
    if options.figure is not None:
        if options.figure.suffix.lower() not in (".svg", ".png", ".pdf"):
            raise UsageError(f"--figure: expected a name in .svg, .png or .pdf, given {options.figure.as_posix()}")
        import matplotlib  # noqa: F401  before the trace is read
    skipped = _Skipped()
    histogram = HitHistogram()
    model = MODELS[options.model]
    try:
        with _Progress(file.stat().st_size) as progress:
            requests = read_trace(
                file,
                block_size=options.block_size,
                on_error="skip" if options.skip_bad_lines else "raise",
                skipped=skipped,
                progress=progress,
            )
            if options.capacity is not None:
                requests = _with_ids(requests)
            pairs = replay(requests, block_size=options.block_size, capacity_tokens=options.capacity)
            summary = summarize(histogram.watch(pairs), model=model)
    except TraceError as error:
        print(one_line(f"cascade-lab trace: {error}", 1000), file=sys.stderr)
        return 1
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        _print_skipped(skipped)
        print(one_line(f"cascade-lab trace: {file.as_posix()}: {error}", 1000), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"cascade-lab trace: {file.as_posix()}: {error.strerror or error}", file=sys.stderr)
        return 1
    _print_skipped(skipped)
    print(format_report(summary))
    place = options.json
    try:
        if options.json is not None:
            record = {
                "trace": file.name,
                "block_size": options.block_size,
                "capacity_tokens": options.capacity,
                "skipped_lines": skipped.count,
            }
            _write(options.json, (json.dumps(record | to_json(summary), indent=1) + "\n").encode())
        place = options.figure
        if options.figure is not None:
            write_figure(summary, histogram, options.figure)
    except OSError as error:
        print(one_line(f"cascade-lab trace: {error.filename or place}: {error.strerror}", 1000), file=sys.stderr)
        return 1
    return 0


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
    ]
    if summary.model is not None and summary.model_remaining is not None:
        rows.append((f"FLOPs left, {summary.model.name}", f"{float(summary.model_remaining):.4f}"))
    rows += [("", ""), ("formula", "relative error")]
    rows += [(name, f"{error:+.2%}") for name, error in summary.errors.items()]
    width = max(len(name) for name, _ in rows)
    column = max(len(value) for _, value in rows)
    return "\n".join(f"{name:<{width}}  {value:>{column}}".rstrip() for name, value in rows)


def draw(summary: TraceSummary, histogram: HitHistogram) -> tuple[Figure, dict[str, object]]:
    """Who has which hit ratio, by three weights, and how far off each formula is.

    Returns:
        The figure, and "shares" (weight to its 20 shares) and "errors" as drawn, in percent.
    """
    from matplotlib.figure import Figure

    from cascade_lab.pictures.style import BLACK, BLUE, GREEN, VERMILLION, style

    shares = {}
    for name in WEIGHTS:
        counts = getattr(histogram, name)
        shares[name] = [count / sum(counts) for count in counts]
    errors = {name: 100 * error for name, error in summary.errors.items() if math.isfinite(error)}
    with style():
        fig = Figure(figsize=(11, 4.4))
        left, right = fig.subplots(1, 2, width_ratios=(1, 1.1))
        edges = [i / BINS for i in range(BINS + 1)]
        means = (summary.request_hit, summary.token_hit, summary.rms_hit)
        for name, mean, colour, line in zip(WEIGHTS, means, (BLUE, GREEN, VERMILLION), ("-", "--", "-."), strict=True):
            left.stairs(shares[name], edges, color=colour, linestyle=line, linewidth=1.6, label=f"by {name}")
            left.axvline(mean, color=colour, linestyle=line, linewidth=0.9)
        left.set_title("Hit ratios and their mean (root mean square by pairs)")
        left.set_xlabel("hit ratio h of a request")
        left.set_ylabel("share")
        left.set_xlim(0, 1)
        left.legend(frameon=False)
        names = list(errors)[::-1]
        widths = [errors[name] for name in names]
        right.barh(range(len(names)), widths, color="white", edgecolor=BLACK, hatch="//")
        reach = max(1.0, *(abs(width) for width in widths))
        for y, width in enumerate(widths):
            end = width + math.copysign(0.02 * reach, width)
            right.text(end, y, f"{width:+.1f}%", va="center", ha="left" if width >= 0 else "right", fontsize=8)
        right.set_xlim(min(0, *widths) - 0.35 * reach, max(0, *widths) + 0.35 * reach)
        right.axvline(0, color=BLACK, linewidth=0.8)
        right.set_yticks(range(len(names)), names, fontsize=8)
        title = "" if summary.model is None else f", {summary.model.name}"
        right.set_title(f"Error of each formula{title}")
        right.set_xlabel("relative error in percent")
    return fig, {"shares": shares, "errors": errors}


def write_figure(summary: TraceSummary, histogram: HitHistogram, path: Path) -> None:
    """Draw into `path`, the same bytes for the same numbers."""
    from cascade_lab.pictures.style import style

    fig, _ = draw(summary, histogram)
    kind = path.suffix.lower().removeprefix(".")
    stamps = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}[kind]
    content = io.BytesIO()
    with style():
        fig.savefig(content, format=kind, metadata=stamps)
    _write(path, content.getvalue())


def recorded(folder: Path) -> dict[str, object]:
    """The results of both public traces in `folder`, without the date."""
    conversation = folder / SOURCES["conversation"]["file"]
    requests = list(read_mooncake(conversation))
    agentic = list(replay(read_hits_csv(folder / SOURCES["agentic"]["file"])))
    pairs = {"conversation": list(replay(requests)), "agentic": agentic}
    sweep = {
        str(capacity): _rounded(summarize(replay(requests, capacity_tokens=capacity)).token_hit)
        for capacity in CAPACITIES
    }
    return {
        "source": list(SOURCES.values()),
        "devices": ["none: counted from lengths, block ids and hits"],
        "traces": {name: _entry(values) for name, values in pairs.items()},
        "conversation token_hit by capacity": sweep,
    }


def write(folder: Path, path: Path) -> None:
    """Write the results of the traces in `folder` to `path`, dated today."""
    record = {"date": date.today().isoformat()} | recorded(folder)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _entry(pairs: list[tuple[int, int]]) -> dict[str, object]:
    histogram = HitHistogram()
    plain = summarize(histogram.watch(pairs))
    summary = to_json(plain)
    lengths = sorted(n for n, _ in pairs)
    places = {"1%": 0.01, "25%": 0.25, "50%": 0.5, "75%": 0.75, "99%": 0.99, "100%": 1.0}
    return {
        "lengths": {name: lengths[round(p * (len(lengths) - 1))] for name, p in places.items()},
        **{name: _rounded(summary[name]) for name in summary if name not in ("model", "errors")},
        "errors": _errors(plain.errors),
        "models": {name: _for_model(pairs, model) for name, model in MODELS.items()},
        "histogram": {"bins": BINS, "requests": histogram.requests, "tokens": histogram.tokens},
    }


def _for_model(pairs: list[tuple[int, int]], model: ModelShape) -> dict[str, object]:
    summary = summarize(pairs, model=model)
    whole = {name: error for name, error in summary.errors.items() if not name.startswith("attention")}
    return {"model_remaining": _rounded(float(summary.model_remaining or 0)), "errors": _errors(whole)}


def _errors(errors: Mapping[str, float]) -> dict[str, float]:
    return {name: round(error, 6) for name, error in errors.items()}


def _rounded(value: object) -> object:
    """Six significant digits, where libraries agree to the last bit or not."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _with_ids(requests: Iterable[Request]) -> Iterator[Request]:
    for request in requests:
        if request.block_ids is None:
            raise UsageError("--capacity: expected a trace with block ids, given one whose hits are recorded")
        yield request


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


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing; a link leads to its file, and a pipe or device takes it as it comes."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        put_in_place({path: content})


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


def _count(text: str, low: int = 0) -> int:
    digits = text.replace("_", "")
    if not (digits.isascii() and digits.isdecimal()) or int(digits) < low:
        raise argparse.ArgumentTypeError(f"expected a whole number of tokens from {low}, given {text!r}")
    return int(digits)


def _positive(text: str) -> int:
    return _count(text, 1)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
