"""Model configurations and regions by name: what a file or a word on the command line says of a model's attention.

A configuration is the `config.json` that is published with a model's weights. What it does not say is not guessed:
a field that is needed and missing is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from cascade_lab import _checks
from cascade_lab.files import ForeignFileError, read_json
from cascade_lab.regions import (
    CSA,
    HCA,
    MLA,
    NSA,
    Chunked,
    Compressed,
    Dense,
    Mixture,
    Region,
    SinkWindow,
    SlidingWindow,
    TopK,
    TopKBlocks,
)
from cascade_lab.traces.summary import ModelShape

REGIONS: Mapping[str, Callable[..., Region]] = {
    "dense": Dense,
    "window": SlidingWindow,
    "sink-window": SinkWindow,
    "chunked": Chunked,
    "top-k": TopK,
    "top-k-blocks": TopKBlocks,
    "compressed": Compressed,
    "csa": CSA,
    "hca": HCA,
    "nsa": NSA,
}
"""Regions by the names that `region` takes; their numbers follow, as in "window:4096"."""


def region(text: str) -> Region:
    """The region that a text names: "dense", "window:4096", "sink-window:4:1020", or a sum "5*window:1024+1*dense".

    Raises:
        ValueError: an unknown name, or numbers that are not those of the region.

    Example:
        >>> cl.traces.region("5*window:1024+1*dense")
        Mixture(parts=((5, SlidingWindow(w=1024)), (1, Dense())))
    """
    parts = []
    for part in text.split("+"):
        found = re.fullmatch(r"(?:(\d+)\*)?([a-z-]+)((?::\d+)*)", part.strip())
        if not found or found[2] not in REGIONS:
            raise ValueError(f"region: expected one of {', '.join(REGIONS)}, with its numbers, given {part!r}")
        try:
            one = REGIONS[found[2]](*(int(number) for number in found[3].split(":")[1:]))
        except TypeError:
            names = ":".join(REGIONS[found[2]].__dataclass_fields__)
            raise ValueError(f"region: expected {found[2]}:{names}, given {part!r}") from None
        parts.append((int(found[1] or 1), one))
    return parts[0][1] if len(parts) == 1 else Mixture(tuple(parts))


def read_model(path: str | Path) -> ModelShape:
    """The shape of a decoder from its `config.json`, as Hugging Face's transformers write it.

    Read are num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads, head_dim, intermediate_size; of a
    mixture of experts num_experts or n_routed_experts, num_experts_per_tok, n_shared_experts, moe_intermediate_size,
    first_k_dense_replace; of latent attention kv_lora_rank, q_lora_rank, qk_nope_head_dim, qk_rope_head_dim,
    v_head_dim; of windows sliding_window, attention_chunk_size and layer_types. Layers with different FFNs count with
    their mean.

    Raises:
        ForeignFileError: no JSON object, or a field that is missing or no whole number.
        OSError: it cannot be read.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> config = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128)
        >>> _ = Path("config.json").write_text(json.dumps(config))
        >>> model = cl.traces.read_model("config.json")
        >>> model.head_dim, model.kv_heads, model.region
        (16, 4, Dense())
    """
    path = Path(path)
    config = read_json(path)
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict):
        raise ForeignFileError(f"{path.as_posix()}: expected a model's config.json, given no JSON object")

    def number(*names: str, default: int | None = None) -> int:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if value is None:
            raise ForeignFileError(f"{path.as_posix()}: {names[0]}: missing")
        try:
            return _checks.integer(names[0], value, 0)
        except (TypeError, ValueError) as error:
            raise ForeignFileError(f"{path.as_posix()}: {error}") from None

    layers, hidden, heads = (
        number("num_hidden_layers"),
        number("hidden_size"),
        number("num_attention_heads"),
    )
    mla = None
    if config.get("kv_lora_rank"):
        mla = MLA(
            heads, number("kv_lora_rank"), number("qk_rope_head_dim"), number("qk_nope_head_dim"), number("v_head_dim")
        )
    head_dim = number("head_dim", default=hidden // max(1, heads)) if mla is None else mla.nope + mla.rope
    experts = number("num_experts", "n_routed_experts", "num_local_experts", default=0)
    ffn = number("intermediate_size") if not experts else 0
    if experts:
        columns = number("moe_intermediate_size", "intermediate_size")
        active = number("num_experts_per_tok") + number("n_shared_experts", default=0)
        dense = number("first_k_dense_replace", default=0)
        first = dense * number("intermediate_size") if dense else 0
        ffn = round((first + (layers - dense) * active * columns) / layers)
    return ModelShape(
        str(config.get("_name_or_path") or path.parent.name or path.stem),
        layers,
        hidden,
        heads,
        number("num_key_value_heads", default=heads),
        head_dim,
        ffn,
        experts,
        source=path.as_posix(),
        region=_region(config, layers, number),
        mla=mla,
        q_rank=number("q_lora_rank", default=0),
    )


def _region(config: Mapping, layers: int, number: Callable[..., int]) -> Region:
    """The regions of the layers, each counted once."""
    kinds = config.get("layer_types")
    window = number("sliding_window", default=0) if config.get("use_sliding_window", True) else 0
    chunk = number("attention_chunk_size", default=0)
    if not isinstance(kinds, list):
        pattern = number("sliding_window_pattern", default=0)
        if window and pattern:
            full = layers // pattern
            kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
        else:
            kinds = ["sliding_attention" if window else "full_attention"] * layers
    regions: dict[Region, int] = {}
    for kind in kinds:
        one: Region = Dense()
        if kind == "sliding_attention":
            one = SlidingWindow(window or number("sliding_window"))
        elif kind == "chunked_attention":
            one = Chunked(chunk or number("attention_chunk_size"))
        elif kind != "full_attention":
            raise ForeignFileError(f"layer_types: expected full, sliding or chunked attention, given {kind!r}")
        regions[one] = regions.get(one, 0) + 1
    return next(iter(regions)) if len(regions) == 1 else Mixture(tuple((count, one) for one, count in regions.items()))
