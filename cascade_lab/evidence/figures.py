"""Pictures: one style and one function per picture.

A function draws one figure and returns it with the numbers behind it, so that a test judges numbers and never pixels.
`show` puts a figure into the notebook with its alt text, and into files where CASCADE_LAB_FIGURES names a folder.
Nothing that computes imports this module, and matplotlib is imported by the first call.
"""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cascade_lab import paging, prefix, states

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cascade_lab.drafts import DraftTree
    from cascade_lab.evidence.reads import TensorRecord
    from cascade_lab.evidence.timing import Ratio
    from cascade_lab.levels import Ledger, Level
    from cascade_lab.regions import Region
    from cascade_lab.trigger import Decision, PublishedCase, RuleRow

FOLDER = "CASCADE_LAB_FIGURES"
SIZE = (6.4, 3.6)
# Okabe and Ito's colours; every series also has its own line style and marker, every area its own hatch
BLUE, VERMILLION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
BLACK, GREY = "#000000", "#666666"
_BOX = {"boxstyle": "round,pad=0.25", "facecolor": "white"}
SERIES = {
    "float32": {"color": BLUE, "linestyle": "-", "marker": "o"},
    "float16": {"color": GREEN, "linestyle": "--", "marker": "s"},
    "bfloat16": {"color": VERMILLION, "linestyle": "-.", "marker": "^"},
}
# colour and line of up to six laws in one picture
_LINES = ((BLUE, "-"), (VERMILLION, "--"), (GREEN, "-."), (PURPLE, ":"), (BLACK, (0, (6, 1.5))), (ORANGE, "-"))


def style() -> AbstractContextManager[None]:
    """The style of every figure, as a context: opaque white, one size, and files without dates or random ids."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "figure.figsize": SIZE,
            "figure.dpi": 110,
            "figure.constrained_layout.use": True,
            "figure.facecolor": "white",
            "axes.facecolor": "white",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "axes.titlelocation": "left",
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "hatch.linewidth": 0.6,
            "lines.linewidth": 1.6,
            "lines.markersize": 4.5,
            "savefig.dpi": 110,
            "savefig.facecolor": "white",
            "svg.hashsalt": "cascade-lab",
        }
    )


def show(fig: Figure, name: str | None, *, alt: str, caption: str) -> None:
    """Display a figure with its caption, save it if a folder is set, and release it.

    Args:
        fig: a figure of this module.
        name: file name without extension; None for a picture that no two runs draw alike, which goes into no file.
        alt: what a reader who cannot see the picture needs to know; stored as `alt` in the output's image metadata.
        caption: one Markdown sentence that states the reading.

    With the environment variable CASCADE_LAB_FIGURES set, `name.svg` and `name.png` are written into that folder.

    Raises:
        ValueError: an empty alt text or caption.
    """
    if not alt.strip() or not caption.strip():
        raise ValueError("alt, caption: expected a text each, given an empty one")
    from IPython.display import display

    png = _render(fig, "png")
    folder = os.environ.get(FOLDER)
    if folder and name is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{name}.png").write_bytes(png)
        Path(folder, f"{name}.svg").write_bytes(_render(fig, "svg"))
    fig.clear()
    image = {"image/png": base64.b64encode(png).decode(), "text/plain": alt}
    display(image, metadata={"image/png": {"alt": alt}}, raw=True)
    display({"text/markdown": caption, "text/plain": caption}, raw=True)


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
        fig, ax = _figure()
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
            first, count = max(_runs([i for i, right in enumerate(close) if right]), key=lambda run: run[1])
            reach[name] = levels[first], levels[first + count - 1]
    with style():
        fig, ax = _figure()
        ax.plot(levels, data["shifted"], color=BLACK, linestyle=":", linewidth=1.2)
        for name, y in (("float32", 0.36), ("float16", 0.18)):
            look = SERIES[name] | {"marker": ""}
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
    data: dict[str, list[float]] = {name: [] for name in SERIES}
    for parts in splits:
        cuts = list(zip(scores.tensor_split(parts, 1), values.tensor_split(parts), strict=True))
        # [T, S, 1, D], [T, S, 1]
        o = torch.stack([s.softmax(1) @ v for s, v in cuts], 1)[:, :, None]
        lse = torch.stack([s.logsumexp(1) for s, _ in cuts], 1)[:, :, None].float()
        for name in SERIES:
            partial = o.to(getattr(torch, name))
            merged = states.merge_states(partial, lse, out_dtype=torch.float32, backend=backend).o[:, 0]
            data[name].append(float((merged.double() - whole).abs().max()))
    with style():
        fig, ax = _figure()
        for name, look in SERIES.items():
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
        fig, (left, right) = _panels(1, 2, width_ratios=[1.15, 1])
        for parent, node in data["edges"]:
            start = (depth[parent], line_of[parent]) if parent >= 0 else (0, middle)
            left.plot([start[0], depth[node]], [start[1], line_of[node]], color=GREY, linewidth=1.0, zorder=1)
        left.text(0, middle, f"prefix\n{prefix_len} keys", ha="center", va="center", bbox=_BOX | {"edgecolor": BLACK})
        for node in range(tree.size):
            spot = {"ha": "center", "va": "center", "fontsize": 5 if small else 9}
            left.text(depth[node], line_of[node], node, bbox=_BOX | {"edgecolor": BLUE}, color=BLUE, **spot)
        left.set_xlim(-0.6, tree.depth + 0.5)
        left.set_ylim(len(line) - 0.5, -0.5)
        steps = range(1, tree.depth + 1)
        left.set_xticks(steps, [f"{prefix_len + step - 1}" for step in steps])
        left.set_xlabel("position in the sequence")
        left.set_yticks([])
        left.spines["left"].set_visible(False)
        _fill_cells(right, [[True, *row] for row in data["visible"]])
        ticks = range(0, tree.size, 1 if tree.size <= 16 else 8)
        right.set_xticks([0, *(t + 1 for t in ticks)], ["P", *ticks], fontsize=8)
        right.set_yticks(ticks, ticks, fontsize=8)
        right.set_xlabel("key: prefix P, then draft nodes")
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
            rows = "rows " + ", ".join(map(str, range(starts[r], starts[r + 1])))
            lines.append(f"  {level.name:10}{rows:12}{tokens} tokens in pages of {size}: {pages}")
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


def rule_table(rows: Sequence[RuleRow]) -> str:
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
    looks = {"1": (BLUE, ""), "2": (VERMILLION, "//")}
    with style():
        counts = [len(programs) for programs in data.values()]
        fig, axes = _panels(len(data), 1, height_ratios=[n + 1.2 for n in counts], sharex=True)
        fig.set_size_inches(SIZE[0], 0.85 + sum(0.13 * n + 0.42 for n in counts))
        for ax, (plan, programs) in zip(axes, data.items(), strict=True):
            for start, length in _runs(drafts):
                ax.axvspan(start - 0.5, start + length - 0.5, color="#E6E6E6", linewidth=0)
            for y, (program, slots) in enumerate(programs):
                colour, hatch = looks[program.split(",")[0][-1]]
                bars = [(start - 0.5, length) for start, length in _runs(slots)]
                ax.broken_barh(bars, (y - 0.36, 0.72), facecolor="white", edgecolor=colour, hatch=hatch)
            loads = sum(len(slots) for _, slots in programs)
            distinct = len({slot for _, slots in programs for slot in slots})
            ax.set_title(f"{plan}: {loads} tokens loaded, {distinct} distinct")
            ax.set_yticks(range(len(programs)), [program for program, _ in programs], fontsize=7)
            ax.set_ylim(len(programs) - 0.4, -0.6)
        axes[-1].set_xlabel("slot of the cached token (drafts shaded)")
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
        fig, (left, right) = _panels(1, 2, width_ratios=[1.1, 1])
        heights = [h for h in (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if h < max(topks)]
        lines = left.contour(prefix_lens, topks, data["surface"], levels=heights, colors=BLUE, linewidths=1.2)
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
        for S, cut, look, height in zip(other_steps, data["cuts"], SERIES.values(), heights, strict=True):
            right.plot(prefix_lens, cut, **look | {"marker": ""})
            near = min(range(len(cut)), key=lambda i: abs(cut[i] - 1 - height * (topk - 1)))
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            right.text(prefix_lens[near], cut[near], f"S = {S}", color=look["color"], ha="center", fontsize=8, bbox=box)
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
        fig, ax = _figure()
        shown = [length for lengths in data.values() for length in lengths if length is not None]
        for (label, lengths), look in zip(data.items(), SERIES.values(), strict=False):
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
    looks = [*SERIES.values(), {"color": BLACK, "marker": "D"}]
    with style():
        fig, ax = _figure()
        ratios = [x for points in data.values() for case in points for x in case[1:]]
        low, high = min(ratios) / 1.3, max(ratios) * 1.5
        ax.plot([1, high], [1, high], color=BLACK, linestyle=":", linewidth=1.2)
        ax.text(high**0.55, high**0.55 * 1.25, "time falls as bytes do", ha="right", va="bottom")
        ax.axhspan(low, 1, facecolor="white", edgecolor="#BBBBBB", hatch="//", linewidth=0)
        ax.text(1.05, low * 1.3, "the cascade loses", va="bottom", backgroundcolor="white")
        for (source, points), look in zip(data.items(), looks, strict=False):
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


def hit_triangle(n: int, hit: int) -> tuple[Figure, dict[str, int]]:
    """The query-key pairs of a dense causal prompt, cut at the hit: saved triangle, rectangle and triangle left.

    Args:
        n: prompt tokens, few enough to draw each pair.
        hit: cached tokens, 0 < hit < n.

    Returns:
        The figure, and the pairs drawn as "saved", "rectangle" and "triangle".
    """
    parts = {
        "saved": ("#E6E6E6", GREY, ""),
        "rectangle": ("white", BLUE, "////"),
        "triangle": ("white", VERMILLION, ".."),
    }
    data = dict.fromkeys(parts, 0)
    with style():
        fig, ax = _figure()
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
            box = _BOX | {"edgecolor": colour}
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
        fig, (left, right) = _panels(1, 2, width_ratios=[1.25, 1])
        left.plot(fine, [1 - h * h for h in fine], color=BLACK)
        left.plot(fine, [1 - h for h in fine], color=GREY, linestyle="--")
        left.text(0.62, 0.66, "$1 - h^2$", color=BLACK)
        left.text(0.18, 0.55, "$1 - h$", color=GREY)
        for n, colour, marker in zip(lengths[:2], (VERMILLION, BLUE), ("^", "o"), strict=False):
            left.plot(data[n]["h"], data[n]["exact"], marker, color=colour, label=f"exact, N = {n}")
        left.legend(frameon=False, loc="lower left")
        left.set_xlabel("hit ratio h")
        left.set_ylabel("share of the work left")
        right.plot(lengths, [1 / (4 * (n + 1)) for n in lengths], color=BLACK, linewidth=1.2)
        right.plot(lengths, [data[n]["gap"] for n in lengths], "o", color=BLUE)
        right.text(lengths[-1], data[lengths[0]]["gap"], "1 / (4 (N + 1))", ha="right", va="top")
        right.set_xscale("log")
        right.set_yscale("log")
        right.set_xlabel("prompt tokens N")
        right.set_title("largest gap, limit minus exact")
    return fig, data


def two_ledgers(plans: Mapping[str, tuple[Ledger, Ledger]]) -> tuple[Figure, dict[str, dict[str, float]]]:
    """Reads and pairs of a plan after a change, as a share of those before it; one panel per change.

    Args:
        plans: name of the change to its ledgers before and after.

    Returns:
        The figure, and per change the shares "reads" (of kv_tokens) and "pairs".
    """
    data = {}
    with style():
        fig, axes = _panels(1, len(plans), sharey=True)
        for ax, (name, (before, after)) in zip(axes, plans.items(), strict=True):
            numbers = {"reads": (before.kv_tokens, after.kv_tokens), "pairs": (before.pairs, after.pairs)}
            data[name] = {column: new / old for column, (old, new) in numbers.items()}
            for x, (old, new) in enumerate(numbers.values()):
                ax.bar(x - 0.2, 1, 0.36, facecolor="#E6E6E6", edgecolor=GREY)
                ax.bar(x + 0.2, new / old, 0.36, facecolor="white", edgecolor=BLUE, hatch="////")
                ax.text(x - 0.2, 1.02, f"{old:,}", ha="center", color=GREY, fontsize=7)
                ax.text(x + 0.2, new / old + 0.02, f"{new:,}", ha="center", color=BLUE, fontsize=7)
            ax.set_xticks([0, 1], ["KV tokens read", "query-key pairs"])
            ax.set_title(name)
            ax.set_ylim(0, 1.18)
        axes[0].set_ylabel("share of the plan without it")
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
        fig, axes = _panels(1, 2, sharey=True)
        fig.set_size_inches(SIZE[0], 0.9 + SIZE[0] / 2 * (n - hit) / n)
        for ax, rule in zip(axes, titles, strict=True):
            for i, row in enumerate(visible):
                for key, seen in enumerate(row):
                    if seen:
                        ax.bar(key, 1, 1, i - 0.5, facecolor="#BBD7EA", edgecolor="white", linewidth=0.4)
            for top in range(0, n - hit, block_m):
                for start in range(0, n, block_n):
                    rows = [row[start : start + block_n] for row in visible[top : top + block_m]]
                    if rule == "masking" or any(map(any, rows)):
                        data[rule] += 1
                        edges = {"align": "edge", "fill": False, "edgecolor": VERMILLION}
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
    looks = [(BLUE, "-", "o"), (GREEN, "--", "s"), (VERMILLION, "-.", "^"), (BLACK, ":", "v")]
    data = {
        h: [float(prefix.tile_remaining(n, round(h * n), block, block)) / (1 - h * h) - 1 for n in lengths]
        for h in hit_ratios
    }
    with style():
        fig, ax = _figure()
        for (h, values), (colour, line, marker) in zip(data.items(), looks, strict=False):
            ax.plot(lengths, [100 * x for x in values], color=colour, linestyle=line, marker=marker)
            ax.text(lengths[0] / 1.06, 100 * values[0], f"h = {h:g}", color=colour, ha="right", va="center")
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
    looks = {"attention": (BLUE, "-", "o"), "linear layer": (VERMILLION, "--", "s")}
    with style():
        fig, ax = _figure()
        for name, (found, law) in laws.items():
            colour, line, marker = looks[name]
            ax.plot(fine, [law(h) for h in fine], color=colour, linestyle=line, linewidth=1.0)
            middle = [r.median for r in found.values()]
            spread = [[r.median - r.low for r in found.values()], [r.high - r.median for r in found.values()]]
            ax.errorbar(list(found), middle, spread, color=colour, linestyle="", marker=marker, capsize=3)
        ax.text(0.52, 0.84, "attention, on $1 - h^2$", color=BLUE)
        ax.text(0.48, 0.28, "linear layer, on $1 - h$", color=VERMILLION, ha="right")
        ax.set_ylim(0, 1.25)
        ax.set_xlabel("hit ratio h")
        ax.set_ylabel("time, share of the time at h = 0")
        ax.set_title("points: median over rounds, bars: quartiles, lines: the laws")
    return fig, data


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
        fig, axes = _panels(-(-len(regions) // columns), columns)
        fig.set_size_inches(SIZE[0], 1.95 * (-(-len(regions) // columns)) + 0.2)
        axes = np.atleast_1d(axes).ravel()
        for ax, (name, region) in zip(axes, regions.items(), strict=False):
            parts = branches(region, n).values()
            marks = [np.pad(mask.astype(int), ((0, 0), (0, 1)), constant_values=0) for mask in parts]
            drawn = np.concatenate(marks, 1)[:, :-1]
            drawn[hit:] *= 2
            data[name] = int((drawn == 1).sum()), int((drawn == 2).sum())
            ax.imshow(drawn, cmap=ListedColormap(["white", "#BDBDBD", BLUE]), vmin=0, vmax=2, interpolation="nearest")
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
        fig, (left, right) = _panels(1, 2)
        for (name, found), (colour, line) in zip(data.items(), _LINES, strict=False):
            left.plot(lengths, found["lengths"], color=colour, linestyle=line)
            right.plot(steps, found["hits"], color=colour, linestyle=line, label=name)
        left.set_xscale("log", base=2)
        for y, text in ((1 - hit_ratio**2, "$1 - h^2$"), (1 - hit_ratio, "$1 - h$")):
            left.axhline(y, color=GREY, linewidth=0.8, linestyle=":")
            left.text(lengths[-1], y + 0.004, text, color=GREY, ha="right")
        ticks = [n for n in lengths if n & (n - 1) == 0] or lengths
        ticks = ticks[:: max(1, len(ticks) // 4)]
        left.set_xticks(ticks, [_tokens(x) for x in ticks])
        left.minorticks_off()
        left.set_xlabel("prompt tokens N")
        left.set_ylabel("fraction of the pairs left")
        left.set_title(f"h = {hit_ratio:g}")
        right.set_xlabel("hit ratio h")
        right.set_title(f"N = {_tokens(n)}")
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
        fig, ax = _figure()
        places = _apart([found[-1] for found in data.values()], 0.014)
        for (name, found), (colour, line), y in zip(data.items(), _LINES, places, strict=False):
            ax.plot(lengths, found, color=colour, linestyle=line)
            ax.text(lengths[-1] * 1.12, y, name, color=colour, va="center")
        for y, text in ((1 - hit_ratio**2, "$1 - h^2$"), (1 - hit_ratio, "$1 - h$")):
            ax.axhline(y, color=GREY, linewidth=0.8, linestyle=":")
            ax.text(lengths[0], y + 0.003, text, color=GREY)
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [_tokens(n) for n in lengths])
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
        fig, ax = _figure()
        ax.plot(fine, [1 - h * h for h in fine], color=BLACK, linewidth=1.0)
        ax.plot(fine, [1 - h for h in fine], color=BLACK, linewidth=1.0, linestyle="--")
        ax.text(0.62, 0.65, "$1 - h^2$")
        ax.text(0.3, 0.64, "$1 - h$", ha="right")
        for i, ((name, points), (colour, _)) in enumerate(zip(data.items(), _LINES, strict=False)):
            # beside each other where they share a hit ratio
            x = [h + 0.012 * (i - (len(data) - 1) / 2) for h, _, _ in points]
            ax.plot(x, [ratio for _, ratio, _ in points], color=colour, linestyle="", marker="os^Dv*"[i], label=name)
        ax.legend(frameon=False, fontsize=8, loc="lower left")
        ax.set_xlim(0, 1)
        ax.set_ylim(0, 1.05)
        ax.set_xlabel("hit ratio h")
        ax.set_ylabel("time with the hit, share of the time without")
    return fig, data


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """Heights of labels moved up until neighbours are `gap` apart."""
    moved = list(places)
    order = sorted(range(len(places)), key=lambda i: places[i])
    for below, above in zip(order, order[1:], strict=False):
        moved[above] = max(moved[above], moved[below] + gap)
    return moved


def _tokens(n: int) -> str:
    """8192 as 8K, 1048576 as 1M; other lengths as they are."""
    return f"{n >> 20}M" if n % 2**20 == 0 else f"{n >> 10}K" if n % 2**10 == 0 else str(n)


def _read_ratio(prefix_len: int, topk: float, steps: int) -> float:
    return topk * (prefix_len + steps) / (prefix_len + topk * steps)


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive slots as (first, length)."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if runs and slot == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return runs


def _fill_cells(ax, cells: Sequence[Sequence[bool]]) -> None:
    """A grid of squares, the true ones filled."""
    from matplotlib.colors import ListedColormap

    ax.imshow(cells, cmap=ListedColormap(["white", BLUE]), vmin=0, vmax=1, aspect="equal")
    ax.set_xticks([x - 0.5 for x in range(1, len(cells[0]))], minor=True)
    ax.set_yticks([y - 0.5 for y in range(1, len(cells))], minor=True)
    ax.grid(which="minor", color="#BBBBBB", linewidth=0.4)
    ax.tick_params(which="minor", length=0)


def _figure():
    """A figure with one axis; it bypasses pyplot, so that no notebook front end shows it a second time."""
    from matplotlib.figure import Figure

    fig = Figure()
    return fig, fig.add_subplot()


def _panels(rows: int, columns: int, **options):
    """A figure with a grid of axes, kept away from pyplot as in `_figure`."""
    from matplotlib.figure import Figure

    fig = Figure()
    return fig, fig.subplots(rows, columns, squeeze=True, **options)


def _render(fig: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    unstamped = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    with style():
        fig.savefig(buffer, format=kind, metadata=unstamped[kind])
    return buffer.getvalue()
