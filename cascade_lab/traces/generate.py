"""Traffic that is made up: sessions that send their history again each turn, drawn from quantile tables."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from cascade_lab import _checks
from cascade_lab.traces.request import Request

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

    Example:
        >>> from dataclasses import replace
        >>> long = replace(cl.traces.CONVERSATION, max_turns=64)
        >>> requests = cl.traces.generate(requests=50, traffic=long)
        >>> max(request.input_tokens for request in requests) <= long.max_tokens
        True
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

    def __post_init__(self) -> None:
        for name in ("block_size", "system_tokens", "system_prompts", "max_turns", "max_tokens"):
            low = 0 if name == "system_tokens" else 1
            object.__setattr__(self, name, _checks.integer(name, getattr(self, name), low))


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
"""Chats with long pauses, fitted to Mooncake's published conversation trace."""
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
"""Coding agents at work, fitted to published sessions: long contexts that are nearly always found again."""


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
        TypeError, ValueError: a seed or a number of requests that is no integer, or fewer than 1 request.

    Example:
        >>> requests = cl.traces.generate(seed=1, requests=100)
        >>> len(requests), requests == cl.traces.generate(seed=1, requests=100)
        (100, True)
    """
    requests, seed = _checks.integer("requests", requests, 1), _checks.integer("seed", seed)
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
