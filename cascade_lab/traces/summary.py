"""A trace in sums: exact remaining work, the means that describe it, and what formulas of a mean make of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from typing import NamedTuple

import numpy as np

from cascade_lab import _checks
from cascade_lab.regions import MLA, Dense, Mixture, Region, SlidingWindow


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
        region: keys that a row sees; in a `Mixture` each layer's region counts once.
        mla: latent attention in place of keys and values per head, computed expanded; None without.
        q_rank: width of the latent queries with it; 0 for full ones.

    Example:
        >>> shape = cl.traces.MODELS["Llama-3.1-8B"]
        >>> shape.pair_flops, f"{shape.alpha(8192):.3f}"  # attention's share of a prefill of 8192 tokens
        (524288, '0.133')
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
    region: Region = Dense()
    mla: MLA | None = None
    q_rank: int = 0

    @property
    def linear_flops(self) -> int:
        """FLOPs per computed token: two per weight of the attention's projections, the FFN matrices and the router."""
        if self.mla is None:
            attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        else:
            m = self.mla
            queries = m.heads * (m.nope + m.rope)
            queries = self.q_rank * (self.hidden + queries) if self.q_rank else self.hidden * queries
            latents = self.hidden * (m.latent + m.rope) + m.latent * m.heads * (m.nope + m.value)
            attention = queries + latents + m.heads * m.value * self.hidden
        return 2 * self.layers * (attention + self.hidden * (3 * self.ffn + self.experts))

    @property
    def pair_flops(self) -> int:
        """FLOPs per query-key pair: two per element of the score and two per element of the value, in every head."""
        if self.mla is not None:
            return self.layers * self.mla.expanded_flops
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def hit_flops(self) -> int:
        """FLOPs per cached token: with latent attention its keys and values are expanded again."""
        return 0 if self.mla is None else self.layers * self.mla.expansion_flops

    def attention_flops(self, pairs: int) -> Fraction:
        """FLOPs of attention for so many pairs, as its region counts them."""
        return Fraction(self.pair_flops * pairs, _weight(self.region))

    def alpha(self, n: float) -> float:
        """Share of attention in the FLOPs of a prefill of n tokens without a hit; its model is (1 - h)(1 + alpha h)."""
        if self.region == Dense():
            attention = self.pair_flops * (n + 1) / 2
        else:
            whole = max(1, round(n))
            attention = self.pair_flops * self.region.total(whole) / (_weight(self.region) * whole)
        return attention / (self.linear_flops + attention)


def _weight(region: Region) -> int:
    """What the pairs of a region are counted in: once each, or as often as the parts of a mixture weigh."""
    return sum(weight for weight, _ in region.parts) if isinstance(region, Mixture) else 1


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
"""The shapes of published models by name, from their own configurations; all with dense causal attention per head."""
OTHER_MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape(
            "Gemma-3-27B",
            62,
            5376,
            32,
            16,
            128,
            21504,
            source="google/gemma-3-27b-it config.json",
            region=Mixture(((52, SlidingWindow(1024)), (10, Dense()))),
        ),
        # 3 dense layers of 18,432 columns and 58 with nine experts of 2,048 are 18,432 each
        ModelShape(
            "DeepSeek-V3",
            61,
            7168,
            128,
            128,
            192,
            18432,
            256,
            source="deepseek-ai/DeepSeek-V3 config.json",
            mla=MLA(),
            q_rank=1536,
        ),
    )
}
"""The same of models whose layers have windows, and of one with latent attention."""


@dataclass(frozen=True)
class TraceSummary:
    """A trace in sums, and what formulas of a mean make of it.

    Attributes:
        requests, tokens, hit_tokens: number of requests, sum of N, sum of H.
        pairs, pairs_left: query-key pairs per head and layer without hits, and with them; of a `Mixture` the weighted
            sum of its parts.
        token_hit: sum of H / sum of N.
        request_hit: mean of h = H/N over requests.
        rms_hit: root mean square of h, a request weighing N(N + 1).
        linear_remaining: sum of (N - H) / sum of N, exact.
        attention_remaining: pairs_left / pairs, exact.
        region: keys that a row sees.
        model: the shape that whole-model numbers are for; None without one.
        model_remaining: FLOPs left / FLOPs without hits, exact; None without a model.
        errors: formula to its value over the exact one, less 1. Names that begin with "attention" are held against
            attention_remaining, the others against model_remaining. "bucketed at X" is (1 - X)(1 + a X), a the trace's
            share of attention without hits; "at the mean length" takes a of one request of the mean length instead;
            "bucketed per request" sums (1 - h)(1 + alpha(N) h) over requests, by their FLOPs. Where the region is not
            dense causal, "attention, 1-h at X" is held against attention_remaining too.

    Example:
        >>> summary = cl.traces.summarize([(100, 90), (1000, 0)])
        >>> f"{summary.request_hit:.2f} {summary.token_hit:.3f} {summary.rms_hit:.3f}"
        '0.45 0.082 0.090'
        >>> f"{summary.errors['attention, 1-h^2 at request_hit']:.0%}"  # by the mean of ratios, of the attention left
        '-20%'
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
    region: Region = Dense()
    model: ModelShape | None = None
    model_remaining: Fraction | None = None
    errors: Mapping[str, float] = field(default_factory=dict)


def summarize(
    pairs: Iterable[tuple[int, int]], *, model: ModelShape | None = None, region: Region | None = None
) -> TraceSummary:
    """Sum up (N, H) of all requests, exactly and in constant memory.

    Args:
        pairs: prompt length and hit of each request, 0 <= H <= N, N >= 1; also an array `[R, 2]`.
        model: adds whole-model FLOPs and the errors of formulas for them.
        region: keys that a row sees, in place of the model's; dense causal where neither says.

    Raises:
        TypeError, ValueError: an empty trace, a pair that is no such pair of integers, a model whose sizes are none, or
            a region none of whose rows sees a key.

    Example:
        >>> summary = cl.traces.summarize([(8, 4), (16, 12)])
        >>> summary.linear_remaining, summary.attention_remaining  # (4 + 4) / 24, and (26 + 58) / (36 + 136)
        (Fraction(1, 3), Fraction(21, 43))
    """
    sums = Sums(model, region)
    rest = iter(pairs.tolist() if isinstance(pairs, np.ndarray) and pairs.dtype.kind in "iu" else pairs)
    while batch := list(islice(rest, 1 << 14)):
        sums.add(*_columns(batch, sums.requests))
    return sums.summary()


class Sums:
    """The sums of a trace while it is read; `summary` says what they come to.

    Attributes:
        requests: how many so far.

    Example:
        >>> sums = cl.traces.Sums()
        >>> sums.add([8, 16], [4, 12])
        >>> sums.requests, sums.summary().pairs_left
        (2, 84)
    """

    def __init__(self, model: ModelShape | None = None, region: Region | None = None) -> None:
        if model is not None:
            lows = dict(layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=0, experts=0, q_rank=0)
            sizes = {name: _checks.integer(f"model.{name}", getattr(model, name), low) for name, low in lows.items()}
            model = model._replace(**sizes)
        self._model = model
        self._region = region if region is not None else Dense() if model is None else model.region
        self.requests: int = 0
        self._tokens = self._hits = self._squares = self._hit_squares = 0
        self._pairs = self._saved = 0
        self._ratios: list[float] = []
        self._diagonals: list[float] = []

    def add(self, n: Sequence[int], hit: Sequence[int]) -> None:
        """Requests with their lengths and hits, Python integers that are in range."""
        self.requests += len(n)
        self._tokens += sum(n)
        self._hits += sum(hit)
        self._squares += sum(x * x for x in n)
        self._hit_squares += sum(x * x for x in hit)
        self._ratios.append(math.fsum(b / a for a, b in zip(n, hit, strict=True)))
        self._diagonals.append(math.fsum(b * b / a for a, b in zip(n, hit, strict=True)))
        if self._region != Dense():
            self._pairs += sum(self._region.total(np.array(n)).tolist())
            self._saved += sum(self._region.total(np.array(hit)).tolist())

    def summary(self) -> TraceSummary:
        """What the sums come to.

        Raises:
            ValueError: no request, or none whose rows see a key.
        """
        if not self.requests:
            raise ValueError("empty trace: expected at least one request")
        tokens, hits = self._tokens, self._hits
        everything = self._squares + tokens
        pairs, saved = self._pairs, self._saved
        if self._region == Dense():
            pairs, saved = everything // 2, (self._hit_squares + hits) // 2
        if not pairs:
            raise ValueError(f"region: expected one whose rows see a key, given {self._region} for these lengths")
        # N(N + 1) h^2 = H^2 + H^2 / N
        diagonal = math.fsum(self._diagonals) / everything
        mean_square = min(1.0, float(Fraction(self._hit_squares, everything)) + diagonal)
        summary = TraceSummary(
            requests=self.requests,
            tokens=tokens,
            hit_tokens=hits,
            pairs=pairs,
            pairs_left=pairs - saved,
            token_hit=hits / tokens,
            request_hit=math.fsum(self._ratios) / self.requests,
            rms_hit=math.sqrt(mean_square),
            linear_remaining=Fraction(tokens - hits, tokens),
            attention_remaining=Fraction(pairs - saved, pairs),
            region=self._region,
            model=self._model,
            model_remaining=_model_remaining(self._model, self._region, tokens, hits, pairs, saved),
        )
        object.__setattr__(summary, "errors", formula_errors(summary))
        return summary


def formula_errors(summary: TraceSummary) -> dict[str, float]:
    """Relative errors of formulas that know a trace by its means; see `TraceSummary.errors`.

    Example:
        >>> summary = cl.traces.summarize([(100, 90), (1000, 0)])
        >>> errors = cl.traces.formula_errors(summary)
        >>> {name: round(error, 2) for name, error in errors.items() if "1-h^2" in name and "rms" not in name}
        {'attention, 1-h^2 at token_hit': 0.0, 'attention, 1-h^2 at request_hit': -0.2}
    """
    exact = float(summary.attention_remaining)
    means = {"token_hit": summary.token_hit, "request_hit": summary.request_hit, "rms_hit": summary.rms_hit}
    errors = {f"attention, 1-h^2 at {name}": _relative(1 - h * h, exact) for name, h in means.items()}
    if summary.region != Dense():
        errors |= {f"attention, 1-h at {name}": _relative(1 - h, exact) for name, h in means.items()}
    model, whole = summary.model, summary.model_remaining
    if model is None or whole is None:
        return errors
    linear = model.linear_flops * summary.tokens
    attention = model.pair_flops * summary.pairs / _weight(summary.region)
    share = attention / (linear + attention)
    mean_share = model._replace(region=summary.region).alpha(summary.tokens / summary.requests)
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


def _model_remaining(
    model: ModelShape | None, region: Region, tokens: int, hits: int, pairs: int, saved: int
) -> Fraction | None:
    if model is None:
        return None
    linear, pair, weight = model.linear_flops, model.pair_flops, _weight(region)
    left = weight * (linear * (tokens - hits) + model.hit_flops * hits) + pair * (pairs - saved)
    return Fraction(left, weight * linear * tokens + pair * pairs)


def _relative(value: float, exact: float) -> float:
    if exact:
        return value / exact - 1
    return 0.0 if value == 0 else math.inf
