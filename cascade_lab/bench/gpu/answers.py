"""Answers are held to float64 before they are timed: one random row of each, and the plans against each other."""

from __future__ import annotations

import torch
from torch import Tensor

from cascade_lab.states import State

# o relative to its largest element, in bfloat16; lse in absolute terms
O_TOLERANCE, LSE_TOLERANCE = 2e-2, 1e-3


class WrongAnswer(AssertionError):
    """A kernel of this package disagrees with the reference: nothing after it would be worth timing."""


def row_in_float64(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """o [H_q, D] and lse [H_q] of one row over k, v [n, H_kv, D]."""
    k, v = k.double(), v.double()
    scores = torch.einsum("hgd,nhd->hgn", q.double().view(k.shape[1], -1, k.shape[2]), k) * k.shape[2] ** -0.5
    o = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v)
    return o.flatten(0, 1), scores.logsumexp(-1).flatten()


def hold(state: State, reference: tuple[int, Tensor, Tensor], what: str) -> dict[str, float]:
    """Errors of one row against `reference`, its number, o and lse in float64; `WrongAnswer` beyond the tolerances."""
    row, o, lse = reference
    o_error = float((state.o[row].double() - o).abs().max() / o.abs().max())
    lse_error = float((state.lse[row].double() - lse).abs().max())
    if not (o_error <= O_TOLERANCE and lse_error <= LSE_TOLERANCE):
        raise WrongAnswer(f"{what}: row {row} differs from float64 by {o_error:.2e} in o, {lse_error:.2e} in lse")
    return {"o_error": o_error, "lse_error": lse_error}


def agree(state: State, other: State, what: str) -> None:
    """Raise `WrongAnswer` where two plans differ by more than both may be off."""
    o_error = float((state.o.float() - other.o.float()).abs().max() / other.o.float().abs().max())
    lse_error = float((state.lse - other.lse).abs().max())
    if not (o_error <= 2 * O_TOLERANCE and lse_error <= LSE_TOLERANCE):
        raise WrongAnswer(f"{what}: differs from the first plan by {o_error:.2e} in o, {lse_error:.2e} in lse")
