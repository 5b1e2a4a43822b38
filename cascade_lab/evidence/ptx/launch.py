"""`executed`: inside it, the public calls on CPU tensors compile for a target and run what was compiled.

Launches take Triton's real path on a driver without a device; the PTX that comes out of it is executed here. This
module stands between tensors and executor: which storage each argument has, which bits each parameter gets, what was
declared as never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from cascade_lab import _checks, runtime
from cascade_lab.evidence.driver import Launch, fake_device, keep_fake_device
from cascade_lab.evidence.ptx.memory import Allocation, GlobalMemory, forbid
from cascade_lab.evidence.ptx.parse import parse
from cascade_lab.evidence.ptx.run import Checks, Run, execute
from cascade_lab.evidence.ptx.translate import Translation
from cascade_lab.evidence.reads import Poisoned

EXECUTED = ("sm_80", "sm_90")
_NUMBERS = {
    "i1": "u1",
    "i8": "i1",
    "u8": "u1",
    "i16": "i2",
    "u16": "u2",
    "i32": "i4",
    "u32": "u4",
    "i64": "i8",
    "u64": "u8",
}
_NUMBERS |= {"fp32": "f4", "fp64": "f8"}

Marks = Sequence[tuple[Tensor, Tensor]]


def executed_target(name: str | runtime.Target) -> runtime.Target:
    """The description of a target whose PTX is executed here; a device of one's own keeps its multiprocessors.

    Raises:
        TypeError: not a name.
        ValueError: unknown, or known and not executed.
    """
    described = name if isinstance(name, runtime.Target) else None
    name = described.name if described else name
    if not isinstance(name, str):
        raise TypeError(f"target: expected a name or a Target, given {type(name).__name__}")
    if name not in EXECUTED:
        known = ", which is compiled for but not executed" if name in runtime.TARGETS else ""
        raise ValueError(f"target: expected one of {', '.join(EXECUTED)}, given {name!r}{known}")
    return described or runtime.TARGETS[name]


@contextmanager
def executed(
    target: str | runtime.Target,
    *,
    races: bool = True,
    traffic: bool = True,
    banks: bool = False,
    stream: bool = False,
    never_read: Marks = (),
    edit: Callable[[str, str], str] | None = None,
) -> Iterator[list[Run]]:
    """Inside, `backend="triton"` takes CPU tensors, compiles for `target` and executes the PTX in place of a GPU.

    Memory that torch leaves uninitialised is filled with NaN (integers with their largest value), so that an element
    nobody wrote shows. One thread at a time. Needs Triton in compiled mode: Python started with TRITON_INTERPRET=0.

    Args:
        target: "sm_80" or "sm_90", or such a device with other multiprocessors.
        races, traffic, banks, stream: as in `Checks`.
        never_read: (tensor, bool mask that broadcasts to its shape) pairs: a load of any byte of an element that is
            marked is a fault in every launch that is given the tensor's storage.
        edit: called with a kernel's name and PTX; what it returns is executed. With this, bugs are seeded.

    Yields:
        One `Run` per launch that came to its end.

    Raises:
        ValueError, TypeError: unknown target, or one that is not executed; a mask that does not fit.
        RuntimeError: Triton is missing, or kernels are interpreted in this process.
        Unsupported: from a call inside, before anything of the launch is executed.
        Fault: from a call inside: compiled code broke a rule.
    """
    described, checks = executed_target(target), Checks(races, traffic, banks, stream)
    marks = [_marked_bytes(tensor, mask) for tensor, mask in never_read]
    runs: list[Run] = []

    def launched(launch: Launch) -> None:
        runs.append(run_launch(launch, checks, marks, edit))

    with fake_device(described, launched), runtime.pretend_target(described, executed=True), Poisoned():
        yield runs


def install() -> None:
    """Execute every launch of this process from now on, for the target that the environment names.

    Raises:
        ValueError: a target that is not executed here.
    """
    described, checks = executed_target(runtime.environment_target().name), Checks(traffic=False)
    keep_fake_device(described, lambda launch: run_launch(launch, checks))


def run_launch(
    launch: Launch, checks: Checks, marks: Sequence[tuple[int, np.ndarray]] = (), edit: Callable | None = None
) -> Run:
    """Execute one launch on the storages of its tensors.

    Args:
        marks: (address of a storage, bool per byte that nothing may read).
    """
    ptx = launch.kernel.asm["ptx"]
    translation = _translation(edit(launch.name, ptx) if edit else ptx)
    kernel, memory = translation.kernel, GlobalMemory(count=checks.traffic, stream=checks.stream)
    passed = [name for name in launch.arguments if name not in launch.constants]
    parameters = {name: np.zeros(1, np.uint64) for name in kernel.parameters[len(passed) :]}
    placed: dict[int, Allocation] = {}
    for parameter, name in zip(kernel.parameters, passed, strict=False):
        value = launch.arguments[name]
        if isinstance(value, Tensor):
            base = _place(memory, placed, name, value).base + value.storage_offset() * value.element_size()
            parameters[parameter] = np.array([base], np.uint64)
        else:
            bits = np.array([value]).astype(_NUMBERS[launch.types[name]])
            parameters[parameter] = bits.view(f"u{bits.itemsize}")
    for address, never in marks:
        if address in placed:
            forbid(placed[address], never)
    storages = {allocation.name: address for address, allocation in placed.items()}
    run = Run(launch.name.strip("_"), launch.target.name, launch.grid, kernel.threads, storages=storages)
    return execute(translation, memory, parameters, run, launch.kernel.metadata.shared, checks)


@lru_cache(maxsize=256)
def _translation(ptx: str) -> Translation:
    return Translation(parse(ptx))


def _place(memory: GlobalMemory, placed: dict[int, Allocation], name: str, tensor: Tensor) -> Allocation:
    if tensor.device.type != "cpu":
        raise RuntimeError(f"{name}: compiled code is executed on CPU tensors, given one on {tensor.device}")
    address = tensor.untyped_storage().data_ptr()
    if address % 16:
        raise ValueError(f"{name}: expected memory aligned to 16 bytes, as a GPU's is, given storage at {address:#x}")
    if address not in placed or not address:
        placed[address] = memory.add(name.removesuffix("_ptr"), _bytes(tensor))
    return placed[address]


def _bytes(tensor: Tensor) -> np.ndarray:
    """The whole storage of a tensor as uint8, not a copy."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).numpy()


def _marked_bytes(tensor: Tensor, mask: Tensor) -> tuple[int, np.ndarray]:
    """The storage's address, and a bool per byte of the storage."""
    _checks.tensor("never_read", tensor)
    _checks.tensor("never_read", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"never_read: expected a bool mask, given {mask.dtype}")
    storage, size = tensor.untyped_storage(), tensor.element_size()
    marks = torch.zeros(storage.nbytes() // size, dtype=torch.bool, device="cpu")
    marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())[...] = mask
    return storage.data_ptr(), np.repeat(marks.numpy(), size)
