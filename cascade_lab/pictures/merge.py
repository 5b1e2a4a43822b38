"""Pictures of notebook 01: keys split in two, exponentials that overflow, and the rounding of partial outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cascade_lab import states
from cascade_lab.pictures.style import BLACK, BLUE, SERIES, VERMILLION, figure, runs, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DTYPE_LOOKS = dict(zip(("float32", "float16", "bfloat16"), SERIES, strict=False))


def split_keys(weights: Sequence[float], values: Sequence[float], cut: int) -> tuple[Figure, dict[str, float]]:
    """One query's keys as bars of height e^s, cut into A (the first `cut`) and B, with the state of each side.

    Args:
        weights: e^s per key, positive.
        values: one number per key.
        cut: keys in A, from 1 to all but one.

    Returns:
        The figure, and lse and o of "a", "b" and the "whole" under names such as "lse_a".
    """
    w, v = torch.tensor(weights, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    parts = {"a": slice(0, cut), "b": slice(cut, None), "whole": slice(None)}
    data = {f"lse_{name}": float(w[part].sum().log()) for name, part in parts.items()}
    data |= {f"o_{name}": float((w[part] * v[part]).sum() / w[part].sum()) for name, part in parts.items()}
    with style():
        fig, ax = figure()
        top = max(weights)
        for name, start, stop, colour, hatch in (("a", 0, cut, BLUE, ""), ("b", cut, len(w), VERMILLION, "//")):
            ax.bar(
                range(start, stop),
                weights[start:stop],
                width=0.7,
                color="white",
                edgecolor=colour,
                hatch=hatch,
                linewidth=1.6,
            )
            ax.text(
                (start + stop - 1) / 2,
                1.36 * top,
                f"{name.upper()}: $e^{{lse}}$ = {math.exp(data[f'lse_{name}']):g}, o = {data[f'o_{name}']:g}",
                color=colour,
                ha="center",
                weight="bold",
            )
        for j, (weight, value) in enumerate(zip(weights, values, strict=True)):
            ax.text(j, weight + 0.03 * top, f"v = {value:g}", ha="center")
        ax.axvline(cut - 0.5, color=BLACK, linestyle=":", ymax=0.85)
        ax.set_title(f"A and B together: $e^{{lse}}$ = {math.exp(data['lse_whole']):g}, o = {data['o_whole']:g}")
        ax.set_xticks(range(len(w)), [f"key {j}" for j in range(len(w))])
        ax.set_ylim(0, 1.5 * top)
        ax.set_ylabel("weight $e^{s}$ of the key")
    return fig, data


def overflow(
    levels: Sequence[float], gap: float = 1.0, slack: float = 0.01
) -> tuple[Figure, dict[str, list[float]], dict[str, tuple[float, float]]]:
    """Weight of state A in a merge of lse = (c, c - gap) over c: unshifted exponentials against a subtracted maximum.

    Every exponential is rounded once to the format; sum and quotient are the format's own.

    Args:
        levels: values of c, rising.
        gap: lse_A - lse_B.
        slack: relative error up to which a weight counts as right.

    Returns:
        The figure; per series the weight at each level (NaN where it is lost): "float16" and "float32" unshifted,
        "shifted" in float32; and per format that is right anywhere the first and last level of its longest right run.
    """
    lse = torch.tensor([[c, c - gap] for c in levels], dtype=torch.float64)
    data = {}
    for name, dtype in (("float16", torch.float16), ("float32", torch.float32)):
        a, b = lse.exp().to(dtype).unbind(1)
        data[name] = (a / (a + b)).tolist()
    e = (lse - lse.amax(1, keepdim=True)).float().exp()
    data["shifted"] = (e[:, 0] / e.sum(1)).tolist()
    reach = {}
    for name in ("float16", "float32"):
        close = [abs(w - right) <= slack * right for w, right in zip(data[name], data["shifted"], strict=True)]
        if any(close):
            first, count = max(runs([i for i, right in enumerate(close) if right]), key=lambda run: run[1])
            reach[name] = levels[first], levels[first + count - 1]
    with style():
        fig, ax = figure()
        ax.plot(levels, data["shifted"], color=BLACK, linestyle=":", linewidth=1.2)
        for name, y in (("float32", 0.36), ("float16", 0.18)):
            look = DTYPE_LOOKS[name] | {"marker": ""}
            ax.plot(levels, data[name], **look)
            if name in reach:
                low, high = reach[name]
                ax.annotate("", (low, y), (high, y), arrowprops={"arrowstyle": "|-|", "color": look["color"]})
                text = f"{name} unshifted is right within {slack:.0%} for c from {low:g} to {high:g}"
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
                ax.text(0, y + 0.055, text, color=look["color"], ha="center", fontsize=8, bbox=box)
        ax.text(levels[-1], data["shifted"][-1] + 0.02, "maximum subtracted", color=BLACK, ha="right")
        ax.set_ylim(-0.05, 1.05)
        ax.set_xlabel("c, the lse of A (natural log)")
        ax.set_ylabel("weight of A in the merge")
    return fig, data, reach


def rounding(
    scores: torch.Tensor, values: torch.Tensor, splits: Sequence[int], backend: str = "auto"
) -> tuple[Figure, dict[str, list[float]]]:
    """Error of the merged output over the number of splits, with partial outputs kept in three dtypes.

    The partial states are computed in float64, so the only roundings are those of the partial outputs and of the merge,
    which works in float32.

    Args:
        scores: `[T, K]` float64, scaled scores.
        values: `[K, D]` float64, on the same device.
        splits: numbers of parts, each from 1 to K.
        backend: of `merge_states`.

    Returns:
        The figure, and per dtype name the largest absolute error at each number of splits.
    """
    whole = scores.softmax(1) @ values
    data: dict[str, list[float]] = {name: [] for name in DTYPE_LOOKS}
    for parts in splits:
        cuts = list(zip(scores.tensor_split(parts, 1), values.tensor_split(parts), strict=True))
        # [T, S, 1, D], [T, S, 1]
        o = torch.stack([s.softmax(1) @ v for s, v in cuts], 1)[:, :, None]
        lse = torch.stack([s.logsumexp(1) for s, _ in cuts], 1)[:, :, None].float()
        for name in DTYPE_LOOKS:
            partial = o.to(getattr(torch, name))
            merged = states.merge_states(partial, lse, out_dtype=torch.float32, backend=backend).o[:, 0]
            data[name].append(float((merged.double() - whole).abs().max()))
    with style():
        fig, ax = figure()
        for name, look in DTYPE_LOOKS.items():
            ax.plot(splits, data[name], **look)
            ax.text(splits[-1] * 1.08, data[name][-1], name, color=look["color"], va="center")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(splits, [str(s) for s in splits])
        ax.minorticks_off()
        ax.set_xlim(splits[0] / 1.15, splits[-1] * 2.1)
        ax.set_xlabel("number of splits")
        ax.set_ylabel("largest |error| of the merged output")
        ax.set_title("Lines are named by the dtype that stores the partial outputs")
    return fig, data
