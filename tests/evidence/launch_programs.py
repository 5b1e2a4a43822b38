"""What tests of launches run in a child process with compiled kernels; each returns JSON values."""

from __future__ import annotations

import itertools
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cascade_lab.evidence.driver import Launch, fake_device

# what specialisation tells apart, and its neighbours: a constant, multiples of 16, 32 and 64 bits
NUMBERS = (0, 1, 2, 15, 16, 17, 2**31 - 1, 2**31, 2**31 + 1, 2**33)
STRIDES = re.compile(r"stride_|.*_stride")
# parameter of a launch -> what it may be; tensors by dtype and whether their address is a multiple of 16
FLAGS = (False, True)
ATTENTION = {
    "q_ptr": ("float32", "float16", "bfloat16"),
    "o_ptr": ("float32", "bfloat16"),
    "aligned": FLAGS,
    **{name: FLAGS for name in ("LATENT", "LEFT", "RIGHT", "TREE", "TAILS", "SOFTCAP", "READS")},
    "UNIT": (1, 8),
    "GROUP": (1, 3),
    "WORDS": (1, 3),
    # a head dim of one whole block, of one with padding, and of two blocks; the second fills a tile of values
    "dims": ((16, 16, 0), (12, 16, 0), (144, 128, 16)),
    # of no power of two, shorter than a tile of keys, and longer
    "PAGE": (0, 4, 64),
    "TAIL_N": (16, 32),
}
MERGE = {"o_ptr": ("float32", "float16", "bfloat16"), "aligned": FLAGS, "dims": ((16, 16), (12, 16)), "BLOCK_R": (1, 8)}


def combinations(switches: dict[str, Sequence], numbers: Sequence[str], seed: int = 0) -> list[dict]:
    """Few rows that have each number at each value, and together each two settings of switches, and each kind of
    number beside each setting.

    Greedy: of thirty random rows around something missing the one that brings most that is new, until nothing is.
    """
    factors = dict(switches) | {name: NUMBERS for name in numbers}
    draw = random.Random(seed)
    together = [(a, b) for a, b in itertools.combinations(factors, 2) if a in switches]

    def what(name, value):
        return value if name in switches else "1" if value == 1 else (value % 16 == 0, value < 2**31)

    def brings(row: dict) -> set:
        pairs = {(a, what(a, row[a]), b, what(b, row[b])) for a, b in together}
        return pairs | {(name, row[name]) for name in numbers}

    # what is missing, and settings that bring it
    missing = {
        (a, what(a, x), b, what(b, y)): {a: x, b: y} for a, b in together for x in factors[a] for y in factors[b]
    }
    missing |= {(name, value): {name: value} for name in numbers for value in NUMBERS}
    rows = []
    while missing:
        around = next(iter(missing.values()))
        drawn = [{name: draw.choice(values) for name, values in factors.items()} | around for _ in range(30)]
        rows.append(max(drawn, key=lambda row: len(brings(row) & missing.keys())))
        for found in brings(rows[-1]) & missing.keys():
            del missing[found]
    return rows


def _tensor(dtype: str, aligned: bool) -> torch.Tensor:
    memory = torch.empty(64, dtype=getattr(torch, dtype))
    return memory if aligned else memory[1:]


def _scalars(function) -> list[str]:
    return [one.name for one in function.params if not one.is_constexpr and not one.name.endswith("_ptr")]


def attention_calls() -> tuple[list[dict], object]:
    from cascade_lab.backends.triton.attention import _attention_kernel as kernel

    floats = ("sign", "scale", "softcap")
    rows = combinations(ATTENTION, _scalars(kernel))
    calls = []
    for row in rows:
        aligned, (D, block_d, block_d2) = row.pop("aligned"), row.pop("dims")
        call = dict(row) | {name: float(row[name]) for name in floats}
        pointers = {name: "int32" for name in ("page_table_ptr", "lengths_ptr", "rows_ptr", "tails_ptr")}
        pointers |= {"mask_ptr": "int64", "lse_ptr": "float32", "reads_ptr": "int64", "o_ptr": row["o_ptr"]}
        pointers |= {name: row["q_ptr"] for name in ("q_ptr", "k_ptr", "v_ptr")}
        call |= {name: _tensor(dtype, aligned) for name, dtype in pointers.items()}
        call |= {"D": D, "D_V": block_d if row["LATENT"] else 16, "BLOCK_D": block_d, "BLOCK_D2": block_d2}
        call |= {"BLOCK_V": block_d if row["LATENT"] else 16, "BLOCK_M": 16, "BLOCK_N": 32, "STAGES": 3}
        calls.append(call | {"INTERPRETED": False})
    return calls, kernel


def merge_calls(name: str) -> tuple[list[dict], object]:
    from cascade_lab.backends.triton import merge

    kernel = getattr(merge, name)
    calls = []
    for row in combinations(MERGE, _scalars(kernel)):
        aligned, (D, block_d), dtype = row.pop("aligned"), row.pop("dims"), row.pop("o_ptr")
        pointers = [one.name for one in kernel.params if one.name.endswith("_ptr")]
        tensors = {p: _tensor("float32" if p.startswith("lse") else dtype, aligned) for p in pointers}
        calls.append(row | tensors | {"D": D, "BLOCK_D": block_d, "INTERPRETED": False})
    return calls, kernel


def _front_end_only(backend=None, stages=None, options=None, language=None, capability=None):
    """A hook of Triton's that leaves out what comes after its own two forms of a kernel."""

    def skip(module, metadata) -> bytes:
        metadata |= {"shared": 0, "tmem_size": 0, "name": "kernel"}
        return b""

    if stages is None:
        return "front end only", "front end only"
    for stage in stages.keys() - {"ttir", "ttgir"}:
        stages[stage] = skip


def _launches(calls: list[dict], kernel, target: str) -> Iterator[tuple[dict, Launch | str]]:
    for call in calls:
        try:
            with fake_device(target) as launches:
                kernel[(1, 1, 1)](**call, num_warps=1)
        except Exception as error:
            yield call, f"{type(error).__name__}: {error}"
        else:
            yield call, launches[0]


def scalars(target: str) -> dict:
    """Every kernel at every combination: how many, the faults, what each number became, and narrow products."""
    import triton

    found = {}
    with tempfile.TemporaryDirectory() as cache:
        # a cache of its own, for some versions would take a kernel without its later stages for a whole one
        triton.knobs.cache.dir, triton.knobs.runtime.add_stages_inspection_hook = cache, _front_end_only
        for calls, kernel in (
            attention_calls(),
            *(merge_calls(n) for n in ("_merge_pair_kernel", "_merge_many_kernel")),
        ):
            faults, narrow, kinds = [], set(), {}
            for call, launch in _launches(calls, kernel, target):
                if isinstance(launch, str):
                    faults.append([{k: repr(v) for k, v in call.items() if not isinstance(v, torch.Tensor)}, launch])
                    continue
                narrow |= narrow_products(launch)
                for name in _scalars(kernel):
                    kind = launch.types[name] + (", 16" if name in launch.aligned else "")
                    kinds.setdefault(name, {}).setdefault(kind, set()).add(call[name])
            found[kernel.fn.__name__] = {
                "calls": len(calls),
                "faults": faults,
                "narrow": sorted(narrow),
                "kinds": {name: {kind: sorted(v) for kind, v in one.items()} for name, one in kinds.items()},
            }
    return found


def narrow_products(launch: Launch) -> set[str]:
    """Strides that a kernel multiplies in 32 bits, found in Triton's own form of it by following each argument."""
    text = launch.kernel.asm["ttir"]
    head = re.search(r"tt\.func public @\w+\((.*?)\) attributes", text, re.DOTALL)[1]
    arguments = re.findall(r"(%\w+): ", head)
    origin = dict(zip(arguments, [name for name, kind in launch.types.items() if kind != "constexpr"], strict=True))
    found = set()
    for result, operation, operands in re.findall(r"(%[\w-]+) = ([\w.]+) ([^:\n]*:.*)", text):
        names = re.findall(r"%[\w-]+", operands.split(" : ")[0])
        if operation in ("tt.splat", "tt.broadcast", "tt.expand_dims") and names[0] in origin:
            origin[result] = origin[names[0]]
        if operation == "arith.muli" and re.search(r"[x ]?i32>?( loc|$)", operands.split(" : ")[1]):
            found |= {origin[name] for name in names if name in origin and STRIDES.match(origin[name])}
    return found


def again() -> dict:
    """Calls made, described as they were made, and made again from that: what each launched, and how often recorded."""
    import cascade_lab
    from cascade_lab.backends.triton import attention, merge
    from cascade_lab.evidence import launches
    from tests.cases import attention_case, random, run, tree_mask

    def calls() -> None:
        tree = attention_case([3, 2], [20, 7], dtype=torch.float16, dim=8, tree_mask=tree_mask([[-1, 0, 1], [-1, 0]]))
        run(tree, "triton", num_splits=3, reads=torch.zeros(2, dtype=torch.int64))
        for layout in ("heads first", "interleaved", "padded"):
            run(attention_case([1, 4], [9, 30], layout=layout, dim=24, value_dim=16), "triton", softcap=2.0)
        window = attention_case([2, 3], [50, 7], heads=(3, 1), dtype=torch.bfloat16, dim=64, window_size=(5, 0))
        run(window, "triton", softmax_scale=-0.5)
        latent = attention_case([2, 1], [5, 6], heads=(4, 1), dim=144)
        run(replace(latent, v_cache=latent.k_cache[..., :128]), "triton", out_dtype=torch.bfloat16)
        o, lse = random(5, 2, 9, seed=0), random(5, 2, seed=1)
        cascade_lab.merge_state(o[:, :1, 1:], lse[:, :1], o[:, 1:, 1:], lse[:, 1:], backend="triton")
        cascade_lab.merge_states(random(5, 3, 2, 8, seed=2).half(), random(5, 3, 2, seed=3), backend="triton")

    def seen(made: list[Launch]) -> list:
        return sorted({(one.name, one.grid, one.kernel.hash, *launches.kinds(one)) for one in made})

    with tempfile.TemporaryDirectory() as folder:
        for module in (attention, merge):
            launches.watch(module, Path(folder))
        with fake_device("sm_86") as made:
            calls()
            calls()
        described = launches.gathered(Path(folder))
    repeated = [launch for _, found in launches.launches_of(described, "sm_86") for launch in found]
    return {"described": len(described), "made": seen(made), "again": seen(repeated)}
