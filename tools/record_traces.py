"""Make figures/measured/traces.json of two public request traces.

The traces stay where they are published, only their sums are kept:
`python tools/record_traces.py DATA_FOLDER figures/measured/traces.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from cascade_lab.trace_report import BINS, HitHistogram, to_json
from cascade_lab.traces import MODELS, ModelShape, read_hits_csv, read_mooncake, replay, summarize

SOURCES = {
    "conversation": {
        "file": "mooncake/conversation_trace.jsonl",
        "repository": "kvcache-ai/Mooncake",
        "published as": "FAST25-release/traces/conversation_trace.jsonl",
        "commit": "3b5a5941",
        "snapshot": "2026-08-22",
        "licence": "Apache-2.0",
        "changes": "none",
    },
    "agentic": {
        "file": "agentic/requests_prefix_hits.csv",
        "repository": "callanjfox/kv-cache-tester",
        "published as": "traces/",
        "commit": "94f6046d",
        "snapshot": "2026-07-12",
        "licence": "Apache-2.0",
        "changes": "hits derived per session: blocks of 64 tokens, unlimited cache, at most N - 1; 710 of 739 sessions",
    },
}
CAPACITIES = (300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000)


def summarise(folder: Path) -> dict[str, object]:
    """The results of both public traces in `folder`, without the date."""
    conversation = folder / SOURCES["conversation"]["file"]
    requests = list(read_mooncake(conversation))
    agentic = list(replay(read_hits_csv(folder / SOURCES["agentic"]["file"])))
    pairs = {"conversation": list(replay(requests)), "agentic": agentic}
    sweep = {
        str(capacity): _rounded(summarize(replay(requests, capacity_tokens=capacity)).token_hit)
        for capacity in CAPACITIES
    }
    return {
        "source": list(SOURCES.values()),
        "devices": ["none: counted from lengths, block ids and hits"],
        "traces": {name: _entry(values) for name, values in pairs.items()},
        "conversation token_hit by capacity": sweep,
    }


def _entry(pairs: list[tuple[int, int]]) -> dict[str, object]:
    histogram = HitHistogram()
    plain = summarize(histogram.watch(pairs))
    summary = to_json(plain)
    lengths = sorted(n for n, _ in pairs)
    places = {"1%": 0.01, "25%": 0.25, "50%": 0.5, "75%": 0.75, "99%": 0.99, "100%": 1.0}
    return {
        "lengths": {name: lengths[round(p * (len(lengths) - 1))] for name, p in places.items()},
        **{name: _rounded(summary[name]) for name in summary if name not in ("model", "errors")},
        "errors": _errors(plain.errors),
        "models": {name: _for_model(pairs, model) for name, model in MODELS.items()},
        "histogram": {"bins": BINS, "requests": histogram.requests, "tokens": histogram.tokens},
    }


def _for_model(pairs: list[tuple[int, int]], model: ModelShape) -> dict[str, object]:
    summary = summarize(pairs, model=model)
    whole = {name: error for name, error in summary.errors.items() if not name.startswith("attention")}
    return {"model_remaining": _rounded(float(summary.model_remaining or 0)), "errors": _errors(whole)}


def _errors(errors: Mapping[str, float]) -> dict[str, float]:
    return {name: round(error, 6) for name, error in errors.items()}


def _rounded(value: object) -> object:
    """Six significant digits, where libraries agree to the last bit or not."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    folder, path = map(Path, sys.argv[1:])
    record = {"date": date.today().isoformat()} | summarise(folder)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
