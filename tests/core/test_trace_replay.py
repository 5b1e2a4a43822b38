"""Caches of many kinds against slow ones, bounds against all cases there are, models and regions by name."""

import itertools
import json
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from cascade_lab import cli
from cascade_lab.files import ForeignFileError
from cascade_lab.prefix import effective_hit, interactions
from cascade_lab.regions import Chunked, Dense, Mixture, SinkWindow, SlidingWindow
from cascade_lab.trace_report import Setting, measure
from cascade_lab.traces import (
    MODELS,
    OTHER_MODELS,
    Request,
    Totals,
    bounds_of_lengths,
    bounds_of_totals,
    read_model,
    region,
    replay,
    summarize,
)
from cascade_lab.traces.seen import Seen
from tests.limits import HANGS_LONG_S

CHECKOUT = Path(__file__).resolve().parents[2]
SAMPLES = CHECKOUT / "tests" / "data" / "logs"


def traffic(seed, count=300, size=16, names=("a", "b", "c", "d", "e")):
    """Sessions that grow, branch and begin anew; ids are prefixes themselves, numbered."""
    draw, numbers, made, now = random.Random(seed), {}, [], 0.0
    heads = {name: () for name in names}
    for i in range(count):
        name = draw.choice(names)
        head = heads[name][: draw.choice((0, 2, len(heads[name]), len(heads[name])))]
        head = head or (("system", draw.randint(0, 1)),)
        head += tuple((i, j) for j in range(draw.randint(0, 3)))
        heads[name] = head
        ids = tuple(numbers.setdefault(head[: k + 1], len(numbers)) for k in range(len(head)))
        now += draw.choice((0.0, 1.0, 7.0, 40.0))
        made.append(Request(now, size * len(ids) - draw.randint(0, size - 1), None, ids, None, session=name))
    return made


def write(path, requests):
    names = {"timestamp": "timestamp", "input_length": "input_tokens", "hash_ids": "block_ids", "model": "model"}
    rows = ({name: getattr(one, field) for name, field in names.items()} for one in requests)
    path.write_text("\n".join(map(json.dumps, rows)))


# which ids were there


@pytest.mark.parametrize(
    "kind", [lambda i: i, lambda i: -i, lambda i: i * 2**40 + 7, lambda i: f"{i:016x}", lambda i: 2**63 + i]
)
def test_leading_ids_are_those_of_a_set_whatever_ids_are(kind, monkeypatch):
    monkeypatch.setattr(sys.modules[replay.__module__], "_IDS", 50)
    requests = traffic(1, 700)
    seen, expected = set(), []
    for one in requests:
        k = 0
        while k < len(one.block_ids) and one.block_ids[k] in seen:
            k += 1
        expected.append((one.input_tokens, min(16 * k, one.input_tokens - 1)))
        seen |= set(one.block_ids)
    made = [one._replace(block_ids=tuple(map(kind, one.block_ids))) for one in requests]
    assert list(replay(made, block_size=16, check_chain=True)) == expected


def test_a_table_that_grows_forgets_nothing():
    draw = random.Random(3)
    ids = [draw.getrandbits(64) for _ in range(30_000)]
    seen = Seen()
    for i in range(0, len(ids), 500):
        assert seen.leading([[one] for one in ids[i : i + 500]])[0].sum() == 0
    assert seen.leading([[one] for one in ids])[0].sum() == len(ids)
    assert seen.leading([[one + 1] for one in ids[:999]])[0].sum() == 0


@pytest.mark.parametrize("capacity", [None, 10_000])
@pytest.mark.parametrize("batch", [1, 4096])
def test_an_id_that_stands_after_two_ids_is_refused_where_it_is_asked(capacity, batch, monkeypatch):
    monkeypatch.setattr(sys.modules[replay.__module__], "_REQUESTS", batch)
    requests = [Request(None, 48, None, ids, None) for ids in ((1, 2, 3), (1, 2, 4), (9, 2, 5))]
    options = dict(block_size=16, capacity_tokens=capacity)
    found = replay(requests, check_chain=True, **options)
    assert [next(found), next(found)] == [(48, 0), (48, 32)]
    with pytest.raises(ValueError, match=r"requests\[2\]: block_ids: .*, given 2 after two different ones"):
        next(found)
    assert list(replay(requests, **options)) == [(48, 0), (48, 32), (48, 0)]
    # also within one prompt
    with pytest.raises(ValueError, match="given 1 after two"):
        list(replay([Request(None, 48, None, (1, 2, 1), None)], check_chain=True, **options))


# caches


def slow(requests, size, *, blocks=None, page=None, ttl=None, workers=1, affinity="none"):
    """Caches as lists of (id, last use), the id used last at the end."""
    page = page or size
    caches, loads, homes, found = [[] for _ in range(workers)], [0] * workers, {}, []
    for turn, one in enumerate(requests):
        if page == size:
            ids = list(one.block_ids)
        else:
            ids = [one.block_ids[(k + 1) * page // size - 1] for k in range(one.input_tokens // page)]

        def leading(cache, ids=ids, now=one.timestamp):
            there = {i for i, last in cache if ttl is None or now - last <= ttl}
            return next((k for k, i in enumerate(ids) if i not in there), len(ids))

        if affinity == "session":
            at = homes.setdefault(one.session, len(homes) % workers)
        elif affinity == "prefix":
            best = max(map(leading, caches))
            at = min((i for i in range(workers) if leading(caches[i]) == best), key=lambda i: loads[i])
        else:
            at = turn % workers
        hit = leading(caches[at])
        loads[at] += one.input_tokens
        found.append((one.input_tokens, min(page * hit, one.input_tokens - 1)))
        kept = [(i, last) for i, last in caches[at] if i not in ids]
        kept = [(i, last) for i, last in kept if ttl is None or one.timestamp - last <= ttl]
        caches[at] = kept + [(i, one.timestamp) for i in ids[::-1]]
        if blocks is not None:
            caches[at] = caches[at][max(0, len(caches[at]) - blocks) :]
    return found


@pytest.mark.parametrize(
    ("options", "same"),
    [
        (dict(page_size=32), dict(page=32)),
        (dict(page_size=16), dict(page=16)),
        (dict(page_size=48, capacity_tokens=48 * 9), dict(page=48, blocks=9)),
        (dict(ttl_ms=60.0), dict(ttl=60.0)),
        (dict(ttl_ms=20.0, capacity_tokens=16 * 25), dict(ttl=20.0, blocks=25)),
        (dict(workers=3), dict(workers=3)),
        (dict(workers=3, capacity_tokens=16 * 12), dict(workers=3, blocks=12)),
        (dict(workers=2, affinity="session"), dict(workers=2, affinity="session")),
        (dict(workers=3, affinity="prefix", capacity_tokens=16 * 20), dict(workers=3, affinity="prefix", blocks=20)),
        (dict(workers=2, ttl_ms=30.0, page_size=32), dict(workers=2, ttl=30.0, page=32)),
    ],
)
def test_caches_equal_slow_ones(options, same):
    requests = traffic(5)
    expected = slow(requests, 16, **same)
    if "page_size" in options and options["page_size"] == 16:
        # whole pages alone: a last block that is not full is none
        expected = slow([one._replace(block_ids=one.block_ids[: one.input_tokens // 16]) for one in requests], 16)
    assert list(replay(requests, block_size=16, **options)) == expected
    assert 0 < sum(hit for _, hit in expected) < sum(hit for _, hit in slow(requests, 16)) + 1


def test_affinity_finds_what_turns_lose():
    requests = traffic(2, 400)
    hits = {
        kind: sum(hit for _, hit in replay(requests, block_size=16, workers=4, affinity=kind))
        for kind in ("none", "session", "prefix")
    }
    alone = sum(hit for _, hit in replay(requests, block_size=16))
    assert hits["none"] < hits["session"] < alone
    assert hits["none"] < hits["prefix"] <= alone


def test_recorded_hits_are_cut_to_whole_pages():
    requests = [
        Request(None, 100, None, None, 64),
        Request(None, 100, None, None, 99),
        Request(None, 32, None, None, 31),
    ]
    assert [hit for _, hit in replay(requests, page_size=32)] == [
        effective_hit(one.hit_tokens, one.input_tokens, 32) for one in requests
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(page_size=24), r"page_size: expected a multiple of block_size = 16, given 24"),
        (dict(ttl_ms=5.0), r"requests\[0\]: timestamp: expected a time"),
        (dict(workers=2, affinity="session"), r"requests\[0\]: session: expected a name"),
        (dict(affinity="random"), r"affinity: expected one of \('none', 'session', 'prefix'\), given 'random'"),
        (dict(ttl_ms=-1), r"ttl_ms: expected a number >= 0, given -1"),
    ],
)
def test_what_a_cache_cannot_answer_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        list(replay([Request(None, 20, None, (1, 2), None)], block_size=16, **options))


def test_all_settings_and_groups_of_one_reading_are_those_of_a_reading_each():
    requests = [
        one._replace(model=name, timestamp=one.timestamp * 3e5)
        for one, name in zip(traffic(8), itertools.cycle("xyz"), strict=False)
    ]
    settings = [Setting(), Setting(capacity=160), Setting(ttl=600.0), Setting(page=32), Setting(workers=2)]
    for group, name in (
        ("model", lambda one: one.model),
        ("hour", lambda one: f"hour {int(one.timestamp // 3.6e6):4d}"),
    ):
        rows = measure(iter(requests), settings, 16, group=group)
        assert len(rows) == len(settings) * (1 + len(set(map(name, requests))))
        for row in rows:
            one = row.setting
            pairs = list(
                replay(
                    requests,
                    block_size=16,
                    capacity_tokens=one.capacity,
                    page_size=one.page,
                    ttl_ms=None if one.ttl is None else 1000 * one.ttl,
                    workers=one.workers,
                )
            )
            kept = [pair for pair, r in zip(pairs, requests, strict=True) if row.group in ("all", name(r))]
            assert row.summary == summarize(kept)


# bounds


def hits_of(lengths):
    return itertools.product(*(range(n) for n in lengths))


@pytest.mark.parametrize("lengths", [(1,), (5,), (3, 3), (2, 5, 4), (6, 1, 3, 2), (4, 4, 4)])
def test_bounds_of_lengths_are_the_least_and_most_of_all_hits(lengths):
    everything = sum(n * (n + 1) for n in lengths)
    for total in range(sum(lengths) - len(lengths) + 1):
        saved = [
            Fraction(sum(h * (h + 1) for h in hits), everything) for hits in hits_of(lengths) if sum(hits) == total
        ]
        found = bounds_of_lengths(lengths, total)
        assert (found.least, found.most) == (min(saved), max(saved))
        assert (found.requests, found.tokens, found.hit_tokens) == (len(lengths), sum(lengths), total)
    with pytest.raises(ValueError, match="hit_tokens"):
        bounds_of_lengths(lengths, sum(lengths) - len(lengths) + 1)


@pytest.mark.parametrize(("many", "tokens", "longest"), [(1, 7, 9), (2, 8, 6), (3, 9, 5), (3, 9, None), (4, 9, 3)])
def test_bounds_of_sums_hold_for_all_lengths_and_hits_with_these_sums(many, tokens, longest):
    top = longest or tokens
    cases = {}
    for lengths in itertools.combinations_with_replacement(range(1, top + 1), many):
        if sum(lengths) == tokens:
            for hits in hits_of(lengths):
                saved = Fraction(sum(h * (h + 1) for h in hits), sum(n * (n + 1) for n in lengths))
                cases.setdefault(sum(hits), []).append(saved)
    for total, saved in cases.items():
        found = bounds_of_totals([Totals(None, many, tokens, total)], longest)
        unknown = bounds_of_totals([Totals(None, None, tokens, total)], longest)
        assert found.least <= min(saved) <= max(saved) <= found.most
        assert unknown.least <= found.least
        assert found.most <= unknown.most
        if many == 1:
            assert found.least == found.most == saved[0]


def test_bounds_of_groups_hold_and_are_narrower_than_those_of_their_sum():
    draw = random.Random(4)
    pairs = [
        [(n, draw.randrange(n)) for n in (draw.randint(1, 400) for _ in range(draw.randint(1, 3)))] for _ in range(60)
    ]
    groups = [Totals(None, len(one), sum(n for n, _ in one), sum(h for _, h in one)) for one in pairs]
    exact = 1 - summarize([pair for one in pairs for pair in one]).attention_remaining
    found = bounds_of_totals(groups, 400)
    whole = bounds_of_totals(
        [Totals(None, *(sum(column) for column in zip(*[g[1:4] for g in groups], strict=True)))], 400
    )
    assert whole.least < found.least < exact < found.most < whole.most
    assert found.token_hit == whole.token_hit


def test_sums_that_no_requests_have_are_refused():
    for one, longest in (((3, 10, 9), None), ((2, 90, 5), 40), ((None, 90, 90), None), ((0, 5, 0), None)):
        with pytest.raises(ValueError, match=r"totals\[1\]: expected 1 to N - H requests"):
            bounds_of_totals([Totals(None, 1, 8, 3), Totals(None, *one)], longest)
    with pytest.raises(ValueError, match="empty trace"):
        bounds_of_totals([])


# regions and models


@pytest.mark.parametrize(
    "rule", [SlidingWindow(40), Chunked(64), SinkWindow(4, 30), Mixture(((5, SlidingWindow(8)), (1, Dense())))]
)
def test_a_region_counts_the_keys_that_rows_see(rule):
    pairs = [(300, 120), (90, 0), (41, 40)]
    found = summarize(pairs, region=rule, model=MODELS["Llama-3.1-8B"])
    keys = {(n, h): [rule.visible(t) for t in range(1, n + 1)] for n, h in pairs}
    assert found.pairs == sum(sum(seen) for seen in keys.values())
    assert found.pairs_left == sum(sum(seen[h:]) for (_, h), seen in keys.items())
    model = MODELS["Llama-3.1-8B"]
    weight = 6 if isinstance(rule, Mixture) else 1
    flops = [model.linear_flops * (n - h) + Fraction(model.pair_flops, weight) * sum(keys[n, h][h:]) for n, h in pairs]
    whole = [model.linear_flops * n + Fraction(model.pair_flops, weight) * sum(keys[n, h]) for n, h in pairs]
    assert found.model_remaining == sum(flops) / sum(whole)
    exact = float(found.attention_remaining)
    assert found.errors["attention, 1-h at token_hit"] == pytest.approx((1 - 160 / 431) / exact - 1, abs=1e-12)


def test_latent_attention_pays_for_the_hit_again():
    model, pairs = OTHER_MODELS["DeepSeek-V3"], [(900, 512), (70, 0)]
    mla = model.mla
    whole = left = 0
    for n, h in pairs:
        whole += model.linear_flops * n + 61 * interactions(n) * mla.expanded_flops
        flops = mla.prefill_flops(n, h)
        left += model.linear_flops * (n - h) + 61 * (flops["expanded"] + flops["expansion"])
    assert summarize(pairs, model=model).model_remaining == Fraction(left, whole)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("dense", Dense()),
        ("window:4096", SlidingWindow(4096)),
        ("sink-window:4:1020", SinkWindow(4, 1020)),
        ("5*window:1024+1*dense", Mixture(((5, SlidingWindow(1024)), (1, Dense())))),
    ],
)
def test_regions_have_names(text, rule):
    assert region(text) == rule


@pytest.mark.parametrize("text", ["", "windows:4", "window", "window:4:5", "window:x", "0*dense+1*dense", "window:0"])
def test_a_text_that_names_no_region_is_refused(text):
    with pytest.raises(ValueError, match="expected"):
        region(text)


LLAMA = dict(
    num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336
)


def config(tmp_path, **fields):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return read_model(tmp_path / "config.json")


def test_configurations_give_the_shapes_that_are_named(tmp_path):
    gemma = dict(num_hidden_layers=62, hidden_size=5376, num_attention_heads=32, num_key_value_heads=16, head_dim=128)
    gemma |= dict(intermediate_size=21504, sliding_window=1024, sliding_window_pattern=6)
    qwen = dict(num_hidden_layers=48, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
    qwen |= dict(intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)
    qwen |= dict(use_sliding_window=False, sliding_window=4096)
    deepseek = dict(num_hidden_layers=61, hidden_size=7168, num_attention_heads=128, num_key_value_heads=128)
    deepseek |= dict(intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8)
    deepseek |= dict(n_shared_experts=1, first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512)
    deepseek |= dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    for name, fields in (
        ("Llama-3.1-8B", LLAMA),
        ("Gemma-3-27B", {"text_config": gemma}),
        ("Qwen3-30B-A3B", qwen),
        ("DeepSeek-V3", deepseek),
    ):
        found, named = config(tmp_path, **fields), (MODELS | OTHER_MODELS)[name]
        assert (found.linear_flops, found.pair_flops, found.hit_flops) == (
            named.linear_flops,
            named.pair_flops,
            named.hit_flops,
        )
        assert (
            summarize([(3000, 900)], model=found).model_remaining
            == summarize([(3000, 900)], model=named).model_remaining
        )


def test_layers_of_several_kinds_count_each_by_its_own(tmp_path):
    kinds = ["sliding_attention", "full_attention", "chunked_attention", "sliding_attention"]
    fields = LLAMA | dict(num_hidden_layers=4, layer_types=kinds, sliding_window=8, attention_chunk_size=16)
    assert config(tmp_path, **fields).region == Mixture(((2, SlidingWindow(8)), (1, Dense()), (1, Chunked(16))))
    with pytest.raises(
        ForeignFileError, match="layer_types: expected full, sliding or chunked attention, given 'mamba'"
    ):
        config(tmp_path, **fields | dict(layer_types=["mamba"]))


@pytest.mark.parametrize("name", LLAMA)
def test_a_configuration_that_does_not_say_is_refused_by_name(name, tmp_path):
    if name == "num_key_value_heads":
        assert config(tmp_path, **{k: v for k, v in LLAMA.items() if k != name}).kv_heads == 32
        return
    with pytest.raises(ForeignFileError, match=f"{name}: missing"):
        config(tmp_path, **{k: v for k, v in LLAMA.items() if k != name})
    with pytest.raises(ForeignFileError, match=f"{name}: expected"):
        config(tmp_path, **LLAMA | {name: "many"})


# the command


def run(capsys, *arguments):
    status = cli.main(["trace", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_sweeps_and_groups_are_rows_of_table_json_csv_and_figure(capsys, tmp_path):
    out = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "svg")}
    rows = [one._replace(model="mn"[i % 2]) for i, one in enumerate(traffic(6, 120))]
    text = "\n".join(
        json.dumps(
            {"timestamp": r.timestamp, "input_length": r.input_tokens, "hash_ids": r.block_ids, "model": r.model}
        )
        for r in rows
    )
    (tmp_path / "log.jsonl").write_text(text)
    arguments = ["--block-size", 16, "--capacity", "none,400,160", "--page-size", "16,32", "--group", "model"]
    files = ["--json", out["json"], "--csv", out["csv"], "--figure", out["svg"]]
    status, shown, err = run(capsys, tmp_path / "log.jsonl", *arguments, *files)
    assert (status, err) == (0, "")
    found = json.loads(out["json"].read_text())
    assert len(found["rows"]) == 3 * 6
    lines = out["csv"].read_text().splitlines()
    assert len(lines) == 1 + 18
    columns = lines[0].split(",")
    for line, row in zip(lines[1:], found["rows"], strict=True):
        cells = dict(zip(columns, line.split(","), strict=True))
        assert cells["group"] == row["group"]
        assert float(cells["attention_remaining"]) == row["attention_remaining"]
        options = dict(capacity_tokens=row["capacity_tokens"], page_size=row["page_size"])
        pairs = zip(rows, replay(rows, block_size=16, **options), strict=True)
        kept = [pair for one, pair in pairs if row["group"] in ("all", one.model)]
        assert row["token_hit"] == summarize(kept).token_hit
        assert f"{row['rms_hit']:.4f}" in shown
    assert out["svg"].read_bytes().startswith(b"<?xml")


def test_workers_and_lives_are_rows(capsys, tmp_path):
    rows = traffic(6, 120)
    write(tmp_path / "log.jsonl", rows)
    arguments = ["--block-size", 16, "--ttl", "0.02,none", "--workers", "1,2", "--affinity", "none,prefix"]
    status, _, _ = run(capsys, tmp_path / "log.jsonl", *arguments, "--json", tmp_path / "out.json")
    assert status == 0
    for row in json.loads((tmp_path / "out.json").read_text())["rows"]:
        ttl = None if row["ttl_s"] is None else 1000 * row["ttl_s"]
        pairs = replay(rows, block_size=16, ttl_ms=ttl, workers=row["workers"], affinity=row["affinity"])
        assert row["token_hit"] == summarize(pairs).token_hit


def test_bounds_are_reported_by_group(capsys, tmp_path):
    arguments = [
        "--group",
        "model",
        "--max-tokens",
        700,
        "--json",
        tmp_path / "out.json",
        "--csv",
        tmp_path / "out.csv",
    ]
    status, shown, _ = run(capsys, SAMPLES / "openai_usage.csv", *arguments, "--figure", tmp_path / "out.svg")
    assert status == 0
    found = json.loads((tmp_path / "out.json").read_text())
    groups = {"all": [(5, 1000, 800), (2, 600, 100)], "gpt-5": [(5, 1000, 800)], "gpt-5-mini": [(2, 600, 100)]}
    assert [row["group"] for row in found["rows"]] == list(groups)
    for row in found["rows"]:
        expected = bounds_of_totals([Totals(None, *one) for one in groups[row["group"]]], 700)
        assert (row["attention_saved_at_least"], row["attention_saved_at_most"]) == (
            float(expected.least),
            float(expected.most),
        )
        assert f"{row['attention_saved_at_most']:.4f}" in shown
        assert f"{row['token_hit'] ** 2:.4f}" in shown
    status, _, err = run(capsys, SAMPLES / "openai_usage.csv", "--region", "window:64")
    assert (status, "--region: expected none with a log of sums" in err) == (2, True)


def test_the_report_names_the_mean_that_would_have_misled_and_by_how_much(capsys, tmp_path):
    """A short hit and a long miss: the mean over requests is 0.45, and leaves 0.80 where 0.99 are left."""
    (tmp_path / "log.csv").write_text("input_tokens,prefix_hit_tokens\n1000,0\n100,90\n")
    _, shown, _ = run(capsys, tmp_path / "log.csv")
    left = float(summarize([(1000, 0), (100, 90)]).attention_remaining)
    assert "request_hit = 0.4500 would have misled most: 1-h^2 of it says 0.7975" in shown
    assert f"where {left:.4f} are ({0.7975 / left - 1:+.1%})" in shown
    _, shown, _ = run(capsys, tmp_path / "log.csv", "--region", "window:10")
    assert "would have misled most: 1-h of it says 0.5500" in shown


def test_a_model_is_named_or_given_with_its_region(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | dict(sliding_window=64)))
    out = ["--json", tmp_path / "out.json"]
    status, _, _ = run(capsys, SAMPLES / "hits.csv", "--model", tmp_path / "config.json", *out)
    pairs = [(700, 0), (900, 704), (50, 49)]
    rule = SlidingWindow(64)
    found = json.loads((tmp_path / "out.json").read_text())
    assert status == 0
    assert found["attention_remaining"] == float(summarize(pairs, region=rule).attention_remaining)
    expected = summarize(pairs, region=rule, model=MODELS["Llama-3.1-8B"]).model_remaining
    assert found["model_remaining"] == float(expected)
    status, _, err = run(capsys, SAMPLES / "hits.csv", "--model", tmp_path / "none.json")
    assert (status, "--model: expected one of" in err) == (2, True)


# size


@pytest.mark.long
@pytest.mark.parametrize("hashed", [False, True])
def test_a_million_requests_stay_within_a_gigabyte_and_a_few_times_the_parsing_of_their_json(hashed, tmp_path):
    """Prompts of 25 blocks in the mean, 15 of them new, as in Mooncake's conversations.

    Memory is the most that the process ever held, and time that of the processor, over what `json.loads` takes for the
    same lines in the same process: 30 s where that takes 3.75.
    """
    draw = random.Random(0)
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        next_id, last = 0, [()] * 500
        for i in range(1_000_000):
            who = draw.randrange(500)
            head = last[who][: draw.choice((0, 8, 30))]
            fresh = range(next_id, next_id + draw.randint(1, 29))
            next_id = fresh.stop
            names = (f"{one * 0x9E3779B97F4A7C15 & (2**64 - 1):016x}" for one in fresh) if hashed else fresh
            last[who] = ids = head + tuple(names)
            file.write(json.dumps({"timestamp": i, "input_length": 512 * len(ids), "hash_ids": ids}) + "\n")
    code = """if True:
        import json, resource, sys
        from cascade_lab import cli

        def spent():
            used = resource.getrusage(resource.RUSAGE_SELF)
            return used.ru_utime + used.ru_stime

        start = spent()
        with open(sys.argv[1], "rb") as file:
            for line in file:
                json.loads(line)
        parsed = spent()
        status = cli.main(["trace", sys.argv[1], "--json", sys.argv[2]])
        times = (spent() - parsed) / (parsed - start)
        from cascade_lab.bench.cpu import resident_peak

        print(status, resident_peak(), times)
    """
    command = [sys.executable, "-c", code, path, tmp_path / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, timeout=HANGS_LONG_S, check=True)
    status, megabytes, times = done.stdout.splitlines()[-1].split()
    found = json.loads((tmp_path / "out.json").read_text())
    assert (status, found["requests"]) == ("0", 1_000_000)
    assert 0.2 < found["token_hit"] < 0.6
    assert float(megabytes) < 1024
    assert float(times) < 8
