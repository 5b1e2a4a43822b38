"""Published traces of serving, as their repositories hold them: with ids per block, or with lengths alone."""

from __future__ import annotations

from cascade_lab.traces.formats.form import Format

PUBLISHED = (
    Format(
        "bailian",
        "one request a line, salted hashes of 16-token blocks",
        "alibaba-edu/qwen-bailian-usagetraces-anon, README; AIPerf documentation, Profile with Bailian Traces",
        needs=("chat_id", "input_length", "hash_ids"),
        fields={
            "input_tokens": "input_length",
            "block_ids": "hash_ids",
            "output_tokens": "output_length",
            "time": "timestamp:s",
            "tenant": "type",
        },
        block_size=16,
        content_ids=True,
    ),
    Format(
        "mooncake",
        "one request a line, ids of 512-token blocks",
        "kvcache-ai/Mooncake, FAST25-release/traces; AIPerf documentation, Trace Replay with Mooncake Traces",
        needs=("input_length | input_tokens", "hash_ids"),
        lacks=("chat_id", "session_id", "play_id", "metadata"),
        fields={
            "input_tokens": "input_length | input_tokens",
            "block_ids": "hash_ids",
            "output_tokens": "output_length | output_tokens",
            "time": "timestamp:ms | created_time:ms",
            "model": "model",
            "block_size": "block_size",
        },
        block_size=512,
    ),
    Format(
        "azure",
        "one request a line, lengths alone",
        "Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md",
        needs=("ContextTokens", "GeneratedTokens"),
        fields={"input_tokens": "ContextTokens", "output_tokens": "GeneratedTokens", "time": "TIMESTAMP"},
    ),
    Format(
        "burstgpt",
        "one request a line, lengths alone",
        "HPMLL/BurstGPT, README",
        needs=("Request tokens", "Response tokens"),
        fields={
            "input_tokens": "Request tokens",
            "output_tokens": "Response tokens",
            "time": "Timestamp:s",
            "model": "Model",
            "session": "Session ID",
            "tenant": "Log Type",
        },
    ),
    Format(
        "vidur",
        "one request a line, lengths alone",
        "microsoft/vidur, data/processed_traces",
        needs=("num_prefill_tokens", "num_decode_tokens"),
        fields={
            "input_tokens": "num_prefill_tokens",
            "output_tokens": "num_decode_tokens",
            "time": "arrived_at:s",
        },
    ),
    Format(
        "hits",
        "one request a line, its length and its hit",
        "this package",
        needs=("input_tokens", "prefix_hit_tokens"),
        fields={
            "input_tokens": "input_tokens",
            "hit_tokens": "prefix_hit_tokens",
            "output_tokens": "output_tokens",
            "time": "t_s:s | timestamp",
            "session": "session | trace_id | session_id",
            "model": "model",
            "tenant": "tenant | user",
        },
    ),
)
