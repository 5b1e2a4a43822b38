"""What a GPU record says: break-even prefixes, the bounds that a run is held to, and one screen of results.

Everything here works on the record alone, so a run can be judged again on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from cascade_lab.bench.gpu import limits
from cascade_lab.bench.gpu.limits import Expected
from cascade_lab.evidence.claims import FAILS, HOLDS, NOT_MEASURED
from cascade_lab.trigger import DeviceModel, break_even_prefix

# the plans that are to be fast; the naive one is what they are compared with
FAST_PLANS = ("cascade", "fused")
OURS = tuple(f"cascade_lab {plan}" for plan in (*FAST_PLANS, "prefill"))
# beyond this part of a predicted time, launches decide it, and not the kernel
LAUNCH_SHARE = 0.1


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
    scale, sections, card = record["scale"], record["sections"], limits.card(record)
    heads = dict(num_kv_heads=scale["num_kv_heads"], head_dim=scale["head_dim"])
    return [
        point
        | {
            "predicted": break_even_prefix(
                point["topk"],
                scale["steps"],
                point["batch"],
                device_model=card,
                num_q_heads=point["group"] * scale["num_kv_heads"],
                rows=point["rows"],
                plan=plan,
                **heads,
            )
        }
        for point in break_even_lengths(sections["verify"]["rows"], plan)
    ]


def judge(record: Mapping) -> list[dict]:
    """The bounds that a run is held to, with the worst value found and how many points meet each.

    A kernel that takes what `limits` expects meets all of them, and one that takes 1.5 times as long misses at least
    one in each section of times. Sections that a run did not come to are not measured; without ceilings nothing is.
    """
    if not _rows(record, "ceilings"):
        return []
    card, scale = limits.card(record), record["scale"]
    plans = list(_plan_times(record, card))
    verified = [(seconds, expected) for plan, seconds, expected in plans if plan in FAST_PLANS]
    bare = [(seconds, expected) for seconds, expected in verified if expected.predicted <= 1.1 * expected.limit]
    prefilled = [
        (row["seconds"], limits.prefill(card, scale, row["new"], row["hit"], row["group"]))
        for row in _rows(record, "prefill")
    ]
    batches = [
        (row["seconds"], limits.balanced(card, limits.Work(row["bytes_must_move"], row["flops"])))
        for row in _rows(record, "batches")
    ]
    merged = [
        (row["seconds"], limits.merge(card, scale, row["rows"], row["parts"]))
        for row in _rows(record, "costs")
        if row["what"].startswith("merge")
    ]
    layers = [
        (row["seconds"], limits.linear(card, row["width"], row["out_width"], row["rows"]))
        for row in sorted(_rows(record, "linear"), key=lambda row: row["rows"])
    ]
    timed = [*((seconds, expected) for _, seconds, expected in plans), *prefilled, *batches, *merged, *layers]
    counted = [plan for row in _rows(record, "counters") for plan in row.get("plans", {}).items()]
    sectors = [abs(plan["attention_l2_bytes"] / plan["kv_bytes_loaded"] - 1) for _, plan in counted]
    fetched = [plan["attention_dram_bytes"] / plan["kv_bytes_distinct"] for name, plan in counted if name in FAST_PLANS]
    return [
        _bound("all sections: limit of the card over the time", [e.limit / s for s, e in timed], at_most=1.2),
        _bound("verify, cascade and fused: time over the model", _over_model(verified), at_most=1.25),
        _bound(
            "verify, cascade and fused where the model adds little: share of the limit",
            [e.limit / s for s, e in bare],
            at_least=0.75,
        ),
        _bound(
            "verify, naive / cascade beyond the L2: outside what the L2 can make of it",
            list(_outside(record, card)),
            at_most=0.15,
        ),
        _bound("batches: time over the limit and launches", _over_model(batches), at_most=1.4),
        _bound("prefill: time over the model", _over_model(prefilled), at_most=1.4),
        _bound("linear layer of most rows: time over the limit", _over_model(layers[-1:]), at_most=1.4),
        _bound("merges: time over the limit", _over_model(merged), at_most=1.4),
        _bound("ours over the fastest other kernel: time ratio", list(_over_peers(record, card)), at_most=1.1),
        _bound("L2 sectors that attention read against the ledger, tiles counted: deviation", sectors, at_most=0.05),
        _bound("DRAM bytes that cascade and fused read over the distinct ones", fetched, at_most=1.1),
    ]  # fmt: skip


def _rows(record: Mapping, section: str) -> Sequence[dict]:
    return record["sections"].get(section, {}).get("rows", ())


def _decided_by_launches(expected: Expected) -> bool:
    return expected.launches > LAUNCH_SHARE * expected.predicted


def _over_model(times: Sequence[tuple[float, Expected]]) -> list[float]:
    return [seconds / expected.predicted for seconds, expected in times if not _decided_by_launches(expected)]


def _plan_times(record: Mapping, card: DeviceModel) -> Iterator[tuple[str, float, Expected]]:
    for row in _rows(record, "verify"):
        expected = limits.verify(card, record["scale"], row)
        for plan, found in row["plans"].items():
            yield plan, found["seconds"], expected[plan]


def _outside(record: Mapping, card: DeviceModel) -> Iterator[float]:
    """Of points whose prefixes exceed the L2, how far their ratio is from the range between all hits and none."""
    for row in _rows(record, "verify"):
        beyond = limits.verify_work(record["scale"], row).bytes > card.l2_bytes * row["batch"]
        if row["topk"] > 1 and beyond:
            low, high = limits.verify_ratios(card, record["scale"], row)
            ratio = row["plans"]["cascade"]["ratio_measured"]
            yield max(0.0, low / ratio - 1, ratio / high - 1)


def _over_peers(record: Mapping, card: DeviceModel) -> Iterator[float]:
    """Per work that is long enough our fastest time over that of the fastest other kernel with the same answer."""
    scale = record["scale"]
    works: dict[tuple, list[dict]] = {}
    for row in _rows(record, "peers"):
        if "seconds" in row and row.get("agrees", True):
            key = tuple(row.get(name) for name in ("length", "topk", "batch", "group", "rows", "prompt"))
            works.setdefault(key, []).append(row)
    for rows in works.values():
        first = rows[0]
        if "prompt" in first:
            expected = limits.prefill(card, scale, first["prompt"] - first["hit"], first["hit"], first["group"])
        else:
            expected = limits.verify(card, scale, first)["fused"]
        ours = [row["seconds"] for row in rows if row["kernel"] in OURS]
        others = [row["seconds"] for row in rows if not row["kernel"].startswith("cascade_lab")]
        if ours and others and not _decided_by_launches(expected):
            yield min(ours) / min(others)


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


def print_summary(record: Mapping) -> None:
    """The record on one screen: ceilings, the sweep over prefix lengths, peers, the hit law, counters, and bounds.

    A record of a run that was stopped shows the sections that it has.
    """
    for table in (_ceilings_table, _verify_table, _batches_table, _peers_table, _prefill_table, _break_even_table):
        lines = list(table(record))
        if len(lines) > 1:
            print("\n" + "\n".join(lines))
    print("\n" + "\n".join(_counters_table(record)))
    print()
    for bound in record.get("bounds", []):
        worst = "-" if bound["worst"] is None else f"{bound['worst']:.2f}"
        print(f"{bound['name']}: worst {worst}, {bound['bound']}, {bound['met']} of {bound['of']}: {bound['verdict']}")


def _ceilings_table(record: Mapping) -> Iterator[str]:
    yield f"{'ceiling':<28}{'rate':>16}"
    for row in _rows(record, "ceilings"):
        rate = row.get("bytes_per_s", row.get("flops_per_s"))
        unit, size = ("GB/s", 1e9) if "bytes_per_s" in row else ("TFLOP/s", 1e12)
        text = f"{row['seconds'] * 1e6:.1f} us" if rate is None else f"{rate / size:.1f} {unit}"
        yield f"{row['what']:<28}{text:>16}"


def _verify_table(record: Mapping) -> Iterator[str]:
    yield f"{'verify':<44}{'us':>10}{'of limit':>9}{'of model':>9}{'ratio':>8}{'ledger':>8}"
    scale = record["scale"]
    shown = [row for row in _rows(record, "verify") if off_centre(row, scale["centre"]) == 0]
    for row in sorted(shown, key=lambda row: (row["topk"], row["batch"], row["group"], row["rows"], row["length"])):
        expected = limits.verify(limits.card(record), scale, row)
        for plan, x in row["plans"].items():
            where = f"L={row['length']} topk={row['topk']} B={row['batch']} G={row['group']} {row['rows']} {plan}"
            shares = (time / x["seconds"] for time in (expected[plan].limit, expected[plan].predicted))
            yield (
                f"{where:<44}{x['seconds'] * 1e6:>10.1f}"
                + "".join(f"{share:>9.2f}" for share in shares)
                + f"{x['ratio_measured']:>8.2f}{x['ratio_predicted']:>8.2f}"
            )


def _batches_table(record: Mapping) -> Iterator[str]:
    yield f"{'batches':<66}{'us':>10}{'of limit':>9}"
    for row in _rows(record, "batches"):
        limit = limits.Work(row["bytes_must_move"], row["flops"]).limit(limits.card(record))
        yield f"{row['mix'] + ', ' + row['call']:<66}{row['seconds'] * 1e6:>10.1f}{limit / row['seconds']:>9.2f}"


def _peers_table(record: Mapping) -> Iterator[str]:
    yield f"{'peers':<66}{'us':>10}{'call us':>10}"
    for row in _rows(record, "peers"):
        where = " ".join(f"{name}={row[name]}" for name in ("length", "batch", "rows", "prompt") if name in row)
        text = f"{where} {row['kernel']}"
        if "missing" in row:
            yield f"{text:<66}  missing: {row['missing'][:60]}"
        else:
            mark = "" if row.get("agrees", True) else "  ANOTHER ANSWER"
            yield f"{text:<66}{row['seconds'] * 1e6:>10.1f}{row['call_seconds'] * 1e6:>10.1f}{mark}"


def _prefill_table(record: Mapping) -> Iterator[str]:
    yield f"{'prefill, N and h':<28}{'ms':>9}{'of matmul':>11}{'T/T(0)':>9}{'1-h^2':>8}{'tiles':>8}"
    whole = {row["new"]: row["seconds"] for row in _rows(record, "prefill") if row["hit"] == 0}
    for row in _rows(record, "prefill"):
        n = row["new"] + row["hit"]
        if n in whole and (row["hit"] * 8) % n == 0:
            yield (
                f"N={n} h={row['hit'] / n:<18.3f}{row['seconds'] * 1e3:>9.3f}{row['share_of_matmul']:>11.2f}"
                f"{row['seconds'] / whole[n]:>9.3f}{row['remaining']:>8.3f}{row['tile_remaining']:>8.3f}"
            )


def _break_even_table(record: Mapping) -> Iterator[str]:
    yield f"{'break-even prefix of the cascade':<44}{'measured':>10}{'predicted':>11}"
    for row in record.get("break_even", {}).get("cascade", ()):
        where = f"topk={row['topk']} B={row['batch']} G={row['group']} {row['rows']}"
        found, predicted = ("never" if x is None else f"{x:.0f}" for x in (row["length"], row["predicted"]))
        yield f"{where:<44}{found:>10}{predicted:>11}"


def _counters_table(record: Mapping) -> Iterator[str]:
    yield f"{'counters, MB':<44}{'L2':>10}{'ledger':>10}{'found':>10}{'DRAM':>10}{'distinct':>10}"
    for row in _rows(record, "counters"):
        if "missing" in row:
            yield f"missing: {row['missing']}"
        for plan, x in row.get("plans", {}).items():
            where = f"L={row['length']} topk={row['topk']} B={row['batch']} G={row['group']} {row['rows']} {plan}"
            names = ("l2_bytes", "kv_bytes_loaded", "l2_found_bytes", "dram_bytes", "kv_bytes_distinct")
            yield f"{where:<44}" + "".join(f"{x[name] / 1e6:>10.2f}" for name in names)


def off_centre(row: dict, centre: Sequence) -> int:
    """How many axes apart a point of section verify is from the sweeps' crossing, whatever its prefix length."""
    values = [row[name] for name in ("topk", "batch", "group", "rows")]
    return sum(x != y for x, y in zip(values, centre[1:], strict=True))
