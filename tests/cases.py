"""Builders of test inputs: ragged, distinct in every request and head, poisoned where nothing may be read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from cascade_lab.attention import attention
from cascade_lab.evidence.reference import Reference, assert_state_close, attention_oracle

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class AttentionCase:
    """The tensors of one `attention` call and the options that go with them."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    cache_seqlens: Tensor
    cu_seqlens_q: Tensor | None
    options: dict = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "options"}
        named |= {name: value for name, value in self.options.items() if isinstance(value, Tensor)}
        return {name: value for name, value in named.items() if value is not None}

    def with_options(self, **options) -> AttentionCase:
        return replace(self, options=self.options | options)

    def reference(self, dtype: torch.dtype = torch.float64) -> Reference:
        arguments = (self.q, self.k_cache, self.v_cache, self.page_table, self.cache_seqlens)
        return attention_oracle(*arguments, cu_seqlens_q=self.cu_seqlens_q, dtype=dtype, **self.options)

    def request(self, r: int) -> AttentionCase:
        """Request r alone, on the same caches."""
        start, end = self.cu_seqlens_q[r : r + 2].tolist()
        options = dict(self.options)
        if "tree_mask" in options:
            options["tree_mask"] = options["tree_mask"][start:end]
        if "tail_seqlens" in options:
            options["tail_seqlens"] = options["tail_seqlens"][r : r + 1]
        return replace(
            self,
            q=self.q[start:end],
            page_table=self.page_table[r : r + 1],
            cache_seqlens=self.cache_seqlens[r : r + 1],
            cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32, device=self.q.device),
            options=options,
        )


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device="cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def int32(values, device="cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(rows: list[int], device="cpu") -> Tensor:
    """cu_seqlens_q of these row counts."""
    return int32([sum(rows[:r]) for r in range(len(rows) + 1)], device)


def poisoned_cache(num_pages: int, page: int, heads: int, dim: int, dtype, device, layout: str) -> Tensor:
    """A NaN-filled `[num_pages, page, heads, dim]` view of the asked memory layout."""

    def memory(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device=device)

    if layout == "packed":
        return memory(num_pages, page, heads, dim)
    if layout == "heads first":
        return memory(num_pages, heads, page, dim).transpose(1, 2)
    if layout == "interleaved":
        return memory(num_pages, page, 2, heads, dim)[:, :, 1]
    if layout == "padded":
        return memory(num_pages, page, heads + 1, dim + 8)[:, :, 1:, :dim]
    raise ValueError(layout)


def attention_case(
    rows: list[int],
    lengths: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    value_dim: int | None = None,
    page: int = 4,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device="cpu",
    seed: int = 0,
    layout: str = "packed",
    integers: bool = False,
    **options,
) -> AttentionCase:
    """Requests of `rows[r]` query rows over `lengths[r]` cached tokens, `heads` = (H_q, H_kv).

    Pages are dealt in random order from a pool with two spare pages. Slots that belong to nobody hold NaN,
    page-table entries past the length are out of range on either side, and q is a view of a NaN-filled
    tensor. `integers` draws whole numbers from -2 to 2, which every dtype multiplies exactly. `cache_dtype` is that of
    q where it is left out.
    """
    value_dim = dim if value_dim is None else value_dim
    num_heads, num_kv_heads = heads
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    pages = [-(-length // page) for length in lengths]
    pool = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(seed)).tolist()

    def draw(*shape: int, stream: int) -> Tensor:
        if integers:
            generator = torch.Generator().manual_seed(17 * seed + stream)
            return torch.randint(-2, 3, shape, generator=generator).to(device=device, dtype=dtype)
        return random(*shape, seed=17 * seed + stream, dtype=dtype, device=device)

    k_cache = poisoned_cache(len(pool), page, num_kv_heads, dim, cache_dtype, device, layout)
    v_cache = poisoned_cache(len(pool), page, num_kv_heads, value_dim, cache_dtype, device, layout)
    table = torch.empty(len(rows), max([*pages, 1]) + 2, dtype=torch.int32)
    table[:, 0::2], table[:, 1::2] = INT32_MAX, -1
    keys = draw(sum(lengths), num_kv_heads, dim, stream=1).to(cache_dtype)
    values = draw(sum(lengths), num_kv_heads, value_dim, stream=2).to(cache_dtype)
    start = 0
    for r, length in enumerate(lengths):
        mine, pool = pool[: pages[r]], pool[pages[r] :]
        table[r, : pages[r]] = int32(mine)
        for n in range(0, length, page):
            count = min(page, length - n)
            k_cache[mine[n // page], :count] = keys[start + n : start + n + count]
            v_cache[mine[n // page], :count] = values[start + n : start + n + count]
        start += length
    q = torch.full((sum(rows) + 2, num_heads, dim + 8), math.nan, dtype=dtype, device=device)[1:-1, :, :dim]
    q.copy_(draw(sum(rows), num_heads, dim, stream=3))
    return AttentionCase(q, k_cache, v_cache, table.to(device), int32(lengths, device), offsets(rows, device), options)


def every_float8(cache_dtype: torch.dtype, dtype: torch.dtype = torch.float32, device="cpu"):
    """A row and a key for each of the 256 codes, and each row sees its own key: its score and its value are the code.

    Returns the case, the numbers as float32, and how many of them are finite: these are one request, and each of the
    others is one of its own, behind it.
    """
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(cache_dtype)
    is_finite = codes.float().isfinite()
    codes, finite = torch.cat((codes[is_finite], codes[~is_finite])), int(is_finite.sum())
    k = torch.zeros(256, 1, 1, 16, device=device).to(cache_dtype)
    k[:, 0, 0, 3] = codes
    q = torch.zeros(256, 1, 16, dtype=dtype, device=device)
    q[..., 3] = 1.0
    rows = [finite, *[1] * (256 - finite)]
    table = torch.arange(256, dtype=torch.int32, device=device).expand(len(rows), 256).clone()
    table[1:, 0] = torch.arange(finite, 256, device=device)
    options = {"window_size": (0, 0), "softmax_scale": 1.0}
    v = codes.view(256, 1, 1, 1).clone()
    case = AttentionCase(q, k, v, table, int32(rows, device), offsets(rows, device), options)
    return case, codes.float(), finite


def assert_every_float8_is_exact(state, numbers: Tensor, finite: int) -> None:
    """Numbers as o and as lse, but for a rounding, far less than two of them differ; NaN as NaN, nothing finite of an
    infinity."""
    eps = 2 * torch.finfo(state.o.dtype).eps
    torch.testing.assert_close(state.o[:finite, 0, 0].float(), numbers[:finite], rtol=eps, atol=0)
    torch.testing.assert_close(state.lse[:finite, 0], numbers[:finite], rtol=1e-6, atol=0)
    assert state.lse[numbers.isnan()].isnan().all()
    assert not state.o[finite:].isfinite().any()


def tree_words(parents: list[int]) -> list[list[int]]:
    """Per node the int64 words of the bits of its ancestors and itself, from parent links alone."""
    words = -(-len(parents) // 64)
    rows = []
    for node in range(len(parents)):
        bits = 0
        while node >= 0:
            bits |= 1 << node
            node = parents[node]
        row = [bits >> (64 * w) & (2**64 - 1) for w in range(words)]
        rows.append([word - 2**64 if word >= 2**63 else word for word in row])
    return rows


def tree_mask(trees: list[list[int]], device="cpu") -> Tensor:
    """int64 [T, words] of several trees, each given by its parents."""
    rows = [row for parents in trees for row in tree_words(parents)]
    words = max(map(len, rows), default=1)
    return torch.tensor([row + [0] * (words - len(row)) for row in rows], dtype=torch.int64, device=device)


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's elements as bytes, so that NaN compares equal to itself."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def run(case: AttentionCase, backend: str, loads=None, prefix: str = "", **options):
    """Call `attention` with every tensor named to the recorder, and assert that no input changed."""
    if loads is not None:
        named = {prefix + name: tensor for name, tensor in case.tensors.items()}
        loads.register(**{name: tensor for name, tensor in named.items() if name not in loads.tensors})
    before = {name: bytes_of(tensor) for name, tensor in case.tensors.items()}
    state = attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.cache_seqlens,
        cu_seqlens_q=case.cu_seqlens_q,
        backend=backend,
        **case.options | options,
    )
    for name, tensor in case.tensors.items():
        assert torch.equal(bytes_of(tensor), before[name]), f"{name} was modified"
    return state


def check(case: AttentionCase, backend: str, loads=None, prefix: str = "", factor: float = 2.0, **options):
    """Run, and hold the state to the oracle within `factor` times the error of plain torch in q's dtype."""
    state = run(case, backend, loads, prefix, **options)
    expected = case.reference()
    dtype = options.get("out_dtype") or case.q.dtype
    assert state.o.dtype == dtype
    assert state.lse.dtype == (torch.float64 if case.q.dtype == torch.float64 else torch.float32)
    plain = case.reference(case.q.dtype)
    assert_state_close(state, expected, plain=plain, factor=factor, cu_seqlens_q=case.cu_seqlens_q)
    return state, expected
