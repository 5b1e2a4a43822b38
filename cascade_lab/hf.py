"""Models of Hugging Face transformers on these passes: an attention function, and a model whose cache is paged.

transformers hands an attention function one layer's queries `[B, H_q, Q, D]`, its keys and values and a mask. Here they
become packed rows over a cache of one page per sequence, and the mask the words of `tree_mask` where it is not causal.
A `PagedModel` runs the same layers over page tables instead, by any plan of levels, so that prefixes are reused and
draft trees verified. transformers is imported by the first call, from the extra of that name. Weights, sampling and
schedules are not here.

The interface is `AttentionInterface` of transformers, as its documentation has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cascade_lab import _checks, paging, runtime
from cascade_lab.attention import attention
from cascade_lab.drafts import Plan, VerifyBatch, pack_mask
from cascade_lab.levels import Level, cascade_attention
from cascade_lab.prefix import PrefillPlan, PrefixHitBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PagedModel", "attention_forward", "register"]

# what other attention functions of transformers add to the scores or the softmax, and this one does not
UNKNOWN_TERMS = ("position_bias", "head_mask")


def register(name: str = "cascade_lab", *, backend: runtime.Backend = "auto") -> str:
    """Make `attention_forward` an attention implementation of transformers, with the masks it takes.

    Afterwards `model.set_attn_implementation(name)`, or `attn_implementation=name` where a model is made, chooses it.

    Args:
        name: what transformers is to call it.
        backend: of every pass, as in `attention`.

    Returns:
        The name.

    Raises:
        ImportError: transformers is not installed.

    Example:
        >>> cl.hf.register()  # then model.set_attn_implementation("cascade_lab")
        'cascade_lab'
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(f"transformers: expected it installed, as by cascade-lab[transformers] ({error})") from error
    AttentionInterface.register(name, partial(attention_forward, backend=backend))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    backend: runtime.Backend = "auto",
    paged: _Step | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, as transformers calls it: of Llama, Qwen, Mistral, Gemma, GPT-OSS and others of this form.

    Args:
        module: the layer, whose `is_causal` holds where that argument is None.
        query: `[B, H_q, Q, D]`.
        key: `[B, H_kv, K, D]`, H_q a multiple of H_kv; query head h reads KV head h // (H_q / H_kv).
        value: `[B, H_kv, K, D_v]`.
        attention_mask: `[B or 1, heads or 1, Q or 1, K]`, bool (true where a row sees a key) or float (0 where it does,
            the lowest number or -inf where not), the same for all heads: padding, windows, chunks, packed sequences.
            None is causal if the layer is, and then a single row sees all keys, and Q rows before more keys only the
            first Q, which is what transformers leaves out a mask for. A row that sees nothing has the output 0.
        scaling: factor on the scores; None means D ** -0.5.
        softcap: c replaces s by c tanh(s / c).
        s_aux: `[H_q]` attention sinks, one more term of each head's softmax, as GPT-OSS has them.
        paged: set by `PagedModel`.
        kwargs: what else transformers passes on. A window is in the mask already.

    Returns:
        (`[B, Q, H_q, D_v]`, None): there are no attention weights. Differentiable on the torch backend.

    Raises:
        TypeError, ValueError: as `attention`; a mask that adds finite numbers, that differs between heads, or of
            another shape; dropout, a position bias, or weights asked for.

    Example:
        >>> q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
        >>> o, _ = cl.hf.attention_forward(torch.nn.Module(), q, k, v)  # causal, as transformers' layers are
        >>> o.shape, torch.allclose(o[0, 0, 2], v[0, 1, 0], atol=1e-6)  # row 0 of head 2 sees key 0 of KV head 1 alone
        (torch.Size([1, 3, 4, 8]), True)
    """
    if dropout:
        raise ValueError(f"dropout: expected 0, given {dropout}; set attention_dropout = 0 or call model.eval()")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: expected False, for no weights are kept, given True")
    for name in UNKNOWN_TERMS:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: expected None, for no such term is computed here, given a value")
    for name, x in (("query", query), ("key", key), ("value", value)):
        _checks.tensor(name, x, "[B, heads, tokens, D]")
    terms = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if paged is not None:
        return paged.attend(module, query, key, value, terms, kwargs.get("sliding_window")), None
    batch, heads, rows, _ = query.shape
    if key.shape[0] != batch or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"key, value: expected [{batch}, H_kv, K, ...] both, given shapes {tuple(key.shape)}, {tuple(value.shape)}"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    visible = None
    if attention_mask is not None:
        visible = _visible(attention_mask, batch, heads, rows, key.shape[2])
        causal = bool(visible.equal(_aligned_right(visible)))
    elif causal and 1 < rows < key.shape[2]:
        key, value = key[:, :, :rows], value[:, :, :rows]
    keys = torch.full((batch,), key.shape[2], dtype=torch.int32, device=query.device)
    packed = None if visible is None or causal else pack_mask(visible.reshape(batch * rows, -1))
    state = attention(
        query.transpose(1, 2).reshape(batch * rows, heads, -1),
        key.transpose(1, 2),
        value.transpose(1, 2),
        paging.dense_page_table(batch, device=query.device),
        keys,
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=query.device) * rows,
        max_seqlen_q=rows,
        causal=causal,
        tree_mask=packed,
        tail_seqlens=None if packed is None else keys,
        backend=backend,
        **terms,
    )
    return state.o.view(batch, rows, heads, -1), None


def _visible(mask: torch.Tensor, batch: int, heads: int, rows: int, keys: int) -> torch.Tensor:
    """`[B, Q, K]` bool of a mask of transformers."""
    _checks.tensor("attention_mask", mask, "[B, heads, Q, K]")
    try:
        mask = mask.expand(batch, mask.shape[1], rows, keys)
    except RuntimeError:
        mask = mask[:0]
    if len(mask) != batch or mask.shape[1] not in (1, heads):
        raise ValueError(
            f"attention_mask: expected [B, heads, Q, K] = [{batch}, 1 or {heads}, {rows}, {keys}], or 1 for B or Q, "
            f"given another shape"
        )
    seen = mask
    if mask.dtype.is_floating_point:
        seen = mask == 0
        if runtime.checks_enabled() and not (seen | (mask <= torch.finfo(mask.dtype).min / 2)).all():
            wrong = mask[~seen & (mask > torch.finfo(mask.dtype).min / 2)][0]
            raise ValueError(
                f"attention_mask: expected 0 where a row sees a key, else the lowest {mask.dtype} or -inf, given "
                f"{float(wrong):.6g}"
            )
    elif mask.dtype != torch.bool:
        raise TypeError(f"attention_mask: expected bool or a floating dtype, given {mask.dtype}")
    if runtime.checks_enabled() and (seen != seen[:, :1]).any():
        raise ValueError("attention_mask: expected the same for all heads, given one that differs")
    return seen[:, 0]


def _aligned_right(visible: torch.Tensor) -> torch.Tensor:
    """The causal mask of this shape, aligned to the bottom right."""
    return torch.ones_like(visible).tril(visible.shape[-1] - visible.shape[-2])


@dataclass
class _Step:
    """One pass of a paged model: what every layer writes, reads and counts."""

    model: PagedModel
    slots: torch.Tensor
    levels: Sequence[Level]
    rows: torch.Tensor | None
    longest: int
    reads: torch.Tensor | None
    layers_done: int = 0

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        terms: dict[str, object],
        window: int | None,
    ) -> torch.Tensor:
        layer = module.layer_idx
        if window is not None and self.longest > window:
            raise ValueError(
                f"positions: expected at most {window} tokens, the window of layer {layer}, which moves with each row "
                f"while a level is shared by rows, given {self.longest}"
            )
        k_cache, v_cache = self.model.k_caches[layer], self.model.v_caches[layer]
        # what is wrong with slots, tables or lengths, the first layer finds
        with runtime.unchecked() if self.layers_done else contextlib.nullcontext():
            for cache, x in ((k_cache, key), (v_cache, value)):
                x = x[0].transpose(0, 1)
                paging.write(cache, self.slots, x if self.rows is None else x[self.rows])
            state = cascade_attention(
                query[0].transpose(0, 1),
                k_cache,
                v_cache,
                self.levels,
                reads=None if self.reads is None else self.reads[layer],
                backend=self.model.backend,
                **terms,
            )
        self.layers_done += 1
        return state.o[None]


class PagedModel:
    """A causal language model of transformers over paged caches, a pair for each layer, by any plan of levels.

    Rows of all requests are packed, `[T]`. Each pass writes the states of its own tokens and then attends, layer after
    layer. The batches of `prefix` and `drafts` say which tokens, where, and by which plan.

    Attributes:
        model: as given, with this package's attention from now on.
        k_caches, v_caches: per layer `[num_pages, page_size, H_kv, D]`.
        page_size, num_pages, backend: as given.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2)
        >>> model = cl.hf.PagedModel(LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).eval(), 4)
        >>> batch, tokens = cl.PrefixHitBatch([9, 5], [0, 0]), torch.randint(61, (14,))
        >>> logits = model.prefill(batch, tokens)
        >>> again = cl.PrefixHitBatch([9, 5], [4, 3], page_table=batch.page_table)  # the same prompts, partly cached
        >>> rest = model.prefill(again, torch.cat((tokens[4:9], tokens[12:])))
        >>> torch.allclose(rest, torch.cat((logits[4:9], logits[12:])), atol=1e-5)
        True
    """

    def __init__(
        self, model: PreTrainedModel, num_pages: int, page_size: int = 16, *, backend: runtime.Backend = "auto"
    ):
        """Allocate the caches on the model's device, in its dtype.

        Args:
            model: with a language-model head, layers that know their `layer_idx`, full attention, or windows that no
                position outgrows.
            num_pages: pages of every cache.
            page_size: tokens per page.
            backend: of every pass, as in `attention`.

        Raises:
            TypeError, ValueError: no such model, or numbers that are no integers >= 1. ImportError: no transformers.
        """
        self.num_pages: int = _checks.integer("num_pages", num_pages, 1)
        self.page_size: int = _checks.integer("page_size", page_size, 1)
        if not hasattr(model, "set_attn_implementation") or model.get_output_embeddings() is None:
            raise TypeError(f"model: expected one of transformers with a head, given {type(model).__name__}")
        model.set_attn_implementation(register())
        self.model: torch.nn.Module = model
        self.backend: str = backend
        config = model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (self.num_pages, self.page_size, heads, width)
        options = {"dtype": model.dtype, "device": model.device}
        self.k_caches: tuple[torch.Tensor, ...] = tuple(
            torch.zeros(shape, **options) for _ in range(config.num_hidden_layers)
        )
        self.v_caches: tuple[torch.Tensor, ...] = tuple(
            torch.zeros(shape, **options) for _ in range(config.num_hidden_layers)
        )

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        """K and V of every layer, what `Committed.move` takes."""
        return (*self.k_caches, *self.v_caches)

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        levels: Sequence[Level],
        *,
        rows: torch.Tensor | None = None,
        reads: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits `[T, V]` of packed rows, whose states are in the caches afterwards. No gradient is kept.

        Args:
            tokens: `[T]` int64.
            positions: `[T]` int64, each in its own sequence.
            slots: int64, where the states go, one per row or per entry of `rows`.
            levels: the plan of the T rows, over caches with these states in them.
            rows: `[n]` int64, the rows whose states are written, where several stand on one token; None for all.
            reads: `[layers, H_kv]` int64; each layer adds the K rows it loads, as in `attention`.

        Raises:
            TypeError, ValueError: as `paging.write` and `cascade_attention`; other shapes; or a position that a window
                of some layer does not reach back from.
        """
        whole = (torch.int64, torch.int32)
        _checks.tensor("tokens", tokens, "[T]", dtypes=whole)
        _checks.tensor("positions", positions, "[T]", tuple(tokens.shape), dtypes=whole)
        if rows is not None:
            _checks.tensor("rows", rows, "[n]", dtypes=whole)
        if reads is not None:
            _checks.tensor("reads", reads, "[layers, H_kv]", (len(self.k_caches), self.k_caches[0].shape[2]))
        if not len(tokens):
            return torch.zeros(0, self.model.get_output_embeddings().weight.shape[0], device=tokens.device)
        step = _Step(self, slots, levels, rows, int(positions.max()) + 1, reads)
        # a mask of four dims is handed through as it is, and a paged pass has no use for any
        unused = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
        with torch.no_grad():
            out = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=unused,
                use_cache=False,
                paged=step,
            )
        if step.layers_done != len(self.k_caches):
            raise ValueError(
                f"model: expected {len(self.k_caches)} layers that attend through transformers' interface, "
                f"given {step.layers_done}"
            )
        return out.logits[0]

    def prefill(
        self,
        batch: PrefixHitBatch,
        tokens: torch.Tensor,
        plan: PrefillPlan = "causal",
        *,
        reads: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits `[T, V]` of the tokens behind each hit, `tokens` `[T]`, request after request; hits may be 0.

        Raises:
            TypeError, ValueError: as in a call, or an unknown plan.
        """
        return self(tokens, batch.positions, batch.suffix_slots(), batch.levels(plan), reads=reads)

    def verify(self, batch: VerifyBatch, plan: Plan, *, reads: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[T, V]` of the rows of a batch of draft trees, by this plan; what `batch.accept` takes the argmax of.

        Raises:
            TypeError, ValueError: as in a call; an unknown plan, a batch without tokens, or rows="leaf".
        """
        rows = batch.node_rows if batch.rows != "node" else None
        return self(batch.tokens, batch.positions, batch.draft_slots(), batch.levels(plan), rows=rows, reads=reads)
