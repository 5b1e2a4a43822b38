"""Pictures of speculative rounds: the path of a draft tree that a model agrees with, and what each round reads.

What is drawn was computed before; nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cascade_lab.pictures.style import BLACK, BLUE, BOX, GREY, PALE_READS, READS, figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cascade_lab.drafts import DraftTree


# up to four ways to get tokens, all of them reads
_WAYS = (
    {"facecolor": READS},
    {"facecolor": "white", "hatch": "////"},
    {"facecolor": "white", "hatch": "...."},
    {"facecolor": PALE_READS},
)


def accepted_path(
    tree: DraftTree, drafted: Sequence[str], said: Sequence[str], accepted: Sequence[int]
) -> tuple[Figure, dict[str, list]]:
    """A draft tree with the words of its nodes, what the model says behind each, and the path that agrees.

    Args:
        tree: drawn at the nodes' depths, left to right.
        drafted: the word of each node.
        said: the model's word behind each node.
        accepted: nodes of the path from the prefix down.

    Returns:
        The figure, and "accepted" words, "next" as a list of the model's word behind them, and "refused" nodes.
    """
    data = {
        "accepted": [drafted[node] for node in accepted],
        "next": [said[accepted[-1]]] if accepted else [],
        "refused": sorted(set(range(tree.size)) - set(accepted)),
    }
    visible = tree.dense_mask()
    line = {leaf: float(i) for i, leaf in enumerate(tree.leaves)}
    height = [sum(y := [line[b] for b in tree.leaves if visible[b, n]]) / len(y) for n in range(tree.size)]
    depth = [int(row.sum()) - 1 for row in visible]
    with style():
        fig, ax = figure((6.4, 2.6))
        for node, parent in enumerate(tree.parents):
            if parent >= 0:
                taken = node in accepted
                ends = [depth[parent], depth[node]], [height[parent], height[node]]
                ax.plot(*ends, color=BLUE if taken else GREY, linewidth=2.4 if taken else 0.9, zorder=1)
        for node in range(tree.size):
            taken = node in accepted
            box = BOX | {"edgecolor": BLUE if taken else GREY, "linewidth": 2.0 if taken else 0.8}
            spot = depth[node], height[node]
            ax.text(*spot, drafted[node], ha="center", va="center", bbox=box, color=BLACK if taken else GREY)
            ax.annotate(
                f"says {said[node]}",
                spot,
                (0, -19),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
                color=BLUE if taken else GREY,
            )
        ax.set_xlim(-0.4, tree.depth - 0.6)
        ax.set_ylim(len(line) - 0.4, -0.6)
        ax.axis("off")
    return fig, data


def round_reads(
    rounds: Sequence[Mapping[str, int]], tokens: Sequence[int]
) -> tuple[Figure, dict[str, list[int] | dict[str, float]]]:
    """Tokens read in one layer by every round, a bar for each way to get its new tokens.

    Args:
        rounds: per round the reads of each way, the same ways in all, at most four.
        tokens: new tokens of each round.

    Returns:
        The figure, and "tokens" and "per token", each way's reads over all rounds for each new token.
    """
    ways = list(rounds[0])
    total = sum(tokens)
    data = {
        "tokens": list(tokens),
        "per token": {way: sum(found[way] for found in rounds) / total for way in ways},
    }
    width = 0.8 / len(ways)
    with style():
        fig, ax = figure()
        for i, (way, look) in enumerate(zip(ways, _WAYS, strict=False)):
            places = [r + (i - (len(ways) - 1) / 2) * width for r in range(len(rounds))]
            ax.bar(
                places,
                [found[way] for found in rounds],
                width * 0.92,
                edgecolor=READS,
                **look,
                label=f"{way}: {data['per token'][way]:.1f} per new token",
            )
        ax.set_xticks(range(len(rounds)), [f"{n} tokens" for n in tokens])
        ax.set_xlabel("new tokens of each round, all requests")
        ax.set_ylabel("tokens read per layer and KV head")
        ax.set_ylim(0, 1.45 * max(max(found.values()) for found in rounds))
        ax.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    return fig, data
