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
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cascade_lab.evidence.compiled import bundled
from cascade_lab.evidence.driver import Launch, fake_device

# module of the Triton backend -> its functions that launch
ENTRIES = {
    "cascade_lab.backends.triton.attention": ("attend",),
    "cascade_lab.backends.triton.merge": ("merge_pair", "merge_many"),
}
HALF = (torch.float16, torch.bfloat16)


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
    options = arguments["call"] | {
        "softmax_scale": float(arguments["call"]["softmax_scale"]),
        "softcap": float(arguments["call"]["softcap"]),
        "out_dtype": getattr(torch, arguments["call"]["out_dtype"]),
        "reads": _empty(arguments["call"]["reads"]),
    }
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
    if name in ("GROUP", "WORDS"):
        return "1" if value == 1 else "a power of two" if value & (value - 1) == 0 else "another number"
    return repr(value)


def compiled(calls: list[dict[str, Any]], target: str) -> list[dict[str, Any]]:
    """The distinct kernels that calls need on a target, compiled.

    Returns:
        For each its "kernel", "half" (any tensor in half precision), "shared" bytes, "registers" and "local" bytes of a
        thread's spills (NVIDIA only), "constants" that make it; for a call that failed "error" and the "call".
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


def _report(launch: Launch) -> dict[str, Any]:
    tensors = [value for value in launch.arguments.values() if isinstance(value, torch.Tensor)]
    constants = {name: launch.arguments[name] for name in launch.types if name in launch.declared}
    report = {
        "kernel": launch.name.strip("_"),
        "half": any(x.dtype in HALF for x in tensors),
        "shared": launch.kernel.metadata.shared,
        "constants": constants | {"num_warps": launch.kernel.metadata.num_warps},
    }
    return report | (resources(launch.kernel.asm["cubin"]) if "cubin" in launch.kernel.asm else {})


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its local memory, where the assembler puts what it has no register for."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [bundled("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": usage["REG"], "local": usage["STACK"] + usage["LOCAL"]}
