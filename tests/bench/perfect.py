"""Records of kernels that take exactly what the model of a card says, or so many times as long: no kernel is run."""

from __future__ import annotations

from dataclasses import asdict

from cascade_lab.bench.gpu import batches, limits
from cascade_lab.bench.gpu.prefill import prefill_points
from cascade_lab.bench.gpu.session import Scale
from cascade_lab.bench.gpu.verify import verify_points
from cascade_lab.drafts import ROWS
from cascade_lab.trigger import DeviceModel

CARD = DeviceModel("a card", 4.3e12, 5.5e12, 50 << 20, 2e-6, 790e12, 132, "rates of an H200 under load, rounded")


def ceilings(card: DeviceModel) -> dict:
    """What a record says of the card."""
    rows = [
        {"what": "copy memory", "bytes_per_s": card.bandwidth, "seconds": 1e-3},
        {"what": "copy L2", "bytes_per_s": card.l2_bandwidth, "seconds": 1e-3},
        {"what": "matmul 8192", "flops_per_s": card.matmul_rate, "seconds": 1e-3},
        {"what": "one-element addition", "seconds": card.launch},
    ]
    where = {"L2 bytes": str(card.l2_bytes), "multiprocessors": str(card.num_sms)}
    return {"provenance": where, "sections": {"ceilings": {"rows": rows}}}


def record_of(scale: Scale, card: DeviceModel, slower: dict[str, float] | None = None) -> dict:
    """Every point of all sections at the model's time, or of those in `slower` alone at so many times that."""
    shape = asdict(scale)
    record = {
        "scale": shape, "timings": "device events", "complete": True, "break_even": {}, **ceilings(card)
    }  # fmt: skip
    sections = {
        "verify": _verify, "batches": _batches, "peers": _peers, "prefill": _prefill, "linear": _linear,
        "costs": _merges, "counters": _counters,
    }  # fmt: skip
    for name, factor in (slower or dict.fromkeys(sections, 1.0)).items():
        record["sections"][name] = {"rows": list(sections[name](scale, shape, card, factor))}
    return record


def _verify(scale, shape, card, slower):
    for point in verify_points(scale):
        seconds = {plan: slower * expected.predicted for plan, expected in limits.verify(card, shape, point).items()}
        yield point | {
            "steps": scale.steps,
            "plans": {
                plan: {"seconds": taken, "ratio_measured": seconds["naive"] / taken, "ratio_predicted": 1.0}
                for plan, taken in seconds.items()
            },
        }


def _batches(scale, shape, card, slower):
    group = scale.centre[3]
    works = {mix.name: limits.batch_work(shape, group, mix.prompts, mix.hits) for mix in batches.mixes(scale)}
    trees = batches.tree_work(scale, batches.tree_batch(scale, "cpu"))
    for point in batches.batch_points(scale):
        work = works.get(point["mix"], trees)
        seconds = slower * limits.balanced(card, work).predicted
        yield point | {"bytes_must_move": work.bytes, "flops": work.flops, "seconds": seconds}


def _peers(scale, shape, card, slower):
    """Other kernels are as fast as the model allows too."""
    _, topk, _, group, _ = scale.centre
    for rows in ROWS:
        for batch in scale.peer_batches:
            for length in scale.peer_lengths:
                point = {"length": length, "topk": topk, "batch": batch, "group": group, "rows": rows}
                expected = limits.verify(card, shape, point)
                for plan, one in expected.items():
                    yield point | _timed(f"cascade_lab {plan}", slower * one.predicted)
                best = min(one.predicted for one in expected.values())
                yield point | _timed("FlexAttention, default", best) | {"agrees": True}
                yield point | _timed("another answer", 0.1 * best) | {"agrees": False}
                yield point | {"kernel": "FlashInfer", "missing": "ModuleNotFoundError"}
    for n in scale.prompts[:2]:
        point = {"prompt": n, "hit": 0, "group": group}
        seconds = limits.prefill(card, shape, n, 0, group).predicted
        yield point | _timed("cascade_lab prefill", slower * seconds)
        yield point | _timed("SDPA cudnn, causal", seconds) | {"agrees": True}


def _timed(kernel, seconds):
    return {"kernel": kernel, "seconds": seconds, "call_seconds": seconds}


def _prefill(scale, shape, card, slower):
    group = scale.centre[3]
    for point in prefill_points(scale):
        seconds = slower * limits.prefill(card, shape, point["new"], point["hit"], group).predicted
        shares = {"share_of_matmul": 1.0, "remaining": 1.0, "tile_remaining": 1.0}
        yield point | {"group": group, "seconds": seconds} | shares


def _linear(scale, shape, card, slower):
    width, out_width = scale.linear
    for rows in scale.linear_rows:
        seconds = slower * limits.linear(card, width, out_width, rows).predicted
        yield {"rows": rows, "width": width, "out_width": out_width, "seconds": seconds}


def _merges(scale, shape, card, slower):
    yield {"what": "cascade_attention", "seconds": 1e-4}
    for parts in scale.merge_parts:
        for rows in scale.merge_rows:
            seconds = slower * limits.merge(card, shape, rows, parts).predicted
            yield {"what": "merge_states", "rows": rows, "parts": parts, "seconds": seconds}


def _counters(scale, shape, card, slower):
    """Reads as often as the ledger says, distinct keys once from memory, or all of it so many times."""
    _, topk, _, group, rows = scale.centre
    for length in scale.counter_lengths:
        point = {"length": length, "topk": topk, "batch": scale.counter_batch, "group": group, "rows": rows}
        once = length * 4096
        plans = {}
        for plan, loaded in (("naive", topk * once), ("cascade", once), ("fused", once)):
            read = round(slower * loaded)
            plans[plan] = {
                "kv_bytes_loaded": loaded, "kv_bytes_distinct": once, "attention_l2_bytes": read, "l2_bytes": read,
                "l2_found_bytes": 0, "dram_bytes": read, "attention_dram_bytes": round(slower * once),
            }  # fmt: skip
        yield point | {"plans": plans}
