"""What tests of the driver run in a child process with compiled kernels; each returns JSON values."""

from __future__ import annotations

from dataclasses import replace

import torch

from cascade_lab import Level, attention, cascade_attention, ledger, merge_state, runtime
from cascade_lab.evidence.checks import launch_tile
from cascade_lab.evidence.driver import fake_device
from cascade_lab.evidence.launches import resources
from tests.cases import attention_case, run


def call(backend: str = "triton", **changes):
    """Two requests of 3 and 1 rows over 20 and 7 keys, 4 query heads on 2 KV heads of 32, bfloat16, two splits."""
    case = attention_case([3, 1], [20, 7], dim=32, dtype=torch.bfloat16)
    return run(case, backend, num_splits=2, **changes)


def described(launch) -> dict:
    tensors = {name: list(x.shape) for name, x in launch.arguments.items() if isinstance(x, torch.Tensor)}
    return {
        "name": launch.name,
        "grid": launch.grid,
        "stages": sorted(launch.kernel.asm),
        "shared": launch.kernel.metadata.shared,
        "constants": sorted(launch.constants),
        "tensors": tensors,
        "types": dict(launch.types),
        "values": {k: v for k, v in launch.arguments.items() if k in ("page_size", "num_splits", "S", "H", "BLOCK_M")},
        "target": launch.target.name,
    }


def recorded(*targets: str) -> dict:
    found = {}
    for target in targets:
        with fake_device(target) as launches:
            call()
            call()
        found[target] = [described(launch) for launch in launches]
        found[target, "kernels"] = len({id(launch.kernel) for launch in launches})
    return {str(key): value for key, value in found.items()}


def handed_over() -> dict:
    """A function that fills what a launch would write sees real arguments, and public calls return that."""

    def fill(launch):
        launch.arguments["o_ptr"].fill_(3)
        launch.arguments["lse_ptr"].fill_(launch.grid[0])

    o, lse = torch.ones(5, 2, 8), torch.zeros(5, 2)
    with fake_device("sm_90", fill) as launches:
        state = merge_state(o, lse, o, lse, backend="triton")
    return {"o": state.o.unique().tolist(), "lse": state.lse.unique().tolist(), "recorded": len(launches)}


def message(function) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def contexts() -> dict:
    """What is pretended before, in nested contexts, after an exception inside, and after all."""
    from triton.runtime import driver

    def seen():
        target = runtime.pretended_target()
        return [None if target is None else target.name, driver._active is None]

    found = {"before": seen(), "refused before": message(call)}
    with fake_device("sm_80") as outer:
        found["outer"] = seen()
        with fake_device("gfx942") as inner:
            found["inner"] = seen()
            call()
        call()
        found["back"] = seen()
        found["launches"] = [[one.target.name for one in outer], [one.target.name for one in inner]]
        try:
            with fake_device("sm_120"):
                raise ZeroDivisionError
        except ZeroDivisionError:
            found["after an exception"] = seen()
        found["unknown inside"] = message(lambda: fake_device("sm_70").__enter__())
        found["still outer"] = seen()
    found["after"] = seen()
    found["refused after"] = message(call)
    return found


def refused() -> dict:
    """Wrong names, and a tensor that is not on the CPU."""
    found = {name: message(lambda name=name: fake_device(name).__enter__()) for name in ("sm_70", "h100", "")}
    found["a number"] = message(lambda: fake_device(90).__enter__())
    x, table = torch.zeros(1, 1, 8, device="meta"), torch.zeros(1, 1, dtype=torch.int32, device="meta")
    cache = torch.zeros(1, 1, 1, 8, device="meta")
    with fake_device("sm_90") as launches:
        found["elsewhere"] = message(lambda: attention(x, cache, cache, table, table[0], backend="triton"))
    found["launches"] = len(launches)
    return found


def too_large() -> dict:
    """A call whose tiles all need more shared memory than a target has is refused before its first launch."""
    with fake_device(replace(runtime.TARGETS["sm_90"], shared_bytes=2048)) as launches:
        said = message(call)
    with fake_device("sm_90") as enough:
        call()
    return {"said": said, "launches": len(launches), "enough": len(enough)}


def fits(works: list[dict]) -> list[dict]:
    """What the launch of each work took, and what the bound says it takes: 300 keys for its rows, 304 for 4 more."""
    return [fit(**work) for work in works]


def fit(target: str, widths: tuple[int, int, bool], rows: int, dtype: str, cache_dtype: str = "") -> dict:
    from cascade_lab.backends.triton.config import rows_of, shared_need, tile_for

    D, D_v, latent = widths
    device, kind, row_target = runtime.TARGETS[target], getattr(torch, dtype), rows_of(target)
    heads = 1 if latent else 2
    k = torch.empty(19, 16, heads, D, dtype=getattr(torch, cache_dtype or dtype))
    v = k[..., :D_v] if latent else k.new_empty(19, 16, heads, D_v)
    q = torch.empty(rows // 4 + 1, 4 * heads, D, dtype=kind)
    table = torch.arange(19, dtype=torch.int32).repeat(2, 1)
    lengths, offsets = (torch.tensor(x, dtype=torch.int32) for x in ([300, 304], [0, rows // 4, rows // 4 + 1]))
    of_call = {"target": target, "widths": widths, "rows": rows, "dtype": dtype, "cache_dtype": cache_dtype}
    options = {"cu_seqlens_q": offsets, "causal": True, "backend": "triton"}
    if cache_dtype:
        options |= {"sinks": torch.zeros(4 * heads), "k_scale": torch.ones(heads), "v_scale": torch.ones(heads)}
    with fake_device(device) as launches:
        said = message(lambda: attention(q, k, v, table, lengths, **options))
    if not launches:
        return {"work": of_call, "said": said, "launches": 0}
    tile = tile_for(rows, D, kind, row_target, device.shared_bytes, D_v, latent)
    kernel, arguments = launches[0].kernel, launches[0].arguments
    return {
        "work": of_call,
        "said": said,
        "launches": len(launches),
        "keys": launches[0].types["k_ptr"],
        "shared": kernel.metadata.shared,
        "need": shared_need(tile, kind, row_target, D, D_v, latent),
        "limit": device.shared_bytes,
        "taken": [arguments[name] for name in ("BLOCK_M", "BLOCK_N", "STAGES")],
        "tile": [tile.block_m, tile.block_n, tile.num_stages],
        "local": resources(kernel)["local"] if "cubin" in kernel.asm else 0,
    }


def reads_of_rows(*targets: str) -> dict:
    """128 packed rows of head dim 128 over 300 keys: row tile of the launch and of `launch_tile`, and what is read."""
    k = torch.empty(19, 16, 1, 128, dtype=torch.float16)
    level = Level(
        torch.tensor([0, 32], dtype=torch.int32),
        torch.arange(19, dtype=torch.int32)[None],
        torch.tensor([300], dtype=torch.int32),
        16,
    )
    book, found = ledger([level], num_q_heads=4, num_kv_heads=1), {}
    for target in targets:
        with fake_device(target) as launches:
            cascade_attention(torch.empty(32, 4, 128, dtype=torch.float16), k, k, [level], backend="triton")
            tile = launch_tile(128, 128, torch.float16)
        found[target] = [launches[0].arguments["BLOCK_M"], tile.block_m, book.tile_tokens(tile.block_m)]
    return found
