"""Pictures and tables of notebook 02: draft trees, which program reads which token, and when a cascade pays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cascade_lab import paging
from cascade_lab.pictures.style import (
    BLACK,
    BLUE,
    BOX,
    GREY,
    PALE,
    PALE_READS,
    READS,
    SERIES,
    SIZE,
    figure,
    fill_pairs,
    panels,
    runs,
    settle,
    style,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cascade_lab.drafts import DraftTree
    from cascade_lab.evidence.reads import TensorRecord
    from cascade_lab.evidence.recorded import PublishedCase
    from cascade_lab.levels import Ledger, Level
    from cascade_lab.rules import RuleRow
    from cascade_lab.trigger import Decision


def draft_tree(tree: DraftTree, prefix_len: int) -> tuple[Figure, dict[str, list]]:
    """A draft tree on its prefix, and beside it which keys each node sees.

    Args:
        tree: nodes are drawn at their depth and labelled by number and position.
        prefix_len: of the request; the prefix is one column of the mask.

    Returns:
        The figure, and "positions" [N], "edges" as (parent, node) pairs, "visible" [N][N].
    """
    visible = tree.dense_mask()
    data = {
        "positions": tree.positions(prefix_len).tolist(),
        "edges": [(parent, node) for node, parent in enumerate(tree.parents)],
        "visible": visible.tolist(),
    }
    # a leaf has a line of its own, an inner node stands in the middle of its leaves
    line = {leaf: float(i) for i, leaf in enumerate(tree.leaves)}
    line_of = [sum(y := [line[b] for b in tree.leaves if visible[b, n]]) / len(y) for n in range(tree.size)]
    depth = [p - prefix_len + 1 for p in data["positions"]]
    middle = (len(line) - 1) / 2
    small = tree.size > 32
    with style():
        fig, (left, right) = panels(1, 2, width_ratios=[1.15, 1])
        for parent, node in data["edges"]:
            start = (depth[parent], line_of[parent]) if parent >= 0 else (0, middle)
            left.plot([start[0], depth[node]], [start[1], line_of[node]], color=GREY, linewidth=1.0, zorder=1)
        left.text(0, middle, f"prefix\n{prefix_len} keys", ha="center", va="center", bbox=BOX | {"edgecolor": BLACK})
        for node in range(tree.size):
            spot = {"ha": "center", "va": "center", "fontsize": 5 if small else 9}
            left.text(depth[node], line_of[node], node, bbox=BOX | {"edgecolor": BLUE}, color=BLUE, **spot)
        left.set_xlim(-0.6, tree.depth + 0.5)
        left.set_ylim(len(line) - 0.5, -0.5)
        steps = range(1, tree.depth + 1)
        left.set_xticks(steps, [f"{prefix_len + step - 1}" for step in steps])
        left.set_xlabel("position in the sequence")
        left.set_yticks([])
        left.spines["left"].set_visible(False)
        fill_pairs(right, [[True, *row] for row in data["visible"]])
        ticks = range(0, tree.size, 1 if tree.size <= 16 else 8)
        right.set_xticks([0, *(t + 1 for t in ticks)], ["L", *ticks], fontsize=8)
        right.set_yticks(ticks, ticks, fontsize=8)
        right.set_xlabel("key: prefix of L, then draft nodes")
        right.set_ylabel("row of node")
        right.set_title(f"{int(visible.sum())} of {tree.size**2} draft pairs visible")
    return fig, data


def page_tables(levels: Sequence[Level]) -> str:
    """The page tables of a plan as text, one line per request of each level: its rows, its tokens and its pages."""
    lines = []
    for level in levels:
        starts, size = level.cu_seqlens_q.tolist(), level.page_size
        for r, tokens in enumerate(level.cache_seqlens.tolist()):
            pages = level.page_table[r, : paging.pages_needed(tokens, size)].tolist()
            first, last = starts[r], starts[r + 1] - 1
            rows = f"rows {first} to {last}" if last > first else f"row {first}" if last == first else "no rows"
            lines.append(f"  {level.name:10}{rows:14}{tokens} tokens in pages of {size}: {pages}")
    return "\n".join(lines)


def ledger_table(plans: Mapping[str, Ledger], formulas: Mapping[str, str]) -> str:
    """The ledgers of several plans as text, itemised by level: formula, KV tokens, share and pairs.

    Args:
        plans: ledger by name.
        formulas: how a level's tokens come about, by level name.
    """
    lines = [f"{'plan':9}{'level':10}{'formula':>16}{'tokens':>8}{'share':>8}{'pairs':>8}"]
    for plan, total in plans.items():
        for part in (*total.levels, total):
            name, formula = (part.name, formulas[part.name]) if part.name else ("total", "sum")
            share = part.kv_tokens / total.kv_tokens
            lines.append(f"{plan:9}{name:10}{formula:>16}{part.kv_tokens:8}{share:8.1%}{part.pairs:8}")
    return "\n".join(lines)


def reads_table(plans: Mapping[str, Ledger], block_m: int, counted: Mapping[str, int] | None = None) -> str:
    """The three counts of reads of several plans, per KV head, beside their pairs, as text.

    Args:
        plans: ledger by name.
        block_m: packed rows of a row tile, as the launch has them.
        counted: what the kernel's read counter said of each plan; a column beside the derived one.
    """
    width = max(map(len, ("plan", *plans))) + 1
    lines = [f"{'plan':{width}}{'distinct':>10}{'per request':>13}{'per row tile':>14}"]
    lines[0] += (f"{'counted':>10}" if counted else "") + f"{'pairs':>12}"
    for plan, book in plans.items():
        tiles = f"{book.tile_tokens(block_m):14}" + (f"{counted[plan]:10}" if counted else "")
        lines.append(f"{plan:{width}}{book.kv_tokens_unique:10}{book.kv_tokens:13}{tiles}{book.pairs:12}")
    return "\n".join(lines)


def counts_table(rows: Mapping[str, Mapping[str, object]]) -> str:
    """One count per row and column as text: what several instruments say of several plans.

    Args:
        rows: by label, the counts by name of the column, the same names in each row.
    """
    width = max(map(len, rows))
    columns = list(next(iter(rows.values())))
    lines = [" " * width + "".join(f"{name:>12}" for name in columns)]
    for label, counts in rows.items():
        lines.append(f"{label:{width}}" + "".join(f"{str(counts[name]):>12}" for name in columns))
    return "\n".join(lines)


def prediction_table(decision: Decision) -> str:
    """What a trigger predicts per plan, as text: KV bytes, launches and microseconds by cause."""
    terms = ("launch", "memory", "reread", "compute", "merge")
    lines = [f"{'plan':8}{'KV MB':>8}{'launches':>10}" + "".join(f"{term:>9}" for term in terms) + f"{'total':>9}"]
    for plan, p in decision.predictions.items():
        times = "".join(f"{1e6 * seconds:9.1f}" for seconds in (*(p.terms[term] for term in terms), p.seconds))
        lines.append(f"{plan:8}{p.bytes / 1e6:8.1f}{p.launches:10}{times}")
    lines.append(f"times in us; cascade: {'yes' if decision.cascade else 'no'}; fastest plan: {decision.plan}")
    return "\n".join(lines)


def published_table(cases: Sequence[PublishedCase]) -> str:
    """Published speed-ups of cascades beside the model's, as text."""
    lines = [f"{'branches':>8}{'L':>7}{'suffix':>8}{'group':>7}{'measured':>10}{'model':>8}  the model's sign"]
    for c in cases:
        group, model = c.num_q_heads // c.num_kv_heads, c.predicted_speedup()
        sign = "right" if (model > 1) == (c.speedup > 1) else "wrong"
        shape = f"{c.branches:8}{c.prefix_len:7}{c.suffix_len:8}{group:7}"
        lines.append(f"{shape}{c.speedup:9.2f}x{model:7.2f}x  {sign}")
    return "\n".join(lines)


def rule_answers_table(rows: Sequence[RuleRow]) -> str:
    """The engines' rules beside the model over batch, topk and L, as text."""
    lines = [f"{'batch':>5}{'topk':>6}{'L':>7}{'model':>7}{'speed-up':>10}{'SGLang':>8}{'vLLM':>6}  fastest plan"]
    for row in rows:
        model, sglang, vllm = ("yes" if said else "no" for said in (row.cascade, row.sglang, row.vllm))
        shape = f"{row.batch:5}{row.topk:6}{row.prefix_len:7}"
        lines.append(f"{shape}{model:>7}{row.speedup:9.2f}x{sglang:>8}{vllm:>6}  {row.plan}")
    return "\n".join(lines)


def program_reads(
    plans: Mapping[str, TensorRecord], drafts: Sequence[int]
) -> tuple[Figure, dict[str, list[tuple[str, list[int]]]]]:
    """Which program reads which cached token, one panel per plan, as the load recorder saw it.

    Args:
        plans: the record of `k_cache` per plan; a token is one row of it, so the cache has one KV head.
        drafts: slots of draft tokens, shaded.

    Returns:
        The figure, and per plan a list of (program, slots), program being "pass p, program i".
    """
    data = {}
    for plan, record in plans.items():
        programs = record.rows_by_program()
        order = sorted({program.launch for program in programs})
        data[plan] = [
            (f"pass {order.index(program.launch) + 1}, program {program.index[0]}", rows.tolist())
            for program, rows in programs.items()
        ]
    looks = {"1": {"facecolor": "white", "hatch": "////"}, "2": {"facecolor": PALE_READS}}
    with style():
        counts = [len(programs) for programs in data.values()]
        fig, axes = panels(len(data), 1, height_ratios=[n + 1.2 for n in counts], sharex=True)
        fig.set_size_inches(SIZE[0], 0.85 + 0.13 * sum(counts) + 0.42 * len(counts))
        for ax, (plan, programs) in zip(axes, data.items(), strict=True):
            for start, length in runs(drafts):
                ax.axvspan(start - 0.5, start + length - 0.5, color=PALE, linewidth=0)
            for y, (program, slots) in enumerate(programs):
                bars = [(start - 0.5, length) for start, length in runs(slots)]
                ax.broken_barh(bars, (y - 0.36, 0.72), edgecolor=READS, **looks[program.split(",")[0][-1]])
            loads = sum(len(slots) for _, slots in programs)
            distinct = len({slot for _, slots in programs for slot in slots})
            ax.set_title(f"{plan}: {loads} tokens loaded, {distinct} distinct")
            ax.set_yticks(range(len(programs)), [program for program, _ in programs], fontsize=7)
            ax.set_ylim(len(programs) - 0.4, -0.6)
        axes[-1].set_xlabel("slot of the cached token (drafts shaded)")
        settle(fig)
    return fig, data


def read_ratio(
    prefix_lens: Sequence[int], topks: Sequence[float], steps: int, *, topk: int, other_steps: Sequence[int]
) -> tuple[Figure, dict[str, list]]:
    """The ratio topk (L + S) / (L + topk S) of reads, naive over cascade, as a surface and as cuts through it.

    Args:
        prefix_lens: L, rising, at least 1.
        topks: of the surface, rising from 1 and dense enough to draw; fractions lie between the branch counts.
        steps: S of the surface.
        topk: of the cuts.
        other_steps: S of each of three cuts.

    Returns:
        The figure, "surface" [len(topks)][len(prefix_lens)] and "cuts" [len(other_steps)][len(prefix_lens)].
    """
    data = {
        "surface": [[_read_ratio(L, k, steps) for L in prefix_lens] for k in topks],
        "cuts": [[_read_ratio(L, topk, S) for L in prefix_lens] for S in other_steps],
    }
    with style():
        fig, (left, right) = panels(1, 2, width_ratios=[1.1, 1])
        heights = [h for h in (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if h < max(topks)]
        lines = left.contour(prefix_lens, topks, data["surface"], levels=heights, colors=READS, linewidths=1.2)
        left.clabel(lines, fmt="%g", fontsize=8)
        left.set_xscale("log")
        left.set_yscale("log", base=2)
        powers = [2**n for n in range(int(math.log2(max(topks))) + 1)]
        left.set_yticks(powers, [str(k) for k in powers])
        left.minorticks_off()
        left.set_xlabel("prefix length L")
        left.set_ylabel("topk")
        left.set_title(f"ratio of reads at S = {steps}")
        right.axhline(topk, color=BLACK, linestyle=":", linewidth=1.2)
        right.text(prefix_lens[0], topk, f"limit topk = {topk}", va="bottom")
        heights = (0.35, 0.5, 0.65)
        for S, cut, look, height in zip(other_steps, data["cuts"], SERIES[:3], heights, strict=True):
            right.plot(prefix_lens, cut, color=READS, linestyle=look["linestyle"])
            near = min(range(len(cut)), key=lambda i: abs(cut[i] - 1 - height * (topk - 1)))
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            right.text(prefix_lens[near], cut[near], f"S = {S}", color=READS, ha="center", fontsize=8, bbox=box)
        right.set_xscale("log")
        right.set_ylim(0.9, topk * 1.12)
        right.set_xlabel("prefix length L")
        right.set_title(f"ratio of reads at topk = {topk}")
    return fig, data


def break_even(
    topks: Sequence[int], curves: Mapping[str, Sequence[int | None]], ceiling: int
) -> tuple[Figure, dict[str, list[int | None]]]:
    """Prefix length from which a cascade is predicted to be faster, over topk; one series per label, at most three.

    Args:
        topks: rising, at least 2.
        curves: per label the break-even length at each topk, None where the cascade never wins up to `ceiling`.
        ceiling: the longest prefix that was asked about.

    Returns:
        The figure, and the curves as given.
    """
    data = {label: list(lengths) for label, lengths in curves.items()}
    with style():
        fig, ax = figure()
        shown = [length for lengths in data.values() for length in lengths if length is not None]
        for (label, lengths), look in zip(data.items(), SERIES, strict=False):
            ax.plot(topks, [math.nan if n is None else max(n, 1) for n in lengths], **look)
            never = [k for k, n in zip(topks, lengths, strict=True) if n is None]
            ax.plot(never, [ceiling] * len(never), color=look["color"], marker="x", linestyle="")
            alive = [(k, n) for k, n in zip(topks, lengths, strict=True) if n is not None]
            place = alive[-1] if alive else (topks[-1], ceiling)
            ax.text(place[0] * 1.06, max(place[1], 1), label, color=look["color"], va="center")
        if len(shown) < len(topks) * len(data):
            ax.text(topks[0], ceiling * 0.8, f"x: never up to {ceiling}", va="top")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(topks, [str(k) for k in topks])
        ax.set_xlim(topks[0] / 1.1, topks[-1] * 2.2)
        ax.set_xlabel("topk")
        ax.set_ylabel("break-even prefix length L")
    return fig, data


def published_speedups(cases: Mapping[str, Sequence[tuple[str, float, float]]]) -> tuple[Figure, dict[str, list]]:
    """Measured speed-ups of cascades over the ratio of reads, with the line on which bytes would be time.

    The losing cases and the best of each source are labelled.

    Args:
        cases: per source (at most four) a list of (label, ratio of reads, ratio of times), each above 0.

    Returns:
        The figure, and the cases as given.
    """
    data = {source: [tuple(case) for case in points] for source, points in cases.items()}
    with style():
        fig, ax = figure()
        ratios = [x for points in data.values() for case in points for x in case[1:]]
        low, high = min(ratios) / 1.3, max(ratios) * 1.5
        ax.plot([1, high], [1, high], color=BLACK, linestyle=":", linewidth=1.2)
        ax.text(high**0.55, high**0.55 * 1.25, "time falls as bytes do", ha="right", va="bottom")
        ax.axhspan(low, 1, facecolor="white", edgecolor="#BBBBBB", hatch="//", linewidth=0)
        ax.text(1.05, low * 1.3, "the cascade loses", va="bottom", backgroundcolor="white")
        for (source, points), look in zip(data.items(), SERIES, strict=False):
            x, y = [case[1] for case in points], [case[2] for case in points]
            ax.plot(x, y, **look | {"linestyle": ""}, label=source)
            for label, right, up in points:
                if up < 1 or up == max(y):
                    place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
                    ax.annotate(label, (right, up), fontsize=7, color=look["color"], **place)
        ax.legend(frameon=False, fontsize=8, loc="upper left")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(0.9, high * 1.3)
        ax.set_ylim(low, high)
        ax.set_xlabel("ratio of reads, plain over cascade")
        ax.set_ylabel("ratio of times, plain over cascade")
    return fig, data


def cache_traffic(record: Mapping, batch: int) -> tuple[Figure, dict[str, dict[int, dict]]]:
    """Bytes of K and V into the multiprocessors, and from DRAM under the modelled L2, over those that are distinct.

    One column per prefix length and plan: a bar at what the multiprocessors load, a mark per capacity at the least and
    at the most that any drift and number of programs side by side reads from DRAM, programs one at a time left out.

    Args:
        record: figures/measured/l2_model.json.
        batch: requests; the record's prefix lengths with that many are drawn.

    Returns:
        The figure, and per plan and prefix length "volume", and "dram" as (least, most) by capacity, each in distinct
        bytes.
    """
    data: dict[str, dict[int, dict]] = {}
    for row in (row for row in record["rows"] if row["batch"] == batch):
        spread: dict[int, list[float]] = {}
        for found in row["dram"]:
            if found["slots"] > 1:
                spread.setdefault(found["capacity"], []).append(found["K, V"] / row["distinct"])
        data.setdefault(row["plan"], {})[row["length"]] = {
            "volume": row["volume"]["K, V"] / row["distinct"],
            "dram": {capacity: (min(ratios), max(ratios)) for capacity, ratios in spread.items()},
        }
    lengths = sorted({length for points in data.values() for length in points})
    capacities = sorted(record["scale"]["capacities"], reverse=True)
    full = record["scale"]["one in"] / 2**20
    with style():
        fig, ax = figure()
        ax.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        for p, (plan, points) in enumerate(data.items()):
            for length, point in points.items():
                middle = lengths.index(length) + (p - (len(data) - 1) / 2) * 0.3
                ax.plot([middle - 0.12, middle + 0.12], [point["volume"]] * 2, color=BLACK, linewidth=2.4)
                ax.text(middle, point["volume"] + 0.07, plan, ha="center", va="bottom", fontsize=7)
                for c, (capacity, look) in enumerate(zip(capacities, SERIES, strict=False)):
                    x = middle + (c - (len(capacities) - 1) / 2) * 0.07
                    label = f"DRAM, L2 of {capacity * full:g} MiB" if length == lengths[0] and p == 0 else None
                    options = {"color": READS, "marker": look["marker"], "linewidth": 1.0, "markersize": 3.5}
                    ax.plot([x, x], point["dram"][capacity], label=label, **options)
        ax.plot([], [], color=BLACK, linewidth=2.4, label="L2 to multiprocessors")
        ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(0.0, 0.55))
        ax.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        ax.set_xlim(-0.55, len(lengths) - 0.45)
        ax.set_ylim(0, max(point["volume"] for points in data.values() for point in points.values()) + 0.5)
        ax.set_xlabel("prefix length L")
        ax.set_ylabel("bytes of K and V / distinct bytes")
        ax.set_title(f"a model of the L2, not a measurement: batch {batch}, topk = {record['shape']['topk']}")
    return fig, data


def _read_ratio(prefix_len: int, topk: float, steps: int) -> float:
    return topk * (prefix_len + steps) / (prefix_len + topk * steps)
