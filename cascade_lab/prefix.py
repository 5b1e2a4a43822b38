"""What a prefix-cache hit is worth, exactly (claim 3).

After a hit of H of N prompt tokens, M = N - H rows are left to compute, and each sees the whole prefix:

    pairs left = M H + M (M + 1) / 2 = N(N + 1)/2 - H(H + 1)/2,    a fraction 1 - H(H + 1) / (N(N + 1)), about 1 - h^2,

while token-linear work (projections, FFN) falls to M / N = 1 - h. Distinct keys and reads per request stay at N; reads
per row tile fall about as the pairs do (`levels` names the three). So a prefill is scaled bucket by bucket. This holds
for a contiguous prefix, dense causal visibility, the interaction bucket alone, a calibrated kernel and a cache that is
already there: `applicability` tests these five on data, `regions` has the other laws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, overload

import numpy as np
import torch

from cascade_lab import _checks, paging
from cascade_lab.levels import Level, shared_prefix_levels
from cascade_lab.regions import Count, Dense, _check_hit, _floor_sum, triangle

__all__ = [
    "ENGINE_RULES",
    "KINDS",
    "PREFILL_PLANS",
    "PrefillTerms",
    "PrefixHitBatch",
    "TTFT_TERMS",
    "effective_hit",
    "executed_tiles",
    "hand_over",
    "interactions",
    "linear_remaining",
    "prefix_hit_levels",
    "remaining",
    "remaining_limit",
    "remaining_scattered",
    "scale_breakdown",
    "tile_remaining",
    "uniform_scaling_errors",
]

Kind = Literal["interaction", "linear", "fixed", "transfer", "other"]
EngineRule = Literal["whole pages", "never the last page"]
PrefillPlan = Literal["causal", "split", "shared"]
KINDS: tuple[Kind, ...] = ("interaction", "linear", "fixed", "transfer", "other")
"""What a bucket of prefill time may scale with, as `scale_breakdown` takes it."""
ENGINE_RULES: tuple[EngineRule, ...] = ("whole pages", "never the last page")
"""How engines cut a match down to the hit that they use, as `effective_hit` takes it."""
PREFILL_PLANS: tuple[PrefillPlan, ...] = ("causal", "split", "shared")
"""What `PrefixHitBatch.levels` may be asked for."""
TTFT_TERMS = {
    "dense causal interactions": "interaction_scale",
    "FFN and projections": "linear_scale",
    "fixed costs": "",
    "KV load": "kv_load_bytes",
    "transfer": "",
    "overlap of transfer and compute": "",
    "decode chip-time": "",
}
"""The terms of a model of time to first token (TTFT), and the attribute of `PrefillTerms` that each is computed from.

An empty text is a term that the model brings itself: fixed costs, which no hit scales; transfer, the time that the
bytes of the KV load need on their link; how much of it is hidden behind compute; and the chip-time of decode, which
shares the device.
"""


@overload
def interactions(n: int, hit: int = 0) -> int: ...
@overload
def interactions(n: np.ndarray, hit: Count = 0) -> np.ndarray: ...
@overload
def interactions(n: int, hit: np.ndarray) -> np.ndarray: ...
def interactions(n: Count, hit: Count = 0) -> Count:
    """Query-key pairs of a dense causal prefill of `n` tokens that are left after a hit of `hit`: M H + M (M + 1) / 2.

    Additive over any chunking, and per request: pairs of a batch are the sum of its requests' pairs. NumPy arrays of
    integers are taken element by element; where sums pass 64 bits the result holds Python integers.

    Raises:
        TypeError: a length that is not an integer. ValueError: a negative one, a hit above n, or shapes that differ.

    Example:
        >>> cl.interactions(8, 4)  # 4 x 4 + 4 x 5 / 2
        26
        >>> import numpy as np
        >>> cl.interactions(np.array([8, 100]), np.array([4, 0])).tolist()
        [26, 5050]
    """
    n, hit = _check_hit(n, hit, 0)
    return Dense().total(n) - Dense().total(hit)


@overload
def remaining(n: int, hit: int) -> Fraction: ...
@overload
def remaining(n: np.ndarray, hit: Count) -> np.ndarray: ...
@overload
def remaining(n: int, hit: np.ndarray) -> np.ndarray: ...
def remaining(n: Count, hit: Count) -> Fraction | np.ndarray:
    """Fraction of the interactions left: 1 - hit (hit + 1) / (n (n + 1)), exact; float64 for arrays.

    Raises:
        TypeError: not integers. ValueError: n < 1, a hit outside 0 to n, or shapes that differ.

    Example:
        >>> cl.remaining(8, 4)  # 26 of 36
        Fraction(13, 18)
        >>> import numpy as np
        >>> cl.remaining(8, np.array([0, 4, 8])).round(3).tolist()
        [1.0, 0.722, 0.0]
    """
    return Dense().remaining(n, hit)


@overload
def remaining_limit(h: float) -> float: ...
@overload
def remaining_limit(h: np.ndarray) -> np.ndarray: ...
def remaining_limit(h: float | np.ndarray) -> float | np.ndarray:
    """The limit of `remaining` for long prompts: 1 - h^2, element by element for an array.

    Raises:
        TypeError: not a number. ValueError: h outside [0, 1], or NaN.

    Example:
        >>> cl.remaining_limit(0.5)
        0.75
    """
    if not isinstance(h, np.ndarray) or not h.ndim:
        h = _checks.number("h", h, 0, 1)
    elif h.dtype.kind not in "iuf":
        raise TypeError(f"h: expected numbers, given {_checks.shown(h)}")
    elif not ((h >= 0) & (h <= 1)).all():
        raise ValueError(f"h: expected numbers in [0, 1], given {h[~((h >= 0) & (h <= 1))][0]}")
    return 1 - h * h


@overload
def linear_remaining(n: int, hit: int) -> Fraction: ...
@overload
def linear_remaining(n: np.ndarray, hit: Count) -> np.ndarray: ...
@overload
def linear_remaining(n: int, hit: np.ndarray) -> np.ndarray: ...
def linear_remaining(n: Count, hit: Count) -> Fraction | np.ndarray:
    """Fraction of the token-linear work left: (n - hit) / n, exact; float64 for arrays.

    Raises:
        TypeError, ValueError: as `remaining`.

    Example:
        >>> cl.linear_remaining(8, 4)
        Fraction(1, 2)
    """
    n, hit = _check_hit(n, hit)
    if isinstance(n, np.ndarray) or isinstance(hit, np.ndarray):
        return np.asarray((n - hit) / n, dtype=np.float64)
    return Fraction(n - hit, n)


def remaining_scattered(n: int, intervals: Sequence[tuple[int, int]]) -> Fraction:
    """Fraction of the interactions left when the cached tokens are not a prefix.

    Row t has t pairs, so what a cached token saves depends on where it stands: the same number of tokens is worth least
    at the start and most at the end.

    Args:
        n: prompt tokens.
        intervals: half-open, 0-based [start, stop) runs of cached tokens; runs may touch or overlap.

    Raises:
        TypeError, ValueError: n < 1, or a run outside 0 <= start <= stop <= n.

    Example:
        >>> cl.remaining_scattered(8, [(0, 4)]), cl.remaining_scattered(8, [(4, 8)])  # 4 at the start, 4 at the end
        (Fraction(13, 18), Fraction(5, 18))
    """
    n, runs = _checks.integer("n", n, 1), []
    for interval in intervals:
        try:
            start, stop = interval
        except (TypeError, ValueError):
            raise ValueError(f"intervals: expected (start, stop) pairs, given {_checks.shown(interval)}") from None
        start, stop = (_checks.integer("intervals", x, 0) for x in (start, stop))
        if not start <= stop <= n:
            raise ValueError(f"intervals: expected 0 <= start <= stop <= n = {n}, given [{start}, {stop})")
        runs.append((start, stop))
    saved, reach = 0, 0
    for start, stop in sorted(runs):
        start = max(start, reach)
        if stop > start:
            saved += triangle(stop) - triangle(start)
            reach = stop
    return 1 - Fraction(saved, triangle(n))


def executed_tiles(n: int, hit: int, block_m: int, block_n: int, group: int = 1, *, window: int | None = None) -> int:
    """Tiles of block_m x block_n that a kernel computes per KV head for the suffix rows, skipping what no row sees.

    Row tile i holds the packed rows (row x head of the group) i block_m to (i + 1) block_m - 1, of (n - hit) group. Its
    last row sees the first hit + ceil((i + 1) block_m / group) keys, so it needs the first
    ceil((hit group + (i + 1) block_m) / (group block_n)) key tiles, and the last row tile ceil(n / block_n). A window
    drops the tiles in front of the first key that the tile's first row sees.

    Args:
        n, hit: prompt tokens and hit.
        block_m: packed rows per tile.
        block_n: keys per tile.
        group: query heads per KV head.
        window: keys that a row sees, itself included; None for all earlier keys.

    Returns:
        The exact count, in a number of steps that grows with log(n).

    Raises:
        TypeError, ValueError: a hit that is not an integer from 0 to n, or another number that is no integer >= 1.

    Example:
        >>> cl.prefix.executed_tiles(256, 0, 64, 64), cl.prefix.executed_tiles(256, 128, 64, 64)  # of which 3 + 4
        (10, 7)
    """
    n, hit = _lengths(n, hit)
    block_m, block_n = _checks.integer("block_m", block_m, 1), _checks.integer("block_n", block_n, 1)
    group = _checks.integer("group", group, 1)
    window = None if window is None else _checks.integer("window", window, 1)
    tiles, unit = -(-(n - hit) * group // block_m), group * block_n
    if tiles == 0:
        return 0
    behind = _floor_sum(tiles - 1, block_m, hit * group + block_m + unit - 1, unit) + -(-n // block_n)
    if window is None:
        return behind
    # tiles in front: floor((first row + hit + 1 - window) / block_n), counted from where that is not negative
    start = (hit + 1 - window) * group
    skipped = max(0, -(start // block_m)) if start < 0 else 0
    return behind - _floor_sum(max(0, tiles - skipped), block_m, start + skipped * block_m, unit)


def tile_remaining(
    n: int, hit: int, block_m: int, block_n: int, group: int = 1, *, window: int | None = None
) -> Fraction:
    """Fraction of the executed tiles left: what a kernel that skips tiles can save, where `remaining` counts pairs.

    Whole square tiles, B = block_n = block_m / group, n = c B, hit = a B, make it 1 - a (a + 1) / (c (c + 1)). Against
    1 - h^2 that is a relative deviation of -h B / ((1 + h) (n + B)), beyond 5% only for n < B (20 h / (1 + h) - 1):
    below 9 B whatever h. A suffix that does not fill its row tiles costs more: near h = 1 the executed pairs exceed the
    visible ones by ceil(M G / block_m) block_m / (M G), M = n - hit rows, G the group.

    Args, Raises: as `executed_tiles`.

    Example:
        >>> cl.prefix.tile_remaining(256, 128, 64, 64), cl.remaining(256, 128)
        (Fraction(7, 10), Fraction(385, 514))
    """
    return Fraction(
        executed_tiles(n, hit, block_m, block_n, group, window=window),
        executed_tiles(n, 0, block_m, block_n, group, window=window),
    )


def effective_hit(cached_tokens: int, n: int, page_size: int = 1, *, rule: EngineRule = "whole pages") -> int:
    """Tokens that an engine really reuses: min(cached_tokens, n - 1) floored to whole pages.

    At least one token is always computed, for its logits are needed.

    Args:
        cached_tokens: leading tokens of the prompt found in the cache.
        n: prompt tokens.
        page_size: tokens per page; only whole pages are reused.
        rule: "whole pages", or "never the last page" for an engine that recomputes the last full page of a prompt.

    Raises:
        TypeError, ValueError: a length that is not an integer in range, or an unknown rule.

    Example:
        >>> cl.effective_hit(96, 200, page_size=16), cl.effective_hit(96, 96, page_size=16)  # the last one is computed
        (96, 80)
    """
    cached_tokens, n = _checks.integer("cached_tokens", cached_tokens, 0), _checks.integer("n", n, 1)
    page_size = _checks.integer("page_size", page_size, 1)
    if rule not in ENGINE_RULES:
        raise ValueError(f"rule: expected one of {ENGINE_RULES}, given {rule!r}")
    hit = min(cached_tokens, n - 1) // page_size * page_size
    return hit if rule == "whole pages" else min(hit, max(0, n // page_size - 1) * page_size)


def prefix_hit_levels(
    prompt_lens: Sequence[int],
    hits: Sequence[int],
    page_size: int = 16,
    *,
    split: bool = False,
    page_table: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Level, ...]:
    """The prefill after a hit as levels over the suffix rows: one causal level, or rectangle and triangle.

    Args:
        prompt_lens: N per request.
        hits: H per request; rows H to N - 1 are computed.
        page_size: tokens per page.
        split: False, one causal level over prefix and suffix. True, two levels that merge to the same state: the
            rectangle (suffix rows over the prefix, H keys) and the triangle (suffix rows over themselves, causal).
        page_table: `[R, max_pages]` int32 of the whole prompts; consecutive pages when absent.
        device: where the levels' tensors are, unless `page_table` says so.

    Returns:
        Levels for `cascade_attention` and `ledger`, rows packed by request.

    Raises:
        TypeError, ValueError: hits that are not integers from 0 to N, numbers of requests that differ, or a page size
            below 1.

    Example:
        >>> rectangle, triangle = cl.prefix_hit_levels([8, 5], [4, 0], page_size=4, split=True)
        >>> cl.ledger([rectangle]).pairs, cl.ledger([triangle]).pairs  # 4 x 4, and 10 + 15
        (16, 25)
    """
    page_size = _checks.integer("page_size", page_size, 1)
    lengths, found = _checks.integer_list("prompt_lens", prompt_lens, 1), _checks.integer_list("hits", hits)
    if len(lengths) != len(found):
        raise ValueError(f"hits: expected one per request ({len(lengths)}), given {len(found)}")
    for n, hit in zip(lengths, found, strict=True):
        _lengths(n, hit)
    if max(lengths, default=0) >= 2**31 or sum(lengths) - sum(found) >= 2**31:
        raise ValueError(
            f"prompt_lens: expected fewer than 2**31 tokens in each and rows in all, given {max(lengths)} and "
            f"{sum(lengths) - sum(found)}"
        )
    if page_table is None:
        page_table = paging.build_page_table(lengths, page_size).to(device)
    _checks.tensor("page_table", page_table)
    pages = paging.pages_needed(max(lengths, default=0), page_size)
    if page_table.dim() != 2 or len(page_table) != len(lengths) or page_table.shape[1] < pages:
        raise ValueError(
            f"page_table: expected [{len(lengths)}, at least {pages}], given shape {tuple(page_table.shape)}"
        )
    device = page_table.device
    prompts = torch.tensor(lengths, dtype=torch.int32, device=device)
    cached = torch.tensor(found, dtype=torch.int32, device=device)
    rows = torch.nn.functional.pad((prompts - cached).cumsum(0), (1, 0)).to(torch.int32)
    most = max((n - hit for n, hit in zip(lengths, found, strict=True)), default=0)
    if not split:
        name = "suffix over prefix and suffix"
        return (Level(rows, page_table, prompts, page_size, causal=True, name=name, max_seqlen_q=most),)
    # the triangle starts at token H, so its pages are as fine as every H needs
    fine = math.gcd(page_size, *found)
    parts = page_size // fine
    tokens = (page_table.long()[:, :, None] * parts + torch.arange(parts, device=device)).flatten(1)
    column = cached.long()[:, None] // fine + torch.arange(tokens.shape[1], device=device)
    inside = column < paging.pages_needed(prompts.long(), fine)[:, None]
    suffix = torch.where(inside, tokens.gather(1, column.clamp(max=tokens.shape[1] - 1)), -1).to(torch.int32)
    return (
        Level(rows, page_table, cached, page_size, name="rectangle", max_seqlen_q=most),
        Level(rows, suffix, prompts - cached, fine, causal=True, name="triangle", max_seqlen_q=most),
    )


class PrefixHitBatch:
    """A batch of prompts whose first tokens are cached: its pages, where its new tokens go, and the plans over them.

    Rows are the tokens that are left to compute, packed by request: those from H to N - 1 of each prompt.

    Example:
        >>> batch = cl.PrefixHitBatch([8, 5], [4, 0], page_size=4)
        >>> batch.num_rows, batch.positions.tolist(), batch.suffix_slots(0).tolist()
        (9, [4, 5, 6, 7, 0, 1, 2, 3, 4], [4, 5, 6, 7])
        >>> cl.ledger(batch.levels("causal")).pairs == cl.interactions(8, 4) + cl.interactions(5)
        True
    """

    def __init__(
        self,
        prompt_lens: Sequence[int],
        hits: Sequence[int],
        page_size: int = 16,
        *,
        page_table: torch.Tensor | None = None,
        num_pages: int | None = None,
        device: torch.device | str = "cpu",
    ):
        """Allocate pages, or take an engine's.

        Args:
            prompt_lens: N per request, at least 1.
            hits: H per request, from 0 to N; `effective_hit` says what an engine reuses.
            page_size: tokens per page.
            page_table: `[R, max_pages]` int32 with the pages of whole prompts, on the CPU or elsewhere; consecutive
                ones are handed out when absent. Requests may share the pages of their hits. A new token has a slot
                that nobody else reads or writes.
            num_pages: pages of the cache, to refuse a batch that does not fit; the smallest number by default.
            device: where tensors are, unless `page_table` says so.

        Raises:
            TypeError, ValueError: as `prefix_hit_levels`; pages that do not exist, or a new token in a slot of another.
        """
        self.page_size: int = _checks.integer("page_size", page_size, 1)
        lengths, found = _checks.integer_list("prompt_lens", prompt_lens, 1), _checks.integer_list("hits", hits)
        num_pages = None if num_pages is None else _checks.integer("num_pages", num_pages, 0)
        if page_table is None:
            page_table = paging.build_page_table(lengths, self.page_size).to(device)
        self.prompt_lens: tuple[int, ...] = tuple(lengths)
        self.hits: tuple[int, ...] = tuple(found)
        self._plans = {
            "causal": prefix_hit_levels(lengths, found, self.page_size, page_table=page_table),
            "split": prefix_hit_levels(lengths, found, self.page_size, split=True, page_table=page_table),
        }
        (whole,) = self._plans["causal"]
        self.page_table: torch.Tensor = page_table
        self.cache_seqlens: torch.Tensor = whole.cache_seqlens
        self.cu_seqlens_q: torch.Tensor = whole.cu_seqlens_q
        column = torch.arange(page_table.shape[1], device=page_table.device)
        used = column < paging.pages_needed(self.cache_seqlens.long(), self.page_size)[:, None]
        needed = int(page_table[used].max()) + 1 if used.any() else 0
        if num_pages is not None and num_pages < needed:
            raise ValueError(
                f"num_pages: expected at least {needed} pages of {self.page_size} tokens, given {num_pages}"
            )
        self.num_pages: int = needed if num_pages is None else num_pages
        paging.check_page_table(page_table, self.cache_seqlens, self.num_pages, self.page_size)
        slots, times = torch.cat((self.suffix_slots(), self.prefix_slots().unique())).unique(return_counts=True)
        if (times > 1).any():
            raise ValueError(
                f"page_table: expected a slot of its own for every new token, given slot {int(slots[times > 1][0])} "
                f"for one that another request has too"
            )

    @property
    def num_rows(self) -> int:
        """Query rows T of the batch: tokens to compute."""
        return sum(self.row_counts)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Query rows of each request, N - H."""
        return tuple(n - hit for n, hit in zip(self.prompt_lens, self.hits, strict=True))

    @property
    def positions(self) -> torch.Tensor:
        """`[T]` int64: the position in its prompt of each row."""
        parts = [torch.arange(hit, n, device="cpu") for n, hit in zip(self.prompt_lens, self.hits, strict=True)]
        return torch.cat(parts or [torch.zeros(0, dtype=torch.int64, device="cpu")]).to(self.page_table.device)

    def prefix_slots(self, r: int | None = None) -> torch.Tensor:
        """Flat slots (page x page_size + offset) of request r's cached tokens, `[H]` int64; of all requests without r.

        Raises:
            TypeError, ValueError: no such request.
        """
        return self._slots(r, [0] * len(self.hits), self.hits)

    def suffix_slots(self, r: int | None = None) -> torch.Tensor:
        """Flat slots of request r's new tokens, `[N - H]` int64; without r of all requests, a slot per row.

        Raises:
            TypeError, ValueError: no such request.
        """
        return self._slots(r, self.hits, self.prompt_lens)

    def levels(self, plan: PrefillPlan = "causal") -> tuple[Level, ...]:
        """The levels of one plan; the state of any plan is the same, and so are its pairs.

        Args:
            plan: "causal" (one level over prefix and suffix), "split" (rectangle and triangle), or "shared" (hits that
                neighbours share are read once for all of them, as in `shared_prefix_levels`).

        Raises:
            ValueError: unknown plan.
        """
        if plan not in PREFILL_PLANS:
            raise ValueError(f"plan: expected one of {PREFILL_PLANS}, given {plan!r}")
        if plan != "shared":
            return self._plans[plan]
        hits = torch.tensor(self.hits, dtype=torch.int32, device=self.page_table.device)
        return shared_prefix_levels(self.page_table, self.cache_seqlens, self.cu_seqlens_q, hits, self.page_size)

    def _slots(self, r: int | None, starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
        table = self.page_table
        if r is not None:
            r = _checks.integer("r", r)
            if not 0 <= r < len(self.hits):
                raise ValueError(f"r: expected a request from 0 to {len(self.hits) - 1}, given {r}")
            table, starts, ends = table[r : r + 1], starts[r : r + 1], ends[r : r + 1]
        return paging.token_slots(table, ends, self.page_size, starts=starts)


def scale_breakdown(
    breakdown: Mapping[str, float], kinds: Mapping[str, str | tuple[str, float]], n: int, hit: int
) -> dict[str, float]:
    """Scale a no-hit prefill breakdown to a hit, bucket by bucket.

    Args:
        breakdown: bucket name to its no-hit cost, any unit.
        kinds: bucket name to "interaction" (dense causal attention core: x `remaining`), "linear" (projections, FFN,
            norms: x `linear_remaining`), "fixed" or "transfer" (left as they are), or ("other", factor) for a region
            with another law, factor from `regions`.
        n, hit: prompt tokens and hit.

    Returns:
        The same buckets scaled, and "total".

    Raises:
        TypeError, ValueError: a bucket without a kind or of an unknown one, "other" without a factor, a bucket said to
            mix kinds, a cost that is negative or not finite, or n and hit out of range.

    Example:
        >>> breakdown, kinds = {"attention": 36.0, "ffn": 10.0}, {"attention": "interaction", "ffn": "linear"}
        >>> cl.scale_breakdown(breakdown, kinds, n=8, hit=4)
        {'attention': 26.0, 'ffn': 5.0, 'total': 31.0}
    """
    if not breakdown:
        raise ValueError("breakdown: expected at least one bucket, given none")
    n, hit = _lengths(n, hit)
    factors = {"interaction": float(remaining(n, hit)), "linear": float(linear_remaining(n, hit))}
    if "total" in breakdown or set(kinds) - set(breakdown):
        extra = sorted(set(kinds) - set(breakdown)) or ["total"]
        raise ValueError(f"kinds: expected the buckets of breakdown, none of them 'total', given {extra}")
    scaled = {}
    for name, cost in breakdown.items():
        if not 0 <= _checks.number(f"breakdown[{name!r}]", cost) < math.inf:
            raise ValueError(f"breakdown[{name!r}]: expected a finite cost >= 0, given {cost!r}")
        scaled[name] = float(cost) * _factor(name, kinds.get(name), factors)
    return scaled | {"total": math.fsum(scaled.values())}


def uniform_scaling_errors(
    breakdown: Mapping[str, float], kinds: Mapping[str, str | tuple[str, float]], n: int, hit: int
) -> dict[str, dict[str, float]]:
    """The total under one factor for everything, beside the bucketed total: {rule: {"total", "relative error"}}.

    Rules: "bucketed", "uniform 1-h", "uniform 1-h^2".

    Example:
        >>> breakdown, kinds = {"attention": 36.0, "ffn": 10.0}, {"attention": "interaction", "ffn": "linear"}
        >>> errors = cl.prefix.uniform_scaling_errors(breakdown, kinds, n=8, hit=4)
        >>> {rule: row["total"] for rule, row in errors.items()}
        {'bucketed': 31.0, 'uniform 1-h': 23.0, 'uniform 1-h^2': 34.5}
    """
    n, hit = _lengths(n, hit)
    bucketed = scale_breakdown(breakdown, kinds, n, hit)["total"]
    whole = math.fsum(breakdown.values())
    totals = {
        "bucketed": bucketed,
        "uniform 1-h": whole * float(linear_remaining(n, hit)),
        "uniform 1-h^2": whole * remaining_limit(hit / n),
    }
    return {
        rule: {"total": total, "relative error": total / bucketed - 1 if bucketed else math.nan}
        for rule, total in totals.items()
    }


@dataclass(frozen=True)
class PrefillTerms:
    """What a model of end-to-end time to first token takes from here: separate, named terms, none of them a time.

    `TTFT_TERMS` says which term of such a model each serves, and which terms are not here at all: fixed costs,
    transfer, its overlap with compute, and decode chip-time.

    Attributes:
        effective_hit: reused tokens, whole pages, less the replayed ones.
        interaction_scale: factor on the dense attention core.
        linear_scale: factor on projections, FFN and other per-token work.
        computed_tokens: rows to compute, replay included.
        replay_tokens: hit tokens computed again, for state that the cache does not hold (window, compressor).
        re_expansion_tokens: cached tokens whose keys and values are expanded again (MLA in expanded mode).
        kv_load_bytes: the KV load, bytes to bring to the device if the cache is elsewhere (host or another machine); 0
            when it is present.

    Example:
        >>> terms = cl.hand_over(100, 200, page_size=16)
        >>> terms.effective_hit, terms.computed_tokens, terms.linear_scale
        (96, 104, Fraction(13, 25))
    """

    effective_hit: int
    interaction_scale: Fraction
    linear_scale: Fraction
    computed_tokens: int
    replay_tokens: int
    re_expansion_tokens: int
    kv_load_bytes: int


def hand_over(
    cached_tokens: int,
    n: int,
    page_size: int = 1,
    *,
    rule: EngineRule = "whole pages",
    replay_tokens: int = 0,
    expands_latents: bool = False,
    kv_bytes_per_token: int = 0,
    cache_present: bool = True,
) -> PrefillTerms:
    """The terms of one request.

    Args:
        cached_tokens, n, page_size, rule: as in `effective_hit`.
        replay_tokens: hit tokens that are computed again.
        expands_latents: the kernel expands cached latents per head before attention.
        kv_bytes_per_token: over all layers, for the load.
        cache_present: False when the hit's bytes still have to be loaded.

    Raises:
        TypeError, ValueError: as `effective_hit`, or a negative number.

    Example:
        >>> terms = cl.hand_over(100, 200, 16, kv_bytes_per_token=1000, cache_present=False)
        >>> terms.effective_hit, terms.interaction_scale, terms.kv_load_bytes
        (96, Fraction(1287, 1675), 96000)
    """
    n, replay_tokens = _checks.integer("n", n, 1), _checks.integer("replay_tokens", replay_tokens, 0)
    kv_bytes_per_token = _checks.integer("kv_bytes_per_token", kv_bytes_per_token, 0)
    found = effective_hit(cached_tokens, n, page_size, rule=rule)
    hit = max(0, found - replay_tokens)
    return PrefillTerms(
        effective_hit=hit,
        interaction_scale=remaining(n, hit),
        linear_scale=linear_remaining(n, hit),
        computed_tokens=n - hit,
        replay_tokens=found - hit,
        re_expansion_tokens=hit if expands_latents else 0,
        kv_load_bytes=0 if cache_present else found * kv_bytes_per_token,
    )


def _lengths(n: int, hit: int, low: int = 1) -> tuple[int, int]:
    """A prompt of at least `low` tokens and a hit of at most so many."""
    n, hit = _checks.integer("n", n, low), _checks.integer("hit", hit, 0)
    if hit > n:
        raise ValueError(f"hit: expected at most n = {n}, given {hit}")
    return n, hit


def _factor(name: str, kind, factors: Mapping[str, float]) -> float:
    kind, *given = kind if isinstance(kind, (tuple, list)) and len(kind) else (kind,)
    if kind == "mixed" or (given and given[0] in KINDS):
        raise ValueError(
            f"kinds[{name!r}]: expected one kind, given {[kind, *given]}: projections fall as 1 - h and interactions "
            f"as 1 - h^2, so no one factor is right for both; measure them apart"
        )
    if kind not in KINDS:
        raise ValueError(f"kinds[{name!r}]: expected one of {KINDS}, given {kind!r}")
    if kind == "other":
        if len(given) != 1:
            raise ValueError(f"kinds[{name!r}]: expected ('other', factor) with a number, given {(kind, *given)}")
        if not 0 <= _checks.number(f"kinds[{name!r}]", given[0]) < math.inf:
            raise ValueError(f"kinds[{name!r}]: expected a finite factor >= 0, given {given[0]!r}")
        return float(given[0])
    if given:
        raise ValueError(f"kinds[{name!r}]: expected no factor for {kind!r}, given {given}")
    return factors.get(kind, 1.0)
