"""Pictures of many requests: what one averaged hit ratio hides.

A trace is a list of (N, H). Attention is left with 1 - beta, beta the sum of H(H + 1) over the sum of N(N + 1), so each
request counts by N(N + 1), and what counts is close to the square of its hit ratio. Nothing here reads a trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cascade_lab.pictures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    PAIRS,
    SERIES,
    TRACES,
    VERMILLION,
    figure,
    panels,
    style,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cascade_lab.traces import TraceSummary

_WEIGHTS = (
    ("each request 1", GREY, "", lambda n: 1),
    ("by tokens, N", GREEN, "////", lambda n: n),
    ("by pairs, N(N + 1)", PAIRS, "..", lambda n: n * (n + 1)),
)


def chords(cases: Mapping[str, Sequence[tuple[int, int]]]) -> tuple[Figure, dict[str, dict[str, tuple[float, float]]]]:
    """Two requests on the curve 1 - h^2, their exact average on the chord, and the curve at their means.

    Args:
        cases: title of a panel to its two requests (N, H), N >= 1.

    Returns:
        The figure, and per panel (hit ratio, attention left) of "exact" (hit ratio weighted by N(N + 1)), and of
        "request mean" and "token mean" put into 1 - h^2.
    """
    data = {}
    fine = [i / 100 for i in range(101)]
    with style():
        fig, (axes,) = panels(1, len(cases), sharey=True, squeeze=False)
        for ax, (title, pair) in zip(axes, cases.items(), strict=True):
            whole = sum(n * (n + 1) for n, _ in pair)
            left = 1 - sum(hit * (hit + 1) for _, hit in pair) / whole
            request = math.fsum(hit / n for n, hit in pair) / len(pair)
            token = sum(hit for _, hit in pair) / sum(n for n, _ in pair)
            data[title] = {
                "exact": (sum((n + 1) * hit for n, hit in pair) / whole, left),
                "request mean": (request, 1 - request**2),
                "token mean": (token, 1 - token**2),
            }
            ax.plot(fine, [1 - h * h for h in fine], color=BLACK, linewidth=1.0)
            ends = [(hit / n, 1 - (hit / n) ** 2) for n, hit in pair]
            ax.plot(*zip(*ends, strict=True), color=GREY, linestyle="--", linewidth=1.0)
            for (n, _), (x, y) in zip(pair, ends, strict=True):
                ax.plot([x], [y], "o", color=GREY, markersize=3 + 12 * n / sum(n for n, _ in pair), fillstyle="none")
                ax.annotate(f"N = {n}", (x, y), (8, 8), textcoords="offset points", color=GREY, fontsize=8)
            for (name, (x, y)), (colour, marker) in zip(
                data[title].items(), ((BLACK, "D"), (VERMILLION, "^"), (BLUE, "s")), strict=True
            ):
                ax.plot([x], [y], marker, color=colour, label=f"{name}: {y:.3f}", linestyle="")
            ax.legend(frameon=False, fontsize=8, loc="lower left", handletextpad=0.1)
            ax.set_title(title)
            ax.set_xlim(-0.04, 1.04)
            ax.set_ylim(0, 1.15)
            ax.set_xlabel("hit ratio h")
        axes[0].set_ylabel("attention left")
    return fig, data


def hit_shares(pairs: Sequence[tuple[int, int]], bins: int = 10) -> tuple[Figure, dict[str, list[float]]]:
    """How a trace's requests, tokens and pairs are spread over the hit ratio.

    Args:
        pairs: (N, H) per request, at least one, 0 <= H <= N, N >= 1.
        bins: of equal width; h = 1 falls into the last.

    Returns:
        The figure, and per weight the share in each bin; each list sums to 1.

    Raises:
        ValueError: no request.
    """
    if not pairs:
        raise ValueError("pairs: expected at least one request, given none")
    data = {}
    for name, _, _, weight in _WEIGHTS:
        counts = [0] * bins
        for n, hit in pairs:
            counts[min(hit * bins // n, bins - 1)] += weight(n)
        total = sum(counts)
        data[name] = [count / total for count in counts]
    with style():
        fig, ax = figure()
        for i, (name, colour, hatch, _) in enumerate(_WEIGHTS):
            x = [(b + 0.2 + 0.3 * i) / bins for b in range(bins)]
            look = {"facecolor": "white" if hatch else "#E6E6E6", "edgecolor": colour, "hatch": hatch}
            ax.bar(x, data[name], 0.28 / bins, label=name, **look)
        ax.legend(frameon=False, title="weight of a request", alignment="left")
        ax.set_xlim(0, 1)
        ax.set_xticks([b / bins for b in range(bins + 1)])
        ax.set_xlabel("hit ratio h of the request")
        ax.set_ylabel("share of the weight")
    return fig, data


def rule_errors(errors: Mapping[str, Mapping[str, float]]) -> tuple[Figure, dict[str, dict[str, float]]]:
    """Relative errors of averaged rules, one line of points per rule, one colour and marker per trace.

    Args:
        errors: trace to {rule: relative error}, the same rules in each; at most five traces.

    Returns:
        The figure, and the errors as given.

    Raises:
        ValueError: traces with different rules.
    """
    data = {trace: dict(found) for trace, found in errors.items()}
    rules = list(next(iter(data.values())))
    if any(list(found) != rules for found in data.values()):
        raise ValueError(f"errors: expected the same rules for each trace, given {[list(f) for f in data.values()]}")
    with style():
        fig, ax = figure((6.4, 1.1 + 0.34 * len(rules)))
        ax.axvline(0, color=BLACK, linewidth=1.0)
        for i, (trace, found) in enumerate(data.items()):
            look = TRACES[i] | {"linestyle": ""}
            shift = 0.16 * (i - (len(data) - 1) / 2)
            ax.plot([100 * x for x in found.values()], [y + shift for y in range(len(rules))], label=trace, **look)
        for y in range(1, len(rules)):
            ax.axhline(y - 0.5, color="#DDDDDD", linewidth=0.6)
        ax.set_yticks(range(len(rules)), rules)
        ax.set_ylim(len(rules) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ax.margins(x=0.08)
        ax.set_xlabel("relative error of the work left, %")
        if len(data) > 1:
            fig.legend(frameon=False, fontsize=8, loc="outside upper right", ncols=len(data), handletextpad=0.1)
    return fig, data


def capacity_sweep(
    capacities: Sequence[int], hits: Mapping[str, Sequence[float]], errors: Mapping[str, Sequence[float]]
) -> tuple[Figure, dict[str, list[float]]]:
    """Hit ratios over the size of the cache, beside the relative errors of rules built on them.

    Args:
        capacities: tokens, rising, above 0.
        hits: kind of hit ratio to its values; at most five.
        errors: rule to its relative errors; at most five.

    Returns:
        The figure, and all series by name.

    Raises:
        ValueError: a series with another number of values than capacities.
    """
    data = {name: list(values) for name, values in [*hits.items(), *errors.items()]}
    if any(len(values) != len(capacities) for values in data.values()):
        raise ValueError(f"hits, errors: expected {len(capacities)} values in each series")
    with style():
        fig, (left, right) = panels(1, 2, (6.4, 4.0))
        for ax, names, scale in ((left, hits, 1), (right, errors, 100)):
            for name, look in zip(names, TRACES, strict=False):
                ax.plot(capacities, [scale * x for x in data[name]], label=name, **look)
            ax.set_xscale("log")
            ax.set_xlabel("cache capacity, tokens")
            # room above the lines for their names
            low, high = ax.get_ylim()
            ax.set_ylim(low, high + 0.13 * (len(names) + 0.5) * (high - low))
            ax.legend(frameon=False, fontsize=8, loc="upper left")
        right.axhline(0, color=BLACK, linewidth=0.8)
        left.set_title("hit ratios")
        right.set_title("relative error of the work left, %")
    return fig, data


def two_laws(
    path: Sequence[tuple[float, float]], points: Mapping[str, tuple[float, float]], name: str
) -> tuple[Figure, dict[str, list[tuple[float, float, float]]]]:
    """Attention saved over the token hit ratio: on h when hits are all or nothing, on h^2 when they are alike.

    Nearer to h the rule 1 - h errs less on attention, nearer to h^2 the rule 1 - h^2 does; they are equal half-way.

    Args:
        path: (token hit ratio, attention saved) of one trace over a growing cache.
        points: further traces, name to the same two numbers; at most four.
        name: of the path.

    Returns:
        The figure, and per trace (h, saved, place): place is 0 on h^2, 1 on h, NaN at h = 0 and h = 1.
    """
    everything = {name: list(path)} | {trace: [point] for trace, point in points.items()}
    data = {
        trace: [(h, s, (s - h * h) / (h - h * h) if 0 < h < 1 else float("nan")) for h, s in found]
        for trace, found in everything.items()
    }
    fine = [i / 100 for i in range(101)]
    with style():
        fig, ax = figure((6.4, 4.4))
        halfway = [(h + h * h) / 2 for h in fine]
        ax.fill_between(fine, fine, halfway, facecolor="white", edgecolor="#BBBBBB", hatch="//", linewidth=0)
        ax.plot(fine, fine, color=BLACK, linestyle="--", linewidth=1.0)
        ax.plot(fine, [h * h for h in fine], color=BLACK, linewidth=1.0)
        ax.plot(fine, halfway, color=GREY, linestyle=":", linewidth=1.2)
        ax.text(0.47, 0.55, "$h$: all or nothing", ha="right")
        ax.text(0.66, 0.36, "$h^2$: all alike", ha="left")
        for (trace, found), look in zip(data.items(), TRACES, strict=False):
            line = look if len(found) > 1 else look | {"linestyle": "", "markersize": 8}
            ax.plot([h for h, _, _ in found], [s for _, s, _ in found], label=trace, **line)
        ax.plot([], [], color=GREY, linestyle=":", label="half-way: above it 1 − h errs less")
        ax.legend(frameon=False, fontsize=8, loc="upper left")
        ax.set_xlim(0, 1)
        ax.set_ylim(0, 1)
        ax.set_xlabel("token hit ratio h")
        ax.set_ylabel("attention saved, the square of the RMS hit ratio")
    return fig, data


def hit_report(
    summary: TraceSummary, counts: Mapping[str, Sequence[int]]
) -> tuple[Figure, dict[str, dict[str, object]]]:
    """Who has which hit ratio, by three weights, and how far off each formula is.

    Args:
        summary: of the trace.
        counts: "requests", "tokens" and "pairs" to their sums in bins of equal width.

    Returns:
        The figure, and "shares" (weight to its share of each bin) and "errors" as drawn, in percent.
    """
    shares = {name: [n / sum(bins) for n in bins] for name, bins in counts.items()}
    errors = {name: 100 * error for name, error in summary.errors.items() if math.isfinite(error)}
    means = {"requests": summary.request_hit, "tokens": summary.token_hit, "pairs": summary.rms_hit}
    with style():
        fig, (left, right) = panels(1, 2, (11, 4.4), width_ratios=(1, 1.1))
        for (name, mean), look in zip(means.items(), SERIES, strict=False):
            edges = [i / len(shares[name]) for i in range(len(shares[name]) + 1)]
            line = look["color"], look["linestyle"]
            left.stairs(shares[name], edges, color=line[0], linestyle=line[1], linewidth=1.6, label=f"by {name}")
            left.axvline(mean, color=line[0], linestyle=line[1], linewidth=0.9)
        left.set_title("Hit ratios and their mean (root mean square by pairs)")
        left.set_xlabel("hit ratio h of a request")
        left.set_ylabel("share")
        left.set_xlim(0, 1)
        left.legend(frameon=False)
        names = list(errors)[::-1]
        widths = [errors[name] for name in names]
        right.barh(range(len(names)), widths, color="white", edgecolor=BLACK, hatch="//")
        reach = max(1.0, *(abs(width) for width in widths))
        for y, width in enumerate(widths):
            end = width + math.copysign(0.02 * reach, width)
            right.text(end, y, f"{width:+.1f}%", va="center", ha="left" if width >= 0 else "right", fontsize=8)
        right.set_xlim(min(0, *widths) - 0.35 * reach, max(0, *widths) + 0.35 * reach)
        right.axvline(0, color=BLACK, linewidth=0.8)
        right.set_yticks(range(len(names)), names, fontsize=8)
        title = "" if summary.model is None else f", {summary.model.name}"
        right.set_title(f"Error of each formula{title}")
        right.set_xlabel("relative error in percent")
    return fig, {"shares": shares, "errors": errors}


def saved_rows(rows: Sequence[tuple[str, float, float, float]]) -> tuple[Figure, dict[str, tuple[float, float, float]]]:
    """What hits save in groups or settings: token-linear work as a cross, attention's pairs as a point or an interval.

    Args:
        rows: a label, the token-linear work saved, and the attention pairs saved, at least and at most.

    Returns:
        The figure, and per label the three numbers as drawn.
    """
    data = {label: numbers for label, *numbers in rows}
    with style():
        fig, ax = figure((7.2, 1.2 + 0.32 * len(rows)))
        for y, (_, linear, least, most) in enumerate(reversed(rows)):
            ax.plot([least, most], [y, y], color=PAIRS, linewidth=3, solid_capstyle="butt")
            ax.plot([(least + most) / 2], [y], color=PAIRS, marker="o", linestyle="")
            ax.plot([linear], [y], color=GREEN, marker="x", linestyle="")
        ax.plot([], [], color=PAIRS, marker="o", label="attention pairs")
        ax.plot([], [], color=GREEN, marker="x", linestyle="", label="token-linear work")
        ax.set_yticks(range(len(rows)), [label for label, *_ in reversed(rows)], fontsize=8)
        ax.set_ylim(-0.6, len(rows) - 0.4)
        ax.set_xlim(0, 1)
        ax.set_xlabel("saved")
        ax.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.25), ncols=2)
    return fig, {label: tuple(numbers) for label, numbers in data.items()}
