"""The picture of the whole collection: a cascade saves reads, a prefix hit saves pairs, and neither saves the other.

Above is what changes, who reads which cached token and which rows of the triangle are left; below are the two ledgers,
as shares of those before the change. Reads are reads per request; what a kernel with several row tiles loads is not
drawn here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cascade_lab import drafts, prefix
from cascade_lab.levels import ledger
from cascade_lab.pictures.style import BLACK, BOX, GREY, PAIRS, PALE, PALE_READS, READS, SIZE, panels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# what each bar of a plan reads, of which one is drawn for every branch
_PARTS = {"naive": (("prefix", "draft"),), "cascade": (("prefix",), ("draft",))}
_READS, _PAIRS = {"edgecolor": READS, "hatch": "////"}, {"edgecolor": PAIRS, "hatch": "...."}


def who_reads(prefix_len: int, topk: int, steps: int) -> tuple[Figure, dict[str, list[list[str]]]]:
    """The cached tokens that each request of a plan reads, as bars: the naive plan beside the cascade.

    Args:
        prefix_len: tokens of the shared prefix.
        topk, steps: branches, and draft tokens of each.

    Returns:
        The figure, and per plan what each bar reads, such as ["prefix", "draft"].
    """
    with style():
        fig, axes = panels(1, 2, (SIZE[0], 0.8 + 0.3 * (topk + 1)), sharey=True)
        data = {plan: _bars(ax, plan, prefix_len, topk, steps) for ax, plan in zip(axes, _PARTS, strict=True)}
    return fig, data


def two_savings(
    prefix_len: int, topk: int, steps: int, n: int, hit: int
) -> tuple[Figure, dict[str, dict[str, float] | list[list[str]]]]:
    """Who reads what under naive and cascade, the triangle with the cached rows, and below each its two ledgers.

    Args:
        prefix_len, topk, steps: of the verified drafts, few enough to draw.
        n, hit: tokens of the prompt and of the hit, few enough to draw each pair.

    Returns:
        The figure, what each bar of "naive" and "cascade" reads, and for "saved by a cascade" and "saved by a hit" the
        shares of "reads" (per request) and "pairs" that are left.
    """
    batch = drafts.VerifyBatch([prefix_len], [drafts.DraftTree.branches(topk, steps)], rows="branch")
    books = {
        "saved by a cascade": [ledger(batch.levels(plan)) for plan in _PARTS],
        "saved by a hit": [ledger(prefix.prefix_hit_levels([n], [cached])) for cached in (0, hit)],
    }
    with style():
        fig, axes = panels(3, 2, (8.4, 6.2), height_ratios=[1, 0.75, 0.85])
        data = {plan: _bars(ax, plan, prefix_len, topk, steps) for ax, plan in zip(axes[:2, 0], _PARTS, strict=True)}
        grid = axes[0, 1].get_gridspec()
        for ax in axes[:2, 1]:
            ax.remove()
        _triangle(fig.add_subplot(grid[:2, 1]), n, hit)
        for ax, (name, (before, after)) in zip(axes[2], books.items(), strict=True):
            data[name] = {
                "reads": after.kv_tokens / before.kv_tokens,
                "pairs": after.pairs / before.pairs,
            }
            _shares(ax, data[name])
        axes[2, 0].set_title("a cascade saves reads, and computes every pair", weight="bold")
        axes[2, 1].set_title("a prefix hit saves pairs, and reads every token", weight="bold")
    return fig, data


def _bars(ax: Axes, plan: str, prefix_len: int, topk: int, steps: int) -> list[list[str]]:
    """One bar per request of a plan over the tokens that it reads; what the bars read."""
    start, width = {"prefix": 0, "draft": prefix_len}, {"prefix": prefix_len, "draft": steps}
    once, each = _PARTS[plan][:-1], _PARTS[plan][-1]
    bars = [list(parts) for parts in (*once, *[each] * topk)]
    branch = -len(once)
    for y, parts in enumerate(bars):
        for part in parts:
            look = _READS if part == "prefix" else _READS | {"facecolor": PALE_READS, "hatch": ""}
            ax.barh(y, width[part], 0.72, start[part], **{"facecolor": "white", "linewidth": 0.8} | look)
        name = "all branches" if branch < 0 else f"branch {branch}"
        ax.text(-0.02 * prefix_len, y, name, ha="right", va="center", fontsize=8)
        branch += 1
    reads = sum(width[part] for parts in bars for part in parts)
    formula = f"{topk} × ({prefix_len} + {steps})" if plan == "naive" else f"{prefix_len} + {topk} × {steps}"
    ax.set_title(f"{plan}: {formula} = {reads} tokens read")
    ax.set_xticks([prefix_len / 2, prefix_len + steps / 2], [f"prefix, {prefix_len}", f"draft, {steps}"], fontsize=8)
    ax.tick_params(length=0)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.set_xlim(-0.3 * (prefix_len + steps), 1.12 * (prefix_len + steps))
    ax.set_ylim(len(bars) - 0.5, -0.5)
    return bars


def _triangle(ax: Axes, n: int, hit: int) -> None:
    for query in range(n):
        look = {"edgecolor": GREY} if query < hit else _PAIRS
        face = PALE if query < hit else "white"
        for key in range(query + 1):
            ax.bar(key, 1, 1, query - 0.5, **{"facecolor": face, "linewidth": 0.6} | look)
    ax.plot([-0.6, n - 0.4], [hit - 0.5] * 2, color=BLACK)
    left, all_pairs = prefix.interactions(n, hit), prefix.interactions(n)
    spots = (
        (hit / 3 - 0.3, 2 * hit / 3, all_pairs - left, GREY),
        (n * 0.4 - 0.5, (n + hit) / 2 - 0.5, left, PAIRS),
    )
    for x, y, pairs, colour in spots:
        ax.text(x, y, pairs, color=colour, ha="center", va="center", weight="bold", bbox=BOX | {"edgecolor": colour})
    words = ((hit / 2 - 0.5, f"{hit} cached rows:\n{all_pairs - left} pairs\nare not computed", GREY),)
    for y, text, colour in words:
        ax.text(hit + 0.3, y - 0.35, text, color=colour, va="center", fontsize=8)
    ax.set_title(f"prefix hit, {hit} of {n} tokens: {left} of {all_pairs} pairs are left")
    ax.set_xlim(-0.6, n - 0.3)
    ax.set_ylim(n - 0.4, -0.6)
    ax.set_aspect("equal")
    ax.set_xticks(range(n), range(1, n + 1), fontsize=8)
    ax.set_yticks(range(n), range(1, n + 1), fontsize=8)
    ax.set_xlabel("key token")
    ax.set_ylabel("query row")


def _shares(ax: Axes, shares: dict[str, float]) -> None:
    looks = {"reads": (READS, _READS), "pairs": (PAIRS, _PAIRS)}
    for y, (name, share) in enumerate(shares.items()):
        colour, look = looks[name]
        ax.barh(y, 1, 0.6, facecolor=PALE, edgecolor=GREY, linewidth=0.6)
        ax.barh(y, share, 0.6, facecolor="white", **look)
        spot = {"color": colour, "weight": "bold", "va": "center"}
        ax.text(1.02, y, f"{share:.0%}", **spot)
        ax.text(-0.02, y, name, ha="right", **spot)
    ax.set_xlim(-0.3, 1.2)
    ax.set_ylim(1.6, -0.6)
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
