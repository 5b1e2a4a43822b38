"""Pictures of notebook 04: masks of other regions, their laws, mixtures, and recorded kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cascade_lab.pictures.style import BLACK, GREY, LAWS, PAIRS, SIZE, apart, figure, panels, style, tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cascade_lab.regions import Region


def region_masks(regions: Mapping[str, Region], n: int, hit: int) -> tuple[Figure, dict[str, tuple[int, int]]]:
    """Which keys each row sees, region by region, with the hit's rows cut out.

    Args:
        regions: name to region, each with a mask of its own.
        n, hit: prompt tokens and hit, few enough to draw each pair.

    Returns:
        The figure, and per name the marks drawn for the hit's rows and for the rows left.
    """
    import numpy as np
    from matplotlib.colors import ListedColormap

    from cascade_lab.evidence.masks import branches

    columns = min(4, len(regions))
    data = {}
    with style():
        fig, axes = panels(-(-len(regions) // columns), columns)
        fig.set_size_inches(SIZE[0], 1.95 * (-(-len(regions) // columns)) + 0.2)
        axes = np.atleast_1d(axes).ravel()
        for ax, (name, region) in zip(axes, regions.items(), strict=False):
            parts = branches(region, n).values()
            marks = [np.pad(mask.astype(int), ((0, 0), (0, 1)), constant_values=0) for mask in parts]
            drawn = np.concatenate(marks, 1)[:, :-1]
            drawn[hit:] *= 2
            data[name] = int((drawn == 1).sum()), int((drawn == 2).sum())
            ax.imshow(drawn, cmap=ListedColormap(["white", "#BDBDBD", PAIRS]), vmin=0, vmax=2, interpolation="nearest")
            ax.axhline(hit - 0.5, color=BLACK, linewidth=1.0)
            start = -0.5
            for mask in parts:
                edges = {"fill": False, "edgecolor": GREY, "linewidth": 0.6, "align": "edge"}
                ax.bar(start, n, mask.shape[1], -0.5, **edges)
                start += mask.shape[1] + 1
            ax.set_title(f"{name}\n{data[name][1]} of {sum(data[name])} left", fontsize=8)
            ax.set_xlim(-1, drawn.shape[1])
            ax.set_ylim(n, -1)
            ax.set_anchor("NW")
            ax.set_axis_off()
        for ax in axes[len(regions) :]:
            ax.set_axis_off()
    return fig, data


def region_laws(
    regions: Mapping[str, Region], lengths: Sequence[int], n: int, hit_ratio: float = 0.5
) -> tuple[Figure, dict[str, dict[str, list[float]]]]:
    """What a hit leaves of each region, over the prompt length and over the hit ratio.

    Args:
        regions: name to region, at most six.
        lengths: prompt lengths of the left panel, rising, at hit_ratio.
        n: prompt length of the right panel.
        hit_ratio: of the left panel, in (0, 1).

    Returns:
        The figure, and per name the fractions left as "lengths" and "hits" (at 0, 1/64, ..., 1).
    """
    import numpy as np

    steps = np.arange(65) / 64
    data = {
        name: {
            "lengths": [float(region.remaining(x, int(x * hit_ratio))) for x in lengths],
            "hits": [float(region.remaining(n, int(n * h))) for h in steps],
        }
        for name, region in regions.items()
    }
    with style():
        fig, (left, right) = panels(1, 2)
        for (name, found), look in zip(data.items(), LAWS, strict=False):
            left.plot(lengths, found["lengths"], **look | {"marker": ""})
            right.plot(steps, found["hits"], label=name, **look | {"marker": ""})
        left.set_xscale("log", base=2)
        for y, text in ((1 - hit_ratio**2, "$1 - h^2$"), (1 - hit_ratio, "$1 - h$")):
            left.axhline(y, color=GREY, linewidth=0.8, linestyle=":")
            left.text(lengths[-1], y + 0.004, text, color=GREY, ha="right")
        ticks = [n for n in lengths if n & (n - 1) == 0] or lengths
        ticks = ticks[:: max(1, len(ticks) // 4)]
        left.set_xticks(ticks, [tokens(x) for x in ticks])
        left.minorticks_off()
        left.set_xlabel("prompt tokens N")
        left.set_ylabel("fraction of the pairs left")
        left.set_title(f"h = {hit_ratio:g}")
        right.set_xlabel("hit ratio h")
        right.set_title(f"N = {tokens(n)}")
        right.legend(frameon=False, fontsize=8, handlelength=2.6)
    return fig, data


def mix_laws(
    models: Mapping[str, Region], lengths: Sequence[int], hit_ratio: float = 0.5
) -> tuple[Figure, dict[str, list[float]]]:
    """What a hit leaves of whole models' attention FLOPs, over the prompt length.

    Args:
        models: name to a FLOP-weighted region, at most six.
        lengths: prompt lengths, rising.
        hit_ratio: in (0, 1).

    Returns:
        The figure, and per model the fractions left.
    """
    data = {name: [float(mix.remaining(n, int(n * hit_ratio))) for n in lengths] for name, mix in models.items()}
    with style():
        fig, ax = figure()
        places = apart([found[-1] for found in data.values()], 0.014)
        for (name, found), look, y in zip(data.items(), LAWS, places, strict=False):
            ax.plot(lengths, found, **look | {"marker": ""})
            ax.text(lengths[-1] * 1.12, y, name, color=look["color"], va="center")
        for y, text in ((1 - hit_ratio**2, "$1 - h^2$"), (1 - hit_ratio, "$1 - h$")):
            ax.axhline(y, color=GREY, linewidth=0.8, linestyle=":")
            ax.text(lengths[0], y + 0.003, text, color=GREY)
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [tokens(n) for n in lengths])
        ax.minorticks_off()
        ax.set_xlim(lengths[0] / 1.1, lengths[-1] * (lengths[-1] / lengths[0]) ** 0.16)
        ax.set_ylim(top=max(1 - hit_ratio**2, *map(max, data.values())) + 0.02)
        ax.set_xlabel("prompt tokens N")
        ax.set_ylabel("share of the attention FLOPs left")
        ax.set_title(f"h = {hit_ratio:g}, layers weighted by their FLOPs")
    return fig, data


def recorded_ratios(
    series: Mapping[str, Mapping[str, float]],
) -> tuple[Figure, dict[str, list[tuple[float, float, float]]]]:
    """Recorded time ratios over the hit ratio, on 1 - h^2 and 1 - h.

    Args:
        series: name to {hit ratio as text: time with the hit over time without}, at most six.

    Returns:
        The figure, and per name (h, ratio, how far on the way from 1 - h to 1 - h^2) at each point.
    """
    data = {
        name: [(float(h), ratio, (ratio - (1 - float(h))) / (float(h) - float(h) ** 2)) for h, ratio in found.items()]
        for name, found in series.items()
    }
    fine = [i / 100 for i in range(101)]
    with style():
        fig, ax = figure()
        ax.plot(fine, [1 - h * h for h in fine], color=BLACK, linewidth=1.0)
        ax.plot(fine, [1 - h for h in fine], color=BLACK, linewidth=1.0, linestyle="--")
        ax.text(0.62, 0.65, "$1 - h^2$")
        ax.text(0.3, 0.64, "$1 - h$", ha="right")
        for i, ((name, points), look) in enumerate(zip(data.items(), LAWS, strict=False)):
            # beside each other where they share a hit ratio
            x = [h + 0.012 * (i - (len(data) - 1) / 2) for h, _, _ in points]
            ax.plot(x, [ratio for _, ratio, _ in points], label=name, **look | {"linestyle": ""})
        ax.legend(frameon=False, fontsize=8, loc="lower left")
        ax.set_xlim(0, 1)
        ax.set_ylim(0, 1.05)
        ax.set_xlabel("hit ratio h")
        ax.set_ylabel("time with the hit, share of the time without")
    return fig, data
