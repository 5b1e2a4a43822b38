"""Logs and counters of inference engines: vLLM and SGLang, per request, per batch, and since the server began.

A line of a batch, and a counter, hold sums over requests. vLLM's periodic line holds two rounded means, so what is
made of it is an estimate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from cascade_lab.traces.formats.form import Format, Rows
from cascade_lab.traces.records import Complain, Record
from cascade_lab.traces.request import Fault

_DATE = r"(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)"
_SGLANG_BATCH = re.compile(
    r"Prefill batch.*?#new-seq: (?P<requests>\d+), #new-token: (?P<new>\d+), #cached-token: (?P<cached>\d+)"
)
_SGLANG_FINISH = re.compile(
    r"Finish: obj=(?=.*'prompt_tokens': (?P<prompt_tokens>\d+))(?=.*'cached_tokens': (?P<cached_tokens>\d+))"
)
_VLLM_TOKENS = re.compile(r"(?:Received request|Request) (?P<id>[^\s:]+).*?prompt_token_ids: \[(?P<ids>[\d, ]*)\]")
_VLLM_STATS = re.compile(
    r"Avg prompt throughput: (?P<rate>[\d.]+) tokens/s.*?[^n] ?Prefix cache hit rate: (?:GPU: )?(?P<hit>[\d.]+)%"
)
_COUNTER = re.compile(r"^(?P<name>[\w:]+)(?P<labels>\{[^}]*\})? (?P<value>[\d.eE+]+)")
# vLLM prints its line every ten seconds
_STATS_SECONDS = 10


def _matches(pattern: re.Pattern[str]) -> Rows:
    def rows(records: Iterator[Record], complain: Complain) -> Iterator[tuple[int, Mapping]]:
        for line, text in records:
            if isinstance(text, str) and (found := pattern.search(text)):
                when = re.search(_DATE, text)
                yield line, found.groupdict() | ({"time": when["time"]} if when else {})

    return rows


def _token_ids(records: Iterator[Record], complain: Complain) -> Iterator[tuple[int, Mapping]]:
    for line, row in _matches(_VLLM_TOKENS)(records, complain):
        yield line, row | {"prompt_token_ids": [int(token) for token in row["ids"].replace(",", " ").split()]}


def _stats(records: Iterator[Record], complain: Complain) -> Iterator[tuple[int, Mapping]]:
    for line, row in _matches(_VLLM_STATS)(records, complain):
        tokens = round(float(row["rate"]) * _STATS_SECONDS)
        if tokens:
            yield line, row | {"tokens": str(tokens), "hits": str(round(tokens * float(row["hit"]) / 100))}


def _counters(tokens: str, hits: str, requests: str) -> Rows:
    """One row of the three counters per model; of a counter that is there twice, what it grew by."""

    def rows(records: Iterator[Record], complain: Complain) -> Iterator[tuple[int, Mapping]]:
        seen: dict[tuple[str, str], list[float]] = {}
        last = 0
        for line, text in records:
            found = _COUNTER.match(text) if isinstance(text, str) else None
            name = found["name"].removesuffix("_total") if found else ""
            if name in (tokens, hits, requests):
                seen.setdefault((name, found["labels"] or ""), []).append(float(found["value"]))
                last = line
        sums: dict[str, dict[str, int]] = {}
        for (name, labels), values in seen.items():
            model = found[1] if (found := re.search(r'model_name="([^"]*)"', labels)) else ""
            grown = values[-1] - values[0] if len(values) > 1 else values[0]
            row = sums.setdefault(model, {})
            row[name] = row.get(name, 0) + round(grown)
        for model, row in sums.items():
            if gone := [name for name in (tokens, hits) if name not in row]:
                complain(last, Fault(gone[0], f"missing for model {model!r}, so that its hits are unknown"))
                continue
            yield last, {name: str(value) for name, value in row.items()} | {"model": model}

    return rows


ENGINES = (
    Format(
        "sglang-batches",
        "lines 'Prefill batch', sums over the sequences of each",
        "SGLang, scheduler log of prefill batches (#new-seq, #new-token, #cached-token)",
        pattern=_SGLANG_BATCH,
        rows=_matches(_SGLANG_BATCH),
        fields={
            "requests": "requests",
            "input_tokens": "new + cached",
            "hit_tokens": "cached",
            "time": "time:iso",
        },
        estimated="a prompt that is prefilled in chunks counts as several, so that the bounds hold for chunks",
    ),
    Format(
        "sglang-finish",
        "lines 'Finish: obj=' of --log-requests",
        "SGLang, server arguments, --log-requests",
        pattern=_SGLANG_FINISH,
        rows=_matches(_SGLANG_FINISH),
        fields={"input_tokens": "prompt_tokens", "hit_tokens": "cached_tokens", "time": "time:iso"},
    ),
    Format(
        "sglang-requests",
        "answers of /generate, or events 'request.finished' of the JSON request log",
        "SGLang, server arguments, --log-requests-format json; native API, meta_info",
        needs=(
            "out.meta_info.prompt_tokens | meta_info.prompt_tokens",
            "out.meta_info.cached_tokens | meta_info.cached_tokens",
        ),
        rows=lambda records, complain: (
            (line, row) for line, row in records if row.get("event") in (None, "request.finished")
        ),
        fields={
            "input_tokens": "out.meta_info.prompt_tokens | meta_info.prompt_tokens",
            "hit_tokens": "out.meta_info.cached_tokens | meta_info.cached_tokens",
            "output_tokens": "out.meta_info.completion_tokens | meta_info.completion_tokens",
            "time": "timestamp | created",
            "model": "obj.model | model",
        },
    ),
    Format(
        "vllm-outputs",
        "request outputs with num_cached_tokens",
        "vLLM, API reference, RequestOutput",
        needs=("num_cached_tokens", "prompt_token_ids | num_prompt_tokens"),
        fields={
            "input_tokens": "num_prompt_tokens | len(prompt_token_ids)",
            "hit_tokens": "num_cached_tokens",
            "time": "metrics.arrival_time:s | arrival_time:s | timestamp",
            "model": "model",
        },
    ),
    Format(
        "vllm-requests",
        "lines 'Received request' with the prompt's token ids",
        "vLLM, API reference, entrypoints.logger.RequestLogger (--enable-log-requests)",
        pattern=_VLLM_TOKENS,
        rows=_token_ids,
        fields={"token_ids": "prompt_token_ids", "time": "time:iso"},
        block_size=16,
    ),
    Format(
        "vllm-stats",
        "lines 'Avg prompt throughput ... Prefix cache hit rate'",
        "vLLM, API reference, v1.metrics.loggers.LoggingStatLogger",
        pattern=_VLLM_STATS,
        rows=_stats,
        fields={"input_tokens": "tokens", "hit_tokens": "hits", "requests": "requests", "time": "time:iso"},
        estimated="tokens are throughput x 10 s, and hits are tokens x a rate over the last 1,000 requests",
    ),
    Format(
        "vllm-metrics",
        "counters of /metrics",
        "vLLM, Production Metrics",
        pattern=re.compile(r"^vllm:prefix_cache_(queries|hits)(_total)?\b"),
        rows=_counters("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:request_prompt_tokens_count"),
        fields={
            "requests": "vllm:request_prompt_tokens_count",
            "input_tokens": "vllm:prefix_cache_queries",
            "hit_tokens": "vllm:prefix_cache_hits",
            "model": "model",
        },
    ),
    Format(
        "sglang-metrics",
        "counters of /metrics",
        "SGLang, Production Metrics",
        pattern=re.compile(r"^sglang:(prompt|cached)_tokens_total\b"),
        rows=_counters("sglang:prompt_tokens", "sglang:cached_tokens", "sglang:num_requests"),
        fields={
            "requests": "sglang:num_requests",
            "input_tokens": "sglang:prompt_tokens",
            "hit_tokens": "sglang:cached_tokens",
            "model": "model",
        },
    ),
)
