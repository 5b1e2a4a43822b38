"""Fits of a prefill kernel's measured times over (cached prefix L, new tokens x).

The area form is t = c + gamma L + b x + a (2 L x + x^2), whose last term is twice the pairs left. The floor form is
t = max(floor, area form), for kernels whose cost hides under a constant until the context is long. The square form adds
r x^2, for kernels that compute what their mask throws away: a = r is the whole rectangle (L + x) x, a = 0 new tokens
alone. Coefficients are never negative. Errors are relative and cross-validated, so a form that only memorises does not
win.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from cascade_lab import _checks

__all__ = ["Calibration", "feature_errors", "fit"]

FOLDS = 5
FEATURES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "triangle": lambda L, x: 2 * L * x + x * x,
    "rectangle": lambda L, x: (L + x) * x,
    "new tokens squared": lambda L, x: x * x,
    "new tokens": lambda L, x: x,
}


@dataclass(frozen=True)
class Calibration:
    """One fitted form.

    Attributes:
        form: "area", "floor" or "square".
        c, gamma, b, a, r: coefficients, in the samples' time unit (c), per token (gamma, b) and per token squared (a,
            r); r is 0 but for the square form.
        floor: 0 but for the floor form.
        cv_error: root mean square relative error over held-out folds.

    Example:
        >>> fitted = cl.calibration.Calibration("area", c=5.0, gamma=0.0, b=1.0, a=0.5, r=0.0, floor=0.0, cv_error=0.01)
        >>> fitted.time(prefix=10, new=4)  # 5 + 4 + 0.5 x (2 x 10 x 4 + 4^2)
        57.0
    """

    form: str
    c: float
    gamma: float
    b: float
    a: float
    r: float
    floor: float
    cv_error: float

    def time(self, prefix: int, new: int) -> float:
        """Predicted time of `new` tokens over a cached prefix.

        Raises:
            TypeError, ValueError: a number of tokens that is no integer >= 0.
        """
        prefix, new = _checks.integer("prefix", prefix, 0), _checks.integer("new", new, 0)
        coefficients = (self.c, self.gamma, self.b, self.a, self.r, self.floor)
        return float(_predict(coefficients, _design("square", _table([(prefix, new, 1.0)])))[0])


def fit(samples: Iterable[tuple[float, float, float]]) -> Calibration:
    """Fit the three forms to (L, x, t) samples and return the one with the smallest cross-validated error.

    The floor and the square form have one more coefficient and must win by more than a tenth of the error to be taken.

    Raises:
        TypeError: something else than numbers in a sample.
        ValueError: fewer than 8 samples, a number that is NaN, negative or (x, t) zero, or samples without any prefix:
            they cannot tell gamma and the rectangle from anything.

    Example:
        >>> samples = [(L, x, 5 + x + 0.5 * (2 * L * x + x * x)) for L in (0, 64, 256, 1024) for x in (16, 64, 256)]
        >>> fitted = cl.calibration.fit(samples)
        >>> round(fitted.a, 3), fitted.cv_error < 1e-6
        (0.5, True)
    """
    data = _check(samples)
    area, *richer = (_fit_form(form, data) for form in ("area", "floor", "square"))
    best = min(richer, key=lambda fitted: fitted.cv_error)
    return best if best.cv_error < 0.9 * area.cv_error else area


def feature_errors(samples: Iterable[tuple[float, float, float]]) -> dict[str, float]:
    """Cross-validated relative error of t = c + s f(L, x) for each single feature f of FEATURES.

    Says which region a kernel executes: the triangle it needs, the whole rectangle, or only the new tokens.

    Raises:
        TypeError, ValueError: as `fit`.

    Example:
        >>> samples = [(L, x, 5 + 2 * L * x + x * x) for L in (0, 64, 256, 1024) for x in (16, 64, 256)]
        >>> errors = cl.calibration.feature_errors(samples)
        >>> min(errors, key=errors.get)
        'triangle'
    """
    data = _check(samples)
    errors = {}
    for name, feature in FEATURES.items():
        design = np.stack((np.ones(len(data)), feature(data[:, 0], data[:, 1])), 1)
        errors[name] = _cross_validate(data, design, _nonnegative)
    return errors


def _table(samples: Iterable[tuple[float, float, float]]) -> np.ndarray:
    rows = []
    for i, row in enumerate(samples.tolist() if hasattr(samples, "tolist") else samples):
        try:
            prefix, new, seconds = row
        except (TypeError, ValueError):
            given = _checks.shown(row)
            raise ValueError(f"samples: expected (prefix, new tokens, time), given {given} in row {i}") from None
        rows.append(tuple(float(_checks.number(f"samples[{i}]", x)) for x in (prefix, new, seconds)))
    return np.asarray(rows, dtype=np.float64)


def _check(samples) -> np.ndarray:
    data = _table(samples)
    if len(data) < 8:
        raise ValueError(f"samples: expected at least 8 rows of (prefix, new tokens, time), given {len(data)}")
    bad = ~np.isfinite(data).all(1) | (data[:, 0] < 0) | (data[:, 1] <= 0) | (data[:, 2] <= 0)
    if bad.any():
        i = int(bad.argmax())
        raise ValueError(
            f"samples: expected prefix >= 0, new tokens > 0, time > 0, given {data[i].tolist()} in row {i}"
        )
    if not (data[:, 0] > 0).any():
        raise ValueError(
            f"samples: expected some with a prefix, given {len(data)} with prefix 0, which fix no hit's cost"
        )
    return data


def _design(form: str, data: np.ndarray) -> np.ndarray:
    """Columns of c, gamma, b, a, and r for the square form."""
    L, x = data[:, 0], data[:, 1]
    columns = [np.ones(len(data)), L, x, FEATURES["triangle"](L, x)]
    return np.stack([*columns, x * x] if form == "square" else columns, 1)


def _predict(coefficients, design: np.ndarray) -> np.ndarray:
    *linear, floor = coefficients
    return np.maximum(floor, design @ np.asarray(linear))


def _nonnegative(design: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Least squares of relative errors with coefficients >= 0, by trying every support; the last entry is floor = 0."""
    scale = np.abs(design).max(0)
    scaled = design / np.where(scale > 0, scale, 1.0) / t[:, None]
    best, best_error = np.zeros(design.shape[1]), math.inf
    for size in range(1, design.shape[1] + 1):
        for support in itertools.combinations(range(design.shape[1]), size):
            found = np.linalg.lstsq(scaled[:, support], np.ones(len(t)), rcond=None)[0]
            error = float(((scaled[:, support] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(design.shape[1]), error
                best[list(support)] = found
    return np.append(best / np.where(scale > 0, scale, 1.0), 0.0)


def _with_floor(design: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Alternate between which samples lie on the floor and the fit of the others, from several starts."""
    area = design[:, -1]
    best, best_error = None, math.inf
    for quantile in (0.0, 0.25, 0.5, 0.75):
        flat = area <= np.quantile(area, quantile)
        for _ in range(30):
            if (~flat).sum() < design.shape[1]:
                break
            found = _nonnegative(design[~flat], t[~flat])
            # the floor of relative least squares: sum(1/t) / sum(1/t^2)
            found[-1] = (1 / t[flat]).sum() / (1 / t[flat] ** 2).sum() if flat.any() else 0.0
            error = float(((_predict(found, design) / t - 1) ** 2).sum())
            if error < best_error:
                best, best_error = found, error
            now = design @ found[:-1] < found[-1]
            if (now == flat).all():
                break
            flat = now
    return best if best is not None else _nonnegative(design, t)


def _cross_validate(data: np.ndarray, design: np.ndarray, solve) -> float:
    t = data[:, 2]
    fold = np.arange(len(t)) % FOLDS
    errors = np.empty(len(t))
    for k in range(FOLDS):
        held = fold == k
        errors[held] = _predict(solve(design[~held], t[~held]), design[held]) / t[held] - 1
    return float(np.sqrt((errors**2).mean()))


def _fit_form(form: str, data: np.ndarray) -> Calibration:
    solve = _with_floor if form == "floor" else _nonnegative
    design = _design(form, data)
    *linear, floor = (float(x) for x in solve(design, data[:, 2]))
    c, gamma, b, a, r = linear if form == "square" else [*linear, 0.0]
    return Calibration(form, c, gamma, b, a, r, floor, _cross_validate(data, design, solve))
