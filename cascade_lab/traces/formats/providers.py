"""Answers and usage exports of providers and gateways: OpenAI, Anthropic, LiteLLM.

OpenAI's input tokens include the cached ones. Anthropic's exclude what is read from the cache and what is written to
it, so there N = input_tokens + cache_read_input_tokens + cache_creation_input_tokens and H = cache_read_input_tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress

from cascade_lab.traces.formats.form import Format
from cascade_lab.traces.records import Complain, Record


def _unwrapped(records: Iterator[Record], complain: Complain) -> Iterator[tuple[int, Mapping]]:
    """Answers as they are, or inside a batch's output line or a proxy's log."""
    for line, row in records:
        for path in (("response", "body"), ("result", "message"), ("response",), ("body",)):
            inner: object = row
            for name in path:
                inner = inner.get(name) if isinstance(inner, Mapping) else None
            if isinstance(inner, Mapping) and "usage" in inner:
                row = {name: value for name, value in row.items() if name != path[0]} | dict(inner)
                break
        yield line, row


def _buckets(records: Iterator[Record], complain: Complain) -> Iterator[tuple[int, Mapping]]:
    """The results of a page's buckets, each with the start of its bucket; a bucket without requests has none."""
    for line, row in records:
        for bucket in row["data"] if isinstance(row.get("data"), list) else [row]:
            for result in bucket.get("results", []):
                start = bucket.get("start_time", bucket.get("starting_at"))
                yield line, dict(result) | {"bucket": start}


def _metadata(records: Iterator[Record], complain: Complain) -> Iterator[tuple[int, Mapping]]:
    """Rows whose metadata may be JSON as text."""
    for line, row in records:
        if isinstance(row.get("metadata"), str):
            with suppress(ValueError, RecursionError):
                row = row | {"metadata": json.loads(row["metadata"])}
        yield line, row


_LITELLM = {
    "input_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "time": "startTime",
    "session": "session_id",
    "model": "model_group | model",
    "tenant": "team_id | user | end_user | api_key",
}
_IDS = "metadata.prefix_block_hashes"
PROVIDERS = (
    Format(
        "openai-responses",
        "answers of the Responses API, also in batch outputs",
        "OpenAI API reference, Responses, usage",
        needs=(
            "usage.input_tokens | response.usage.input_tokens | response.body.usage.input_tokens",
            "usage.input_tokens_details | response.usage.input_tokens_details | "
            "response.body.usage.input_tokens_details",
        ),
        rows=_unwrapped,
        fields={
            "input_tokens": "usage.input_tokens",
            "hit_tokens": "usage.input_tokens_details.cached_tokens",
            "output_tokens": "usage.output_tokens",
            "time": "created_at:s",
            "model": "model",
            "tenant": "user | safety_identifier",
            "session": "conversation.id | prompt_cache_key",
        },
    ),
    Format(
        "openai-chat",
        "answers of the Chat Completions API, of OpenAI, vLLM or SGLang, also in batch outputs",
        "OpenAI API reference, Chat, usage; vLLM, --enable-prompt-tokens-details; SGLang, --enable-cache-report",
        needs=(
            "usage.prompt_tokens | response.usage.prompt_tokens | response.body.usage.prompt_tokens",
            "usage.prompt_tokens_details | response.usage.prompt_tokens_details | "
            "response.body.usage.prompt_tokens_details",
        ),
        rows=_unwrapped,
        fields={
            "input_tokens": "usage.prompt_tokens",
            "hit_tokens": "usage.prompt_tokens_details.cached_tokens",
            "output_tokens": "usage.completion_tokens",
            "time": "created:s",
            "model": "model",
            "tenant": "user",
        },
    ),
    Format(
        "openai-usage",
        "pages of the usage API: sums over requests per bucket",
        "OpenAI API reference, Usage, completions",
        needs=("data | results", "object=page | object=bucket"),
        rows=_buckets,
        fields={
            "requests": "num_model_requests",
            "input_tokens": "input_tokens",
            "hit_tokens": "input_cached_tokens",
            "time": "bucket:s",
            "model": "model",
            "tenant": "project_id | user_id | api_key_id",
        },
    ),
    Format(
        "openai-usage-rows",
        "rows of a usage export: sums over requests",
        "OpenAI API reference, Usage, completions",
        needs=("input_tokens", "input_cached_tokens", "num_model_requests"),
        fields={
            "requests": "num_model_requests",
            "input_tokens": "input_tokens",
            "hit_tokens": "input_cached_tokens",
            "time": "start_time | start_time_iso",
            "model": "model",
            "tenant": "project_id | user_id | api_key_id",
        },
    ),
    Format(
        "anthropic",
        "answers of the Messages API, also in batch results",
        "Anthropic API reference, Messages, usage; prompt caching",
        needs=(
            "usage.cache_read_input_tokens | response.usage.cache_read_input_tokens | "
            "result.message.usage.cache_read_input_tokens",
            "usage.input_tokens | response.usage.input_tokens | result.message.usage.input_tokens",
        ),
        lacks=("usage.input_tokens_details",),
        rows=_unwrapped,
        fields={
            "input_tokens": "usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens",
            "hit_tokens": "usage.cache_read_input_tokens",
            "output_tokens": "usage.output_tokens",
            "time": "created_at | timestamp | time",
            "model": "model",
            "tenant": "workspace_id | user_id",
            "session": "session_id",
        },
    ),
    Format(
        "anthropic-usage",
        "pages of the usage report: sums per bucket, without the number of requests",
        "Anthropic API reference, Admin API, messages usage report",
        needs=("data", "has_more | next_page"),
        lacks=("object",),
        rows=_buckets,
        fields={
            "requests": "requests",
            "input_tokens": "uncached_input_tokens + cache_read_input_tokens + "
            "cache_creation.ephemeral_1h_input_tokens + cache_creation.ephemeral_5m_input_tokens",
            "hit_tokens": "cache_read_input_tokens",
            "time": "bucket",
            "model": "model",
            "tenant": "workspace_id | api_key_id",
        },
    ),
    Format(
        "anthropic-console",
        "rows of a usage export: sums, without the number of requests",
        "Claude Console, export of token usage",
        needs=("usage_input_tokens_no_cache", "usage_input_tokens_cache_read"),
        fields={
            "requests": "requests",
            "input_tokens": "usage_input_tokens_no_cache + usage_input_tokens_cache_read + "
            "usage_input_tokens_cache_write_5m + usage_input_tokens_cache_write_1h",
            "hit_tokens": "usage_input_tokens_cache_read",
            "time": "usage_date_utc",
            "model": "model_version",
            "tenant": "workspace | api_key",
        },
    ),
    Format(
        "litellm",
        "spend logs with hashes of prefix blocks",
        "LiteLLM documentation, Prefix Block Hash IDs; spend logs",
        needs=("prompt_tokens", f"{_IDS} | metadata.hash_ids | prefix_block_hashes"),
        rows=_metadata,
        fields=_LITELLM
        | {
            "block_ids": f"{_IDS}.hash_ids | {_IDS}.ids | {_IDS} | metadata.hash_ids | prefix_block_hashes",
            "block_size": f"{_IDS}.block_size | metadata.block_size | block_size",
        },
    ),
    Format(
        "litellm-usage",
        "spend logs with the provider's cached tokens",
        "LiteLLM documentation, spend logs, additional_usage_values",
        needs=("prompt_tokens", "metadata.additional_usage_values"),
        rows=_metadata,
        fields=_LITELLM
        | {
            "hit_tokens": "metadata.additional_usage_values.prompt_tokens_details.cached_tokens | "
            "metadata.additional_usage_values.cache_read_input_tokens"
        },
    ),
)
