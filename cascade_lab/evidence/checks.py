"""Are the kernels right on this device? Compiled or interpreted, against the float64 oracle, before anything is timed.

Each check builds ragged, random inputs, poisons what must not be read with NaN, and holds o and lse to the error of a
plain torch run in the same dtype, both against float64. The checks are data, so that the tests, the benchmark and its
worker processes run the same ones.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cascade_lab import runtime
from cascade_lab.attention import attention
from cascade_lab.drafts import PLANS, DraftTree, VerifyBatch
from cascade_lab.evidence.reference import assert_state_close, attention_oracle, merge_oracle
from cascade_lab.evidence.workers import end_group, finished, workers
from cascade_lab.levels import Level, cascade_attention, ledger
from cascade_lab.prefix import prefix_hit_levels
from cascade_lab.states import State, merge_state, merge_states

if TYPE_CHECKING:
    from cascade_lab.backends.triton.config import Tile

DTYPES = ("float32", "float16", "bfloat16")
# (D, D_v, H_q, H_kv); the last is absorbed MLA, whose values are a view of the keys
HEADS = (
    (64, 64, 8, 2), (80, 80, 4, 4), (96, 96, 8, 2), (128, 128, 8, 1), (192, 128, 4, 2), (192, 192, 8, 2),
    (256, 256, 8, 2), (576, 512, 16, 1),
)  # fmt: skip
# a float32 tile of more does not fit the registers, and compiles for tens of seconds
FLOAT32_DIM = 64
_NO_TESTS_COLLECTED = 5


@dataclass(frozen=True)
class Check:
    """One check: what it does, on which dtype and (D, D_v, H_q, H_kv); `small` is little data for the interpreter."""

    name: str
    dtype: str
    heads: tuple[int, int, int, int]
    small: bool = False

    def __str__(self) -> str:
        dim, value_dim, num_q_heads, num_kv_heads = self.heads
        width = f"{dim}" if dim == value_dim else f"{dim}-{value_dim}"
        return f"{self.name} {self.dtype} D={width} heads={num_q_heads}-{num_kv_heads}"


def checks(*, dtypes: Sequence[str] = DTYPES, small: bool = False) -> tuple[Check, ...]:
    """All checks on these dtypes, float32 at small head dims alone; or one small check of each kind.

    The small ones take the interpreter seconds.
    """
    if small:
        kinds = zip(
            _CHECKS, ("float16", "float32", "bfloat16", "float32", "float16", "float16", "bfloat16"), strict=True
        )
        return tuple(Check(name, dtype, (24, 16, 2, 1), small=True) for name, dtype in kinds)
    usual = (64, 64, 8, 2), (128, 128, 8, 2)
    todo = [Check("plans", dtype, heads) for heads in HEADS for dtype in dtypes]
    todo += [Check(name, dtype, heads) for name in _CHECKS if name != "plans" for heads in usual for dtype in dtypes]
    return tuple(check for check in todo if check.dtype != "float32" or max(check.heads[:2]) <= FLOAT32_DIM)


def run_check(check: Check) -> None:
    """Carry out one check on the device of this process.

    Raises:
        AssertionError: a wrong answer, with the place of the worst one. Whatever a launch raises passes through.
    """
    with torch.no_grad():
        _CHECKS[check.name](check)


def run_all(
    todo: Sequence[Check], *, processes: int | None = None, deadline: float = math.inf
) -> Iterator[tuple[Check, str | None]]:
    """Run checks and yield each with None or what is wrong, the finished ones first.

    Args:
        todo: the checks.
        processes: that compile and run side by side; by default up to 8 where kernels are compiled, and none but this
            one where they are interpreted, or executed for a target without a GPU.
        deadline: on `time.monotonic`. What has not ended by then is not yielded; in this process alone, a check that
            has begun is finished.
    """
    if processes is None:
        processes = workers() if runtime.triton_mode() == "compiled" else 1
    if processes <= 1:
        for check in todo:
            if time.monotonic() >= deadline:
                return
            yield check, _problem(check)
        return
    for place, done in finished(_problem, [(check,) for check in todo], processes=processes, deadline=deadline):
        error = done.exception()
        yield todo[place], done.result() if error is None else f"{type(error).__name__}: {error}"


def run_marked_tests(folder: Path, seconds: float | None = None) -> str | None:
    """Run the tests in `folder` that are marked for a GPU, these checks excepted; None, or what pytest says.

    Without pytest, or away from a checkout, there is nothing to run.

    Raises:
        TimeoutError: they did not end within `seconds`, and were ended.
    """
    marked = sorted(path for path in folder.rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8"))
    if not marked or importlib.util.find_spec("pytest") is None:
        return None
    # without the project's settings, which ask for a recent pytest; the marker is then unknown, which only warns
    options = ["-q", "-x", "-m", "gpu", "-c", os.devnull, "--rootdir", str(folder.parent), "-p", "no:cacheprovider"]
    deselected = ["--deselect", "tests/core/test_gpu.py::test_compiled_kernels_equal_the_oracle"]
    command = [sys.executable, "-m", "pytest", *options, *deselected, *map(str, marked)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder.parent, start_new_session=True, **pipes) as process:
        try:
            said, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not ended within {seconds:.0f} s") from None
        finally:
            end_group(process)
    if process.returncode in (0, _NO_TESTS_COLLECTED):
        return None
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or (said + errors).strip().splitlines() or ["pytest failed"])[-1]


def launch_tile(
    packed_rows: int, head_dim: int, dtype: torch.dtype, head_dim_v: int | None = None, latent: bool = False
) -> Tile:
    """The tile of a launch on this device whose longest request has `packed_rows` rows x heads of the group.

    Args:
        packed_rows, head_dim, dtype, head_dim_v, latent: as in `backends.triton.config.tile_for`.
    """
    from cascade_lab.backends.triton.config import rows_of, tile_for

    target = runtime.device_target(runtime.device())
    limit = target.shared_bytes if target.multiprocessors else None
    return tile_for(packed_rows, head_dim, dtype, rows_of(target.name), limit, head_dim_v, latent)


def _problem(check: Check) -> str | None:
    try:
        run_check(check)
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip()
    return None


def _draw(check: Check, *shape: int, seed: int) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen).to(device=runtime.device(), dtype=getattr(torch, check.dtype))


def _caches(check: Check, num_pages: int, page: int, slots: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Random K and V at `slots`, NaN everywhere else; V is a view of K for a latent cache (D > 512)."""
    dim, value_dim, _, num_kv_heads = check.heads
    dtype, device = getattr(torch, check.dtype), runtime.device()
    caches = []
    for i, width in enumerate((dim, value_dim)):
        cache = torch.full((num_pages, page, num_kv_heads, width), math.nan, dtype=dtype, device=device)
        cache[slots // page, slots % page] = _draw(check, len(slots), num_kv_heads, width, seed=seed + i)
        caches.append(cache)
    k, v = caches
    return (k, k[..., :value_dim]) if dim > 512 else (k, v)


def _hold(state: State, q: Tensor, k: Tensor, v: Tensor, level: Level, **options) -> None:
    """Assert that `state` is what the oracle says of `level`; a level of single-token pages sees the caches so."""
    pages = len(k) * k.shape[1] // level.page_size
    k, v = (x.reshape(pages, level.page_size, *x.shape[2:]) for x in (k, v))
    arguments = (q, k, v, level.page_table, level.cache_seqlens)
    options |= dict(cu_seqlens_q=level.cu_seqlens_q, causal=level.causal)
    expected = attention_oracle(*arguments, **options)
    plain = attention_oracle(*arguments, **options, dtype=q.dtype)
    assert_state_close(state, expected, plain=plain, cu_seqlens_q=level.cu_seqlens_q)


def _batch(check: Check, trees: Sequence[DraftTree | None], prefix_lens: Sequence[int], page: int, rows: str = "node"):
    batch = VerifyBatch(prefix_lens, trees, page, rows, device=runtime.device())
    slots = torch.cat([f(r) for r in range(len(trees)) for f in (batch.prefix_slots, batch.draft_slots)])
    k, v = _caches(check, batch.num_pages + 1, page, slots, seed=1)
    return batch, _draw(check, batch.num_rows, check.heads[2], check.heads[0], seed=3), k, v


def _check_plans(check: Check) -> None:
    """All three plans of a ragged batch, by branches and by nodes, with and without splits, on unrolled sequences."""
    trees = (DraftTree((-1, 0, 0, 1, 2)), None, DraftTree.branches(4, 3), DraftTree.chain(2))
    lengths = (200, 31, 77, 0)
    if check.small:
        trees, lengths = (trees[0], None, DraftTree.branches(2, 1)), (35, 3, 0)
    for rows, plan in itertools.product(("branch", "node"), PLANS):
        batch, q, k, v = _batch(check, trees, lengths, 16, rows)
        (naive,), levels = batch.levels("naive"), batch.levels(plan)
        expected = sum(_tokens_loaded(level, q, k, v) for level in levels)
        for num_splits in (None, 3):
            reads = torch.zeros(k.shape[2], dtype=torch.int64, device=q.device)
            state = cascade_attention(q, k, v, levels, num_splits=num_splits, reads=reads, backend="triton")
            _hold(state, q, k, v, naive)
            counted = reads.tolist()
            assert counted == [expected] * len(counted), f"{rows}, {plan}: counted {counted}, ledger {expected}"


def _check_long_keys(check: Check) -> None:
    """The loop over tens of tiles: 2,000 keys and more, under trees, causal and windowed, with and without splits."""
    trees = (DraftTree.branches(4, 3), DraftTree.chain(1), DraftTree((-1, 0, 0, 1, 2)))
    lengths, suffixes = (2600, 2001, 4099), (70, 1, 33)
    if check.small:
        trees, lengths, suffixes = trees[1:], (2003, 40), (2, 1)
    batch, q, k, v = _batch(check, trees, lengths, 16)
    (naive,) = batch.levels("naive")
    for plan, num_splits in (("fused", None), ("fused", 1), ("cascade", None), ("cascade", 5)):
        if check.small and num_splits is None:
            continue
        state = cascade_attention(q, k, v, batch.levels(plan), num_splits=num_splits, backend="triton")
        _hold(state, q, k, v, naive)
    prompts = [n + new for n, new in zip(lengths, suffixes, strict=True)]
    (level,) = prefix_hit_levels(prompts, lengths, 16, device=runtime.device())
    pages = int(level.page_table.max()) + 1
    k, v = _caches(check, pages, 16, torch.arange(pages * 16, device=level.page_table.device), seed=13)
    q = _draw(check, sum(suffixes), check.heads[2], check.heads[0], seed=17)
    for rule in ({"causal": True}, {"window_size": (2000, 0)})[: 1 if check.small else 2]:
        state = attention(
            q, k, v, level.page_table, level.cache_seqlens, cu_seqlens_q=level.cu_seqlens_q, backend="triton", **rule
        )
        masked = Level(level.cu_seqlens_q, level.page_table, level.cache_seqlens, 16, causal="causal" in rule)
        _hold(state, q, k, v, masked, **{name: x for name, x in rule.items() if name != "causal"})


def _tokens_loaded(level: Level, q: Tensor, k: Tensor, v: Tensor) -> int:
    """The ledger's tokens per KV head, with the row tile that the launch takes."""
    rows = int(torch.diff(level.cu_seqlens_q).max())
    same = k.data_ptr() == v.data_ptr()
    tile = launch_tile(rows * q.shape[1] // k.shape[2], q.shape[-1], q.dtype, v.shape[-1], same)
    return ledger([level], num_q_heads=q.shape[1], num_kv_heads=k.shape[2]).tile_tokens(tile.block_m)


def _check_large_trees(check: Check) -> None:
    """Masks of several words, in page sizes that do and do not hold a tile."""
    trees = (DraftTree([-1, *(i // 2 for i in range(129))]), DraftTree.chain(70), DraftTree.branches(3, 1))
    lengths, pages = (33, 0, 65), (1, 24, 64) if check.dtype == "bfloat16" else (16,)
    if check.small:
        trees, lengths, pages = (DraftTree.branches(33, 2), DraftTree.chain(1)), (5, 2), (24,)
    for page in pages:
        batch, q, k, v = _batch(check, trees, lengths, page)
        (naive,) = batch.levels("naive")
        for num_splits in (None, 2):
            for plan in ("fused",) if check.small or num_splits else ("fused", "cascade"):
                state = cascade_attention(q, k, v, batch.levels(plan), num_splits=num_splits, backend="triton")
                _hold(state, q, k, v, naive)


def _check_windows(check: Check) -> None:
    """Causal, windows on either side, a softcap, more rows than keys, and a request without keys."""
    prompts, hits = ((40, 5, 7, 20), (33, 0, 2, 19)) if check.small else ((150, 40, 7, 90), (100, 0, 2, 89))
    (level,) = prefix_hit_levels(prompts, hits, 16, device=runtime.device())
    lengths = level.cache_seqlens.clone()
    lengths[1], lengths[2] = 0, 3
    level = Level(level.cu_seqlens_q, level.page_table, lengths, 16)
    pages = int(level.page_table.max()) + 1
    k, v = _caches(check, pages, 16, torch.arange(pages * 16, device=lengths.device), seed=5)
    q = _draw(check, int(level.cu_seqlens_q[-1]), check.heads[2], check.heads[0], seed=7)
    rules = ({"causal": True}, {"window_size": (20, 0)}, {"window_size": (5, 9)}, {"window_size": (-1, 3)}, {})
    rules = rules[::2] if check.small else rules
    for rule in rules:
        for options in ({"num_splits": 4}, {"softcap": 8.0, "softmax_scale": -0.3}):
            state = attention(
                q, k, v, level.page_table, lengths, cu_seqlens_q=level.cu_seqlens_q, backend="triton", **rule, **options
            )
            oracle = {name: x for name, x in options.items() if name != "num_splits"}
            rest = {name: x for name, x in rule.items() if name != "causal"}
            masked = Level(level.cu_seqlens_q, level.page_table, lengths, 16, causal="causal" in rule)
            _hold(state, q, k, v, masked, **rest, **oracle)


def _check_float8(check: Check) -> None:
    """Caches of both kinds of float8 with a scale per KV head, sinks, and splits; what nobody may read is NaN."""
    lengths, page = ((19, 0, 37) if check.small else (150, 0, 431)), 16
    dim, value_dim, num_q_heads, num_kv_heads = check.heads
    device = runtime.device()
    pages = sum(-(-n // page) for n in lengths)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(4)).int().to(device)
    table = torch.zeros(3, pages, dtype=torch.int32, device=device)
    slots, at = [], 0
    for r, n in enumerate(lengths):
        used = order[at : at + -(-n // page)]
        table[r, : len(used)], at = used, at + len(used)
        tokens = torch.arange(n, device=device)
        slots.append(table[r, tokens // page].long() * page + tokens % page)
    k, v = _caches(check, pages, page, torch.cat(slots), seed=31)
    rows = torch.tensor([0, 2, 3, 8], dtype=torch.int32, device=device)
    q = _draw(check, 8, num_q_heads, dim, seed=33)
    k_scale = torch.linspace(0.2, 1.5, num_kv_heads, device=device)
    options = {"k_scale": k_scale, "v_scale": 3 - k_scale, "sinks": _draw(check, num_q_heads, seed=35)}
    level = Level(rows, table, torch.tensor(lengths, dtype=torch.int32, device=device), page, causal=True)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        keys, values = k.to(dtype), v.to(dtype)
        if k.data_ptr() == v.data_ptr():
            values = keys[..., :value_dim]
        for num_splits in (1, 3):
            state = cascade_attention(q, keys, values, [level], num_splits=num_splits, backend="triton", **options)
            _hold(state, q, keys, values, level, **options)


def _check_layouts(check: Check) -> None:
    """Heads first, interleaved K and V, padded rows, and long strides: views, not copies."""
    dim, _, num_q_heads, num_kv_heads = check.heads
    dtype, device = getattr(torch, check.dtype), runtime.device()
    lengths = torch.tensor([45, 0, 130], dtype=torch.int32, device=device)
    table = torch.randperm(14, generator=torch.Generator().manual_seed(2))[:12].view(3, 4).int().to(device)
    page = 48
    q = _draw(check, 3, num_q_heads, dim, seed=11)
    layouts = (
        lambda: torch.empty(14, num_kv_heads, page, dim, dtype=dtype, device=device).transpose(1, 2),
        lambda: torch.empty(14, page, 2, num_kv_heads, dim, dtype=dtype, device=device)[:, :, 1],
        lambda: torch.empty(14, page, num_kv_heads, dim + 8, dtype=dtype, device=device)[..., :dim],
        lambda: torch.empty(14, page, num_kv_heads, dim + 1, dtype=dtype, device=device)[..., 1:],
    )
    level = Level(torch.arange(4, dtype=torch.int32, device=device), table, lengths, page)
    for i, layout in enumerate(layouts):
        k, v = (layout().copy_(_draw(check, 14, page, num_kv_heads, dim, seed=20 + 2 * i + j)) for j in range(2))
        _hold(attention(q, k, v, table, lengths, backend="triton"), q, k, v, level)


def _check_merges(check: Check) -> None:
    """Two and many states, half of them empty and NaN inside, lse as a transposed view, `out` over an input."""
    dtype, device = getattr(torch, check.dtype), runtime.device()
    for states, rows, heads, dim in ((2, 37, 3, check.heads[1]), (9, 20, 8, 72), (133, 5, 2, 1), (5, 64, 1, 576)):
        gen = torch.Generator().manual_seed(states)
        o = torch.randn(rows, states, heads, dim, generator=gen).to(device=device, dtype=dtype)
        lse = (8 * torch.randn(heads, states, rows, generator=gen)).to(device).permute(2, 1, 0)
        empty = (torch.rand(rows, states, heads, generator=gen) < 0.5).to(device)
        lse = lse.masked_fill(empty, -math.inf)
        lse[0, 0, 0] = math.inf
        o = torch.where((empty | (lse == math.inf))[..., None], math.nan, o)
        expected = merge_oracle(o, lse)
        assert_state_close(merge_states(o, lse, backend="triton"), expected)
        if states == 2:
            a, b = o[:, 0].clone(), o[:, 1].clone()
            assert_state_close(merge_state(a, lse[:, 0], b, lse[:, 1], backend="triton"), expected)
            merged = merge_state(a, lse[:, 0], b, lse[:, 1], out=a, backend="triton")
            assert merged.o.data_ptr() == a.data_ptr(), "out: expected the result in the given tensor"
            assert_state_close(merged, expected)


_CHECKS: dict[str, Callable[[Check], None]] = {
    "plans": _check_plans,
    "long keys": _check_long_keys,
    "large trees": _check_large_trees,
    "windows": _check_windows,
    "float8": _check_float8,
    "layouts": _check_layouts,
    "merges": _check_merges,
}
