"""Every launch that a program makes, recorded as shapes where kernels are interpreted, and compiled for real targets.

Which kernel a launch needs depends on the target: tiles, splits and partial states do. So what is recorded is not the
launch but the call of a backend that leads to it, with the shape, strides, dtype and alignment of every tensor and
without their contents; made again on a driver without a device (`evidence.driver`), it goes through the package's own
launch code and through Triton's binder, specialisation and compiler for whichever target is asked. Nothing is executed.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from cascade_lab.evidence.compiled import bundled
from cascade_lab.evidence.driver import Launch, fake_device
from cascade_lab.runtime import TARGETS

# module of the Triton backend -> its functions that launch
ENTRIES = {
    "cascade_lab.backends.triton.attention": ("attend",),
    "cascade_lab.backends.triton.merge": ("merge_pair", "merge_many"),
}
HALF = ("float16", "bfloat16")
# how Triton marks a pointer or a number that is a multiple of 16
DIVISIBLE = ["tt.divisibility", 16]


def described(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as JSON values: tensors as [dtype, shape, strides, address mod 16]; numbers handed on by their sign."""
    return {"function": function} | {name: _described(value) for name, value in arguments.items()}


def _described(value: Any) -> Any:
    from cascade_lab.backends import Call, Pass

    if isinstance(value, torch.Tensor):
        return [_name(value.dtype), list(value.shape), list(value.stride()), value.data_ptr() % 16]
    if isinstance(value, torch.dtype):
        return _name(value)
    if isinstance(value, Pass):
        same = value.k_cache.data_ptr() == value.v_cache.data_ptr()
        return {name: _described(one) for name, one in vars(value).items()} | {"same_memory": same}
    if isinstance(value, Call):
        call = {name: _described(one) for name, one in value._asdict().items()}
        return call | {name: (call[name] > 0) - (call[name] < 0) for name in ("softmax_scale", "softcap")}
    if isinstance(value, (list, tuple)):
        return [_described(one) for one in value]
    return value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make(call: dict[str, Any]) -> None:
    """Make a described call again, on tensors of the same layout and alignment whose contents are undefined.

    Inside `fake_device`, which reads no contents.
    """
    from cascade_lab.backends import Call
    from cascade_lab.backends.triton import attention, merge

    arguments = dict(call)
    function = arguments.pop("function")
    if function != "attend":
        getattr(merge, function)(*(_empty(one) for one in arguments.values()))
        return
    options = (
        arguments["call"]
        | {
            "softmax_scale": float(arguments["call"]["softmax_scale"]),
            "softcap": float(arguments["call"]["softcap"]),
            "out_dtype": getattr(torch, arguments["call"]["out_dtype"]),
        }
        | {name: _empty(arguments["call"].get(name)) for name in ("reads", "sinks", "k_scale", "v_scale")}
    )
    attention.attend(_empty(arguments["q"]), [_pass(one) for one in arguments["passes"]], Call(**options))


def _pass(one: dict[str, Any]):
    from cascade_lab.backends import Pass

    one = dict(one)
    same = one.pop("same_memory")
    tensors = ("k_cache", "v_cache", "page_table", "cache_seqlens", "cu_seqlens_q", "tree_mask", "tail_seqlens")
    values = {name: _empty(one[name]) if name in tensors else one[name] for name in one}
    if same:
        _, shape, stride, _ = one["v_cache"]
        values["v_cache"] = values["k_cache"].as_strided(shape, stride)
    values["window_size"] = tuple(one["window_size"])
    return Pass(**values)


def _empty(layout: list | None) -> torch.Tensor | None:
    if layout is None:
        return None
    name, shape, stride, address = layout
    dtype = getattr(torch, name)
    span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    # memory comes aligned to 64 bytes; what nobody writes takes none
    memory = torch.empty(address + span * dtype.itemsize, dtype=torch.uint8)[address:].view(dtype)
    return memory.as_strided(shape, stride)


def watch(module: ModuleType, folder: Path) -> None:
    """From now on write every new call of the module's entries that returns into a file of `folder`, one per process.

    For a process of its own, which ends with the program that is watched.
    """
    seen: set[str] = set()

    def watched(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*arguments, **options):
            result = function(*arguments, **options)
            bound = signature.bind(*arguments, **options).arguments
            line = json.dumps(described(function.__name__, bound), separators=(",", ":"))
            if line not in seen:
                seen.add(line)
                with open(folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
                    file.write(line + "\n")
            return result

        return call

    for name in ENTRIES[module.__name__]:
        setattr(module, name, watched(getattr(module, name)))


def gathered(folder: Path) -> list[dict[str, Any]]:
    """The distinct calls that `watch` wrote into a folder, in an order that depends on them alone."""
    lines = {line for path in folder.glob("*.jsonl") for line in path.read_text(encoding="utf-8").splitlines()}
    return [json.loads(line) for line in sorted(lines)]


def launches_of(calls: Iterable[dict[str, Any]], target: str) -> Iterator[tuple[dict[str, Any], list[Launch] | str]]:
    """Each call with its launches on the target, or with the message of the error that stopped it."""
    for call in calls:
        try:
            with fake_device(target) as launches:
                make(call)
        except Exception as error:
            yield call, f"{type(error).__name__}: {' '.join(str(error).split())[-400:]}"
        else:
            yield call, launches


def kinds(launch: Launch) -> list[str]:
    """What specialisation makes of each parameter, as "kernel.parameter: kind".

    A pointer's kind is its type and whether it is aligned, a number's its type and whether it is a multiple of 16, or
    that it is 1; a constant's its value, where many are possible a class of them.
    """
    found = []
    for name, value in launch.arguments.items():
        kind = launch.types[name]
        if name in launch.declared:
            kind = _class_of(name, value, launch.arguments)
        elif kind == "constexpr":
            kind = repr(value)
        elif name in launch.aligned:
            kind += ", 16"
        found.append(f"{launch.name}.{name}: {kind}")
    options = launch.kernel.metadata
    return [*found, f"{launch.name}.num_warps: {options.num_warps}"]


def _class_of(name: str, value: Any, arguments: dict[str, Any]) -> str:
    if name in ("D", "D_V"):
        if "BLOCK_V" not in arguments:
            blocks = arguments["BLOCK_D"]
        else:
            blocks = arguments["BLOCK_V"] if name == "D_V" else arguments["BLOCK_D"] + arguments["BLOCK_D2"]
        return "whole blocks" if value == blocks else "padded blocks"
    if name == "PAGE" and value > 1:
        return "shorter than a tile" if value < arguments["BLOCK_N"] else "a tile or longer"
    if name in ("GROUP", "WORDS") or "BLOCK_V" not in arguments and name in ("BLOCK_D", "BLOCK_R"):
        return "1" if value == 1 else "a power of two" if value & (value - 1) == 0 else "another number"
    return repr(value)


@contextmanager
def specialised(target: str) -> Iterator[list[Launch]]:
    """As `fake_device`, up to Triton's specialisation: nothing is compiled, so whether a launch fits is not known.

    A launch's kernel then has the key by which Triton tells kernels apart as "hash", and its number of warps; of its
    arguments only constants have values, and it has no grid. Kernels that were compiled for the target in this process
    before are not asked for again, and missing.
    """
    with fake_device(target) as launches:
        import triton

        def keep(*, key, fn, **given) -> bool:
            asked = given["compile"]
            types, constants = asked["signature"], asked["constants"]
            names = list(types)
            values = {names[path[0]]: value for path, value in constants.items()}
            marked = [path[0] for path, attributes in asked["configs"][0].items() if DIVISIBLE in attributes]
            launches.append(
                Launch(
                    function=fn.jit_function,
                    kernel=SimpleNamespace(hash=str(key), metadata=SimpleNamespace(num_warps=asked["num_warps"])),
                    grid=(),
                    arguments={name: values.get(name) for name in names},
                    types=dict(types),
                    aligned=frozenset(names[i] for i in marked),
                    target=TARGETS[target],
                )
            )
            # Triton then takes no kernel and makes no launch
            return True

        before = triton.knobs.runtime.jit_cache_hook
        triton.knobs.runtime.jit_cache_hook = keep
        try:
            yield launches
        finally:
            triton.knobs.runtime.jit_cache_hook = before


def bound(calls: Iterable[dict[str, Any]], target: str) -> Iterator[tuple[dict[str, Any], list[Launch] | str]]:
    """Each call with its launches on the target as `specialised` has them, or with the message of an error."""
    for call in calls:
        try:
            with specialised(target) as launches:
                make(call)
        except Exception as error:
            yield call, f"{type(error).__name__}: {error}"
        else:
            yield call, launches


def is_refused(message: str) -> bool:
    """Whether an error is the package's own, for a dtype that a target has not."""
    return message.startswith("TypeError: dtype of ")


def refused(path: str, target: str) -> dict[str, int]:
    """How many calls of a file the package refuses on the target, by message."""
    messages = [made for _, made in bound(_read_calls(path), target) if isinstance(made, str) and is_refused(made)]
    return dict(Counter(messages))


def needed(calls: Iterable[dict[str, Any]], target: str) -> list[dict[str, Any]]:
    """Those calls that need a kernel on the target that none before them does, and those that fail unrefused."""
    seen: set[tuple[str, str]] = set()
    found = []
    for call, launches in bound(calls, target):
        if isinstance(launches, str):
            found += [] if is_refused(launches) else [call]
        elif new := {(one.name, one.kernel.hash) for one in launches} - seen:
            found.append(call)
            seen |= new
    return found


def sample(calls: list[dict[str, Any]], targets: Sequence[str] = tuple(TARGETS)) -> list[tuple[str, dict[str, Any]]]:
    """Few calls, each with a target, whose launches together have every kind that the calls have on the targets.

    Greedy: the targets take turns, and each takes the call that brings most kinds that are missing, the first of such.
    A call that fails on a target brings nothing there.
    """
    brings = {
        target: [
            set() if isinstance(launches, str) else {kind for one in launches for kind in kinds(one)}
            for _, launches in bound(calls, target)
        ]
        for target in targets
    }
    missing = set().union(*(found for each in brings.values() for found in each))
    chosen = []
    while missing:
        for target in targets:
            best = max(range(len(calls)), key=lambda i: len(brings[target][i] & missing))
            if new := brings[target][best] & missing:
                chosen.append((target, calls[best]))
                missing -= new
    return chosen


def sample_of_file(path: str) -> list[dict[str, Any]]:
    """`sample` of a file of calls, as objects with "target" and "call"."""
    return [{"target": target, "call": call} for target, call in sample(_read_calls(path))]


def _read_calls(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def compiled(calls: Iterable[dict[str, Any]], target: str) -> list[dict[str, Any]]:
    """The distinct kernels that calls need on a target, compiled.

    Returns:
        For each its "kernel", "dtype" (of its inputs), "shared" bytes, "registers" and "local"
        bytes of a thread, where a spilled register goes, and "constants" that make it; for a call that failed "error"
        and the "call".
    """
    found: dict[str, dict[str, Any]] = {}
    for call, launches in launches_of(calls, target):
        if isinstance(launches, str):
            found[f"error {json.dumps(call)}"] = {"error": launches, "call": call}
            continue
        for launch in launches:
            if launch.kernel.hash not in found:
                found[launch.kernel.hash] = _report(launch)
    return list(found.values())


def compiled_slice(path: str, target: str, first: int, step: int) -> list[dict[str, Any]]:
    """`compiled` for every `step`-th needed call of a file of calls, from `first` on."""
    return compiled(needed(_read_calls(path), target)[first::step], target)


def faults(kernels: Iterable[dict[str, Any]], target: str) -> list[str]:
    """What is wrong with kernels that `compiled` reports: one that failed, that does not fit, or that spills.

    A half-precision kernel may use no local memory on sm_80 and later; elsewhere, and in float32, spills are counted
    and allowed.
    """
    found = []
    for one in kernels:
        if "error" in one:
            found.append(f"{_call_name(one['call'])}: {one['error']}")
        elif one["shared"] > TARGETS[target].shared_bytes:
            found.append(f"{kernel_name(one)}: {one['shared']} bytes of {TARGETS[target].shared_bytes} shared memory")
        elif one["local"] and one["dtype"] in HALF and target.startswith("sm_") and target != "sm_75":
            found.append(f"{kernel_name(one)}: {one['local']} bytes of local memory a thread")
    return found


def kernel_name(report: dict[str, Any]) -> str:
    """A kernel by its dtype and constants, flags that are off left out."""
    constants = {name: value for name, value in report["constants"].items() if value not in (False, None)}
    listed = ", ".join(name if value is True else f"{name}={value}" for name, value in constants.items())
    return f"{report['kernel']} {report['dtype']} ({listed})"


def _call_name(call: dict[str, Any]) -> str:
    if call["function"] != "attend":
        dtype, shape = next(value for name, value in call.items() if name != "function")[:2]
        return f"{call['function']} {dtype} {shape}"
    k, v = call["passes"][0]["k_cache"], call["passes"][0]["v_cache"]
    rows = [one["max_seqlen_q"] * call["q"][1][1] // one["k_cache"][1][2] for one in call["passes"]]
    return f"attend {k[0]}, D {k[1][-1]}, D_v {v[1][-1]}, packed rows {', '.join(map(str, rows))}"


def _report(launch: Launch) -> dict[str, Any]:
    inputs = next(x for x in launch.arguments.values() if isinstance(x, torch.Tensor))
    constants = {name: launch.arguments[name] for name in launch.types if name in launch.declared}
    report = {
        "hash": launch.kernel.hash,
        "kernel": launch.name.strip("_"),
        "dtype": _name(inputs.dtype),
        "shared": launch.kernel.metadata.shared,
        "constants": constants | {"num_warps": launch.kernel.metadata.num_warps},
    }
    return report | resources(launch.kernel)


def resources(kernel: Any) -> dict[str, int]:
    """Registers of a thread, and bytes of its local memory, where the assembler puts what it has no register for."""
    if "amdgcn" in kernel.asm:
        usage = {
            key: int(value) for key, value in re.findall(r"^\s*\.(\w+): +(\d+)$", kernel.asm["amdgcn"], re.MULTILINE)
        }
        return {"registers": usage["vgpr_count"], "local": usage["private_segment_fixed_size"]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(kernel.asm["cubin"])
        command = [bundled("cuobjdump"), "-res-usage", path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": usage["REG"], "local": usage["STACK"] + usage["LOCAL"]}
