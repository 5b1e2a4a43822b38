"""States merged over real ranks: `rank_programs` runs on each, and one process's answer judges.

Two ranks are started by `evidence.ranks`; four by torchrun, as a user's are, since some of them die and the others have
more to say after that.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cascade_lab
from cascade_lab import State, ledger, merge_states, runtime
from cascade_lab.distributed import merge_across_ranks, merge_bytes, ring_attention, sharded_attention
from cascade_lab.evidence.ranks import ENVIRONMENT, Ranks
from cascade_lab.evidence.reference import Reference, assert_state_close, attention_oracle, merge_oracle
from cascade_lab.sharding import TOKEN_LAYOUTS, held_rows, ring_ledgers, sharded_ledgers
from tests import rank_programs
from tests.cases import bytes_of, int32, offsets, random
from tests.limits import HANGS_LONG_S, HANGS_S
from tests.rank_programs import EXCHANGES, GOOD, GRADIENTS, MERGES, MOVED, RING_CASES, RINGS, VERIFIES, MergeCase

CHECKOUT = Path(__file__).resolve().parents[2]
MARK = "CASCADE_LAB_TEST_RANKS"
LOST = r"rank \d of \d lost another rank, or waited too long for it: "
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@dataclass(frozen=True)
class Launch:
    """What the ranks of one launch saved.

    Attributes:
        found: by rank, by program.
        last: what ranks saved while others died; empty where all lived.
        left: processes of the launch that outlived it.
    """

    found: list[dict]
    last: list[dict]
    left: list[int]

    @property
    def world_size(self) -> int:
        return len(self.found)

    def of(self, program: str, name: str) -> list:
        if program == "moved" and not self.found[0]["moved"]:
            pytest.skip("this system does not count the bytes of a connection")
        return [found[program][name] for found in self.found]


@contextlib.contextmanager
def marked_environment() -> Iterator[str]:
    """Processes that are started meanwhile find this checkout and carry a mark, which is given."""
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        patch.setenv("PYTHONPATH", str(CHECKOUT), prepend=os.pathsep)
        yield mark


def run_all(folder):
    from pathlib import Path

    from tests import rank_programs

    rank_programs.run_all(Path(folder))


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Launch:
    folder = tmp_path_factory.mktemp("two")
    with marked_environment() as mark:
        with Ranks(2, timeout=300) as ranks:
            ranks.run(run_all, folder=str(folder))
        left = marked(mark)
    return Launch([load(folder / f"{rank}.pt") for rank in range(2)], [], left)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Launch:
    folder = tmp_path_factory.mktemp("four")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    with marked_environment() as mark, (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            [*command, "-m", "tests.rank_programs", str(folder)],
            cwd=CHECKOUT,
            env=os.environ | ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(HANGS_LONG_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read()
        left = marked(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    saved = [folder / f"{rank}.pt" for rank in range(4)]
    if not all(path.exists() for path in saved):
        raise RuntimeError(f"torchrun ended with {process.returncode}:\n{said[-4000:]}")
    last = [folder / f"last.{rank}.pt" for rank in range(4)]
    return Launch([load(path) for path in saved], [load(path) for path in last if path.exists()], left)


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def marked(mark: str, patience: float = HANGS_S) -> list[int]:
    """Processes that carry the mark in their environment, once those that are ending have ended."""
    deadline = time.monotonic() + patience
    while True:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # gone, or not ours
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.long)])
def ranks(request) -> Launch:
    return request.getfixturevalue(request.param)


def same_bits(states: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether all states have equal dtypes, shapes and bytes, NaN included."""
    facts = [[(x.dtype, x.shape, bytes_of(x).tolist()) for x in state] for state in states]
    return all(fact == facts[0] for fact in facts)


def merged_once(case: MergeCase, world_size: int) -> Reference:
    """All parts merged in float64, each rounded once to the dtype it travelled in."""
    o, lse = rank_programs.states(case, world_size)
    return merge_oracle(o.to(case.options.get("wire_dtype", o.dtype)), lse)


def heads_of(rank: int, case: MergeCase, world_size: int) -> slice:
    share = case.shape[1] // world_size
    return slice(rank * share, (rank + 1) * share) if case.mode == "scatter" else slice(None)


@pytest.mark.parametrize("name", MERGES)
def test_ranks_merge_to_the_state_of_all_keys(ranks, name):
    case = MERGES[name]
    if case.options.get("backend") == "triton" and runtime.triton_mode() == "absent":
        pytest.skip("Triton is not installed")
    W = ranks.world_size
    o, lse = merged_once(case, W)
    dtype = case.options.get("out_dtype", case.dtype)
    for rank, found in enumerate(ranks.of("merges", name)):
        assert found["untouched"]
        assert (found["o"].dtype, found["lse"].dtype) == (dtype, case.lse_dtype)
        own = heads_of(rank, case, W)
        expected = Reference(o[:, own], lse[:, own])
        # float32 lse near 1e5 is known to 1/128, whatever dtype the parts have
        atol = 1e-5 if (case.dtype, case.lse_dtype) == (torch.float64, torch.float32) else None
        plain = None
        if case.kind == "hostile" and case.lse_dtype == torch.float32:
            parts, sums = rank_programs.states(case, W)
            plain = merge_states(parts[:, :, own], sums[:, :, own], out_dtype=dtype, backend="torch")
            plain = tuple(x.nan_to_num(0.0, neginf=0.0) for x in plain)
            plain = Reference(*(torch.where(e.isfinite(), p, e) for p, e in zip(plain, expected, strict=True)))
        assert_state_close(
            State(found["o"], found["lse"]), expected, plain=plain, atol=atol, nan_rows=expected.lse.isnan()
        )


@pytest.mark.parametrize("name", [name for name in MERGES if name.startswith(("auto", "gather", "exchange"))])
def test_all_ranks_hold_equal_bits(ranks, name):
    if name not in ranks.found[0]["merges"]:
        pytest.skip("Triton is not installed")
    assert same_bits([(found["o"], found["lse"]) for found in ranks.of("merges", name)])


def test_hostile_rows_come_out_exact(ranks):
    case = MERGES["exchange hostile"]
    parts, sums = rank_programs.states(case, ranks.world_size)
    for name in (f"{algorithm} hostile" for algorithm in EXCHANGES):
        for found in ranks.of("merges", name):
            o, lse = found["o"], found["lse"]
            assert torch.equal(lse[0], torch.full((3,), -torch.inf))
            assert torch.equal(o[0], torch.zeros(3, 8))
            assert lse.isnan().nonzero().tolist() == [[1, 0]]
            assert o.isnan().any(-1).nonzero().tolist() == [[1, 0]]
            # row 4: one part outweighs all others beyond what float32 can tell
            assert torch.equal(lse[4], torch.full((3,), 1e5))
            assert torch.equal(o[4], parts[4, 0])
            if ranks.world_size == 2:  # one side is empty, so the other is the answer
                assert torch.equal(lse[5], sums[5, 1])
                assert torch.equal(o[5], parts[5, 1])
                assert torch.equal(lse[6], sums[6, 0])
                assert torch.equal(o[6], parts[6, 0])


def test_groups_of_some_ranks_merge_their_own(ranks):
    W = ranks.world_size
    case = MERGES["auto"]
    o, lse = rank_programs.states(case, W)
    for rank, found in enumerate(ranks.found):
        alone = merge_states(o[:, rank : rank + 1], lse[:, rank : rank + 1], backend="torch")
        assert same_bits([alone, found["groups"]["alone"], found["groups"]["scatter alone"]])
        assert found["groups"]["outside"] == "ValueError: group: expected one that this rank belongs to, given another"
        if rank % 2:
            expected = merge_oracle(o[:, 1::2], lse[:, 1::2])
            assert_state_close(found["groups"]["some"], expected, atol=0.02, nan_rows=expected.lse.isnan())
            mine = held_rows(RINGS["ragged"], rank // 2, W // 2)
            whole = ring_oracle("ragged", "")
            assert_state_close(found["groups"]["some ring"], Reference(*(x[mine] for x in whole)))


def one_process_gradients(case: MergeCase, world_size: int) -> tuple[Tensor, Tensor]:
    """Of the sum of all ranks' losses, by `merge_states`: o `[T, W, H, D]` and lse `[T, W, H]`."""
    o, lse = (x.clone().requires_grad_() for x in rank_programs.states(case, world_size))
    merged = merge_states(o, lse, backend="torch")
    loss = 0.0
    for rank in range(world_size):
        by_o, by_lse = rank_programs.weights(case, rank, world_size)
        own = heads_of(rank, case, world_size)
        loss = loss + (merged.o[:, own] * by_o).sum()
        loss = loss + torch.where(merged.lse.isfinite(), merged.lse, 0.0)[:, own].mul(by_lse).sum()
    return torch.autograd.grad(loss, (o, lse))


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_one_process(ranks, name):
    case = GRADIENTS[name]
    d_o, d_lse = one_process_gradients(case, ranks.world_size)
    for rank, (got_o, got_lse) in enumerate(ranks.of("gradients", name)):
        assert (got_o.dtype, got_lse.dtype) == (case.dtype, case.lse_dtype)
        # rounded once here, once per part there
        rtol, atol = {torch.bfloat16: (2**-7, 0.05), torch.float64: (1e-12, 1e-12)}.get(case.dtype, (1e-5, 1e-5))
        torch.testing.assert_close(got_o, d_o[:, rank], rtol=rtol, atol=atol)
        torch.testing.assert_close(got_lse, d_lse[:, rank], rtol=rtol, atol=atol)
        if case.kind == "absent" and rank == ranks.world_size - 1:
            assert not got_o.any()
            assert not got_lse.any()
        elif case.shape[0]:
            assert got_o.any()


def test_a_second_derivative_is_refused(ranks):
    assert all("once_differentiable" in ended for ended in ranks.of("gradients", "twice"))


@pytest.mark.parametrize(("name", "count"), [("all absent", 4), ("scatter absent", 4), ("any number of rows", 8)])
def test_a_compiled_merge_is_the_uncompiled_one(two, name, count):
    for found in two.of("compiled", name):
        assert len(found["compiled"]) == count
        assert same_bits([found["compiled"], found["eager"]])


def state_of(found: dict) -> State:
    return State(found["o"], found["lse"])


def assert_all_close(ranks: Launch, name: str, expected: Reference, plain: Reference | None = None, **options) -> None:
    states = [state_of(found) for found in ranks.of("attentions", name)]
    assert same_bits(states)
    assert_state_close(states[0], expected, plain=plain, **options)


def total_reads(ranks: Launch, name: str) -> list[int]:
    """KV tokens by rank, equal in every KV head."""
    reads = [found["reads"] for found in ranks.of("attentions", name)]
    assert all((x == x[0]).all() for x in reads)
    return [int(x[0]) for x in reads]


@pytest.mark.parametrize("layout", ["contiguous", "interleaved"])
@pytest.mark.parametrize("name", ["ragged", "one page", "no keys"])
def test_decode_over_a_sharded_cache_is_attention(ranks, name, layout):
    case = rank_programs.decode_case(name)
    assert_all_close(ranks, f"decode {name} {layout}", case.reference(), case.reference(torch.float32))
    ledgers = sharded_ledgers([rank_programs.level_of(case)], ranks.world_size, layout=layout)
    reads = total_reads(ranks, f"decode {name} {layout}")
    assert reads == [x.kv_tokens for x in ledgers]
    assert sum(reads) == ledger([rank_programs.level_of(case)]).kv_tokens
    if name != "ragged":
        assert 0 in reads  # a rank without any page


def test_options_of_attention_hold_over_ranks(ranks):
    case = rank_programs.decode_case("ragged")
    options = dict(softmax_scale=0.7, softcap=1.5)
    expected = case.with_options(**options)
    assert_all_close(ranks, "decode options", expected.reference(), expected.reference(torch.float32))
    names = ("decode unchecked", "decode ragged contiguous")
    assert same_bits([state_of(found["attentions"][name]) for found in ranks.found for name in names])
    share = 4 // ranks.world_size
    whole = case.reference()
    for rank, found in enumerate(ranks.of("attentions", "decode scatter")):
        own = slice(rank * share, (rank + 1) * share)
        assert_state_close(state_of(found), Reference(whole.o[:, own], whole.lse[:, own]))


def test_kernels_read_a_shard_as_torch_does(ranks):
    if runtime.triton_mode() == "absent":
        pytest.skip("Triton is not installed")
    case = rank_programs.decode_case("ragged")
    assert_all_close(ranks, "decode triton", case.reference(), case.reference(torch.float32))
    assert total_reads(ranks, "decode triton") == total_reads(ranks, "decode ragged contiguous")


@pytest.mark.parametrize("name", ["no rows", "no requests"])
def test_no_rows_are_no_error(ranks, name):
    for found in ranks.of("attentions", name):
        assert (found["o"].shape, found["lse"].shape) == ((0, 4, 12), (0, 4))
        assert not found["reads"].any()


@pytest.mark.parametrize("name", VERIFIES)
def test_verify_with_sharded_prefixes_and_drafts_everywhere(ranks, name):
    case = rank_programs.verify_of(name)
    assert_all_close(ranks, f"verify {name}", case.oracle(), case.oracle(case.q.dtype))
    levels = case.batch.levels("cascade")
    ledgers = sharded_ledgers(levels, ranks.world_size, layout="interleaved", replicated=[len(levels) - 1])
    assert total_reads(ranks, f"verify {name}") == [x.kv_tokens for x in ledgers]
    assert sum(total_reads(ranks, f"verify {name}")) == ledger(levels).kv_tokens


def test_a_tree_level_that_all_hold_is_read_once(ranks):
    case = rank_programs.verify_of("node")
    assert_all_close(ranks, "fused everywhere", case.oracle(), case.oracle(torch.float32))
    (fused,) = case.batch.levels("fused")
    assert sum(total_reads(ranks, "fused everywhere")) == ledger([fused]).kv_tokens


def test_a_plan_that_counts_a_key_twice_is_refused_everywhere(ranks):
    case = rank_programs.verify_of("node")
    slot = int(case.batch.draft_slots(0)[0])
    errors = ranks.of("attentions", "counted twice")
    assert len(set(errors)) == 1
    assert errors[0] == (
        "ValueError: levels: expected each key of a row once over all ranks, "
        f"given slot {slot} twice for row 0: in levels[1] on rank 0 and in levels[1] on rank 1"
    )
    assert_all_close(ranks, "after it", case.oracle(), case.oracle(torch.float32))


def test_the_gradient_of_the_rows_adds_up_over_ranks(ranks):
    case = rank_programs.decode_case("ragged")
    q = case.q.double().requires_grad_()
    cache = (case.k_cache.nan_to_num(0.0).double(), case.v_cache.nan_to_num(0.0).double())
    o, _ = attention_oracle(q, *cache, case.page_table, case.cache_seqlens)
    weights = sum(random(*o.shape, seed=300 + rank).double() for rank in range(ranks.world_size))
    (expected,) = torch.autograd.grad((o * weights).sum(), q)
    total = sum(ranks.of("attentions", "gradient of q"))
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-5)


def ring_oracle(name: str, kind: str, dtype: torch.dtype = torch.float64) -> Reference:
    """All rows of all prompts, causal, over a cache of single tokens."""
    q, k, v = rank_programs._ring_inputs(name, rank_programs.RING_DTYPES.get(kind, torch.float32))
    prompts = RINGS[name]
    table = torch.zeros(len(prompts), max(prompts), dtype=torch.int32)
    start = 0
    for r, n in enumerate(prompts):
        table[r, :n] = torch.arange(start, start + n)
        start += n
    options = {x: rank_programs.RING_OPTIONS[kind][x] for x in ("softmax_scale", "softcap") if "options" in kind}
    options |= dict(cu_seqlens_q=offsets(prompts), causal=True, dtype=dtype)
    return attention_oracle(q, k[:, None], v[:, None], table, int32(prompts), **options)


@pytest.mark.parametrize(("name", "layout", "kind"), RING_CASES, ids="".join)
def test_keys_passed_round_meet_every_row(ranks, name, layout, kind):
    if kind == " triton" and runtime.triton_mode() == "absent":
        pytest.skip("Triton is not installed")
    W = ranks.world_size
    dtype = rank_programs.RING_DTYPES.get(kind, torch.float32)
    whole, plain = ring_oracle(name, kind), ring_oracle(name, kind, dtype)
    ledgers = ring_ledgers(RINGS[name], W, layout=layout, bytes_per_token=1)
    for rank, found in enumerate(ranks.of("rings", name + " " + layout + kind)):
        mine = held_rows(RINGS[name], rank, W, layout)
        assert found["untouched"]
        assert found["o"].dtype == rank_programs.RING_OPTIONS[kind].get("out_dtype", dtype)
        assert found["lse"].dtype == torch.promote_types(dtype, torch.float32)
        expected = Reference(*(x[mine] for x in whole))
        assert_state_close(state_of(found), expected, plain=Reference(*(x[mine] for x in plain)))
        assert found["reads"].tolist() == [ledgers[rank].kv_tokens] * 2
    if name == "tiny":
        assert min(len(found["o"]) for found in ranks.of("rings", name + " " + layout + kind)) == (0 if W == 4 else 1)


@pytest.mark.parametrize("algorithm", [*EXCHANGES, "half wire", "half out", "scatter"])
def test_a_merge_sends_the_bytes_that_are_stated(ranks, algorithm):
    options = {
        "half wire": dict(wire_dtype=torch.bfloat16),
        "half out": dict(out_dtype=torch.bfloat16),
        "scatter": dict(mode="scatter"),
    }.get(algorithm, {})
    for rank, sent in enumerate(ranks.of("moved", algorithm)):
        stated = merge_bytes(*MOVED, ranks.world_size, rank=rank, **options)
        payload = stated[algorithm if algorithm in EXCHANGES else "exchange"]
        # headers: an all-reduce goes in many small steps
        assert payload <= sent <= payload + 8192
        assert payload > 30 * 1024


@pytest.mark.parametrize("layout", TOKEN_LAYOUTS)
def test_a_ring_sends_the_bytes_of_its_ledger(ranks, layout):
    ledgers = ring_ledgers([300, 41], ranks.world_size, layout=layout, bytes_per_token=2 * (32 + 16) * 4)
    for sent, x in zip(ranks.of("moved", f"ring {layout}"), ledgers, strict=True):
        assert x.bytes_sent <= sent <= x.bytes_sent + 4096
        assert x.bytes_sent > 60 * 1024


def test_comparing_arguments_costs_a_few_hundred_bytes(ranks):
    for plain, checked in zip(ranks.of("moved", "gather"), ranks.of("moved", "gather with checks"), strict=True):
        assert 512 * (ranks.world_size - 1) <= checked - plain < 1024 * (ranks.world_size - 1)


def test_fewest_bytes_and_then_fewest_steps():
    for T, H, D in ((1, 1, 1), (256, 32, 128), (7, 3, 80)):
        two, four = merge_bytes(T, H, D, 2), merge_bytes(T, H, D, 4)
        n = T * H
        assert two["gather"] == n * (D + 1) * 4
        assert four["gather"] == 3 * n * (D + 1) * 4
        assert four["reduce"] == -(-3 * n * (D + 2) * 4 // 2)
        # each rank keeps its own slice of n/4 rows, and sends its merged slice to the 3 others
        exchanged = [merge_bytes(T, H, D, 4, rank=rank)["exchange"] for rank in range(4)]
        assert sum(exchanged) == 2 * 3 * n * (D + 1) * 4
        assert merge_bytes(T, H, D, 1) == {"gather": 0, "exchange": 0, "reduce": 0}
    assert list(two)[0] == "gather"
    assert merge_bytes(8, 4, 16, 4, mode="scatter") == {"exchange": 24 * 17 * 4}
    assert "reduce" not in merge_bytes(8, 4, 16, 4, wire_dtype=torch.bfloat16)
    for world_size, options, match in (
        (0, {}, "world_size: expected a number >= 1"),
        (3, {"mode": "scatter"}, "mode: expected heads that 3 ranks divide for 'scatter', given H = 4"),
        (2, {"mode": "some"}, "mode: expected one of"),
        (2, {"rank": 2}, "rank: expected a number below world_size = 2"),
    ):
        with pytest.raises(ValueError, match=match):
            merge_bytes(8, 4, 16, world_size, **options)
    for sizes, name in (((-1, 4, 16), "T"), ((8, -4, 16), "H"), ((8, 4, 0), "D")):
        with pytest.raises(ValueError, match=f"{name}: expected a number >= "):
            merge_bytes(*sizes, 2)


def test_a_torch_without_distributed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", None)
    for name in ("distributed", "_wire"):
        monkeypatch.delitem(sys.modules, f"cascade_lab.{name}")
        monkeypatch.delattr(cascade_lab, name)
    with pytest.raises(ImportError, match="^cascade_lab.distributed needs a torch that is built with torch.distrib"):
        importlib.import_module("cascade_lab.distributed")


def test_the_automatic_choice_sends_least(ranks):
    """On two ranks the answers of "auto" are those of a gather, on four those of an exchange, bit by bit."""
    stated = merge_bytes(9, 3, 8, ranks.world_size)
    assert min(stated, key=stated.get) == ("gather" if ranks.world_size == 2 else "exchange")
    names = ["auto", "gather hostile" if ranks.world_size == 2 else "exchange hostile"]
    assert same_bits([state_of(found["merges"][name]) for found in ranks.found for name in names])


LOCAL = {
    "local: lse in half": "TypeError: lse: expected float32",
    "local: transposed lse": "ValueError: lse: expected [T, H_q] = (9, 4)",
    "local: no state": "TypeError: state: expected State(o, lse), given tuple",
    "local: text": "TypeError: state: expected State(o, lse), given str",
    "local: unknown mode": "ValueError: mode: expected one of ('all', 'scatter'), given 'some'",
    "local: unknown algorithm": "ValueError: algorithm: expected one of",
    "local: unknown wire": "TypeError: wire_dtype: expected one of",
    "local: half wire that adds": "ValueError: algorithm: expected one of ('auto', 'gather', 'exchange')",
    "local: unknown out": "TypeError: out_dtype: expected one of",
    "local: unknown backend": "ValueError: backend: expected one of",
    "local: float64 for triton": "TypeError: state: expected no float64 with backend='triton'",
    "sharded: local: rows": "ValueError: levels[1] 'draft': cu_seqlens_q: expected the 16 rows of levels[0], given 15",
    "sharded: local: levels": "TypeError: levels: expected a sequence of Level, given Level",
    "sharded: local: no Level": "TypeError: levels[1]: expected a Level, given int",
    "sharded: local: replicated": "ValueError: replicated: expected indices below 2",
    "sharded: local: page": "ValueError: levels[0] 'prefix': ",
    "sharded: local: lengths": "ValueError: levels[0] 'prefix': cache_seqlens: expected 0 to",
    "sharded: local: pages": "ValueError: levels[0] 'prefix': page_table: expected page ids from 0",
    "sharded: local: table": "ValueError: levels[0] 'prefix': page_table: expected [R, max_pages]",
    "sharded: local: float table": "TypeError: levels[0] 'prefix': page_table: expected int32",
    "sharded: local: cache": "TypeError: local_cache: expected a LocalCache, given tuple",
    "sharded: local: page_ids": "ValueError: local_cache.page_ids: expected [num_pages]",
    "sharded: local: page_ids list": "TypeError: local_cache.page_ids: expected a tensor, given list",
    "sharded: local: k_cache": "ValueError: k_cache: expected [num_pages, page_size, H_kv, D]",
    "sharded: local: q": "TypeError: q: expected a tensor, given list",
    "sharded: local: scale": "TypeError: softmax_scale: expected a number",
    "sharded: local: reads": "TypeError: reads: expected int64",
    "ring: local: tokens": "ValueError: k: expected the ",
    "ring: local: dtype of k": "TypeError: k: expected dtype torch.float32 as q, given torch.float64",
    "ring: local: float8": "TypeError: v: expected dtype torch.float32 as q, given torch.float8_e4m3fn",
    "ring: local: prompts": "TypeError: prompt_lens: expected a sequence of token counts, given int",
    "ring: local: negative prompt": "ValueError: prompt_lens[1]: expected a number >= 0",
    "ring: local: unknown layout": "ValueError: layout: expected one of",
    "ring: local: strides": "ValueError: k: expected a contiguous [T, H_kv, D]",
    "ring: local: heads": "ValueError: q: expected H_q to be a positive multiple of H_kv = 2",
    "ring: local: gradient": "RuntimeError: ring_attention has no gradient",
    "ring: local: reads": "ValueError: reads: expected a contiguous [H_kv] = [2]",
    "ring: local: splits": "ValueError: num_splits: expected an integer from 1",
    "ring: local: out_dtype": "TypeError: out_dtype: expected float32, float16, bfloat16 or float64",
    "ring: local: backend": "ValueError: backend: expected one of",
    "ring: local: cap": "ValueError: softcap: expected a number >= 0",
}
CALL_OF = {"sharded": "sharded_attention", "ring": "ring_attention"}
DIFFERENT = {
    "T": ("8", "9"),
    "H": ("3", "4"),
    "D": ("7", "8"),
    "dtype of o": ("torch.bfloat16", "torch.float32"),
    "dtype of lse": ("torch.float64", "torch.float32"),
    "wire_dtype": ("torch.bfloat16", "torch.float32"),
    "out_dtype": ("torch.float16", "torch.float32"),
    "mode": ("'scatter'", "'all'"),
    "algorithm": ("'reduce'", None),
    "requires_grad": ("True", "False"),
    "call": ("'ring_attention'", "'merge_across_ranks'"),
    "sharded: T": ("15", "16"),
    "sharded: number of levels": ("1", "2"),
    "sharded: page size": ("2", "4"),
    "sharded: H_kv": ("4", "2"),
    "sharded: replicated": ("[0, 1]", "[1]"),
    "sharded: replicated levels": (None, None),
    "sharded: many: replicated": (None, None),
    "sharded: causal: replicated levels": (None, None),
    "sharded: mask: replicated levels": (None, None),
    "sharded: softmax_scale": ("0.3", "0.25"),
    "sharded: softcap": ("3.0", "0.0"),
    "ring: prompt_lens": ("[16, 24]", "[24, 16]"),
    "ring: many: prompt_lens": (None, None),
    "ring: layout": ("'contiguous'", "'zigzag'"),
    "ring: dtype": ("torch.float64", "torch.float32"),
    "ring: H_q": ("2", "4"),
    "ring: H_kv": ("1", "2"),
    "ring: D_v": ("11", "12"),
    "ring: softmax_scale": ("0.3", "0.25"),
    "ring: softcap": ("3.0", "0.0"),
}  # fmt: skip


def refusal(ranks: Launch, name: str) -> list[str]:
    """How the call ended on each rank, and that all of them merge again afterwards."""
    if name not in ranks.found[0]["refusals"]:
        pytest.skip("Triton is not installed")
    found = ranks.of("refusals", name)
    case = MergeCase("good")
    assert same_bits([state_of(x) for x in found])
    assert_state_close(state_of(found[0]), merge_oracle(*rank_programs.states(case, ranks.world_size)))
    return [x["ended"] for x in found]


@pytest.mark.parametrize("name", LOCAL)
def test_what_one_rank_refuses_all_refuse_by_its_name(ranks, name):
    where = CALL_OF.get(name.split(":")[0], "merge_across_ranks")
    ended = refusal(ranks, name)
    assert ended[1].startswith(LOCAL[name])
    for rank in set(range(ranks.world_size)) - {1}:
        told = f"rank 1 refused its arguments, its own error says why (this is rank {rank})"
        assert ended[rank] == f"ValueError: {where}: {told}"


@pytest.mark.parametrize("name", DIFFERENT)
def test_arguments_that_differ_are_refused_on_all_ranks(ranks, name):
    odd, others = DIFFERENT[name]
    argument = name.rpartition(": ")[2]
    for rank, ended in enumerate(refusal(ranks, name)):
        where = CALL_OF.get(name.split(":")[0], "merge_across_ranks")
        if name == "call":
            where = "ring_attention" if rank == 1 else where
        other = 0 if rank == 1 else 1
        assert ended.startswith(f"ValueError: {where}: expected the same {argument} on all ranks, given ")
        mine, theirs = ended.split("given ")[1].split(" and ")
        assert mine.endswith(f" on rank {rank}")
        assert theirs.endswith(f" on rank {other}")
        values = [mine.split(" on rank")[0], theirs.split(" on rank")[0]]
        assert values[0] != values[1]
        assert max(len(value) for value in values) <= 64
        for value, known in zip(values, (odd, others) if rank == 1 else (others, odd), strict=True):
            assert known in (None, value)


def test_every_refusal_that_ranks_ran_is_judged(ranks):
    judged = {*LOCAL, *DIFFERENT, "ring: good", "everywhere: heads", "everywhere: scatter by gather"}
    assert set(ranks.found[0]["refusals"]) | {"local: float64 for triton"} == judged
    assert [x["ended"] for x in ranks.of("refusals", "ring: good")] == [GOOD] * ranks.world_size


def test_what_all_refuse_each_explains(ranks):
    heads = f"ValueError: mode: expected heads that {ranks.world_size} ranks divide for 'scatter', given H = 3"
    assert [x["ended"] for x in ranks.of("refusals", "everywhere: heads")] == [heads] * ranks.world_size
    for ended in (x["ended"] for x in ranks.of("refusals", "everywhere: scatter by gather")):
        assert ended.startswith("ValueError: algorithm: expected one of ('auto', 'exchange') with mode='scatter'")


def lost(ended: str) -> bool:
    return re.match(rf"RuntimeError: \w+: {LOST}", ended) is not None


def test_a_rank_that_never_comes_ends_the_others_in_time(ranks):
    found = [x["late"] for x in ranks.found]
    assert all(lost(x["ended"]) for x in found)
    # the timeout of their group is 4 s, that of the default group 120 s; who gives up first takes the others along
    assert 3.5 < max(x["seconds"] for x in found) < 100
    expected = merge_oracle(*rank_programs.states(MERGES["auto"], ranks.world_size))
    assert same_bits([state_of(x) for x in found])
    assert_state_close(state_of(found[0]), expected, atol=0.02, nan_rows=expected.lse.isnan())


@pytest.mark.long
@pytest.mark.parametrize(("name", "alive"), [("ring", 3), ("merge", 2), ("call", 1)])
def test_a_rank_that_dies_ends_the_others_in_time(four, name, alive):
    assert len(four.last) == 3
    for rank, last in enumerate(four.last):
        assert (name in last) == (rank < alive)
        if rank < alive:
            assert lost(last[name]["ended"])
            # they would wait 120 s for one who lives
            assert last[name]["seconds"] < 100


@pytest.mark.long
@pytest.mark.parametrize(("name", "alive"), [("merge of three", 3), ("merge of two", 2)])
def test_those_who_live_on_still_merge(four, name, alive):
    o, lse = rank_programs.states(MERGES["auto"], 4)
    expected = merge_oracle(o[:, :alive], lse[:, :alive])
    found = [last[name] for last in four.last[:alive]]
    assert same_bits(found)
    assert_state_close(found[0], expected, atol=0.02, nan_rows=expected.lse.isnan())


def test_no_process_outlives_a_launch(ranks):
    assert ranks.left == []


def test_a_call_without_a_process_group_is_refused():
    state = State(torch.zeros(2, 2, 4), torch.zeros(2, 2))
    x = torch.zeros(2, 1, 4)
    for call in (
        lambda: merge_across_ranks(state),
        lambda: sharded_attention(x, None, []),
        lambda: ring_attention(x, x, x, [2]),
    ):
        with pytest.raises(RuntimeError, match="group: expected a process group, but .* was not called"):
            call()
