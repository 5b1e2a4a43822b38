"""Visible regions: how many keys each row of a prompt sees, and what a prefix hit leaves of that (claim 3's limits).

Row t (1-based) of a prompt sees v(t) keys, itself included, and F(n) = v(1) + ... + v(n). After a hit of H of N tokens
the rows H + 1 to N are left, so the remaining fraction is 1 - F(H) / F(N). With v(t) = t that is 1 - h^2 up to 1/N;
with a saturated window it is 1 - h. Everything is an exact integer; `MLA` is the dense region with another payload.

Every method takes Python integers of any size, or NumPy int64 arrays element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import overload

import numpy as np

from cascade_lab import _checks

__all__ = [
    "CSA",
    "Chunked",
    "Compressed",
    "Dense",
    "HCA",
    "MLA",
    "Mixture",
    "NSA",
    "Region",
    "SinkWindow",
    "SlidingWindow",
    "TopK",
    "TopKBlocks",
    "deepseek_sparse",
    "triangle",
]

Count = int | np.ndarray


class Region:
    """A rule v(t) with its sum F(n); subclasses give both in closed form as `_visible` and `_total`.

    Example:
        >>> regions = cl.Dense(), cl.Chunked(12288), cl.SlidingWindow(1024)
        >>> [round(float(region.remaining(16384, 8192)), 3) for region in regions]
        [0.75, 0.6, 0.516]
        >>> import numpy as np
        >>> cl.Dense().total(8), cl.Dense().total(np.array([8, 4])).tolist()
        (36, [36, 10])
    """

    @overload
    def visible(self, t: int) -> int: ...
    @overload
    def visible(self, t: np.ndarray) -> np.ndarray: ...
    def visible(self, t: Count) -> Count:
        """v(t): keys that row t >= 1 sees, itself included.

        Raises:
            TypeError: not an integer. ValueError: t below 1.
        """
        return self._visible(self._counts("t", t, 1, self._visible))

    @overload
    def total(self, n: int) -> int: ...
    @overload
    def total(self, n: np.ndarray) -> np.ndarray: ...
    def total(self, n: Count) -> Count:
        """F(n) = v(1) + ... + v(n) for n >= 0; an array whose sums pass 64 bits comes back as Python integers.

        Raises:
            TypeError: not an integer. ValueError: n below 0.
        """
        return self._total(self._counts("n", n, 0, self._total))

    @overload
    def remaining(self, n: int, hit: int) -> Fraction: ...
    @overload
    def remaining(self, n: np.ndarray, hit: Count) -> np.ndarray: ...
    @overload
    def remaining(self, n: int, hit: np.ndarray) -> np.ndarray: ...
    def remaining(self, n: Count, hit: Count) -> Fraction | np.ndarray:
        """1 - F(hit) / F(n): an exact Fraction for integers, float64 for arrays.

        Raises:
            TypeError: not integers. ValueError: n < 1, a hit outside 0 to n, or a prompt whose rows see no key at all.
        """
        n, hit = _check_hit(n, hit)
        whole, saved = self.total(n), self.total(hit)
        if np.any(np.asarray(whole) == 0):
            raise ValueError(f"n: expected a prompt long enough for its rows to see a key, given {n}")
        if isinstance(n, np.ndarray) or isinstance(hit, np.ndarray):
            return np.asarray((whole - saved) / whole, dtype=np.float64)
        return Fraction(whole - saved, whole)

    def exponent(self, n: int, hit: int) -> float:
        """The p of remaining = 1 - h^p: 2 for dense causal in the limit, 1 for a saturated window.

        It is inf where the hit rows see no key, so that nothing is saved.

        Raises:
            TypeError, ValueError: as `remaining`, and for a hit of 0 or n, where every p fits.
        """
        n, hit = _checks.integer("n", n, 1), _checks.integer("hit", hit, 0)
        left = self.remaining(n, hit)
        if not 0 < hit < n:
            raise ValueError(f"hit: expected a number strictly between 0 and {n}, given {hit}")
        return math.log(1 - left) / math.log(Fraction(hit, n)) if left < 1 else math.inf

    def _visible(self, t: Count) -> Count:
        raise NotImplementedError

    def _total(self, n: Count) -> Count:
        raise NotImplementedError

    def _counts(self, name: str, n: Count, low: int, rule: Callable[[Count], Count]) -> Count:
        """`n` checked: a Python integer, or an int64 array, or an array of Python integers where that would overflow.

        A rule's intermediate values stay within four times its result, or come from parameters alone.
        """
        n = _checks.integers(name, n, low)
        if not isinstance(n, np.ndarray):
            return n
        wide = n.size > 0 and (self._largest() >= 2**31 or 4 * rule(int(n.max())) >= 2**63)
        return n.astype(object) if wide else n.astype(np.int64)

    def _largest(self) -> int:
        return max(vars(self).values(), default=0)

    def _check(self, **lows: int) -> None:
        """Refuse parameters that are no integers of at least `lows`, and keep them as Python's, which never wrap."""
        for name, low in lows.items():
            object.__setattr__(self, name, _checks.integer(name, getattr(self, name), low))


@overload
def triangle(n: int) -> int: ...
@overload
def triangle(n: np.ndarray) -> np.ndarray: ...
def triangle(n: Count) -> Count:
    """1 + 2 + ... + n.

    Example:
        >>> cl.regions.triangle(8)
        36
    """
    return n * (n + 1) // 2


def _floor_sum(count: int, slope: int, offset: int, divisor: int) -> int:
    """Sum of floor((slope i + offset) / divisor) over i = 0..count - 1, all >= 0, by Euclid's steps."""
    total = 0
    while count > 0:
        total += slope // divisor * triangle(count - 1) + offset // divisor * count
        slope, offset = slope % divisor, offset % divisor
        # the points left lie under the line's other reading, x over y
        count, offset = divmod(slope * count + offset, divisor)
        slope, divisor = divisor, slope
    return total


def _check_hit(n: Count, hit: Count, low: int = 1) -> tuple[Count, Count]:
    """n >= low and 0 <= hit <= n, all integers; two arrays of one shape where either is an array."""
    n, hit = _checks.integers("n", n, low), _checks.integers("hit", hit)
    if not isinstance(n, np.ndarray) and not isinstance(hit, np.ndarray):
        if hit > n:
            raise ValueError(f"hit: expected at most n = {n}, given {hit}")
        return n, hit
    try:
        wide_n, wide_hit = np.broadcast_arrays(n, hit)
    except ValueError:
        raise ValueError(f"hit: expected a shape that fits n {np.shape(n)}, given {np.shape(hit)}") from None
    if (wide_hit > wide_n).any():
        first = (wide_hit > wide_n).argmax()
        raise ValueError(f"hit: expected at most n = {wide_n.flat[first]}, given {wide_hit.flat[first]}")
    return wide_n, wide_hit


def _least(a: Count, b: Count) -> Count:
    return np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else min(a, b)


def _capped(n: Count, cap: int) -> Count:
    """Sum of min(t, cap) for t = 1..n: a triangle, then a band."""
    head = _least(n, cap)
    return triangle(head) + (n - head) * cap


def _floored(n: Count, m: int) -> Count:
    """Sum of floor(t / m) for t = 1..n."""
    q, r = n // m, n % m
    return m * (q * (q - 1) // 2) + q * (r + 1)


@dataclass(frozen=True)
class Dense(Region):
    """Dense causal attention, MHA, GQA, MQA and MLA alike: v(t) = t.

    Example:
        >>> cl.Dense().visible(5), cl.Dense().total(5), cl.Dense().remaining(8, 4)
        (5, 15, Fraction(13, 18))
    """

    def _visible(self, t: Count) -> Count:
        return t

    def _total(self, n: Count) -> Count:
        return triangle(n)


@dataclass(frozen=True)
class SlidingWindow(Region):
    """The last w keys, the row's own counted: v(t) = min(t, w); `window_size=(w - 1, 0)` of `attention`.

    Example:
        >>> cl.SlidingWindow(3).visible(5), cl.SlidingWindow(3).total(5)  # 1 + 2 + 3 + 3 + 3
        (3, 12)
    """

    w: int

    def __post_init__(self) -> None:
        self._check(w=1)

    def _visible(self, t: Count) -> Count:
        return _least(t, self.w)

    def _total(self, n: Count) -> Count:
        return _capped(n, self.w)


@dataclass(frozen=True)
class SinkWindow(Region):
    """The first s keys and the last w: v(t) = min(t, s + w).

    Example:
        >>> cl.SinkWindow(1, 3).visible(5), cl.SinkWindow(1, 3).total(5)  # 1 + 2 + 3 + 4 + 4
        (4, 14)
    """

    s: int
    w: int

    def __post_init__(self) -> None:
        self._check(s=0, w=1)

    def _visible(self, t: Count) -> Count:
        return _least(t, self.s + self.w)

    def _total(self, n: Count) -> Count:
        return _capped(n, self.s + self.w)


@dataclass(frozen=True)
class Chunked(Region):
    """Attention inside chunks of c tokens (Llama 4): v(t) = ((t - 1) mod c) + 1, a sawtooth.

    Example:
        >>> [cl.Chunked(3).visible(t) for t in range(1, 8)], cl.Chunked(3).total(7)
        ([1, 2, 3, 1, 2, 3, 1], 13)
    """

    c: int

    def __post_init__(self) -> None:
        self._check(c=1)

    def _visible(self, t: Count) -> Count:
        return (t - 1) % self.c + 1

    def _total(self, n: Count) -> Count:
        return n // self.c * triangle(self.c) + triangle(n % self.c)


@dataclass(frozen=True)
class TopK(Region):
    """The k selected tokens of a sparse core (DeepSeek Sparse Attention): v(t) = min(t, k).

    Example:
        >>> cl.TopK(2).visible(5), cl.TopK(2).total(5)  # 1 + 2 + 2 + 2 + 2
        (2, 9)
    """

    k: int

    def __post_init__(self) -> None:
        self._check(k=1)

    def _visible(self, t: Count) -> Count:
        return _least(t, self.k)

    def _total(self, n: Count) -> Count:
        return _capped(n, self.k)


@dataclass(frozen=True)
class TopKBlocks(Region):
    """k selected blocks of `block` tokens, the row's own block among them, whole but for the own block's future.

    With i = (t - 1) div block and r = (t - 1) mod block + 1: v(t) = (min(i + 1, k) - 1) block + r.

    Example:
        >>> [cl.TopKBlocks(block=2, k=2).visible(t) for t in range(1, 8)]
        [1, 2, 3, 4, 3, 4, 3]
    """

    block: int
    k: int

    def __post_init__(self) -> None:
        self._check(block=1, k=1)

    def _visible(self, t: Count) -> Count:
        i = (t - 1) // self.block
        return (_least(i + 1, self.k) - 1) * self.block + (t - 1) % self.block + 1

    def _total(self, n: Count) -> Count:
        q, r = n // self.block, n % self.block
        # whole blocks: the earlier blocks each row sees, then its own
        earlier = _capped(q, self.k) - q
        own = q * triangle(self.block) + triangle(r)
        return earlier * self.block**2 + own + (_least(q + 1, self.k) - 1) * self.block * r


@dataclass(frozen=True)
class Compressed(Region):
    """One entry per m whole tokens, all of them scored, as an indexer does: v(t) = floor(t / m); m = 1 is dense.

    Example:
        >>> [cl.regions.Compressed(4).visible(t) for t in (3, 4, 9)], cl.regions.Compressed(4).total(9)
        ([0, 1, 2], 8)
    """

    m: int

    def __post_init__(self) -> None:
        self._check(m=1)

    def _visible(self, t: Count) -> Count:
        return t // self.m

    def _total(self, n: Count) -> Count:
        return _floored(n, self.m)


@dataclass(frozen=True)
class CSA(Region):
    """Compressed sparse attention (DeepSeek-V4): k of the entries of m tokens, and a window of raw tokens.

    v(t) = min(floor(t / m), k) + min(t, window). Its indexer scores all entries: `Compressed(m)`.

    Example:
        >>> cl.CSA(m=4, k=2, window=3).visible(16)  # 2 of 4 entries, and 3 raw tokens
        5
    """

    m: int
    k: int
    window: int

    def __post_init__(self) -> None:
        self._check(m=1, k=1, window=1)

    def _visible(self, t: Count) -> Count:
        return _least(t // self.m, self.k) + _least(t, self.window)

    def _total(self, n: Count) -> Count:
        # floor(t / m) reaches k at t = k m
        head = _least(n, self.k * self.m - 1)
        return _floored(head, self.m) + (n - head) * self.k + _capped(n, self.window)


@dataclass(frozen=True)
class HCA(Region):
    """Heavily compressed attention (DeepSeek-V4): all entries of m tokens, and a window of raw tokens.

    v(t) = floor(t / m) + min(t, window).

    Example:
        >>> cl.HCA(m=4, window=3).visible(16)  # 4 entries, and 3 raw tokens
        7
    """

    m: int
    window: int

    def __post_init__(self) -> None:
        self._check(m=1, window=1)

    def _visible(self, t: Count) -> Count:
        return t // self.m + _least(t, self.window)

    def _total(self, n: Count) -> Count:
        return _floored(n, self.m) + _capped(n, self.window)


@dataclass(frozen=True)
class NSA(Region):
    """Native sparse attention (arXiv:2502.11089): compressed blocks, selected blocks and a window, each attended apart.

    v(t) = [t >= length] (floor((t - length) / stride) + 1) + selected(t) + min(t, window), where selected is
    `TopKBlocks(block, k)`.

    Example:
        >>> cl.NSA(length=4, stride=2, block=4, k=1, window=3).visible(8)  # 3 entries, 4 selected and 3 raw tokens
        10
    """

    length: int
    stride: int
    block: int
    k: int
    window: int

    def __post_init__(self) -> None:
        self._check(length=1, stride=1, block=1, k=1, window=1)

    def _visible(self, t: Count) -> Count:
        # floor((t - length) / stride) + 1, which is 0 or less before the first block is whole
        whole = (t - self.length) // self.stride + 1
        entries = -_least(-whole, 0)
        return entries + TopKBlocks(self.block, self.k)._visible(t) + _least(t, self.window)

    def _total(self, n: Count) -> Count:
        behind = -_least(self.length - n, 0)
        # sum over u = 0..behind of floor(u / stride) + 1, nothing before t = length
        entries = _floored(behind, self.stride) + behind + 1
        entries = np.where(n >= self.length, entries, 0) if isinstance(n, np.ndarray) else entries * (n >= self.length)
        return entries + TopKBlocks(self.block, self.k)._total(n) + _capped(n, self.window)


@dataclass(frozen=True)
class Mixture(Region):
    """Regions attended side by side with integer weights (layers of each kind x FLOPs per pair): v is the weighted sum.

    Weight by work, not by layers: a window layer's share of the work is its share of the pairs.

    Example:
        >>> layers = cl.regions.Mixture(((5, cl.SlidingWindow(1024)), (1, cl.Dense())))
        >>> round(float(layers.remaining(16384, 8192)), 3)  # between 1 - h and 1 - h^2
        0.662
    """

    parts: tuple[tuple[int, Region], ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts: expected at least one (weight, region), given none")
        parts = tuple((_checks.integer("weight", weight, 1), region) for weight, region in self.parts)
        for _, region in parts:
            if not isinstance(region, Region):
                raise TypeError(f"parts: expected (weight, region) pairs, given {_checks.shown(region)} for a region")
        object.__setattr__(self, "parts", parts)

    def _largest(self) -> int:
        return max(max(weight, region._largest()) for weight, region in self.parts)

    def _visible(self, t: Count) -> Count:
        return sum(weight * region._visible(t) for weight, region in self.parts)

    def _total(self, n: Count) -> Count:
        return sum(weight * region._total(n) for weight, region in self.parts)


def deepseek_sparse(*, core_flops: int, indexer_flops: int, k: int = 2048) -> Mixture:
    """DeepSeek Sparse Attention (V3.2): top-k core and the dense indexer that picks for it, by FLOPs per pair.

    Raises:
        TypeError, ValueError: a number that is no integer >= 1.

    Example:
        >>> region = cl.regions.deepseek_sparse(core_flops=2, indexer_flops=1, k=3)
        >>> region.visible(5)  # 2 x 3 + 1 x 5
        11
    """
    core_flops = _checks.integer("core_flops", core_flops, 1)
    indexer_flops = _checks.integer("indexer_flops", indexer_flops, 1)
    return Mixture(((core_flops, TopK(k)), (indexer_flops, Dense())))


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention as a payload: the region is `Dense`, the bytes and FLOPs per pair are its own.

    Attributes:
        heads: query heads.
        latent: latent rank, 512 in DeepSeek-V3.
        rope: rotary dims shared by the heads, 64.
        nope, value: per-head dims of the expanded keys and values, 128 each.

    Source: DeepSeek-V2 (arXiv:2405.04434) for the two modes; a multiply-add counts as 2 FLOPs.

    Example:
        >>> shape = cl.MLA()  # DeepSeek-V3's
        >>> shape.token_bytes(), shape.expanded_flops, shape.absorbed_flops
        (1152, 81920, 278528)
    """

    heads: int = 128
    latent: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128

    def __post_init__(self) -> None:
        for name in ("heads", "latent", "rope", "nope", "value"):
            low = 0 if name == "rope" else 1
            object.__setattr__(self, name, _checks.integer(name, getattr(self, name), low))

    @property
    def expanded_flops(self) -> int:
        """FLOPs per pair, all heads, with keys and values expanded per head: 2 (nope + rope + value) each."""
        return 2 * self.heads * (self.nope + self.rope + self.value)

    @property
    def absorbed_flops(self) -> int:
        """FLOPs per pair, all heads, on the latent itself: 2 (latent + rope + latent) each."""
        return 2 * self.heads * (2 * self.latent + self.rope)

    @property
    def expansion_flops(self) -> int:
        """FLOPs to expand one cached token's keys and values: linear in the hit, paid once per chunk when expanded."""
        return 2 * self.latent * self.heads * (self.nope + self.value)

    def token_bytes(self, itemsize: int = 2) -> int:
        """Cached bytes per token and layer."""
        return (self.latent + self.rope) * _checks.integer("itemsize", itemsize, 1)

    def prefill_flops(self, n: int, hit: int) -> dict[str, int]:
        """FLOPs of one layer's attention for the rows after the hit: pairs and re-expansion in either mode.

        Returns:
            {"expanded": ..., "expansion": of the hit's cached tokens, "absorbed": ...}.
        """
        n, hit = _checks.integer("n", n, 1), _checks.integer("hit", hit, 0)
        _check_hit(n, hit)
        pairs = triangle(n) - triangle(hit)
        return {
            "expanded": pairs * self.expanded_flops,
            "expansion": hit * self.expansion_flops,
            "absorbed": pairs * self.absorbed_flops,
        }
