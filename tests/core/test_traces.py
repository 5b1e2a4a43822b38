"""Traces: readers against broken files, the cache against a slow one, sums against loops over requests."""

import json
import math
import random
import sys
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from cascade_lab import cli
from cascade_lab.evidence import recorded
from cascade_lab.prefix import interactions
from cascade_lab.traces import (
    AGENTIC,
    CONVERSATION,
    MODELS,
    OTHER_MODELS,
    Request,
    TraceError,
    generate,
    read_hits_csv,
    read_mooncake,
    read_trace,
    replay,
    summarize,
    write_mooncake,
)

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
LLAMA = MODELS["Llama-3.1-8B"]
LINE = '{"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}'
SMALL = [(1000, 0), (100, 90), (7, 6), (1, 0), (4096, 4095), (513, 512), (300, 150)]


def random_pairs(seed: int, count: int = 60, longest: int = 900) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    lengths = [draw.randint(1, longest) for _ in range(count)]
    return [(n, draw.randint(0, n)) for n in lengths]


def request(*ids: int, n: int, hit: int | None = None) -> Request:
    return Request(None, n, None, None if hit is not None else ids, hit)


# sums


@pytest.mark.parametrize("pairs", [SMALL, random_pairs(0), random_pairs(1, count=300)])
def test_what_is_left_is_the_sum_over_requests(pairs):
    summary = summarize(pairs)
    assert summary.pairs == sum(interactions(n) for n, _ in pairs)
    assert summary.pairs_left == sum(interactions(n, hit) for n, hit in pairs)
    assert summary.attention_remaining == Fraction(summary.pairs_left, summary.pairs)
    assert summary.linear_remaining == Fraction(sum(n - hit for n, hit in pairs), sum(n for n, _ in pairs))
    assert (summary.requests, summary.tokens) == (len(pairs), sum(n for n, _ in pairs))


@pytest.mark.parametrize("pairs", [SMALL, random_pairs(2), random_pairs(3, count=300)])
def test_the_pairs_follow_the_mean_square_under_n_n_plus_1_up_to_a_diagonal(pairs):
    total = sum(n * (n + 1) for n, _ in pairs)
    weights = [Fraction(n * (n + 1), total) for n, _ in pairs]
    ratios = [Fraction(hit, n) for n, hit in pairs]
    mean_square = sum(w * h * h for w, h in zip(weights, ratios, strict=True))
    diagonal = sum(hit * (1 - h) for (_, hit), h in zip(pairs, ratios, strict=True)) / total
    summary = summarize(pairs)
    assert summary.attention_remaining == 1 - mean_square - diagonal
    assert summary.attention_remaining == 1 - sum(
        w * Fraction(hit * (hit + 1), n * (n + 1)) for w, (n, hit) in zip(weights, pairs, strict=True)
    )
    assert summary.rms_hit**2 == pytest.approx(float(mean_square), rel=1e-14)
    assert 0 < diagonal < Fraction(sum(n for n, _ in pairs), 4 * total)


def test_weightings_are_told_apart():
    """K67 (tests/known_faults.md): (1000, 0) and (100, 90) hit 0.0818 by token, 0.45 by request, each with its name."""
    summary = summarize([(1000, 0), (100, 90)])
    assert summary.token_hit == 90 / 1100
    assert summary.request_hit == 0.45
    assert summary.rms_hit == pytest.approx(math.sqrt(100 * 101 * 0.81 / (1000 * 1001 + 100 * 101)), rel=1e-15)


def test_reused_and_fresh_tokens_add_up_to_the_prompt():
    """K66: 3,000 reused and 100 fresh are 3000 / 3100, neither 30 nor nearly 1."""
    summary = summarize([(3100, 3000)])
    assert summary.token_hit == 3000 / 3100
    assert (summary.tokens, summary.hit_tokens) == (3100, 3000)
    ragged = summarize(SMALL)
    assert ragged.tokens - ragged.hit_tokens == sum(n - hit for n, hit in SMALL)
    assert all(0 <= h <= 1 for h in (ragged.token_hit, ragged.request_hit, ragged.rms_hit))


def test_requests_are_squared_before_they_are_added():
    """K58: two requests of 100 tokens have 10,100 pairs, one of 200 has 20,100."""
    assert summarize([(100, 0), (100, 0)]).pairs == 10_100
    assert summarize([(200, 0)]).pairs == 20_100


def test_no_hits_leave_everything_and_every_formula_is_right():
    summary = summarize([(10, 0), (7, 0)], model=LLAMA)
    assert (summary.token_hit, summary.request_hit, summary.rms_hit) == (0, 0, 0)
    assert (summary.linear_remaining, summary.attention_remaining, summary.model_remaining) == (1, 1, 1)
    assert all(abs(error) < 1e-15 for error in summary.errors.values())


def test_hits_of_everything_leave_nothing():
    summary = summarize([(10, 10), (7, 7)], model=LLAMA)
    assert (summary.token_hit, summary.request_hit, summary.rms_hit) == (1, 1, 1)
    assert (summary.linear_remaining, summary.attention_remaining, summary.model_remaining) == (0, 0, 0)
    assert set(summary.errors.values()) == {0.0}


def test_one_request():
    summary = summarize([(8, 4)])
    assert (summary.attention_remaining, summary.linear_remaining) == (Fraction(26, 36), Fraction(1, 2))
    assert (summary.token_hit, summary.request_hit, summary.rms_hit) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("number", [int, np.int64, np.int32])
def test_ten_million_tokens_are_counted_exactly(number):
    n, hit, count = 10_000_000, 9_999_999, 200_000
    summary = summarize(((number(n), number(hit)) for _ in range(count)), model=LLAMA)
    assert summary.pairs == count * n * (n + 1) // 2
    assert summary.pairs_left == count * n
    assert summary.attention_remaining == Fraction(2, n + 1)
    assert summary.tokens == count * n
    assert summary.rms_hit == pytest.approx(hit / n, rel=1e-15)
    assert type(summary.pairs) is int


def test_an_empty_trace_is_refused():
    with pytest.raises(ValueError, match="empty trace"):
        summarize([])


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ((0, 0), ValueError, "expected integers N >= 1 and 0 <= H <= N"),
        ((5, 6), ValueError, "expected integers N >= 1 and 0 <= H <= N"),
        ((5, -1), ValueError, "expected integers N >= 1 and 0 <= H <= N"),
        ((5.0, 1), TypeError, "expected an integer, given 5.0"),
        (("5", 1), TypeError, "expected an integer, given '5'"),
        ((5, True), TypeError, "expected an integer, given True"),
        ((5,), ValueError, r"expected \(N, H\), given \(5,\)"),
        ((5, 1, 1), ValueError, r"expected \(N, H\), given \(5, 1, 1\)"),
        (5, TypeError, r"expected \(N, H\), given 5"),
    ],
)
def test_pairs_that_are_no_pairs_are_named(bad, error, message):
    with pytest.raises(error, match=rf"pairs\[2\]: {message}"):
        summarize([(5, 1), (6, 0), bad])


# formulas of a mean


def test_flops_per_token_and_pair_are_those_of_the_weights():
    h, kv, ffn = 4096, 8 * 128, 14336
    weights = h * h + 2 * h * kv + h * h + 3 * h * ffn
    assert LLAMA.linear_flops == 2 * 32 * weights
    assert LLAMA.pair_flops == 32 * 32 * (2 * 128 + 2 * 128)


@pytest.mark.parametrize(
    ("name", "vocabulary", "billions"),
    [
        ("Llama-3.1-8B", 128256, 8.03),
        ("Llama-3.1-70B", 128256, 70.55),
        ("Llama-3.1-405B", 128256, 405.85),
        ("Qwen3-32B", 151936, 32.8),
        ("Qwen3-30B-A3B", 151936, 3.3),
        ("Qwen3-235B-A22B", 151936, 22),
        # its input and output embeddings are one
        ("Gemma-3-27B", 262208 / 2, 27),
        ("DeepSeek-V3", 129280, 37),
    ],
)
def test_weights_and_embeddings_are_the_published_number_of_active_parameters(name, vocabulary, billions):
    model = (MODELS | OTHER_MODELS)[name]
    assert model.linear_flops / 2 + 2 * vocabulary * model.hidden == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize("model", (MODELS | OTHER_MODELS).values(), ids=lambda model: model.name)
def test_alpha_is_the_share_of_attention_without_hits(model):
    for n in (1, 4096, 10_000_000):
        attention = model.pair_flops * interactions(n)
        if model.name == "Gemma-3-27B":
            window = min(n, 1024)
            attention = 52 * (interactions(window) + (n - window) * 1024) + 10 * interactions(n)
            attention *= model.pair_flops / 62
        assert model.alpha(n) == pytest.approx(attention / (attention + model.linear_flops * n), rel=1e-14)


@pytest.mark.parametrize("pairs", [SMALL, random_pairs(4), [(40_000, 39_000), (900, 512), (130_000, 512)]])
def test_errors_equal_formulas_written_out(pairs):
    """Every number again, from a loop over requests and the formulas' own texts."""
    flops = [(LLAMA.linear_flops * n, LLAMA.pair_flops * interactions(n)) for n, _ in pairs]
    whole = sum(a + b for a, b in flops)
    left = sum(LLAMA.linear_flops * (n - hit) + LLAMA.pair_flops * interactions(n, hit) for n, hit in pairs)
    token = sum(hit for _, hit in pairs) / sum(n for n, _ in pairs)
    request_mean = sum(hit / n for n, hit in pairs) / len(pairs)
    share = sum(b for _, b in flops) / whole
    mean_length = sum(n for n, _ in pairs) / len(pairs)
    rms = math.sqrt(sum(n * (n + 1) * (hit / n) ** 2 for n, hit in pairs) / sum(n * (n + 1) for n, _ in pairs))
    per_request = sum(
        (a + b) * (1 - hit / n) * (1 + LLAMA.alpha(n) * hit / n) for (a, b), (n, hit) in zip(flops, pairs, strict=True)
    )
    summary = summarize(pairs, model=LLAMA)
    exact = left / whole
    assert float(summary.model_remaining) == pytest.approx(exact, rel=1e-14)
    attention = float(summary.attention_remaining)
    expected = {
        "attention, 1-h^2 at token_hit": (1 - token**2) / attention,
        "attention, 1-h^2 at request_hit": (1 - request_mean**2) / attention,
        "attention, 1-h^2 at rms_hit": (1 - rms**2) / attention,
        "uniform 1-h at token_hit": (1 - token) / exact,
        "uniform 1-h at request_hit": (1 - request_mean) / exact,
        "uniform 1-h at rms_hit": (1 - rms) / exact,
        "uniform 1-h^2 at token_hit": (1 - token**2) / exact,
        "uniform 1-h^2 at request_hit": (1 - request_mean**2) / exact,
        "uniform 1-h^2 at rms_hit": (1 - rms**2) / exact,
        "bucketed at token_hit": (1 - token) * (1 + share * token) / exact,
        "bucketed at request_hit": (1 - request_mean) * (1 + share * request_mean) / exact,
        "bucketed at rms_hit": (1 - rms) * (1 + share * rms) / exact,
        "bucketed at token_hit and the mean length": (1 - token) * (1 + LLAMA.alpha(mean_length) * token) / exact,
        "bucketed per request": per_request / whole / exact,
    }
    assert dict(summary.errors) == pytest.approx({name: ratio - 1 for name, ratio in expected.items()}, abs=1e-12)


def test_a_mean_errs_where_long_requests_hit_and_not_where_all_are_alike():
    alike = summarize([(20_000, 10_000)] * 50, model=LLAMA).errors
    assert abs(alike["bucketed at token_hit"]) < 1e-4
    assert abs(alike["attention, 1-h^2 at request_hit"]) < 1e-4
    mixed = summarize([(20_000, 20_000 - 1), (20_000, 0)] * 25, model=LLAMA).errors
    # same token mean, but half of the pairs are left instead of three quarters
    assert mixed["attention, 1-h^2 at token_hit"] == pytest.approx(0.5, abs=1e-3)
    assert mixed["bucketed at token_hit"] > 0.05
    assert abs(mixed["bucketed per request"]) < 1e-4
    # with hits of all or nothing the uniform rule is right and the bucketed mean is not
    assert abs(mixed["uniform 1-h at token_hit"]) < 1e-4


# the cache


def slow_replay(requests, block_size, blocks=None):
    """The cache as a list, most recently used last."""
    cached, found = [], []
    for r in requests:
        k = 0
        while k < len(r.block_ids) and r.block_ids[k] in cached:
            k += 1
        found.append((r.input_tokens, min(k * block_size, r.input_tokens - 1)))
        for i in r.block_ids[::-1]:
            if i in cached:
                cached.remove(i)
            cached.append(i)
        if blocks is not None:
            cached = cached[len(cached) - min(blocks, len(cached)) :]
    return found


def random_requests(seed: int, spread=lambda i: i) -> list[Request]:
    """Prompts that share prefixes of a few families of ids, with floor or ceil of n / 16 blocks."""
    draw = random.Random(seed)
    made = []
    for _ in range(200):
        family, depth = draw.randint(0, 5), draw.randint(1, 12)
        ids = tuple(spread(family * 100 + j) for j in range(depth))
        fork = draw.randint(0, depth)
        ids = ids[:fork] + tuple(spread(1000 + draw.randint(0, 40) * 20 + j) for j in range(depth - fork))
        made.append(request(*ids, n=16 * depth + draw.randint(-15, 15)))
    return made


@pytest.mark.parametrize("spread", [lambda i: i, lambda i: (i * 2654435761) % 2**61, lambda i: -i - 1])
def test_hits_equal_those_of_a_slow_cache(spread):
    requests = random_requests(0, spread)
    assert list(replay(requests, block_size=16)) == slow_replay(requests, 16)
    for blocks in (0, 1, 5, 17, 60, 10_000):
        found = list(replay(requests, block_size=16, capacity_tokens=16 * blocks + 15))
        assert found == slow_replay(requests, 16, blocks)


def test_a_larger_cache_never_hits_less():
    requests = generate(3, 400)
    sizes = [0, 10_000, 100_000, 1_000_000, 10_000_000, None]
    hits = [sum(hit for _, hit in replay(requests, capacity_tokens=size)) for size in sizes]
    assert hits == sorted(hits)
    assert hits[0] == 0 < hits[3] < hits[-1]


def test_a_request_never_hits_its_own_blocks():
    assert list(replay([request(1, 1, 1, n=48), request(1, 1, 1, n=48)], block_size=16)) == [(48, 0), (48, 47)]


def test_a_prompt_found_whole_still_computes_its_last_token():
    """K62: 32 tokens found whole hit 31."""
    found = list(replay([request(1, 2, n=32), request(1, 2, n=32), request(1, n=31)], block_size=16))
    assert found == [(32, 0), (32, 31), (31, 16)]


def test_only_a_leading_run_counts():
    first, second = request(1, 2, 3, n=48), request(9, 2, 3, n=48)
    assert list(replay([first, second], block_size=16))[1] == (48, 0)


def test_what_gives_way_first_is_the_end_of_a_prompt():
    requests = [request(1, 2, 3, n=48), request(1, 2, 3, n=48)]
    assert list(replay(requests, block_size=16, capacity_tokens=32))[1] == (48, 32)


def test_recorded_hits_pass_through_up_to_the_last_token():
    requests = [request(n=100, hit=64), request(n=100, hit=100), request(n=1, hit=0)]
    assert list(replay(requests)) == [(100, 64), (100, 99), (1, 0)]


def test_requests_without_fitting_ids_are_refused():
    with pytest.raises(
        ValueError, match=r"requests\[1\]: block_ids: expected 3 or 4 ids for 50 tokens in blocks of 16"
    ):
        list(replay([request(1, n=16), request(1, n=50)], block_size=16))
    with pytest.raises(ValueError, match=r"requests\[0\]: expected block_ids or hit_tokens, given neither"):
        list(replay([Request(0.0, 5, 0, None, None)]))


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("block_size", {"block_size": 0}, ValueError, "expected a number >= 1, given 0"),
        ("block_size", {"block_size": 16.0}, TypeError, "expected an integer, given 16.0"),
        ("capacity_tokens", {"capacity_tokens": -1}, ValueError, "expected a number >= 0, given -1"),
        ("capacity_tokens", {"capacity_tokens": True}, TypeError, "expected an integer, given True"),
    ],
)
def test_sizes_are_checked_before_anything_is_read(name, options, error, message):
    with pytest.raises(error, match=f"{name}: {message}"):
        replay([], **options)


# the readers


@pytest.mark.parametrize(
    ("bad", "field", "fault"),
    [
        (LINE[:40], "line", "cut short or no JSON"),
        (LINE[:-1], "line", "cut short or no JSON"),
        ("[1, 2]", "line", "expected a JSON object, given [1, 2]"),
        ("[" * 100_000, "line", "nested too deep"),
        (LINE.replace('"input_length"', '"length"'), "input_length", "missing"),
        (LINE.replace('"hash_ids"', '"ids"'), "hash_ids", "missing"),
        (LINE.replace("1000", "-1000"), "input_length", "expected an integer from 1 to 1000000000, given -1000"),
        (LINE.replace("1000", "0"), "input_length", "given 0"),
        (LINE.replace("1000", "1000.5"), "input_length", "given 1000.5"),
        (LINE.replace("1000", '"1000"'), "input_length", "given '1000'"),
        (LINE.replace("1000", "true"), "input_length", "given True"),
        (LINE.replace("1000", "1" + "0" * 40), "input_length", "an integer of over 30 digits"),
        (LINE.replace("1000", "1" + "0" * 5000), "line", "expected a JSON object"),
        (LINE.replace(": 5,", ": -5,"), "output_length", "expected an integer from 0"),
        (LINE.replace("3000", "NaN"), "timestamp", "expected a finite number"),
        (LINE.replace("3000", "[3000]"), "timestamp", "given [3000]"),
        (LINE.replace("[7, 8]", "[7, 8, 9]"), "hash_ids", "expected 1 or 2 ids for 1000 tokens"),
        (LINE.replace("[7, 8]", "[]"), "hash_ids", "in blocks of 512, given 0"),
        (LINE.replace("[7, 8]", "[7, 8.0]"), "hash_ids", "expected a list of integers"),
        (LINE.replace("[7, 8]", '"78"'), "hash_ids", "expected a list of integers"),
        (LINE.replace("[7, 8]", "[7, true]"), "hash_ids", "expected a list of integers"),
    ],
)
def test_a_bad_line_is_an_error_that_names_file_line_and_field(bad, field, fault, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{LINE}\n\n{bad}\n{LINE}\n")
    reader = read_mooncake(path)
    assert next(reader) == Request(3000.0, 1000, 5, (7, 8), None)
    with pytest.raises(TraceError) as caught:
        next(reader)
    assert str(caught.value).startswith(f"{path.as_posix()}, line 3, {field}: ")
    assert fault in str(caught.value)
    assert len(str(caught.value)) < len(path.as_posix()) + 250
    assert (caught.value.line, caught.value.field) == (3, field)
    skipped = []
    assert len(list(read_mooncake(path, on_error="skip", skipped=skipped))) == 2
    assert [str(error) for error in skipped] == [str(caught.value)]


def test_a_line_that_is_no_text_and_one_that_is_too_long_are_bad_lines(tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"
    monkeypatch.setattr("cascade_lab.traces.records.MAX_LINE", 200)
    path.write_bytes(b"\n".join([b'{"timestamp": "\xff"}', b"[" + b" " * 1000 + b"]", LINE.encode(), b"x" * 1000]))
    skipped = []
    assert len(list(read_mooncake(path, on_error="skip", skipped=skipped))) == 1
    assert [(error.line, error.field) for error in skipped] == [(1, "line"), (2, "line"), (4, "line")]
    assert "expected at most 200 bytes" in str(skipped[1])


def test_floor_and_ceil_of_the_blocks_both_fit(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE.replace("[7, 8]", "[7]") + "\n" + LINE)
    assert [r.block_ids for r in read_mooncake(path)] == [(7,), (7, 8)]
    # the first request left one block
    assert list(replay(read_mooncake(path))) == [(1000, 0), (1000, 512)]


def test_the_block_size_is_the_file_s(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE.replace("1000", "33").replace("[7, 8]", "[7, 8, 9]"))
    assert list(read_mooncake(path, block_size=16))[0].block_ids == (7, 8, 9)
    with pytest.raises(TraceError, match="expected 0 or 1 ids for 33 tokens in blocks of 512, given 3"):
        list(read_mooncake(path))


CSV = "session,input_tokens,prefix_hit_tokens,note\n1,100,64,x\n"


def test_a_csv_needs_two_columns_and_ignores_the_others(tmp_path):
    path = tmp_path / "hits.csv"
    path.write_text("\ufeff" + CSV + '2, 10 ,10,"a, b"\r\n\n3,1,0,\n')
    expected = [request(n=100, hit=64), request(n=10, hit=10), request(n=1, hit=0)]
    assert list(read_hits_csv(path)) == [r._replace(session=name) for r, name in zip(expected, "123", strict=True)]
    assert list(replay(read_trace(path))) == [(100, 64), (10, 9), (1, 0)]


@pytest.mark.parametrize(
    ("bad", "field", "fault"),
    [
        ("2,100,101,x", "prefix_hit_tokens", "expected at most input_tokens = 100, given 101"),
        ("2,-100,0,x", "input_tokens", "given -100"),
        ("2,0,0,x", "input_tokens", "given 0"),
        ("2,100,-1,x", "prefix_hit_tokens", "given -1"),
        ("2,1e3,0,x", "input_tokens", "given '1e3'"),
        ("2,1_000,0,x", "input_tokens", "given '1_000'"),
        ("2,²,0,x", "input_tokens", "expected an integer"),
        ("2,100,,x", "prefix_hit_tokens", "given ''"),
        ("2,100", "line", "expected 4 fields as in the first line, given 2"),
        ("2,100,64,x,y", "line", "given 5"),
        ('2,100,64,"x', "line", "expected comma-separated values"),
        ("2," + "9" * 6000 + ",0,x", "input_tokens", "expected an integer"),
    ],
)
def test_a_bad_csv_line_names_file_line_and_field(bad, field, fault, tmp_path):
    path = tmp_path / "hits.csv"
    path.write_text(CSV + bad + "\n9,8,7,x\n", encoding="utf-8")
    with pytest.raises(TraceError) as caught:
        list(read_hits_csv(path))
    assert str(caught.value).startswith(f"{path.as_posix()}, line 3, {field}: ")
    assert fault in str(caught.value)
    skipped = []
    assert list(replay(read_hits_csv(path, on_error="skip", skipped=skipped))) == [(100, 64), (8, 7)]
    assert len(skipped) == 1


@pytest.mark.parametrize("header", ["input_tokens,hits", "input_tokens,input_tokens,prefix_hit_tokens", "1,2,3"])
def test_a_csv_without_its_columns_is_refused_even_when_skipping(header, tmp_path):
    path = tmp_path / "hits.csv"
    path.write_text(header + "\n1,2,3\n")
    with pytest.raises(TraceError, match=r"line 1, .*expected one column of this name"):
        list(read_hits_csv(path, on_error="skip"))


def test_on_error_takes_two_words(tmp_path):
    with pytest.raises(ValueError, match="on_error: expected 'raise' or 'skip', given 'ignore'"):
        read_trace(tmp_path / "trace.csv", on_error="ignore")


def test_the_format_is_told_by_suffix_or_first_character(tmp_path):
    for name, text, n in (("a.jsonl", LINE, 1000), ("b.csv", CSV, 100), ("c", f"\n {LINE}", 1000), ("d.txt", CSV, 100)):
        (tmp_path / name).write_text(text)
        assert [r.input_tokens for r in read_trace(tmp_path / name)] == [n]


def test_a_long_trace_is_read_in_little_memory(tmp_path):
    """One family of prompts, so that the cache stays small: 40,000 requests must not be held."""
    path = tmp_path / "trace.jsonl"
    path.write_text((LINE + "\n") * 40_000)
    tracemalloc.start()
    summary = summarize(replay(read_trace(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert summary.requests == 40_000
    assert peak < 12_000_000


# traffic


def test_generated_traffic_is_reproducible_sorted_and_readable(tmp_path):
    requests = generate(5, 300)
    assert requests == generate(5, 300) != generate(6, 300)
    assert len(requests) == 300
    assert [r.timestamp for r in requests] == sorted(r.timestamp for r in requests)
    write_mooncake(requests, tmp_path / "trace.jsonl")
    assert list(read_trace(tmp_path / "trace.jsonl")) == requests
    with pytest.raises(ValueError, match=r"requests\[0\]: expected block_ids, given None"):
        write_mooncake([request(n=5, hit=0)], tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="requests: expected a number >= 1, given 0"):
        generate(0, 0)


def quantile(values, p):
    return sorted(values)[round(p * (len(values) - 1))]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "traffic"), [("conversation", CONVERSATION), ("agentic", AGENTIC)])
def test_generated_traffic_resembles_the_recorded_trace(name, traffic, seed):
    real = recorded.load("traces")["traces"][name]
    # one agentic session alone has 70 requests
    requests = generate(seed, 2000 if name == "conversation" else 8000, traffic=traffic)
    summary = summarize(replay(requests, block_size=traffic.block_size))
    near = 0.035 if name == "conversation" else 0.015
    assert summary.token_hit == pytest.approx(real["token_hit"], abs=near)
    assert summary.request_hit == pytest.approx(real["request_hit"], abs=near)
    assert summary.rms_hit == pytest.approx(real["rms_hit"], abs=0.08)
    lengths = [r.input_tokens for r in requests]
    for p in (0.25, 0.5, 0.75):
        assert quantile(lengths, p) == pytest.approx(real["lengths"][f"{p:.0%}"], rel=0.35)
    assert summary.tokens / summary.requests == pytest.approx(real["tokens"] / real["requests"], rel=0.25)


def test_system_prompts_are_shared_among_sessions():
    traffic = replace(CONVERSATION, system_tokens=2048, system_prompts=3, tail=(0.0, 1e9))
    requests = generate(0, 100, traffic=traffic)
    assert {r.block_ids[:4] for r in requests} == {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)}
    pairs = list(replay(requests))
    assert [hit for _, hit in pairs].count(2048) == 97
    assert [hit for _, hit in pairs].count(0) == 3


def test_sessions_without_system_prompts_share_nothing():
    traffic = replace(CONVERSATION, system_tokens=0, tail=(0.0, 1e9))
    assert summarize(replay(generate(0, 100, traffic=traffic))).hit_tokens == 0


# recorded results and the command


def test_the_recorded_source_names_repository_commit_and_licence():
    for source in recorded.load("traces")["source"]:
        assert all(source[key] for key in ("repository", "commit", "snapshot", "licence"))


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_mooncake(generate(0, 200), path)
    return path


def test_trace_prints_a_table_and_writes_json_and_a_figure(trace, tmp_path, capsys):
    out, figure = tmp_path / "new" / "report.json", tmp_path / "report.svg"
    model = "Qwen3-30B-A3B"
    assert cli.main(["trace", str(trace), "--json", str(out), "--figure", str(figure), "--model", model]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    summary = summarize(replay(generate(0, 200)), model=MODELS[model])
    report = json.loads(out.read_text())
    for name in ("requests", "tokens", "token_hit", "request_hit", "rms_hit"):
        assert report[name] == getattr(summary, name)
    assert report["linear_remaining"] == float(summary.linear_remaining)
    assert report["attention_remaining"] == float(summary.attention_remaining)
    assert Fraction(report["exact"]["attention_remaining"]) == summary.attention_remaining
    assert report["errors"] == dict(summary.errors)
    assert (report["model"], report["skipped_lines"], report["trace"]) == (model, 0, "trace.jsonl")
    assert f"{summary.rms_hit:.4f}" in shown.out
    assert all(f"{error:+.2%}" in shown.out for error in summary.errors.values())
    first = figure.read_bytes()
    assert first.startswith(b"<?xml")
    assert cli.main(["trace", str(trace), "--figure", str(figure), "--model", model]) == 0
    assert figure.read_bytes() == first


def test_trace_takes_capacity_and_block_size(trace, tmp_path):
    out = tmp_path / "report.json"
    assert cli.main(["trace", str(trace), "--json", str(out), "--capacity", "500000"]) == 0
    bounded = json.loads(out.read_text())
    assert bounded["token_hit"] == summarize(replay(generate(0, 200), capacity_tokens=500_000)).token_hit
    assert bounded["token_hit"] < summarize(replay(generate(0, 200))).token_hit
    write_mooncake(generate(0, 20, traffic=AGENTIC), trace)
    assert cli.main(["trace", str(trace), "--block-size", "64", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["requests"] == 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LINE + "\n" + LINE[:30], "line 2, line: expected a JSON object"),
        (LINE.replace("1000", "-7"), "line 1, input_length: expected an integer"),
        ("", "empty trace"),
        ("\n\n", "empty trace"),
    ],
)
def test_a_bad_trace_is_status_1_with_one_line_and_no_report(content, message, tmp_path, capsys):
    path, out = tmp_path / "bad.jsonl", tmp_path / "report.json"
    path.write_text(content)
    assert cli.main(["trace", str(path), "--json", str(out)]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith("cascade-lab trace: ")
    assert message in shown.err
    assert "bad.jsonl" in shown.err
    assert not out.exists()


def test_skipped_lines_are_counted_and_shown(tmp_path, capsys):
    path, out = tmp_path / "bad.jsonl", tmp_path / "report.json"
    path.write_text("\n".join([LINE, *["{"] * 7, LINE]))
    assert cli.main(["trace", str(path), "--skip-bad-lines", "--json", str(out)]) == 0
    error = capsys.readouterr().err
    assert error.startswith("skipped 7 bad lines:\n")
    assert "bad.jsonl, line 2, line: " in error
    assert error.endswith("and 2 more\n")
    assert (json.loads(out.read_text())["skipped_lines"], json.loads(out.read_text())["requests"]) == (7, 2)
    path.write_text("{\n{")
    assert cli.main(["trace", str(path), "--skip-bad-lines"]) == 1
    assert "empty trace" in capsys.readouterr().err


def test_wrong_usage_is_status_2(tmp_path, capsys):
    path = tmp_path / "hits.csv"
    path.write_text(CSV)
    for arguments, message in (
        (["nowhere.jsonl"], "no such file: nowhere.jsonl"),
        ([str(path), "--capacity", "5000"], "--capacity: expected a trace with block ids"),
        ([str(path), "--figure", "out.gif"], "--figure: expected a name in .svg, .png or .pdf"),
        ([str(path), "--model", "GPT-9"], "--model: expected one of DeepSeek-V3, Gemma-3-27B, "),
        ([], "expected at least one FILE"),
    ):
        assert cli.main(["trace", *arguments]) == 2
        assert message in capsys.readouterr().err
    for arguments in (
        [str(path), "--affinity", "GPT-9"],
        [str(path), "--capacity", "-1"],
        [str(path), "--block-size", "0"],
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["trace", *arguments])
        assert stopped.value.code == 2


def test_a_terminal_sees_progress_and_a_pipe_does_not(trace, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["trace", str(trace)]) == 0
    error = capsys.readouterr().err
    assert "100%" in error
    assert error.endswith("\r\033[K")
    assert "\n" not in error
