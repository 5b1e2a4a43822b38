"""Pictures of notebook 03: the causal triangle cut by a hit, executed tiles, and measured laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cascade_lab import prefix
from cascade_lab.pictures.style import (
    BLACK,
    BOX,
    GREEN,
    GREY,
    PAIRS,
    PALE,
    PALE_PAIRS,
    SERIES,
    SIZE,
    figure,
    looks,
    panels,
    style,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cascade_lab.evidence.timing import Ratio


def hit_triangle(n: int, hit: int) -> tuple[Figure, dict[str, int]]:
    """The query-key pairs of a dense causal prompt, cut at the hit: saved triangle, rectangle and triangle left.

    Args:
        n: prompt tokens, few enough to draw each pair.
        hit: cached tokens, 0 < hit < n.

    Returns:
        The figure, and the pairs drawn as "saved", "rectangle" and "triangle".
    """
    parts = {
        "saved": (PALE, GREY, ""),
        "rectangle": ("white", PAIRS, "////"),
        "triangle": ("white", PAIRS, ".."),
    }
    data = dict.fromkeys(parts, 0)
    with style():
        fig, ax = figure()
        for query in range(n):
            for key in range(query + 1):
                part = "saved" if query < hit else "rectangle" if key < hit else "triangle"
                data[part] += 1
                face, edge, hatch = parts[part]
                ax.bar(key, 1, 1, query - 0.5, facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.6)
        ax.plot([-0.6, n - 0.2], [hit - 0.5] * 2, color=BLACK)
        middles = {"saved": (hit / 3, 2 * hit / 3), "rectangle": (hit / 2, (n + hit) / 2)}
        middles["triangle"] = (hit + (n - hit) / 3, hit + 2 * (n - hit) / 3)
        for part, (x, y) in middles.items():
            colour = parts[part][1]
            box = BOX | {"edgecolor": colour}
            ax.text(x - 0.5, y - 0.5, data[part], color=colour, ha="center", va="center", weight="bold", bbox=box)
        text = {"saved": f"saved: rows of the hit, {data['saved']} pairs"}
        text["rectangle"] = f"left: suffix over prefix, {data['rectangle']} pairs"
        text["triangle"] = f"left: suffix over itself, {data['triangle']} pairs"
        for line, (part, words) in enumerate(text.items()):
            ax.text(n + 0.2, 0.6 + 0.09 * n * line, words, color=parts[part][1], va="center")
        ax.set_xlim(-0.6, 2.1 * n)
        ax.set_ylim(n - 0.4, -0.6)
        ax.set_aspect("equal")
        every = range(0, n, max(1, n // 8))
        ax.set_xticks(every, [key + 1 for key in every])
        ax.set_yticks(every, [query + 1 for query in every])
        ax.set_xlabel("key token", loc="left")
        ax.set_ylabel("query row")
        ax.spines["bottom"].set_bounds(-0.5, n - 0.5)
    return fig, data


def hit_limit(lengths: Sequence[int], steps: int = 8) -> tuple[Figure, dict[int, dict[str, list[float] | float]]]:
    """What a hit leaves: exact counts on the limit 1 - h^2, beside 1 - h; and how far exact and limit are apart.

    Args:
        lengths: prompt lengths, multiples of `steps`, rising; exact points are drawn for the first two.
        steps: h goes from 0 to 1 in this many steps.

    Returns:
        The figure, and per length "h", "exact", and "gap", the largest distance from the limit over all hits.
    """
    data = {}
    for n in lengths:
        hits = [n * i // steps for i in range(steps + 1)]
        gap = max(1 - (hit / n) ** 2 - float(prefix.remaining(n, hit)) for hit in range(n + 1))
        exact = [float(prefix.remaining(n, hit)) for hit in hits]
        data[n] = {"h": [hit / n for hit in hits], "exact": exact, "gap": gap}
    fine = [i / 100 for i in range(101)]
    with style():
        fig, (left, right) = panels(1, 2, width_ratios=[1.25, 1])
        left.plot(fine, [1 - h * h for h in fine], color=BLACK)
        left.plot(fine, [1 - h for h in fine], color=GREY, linestyle="--")
        left.text(0.62, 0.66, "$1 - h^2$", color=BLACK)
        left.text(0.18, 0.55, "$1 - h$", color=GREY)
        for n, marker, face in zip(lengths[:2], "^o", ("white", PAIRS), strict=False):
            points = {"color": PAIRS, "markerfacecolor": face, "linestyle": "", "label": f"exact, N = {n}"}
            left.plot(data[n]["h"], data[n]["exact"], marker, **points)
        left.legend(frameon=False, loc="lower left")
        left.set_xlabel("hit ratio h")
        left.set_ylabel("share of the work left")
        right.plot(lengths, [1 / (4 * (n + 1)) for n in lengths], color=BLACK, linewidth=1.2)
        right.plot(lengths, [data[n]["gap"] for n in lengths], "o", color=PAIRS)
        right.text(lengths[-1], data[lengths[0]]["gap"], "1 / (4 (N + 1))", ha="right", va="top")
        right.set_xscale("log")
        right.set_yscale("log")
        right.set_xlabel("prompt tokens N")
        right.set_title("largest gap, limit minus exact")
    return fig, data


def hit_tiles(n: int, hit: int, block_m: int, block_n: int) -> tuple[Figure, dict[str, int]]:
    """The tiles that a kernel executes for the suffix rows: without those no row sees, and with them.

    Args:
        n, hit: prompt tokens and hit, few enough to draw each pair.
        block_m, block_n: rows and keys of a tile; one query head per KV head.

    Returns:
        The figure, the tiles drawn as "skipping" and "masking", and "pairs", the visible pairs of the suffix rows.
    """
    visible = [[key <= query for key in range(n)] for query in range(hit, n)]
    data = {"skipping": 0, "masking": 0, "pairs": sum(map(sum, visible))}
    titles = {"skipping": "skips tiles that no row sees", "masking": "masks inside every tile"}
    with style():
        fig, axes = panels(1, 2, sharey=True)
        fig.set_size_inches(SIZE[0], 0.9 + SIZE[0] / 2 * (n - hit) / n)
        for ax, rule in zip(axes, titles, strict=True):
            for i, row in enumerate(visible):
                for key, seen in enumerate(row):
                    if seen:
                        ax.bar(key, 1, 1, i - 0.5, facecolor=PALE_PAIRS, edgecolor="white", linewidth=0.4)
            for top in range(0, n - hit, block_m):
                for start in range(0, n, block_n):
                    rows = [row[start : start + block_n] for row in visible[top : top + block_m]]
                    if rule == "masking" or any(map(any, rows)):
                        data[rule] += 1
                        edges = {"align": "edge", "fill": False, "edgecolor": PAIRS}
                        ax.bar(start - 0.5, block_m, block_n, top - 0.5, **edges)
            ax.axvline(hit - 0.5, color=BLACK, linestyle=":")
            ax.set_title(f"{titles[rule]}: {data[rule]}")
            ax.set_xlim(-0.8, max(n, -(-n // block_n) * block_n))
            ax.set_ylim(-(-(n - hit) // block_m) * block_m, -0.8)
            ax.set_aspect("equal")
            every = range(0, n, max(1, n // 6))
            ax.set_xticks(every, [key + 1 for key in every])
            ax.set_xlabel("key token")
        axes[0].set_yticks(range(0, n - hit, block_m), [hit + i + 1 for i in range(0, n - hit, block_m)])
        axes[0].set_ylabel("query row")
    return fig, data


def tile_deviation(
    lengths: Sequence[int], hit_ratios: Sequence[float], block: int
) -> tuple[Figure, dict[float, list[float]]]:
    """How far executed square tiles fall below 1 - h^2, relatively, over the prompt length.

    Args:
        lengths: prompt lengths N, rising, such that h N is a multiple of `block` for each h.
        hit_ratios: each strictly between 0 and 1; at most four.
        block: rows and keys of a tile.

    Returns:
        The figure, and per h the relative deviations at each length.
    """
    data = {
        h: [float(prefix.tile_remaining(n, round(h * n), block, block)) / (1 - h * h) - 1 for n in lengths]
        for h in hit_ratios
    }
    with style():
        fig, ax = figure()
        for (h, values), look in zip(data.items(), SERIES, strict=False):
            ax.plot(lengths, [100 * x for x in values], **look)
            ax.text(lengths[0] / 1.06, 100 * values[0], f"h = {h:g}", color=look["color"], ha="right", va="center")
        ax.axhline(-5, color=GREY, linewidth=1.0)
        ax.text(lengths[-1], -5, "5%", color=GREY, va="top", ha="right")
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [str(n) for n in lengths])
        ax.minorticks_off()
        ax.set_xlim(lengths[0] / 1.9, lengths[-1] * 1.1)
        ax.set_xlabel("prompt tokens N")
        ax.set_ylabel("executed tiles against $1 - h^2$, %")
        ax.set_title(f"tiles of {block} x {block}")
    return fig, data


def measured_laws(
    interaction: Mapping[float, Ratio], linear: Mapping[float, Ratio]
) -> tuple[Figure, dict[str, list[tuple[float, float, float]]]]:
    """Measured time ratios over the hit ratio, with the spread of the clock, on the two laws.

    Args:
        interaction: of attention over the suffix, per hit ratio.
        linear: of a layer over the suffix rows, per hit ratio.

    Returns:
        The figure, and per series (h, measured, law) at each step.
    """
    laws = {"attention": (interaction, lambda h: 1 - h * h), "linear layer": (linear, lambda h: 1 - h)}
    data = {name: [(h, r.median, law(h)) for h, r in found.items()] for name, (found, law) in laws.items()}
    fine = [i / 100 for i in range(101)]
    with style():
        fig, ax = figure()
        for (found, law), look in zip(laws.values(), looks(PAIRS, GREEN), strict=True):
            ax.plot(fine, [law(h) for h in fine], linewidth=1.0, **look | {"marker": ""})
            middle = [r.median for r in found.values()]
            spread = [[r.median - r.low for r in found.values()], [r.high - r.median for r in found.values()]]
            ax.errorbar(list(found), middle, spread, capsize=3, **look | {"linestyle": ""})
        ax.text(0.52, 0.84, "interactions, on $1 - h^2$", color=PAIRS)
        ax.text(0.48, 0.28, "linear layer, on $1 - h$", color=GREEN, ha="right")
        ax.set_ylim(0, 1.25)
        ax.set_xlabel("hit ratio h")
        ax.set_ylabel("time, share of the time at h = 0")
        ax.set_title("points: median over rounds, bars: quartiles, lines: the laws")
    return fig, data
