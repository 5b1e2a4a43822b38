"""Sessions: of coding agents as they log themselves, and of benchmark tools as they replay them.

A session sends its history again each turn. A log says so in one of three ways: by usage per call (Claude Code, Codex),
by ids of the whole prompt, which may be unique within their session alone (Dynamo, Weka), or by what each turn adds
(AIPerf), so that the history is put together here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cascade_lab.traces.formats.form import Format
from cascade_lab.traces.records import Complain, Record
from cascade_lab.traces.request import Fault


def _claude_code(records: Iterator[Record], complain: Complain) -> Iterator[tuple[int, Mapping]]:
    """Answers of the model, each once: a line per content block repeats the usage of its message."""
    seen = set()
    for line, row in records:
        message = row.get("message")
        if row.get("type") != "assistant" or not isinstance(message, Mapping) or "usage" not in message:
            continue
        key = message.get("id"), row.get("requestId")
        if message.get("model") == "<synthetic>" or (key[0] is not None and key in seen):
            continue
        seen.add(key)
        yield line, row


def _codex(records: Iterator[Record], complain: Complain) -> Iterator[tuple[int, Mapping]]:
    """Calls of the model: events token_count whose total has grown; model and session are said before them."""
    model = session = total = None
    for line, row in records:
        payload = row.get("payload")
        if not isinstance(payload, Mapping):
            continue
        if row.get("type") == "session_meta":
            session, total = payload.get("id"), None
        model = payload.get("model", model) if row.get("type") == "turn_context" else model
        if payload.get("type") != "token_count" or not isinstance(info := payload.get("info"), Mapping):
            continue
        if info.get("total_token_usage") == total and total is not None:
            continue
        total = info.get("total_token_usage")
        yield line, info | {"timestamp": row.get("timestamp"), "model": model, "session": session}


def _weka(records: Iterator[Record], complain: Complain) -> Iterator[tuple[int, Mapping]]:
    """The requests of each session in order of time, those of sub-agents among them."""
    for line, trace in records:
        shared = {"session": trace.get("id"), "block_size": trace.get("block_size")}
        try:
            if trace.get("hash_id_scope") != "global":
                if trace.get("id") is None:
                    raise Fault("id", "missing, and block ids are unique within a trace alone")
                shared["trace"] = trace["id"]
            calls = list(_calls(trace.get("requests"), 0.0))
        except Fault as fault:
            complain(line, fault)
            continue
        for _, call in sorted(calls, key=lambda one: one[0]):
            yield line, dict(call) | shared


def _calls(requests: object, start: float) -> Iterator[tuple[float, Mapping]]:
    if not isinstance(requests, list):
        raise Fault("requests", "expected a list of requests")
    for one in requests:
        if not isinstance(one, Mapping):
            raise Fault("requests", "expected a list of objects")
        t = one.get("t", start)
        if type(t) not in (int, float):
            raise Fault("t", f"expected a number of seconds, given {t!r}")
        # the calls of a sub-agent are on the trace's clock, or on its own
        t = float(t) if t >= start else start + float(t)
        if one.get("type") == "subagent":
            yield from _calls(one.get("requests"), t)
        else:
            yield t, dict(one) | {"t": t}


def _dynamo(records: Iterator[Record], complain: Complain) -> Iterator[tuple[int, Mapping]]:
    """Finished requests, also where a recorder has put the event into an envelope."""
    for line, row in records:
        event = row["event"] if isinstance(row.get("event"), Mapping) else row
        if event.get("event_type") == "request_end":
            yield line, event


def _agentic(records: Iterator[Record], complain: Complain) -> Iterator[tuple[int, Mapping]]:
    """Rows after their header, which says the block size and that ids are unique within a play alone."""
    shared: dict[str, object] = {}
    local = True
    for line, row in records:
        if "schema" in row:
            shared = {"block_size": row.get("block_size")}
            local = row.get("hash_id_scope") != "global"
        elif not shared:
            complain(line, Fault("schema", "expected a header before the first request"))
        elif local and "play_id" not in row:
            complain(line, Fault("play_id", "missing, and block ids are unique within a play alone"))
        else:
            yield line, dict(row) | shared | ({"play": row["play_id"]} if local else {})


AGENTS = (
    Format(
        "claude-code",
        "session files, one line per message",
        "Claude Code, ~/.claude/projects/*/*.jsonl; Anthropic API reference, Messages, usage",
        needs=("message.usage.cache_read_input_tokens", "type=assistant"),
        rows=_claude_code,
        fields={
            "input_tokens": "message.usage.input_tokens + message.usage.cache_read_input_tokens + "
            "message.usage.cache_creation_input_tokens",
            "hit_tokens": "message.usage.cache_read_input_tokens",
            "output_tokens": "message.usage.output_tokens",
            "time": "timestamp:iso",
            "session": "sessionId",
            "model": "message.model",
            "tenant": "cwd",
        },
    ),
    Format(
        "codex",
        "session files (rollouts), one line per event",
        "Codex CLI, ~/.codex/sessions/**/rollout-*.jsonl, events token_count",
        needs=("payload.info.last_token_usage", "type=event_msg"),
        rows=_codex,
        fields={
            "input_tokens": "last_token_usage.input_tokens",
            "hit_tokens": "last_token_usage.cached_input_tokens",
            "output_tokens": "last_token_usage.output_tokens",
            "time": "timestamp:iso",
            "session": "session",
            "model": "model",
        },
    ),
    Format(
        "weka",
        "one session a line or file, ids local to it",
        "callanjfox/kv-cache-tester, traces; AIPerf documentation, Weka traces",
        needs=("requests", "block_size", "hash_id_scope | id"),
        rows=_weka,
        fields={
            "input_tokens": "in",
            "block_ids": "hash_ids",
            "output_tokens": "out",
            "time": "t:s",
            "session": "session",
            "model": "model",
            "block_size": "block_size",
            "scope": "trace",
        },
        session_clock=True,
    ),
    Format(
        "dynamo",
        "request traces with sequence hashes",
        "NVIDIA Dynamo documentation, request tracing (dynamo.request.trace.v1)",
        needs=("request.replay.input_sequence_hashes | event.request.replay.input_sequence_hashes",),
        rows=_dynamo,
        fields={
            "input_tokens": "request.replay.input_length",
            "block_ids": "request.replay.input_sequence_hashes",
            "output_tokens": "request.output_tokens",
            "time": "request.request_received_ms:ms | event_time_unix_ms:ms",
            "session": "agent_context.session_id",
            "model": "request.model",
            "block_size": "request.replay.trace_block_size",
        },
    ),
    Format(
        "dynamo-agentic",
        "a header, then one request a line, ids local to its play",
        "NVIDIA Dynamo, dynamo-data-gen, agentic Mooncake rows (dynamo.agentic_mooncake)",
        needs=("schema=dynamo.agentic_mooncake", "block_size", "hash_id_scope"),
        rows=_agentic,
        fields={
            "input_tokens": "input_length | input_tokens",
            "block_ids": "hash_ids",
            "output_tokens": "output_length | output_tokens",
            "time": "not_before_ms:ms",
            "session": "session_id",
            "model": "model",
            "block_size": "block_size",
            "scope": "play",
        },
        session_clock=True,
    ),
    Format(
        "sessions",
        "one turn a line, whole prompts with ids",
        "NVIDIA Dynamo, dynamo-data-gen, Mooncake rows; AIPerf documentation, Trace Replay with Mooncake Traces",
        needs=("session_id", "input_length | input_tokens", "hash_ids"),
        lacks=("chat_id", "play_id", "metadata"),
        fields={
            "input_tokens": "input_length | input_tokens",
            "block_ids": "hash_ids",
            "output_tokens": "output_length | output_tokens",
            "time": "timestamp:ms | created_time:ms",
            "session": "session_id",
            "model": "model",
            "block_size": "block_size",
        },
        block_size=512,
    ),
    Format(
        "session-deltas",
        "one turn a line, its new tokens alone; the history before it counts as prompt",
        "AIPerf documentation, Trace Replay with Mooncake Traces, Conversation Context Mode",
        needs=("session_id", "input_length", "output_length"),
        lacks=("chat_id", "play_id", "metadata", "hash_ids"),
        fields={
            "input_tokens": "input_length",
            "output_tokens": "output_length",
            "time": "timestamp:ms",
            "session": "session_id",
            "model": "model",
        },
        block_size=16,
        deltas=True,
    ),
)
