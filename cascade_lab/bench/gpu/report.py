"""What a GPU record says: break-even prefixes, the bounds that a run is held to, and one screen of results.

Everything here works on the record alone, so a run can be judged again on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from cascade_lab.evidence.claims import FAILS, HOLDS, NOT_MEASURED
from cascade_lab.trigger import DeviceModel, break_even_prefix

PLANS_BOUND = ("cascade", "fused")


def break_even_lengths(rows: Sequence[dict], plan: str = "cascade") -> list[dict]:
    """Per (topk, batch, group, rows) the prefix length from which `plan` stays faster than the naive plan.

    Args:
        rows: of section verify.
        plan: "cascade" or "fused".

    Returns:
        Dicts with the four and "length": interpolated in log length between the last loss and the first win; 0 if it
        wins everywhere, None if not even at the longest prefix.
    """
    groups: dict[tuple, dict[int, float]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("topk", "batch", "group", "rows"))
        groups.setdefault(key, {})[row["length"]] = row["plans"][plan]["ratio_measured"]
    found = []
    for key, ratios in sorted(groups.items()):
        lengths = sorted(ratios)
        if len(lengths) < 2:
            continue
        lost = [i for i, length in enumerate(lengths) if ratios[length] <= 1]
        if not lost:
            even: float | None = 0
        elif lost[-1] == len(lengths) - 1:
            even = None
        else:
            low, high = lengths[lost[-1]], lengths[lost[-1] + 1]
            a, b = math.log(ratios[low]), math.log(ratios[high])
            even = low * (high / low) ** (-a / (b - a))
        found.append(dict(zip(("topk", "batch", "group", "rows"), key, strict=True)) | {"length": even})
    return found


def break_even_rows(record: dict, plan: str) -> list[dict]:
    """Measured break-even prefixes beside what the trigger's model predicts from this run's ceilings."""
    scale, sections = record["scale"], record["sections"]
    rates = {row["what"]: row for row in sections["ceilings"]["rows"]}
    copies = [rates[name]["bytes_per_s"] for name in ("copy memory", "copy L2")]
    model = DeviceModel(
        name="measured",
        bandwidth=copies[0],
        l2_bandwidth=max(copies),
        l2_bytes=int(record["provenance"]["L2 bytes"]),
        launch=rates["one-element addition"]["seconds"],
        matmul_rate=max(row["flops_per_s"] for row in rates.values() if "flops_per_s" in row),
        num_sms=int(record["provenance"]["multiprocessors"]),
        source="ceilings of this record",
    )
    heads = dict(num_kv_heads=scale["num_kv_heads"], head_dim=scale["head_dim"])
    return [
        point
        | {
            "predicted": break_even_prefix(
                point["topk"],
                scale["steps"],
                point["batch"],
                device_model=model,
                num_q_heads=point["group"] * scale["num_kv_heads"],
                rows=point["rows"],
                plan=plan,
                **heads,
            )
        }
        for point in break_even_lengths(sections["verify"]["rows"], plan)
    ]


def judge(record: dict) -> list[dict]:
    """The bounds that a run is held to, with the worst value found and how many points meet each."""
    sections = record["sections"]
    l2_bytes = int(record["provenance"]["L2 bytes"])
    verified = sections["verify"]["rows"]
    shares = [row["plans"][p]["share_of_copy"] for row in verified if row["length"] >= 16384 for p in PLANS_BOUND]
    beyond = [
        row["plans"]["cascade"]
        for row in verified
        if row["topk"] > 1 and row["plans"]["cascade"]["bytes_must_move"] > l2_bytes * row["batch"]
    ]
    deviations = [abs(plan["ratio_measured"] / plan["ratio_predicted"] - 1) for plan in beyond]
    rates = [row["share_of_matmul"] for row in sections["prefill"]["rows"] if row["new"] == 8192 and row["hit"] == 0]
    counted = [plan for row in sections["counters"]["rows"] for plan in row.get("plans", {}).values()]
    excesses = [abs(plan["attention_l2_bytes"] / plan["kv_bytes_loaded"] - 1) for plan in counted]
    return [
        _bound("cascade and fused at prefixes >= 16384: share of the copy bandwidth", shares, at_least=0.85),
        _bound("naive / cascade against the ledger's ratio, prefix beyond the L2: deviation", deviations, at_most=0.15),
        _bound("prefill of 8192 tokens: share of the matrix rate", rates, at_least=0.6),
        _bound("fused or cascade over FlexAttention: time ratio", list(_over_flex(sections["peers"])), at_most=1.0),
        _bound("L2 sectors that attention read against the ledger, tiles counted: deviation", excesses, at_most=0.05),
    ]


def _over_flex(section: dict) -> Iterator[float]:
    shapes: dict[tuple, dict[str, float]] = {}
    for row in section["rows"]:
        if "length" in row and "seconds" in row:
            key = tuple(row[name] for name in ("length", "topk", "batch", "group", "rows"))
            shapes.setdefault(key, {})[row["kernel"]] = row["seconds"]
    for kernels in shapes.values():
        ours = min(seconds for name, seconds in kernels.items() if name in ("cascade_lab cascade", "cascade_lab fused"))
        for name, seconds in kernels.items():
            if name.startswith("FlexAttention"):
                yield ours / seconds


def _bound(name: str, values: Sequence[float], *, at_least: float | None = None, at_most: float | None = None) -> dict:
    limit = at_least if at_least is not None else at_most
    meets = [v >= limit if at_least is not None else v <= limit for v in values]
    worst = None if not values else min(values) if at_least is not None else max(values)
    verdict = NOT_MEASURED if not values else HOLDS if all(meets) else FAILS
    sense = "at least" if at_least is not None else "at most"
    return {
        "name": name, "bound": f"{sense} {limit:g}", "worst": worst, "met": sum(meets), "of": len(values),
        "verdict": verdict,
    }  # fmt: skip


def print_summary(record: dict) -> None:
    """The record on one screen: ceilings, the sweep over prefix lengths, peers, the hit law, counters, and bounds."""
    sections = record["sections"]
    print(f"\n{'ceiling':<28}{'rate':>16}")
    for row in sections["ceilings"]["rows"]:
        rate = row.get("bytes_per_s", row.get("flops_per_s"))
        unit, size = ("GB/s", 1e9) if "bytes_per_s" in row else ("TFLOP/s", 1e12)
        text = f"{row['seconds'] * 1e6:.1f} us" if rate is None else f"{rate / size:.1f} {unit}"
        print(f"{row['what']:<28}{text:>16}")
    print(f"\n{'verify':<44}{'us':>10}{'of copy':>9}{'ratio':>8}{'ledger':>8}")
    done = sections["verify"]["rows"]
    shown = [row for row in done if off_centre(row, record["scale"]["centre"]) == 0]
    for row in sorted(shown, key=lambda row: (row["topk"], row["batch"], row["group"], row["rows"], row["length"])):
        for plan, x in row["plans"].items():
            where = f"L={row['length']} topk={row['topk']} B={row['batch']} G={row['group']} {row['rows']} {plan}"
            print(
                f"{where:<44}{x['seconds'] * 1e6:>10.1f}{x['share_of_copy']:>9.2f}{x['ratio_measured']:>8.2f}"
                f"{x['ratio_predicted']:>8.2f}"
            )
    print(f"\n{'peers':<66}{'us':>10}{'call us':>10}")
    for row in sections["peers"]["rows"]:
        where = " ".join(f"{name}={row[name]}" for name in ("length", "batch", "rows", "prompt") if name in row)
        text = f"{where} {row['kernel']}"
        if "missing" in row:
            print(f"{text:<66}  missing: {row['missing'][:60]}")
        else:
            mark = "" if row.get("agrees", True) else "  ANOTHER ANSWER"
            print(f"{text:<66}{row['seconds'] * 1e6:>10.1f}{row['call_seconds'] * 1e6:>10.1f}{mark}")
    print(f"\n{'prefill, N and h':<28}{'ms':>9}{'of matmul':>11}{'T/T(0)':>9}{'1-h^2':>8}{'tiles':>8}")
    whole = {row["new"]: row["seconds"] for row in sections["prefill"]["rows"] if row["hit"] == 0}
    for row in sections["prefill"]["rows"]:
        n = row["new"] + row["hit"]
        if n in whole and (row["hit"] * 8) % n == 0:
            print(
                f"N={n} h={row['hit'] / n:<18.3f}{row['seconds'] * 1e3:>9.3f}{row['share_of_matmul']:>11.2f}"
                f"{row['seconds'] / whole[n]:>9.3f}{row['remaining']:>8.3f}{row['tile_remaining']:>8.3f}"
            )
    print(f"\n{'break-even prefix of the cascade':<44}{'measured':>10}{'predicted':>11}")
    for row in record["break_even"]["cascade"]:
        where = f"topk={row['topk']} B={row['batch']} G={row['group']} {row['rows']}"
        found, predicted = ("never" if x is None else f"{x:.0f}" for x in (row["length"], row["predicted"]))
        print(f"{where:<44}{found:>10}{predicted:>11}")
    print(f"\n{'counters, MB':<44}{'L2':>10}{'ledger':>10}{'found':>10}{'DRAM':>10}{'distinct':>10}")
    for row in sections["counters"]["rows"]:
        if "missing" in row:
            print(f"missing: {row['missing']}")
        for plan, x in row.get("plans", {}).items():
            where = f"L={row['length']} topk={row['topk']} B={row['batch']} G={row['group']} {row['rows']} {plan}"
            names = ("l2_bytes", "kv_bytes_loaded", "l2_found_bytes", "dram_bytes", "kv_bytes_distinct")
            print(f"{where:<44}" + "".join(f"{x[name] / 1e6:>10.2f}" for name in names))
    print()
    for bound in record.get("bounds", []):
        worst = "-" if bound["worst"] is None else f"{bound['worst']:.2f}"
        print(f"{bound['name']}: worst {worst}, {bound['bound']}, {bound['met']} of {bound['of']}: {bound['verdict']}")


def off_centre(row: dict, centre: Sequence) -> int:
    """How many axes apart a point of section verify is from the sweeps' crossing, whatever its prefix length."""
    values = [row[name] for name in ("topk", "batch", "group", "rows")]
    return sum(x != y for x, y in zip(values, centre[1:], strict=True))
