"""The report of `cascade-lab trace`: a user's trace as a table, as JSON and as a figure."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from cascade_lab.files import UsageError, one_line, write_file
from cascade_lab.traces import BLOCK_SIZE, MODELS, Request, TraceError, TraceSummary, read_trace, replay, summarize

DEFAULT_MODEL = "Llama-3.1-8B"
BINS = 20
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
        type=_positive_number,
        default=BLOCK_SIZE,
        metavar="N",
        help="tokens per block id of a Mooncake trace (default: %(default)s)",
    )
    parser.add_argument(
        "--capacity",
        type=_whole_number,
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


def carry_out(options: argparse.Namespace) -> int:
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
            write_file(options.json, (json.dumps(record | to_json(summary), indent=1) + "\n").encode())
        place = options.figure
        if options.figure is not None:
            from cascade_lab.pictures.style import save
            from cascade_lab.pictures.traces import hit_report

            save(hit_report(summary, vars(histogram))[0], options.figure)
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
