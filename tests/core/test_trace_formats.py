"""Logs as they are: every format from a small sample of its own, its sums by hand, and what is refused by name."""

import gzip
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cascade_lab import cli
from cascade_lab.files import UsageError
from cascade_lab.traces import FORMATS, Request, TraceError, read_logs, read_table, read_trace, replay, summarize

SAMPLES = Path(__file__).resolve().parents[1] / "data" / "logs"
# (format, (N, H) of each request, by hand from the sample)
PAIRS = {
    "anthropic.jsonl": ("anthropic", [(1041, 0), (972, 149)]),
    "bailian.jsonl": ("bailian", [(40, 0), (60, 32), (33, 0)]),
    "claude_code.jsonl": ("claude-code", [(12003, 0), (12405, 12000)]),
    "codex.jsonl": ("codex", [(6000, 0), (6500, 5888)]),
    "dynamo.jsonl": ("dynamo", [(70, 0), (96, 64)]),
    "dynamo_agentic.jsonl": ("dynamo-agentic", [(128, 0), (190, 128), (128, 0)]),
    "hits.csv": ("hits", [(700, 0), (900, 704), (50, 49)]),
    "litellm.jsonl": ("litellm", [(40, 0), (50, 32)]),
    "litellm_usage.jsonl": ("litellm-usage", [(640, 512), (128, 0)]),
    "lmcache.jsonl": ("lmcache", [(31, 0), (41, 16), (13, 0)]),
    "messages.jsonl": ("messages", [(39, 0), (61, 32)]),
    "mooncake.jsonl": ("mooncake", [(1100, 0), (1800, 1024), (600, 0)]),
    "openai_chat.jsonl": ("openai-chat", [(1200, 1024), (90, 0)]),
    "openai_responses.jsonl": ("openai-responses", [(1500, 0), (2400, 1408)]),
    # turns of 100, 30 and 5 tokens and answers of 20 and 10: prompts of 100, 150 and 165
    "session_deltas.jsonl": ("session-deltas", [(100, 0), (64, 0), (150, 96), (165, 144)]),
    "sessions.jsonl": ("sessions", [(600, 0), (700, 512), (1100, 512)]),
    "sglang_finish.log": ("sglang-finish", [(70, 0), (110, 69)]),
    "sglang_requests.jsonl": ("sglang-requests", [(300, 0), (450, 299)]),
    "vllm_outputs.jsonl": ("vllm-outputs", [(5, 0), (9, 4)]),
    "vllm_requests.log": ("vllm-requests", [(20, 0), (33, 16), (17, 0)]),
    "weka.json": ("weka", [(200, 0), (130, 128), (260, 192)]),
    "weka.jsonl": ("weka", [(128, 0), (192, 128), (100, 0)]),
}
# (format, lengths)
LENGTHS = {
    "azure.csv": ("azure", [4808, 3180, 110]),
    "burstgpt.csv": ("burstgpt", [472, 1087, 417]),
    "vidur.csv": ("vidur", [374, 396]),
}
# (format, (requests, N, H) of each row)
SUMS = {
    "anthropic_console.csv": ("anthropic-console", [(None, 1000, 850), (None, 1000, 500)]),
    "anthropic_usage.json": ("anthropic-usage", [(None, 3200, 200)]),
    "openai_usage.csv": ("openai-usage-rows", [(5, 1000, 800), (2, 600, 100)]),
    "openai_usage.json": ("openai-usage", [(5, 1000, 800), (1, 300, 0)]),
    "sglang_batches.log": ("sglang-batches", [(1, 100, 10), (3, 600, 450)]),
    "sglang_metrics.txt": ("sglang-metrics", [(4, 2000, 600)]),
    "vllm_metrics.txt": ("vllm-metrics", [(10, 10000, 3500)]),
    # 120 tokens/s for ten seconds at 25%, then 40 at 50%
    "vllm_stats.log": ("vllm-stats", [(None, 1200, 300), (None, 400, 200)]),
}
KEEPS_TIME = {
    "vllm_outputs.jsonl": [1750000000250, 1750000001500],
    "openai_responses.jsonl": [1750000000e3, 1750003700e3],
    "bailian.jsonl": [61114, 75500, 80000],
    "lmcache.jsonl": [1750000000e3, 1750000001e3, 1750000002e3],
    "azure.csv": [1700158623979.96, 1700158624031.96, 1700158624078.149],
    "claude_code.jsonl": [1796029203e3, 1796029209e3],
    "burstgpt.csv": [5e3, 45e3, 118e3],
}


def pairs(log):
    return list(replay(log.requests, block_size=log.block_size or 1, check_chain=True))


def test_every_format_has_a_sample_and_every_sample_a_sum():
    assert {name for name, _ in (PAIRS | LENGTHS | SUMS).values()} == set(FORMATS)
    assert {path.name for path in SAMPLES.iterdir()} == set(PAIRS | LENGTHS | SUMS)


@pytest.mark.parametrize("name", PAIRS)
def test_a_log_is_recognised_and_its_lengths_and_hits_are_those_by_hand(name):
    log = read_logs([SAMPLES / name])
    assert (log.format.name, log.gives in ("hits", "block ids")) == (PAIRS[name][0], True)
    assert pairs(log) == PAIRS[name][1]
    assert [n for n, _ in replay(read_trace(SAMPLES / name), block_size=log.block_size or 1)] == [
        n for n, _ in PAIRS[name][1]
    ]


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_alone_have_no_hit_and_not_a_hit_of_zero(name):
    log = read_logs([SAMPLES / name])
    requests = list(log.requests)
    assert (log.format.name, log.gives) == (LENGTHS[name][0], "lengths")
    assert [request.input_tokens for request in requests] == LENGTHS[name][1]
    assert {(request.hit_tokens, request.block_ids) for request in requests} == {(None, None)}
    with pytest.raises(ValueError, match="expected block_ids or hit_tokens, given neither"):
        list(replay(requests))


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_read_as_sums(name):
    log = read_logs([SAMPLES / name])
    assert (log.format.name, log.gives) == (SUMS[name][0], "sums")
    assert [(one.requests, one.tokens, one.hit_tokens) for one in log.totals] == SUMS[name][1]
    assert list(log.requests) == []
    with pytest.raises(TraceError, match="expected requests, given sums over requests"):
        list(read_trace(SAMPLES / name))


@pytest.mark.parametrize("name", KEEPS_TIME)
def test_times_are_milliseconds_whatever_the_log_counts_in(name):
    found = [request.timestamp for request in read_logs([SAMPLES / name]).requests]
    assert found == pytest.approx(KEEPS_TIME[name], abs=0.01)


def test_who_a_request_is_of_is_kept_where_the_log_says():
    requests = list(read_logs([SAMPLES / "litellm.jsonl"]).requests)
    assert [(one.model, one.tenant, one.session) for one in requests] == [("m", "blue", None), ("m", "red", None)]
    (first, second) = read_logs([SAMPLES / "codex.jsonl"]).requests
    assert (first.model, first.session, second.output_tokens) == ("gpt-5-codex", "thread-1", 19)
    (first, second) = read_logs([SAMPLES / "openai_usage.json"]).totals
    assert (first.model, first.tenant, second.timestamp) == ("gpt-5", "p1", 1750000000e3)


def test_the_account_says_how_each_field_was_read():
    account = read_logs([SAMPLES / "anthropic.jsonl"]).account
    total = "usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens"
    assert account[0].startswith(f"{(SAMPLES / 'anthropic.jsonl').as_posix()}: anthropic, ")
    assert f"  input tokens = {total}" in account
    assert "  hit tokens = usage.cache_read_input_tokens" in account
    assert any(line.startswith("  time = ") and line.endswith("the first row lacks") for line in account)
    assert "  ids of blocks alone, chained here, 16 tokens each" in read_logs([SAMPLES / "bailian.jsonl"]).account
    assert "  ids unique within a trace, 64 tokens each" in read_logs([SAMPLES / "weka.json"]).account
    assert "  hit tokens = vllm:prefix_cache_hits" in read_logs([SAMPLES / "vllm_metrics.txt"]).account
    assert "  time = timestamp (us)" in read_logs([SAMPLES / "lmcache.jsonl"]).account
    assert any("four" in line or "4 characters" in line for line in read_logs([SAMPLES / "lmcache.jsonl"]).account)


def test_anthropic_input_tokens_exclude_what_is_read_from_the_cache_and_written_to_it():
    """149 of 641 + 400 and 700 + 123 + 149 tokens are 0.074; without the written ones they would be 0.10."""
    found = summarize(replay(read_logs([SAMPLES / "anthropic.jsonl"]).requests))
    assert found.token_hit == 149 / 2013
    assert 149 / (641 + 700 + 149) == 0.1


# what is missing is a fault, never zero


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("anthropic.jsonl", "usage.cache_read_input_tokens"),
        ("anthropic.jsonl", "usage.cache_creation_input_tokens"),
        ("claude_code.jsonl", "message.usage.cache_creation_input_tokens"),
        ("codex.jsonl", "payload.info.last_token_usage.cached_input_tokens"),
        ("openai_chat.jsonl", "usage.prompt_tokens_details.cached_tokens"),
        ("openai_responses.jsonl", "response.body.usage.input_tokens_details.cached_tokens"),
        ("sglang_requests.jsonl", "out.meta_info.cached_tokens"),
        ("vllm_outputs.jsonl", "num_cached_tokens"),
        ("litellm_usage.jsonl", "metadata.additional_usage_values.prompt_tokens_details.cached_tokens"),
        ("mooncake.jsonl", "hash_ids"),
        ("session_deltas.jsonl", "output_length"),
        ("dynamo.jsonl", "event.request.replay.input_length"),
    ],
)
@pytest.mark.parametrize("gone", [True, False])
def test_a_field_that_is_missing_or_null_is_a_fault_of_its_line(name, path, gone, tmp_path):
    lines = (SAMPLES / name).read_text().splitlines()
    last = json.loads(lines[-1])
    *parents, leaf = path.split(".")
    inner = last
    for parent in parents:
        inner = inner[parent]
    if gone:
        del inner[leaf]
    else:
        inner[leaf] = None
    (tmp_path / "log.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]))
    with pytest.raises(TraceError, match=rf"line {len(lines)}, .*(missing|given None)") as caught:
        pairs(read_logs([tmp_path / "log.jsonl"]))
    assert leaf in str(caught.value)
    skipped = []
    kept = pairs(read_logs([tmp_path / "log.jsonl"], on_error="skip", skipped=skipped))
    assert (kept, len(skipped)) == (PAIRS[name][1][:-1], 1)


def test_a_sum_without_its_hits_is_refused(tmp_path):
    text = (SAMPLES / "openai_usage.csv").read_text().replace(",800,", ",,")
    (tmp_path / "usage.csv").write_text(text)
    with pytest.raises(TraceError, match="line 2, input_cached_tokens: expected a value, given ''"):
        list(read_logs([tmp_path / "usage.csv"]).totals)
    lines = [line for line in (SAMPLES / "vllm_metrics.txt").read_text().splitlines() if "hits_total{" not in line]
    (tmp_path / "metrics.txt").write_text("\n".join(lines))
    with pytest.raises(TraceError, match="vllm:prefix_cache_hits: missing for model 'm'"):
        list(read_logs([tmp_path / "metrics.txt"]).totals)


def test_fields_that_are_not_used_are_not_required(tmp_path):
    (tmp_path / "trace.jsonl").write_text('{"input_length": 9, "hash_ids": [1]}\n{"input_length": 8, "hash_ids": [1]}')
    requests = list(read_logs([tmp_path / "trace.jsonl"]).requests)
    assert requests == [Request(None, 9, None, (1,), None), Request(None, 8, None, (1,), None)]


# recognition


def test_an_unknown_log_lists_the_known_ones_and_the_nearest(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"input_length": 9, "ids": [1], "when": 3}')
    with pytest.raises(TraceError) as caught:
        read_logs([tmp_path / "log.jsonl"])
    text = str(caught.value)
    assert all(name in text for name in FORMATS)
    assert "given input_length, ids, when; nearest is mooncake, of which it lacks hash_ids" in text
    assert "--field input_tokens=NAME" in text
    (tmp_path / "log.csv").write_text("a,ContextTokens\n1,2\n")
    with pytest.raises(TraceError, match="nearest is azure, of which it lacks GeneratedTokens"):
        read_logs([tmp_path / "log.csv"])


def test_columns_are_mapped_by_name(tmp_path):
    (tmp_path / "log.csv").write_text("when,prompt,reused\n2026-11-30 09:00:00,100,64\n2026-11-30 09:00:01,80,0\n")
    fields = {"input_tokens": "prompt", "hit_tokens": "reused", "time": "when"}
    log = read_logs([tmp_path / "log.csv"], fields=fields)
    assert pairs(log) == [(100, 64), (80, 0)]
    (tmp_path / "log.jsonl").write_text('{"u": {"new": 36, "old": 64}}\n{"u": {"new": 80, "old": 0}}\n')
    fields = {"input_tokens": "u.new + u.old", "hit_tokens": "u.old"}
    assert pairs(read_logs([tmp_path / "log.jsonl"], fields=fields)) == [(100, 64), (80, 0)]
    # a number stands for a column that the log does not have
    fields["hit_tokens"] = "0"
    assert pairs(read_logs([tmp_path / "log.jsonl"], fields=fields)) == [(100, 0), (80, 0)]


def test_one_field_of_a_known_format_is_replaced():
    fields = {"hit_tokens": "0"}
    assert pairs(read_logs([SAMPLES / "anthropic.jsonl"], fields=fields)) == [(1041, 0), (972, 0)]


def test_a_format_is_forced():
    log = read_logs([SAMPLES / "sessions.jsonl"], format="mooncake")
    assert (log.format.name, pairs(log)) == ("mooncake", PAIRS["sessions.jsonl"][1])
    with pytest.raises(TraceError, match="line 1, usage.prompt_tokens: missing"):
        pairs(read_logs([SAMPLES / "anthropic.jsonl"], format="openai-chat"))
    with pytest.raises(ValueError, match="format: expected one of sglang-batches, .*, given 'csv'"):
        read_logs([SAMPLES / "hits.csv"], format="csv")
    with pytest.raises(ValueError, match="fields: expected names among input_tokens, .*, given 'tokens'"):
        read_logs([SAMPLES / "hits.csv"], fields={"tokens": "input_tokens"})


def test_a_block_size_that_does_not_fit_names_the_one_that_does(tmp_path):
    with pytest.raises(
        TraceError, match="expected 0 or 1 ids for 40 tokens in blocks of 512, given 3; --block-size 16 "
    ):
        pairs(read_logs([SAMPLES / "bailian.jsonl"], block_size=512))
    rows = [json.loads(line) for line in (SAMPLES / "bailian.jsonl").read_text().splitlines()]
    for row in rows:
        del row["chat_id"]
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(TraceError, match="--block-size 16 would fit"):
        pairs(read_logs([tmp_path / "log.jsonl"]))


def test_litellm_without_a_block_size_asks_for_it(tmp_path):
    row = json.loads((SAMPLES / "litellm.jsonl").read_text().splitlines()[0])
    row["metadata"]["prefix_block_hashes"] = row["metadata"]["prefix_block_hashes"]["hash_ids"]
    (tmp_path / "log.jsonl").write_text(json.dumps(row))
    with pytest.raises(UsageError, match="format litellm does not say it; give --block-size"):
        read_logs([tmp_path / "log.jsonl"])
    assert pairs(read_logs([tmp_path / "log.jsonl"], block_size=16)) == [(40, 0)]


# chains of ids


def test_ids_that_are_no_chain_are_refused_and_chained_on_demand(tmp_path):
    """The example of AIPerf's documentation: id 1 stands after 0 and after nothing, id 4 after 3 and after 1."""
    rows = [(1200, [0, 1, 2]), (1800, [0, 3, 4, 5]), (1300, [1, 4, 6])]
    text = "\n".join(json.dumps({"input_length": n, "hash_ids": ids}) for n, ids in rows)
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(
        ValueError, match=r"requests\[2\]: block_ids: .*given 1 after two different ones; --ids content"
    ):
        pairs(read_logs([tmp_path / "log.jsonl"]))
    # ids of blocks alone: the third request shares no prefix
    log = read_logs([tmp_path / "log.jsonl"], content_ids=True)
    assert pairs(log) == [(1200, 0), (1800, 512), (1300, 0)]


def test_ids_of_blocks_alone_are_hits_only_behind_the_same_prefix():
    """Bailian's third request has ids 1090 and 1092 that came before, after other ids."""
    assert [hit for _, hit in pairs(read_logs([SAMPLES / "bailian.jsonl"]))] == [0, 32, 0]
    with pytest.raises(ValueError, match="given 1090 after two different ones"):
        pairs(read_logs([SAMPLES / "bailian.jsonl"], content_ids=False))


# sessions


def test_turns_that_hold_new_tokens_alone_find_their_history_again(tmp_path):
    """Every prompt as a list of tokens, each its own, against a cache of whole blocks of 8."""
    rows = [("a", 21, 5), ("b", 8, 9), ("a", 3, 2), ("a", 40, 1), ("b", 7, 7), ("a", 1, 1)]
    text = "\n".join(json.dumps({"session_id": who, "input_length": n, "output_length": out}) for who, n, out in rows)
    (tmp_path / "log.jsonl").write_text(text)
    history, cached, expected = {}, set(), []
    for turn, (who, n, out) in enumerate(rows):
        prompt = history.get(who, []) + [(turn, i) for i in range(n)]
        k = 0
        while (k + 1) * 8 <= len(prompt) and tuple(prompt[: (k + 1) * 8]) in cached:
            k += 1
        expected.append((len(prompt), min(8 * k, len(prompt) - 1)))
        cached |= {tuple(prompt[: (j + 1) * 8]) for j in range(len(prompt) // 8)}
        history[who] = prompt + [(turn, "answer", i) for i in range(out)]
    log = read_logs([tmp_path / "log.jsonl"], block_size=8)
    assert log.format.name == "session-deltas"
    assert pairs(log) == expected
    assert sum(hit for _, hit in expected) > 0
    assert [n for n, _ in expected] == [21, 8, 29, 71, 24, 73]


def test_whole_prompts_of_a_session_have_to_begin_alike_or_the_row_is_refused(tmp_path):
    rows = [("a", 600, [1, 2]), ("a", 500, [3]), ("a", 100, [4])]
    text = "\n".join(
        json.dumps({"session_id": who, "input_length": n, "output_length": 24, "hash_ids": ids}) for who, n, ids in rows
    )
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(
        TraceError, match=r"line 2, hash_ids: expected to begin with 1 as the session did, given 3: --turns"
    ):
        pairs(read_logs([tmp_path / "log.jsonl"]))
    assert pairs(read_logs([tmp_path / "log.jsonl"], turns="whole")) == [(600, 0), (500, 0), (100, 0)]
    # 600 + 24 + 500 and 600 + 24 + 500 + 24 + 100
    assert pairs(read_logs([tmp_path / "log.jsonl"], turns="delta")) == [(600, 0), (1124, 512), (1248, 1024)]


def test_new_messages_without_the_answers_before_them_are_refused(tmp_path):
    lines = (SAMPLES / "messages.jsonl").read_text().splitlines()
    row = json.loads(lines[1]) | {"message_mode": "delta"}
    (tmp_path / "log.jsonl").write_text("\n".join([lines[0], json.dumps(row)]))
    with pytest.raises(TraceError, match="line 2, message_mode: expected whole prompts"):
        pairs(read_logs([tmp_path / "log.jsonl"]))


def test_a_batch_that_begins_no_prompt_is_of_an_unknown_number(tmp_path):
    line = (SAMPLES / "sglang_batches.log").read_text().splitlines()[1]
    (tmp_path / "server.log").write_text(line.replace("#new-seq: 1", "#new-seq: 0"))
    log = read_logs([tmp_path / "server.log"])
    assert [(one.requests, one.tokens, one.hit_tokens) for one in log.totals] == [(None, 100, 10)]
    assert "  estimated: a prompt that is prefilled in chunks counts as several" in "\n".join(log.account)


def test_lengths_of_whole_prompts_say_nothing_of_hits():
    log = read_logs([SAMPLES / "session_deltas.jsonl"], turns="whole")
    assert (log.gives, [request.input_tokens for request in log.requests]) == ("lengths", [100, 64, 30, 5])
    with pytest.raises(UsageError, match="turns: expected a log whose rows name their session"):
        read_logs([SAMPLES / "vidur.csv"], turns="delta")


def test_ids_of_a_session_alone_are_not_those_of_another(tmp_path):
    text = (SAMPLES / "weka.jsonl").read_text()
    assert [hit for _, hit in pairs(read_logs([SAMPLES / "weka.jsonl"]))] == [0, 128, 0]
    (tmp_path / "log.jsonl").write_text(text.replace('"local"', '"global"'))
    assert [hit for _, hit in pairs(read_logs([tmp_path / "log.jsonl"]))] == [0, 128, 99]
    (tmp_path / "log.jsonl").write_text(text.replace('"id": "trace_0002", ', ""))
    with pytest.raises(TraceError, match="line 2, id: missing, and block ids are unique within a trace alone"):
        pairs(read_logs([tmp_path / "log.jsonl"]))


# files


@pytest.mark.parametrize("name", [*PAIRS, *LENGTHS])
def test_a_gzipped_log_and_one_from_standard_input_are_the_same(name, tmp_path, monkeypatch):
    content = (SAMPLES / name).read_bytes()
    expected = [request.input_tokens for request in read_logs([SAMPLES / name]).requests]
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    assert [one.input_tokens for one in read_logs([tmp_path / f"{name}.gz"]).requests] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))
    assert [one.input_tokens for one in read_logs(["-"]).requests] == expected


def test_a_fault_of_standard_input_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b'{"input_length": 3}'))))
    status, out, err = run(capsys, "-")
    assert (status, out) == (1, "")
    assert err.startswith("cascade-lab trace: standard input, line 1, line: expected a known format")


def test_a_json_array_is_read_entry_by_entry(tmp_path):
    rows = [json.loads(line) for line in (SAMPLES / "mooncake.jsonl").read_text().splitlines()]
    (tmp_path / "log.json").write_text(json.dumps(rows, indent=2))
    assert pairs(read_logs([tmp_path / "log.json"])) == PAIRS["mooncake.jsonl"][1]
    (tmp_path / "log.json").write_text(json.dumps([*rows, {"input_length": 5}]))
    with pytest.raises(TraceError, match="entry 4, hash_ids: missing"):
        pairs(read_logs([tmp_path / "log.json"]))


def test_parquet_is_read_where_pyarrow_is(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("mooncake.jsonl", "anthropic.jsonl", "litellm_usage.jsonl"):
        rows = [json.loads(line) for line in (SAMPLES / name).read_text().splitlines()]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "log.parquet")
        log = read_logs([tmp_path / "log.parquet"])
        assert (log.format.name, pairs(log)) == PAIRS[name]


def test_parquet_without_pyarrow_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "log.parquet").write_bytes(b"PAR1" + bytes(20) + b"PAR1")
    with pytest.raises(UsageError, match="reading Parquet needs pyarrow"):
        read_logs([tmp_path / "log.parquet"])


def rows_of(*whens):
    return "\n".join(json.dumps({"timestamp": t, "input_length": 100 + t, "hash_ids": [t]}) for t in whens)


def test_several_files_are_merged_by_their_times(tmp_path):
    (tmp_path / "a.jsonl").write_text(rows_of(1, 4, 5))
    (tmp_path / "b.jsonl").write_text(rows_of(2, 3, 9))
    log = read_logs([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert [request.timestamp for request in log.requests] == [1, 2, 3, 4, 5, 9]
    assert log.warnings == []
    with pytest.raises(UsageError, match="expected files of one format, given .* as mooncake and .* as azure"):
        read_logs([tmp_path / "a.jsonl", SAMPLES / "azure.csv"])


def test_times_that_fall_are_put_in_order_and_told(tmp_path, monkeypatch):
    (tmp_path / "log.jsonl").write_text(rows_of(1, 7, 3, 8, 5))
    log = read_logs([tmp_path / "log.jsonl"])
    assert [request.timestamp for request in log.requests] == [1, 3, 5, 7, 8]
    assert log.warnings == [
        f"{(tmp_path / 'log.jsonl').as_posix()}: times fall at 2 requests, by up to 0.004 s, and are put in order"
    ]
    # farther apart than what is held: told, and left as it is
    monkeypatch.setattr("cascade_lab.traces.read._WINDOW", 2)
    (tmp_path / "log.jsonl").write_text(rows_of(11, 12, 13, 14, 15, 16, 1, 17))
    log = read_logs([tmp_path / "log.jsonl"])
    assert [request.timestamp for request in log.requests] == [11, 12, 13, 14, 1, 15, 16, 17]
    assert "1 are still behind a later one" in log.warnings[0]


def test_a_batch_of_hits_in_csv_may_be_written_as_decimals(tmp_path):
    (tmp_path / "log.csv").write_text("input_tokens,prefix_hit_tokens\n472.0,3.0\n")
    assert pairs(read_logs([tmp_path / "log.csv"])) == [(472, 3)]


# tables

HITS = {"input_tokens": [100, 80, 300], "hit_tokens": [64, 0, 256], "model": ["a", "b", "a"]}


def test_arrays_are_read_by_the_names_of_their_columns():
    expected = [(100, 64), (80, 0), (300, 256)]
    for kind in (list, tuple, np.array, torch.tensor):
        table = {name: column if name == "model" else kind(column) for name, column in HITS.items()}
        log = read_table(table)
        assert log.gives == "hits"
        requests = list(log.requests)
        assert list(replay(requests)) == expected
        assert [one.model for one in requests] == ["a", "b", "a"]
    assert summarize(np.array(expected)) == summarize(expected)
    table = {"ContextTokens": np.array([4808, 3180, 110]), "GeneratedTokens": np.array([10, 8, 27])}
    log = read_table(table)
    assert (log.format.name, [one.input_tokens for one in log.requests]) == ("azure", [4808, 3180, 110])
    ids = {"input_tokens": [20, 40], "block_ids": [[1], [1, 2]], "time": [0.0, 1.5]}
    log = read_table(ids, block_size=16)
    assert pairs(log) == [(20, 0), (40, 16)]
    with pytest.raises(ValueError, match="table: expected columns of one length, given {'a': 1, 'b': 2}"):
        read_table({"a": [1], "b": [1, 2]})
    with pytest.raises(TypeError, match="table: expected a mapping of columns or a data frame, given 5"):
        read_table(5)
    with pytest.raises(TraceError, match="table, row 1, line: expected a known format"):
        read_table({"a": [1]})


def test_what_is_missing_in_a_table_is_a_fault_of_its_row():
    with pytest.raises(TraceError, match="table, row 2, hit_tokens: "):
        pairs(read_table({"input_tokens": np.array([9, 8]), "hit_tokens": np.array([4.0, np.nan])}))


@pytest.mark.parametrize("library", ["pandas", "pyarrow", "polars"])
def test_data_frames_are_read_as_their_columns(library):
    made = pytest.importorskip(library)
    frame = made.table(HITS) if library == "pyarrow" else made.DataFrame(HITS)
    assert pairs(read_table(frame)) == [(100, 64), (80, 0), (300, 256)]
    fields = {"input_tokens": "input_tokens", "hit_tokens": "hit_tokens", "tenant": "model"}
    assert [one.tenant for one in read_table(frame, fields=fields).requests] == ["a", "b", "a"]


# the command


def run(capsys, *arguments):
    status = cli.main(["trace", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_the_command_names_format_and_fields_before_the_sums(capsys):
    status, out, err = run(capsys, SAMPLES / "anthropic.jsonl")
    assert (status, err) == (0, "")
    assert out.index(": anthropic, ") < out.index("hit tokens = usage.cache_read_input_tokens") < out.index("0.0740")


def test_the_list_of_formats_has_a_line_of_each_with_its_columns(capsys):
    status, out, _ = run(capsys, "--list-formats")
    lines = out.splitlines()
    assert (status, [line.split(":")[0] for line in lines]) == (0, list(FORMATS))
    assert all(text in line for line, one in zip(lines, FORMATS.values(), strict=True) for text in one.fields.values())


def test_lengths_alone_say_that_hits_are_unknown_and_offer_a_ratio(capsys, tmp_path):
    status, out, _ = run(capsys, SAMPLES / "azure.csv", "--json", tmp_path / "out.json", "--csv", tmp_path / "out.csv")
    assert status == 0
    assert "hits" in out
    assert "unknown" in out
    assert "--what-if-hit" in out
    assert json.loads((tmp_path / "out.json").read_text())["token_hit"] is None
    assert ",0.0," not in (tmp_path / "out.csv").read_text()
    status, out, _ = run(capsys, SAMPLES / "azure.csv", "--what-if-hit", "0.5,0.9", "--json", tmp_path / "out.json")
    halves = [(n, n // 2) for n in (4808, 3180, 110)]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["attention_remaining"] == float(summarize(halves).attention_remaining)
    assert [row["what_if_hit"] for row in found["rows"]] == [0.5, 0.9]
    assert found["attention_saved_at_least"] < 1 - found["attention_remaining"] < found["attention_saved_at_most"]
    status, _, err = run(capsys, SAMPLES / "hits.csv", "--what-if-hit", "0.5")
    assert (status, "--what-if-hit: expected a log with lengths alone, given hits" in err) == (2, True)


def test_fields_are_mapped_on_the_command_line(capsys, tmp_path):
    (tmp_path / "log.csv").write_text("a b,c\n100,50\n")
    arguments = [tmp_path / "log.csv", "--field", "input_tokens=a b", "--field", "hit_tokens=c"]
    status, out, _ = run(capsys, *arguments)
    assert (status, "0.5000" in out) == (0, True)
    with pytest.raises(SystemExit):
        run(capsys, *arguments, "--field", "nonsense=c")


def test_an_unknown_log_is_status_1_in_one_line(capsys, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"a": 1}')
    status, out, err = run(capsys, tmp_path / "log.jsonl")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "expected a known format (sglang-batches, " in err
