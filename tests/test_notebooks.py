"""Every notebook runs under other parameters than the committed ones, makes the same claims, and all of them stand."""

from pathlib import Path

import pytest

from cascade_lab.evidence import notebooks
from cascade_lab.evidence.claims import gather
from cascade_lab.evidence.execution import load
from cascade_lab.evidence.parameters import read_parameters

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
# For each notebook, named sets of values; a set names only what it changes.
PARAMETER_SETS: dict[str, dict[str, dict[str, object]]] = {
    "01_lse_splitting": {
        "one kv head, odd head dim, single tokens as pages": {
            "seed": 1,
            "head_dim": 20,
            "num_q_heads": 3,
            "num_kv_heads": 1,
            "page_size": 1,
            "prefix_lengths": [1, 33],
            "draft_lengths": [3, 2],
            "splits": [1, 5],
        },
        "every head its own kv head, long pages": {
            "seed": 2,
            "head_dim": 96,
            "num_q_heads": 3,
            "num_kv_heads": 3,
            "page_size": 64,
            "prefix_lengths": [65, 1, 30],
            "draft_lengths": [1, 7, 2],
            "splits": [1, 11],
        },
    },
    "02_cascade_read_volume": {
        "one branch, no prefix, long pages": {
            "topk": 1,
            "counted_prefixes": [0, 33],
            "counted_steps": [1, 4],
            "page_size": 64,
            "num_q_heads": 8,
            "num_kv_heads": 1,
            "clock_mebibytes": 64,
        },
        "many branches, single tokens as pages": {
            "topk": 8,
            "counted_prefixes": [65, 7],
            "counted_steps": [7, 1],
            "page_size": 1,
            "head_dim": 64,
            "ragged_prefixes": [1, 0, 3, 70],
            "clock_branches": 2,
        },
    },
    "03_prefix_hit_area": {
        "one kv head, odd lengths, single tokens as pages": {
            "seed": 1,
            "n": 4097,
            "hit": 1001,
            "prompt_lengths": [17, 1],
            "hits": [3, 0],
            "page_size": 1,
            "num_q_heads": 3,
            "num_kv_heads": 1,
            "head_dim": 20,
            "timed_tokens": 8192,
        },
        "every head its own kv head, long pages, high hits": {
            "seed": 2,
            "n": 100000,
            "hit": 80000,
            "prompt_lengths": [64, 130, 33, 5],
            "hits": [63, 100, 32, 2],
            "page_size": 64,
            "num_q_heads": 2,
            "head_dim": 96,
            "flop_rate": 1e14,
            "fixed_ms": 200.0,
        },
    },
    "04_other_regions": {
        "two kv heads, single tokens as pages, narrow window": {
            "seed": 1,
            "brute_force_n": 300,
            "hit_ratio": 0.25,
            "kernel_lengths": [50, 9],
            "kernel_hits": [49, 0],
            "kernel_window": 7,
            "num_kv_heads": 2,
            "page_size": 1,
        },
        "three heads a group, long pages, a window wider than the prompts": {
            "seed": 2,
            "brute_force_n": 96,
            "hit_ratio": 0.875,
            "kernel_lengths": [130, 20, 1],
            "kernel_hits": [111, 1, 0],
            "kernel_window": 400,
            "num_q_heads": 6,
            "num_kv_heads": 2,
            "page_size": 64,
        },
    },
    "05_hit_ratio_on_traces": {
        "agentic traffic, a mixture of experts, other caches": {
            "seed": 1,
            "requests": 600,
            "traffic": "agentic",
            "model": "Qwen3-30B-A3B",
            "capacities": [50_000, 500_000, 5_000_000],
        },
        "a short trace with an id per whole block of 64": {
            "seed": 2,
            "requests": 500,
            "trace": "../tests/data/turns.jsonl",
            "block_size": 64,
            "model": "Llama-3.1-405B",
            "capacities": [512, 2048, 16384],
        },
        "a trace of given hits": {"requests": 700, "trace": "../tests/data/hits.csv"},
    },
}
RUNS = [(name, label) for name, sets in PARAMETER_SETS.items() for label in sets]


def test_every_notebook_has_sets_that_differ_from_its_defaults():
    paths = notebooks.select(FOLDER)
    assert sorted(PARAMETER_SETS) == [path.stem for path in paths]
    for path in paths:
        defaults = {name: parameter.default for name, parameter in read_parameters(load(path)).items()}
        assert PARAMETER_SETS[path.stem]
        for label, values in PARAMETER_SETS[path.stem].items():
            assert values, label
            assert all(defaults[name] != value for name, value in values.items()), label


@pytest.mark.parametrize(("name", "label"), RUNS)
def test_claims_hold_under_other_parameters(name, label, tmp_path):
    status = notebooks.run([name], PARAMETER_SETS[name][label], folder=FOLDER, output=tmp_path)
    assert status == 0
    records = notebooks.read_claims(tmp_path)
    committed = gather(load(FOLDER / f"{name}.ipynb"))
    assert [record["id"] for record in records] == [claim.id for claim in committed]
    for record in records:
        elsewhere = ["not measured here"] if record["instrument"] in ("timed", "recorded") else []
        assert record["verdict"] in ["holds", *elsewhere], record
