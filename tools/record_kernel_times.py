"""Make figures/measured/aic_calibration.json of the public kernel measurements of AIConfigurator.

Per kernel, the law that its times over (cached prefix, new tokens) follow, and the time of a prefill with a hit over
that without. The data stay where they are published; only this summary is kept:
`python tools/record_kernel_times.py DATA_FOLDER figures/measured/aic_calibration.json`.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path

from cascade_lab.calibration import feature_errors, fit

SOURCE = {
    "repository": "ai-dynamo/aiconfigurator",
    "commit": "095f58a5",
    "snapshot": "2026-08-21",
    "licence": "Apache-2.0",
    "files": [
        "sparse_attention/sglang/0.5.14/glm5_mqa_logits_module_perf.parquet",
        "sparse_attention/sglang/0.5.14/dsv4_paged_mqa_logits_module_perf.parquet",
        "*_context_module_perf.parquet of sglang 0.5.14 (MSA: 0.5.16)",
        "context_attention_perf.parquet of vllm 0.24.0",
    ],
}
FRACTIONS = (0.25, 0.5, 0.75)
# below these a launch takes longer than its pairs
LEAST_NEW, LEAST_KEYS = 512, 2048
# whole modules on one rank, 8-bit weights where there are any: (op, model) -> (kernel, weights, prompt tokens)
MODULES = {
    ("dsa", "deepseek-ai/DeepSeek-V3.2"): ("sglang_dsa_indexer_flashmla_kv", "fp8_block", 8192),
    ("csa", "sgl-project/DeepSeek-V4-Flash-FP8"): ("compressed_flashmla", "fp8_block", 8192),
    ("csa", "sgl-project/DeepSeek-V4-Pro-FP8"): ("compressed_flashmla", "fp8_block", 8192),
    ("hca", "sgl-project/DeepSeek-V4-Flash-FP8"): ("compressed_flashmla", "fp8_block", 8192),
    ("hca", "sgl-project/DeepSeek-V4-Pro-FP8"): ("compressed_flashmla", "fp8_block", 8192),
    ("msa", "MiniMaxAI/MiniMax-M3"): ("sglang_minimax_prefill_triton_sparse", "bfloat16", 16384),
}
NO_PREFIX_LENGTHS = (1024, 2048, 4096, 8192, 16384)

Sample = tuple[int, int, float]


def read_grid(path: Path, columns: tuple[str, ...]) -> dict[tuple[str, ...], list[Sample]]:
    """Samples of one CSV by the values of `columns`, each (cached prefix, new tokens, milliseconds), sorted.

    Raises:
        ValueError: two times for one shape, a column missing, or a line whose lengths are no integers from 0 or whose
            time is no positive number; file and line are named.
    """
    grids: dict[tuple[str, ...], dict[tuple[int, int], float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file, strict=True)
        if missing := {*columns, "step", "isl", "latency"} - set(rows.fieldnames or ()):
            raise ValueError(f"{path.name}, line 1: expected the columns {', '.join(sorted(missing))} too")
        for row in rows:
            where = f"{path.name}, line {rows.line_num}"
            try:
                shape, time = (int(row["step"]), int(row["isl"])), float(row["latency"])
            except (TypeError, ValueError):
                shape, time = (-1, -1), math.nan
            if min(shape) < 0 or not 0 < time < math.inf:
                raise ValueError(f"{where}: expected whole numbers step and isl, and a positive latency")
            grid = grids.setdefault(tuple(row[column] for column in columns), {})
            if shape in grid:
                raise ValueError(f"{where}: expected one time per shape, given two for step {shape[0]}, isl {shape[1]}")
            grid[shape] = time
    return {key: [(*shape, grid[shape]) for shape in sorted(grid)] for key, grid in grids.items()}


def hit_ratios(samples: Iterable[Sample], n: int, fractions: Iterable[float] = FRACTIONS) -> dict[str, float]:
    """t(h n, n - h n) / t(0, n): time of a prefill of n tokens with a hit over that without, where both are known."""
    times = {(prefix, new): time for prefix, new, time in samples}
    hits = {fraction: int(n * fraction) for fraction in fractions}
    return {
        str(fraction): _rounded(times[hit, n - hit] / times[0, n])
        for fraction, hit in hits.items()
        if (0, n) in times and (hit, n - hit) in times
    }


def summarise(folder: Path) -> dict:
    """The summary of the measurements in `folder`, without its date.

    Args:
        folder: holds indexer_logits_prefix_grid.csv, sparse_module_prefix_grid_h200.csv and
            dense_context_attention_h200.csv.
    """
    kernels = read_grid(
        folder / "indexer_logits_prefix_grid.csv",
        ("system", "kernel_source", "model", "compress_ratio", "batch_size"),
    )
    return {
        "source": SOURCE,
        "devices": sorted({key[0] for key in kernels}),
        "unit": "ms",
        "selection": {"least new tokens": LEAST_NEW, "least keys": LEAST_KEYS},
        "indexer kernels": [_kernel(key, samples) for key, samples in sorted(kernels.items())],
        "modules": _modules(folder / "sparse_module_prefix_grid_h200.csv"),
        "without prefix": _without_prefix(folder / "dense_context_attention_h200.csv"),
    }


def _kernel(key: tuple[str, ...], samples: list[Sample]) -> dict:
    """One kernel on one device at one batch size: fits over all shapes and over those that attention dominates."""
    system, kernel, model, ratio, batch = key
    large = [s for s in samples if s[1] >= LEAST_NEW and s[0] + s[1] >= LEAST_KEYS]
    return {
        "device": system,
        "kernel": kernel,
        "model": model,
        "compress ratio": int(ratio),
        "batch size": int(batch),
        "all shapes": _fits(samples),
        "attention shapes": _fits(large),
        "ratios": {str(n): found for n in (8192, 16384) if (found := hit_ratios(samples, n))},
    }


def _fits(samples: list[Sample]) -> dict:
    fitted = fit(samples)
    coefficients = {name: _rounded(getattr(fitted, name)) for name in ("c", "gamma", "b", "a", "r", "floor")}
    return {
        "shapes": len(samples),
        "form": fitted.form,
        "error": _rounded(fitted.cv_error),
        "coefficients": {name: value for name, value in coefficients.items() if value},
        "single features": {name: _rounded(error) for name, error in feature_errors(samples).items()},
    }


def _modules(path: Path) -> list[dict]:
    grids = read_grid(
        path,
        ("op", "model", "kernel_source", "gemm_type", "tp_size", "system", "kv_cache_dtype", "mla_dtype", "num_heads"),
    )
    found = []
    for (op, model), (kernel, gemm, n) in MODULES.items():
        key, samples = next((k, s) for k, s in grids.items() if k[:5] == (op, model, kernel, gemm, "1"))
        found.append(
            {"op": op, "model": model, "device": key[5], "kernel": kernel, "weights": gemm, "cache": key[6]}
            | {"prompt tokens": n, "ratios": hit_ratios(samples, n)}
        )
    return found


def _without_prefix(path: Path) -> list[dict]:
    """Dense and windowed prefill without a hit, over the prompt length: 32 query and 8 KV heads of 128, batch 1."""
    columns = ("framework", "kernel_source", "batch_size", "num_heads", "num_key_value_heads")
    columns += ("attn_dtype", "kv_cache_dtype", "window_size", "system")
    chosen = ("VLLM", "vllm_flash_attn_fa3", "1", "32", "8", "bfloat16", "bfloat16")
    found = []
    for key, samples in sorted(read_grid(path, columns).items()):
        if key[: len(chosen)] == chosen:
            times = {new: time for _, new, time in samples}
            window, system = key[len(chosen) :]
            found.append(
                {"device": system, "kernel": key[1], "window": int(window)}
                | {"times": {str(n): _rounded(times[n]) for n in NO_PREFIX_LENGTHS}}
            )
    return found


def _rounded(x: float) -> float:
    """Three significant digits, four for ratios and errors between 0.1 and 10."""
    return float(f"{x:.4g}" if 0.1 <= x < 10 else f"{x:.3g}")


if __name__ == "__main__":
    folder, path = map(Path, sys.argv[1:])
    record = {"date": date.today().isoformat()} | summarise(folder)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
