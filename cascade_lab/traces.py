"""What prefix hits are worth on real traffic: sums over requests, never functions of a mean.

A request of N tokens with a hit of H keeps N - H of its token-linear work and N(N + 1)/2 - H(H + 1)/2 of its query-key
pairs, so over a trace, with h = H/N and weights w = N(N + 1) / sum of N(N + 1),

    pairs left / pairs = 1 - sum w H(H + 1)/(N(N + 1)) = 1 - sum w h^2 - (sum of H(1 - h)) / (sum of N(N + 1)),

and the last term is below 1 / (4 x the token-weighted mean length). So the pairs follow the root mean square of h under
w, the linear work follows the token-weighted mean of h, and no single mean serves both. Lengths and block ids decide
everything here; nothing is timed.
"""

from __future__ import annotations

import csv
import json
import math
import random
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from operator import index, itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

from cascade_lab.foreign import one_line, open_regular, text_fault, unique_keys

BLOCK_SIZE = 512
MAX_TOKENS = 10**9
# a million tokens in blocks of one, with room; what a line can make of it in memory is some 20 times that
MAX_LINE = 1 << 24
OnError = Literal["raise", "skip"]

_BOM = b"\xef\xbb\xbf"
_mooncake_fields = itemgetter("timestamp", "input_length", "output_length", "hash_ids")
# ids that a map of one byte each may span, beyond which they go into a set of about 50 bytes each
_SPARE, _BYTES_PER_ID = 1 << 20, 8


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
        ValueError: a block size below 1, or an unknown `on_error`; while reading, a directory, pipe or device.
        TraceError: while reading, for a line cut short, no UTF-8, no JSON object, longer than 16 MiB, without a field,
            with one twice, with a length that is no integer in range, or with ids that do not fit the length.
        OSError: a file that cannot be read.
    """
    _check_size("block_size", block_size, 1)
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


def replay(
    requests: Iterable[Request], *, block_size: int = BLOCK_SIZE, capacity_tokens: int | None = None
) -> Iterator[tuple[int, int]]:
    """(N, H) of each request in order: H = min(k block_size, N - 1), k the leading ids that earlier requests left.

    A request finds what was cached before it came, never its own blocks; after it all its blocks are cached. Generated
    tokens count once they return inside a later prompt. A request that brings its hit keeps it, up to N - 1.

    Args:
        requests: in order of arrival.
        block_size: tokens per id; a block takes this much of the capacity, also one that the prompt does not fill.
        capacity_tokens: None for no limit. Otherwise the blocks used longest ago give way, of one request the last
            block first, so that what stays is a prefix.

    Memory without a limit is one to eight bytes per id where ids are numbered densely, as in the published traces, and
    about 80 bytes per id where they are hashes; with a limit about 120 bytes per block of the capacity.

    Raises:
        ValueError: a size that is no integer in range; while reading, a request with neither ids nor hit, or whose ids
            do not fit its length.
    """
    _check_size("block_size", block_size, 1)
    if capacity_tokens is not None:
        _check_size("capacity_tokens", capacity_tokens, 0)
    return _replay(requests, block_size, capacity_tokens)


class ModelShape(NamedTuple):
    """What decides a decoder's prefill FLOPs: matrix products with weights per token, and attention per pair.

    Norms, activations and the output head (one row of a prefill) are left out.

    Attributes:
        name: as published.
        layers, hidden: number of layers, width.
        heads, kv_heads, head_dim: query heads, KV heads, and their width.
        ffn: gated FFN columns that one token passes, in a mixture of experts those of all its experts together.
        experts: router columns; 0 without a router.
        source: where the numbers are published.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    experts: int = 0
    source: str = ""

    @property
    def linear_flops(self) -> int:
        """FLOPs per computed token: two per weight of q, k, v, o, the three FFN matrices and the router."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return 2 * self.layers * self.hidden * (attention + 3 * self.ffn + self.experts)

    @property
    def pair_flops(self) -> int:
        """FLOPs per query-key pair: two per element of the score and two per element of the value, in every head."""
        return 4 * self.layers * self.heads * self.head_dim

    def alpha(self, n: float) -> float:
        """Share of attention in the FLOPs of a prefill of n tokens without a hit; its model is (1 - h)(1 + alpha h)."""
        attention = self.pair_flops * (n + 1) / 2
        return attention / (self.linear_flops + attention)


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, source="meta-llama/Llama-3.1-8B config.json"),
        ModelShape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, source="meta-llama/Llama-3.1-70B config.json"),
        ModelShape("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, source="meta-llama/Llama-3.1-405B config.json"),
        ModelShape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, source="Qwen/Qwen3-32B config.json"),
        ModelShape("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 8 * 768, 128, source="Qwen/Qwen3-30B-A3B config.json"),
        ModelShape("Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 8 * 1536, 128, source="Qwen/Qwen3-235B-A22B config.json"),
    )
}


@dataclass(frozen=True)
class TraceSummary:
    """A trace in sums, and what formulas of a mean make of it.

    Attributes:
        requests, tokens, hit_tokens: number of requests, sum of N, sum of H.
        pairs, pairs_left: query-key pairs per head and layer without hits, and with them.
        token_hit: sum of H / sum of N.
        request_hit: mean of h = H/N over requests.
        rms_hit: root mean square of h, a request weighing N(N + 1).
        linear_remaining: sum of (N - H) / sum of N, exact.
        attention_remaining: pairs_left / pairs, exact.
        model: the shape that whole-model numbers are for; None without one.
        model_remaining: FLOPs left / FLOPs without hits, exact; None without a model.
        errors: formula to its value over the exact one, less 1. Names that begin with "attention" are held against
            attention_remaining, the others against model_remaining. "bucketed at X" is (1 - X)(1 + a X), a the trace's
            share of attention without hits; "at the mean length" takes a of one request of the mean length instead;
            "bucketed per request" sums (1 - h)(1 + alpha(N) h) over requests, by their FLOPs.
    """

    requests: int
    tokens: int
    hit_tokens: int
    pairs: int
    pairs_left: int
    token_hit: float
    request_hit: float
    rms_hit: float
    linear_remaining: Fraction
    attention_remaining: Fraction
    model: ModelShape | None = None
    model_remaining: Fraction | None = None
    errors: Mapping[str, float] = field(default_factory=dict)


def summarize(pairs: Iterable[tuple[int, int]], *, model: ModelShape | None = None) -> TraceSummary:
    """Sum up (N, H) of all requests, exactly and in constant memory.

    Args:
        pairs: prompt length and hit of each request, 0 <= H <= N, N >= 1.
        model: adds whole-model FLOPs and the errors of formulas for them.

    Raises:
        ValueError: an empty trace, or a pair that is no such pair of integers.
    """
    requests = tokens = hits = squares = hit_squares = 0
    ratios, diagonals = [], []
    rest = iter(pairs)
    while batch := list(islice(rest, 1 << 14)):
        n, hit = _columns(batch, requests)
        requests += len(batch)
        tokens += sum(n)
        hits += sum(hit)
        squares += sum(x * x for x in n)
        hit_squares += sum(x * x for x in hit)
        ratios.append(math.fsum(b / a for a, b in zip(n, hit, strict=True)))
        diagonals.append(math.fsum(b * b / a for a, b in zip(n, hit, strict=True)))
    if not requests:
        raise ValueError("empty trace: expected at least one request")
    everything = squares + tokens
    left = everything - hit_squares - hits
    token_hit, request_hit = hits / tokens, math.fsum(ratios) / requests
    # N(N + 1) h^2 = H^2 + H^2 / N
    mean_square = min(1.0, float(Fraction(hit_squares, everything)) + math.fsum(diagonals) / everything)
    summary = TraceSummary(
        requests=requests,
        tokens=tokens,
        hit_tokens=hits,
        pairs=everything // 2,
        pairs_left=left // 2,
        token_hit=token_hit,
        request_hit=request_hit,
        rms_hit=math.sqrt(mean_square),
        linear_remaining=Fraction(tokens - hits, tokens),
        attention_remaining=Fraction(left, everything),
        model=model,
        model_remaining=None if model is None else _model_remaining(model, tokens, hits, everything, left),
    )
    object.__setattr__(summary, "errors", formula_errors(summary))
    return summary


def formula_errors(summary: TraceSummary) -> dict[str, float]:
    """Relative errors of formulas that know a trace by its means; see `TraceSummary.errors`."""
    exact = float(summary.attention_remaining)
    means = {"token_hit": summary.token_hit, "request_hit": summary.request_hit, "rms_hit": summary.rms_hit}
    errors = {f"attention, 1-h^2 at {name}": _relative(1 - h * h, exact) for name, h in means.items()}
    model, whole = summary.model, summary.model_remaining
    if model is None or whole is None:
        return errors
    linear, attention = model.linear_flops * summary.tokens, model.pair_flops * summary.pairs
    share = attention / (linear + attention)
    mean_share = model.alpha(summary.tokens / summary.requests)
    formulas = {f"uniform 1-h at {name}": 1 - h for name, h in means.items()}
    formulas |= {f"uniform 1-h^2 at {name}": 1 - h * h for name, h in means.items()}
    formulas |= {f"bucketed at {name}": (1 - h) * (1 + share * h) for name, h in means.items()}
    formulas["bucketed at token_hit and the mean length"] = (1 - summary.token_hit) * (
        1 + mean_share * summary.token_hit
    )
    # weighted by FLOPs, (1 - h)(1 + alpha h) adds up to these two means
    formulas["bucketed per request"] = (1 - share) * (1 - summary.token_hit) + share * (1 - summary.rms_hit**2)
    return errors | {name: _relative(value, float(whole)) for name, value in formulas.items()}


Quantiles = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Traffic:
    """Sessions that arrive at random, open with a shared system prompt, and send their history again each turn.

    A quantile table is ((probability, value), ...) from probability 0 to 1, values positive; between its points the
    logarithm of the value is linear in the probability.

    Attributes:
        block_size: tokens per block id.
        system_tokens: length of a system prompt; only its whole blocks are shared.
        system_prompts: how many there are, equally likely.
        first_tokens: length of a session's first prompt, system prompt included.
        added_tokens: growth of the prompt from turn to turn, answer included.
        output_tokens: generated tokens.
        gap_seconds: time between turns.
        tail: (a, c); after its turn t a session goes on with probability (t + a) / (t + a + c). a = 0 gives a power-law
            tail, with a mean of c / (c - 1) turns if nothing cuts it; large a gives nearly a geometric law.
        max_turns: at most so many turns.
        rewrites: probability that a turn changes its history, so that only a part of it is found again.
        kept: part of the previous prompt that a rewrite keeps.
        resized: length after a rewrite over length before it.
        sessions_per_second: of a Poisson process.
        max_tokens: context length; a session ends where it would grow beyond it.
    """

    block_size: int
    system_tokens: int
    system_prompts: int
    first_tokens: Quantiles
    added_tokens: Quantiles
    output_tokens: Quantiles
    gap_seconds: Quantiles
    tail: tuple[float, float]
    max_turns: int
    rewrites: float
    kept: Quantiles
    resized: Quantiles
    sessions_per_second: float
    max_tokens: int


_P = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


def _quantiles(*values: float) -> Quantiles:
    return tuple(zip(_P, values, strict=True))


CONVERSATION = Traffic(
    block_size=512,
    system_tokens=512,
    system_prompts=1,
    first_tokens=_quantiles(891, 894, 897, 905, 1336, 5264, 13056, 25559, 38494, 89868, 126000),
    added_tokens=_quantiles(1, 2, 20, 64, 260, 471, 831, 4599, 7339, 14000, 40000),
    output_tokens=_quantiles(1, 3, 10, 24, 157, 350, 472, 597, 698, 1119, 2000),
    gap_seconds=_quantiles(3, 12, 30, 42, 66, 123, 264, 483, 615, 1477, 3000),
    tail=(0.0, 2.5),
    max_turns=16,
    rewrites=0.15,
    kept=_quantiles(0.01, 0.03, 0.05, 0.07, 0.11, 0.22, 0.46, 0.89, 0.94, 0.98, 0.99),
    resized=_quantiles(0.17, 0.29, 0.45, 0.55, 0.72, 0.97, 1.05, 1.3, 1.6, 2.5, 4),
    sessions_per_second=2.1,
    max_tokens=131072,
)
AGENTIC = Traffic(
    block_size=64,
    system_tokens=0,
    system_prompts=1,
    first_tokens=_quantiles(6343, 10245, 13048, 15458, 18600, 24454, 90000, 190000, 280000, 450000, 700000),
    added_tokens=_quantiles(14, 111, 155, 194, 335, 664, 1574, 3607, 6292, 16485, 60000),
    output_tokens=_quantiles(20, 58, 89, 105, 137, 216, 426, 898, 1554, 3686, 30000),
    gap_seconds=_quantiles(1, 5, 7, 8, 11, 17, 37, 129, 308, 2319, 77611),
    tail=(6000.0, 87.0),
    max_turns=561,
    rewrites=0.029,
    kept=_quantiles(0.001, 0.002, 0.01, 0.05, 0.1, 0.2, 0.99, 0.995, 0.999, 0.999, 1.0),
    resized=_quantiles(0.03, 0.06, 0.1, 0.13, 0.3, 0.9, 1, 1.02, 1.1, 1.5, 4),
    sessions_per_second=0.02,
    max_tokens=1000000,
)


def generate(seed: int = 0, requests: int = 2000, *, traffic: Traffic = CONVERSATION) -> list[Request]:
    """Seeded traffic of multi-turn sessions, in order of arrival, ids as in a Mooncake trace of `traffic.block_size`.

    How near the presets are to the traces that their tables were fitted to (unlimited cache; the generator at 2,000
    requests, seed 0 and in brackets the range of seeds 0 to 5):

    | | token_hit | request_hit | rms_hit | median length | mean length |
    |---|---|---|---|---|---|
    | Mooncake conversation | 0.374 | 0.409 | 0.567 | 6,909 | 12,035 |
    | CONVERSATION | 0.376 (0.38-0.42) | 0.409 (0.40-0.42) | 0.549 (0.55-0.64) | 6,648 | 11,916 |
    | coding-agent sessions | 0.963 | 0.951 | 0.976 | 103,659 | 122,379 |
    | AGENTIC | 0.974 (0.96-0.97) | 0.958 (0.94-0.96) | 0.985 (0.97-0.98) | 103,572 | 138,375 |

    What differs: turns are drawn independently of length, and after the last session has begun the traffic thins out.
    So a short trace needs a smaller cache: 3 million tokens give CONVERSATION a token_hit of 0.28, the real trace 0.14.
    The rate of AGENTIC sessions is made up, for that trace has no common clock.

    Args:
        seed: of Python's generator, whose numbers are the same on every machine.
        requests: how many; the last session is cut there.
        traffic: CONVERSATION, AGENTIC, or `dataclasses.replace` of one of them.

    Raises:
        ValueError: a number of requests below 1, or one that is no integer.
    """
    _check_size("requests", requests, 1)
    draw = random.Random(seed)
    size = traffic.block_size
    common = traffic.system_tokens // size
    shared = [tuple(range(i * common, (i + 1) * common)) for i in range(traffic.system_prompts)]
    next_id, start, made = len(shared) * common, 0.0, []
    a, c = traffic.tail
    while len(made) < requests:
        start += draw.expovariate(traffic.sessions_per_second)
        now, turn = start, 1
        kept = draw.choice(shared)
        n = max(traffic.system_tokens + 1, round(_drawn(draw, traffic.first_tokens)))
        while n <= traffic.max_tokens and len(made) < requests:
            fresh = -(-n // size) - len(kept)
            ids = kept + tuple(range(next_id, next_id + fresh))
            next_id += fresh
            made.append(Request(float(round(1000 * now)), n, round(_drawn(draw, traffic.output_tokens)), ids, None))
            if turn == traffic.max_turns or draw.random() >= (turn + a) / (turn + a + c):
                break
            turn += 1
            now += _drawn(draw, traffic.gap_seconds)
            before = n
            if draw.random() < traffic.rewrites:
                n = max(traffic.system_tokens + 1, round(n * _drawn(draw, traffic.resized)))
                same = min(round(before * _drawn(draw, traffic.kept)), n)
            else:
                n, same = n + round(_drawn(draw, traffic.added_tokens)), before
            # a block that was not full has another id once more follows
            kept = ids[: max(same // size, common)]
    return sorted(made, key=lambda request: request.timestamp)


def _drawn(draw: random.Random, quantiles: Quantiles) -> float:
    p = draw.random()
    i = bisect_right(quantiles, p, key=lambda point: point[0])
    (p0, low), (p1, high) = quantiles[i - 1], quantiles[min(i, len(quantiles) - 1)]
    return low if p1 == p0 else low * (high / low) ** ((p - p0) / (p1 - p0))


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


def _check_size(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}: expected an integer >= {low}, given {value!r}")


def _check_on_error(on_error: str) -> None:
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error: expected 'raise' or 'skip', given {on_error!r}")


class _Unlimited:
    """Every id ever seen: a byte map where ids are dense, a set for the others."""

    def __init__(self) -> None:
        self._dense, self._sparse, self._count = bytearray(), set(), 0

    def leading(self, ids: Sequence[int]) -> int:
        dense, sparse, size = self._dense, self._sparse, len(self._dense)
        for k, i in enumerate(ids):
            if not (0 <= i < size and dense[i]) and i not in sparse:
                return k
        return len(ids)

    def insert(self, ids: Sequence[int], found: int) -> None:
        ids = ids[found:]
        if not ids:
            return
        self._count += len(ids)
        dense, room = self._dense, _SPARE + _BYTES_PER_ID * self._count
        if min(ids) < 0 or max(ids) >= room:
            self._sparse.update(i for i in ids if not 0 <= i < room)
            ids = [i for i in ids if 0 <= i < room]
        if ids and (highest := max(ids)) >= len(dense):
            dense.extend(bytes(highest + 1 + highest // 8 - len(dense)))
        for i in ids:
            dense[i] = 1


class _LeastRecentlyUsed:
    """The ids used last, at most `blocks` of them."""

    def __init__(self, blocks: int) -> None:
        self._blocks, self._order = blocks, OrderedDict()

    def leading(self, ids: Sequence[int]) -> int:
        order = self._order
        for k, i in enumerate(ids):
            if i not in order:
                return k
        return len(ids)

    def insert(self, ids: Sequence[int], found: int) -> None:
        order, move_to_end, pop = self._order, self._order.move_to_end, self._order.popitem
        for i in reversed(ids):
            if i in order:
                move_to_end(i)
            else:
                order[i] = None
        for _ in range(len(order) - self._blocks):
            pop(False)


def _replay(requests: Iterable[Request], block_size: int, capacity_tokens: int | None) -> Iterator[tuple[int, int]]:
    cache = _Unlimited() if capacity_tokens is None else _LeastRecentlyUsed(capacity_tokens // block_size)
    for number, request in enumerate(requests):
        n, ids, hit = request.input_tokens, request.block_ids, request.hit_tokens
        if hit is None:
            if ids is None:
                raise ValueError(f"requests[{number}]: expected block_ids or hit_tokens, given neither")
            if fault := _unfit(ids, n, block_size):
                raise ValueError(f"requests[{number}]: block_ids: {fault}")
            found = cache.leading(ids)
            hit = found * block_size
            cache.insert(ids, found)
        yield n, min(hit, n - 1)


def _columns(batch: Sequence[tuple[int, int]], start: int) -> tuple[list[int], list[int]]:
    """Lengths and hits as Python integers, for numpy's would overflow when squared and summed."""
    try:
        n, hit = [index(a) for a, _ in batch], [index(b) for _, b in batch]
        bad = next((i for i, (a, b) in enumerate(zip(n, hit, strict=True)) if not 0 <= b <= a or a < 1), None)
    except (TypeError, ValueError):
        bad = next((i for i, pair in enumerate(batch) if not _is_pair(pair)), 0)
    if bad is not None:
        raise ValueError(f"pairs[{start + bad}]: expected integers N >= 1 and 0 <= H <= N, given {batch[bad]!r}")
    return n, hit


def _is_pair(pair: object) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and all(hasattr(x, "__index__") for x in pair)


def _model_remaining(model: ModelShape, tokens: int, hits: int, everything: int, left: int) -> Fraction:
    linear, pair = 2 * model.linear_flops, model.pair_flops
    return Fraction(linear * (tokens - hits) + pair * left, linear * tokens + pair * everything)


def _relative(value: float, exact: float) -> float:
    if exact:
        return value / exact - 1
    return 0.0 if value == 0 else math.inf
