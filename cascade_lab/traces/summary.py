"""A trace in sums: exact remaining work, the means that describe it, and what formulas of a mean make of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from typing import NamedTuple

from cascade_lab import _checks


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
"""The shapes of published models by name, from their own configurations."""


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
        TypeError, ValueError: an empty trace, a pair that is no such pair of integers, or a model whose sizes are none.
    """
    if model is not None:
        lows = dict(layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=0, experts=0)
        sizes = {name: _checks.integer(f"model.{name}", getattr(model, name), low) for name, low in lows.items()}
        model = model._replace(**sizes)
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


def _columns(batch: Sequence[tuple[int, int]], start: int) -> tuple[list[int], list[int]]:
    """Lengths and hits as Python integers, for numpy's would overflow when squared and summed."""
    n, hit = [], []
    for i, pair in enumerate(batch, start):
        try:
            a, b = pair
        except (TypeError, ValueError) as error:
            raise type(error)(f"pairs[{i}]: expected (N, H), given {_checks.shown(pair)}") from None
        if type(a) is not int or type(b) is not int:
            a, b = (_checks.integer(f"pairs[{i}]", x) for x in (a, b))
        if not 0 <= b <= a or a < 1:
            raise ValueError(f"pairs[{i}]: expected integers N >= 1 and 0 <= H <= N, given {_checks.shown(pair)}")
        n.append(a)
        hit.append(b)
    return n, hit


def _model_remaining(model: ModelShape, tokens: int, hits: int, everything: int, left: int) -> Fraction:
    linear, pair = 2 * model.linear_flops, model.pair_flops
    return Fraction(linear * (tokens - hits) + pair * left, linear * tokens + pair * everything)


def _relative(value: float, exact: float) -> float:
    if exact:
        return value / exact - 1
    return 0.0 if value == 0 else math.inf
