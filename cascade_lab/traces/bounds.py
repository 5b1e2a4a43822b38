"""What hits are worth at least and at most, where only their sum is known.

The pairs that hits save are S = sum of H(H + 1)/2 over requests, out of sum of N(N + 1)/2. Where the lengths are known
and the sum of H, S is least with all H as equal as their N - 1 allow, and most with the longest prompts found whole.
Where only R, sum of N and sum of H are known, with N <= L, Cauchy and Schwarz bound it:

    sum of H^2 >= (sum of H)^2 / R,   sum of N^2 <= that of as many prompts of L tokens as there can be,
    sum of H^2 <= that of as many hits of L - 1 as there can be,
    pairs left, doubled >= 2 sum of H + M^2 / R + M,   M = sum of N - H >= R.

Between the two lie the laws of requests that are all alike, h^2 saved, and of hits of all or nothing, h saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from cascade_lab import _checks
from cascade_lab.traces.request import Totals


@dataclass(frozen=True)
class Bounds:
    """What is known of a trace from sums.

    Attributes:
        requests: how many; None where not known.
        tokens, hit_tokens: sum of N, sum of H.
        least, most: attention's pairs that the hits save, as a fraction of all.

    Example:
        >>> bounds = cl.traces.bounds_of_lengths([100, 300], hit_tokens=200)
        >>> bounds.token_hit, float(bounds.least) < float(bounds.most)
        (0.5, True)
    """

    requests: int | None
    tokens: int
    hit_tokens: int
    least: Fraction
    most: Fraction

    @property
    def token_hit(self) -> float:
        """h = sum of H / sum of N: the token-linear work saved, and the pairs saved where hits are all or nothing."""
        return self.hit_tokens / self.tokens


def bounds_of_lengths(lengths: Sequence[int], hit_tokens: int) -> Bounds:
    """Bounds where every length is known, and of the hits their sum.

    Args:
        lengths: N of each request.
        hit_tokens: sum of H, each at most N - 1.

    Raises:
        TypeError, ValueError: no lengths, one that is no integer >= 1, or a sum that no hits have.

    Example:
        >>> bounds = cl.traces.bounds_of_lengths([8, 8], hit_tokens=8)
        >>> bounds.least, bounds.most  # hits of 4 and 4, or of 7 and 1
        (Fraction(5, 18), Fraction(29, 72))
    """
    lengths = sorted(_checks.integer_list("lengths", lengths, 1))
    if not lengths:
        raise ValueError("lengths: expected at least one, given none")
    hit_tokens = _checks.integer("hit_tokens", hit_tokens, 0, sum(lengths) - len(lengths))
    everything = sum(n * (n + 1) for n in lengths)
    # all alike: below the level, prompts found whole but for a token; above, the level or one more
    left, low = hit_tokens, 0
    for i, n in enumerate(lengths):
        if (n - 1) * (len(lengths) - i) >= left:
            level, more = divmod(left, len(lengths) - i)
            low += more * (level + 1) * (level + 2) + (len(lengths) - i - more) * level * (level + 1)
            break
        left -= n - 1
        low += (n - 1) * n
    left, high = hit_tokens, 0
    for n in reversed(lengths):
        hit = min(n - 1, left)
        high += hit * (hit + 1)
        left -= hit
    return Bounds(len(lengths), sum(lengths), hit_tokens, Fraction(low, everything), Fraction(high, everything))


def bounds_of_totals(totals: Iterable[Totals], max_tokens: int | None = None) -> Bounds:
    """Bounds where only sums are known, of groups of requests.

    Args:
        totals: of each group.
        max_tokens: the longest prompt there can be, such as the model's context; None for no other limit than the sum.

    Raises:
        TypeError, ValueError: no totals, or sums that no requests of at most `max_tokens` have.

    Example:
        >>> bounds = cl.traces.bounds_of_totals([cl.traces.Totals(None, requests=2, tokens=16, hit_tokens=8)])
        >>> bounds.requests, bounds.token_hit, bounds.least < bounds.most
        (2, 0.5, True)
    """
    max_tokens = None if max_tokens is None else _checks.integer("max_tokens", max_tokens, 1)
    requests: int | None = 0
    tokens = hits = least = everything = most = rest = 0
    for number, one in enumerate(totals):
        n, hit, many = one.tokens, one.hit_tokens, one.requests
        missed = n - hit
        known = many is not None
        # every request computes a token, so that there are no more than that
        many = missed if many is None else many
        longest = n - (many - 1 if known else 0) if max_tokens is None else min(max_tokens, n)
        if missed < many or many < 1 or many * longest < n:
            raise ValueError(
                f"totals[{number}]: expected 1 to N - H requests of at most {longest} tokens, given {one.requests} for "
                f"{n} tokens of which {hit} are hits"
            )
        if many == 1 and known:
            low = high = hit * (hit + 1)
            whole, left = n * (n + 1), n * (n + 1) - high
        else:
            low = -(-hit * hit // many) + hit
            whole = _packed(n - many, longest - 1) + 2 * (n - many) + many + n if known else n * (longest + 1)
            high = _packed(hit, longest - 1) + hit
            left = 2 * hit + -(-missed * missed // many) + missed
        tokens, hits, requests = tokens + n, hits + hit, None if requests is None or not known else requests + many
        least, everything, most, rest = least + low, everything + whole, most + high, rest + left
    if not tokens:
        raise ValueError("empty trace: expected at least one sum")
    return Bounds(
        requests, tokens, hits, Fraction(least, everything), Fraction(most, most + rest) if most else Fraction(0)
    )


def _packed(total: int, longest: int) -> int:
    """The most that squares of numbers of at most `longest` can sum to, where the numbers sum to `total`."""
    if not longest:
        return 0
    full, last = divmod(total, longest)
    return full * longest * longest + last * last
