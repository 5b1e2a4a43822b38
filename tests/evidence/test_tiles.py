"""Counts taken from the interpreted kernel equal the closed forms, and a kernel that only masks does more."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from cascade_lab import interactions, runtime
from cascade_lab.evidence import reference, tiles
from cascade_lab.evidence.tiles import Prefill, TileCount
from cascade_lab.prefix import executed_tiles

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(runtime.triton_mode() != "interpreted", reason="watches the interpreter in process")

CASES = [
    Prefill(1, 0),
    Prefill(64, 0),
    Prefill(65, 64),
    Prefill(97, 33, 4, 2),
    Prefill(200, 71, 3, 1),
    Prefill(150, 96, 1, 1, "float16"),
]


def _expected(prefill: Prefill, count: TileCount) -> tuple[int, int, int]:
    group = prefill.num_q_heads // prefill.num_kv_heads
    per_head = executed_tiles(prefill.n, prefill.hit, count.block_m, count.block_n, group)
    if not prefill.skip:
        rows = (prefill.n - prefill.hit) * group
        per_head = -(-rows // count.block_m) * -(-prefill.n // count.block_n)
    pairs = prefill.num_q_heads * interactions(prefill.n, prefill.hit)
    return per_head * prefill.num_kv_heads, pairs, prefill.n * prefill.num_kv_heads


@interpreted
@pytest.mark.parametrize("prefill", CASES, ids=str)
def test_tiles_pairs_and_distinct_keys_are_the_closed_forms(prefill):
    (found,) = tiles.count([prefill])
    assert (found.tiles, found.pairs, found.keys) == _expected(prefill, found)


@interpreted
@pytest.mark.parametrize("prefill", [Prefill(160, 33, 4, 2, skip=False), Prefill(200, 20, 2, 2, skip=False)], ids=str)
def test_masking_without_skipping_sees_the_same_pairs_in_more_tiles(prefill):
    masking, skipping = tiles.count([prefill, Prefill(**(vars(prefill) | {"skip": True}))])
    assert (masking.tiles, masking.pairs, masking.keys) == _expected(prefill, masking)
    assert masking.pairs == skipping.pairs
    assert masking.tiles > skipping.tiles


@pytest.mark.parametrize(("n", "hit"), [(1, 0), (64, 0), (65, 3), (130, 129), (200, 128)])
def test_causal_bits_show_what_the_oracle_shows(n, hit):
    bits = tiles._causal_bits(n, hit)
    (visible,) = reference.visible_keys(torch.tensor([0, n - hit]), torch.tensor([n]), causal=True)
    key = torch.arange(n)
    assert torch.equal((bits[:, key // 64] >> (key % 64) & 1).bool(), visible)


COUNTED = """
import json, sys
from dataclasses import asdict
from cascade_lab.evidence.tiles import Prefill, count
print(json.dumps([asdict(found) for found in count([Prefill(**p) for p in json.load(sys.stdin)])]))
"""


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_80", marks=pytest.mark.long)])
def test_executed_code_is_counted_to_the_closed_forms_too(target):
    prefills = [*CASES, Prefill(160, 33, 4, 2, skip=False)]
    environment = os.environ | {runtime.SWITCH: "0", runtime.TARGET: target}
    environment["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    given = json.dumps([asdict(prefill) for prefill in prefills])
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], input=given, capture_output=True, text=True, env=environment, check=True
    )
    for prefill, found in zip(prefills, (TileCount(**each) for each in json.loads(done.stdout)), strict=True):
        assert (found.tiles, found.pairs, found.keys) == _expected(prefill, found), prefill


@interpreted
def test_where_kernels_are_compiled_a_child_process_counts_the_same(monkeypatch):
    here = tiles.count([Prefill(40, 17)])
    monkeypatch.setitem(os.environ, runtime.SWITCH, "0")
    assert runtime.triton_mode() == "compiled"
    assert tiles.count([Prefill(40, 17)]) == here


def test_without_triton_nothing_is_counted(monkeypatch):
    monkeypatch.setattr(runtime, "triton_mode", lambda: "absent")
    assert tiles.count([Prefill(8, 4)]) is None


def test_executed_products_fall_as_tiles_and_stores_as_rows():
    """257 to 512 rows of one head take row tiles of 128 and whole key tiles, so products go by key tiles.

    A square of 128 x 128 is two products with a head dim of 64; its instructions are fewer where it goes by whole.
    """
    whole, half = tiles.instructions([Prefill(512, 0, dtype="float16"), Prefill(512, 256, dtype="float16")])
    assert set(whole) == set(half) >= {"tensor", "global store", "integer"}
    squares = [found["multiply-adds"] / (2 * 128 * 128 * 64) for found in (whole, half)]
    assert squares == [1 + 2 + 3 + 4, 3 + 4]
    assert half["tensor"] / whole["tensor"] == pytest.approx(7 / 10, abs=0.05)
    assert half["global store"] * 2 == whole["global store"]


@pytest.mark.parametrize("prefill", [Prefill(64, 0), Prefill(64, 0, dtype="float16", skip=False)], ids=str)
def test_instructions_are_counted_of_a_skipping_kernel_in_half_precision(prefill):
    with pytest.raises(ValueError, match=r"^prefills: expected float16 or bfloat16 and skip=True, given Prefill"):
        tiles.instructions([prefill])
