"""What tests of the executor run in a child process with compiled kernels; each returns JSON values."""

from __future__ import annotations

import itertools
import os
from dataclasses import asdict

import torch

from cascade_lab import attention, cascade_attention, ledger, merge_state, merge_states, plan, runtime
from cascade_lab.drafts import DraftTree, VerifyBatch
from cascade_lab.evidence.compiled import Work, odd_works, table_works
from cascade_lab.evidence.driver import fake_device
from cascade_lab.evidence.ptx import EXECUTED, Fault, Unsupported, executed
from cascade_lab.evidence.ptx.launch import install
from cascade_lab.evidence.ptx.parse import parse
from cascade_lab.evidence.ptx.translate import Translation
from cascade_lab.evidence.reference import assert_state_close, attention_oracle, merge_oracle
from tests.cases import (
    AttentionCase,
    assert_every_float8_is_exact,
    attention_case,
    every_float8,
    random,
    run,
    tree_mask,
)
from tests.evidence.seeded_bugs import BUGS, SURVIVORS, Bug

# one of each kind: small and large tiles, padded and two-block head dims, pages, the latent cache, other dtypes
SAMPLE = {
    "sm_80": (
        *(
            Work(64, 16, "causal"),
            Work(64, 128),
            Work(128, 32),
            Work(80, 64),
            Work(576, 16, head_dim_v=512, latent=True),
        ),
        Work(64, 16, dtype="float32"),
    ),
    "sm_90": (
        *(Work(64, 64), Work(128, 128, "causal"), Work(256, 64), Work(192, 32), Work(128, 64, page_size=1)),
        Work(64, 16, dtype="float16"),
    ),
}
HALVES = [Work(64, rows, mask, dtype="float16") for rows in (16, 128) for mask in ("causal", "none")]
SINGLES = [Work(dim, rows, dtype="float32") for dim in (16, 64, 128) for rows in (16, 64)]


def every_work() -> list[Work]:
    return [*table_works(), *odd_works(), *HALVES, *SINGLES]


def message(function) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def case_of(work: Work) -> AttentionCase:
    """Two requests, the longer one of as many rows as the work's tile holds; some keys past the last whole tile."""
    rows = max(1, work.rows // work.group)
    trees = {"tree": ([(i + 1) // 2 - 1 for i in range(rows)], [-1] * max(1, rows - 3))}
    options = {"tree_mask": tree_mask([*trees["tree"]])} if work.mask == "tree" else {"causal": work.mask == "causal"}
    lengths = [300 + rows, 133 + rows]
    pages = sum(-(-length // work.page_size) for length in lengths)
    # page 0, where a load goes whose page id was masked, belongs to nobody
    seed = next(
        s for s in itertools.count() if 0 in torch.randperm(pages + 2, generator=torch.Generator().manual_seed(s))[-2:]
    )
    case = attention_case(
        [rows, max(1, rows - 3)],
        lengths,
        seed=seed,
        heads=(work.num_kv_heads * work.group, work.num_kv_heads),
        dim=work.head_dim,
        value_dim=work.head_dim_v or None,
        page=work.page_size,
        dtype=getattr(torch, work.dtype),
        layout="padded" if work.row_stride else "packed",
        **options,
    )
    if work.latent:
        object.__setattr__(case, "v_cache", case.k_cache[..., : work.head_dim_v])
    return case


def never_read(case: AttentionCase) -> list:
    """What the contract says is never read: slots of no token, page ids past a request's length, and around q."""
    used = torch.zeros(case.k_cache.shape[:2], dtype=torch.bool)
    ids = torch.ones_like(case.page_table, dtype=torch.bool)
    page = case.k_cache.shape[1]
    for r, length in enumerate(case.cache_seqlens.tolist()):
        tokens = torch.arange(length)
        used[case.page_table[r, tokens // page].long(), tokens % page] = True
        ids[r, : -(-length // page)] = False
    around = torch.ones(case.q.untyped_storage().nbytes() // case.q.element_size(), dtype=torch.bool)
    around.as_strided(case.q.shape, case.q.stride(), case.q.storage_offset())[...] = False
    whole = case.q.as_strided(around.shape, (1,), 0)
    slots = ~used[:, :, None, None]
    return [(case.k_cache, slots), (case.v_cache, slots), (case.page_table, ids), (whole, around)]


def held(case: AttentionCase, target: str, edit=None, races: bool = True, **options) -> str | None:
    """Execute one call and hold it to the oracle at twice the torch backend's error; None, or what is wrong."""
    torch.manual_seed(0)
    expected, plain = case.reference(), run(case, "torch", **options)
    try:
        with executed(target, races=races, never_read=never_read(case), edit=edit):
            state = run(case, "triton", **options)
        assert_state_close(state, expected, plain=plain, cu_seqlens_q=case.cu_seqlens_q)
    except Fault as fault:
        return f"{type(fault).__name__}: {fault}"
    except AssertionError as error:
        return f"values: {error}"
    return None


def table(target: str, whole: bool = False) -> dict:
    """Per work of the table (or a sample) what is wrong with its compiled kernel."""
    works = every_work() if whole else SAMPLE[target]
    return {str(tuple(asdict(work).values())): held(case_of(work), target, num_splits=1) for work in works}


def sinks_and_float8(target: str) -> dict:
    """Sinks, scales and both kinds of float8 in two splits; and every code, whose scores and values are exact."""
    tensors = {
        "sinks": torch.tensor([1.5, -0.7, 4.0, 0.2]),
        "k_scale": torch.tensor([0.3, 1.7]),
        "v_scale": torch.tensor([2.5, 0.4]),
    }
    found = {}
    for cache_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for dtype in (torch.float16, torch.bfloat16):
            options = dict(dim=64, page=16, dtype=dtype, cache_dtype=cache_dtype, causal=True, **tensors)
            found[f"{cache_dtype}, {dtype}"] = held(attention_case([3, 1], [150, 33], **options), target, num_splits=2)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            case, numbers, finite = every_float8(cache_dtype, dtype)

            def exact(case=case, numbers=numbers, finite=finite):
                with executed(target):
                    state = run(case, "triton", num_splits=1)
                assert_every_float8_is_exact(state, numbers, finite)

            found[f"codes of {cache_dtype}, {dtype}"] = message(exact)
    return found


def unknown_opcodes(whole: bool = False) -> dict:
    """Opcodes of all kernels of the table (or a sample), and what of them is not modelled, per target."""
    found = {}
    for target in EXECUTED:
        opcodes, unknown = set(), []
        for work in every_work() if whole else SAMPLE[target]:
            # the launches that `table` executes, so that their kernels are in Triton's cache
            with fake_device(target) as launches:
                run(case_of(work), "triton", num_splits=1)
            for launch in launches:
                kernel = parse(launch.kernel.asm["ptx"])
                opcodes |= {i.opcode for i in kernel.instructions}
                try:
                    Translation(kernel)
                except Unsupported as error:
                    unknown.append(str(error))
        found[target] = {"opcodes": sorted(opcodes), "unknown": unknown}
    return found


def options(target: str, names: list[str]) -> dict:
    """Calls that the table does not make, by name or all: window, softcap, splits, tails, empty requests, odd pages."""
    half = dict(dim=64, heads=(8, 2), page=16, dtype=torch.bfloat16)
    tree = tree_mask([[-1, 0, 0, 1, 2, 3, 3], [-1, 0, 1, 2]])
    cases = {
        "window": (attention_case([4, 9], [300, 177], **half, causal=True, window_size=(40, 0)), {}),
        "left and right": (attention_case([4, 9], [90, 177], **half, window_size=(40, 5)), {}),
        "softcap": (attention_case([4, 9], [150, 77], **half, causal=True, softcap=5.0), {}),
        "splits": (attention_case([7, 4], [450, 311], **half, tree_mask=tree), {"num_splits": 3}),
        "tails": (
            attention_case(
                [7, 4], [150, 211], **half, tree_mask=tree, tail_seqlens=torch.tensor([30, 50], dtype=torch.int32)
            ),
            {},
        ),
        "empty": (attention_case([4, 0, 3], [3, 64, 0], **half, causal=True), {}),
        "page of 24": (attention_case([4, 9], [150, 77], **half | {"page": 24}, causal=True), {}),
        "small head": (attention_case([4, 9], [50, 77], dim=8, dtype=torch.bfloat16, causal=True), {}),
        "heads first": (attention_case([4, 9], [150, 77], **half, causal=True, layout="heads first"), {}),
    }
    found = {name: held(case, target, **more) for name, (case, more) in cases.items() if name in (names or cases)}
    case = attention_case([4, 9], [300, 177], **half, causal=True)
    reads = torch.zeros(2, dtype=torch.int64)
    with executed(target) as runs:
        run(case, "triton", num_splits=1, reads=reads)
    found["reads"] = {"counted": reads.tolist(), "atomics": runs[0].requests["reads", "atomic"]}
    return found


def merges(target: str, dtypes: list[str]) -> dict:
    """Both merges on ragged states with empty, +inf and NaN rows, against the float64 oracle."""
    found = {}
    for name in dtypes:
        dtype = getattr(torch, name)
        for shape in ((5, 3, 64), (7, 2, 80), (9, 2, 512)):
            T, H, D = shape
            o = random(T, 4, H, D, seed=1, dtype=dtype)
            lse = 3 * random(T, 4, H, seed=2)
            lse[0, :, 0] = -torch.inf
            lse[1, 0, 0], lse[2, 1, 1], lse[3, 1, 1] = torch.inf, -torch.inf, torch.nan
            o[2, 1, 1] = torch.nan
            pair, nan = (o[:, 0], lse[:, 0], o[:, 1], lse[:, 1]), torch.zeros(T, H, dtype=torch.bool)
            nan[3, 1] = True
            with executed(target) as runs:
                two, many = merge_state(*pair, backend="triton"), merge_states(o, lse, backend="triton")
            for kind, state, expected in (
                ("pair", two, merge_oracle(o[:, :2], lse[:, :2])),
                ("many", many, merge_oracle(o, lse)),
            ):
                found[f"{kind} {name} {D}"] = message(
                    lambda s=state, e=expected, n=nan: assert_state_close(s, e, nan_rows=n)
                )
            stored = {key: runs[0].bytes[key] for key in (("o", "store"), ("lse", "store"))}
            found[f"stored {name} {D}"] = list(stored.values()) == [o[:, 0].nbytes, lse[:, 0].nbytes]
    return found


def sectors(target: str, prefixes: list[int], dim: int = 64) -> dict:
    """Sectors of K and V that each plan reads against the ledger's bytes; one query row a branch, whole pages."""
    batch = VerifyBatch(prefixes, [DraftTree.branches(4, 4)] * len(prefixes), 16, rows="branch")
    k = random(batch.num_pages, 16, 2, dim, seed=1, dtype=torch.bfloat16)
    v, q = random(*k.shape, seed=2, dtype=k.dtype), random(batch.num_rows, 8, dim, seed=3, dtype=k.dtype)
    found = {}
    for name in ("naive", "cascade", "fused"):
        levels = batch.levels(name)
        with executed(target, races=False, banks=name == "fused") as runs:
            cascade_attention(q, k, v, levels, num_splits=1, backend="triton")
        counted = sum(r.sectors.get((name, "load"), 0) for r in runs for name in ("k", "v"))
        predicted = ledger(levels, num_q_heads=8, num_kv_heads=2)
        found[name] = {"sectors": counted, "bytes": predicted.kv_bytes(dim, k.dtype), "tokens": predicted.kv_tokens}
    found["wavefronts"], found["phases"] = sum(runs[0].wavefronts.values()), sum(runs[0].phases.values())
    found["in flight"] = sorted({left for _, left in runs[0].waits})
    found["unfinished"] = runs[0].unfinished
    return found


def seeded(names: list[str]) -> dict:
    """Per bug: how the changed code is noticed with all checks, and without those of a race detector and a map."""
    found = {}
    cases: dict[str, AttentionCase] = {}
    for bug in (*BUGS, *SURVIVORS.values()):
        if bug.name not in names:
            continue
        case = cases.setdefault(bug.kernel, case_of(KERNELS[bug.kernel]))
        # the code as compiled has passed before, in the same process
        if (clean := (bug.kernel, bug.target)) not in found:
            found[clean] = held(case, bug.target, num_splits=1)
        found[bug.name] = _noticed(bug, case)
    return {str(key): value for key, value in found.items()}


KERNELS = {
    "causal": Work(64, 16, "causal"),
    "tree": Work(128, 128),
    "single": Work(64, 32, dtype="float32"),
    "narrow": Work(16, 64, "causal", dtype="float16"),
}


def _noticed(bug: Bug, case: AttentionCase) -> str:
    changes = []

    def edit(name: str, ptx: str) -> str:
        changed = bug.change(ptx)
        changes.append(changed != ptx)
        return changed

    said = held(case, bug.target, edit, num_splits=1)
    assert changes == [True], f"{bug.name} changes nothing"
    return said or "nothing"


def refused() -> dict:
    """What is turned away, and that nothing of it ran."""
    found = {name: message(lambda name=name: executed(name).__enter__()) for name in ("sm_86", "sm_70")}
    found["a number"] = message(lambda: executed(90).__enter__())
    x, table = torch.zeros(1, 1, 8, device="meta"), torch.zeros(1, 1, dtype=torch.int32, device="meta")
    cache = torch.zeros(1, 1, 1, 8, device="meta")
    o, lse = torch.ones(5, 2, 8), torch.zeros(5, 2)
    out = torch.zeros(5, 2, 8)
    with executed("sm_90") as runs:
        found["elsewhere"] = message(lambda: attention(x, cache, cache, table, table[0], backend="triton"))
    found["mask"] = message(lambda: executed("sm_90", never_read=[(o, lse)]).__enter__())

    def odd(name: str, ptx: str) -> str:
        return ptx.replace("ret;", "popc.b32 %r1, %r1;\n ret;")

    with executed("sm_90", edit=odd) as runs:
        found["opcode"] = message(lambda: merge_state(o, lse, o, lse, out=out, backend="triton"))
    found["runs"], found["out"] = len(runs), float(out.abs().sum())
    return found | _refused_by_environment(lambda: merge_state(o, lse, o, lse, backend="triton"))


def _refused_by_environment(call) -> dict:
    """What a process says that was started for a target, without an executor, for a wrong one, or for both modes."""
    found, mode = {}, os.environ[runtime.SWITCH]
    try:
        os.environ[runtime.TARGET] = "sm_90"
        found["no executor"] = message(call)
        os.environ[runtime.SWITCH] = "1"
        found["both modes"] = message(call)
        os.environ[runtime.SWITCH] = mode
        runtime.set_executor(install)
        for name in ("sm_120", "h100"):
            os.environ[runtime.TARGET] = name
            found[f"environment {name}"] = message(call)
    finally:
        del os.environ[runtime.TARGET]
    return found


def plans(target: str) -> dict:
    """Plans of ragged trees, called with queries and caches that they were not made with."""
    batch = VerifyBatch([130, 45], [DraftTree.branches(2, 3), DraftTree.chain(2)], page_size=16, rows="branch")

    def inputs(seed: int) -> list[torch.Tensor]:
        gen = torch.Generator().manual_seed(seed)
        shapes = (batch.num_rows, 4, 64), *[(batch.num_pages, 16, 2, 64)] * 2
        return [torch.randn(shape, generator=gen).bfloat16() for shape in shapes]

    (whole,) = batch.levels("fused")
    found = {}
    for name in ("naive", "cascade", "fused"):
        levels = batch.levels(name)
        with executed(target, races=False) as runs:
            made = plan(*inputs(0), levels, backend="triton")
            for seed in (0, 1):
                given = inputs(seed)
                before = len(runs)
                o, lse = made(*given)
                planned = len(runs) - before
                expected = cascade_attention(*given, levels, backend="triton")
                called = len(runs) - before - planned
                found[f"{name}, {seed}"] = [
                    bool(torch.equal(o, expected.o) and torch.equal(lse, expected.lse)),
                    planned,
                    called,
                ]
                exact = attention_oracle(
                    *given,
                    whole.page_table,
                    whole.cache_seqlens,
                    cu_seqlens_q=whole.cu_seqlens_q,
                    tree_mask=whole.tree_mask,
                    tail_seqlens=whole.tail_seqlens,
                )
                assert_state_close((o, lse), exact, atol=2e-2)
            shifted = torch.empty(inputs(1)[0].numel() + 1, dtype=torch.bfloat16)[1:].view(inputs(1)[0].shape)
            shifted.copy_(given[0])
            found[f"{name}, misaligned"] = bool(torch.equal(made(shifted, *given[1:]).o, o))
            negative = torch._neg_view(-given[0])
            found[f"{name}, negative"] = bool(torch.equal(made(negative, *given[1:]).o, o))
            made = plan(negative, *given[1:], levels, backend="triton")
            found[f"{name}, planned negative"] = bool(torch.equal(made(*given).o, o))
    return found
