"""May a prefill bucket be scaled by 1 - h^2? The five conditions, tested on data (claim 3).

The law of `prefix` holds for a contiguous prefix from position 0, dense causal visibility, the interaction bucket
alone, a calibrated kernel, and a cache that is already there. `check_applicability` says for each whether a case meets
it, with the law that holds instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from cascade_lab import _checks
from cascade_lab.calibration import fit
from cascade_lab.prefix import KINDS, effective_hit, linear_remaining, remaining
from cascade_lab.regions import Dense, Region

__all__ = ["Case", "Finding", "check_applicability"]


@dataclass(frozen=True)
class Case:
    """What has to be known to say whether 1 - h^2 applies.

    Attributes:
        n: prompt tokens.
        cached_blocks: for each block of the prompt from position 0, whether the cache has it.
        block_size: tokens per block.
        region: the visible region of the attention layers.
        kinds: the prefill breakdown's buckets, as in `scale_breakdown`; a tuple of kinds is a bucket that mixes them.
        samples: (prefix, new tokens, time) of the attention kernel alone.
        cache_present: the hit's KV is on the device already.
        kv_bytes_per_token: over all layers, for what has to be loaded otherwise.
        tolerance: largest absolute deviation from 1 - h^2 that still counts as the law holding.

    Example:
        >>> case = cl.applicability.Case(n=64, cached_blocks=[True, True, False, False], block_size=16)
        >>> cl.check_applicability(case)[0].detail
        '32 of 64 tokens cached in 1 runs, 32 of them a reusable prefix from position 0'
    """

    n: int
    cached_blocks: Sequence[bool]
    block_size: int
    region: Region = field(default_factory=Dense)
    kinds: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    samples: Sequence[tuple[float, float, float]] = ()
    cache_present: bool = True
    kv_bytes_per_token: int = 0
    tolerance: float = 0.05


@dataclass(frozen=True)
class Finding:
    """One condition, whether it holds, and what ignoring it costs.

    Attributes:
        condition: one of the five.
        holds: the condition is met.
        detail: what was seen, in one sentence with numbers.
        penalty: by how much the scale factor is off (true minus 1 - h^2), or bytes to load; 0 when the condition holds,
            None when nothing is known.
        unit: "of the no-hit work" or "bytes".

    Example:
        >>> case = cl.applicability.Case(64, [True, True, False, False], 16, cl.SlidingWindow(8))
        >>> finding = cl.check_applicability(case)[1]
        >>> finding.condition, finding.holds, finding.detail
        ('dense causal region', False, 'SlidingWindow: 0.5289 of the pairs remain, dense causal 0.7462')
    """

    condition: str
    holds: bool
    detail: str
    penalty: float | None
    unit: str = "of the no-hit work"


def check_applicability(case: Case | Mapping[str, object]) -> list[Finding]:
    """Test the five conditions of the 1 - h^2 law on data.

    Args:
        case: a `Case`, or a mapping with its fields.

    Returns:
        Five findings: contiguous prefix, dense causal region, interaction bucket only, calibrated kernel, cache
        present.

    Raises:
        TypeError, ValueError: an empty case, lengths that are no integers in range, an unknown kind, or bad samples.

    Example:
        >>> findings = cl.check_applicability(dict(n=64, cached_blocks=[True, False, True, False], block_size=16))
        >>> [finding.condition for finding in findings if not finding.holds]
        ['contiguous prefix', 'calibrated kernel']
    """
    if not isinstance(case, Case):
        if not isinstance(case, Mapping):
            raise TypeError(f"case: expected a Case or a mapping with its fields, given {case!r}")
        unknown = set(case) - {field.name for field in fields(Case)}
        missing = [name for name in ("n", "cached_blocks", "block_size") if name not in case]
        if unknown or missing:
            fault = f"the unknown {_checks.shown(min(map(str, unknown)))}" if unknown else f"no {missing[0]!r}"
            names = ", ".join(field.name for field in fields(Case))
            raise ValueError(f"case: expected n, cached_blocks, block_size and other fields of {names}, given {fault}")
        case = Case(**case)
    lows = {"n": 1, "block_size": 1, "kv_bytes_per_token": 0}
    case = replace(case, **{name: _checks.integer(name, getattr(case, name), low) for name, low in lows.items()})
    _checks.number("tolerance", case.tolerance, 0, 1)
    if not isinstance(case.region, Region):
        raise TypeError(f"region: expected a region of cascade_lab.regions, given {case.region!r}")
    blocks = _flags("cached_blocks", case.cached_blocks)
    if len(blocks) not in (case.n // case.block_size, -(-case.n // case.block_size)):
        raise ValueError(
            f"cached_blocks: expected {-(-case.n // case.block_size)} blocks of {case.block_size} for n = {case.n}, "
            f"given {len(blocks)}"
        )
    run = blocks.index(False) if False in blocks else len(blocks)
    hit = effective_hit(min(run * case.block_size, case.n), case.n, case.block_size)
    return [
        _contiguity(case, blocks, hit),
        _density(case, hit),
        _contents(case, hit),
        _calibrated(case, hit),
        _presence(case, hit),
    ]


def _flags(name: str, x) -> list[bool]:
    """The elements of an iterable, array or tensor that are bools, or the integers 0 and 1."""
    if isinstance(x, (str, bytes)) or not isinstance(x, Iterable):
        raise TypeError(f"{name}: expected a sequence of bool, given {_checks.shown(x)}")
    values = x.tolist() if isinstance(x, (np.ndarray, torch.Tensor)) else list(x)
    for i, found in enumerate(values):
        if not isinstance(found, (bool, np.bool_)):
            values[i] = _checks.integer(f"{name}[{i}]", found, 0, 1)
    return [bool(found) for found in values]


def _contiguity(case: Case, blocks: list[bool], hit: int) -> Finding:
    cached = min(sum(blocks) * case.block_size, case.n)
    runs = sum(1 for i, found in enumerate(blocks) if found and (i == 0 or not blocks[i - 1]))
    stray = cached - hit if runs > 1 or (runs == 1 and not blocks[0]) else 0
    detail = f"{cached} of {case.n} tokens cached in {runs} runs, {hit} of them a reusable prefix from position 0"
    penalty = float(remaining(case.n, hit) - remaining(case.n, min(cached, case.n))) if stray else 0.0
    return Finding("contiguous prefix", not stray, detail, penalty)


def _density(case: Case, hit: int) -> Finding:
    left, dense = case.region.remaining(case.n, hit), remaining(case.n, hit)
    penalty = float(left - dense)
    name = type(case.region).__name__
    detail = f"{name}: {float(left):.4f} of the pairs remain, dense causal {float(dense):.4f}"
    holds = isinstance(case.region, Dense) or left == dense
    return Finding("dense causal region", holds, detail, 0.0 if holds else penalty)


def _contents(case: Case, hit: int) -> Finding:
    mixed = []
    for name, kind in case.kinds.items():
        parts = kind if isinstance(kind, (tuple, list)) else (kind,)
        kinds = [part for part in parts if isinstance(part, str)]
        if not kinds or any(part not in (*KINDS, "mixed") for part in kinds):
            raise ValueError(f"kinds[{name!r}]: expected one of {KINDS}, or several for a mixed bucket, given {kind!r}")
        if len(kinds) > 1 or kinds == ["mixed"]:
            mixed.append(name)
    if not mixed:
        return Finding("interaction bucket only", True, f"{len(case.kinds)} buckets, none mixed", 0.0)
    # the mixed bucket's factor lies between 1 - h and 1 - h^2
    gap = float(linear_remaining(case.n, hit) - remaining(case.n, hit))
    verb = "mixes" if len(mixed) == 1 else "mix"
    detail = f"{', '.join(mixed)} {verb} work that falls as 1 - h with work that falls as 1 - h^2"
    return Finding("interaction bucket only", False, detail, gap)


def _calibrated(case: Case, hit: int) -> Finding:
    if not len(case.samples):
        return Finding("calibrated kernel", False, "no samples of the kernel over (prefix, new tokens)", None)
    fitted = fit(case.samples)
    ratio = fitted.time(hit, case.n - hit) / fitted.time(0, case.n)
    law = float(remaining(case.n, hit))
    holds = fitted.cv_error <= case.tolerance and abs(ratio - law) <= case.tolerance
    detail = (
        f"{fitted.form} form, cross-validated error {fitted.cv_error:.1%}: the kernel's time falls to {ratio:.4f}, "
        f"the pairs to {law:.4f}"
    )
    # a form that does not describe the samples says nothing about the hit
    unknown = fitted.cv_error > case.tolerance
    return Finding("calibrated kernel", holds, detail, 0.0 if holds else None if unknown else ratio - law)


def _presence(case: Case, hit: int) -> Finding:
    if case.cache_present:
        return Finding("cache present", True, f"{hit} cached tokens are on the device", 0.0, "bytes")
    load = hit * case.kv_bytes_per_token
    detail = f"{hit} cached tokens have to be loaded, a term of its own: {load} bytes"
    return Finding("cache present", False, detail, float(load), "bytes")
