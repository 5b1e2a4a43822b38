"""Pictures of work and bytes shared out to ranks.

A prompt's causal triangle is cut by rows, so its slices are of unequal area; a merge sends states, whose number knows
nothing of the context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cascade_lab.pictures.style import (
    AREAS,
    BLACK,
    GREEN,
    PAIRS,
    PALE_PAIRS,
    PURPLE,
    READS,
    figure,
    looks,
    panels,
    style,
)
from cascade_lab.sharding import rank_pairs, split_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def triangle_cut(n: int, world_size: int, layouts: Sequence[str]) -> tuple[Figure, dict[str, tuple[int, ...]]]:
    """The causal triangle of n rows, each row's squares in the hatch of the rank that computes it.

    Args:
        n: rows, at most a few dozen.
        world_size: ranks, at most six.
        layouts: of `split_tokens`, one panel each.

    Returns:
        The figure, and per layout the pairs of each rank.
    """
    data = {layout: rank_pairs(n, world_size, layout) for layout in layouts}
    with style():
        fig, (axes,) = panels(1, len(layouts), squeeze=False)
        for ax, layout in zip(axes, layouts, strict=True):
            for rank, slices in enumerate(split_tokens(n, world_size, layout)):
                _, hatch = AREAS[rank]
                for start, stop in slices:
                    # the staircase of rows start to stop - 1, from the first key to the diagonal
                    corners = [
                        (0, start),
                        *((t + 1, t + step) for t in range(start, stop) for step in (0, 1)),
                        (0, stop),
                    ]
                    ax.fill(
                        *zip(*corners, strict=True),
                        facecolor="white" if hatch else PALE_PAIRS,
                        edgecolor=PAIRS,
                        hatch=hatch,
                        linewidth=0.8,
                    )
                    ax.annotate(
                        f"rank {rank}",
                        (stop, (start + stop) / 2),
                        (6, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=8,
                    )
            ax.set_xlim(0, n * 1.16)
            ax.set_ylim(n, 0)
            ax.set_aspect("equal")
            ax.spines["left"].set_visible(False)
            ax.spines["bottom"].set_visible(False)
            ax.set_xticks([])
            ax.set_yticks([])
            ax.set_xlabel("keys")
            ax.set_ylabel("rows")
            ax.set_title(f"{layout}: {', '.join(map(str, data[layout]))}")
    return fig, data


def bytes_by_context(
    contexts: Sequence[int], saved_per_token: float, sent: Mapping[str, float]
) -> tuple[Figure, dict[str, list[float] | dict[str, float]]]:
    """Bytes that a rank no longer reads, rising with the context, against the bytes it sends for a merge, which do not.

    Args:
        contexts: tokens per request, rising, above 0.
        saved_per_token: KV bytes per token of context that other ranks read instead.
        sent: name of an algorithm to the bytes that a rank sends, at most three.

    Returns:
        The figure, and "not read" per context with "break-even" contexts by algorithm, where both are equal.
    """
    saved = [saved_per_token * n for n in contexts]
    even = {name: count / saved_per_token for name, count in sent.items()}
    with style():
        fig, ax = figure()
        ax.plot(contexts, saved, color=READS)
        middle = len(contexts) * 3 // 5
        at = contexts[middle], saved[middle]
        ax.annotate("KV bytes not read", at, (-8, 4), textcoords="offset points", ha="right", color=READS)
        for (name, count), look in zip(sent.items(), looks(BLACK, GREEN, PURPLE), strict=False):
            ax.axhline(count, color=look["color"], linestyle=look["linestyle"], label=f"sent by {name}")
            ax.plot([even[name]], [count], "o", color=look["color"])
        ax.legend(frameon=False, fontsize=8, loc="upper left")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlim(contexts[0], contexts[-1])
        ax.set_xlabel("context, tokens per request")
        ax.set_ylabel("bytes per rank and request")
    return fig, {"not read": saved, "break-even": even}
