"""What tests of launches run in a child process with compiled kernels; each returns JSON values."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cascade_lab.evidence.driver import Launch, fake_device
from cascade_lab.runtime import TARGETS

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
    **{name: FLAGS for name in ("SINKS", "K_SCALE", "V_SCALE")},
    # float8 as bytes, by its exponent bits
    "CODES": (0, 4, 5),
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
        pointers |= {name: "float32" for name in ("sinks_ptr", "k_scale_ptr", "v_scale_ptr")} | {"q_ptr": row["q_ptr"]}
        pointers |= {name: "uint8" if row["CODES"] else row["q_ptr"] for name in ("k_ptr", "v_ptr")}
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


def some_calls() -> None:
    """Eight calls of eight kinds."""
    import cascade_lab
    from tests.cases import attention_case, random, run, tree_mask

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


def many_calls() -> None:
    """Every head dim of the tables, in every dtype, under every mask, over few and many rows."""
    from tests.cases import attention_case, run, tree_mask

    masks = ({}, {"causal": True}, {"window_size": (5, 3)}, {"tree_mask": tree_mask([[-1, 0, 1], [-1, 0]])})
    for dtype, dim in itertools.product((torch.float32, torch.float16, torch.bfloat16), (8, 64, 128, 192, 256)):
        for options in masks:
            run(attention_case([3, 2], [20, 7], dtype=dtype, dim=dim, **options), "triton")
        for rows in (16, 32, 64):
            run(attention_case([rows, 2], [20, 7], dtype=dtype, dim=dim, page=16), "triton", softcap=3.0, num_splits=2)
        tree = masks[-1] | {"tail_seqlens": torch.tensor([2, 1], dtype=torch.int32)}
        run(attention_case([3, 2], [20, 7], dtype=dtype, dim=dim, **tree), "triton")
    for dtype in (torch.float16, torch.bfloat16):
        latent = attention_case([2, 1], [5, 6], heads=(16, 1), dtype=dtype, dim=576)
        run(replace(latent, v_cache=latent.k_cache[..., :512]), "triton", causal=True)


def _described(calls: Callable[[], None]) -> list[dict]:
    """The calls described, on a target where none of their kernels was compiled."""
    from cascade_lab.evidence import launches

    modules = [importlib.import_module(name) for name in launches.ENTRIES]
    before = [(module, name, getattr(module, name)) for module in modules for name in launches.ENTRIES[module.__name__]]
    with tempfile.TemporaryDirectory() as folder, launches.specialised("sm_90"):
        for module in modules:
            launches.watch(module, Path(folder))
        try:
            calls()
        finally:
            for module, name, function in before:
                setattr(module, name, function)
        return launches.gathered(Path(folder))


def _seen(made: Sequence[Launch]) -> list:
    from cascade_lab.evidence import launches

    return sorted({(one.name, one.grid, one.kernel.hash, *launches.kinds(one)) for one in made})


def again() -> dict:
    """Calls made, described as they were made, and made again from that: what each launched, and how often recorded."""
    from cascade_lab.backends.triton import attention, merge
    from cascade_lab.evidence import launches

    with tempfile.TemporaryDirectory() as folder:
        for module in (attention, merge):
            launches.watch(module, Path(folder))
        with fake_device("sm_86") as made:
            some_calls()
            some_calls()
        described = launches.gathered(Path(folder))
    repeated = [launch for _, found in launches.launches_of(described, "sm_86") for launch in found]
    return {"described": len(described), "made": _seen(made), "again": _seen(repeated)}


def bound_and_compiled() -> dict:
    """Kinds of the eight calls on a target, by specialisation alone and by compiling them, and the calls needed."""
    from cascade_lab.evidence import launches

    calls = _described(some_calls)

    def listed(each) -> list:
        return [sorted(kind for one in made for kind in launches.kinds(one)) for _, made in each]

    needed = launches.needed([*calls, *calls], "sm_86")
    bound = list(launches.bound(calls, "sm_86"))
    every = {kind for kinds in listed(bound) for kind in kinds}
    covering = launches.bound([call for _, call in launches.sample([*calls, *calls], ("sm_86",))], "sm_86")
    covered = listed(covering)
    return {
        "same kinds": listed(bound) == listed(launches.launches_of(calls, "sm_86")),
        "kernels": len({one.kernel.hash for _, made in bound for one in made}),
        "needed": needed == calls,
        "covered": {kind for kinds in covered for kind in kinds} == every and len(covered) <= len(calls),
    }


def two(target: str, shared_bytes: int | None = None) -> list[dict]:
    """An attention in bfloat16 and a merge in float32, compiled, with the shared memory a target has or another."""
    import cascade_lab
    from cascade_lab import runtime
    from cascade_lab.evidence import launches
    from tests.cases import attention_case, random, run

    def calls() -> None:
        run(attention_case([3, 2], [50, 7], dtype=torch.bfloat16, dim=64, page=16), "triton", causal=True)
        cascade_lab.merge_states(random(5, 3, 2, 8, seed=2), random(5, 3, 2, seed=3), backend="triton")

    device = runtime.TARGETS[target]
    found = launches.compiled(_described(calls), replace(device, shared_bytes=shared_bytes or device.shared_bytes))
    return [one | {"faults": launches.faults([one], target)} for one in found]


def limited() -> list[dict]:
    """What one attention kernel takes of a thread with all registers, and with 32 of them."""
    from cascade_lab.evidence import launches

    calls, kernel = attention_calls()
    found = []
    for options in ({}, {"maxnreg": 32}):
        with fake_device("sm_90") as made:
            kernel[(1, 1, 1)](**calls[0], num_warps=1, **options)
        found.append(launches.resources(made[0].kernel))
    return found


SAMPLE = Path(__file__).resolve().parents[1] / "data" / "launches.jsonl"


def _sampled() -> dict[str, list[dict]]:
    calls: dict[str, list[dict]] = {}
    for one in map(json.loads, SAMPLE.read_text(encoding="utf-8").splitlines()):
        calls.setdefault(one["target"], []).append(one["call"])
    return calls


def sampled(target: str) -> dict:
    """The sample's calls for a target, compiled: what was found wrong, and how many kernels there are of each dtype."""
    from cascade_lab.evidence import launches

    found = launches.compiled(_sampled()[target], target)
    return {"faults": launches.faults(found, target), "dtypes": Counter(one.get("dtype") for one in found)}


def uncovered() -> dict:
    """Kinds that many calls have on any target, and those of them that the sample has on none."""
    from cascade_lab.evidence import launches

    def kinds_of(calls: list[dict], target: str) -> set[str]:
        made = [each for _, each in launches.bound(calls, target) if not isinstance(each, str)]
        return {kind for each in made for one in each for kind in launches.kinds(one)}

    calls = _described(lambda: (some_calls(), many_calls()))
    known = set().union(*(kinds_of(calls, target) for target in TARGETS))
    sampled = _sampled()
    have = set().union(*(kinds_of(each, target) for target, each in sampled.items()))
    return {"known": len(known), "missing": sorted(known - have), "targets": sorted(sampled)}
