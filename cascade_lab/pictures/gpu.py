"""Pictures of a recorded GPU run: one function per picture, each from the record alone.

Each picture names the device and the date of its record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cascade_lab import files
from cascade_lab.files import UsageError
from cascade_lab.pictures.style import BLACK, BLUE, GREY, LAWS, SERIES, figure, save, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLANS = {"naive": SERIES[2], "cascade": SERIES[0], "fused": SERIES[1]}


def draw_record(record: Path, folder: Path) -> list[Path]:
    """Draw every picture that the record has numbers for, as gpu_NAME.svg in `folder`.

    Raises:
        UsageError: a file that is no record of a GPU run.
    """
    try:
        data = files.read_json(record)
    except files.ForeignFileError:
        data = None
    sections = data.get("sections") if isinstance(data, dict) else None
    if not isinstance(sections, dict) or "ceilings" not in sections:
        raise UsageError(f"--plot: expected the record of a GPU run, given {record.as_posix()} without its sections")
    written = []
    for name, fig in draw(data):
        written.append(folder / f"gpu_{name}.svg")
        save(fig, written[-1])
        fig.clear()
    return written


def draw(record: Mapping) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of every picture whose section has rows."""
    pictures = {
        "verify_bandwidth": ("verify", verify_bandwidth),
        "verify_ratio": ("verify", verify_ratio),
        "break_even": ("verify", break_even_prefixes),
        "peers": ("peers", peers),
        "prefill_law": ("prefill", prefill_law),
        "prefill_rate": ("prefill", prefill_rate),
        "linear": ("linear", linear),
        "merges": ("costs", merges),
    }
    for name, (section, picture) in pictures.items():
        if record["sections"].get(section, {}).get("rows"):
            fig, numbers = picture(record)
            if numbers:
                yield name, fig


def verify_bandwidth(record: Mapping) -> tuple[Figure, dict[str, dict[int, float]]]:
    """Bytes that must move over time, as a share of the copy rate, over the prefix length at the sweeps' crossing.

    Returns:
        The figure and, per plan, prefix length to share.
    """
    data: dict[str, dict[int, float]] = {plan: {} for plan in _PLANS}
    for row in _sweep(record):
        for plan, found in row["plans"].items():
            data[plan][row["length"]] = found["share_of_copy"]
    with style():
        fig, ax = _figure(record, f"Bandwidth of verify plans, {_crossing(record)}")
        for plan, points in data.items():
            ax.plot(list(points), list(points.values()), label=plan, **_PLANS[plan])
        ax.axhline(1, color=GREY, linewidth=0.8)
        ax.set_xscale("log", base=2)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("prefix length (tokens)")
        ax.set_ylabel("compulsory bytes / time, share of a copy")
        ax.legend(frameon=False)
    return fig, {plan: points for plan, points in data.items() if points}


def verify_ratio(record: Mapping) -> tuple[Figure, dict[int, dict[int, tuple[float, float]]]]:
    """Time of naive over cascade against the ledger's ratio, over the prefix length, one line per group.

    Returns:
        The figure and, per group, prefix length to (measured, predicted).
    """
    _, topk, batch, _, rows = record["scale"]["centre"]
    data: dict[int, dict[int, tuple[float, float]]] = {}
    for row in sorted(record["sections"]["verify"]["rows"], key=lambda row: (row["group"], row["length"])):
        if (row["topk"], row["batch"], row["rows"]) == (topk, batch, rows):
            found = row["plans"]["cascade"]
            data.setdefault(row["group"], {})[row["length"]] = found["ratio_measured"], found["ratio_predicted"]
    with style():
        fig, ax = _figure(record, f"Naive over cascade, topk = {topk}, batch = {batch}, rows by {rows}")
        predicted: dict[int, float] = {}
        for (group, points), line in zip(data.items(), LAWS, strict=False):
            ax.plot(list(points), [measured for measured, _ in points.values()], label=f"measured, G = {group}", **line)
            predicted |= {length: ratio for length, (_, ratio) in points.items()}
        lengths = sorted(predicted)
        ax.plot(lengths, [predicted[n] for n in lengths], color=GREY, linewidth=1.0, label="tokens, by the ledger")
        ax.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        ax.set_xscale("log", base=2)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("prefix length (tokens)")
        ax.set_ylabel("time ratio")
        ax.legend(frameon=False)
    return fig, data


def break_even_prefixes(record: Mapping) -> tuple[Figure, dict[tuple[int, int, int], tuple[float, float | None]]]:
    """Measured break-even prefix of the cascade over the rows that share it, beside the trigger's prediction.

    Returns:
        The figure and, per (topk, batch, group) at the crossing's rows, (measured, predicted) prefix lengths.
    """
    rows = record["scale"]["centre"][4]
    data = {
        (row["topk"], row["batch"], row["group"]): (row["length"], row["predicted"])
        for row in record.get("break_even", {}).get("cascade", [])
        if row["rows"] == rows and row["length"] is not None
    }
    with style():
        fig, ax = _figure(record, f"Prefix from which the cascade wins, rows by {rows}")
        shortest = min(row["length"] for row in record["sections"]["verify"]["rows"])
        kinds = {
            "measured": ("o", BLUE, [(x[0] * x[2], m) for x, (m, _) in data.items() if m]),
            "measured, at or below": ("v", BLUE, [(x[0] * x[2], shortest) for x, (m, _) in data.items() if not m]),
            "model": ("x", BLACK, [(x[0] * x[2], p) for x, (_, p) in data.items() if p]),
        }
        for label, (marker, colour, points) in kinds.items():
            if points:
                ax.plot(*zip(*points, strict=True), linestyle="", marker=marker, color=colour, label=label)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xlabel("branches x group")
        ax.set_ylabel("prefix length (tokens)")
        if data:
            ax.legend(frameon=False)
    return fig, data


def peers(record: Mapping) -> tuple[Figure, dict[str, dict[str, float]]]:
    """Microseconds of every kernel on the same verify work.

    Returns:
        The figure and, per work, kernel to seconds; kernels that are missing or gave another answer are left out.
    """
    data: dict[str, dict[str, float]] = {}
    for row in record["sections"]["peers"]["rows"]:
        if "seconds" in row and row.get("agrees", True) and "length" in row:
            work = f"L = {row['length']}, batch {row['batch']}, rows by {row['rows']}"
            data.setdefault(work, {})[row["kernel"]] = row["seconds"]
    kernels = list(dict.fromkeys(name for found in data.values() for name in found))
    with style():
        fig, ax = _figure(record, f"Verify by other kernels, topk = {record['scale']['centre'][1]}")
        labelled: set[str] = set()
        for i, found in enumerate(data.values()):
            for j, name in enumerate(kernels):
                if name in found:
                    line = LAWS[j % len(LAWS)]
                    ax.plot(
                        found[name] * 1e6, i, linestyle="", marker="os^Dv*PX"[j % 8], color=line["color"],
                        label=None if name in labelled else name,
                    )  # fmt: skip
                    labelled.add(name)
        ax.set_yticks(range(len(data)), list(data))
        ax.invert_yaxis()
        ax.set_xscale("log")
        ax.set_xlabel("time (us)")
        ax.legend(frameon=False, fontsize=7)
    return fig, data


def prefill_law(record: Mapping) -> tuple[Figure, dict[int, dict[float, tuple[float, float, float]]]]:
    """Prefill time with a hit over the time without, on 1 - h^2 and on executed tiles.

    Returns:
        The figure and, per prompt length, h to (time ratio, 1 - H(H+1)/(N(N+1)), tile ratio).
    """
    found = record["sections"]["prefill"]["rows"]
    whole = {row["new"]: row["seconds"] for row in found if row["hit"] == 0}
    data: dict[int, dict[float, tuple[float, float, float]]] = {}
    for row in sorted(found, key=lambda row: (row["new"] + row["hit"], row["hit"])):
        n = row["new"] + row["hit"]
        if n in whole and n in record["scale"]["prompts"]:
            ratios = row["seconds"] / whole[n], row["remaining"], row["tile_remaining"]
            data.setdefault(n, {})[row["hit"] / n] = ratios
    fine = [i / 100 for i in range(101)]
    with style():
        fig, ax = _figure(record, "Prefill after a hit, time over the time without")
        ax.plot(fine, [1 - h * h for h in fine], color=BLACK, linewidth=1.0, label="$1 - h^2$")
        ax.plot(fine, [1 - h for h in fine], color=GREY, linewidth=1.0, linestyle=":", label="$1 - h$")
        for (n, points), line in zip(data.items(), LAWS, strict=False):
            ax.plot(list(points), [time for time, _, _ in points.values()], label=f"N = {n}", **line)
        ax.set_xlim(0, 1)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("hit ratio h")
        ax.set_ylabel("time ratio")
        ax.legend(frameon=False)
    return fig, data


def prefill_rate(record: Mapping) -> tuple[Figure, dict[int, dict[int, float]]]:
    """Share of the matrix rate over new tokens M, one line per hit H.

    Returns:
        The figure and, per hit, new tokens to share.
    """
    data: dict[int, dict[int, float]] = {}
    for row in sorted(record["sections"]["prefill"]["rows"], key=lambda row: (row["hit"], row["new"])):
        if row["new"] in record["scale"]["new_tokens"] and row["hit"] in record["scale"]["hits"]:
            data.setdefault(row["hit"], {})[row["new"]] = row["share_of_matmul"]
    shown = [hit for hit in data if len(data[hit]) > 1]
    shown = shown[:: max(1, -(-len(shown) // len(LAWS)))]
    with style():
        fig, ax = _figure(record, "Prefill: exact operations over time")
        for hit, line in zip(shown, LAWS, strict=False):
            ax.plot(list(data[hit]), list(data[hit].values()), label=f"H = {hit}", **line)
        ax.set_xscale("log", base=2)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("new tokens M")
        ax.set_ylabel("share of the matrix rate")
        if shown:
            ax.legend(frameon=False)
    return fig, data


def linear(record: Mapping) -> tuple[Figure, dict[int, float]]:
    """Time of a linear layer over its rows, on the line through its largest point.

    Returns:
        The figure and rows to seconds.
    """
    found = record["sections"]["linear"]["rows"]
    data = {row["rows"]: row["seconds"] for row in found}
    most = max(data)
    with style():
        fig, ax = _figure(record, f"Linear layer {found[0]['width']} to {found[0]['out_width']}")
        ax.plot(list(data), [s * 1e6 for s in data.values()], label="measured", **LAWS[0])
        ax.plot(list(data), [data[most] * 1e6 * m / most for m in data], color=GREY, label="proportional to rows")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("rows M")
        ax.set_ylabel("time (us)")
        ax.legend(frameon=False)
    return fig, data


def merges(record: Mapping) -> tuple[Figure, dict[str, dict[int, float]]]:
    """Time of the merge kernels over rows.

    Returns:
        The figure and, per kernel and number of states, rows to seconds.
    """
    data: dict[str, dict[int, float]] = {}
    for row in record["sections"]["costs"]["rows"]:
        if row["what"].startswith("merge"):
            data.setdefault(f"{row['what']}, {row['parts']} states", {})[row["rows"]] = row["seconds"]
    with style():
        fig, ax = _figure(record, f"Merging states, {record['scale']['merge_heads']} heads")
        for (name, points), line in zip(data.items(), LAWS, strict=False):
            ax.plot(list(points), [s * 1e6 for s in points.values()], label=name, **line)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("query rows")
        ax.set_ylabel("time (us)")
        ax.legend(frameon=False)
    return fig, data


def _sweep(record: Mapping) -> list[Mapping]:
    """Rows of section verify at the sweeps' crossing, by prefix length."""
    centre = record["scale"]["centre"][1:]
    rows = record["sections"]["verify"]["rows"]
    found = [row for row in rows if [row[name] for name in ("topk", "batch", "group", "rows")] == list(centre)]
    return sorted(found, key=lambda row: row["length"])


def _crossing(record: Mapping) -> str:
    _, topk, batch, group, rows = record["scale"]["centre"]
    return f"topk = {topk}, batch = {batch}, G = {group}, rows by {rows}"


def _figure(record: Mapping, title: str):
    """A figure with one axis under a title and, small, where and when it was measured."""
    fig, ax = figure()
    meaning = "" if record["timings"].startswith("device") else "; timings not meaningful"
    where = f"{record['provenance']['device']}, {record['provenance']['date']}{meaning}"
    ax.set_title(f"{title}\n{where}", fontsize=9)
    return fig, ax
