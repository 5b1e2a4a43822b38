"""A driver without a device: Triton's own launch path for a named target, up to the launch.

Triton binds arguments, specialises them (1 becomes a constant, multiples of 16 are marked), looks for a compiled
kernel, compiles, and checks the need for shared memory, all in `JITFunction.run` and `CompiledKernel`; then it asks the
active driver to load the binary and to launch. The driver here answers with the properties of the target and hands
every launch to a function. It loads nothing, runs nothing and opens no library of a device. Works on CPU tensors, in
compiled mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cascade_lab import runtime
from cascade_lab.runtime import TARGETS, Target


@dataclass(frozen=True)
class Launch:
    """One launch that a device would have made.

    Attributes:
        function: the `JITFunction` of the kernel's source.
        kernel: the `CompiledKernel`; `asm` has its stages ("ttir", "ttgir", and "ptx", "cubin" for NVIDIA),
            `metadata.shared` the bytes of shared memory and `metadata.num_warps` the warps of a program.
        grid: programs along three axes.
        arguments: every parameter by name, in order, with defaults filled in: tensors, numbers and constants.
        types: what each became: "*bf16" for a tensor, "i32", "i64", "fp32" for a number, "constexpr" for a constant.
        aligned: numbers known to be multiples of 16, and tensors whose address is.
        target: what it was compiled for.
    """

    function: Any
    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any] = field(repr=False)
    types: dict[str, str] = field(repr=False)
    aligned: frozenset[str] = field(repr=False)
    target: Target

    @property
    def name(self) -> str:
        return self.function.fn.__name__

    @property
    def declared(self) -> frozenset[str]:
        """Parameters that are constants by the kernel's signature."""
        return frozenset(one.name for one in self.function.params if one.is_constexpr)

    @property
    def constants(self) -> frozenset[str]:
        """Arguments that are compiled in: declared so, or numbers that are 1. They have no parameter in the binary."""
        return frozenset(name for name, kind in self.types.items() if kind == "constexpr")


def target_of(target: str | Target) -> Target:
    """The target of that name; one that is described already is returned as it is.

    Raises:
        TypeError: neither a name nor a description.
        ValueError: unknown name; those that are known are in the message.
    """
    if isinstance(target, Target):
        return target
    if not isinstance(target, str):
        raise TypeError(f"target: expected a name or a Target, given {type(target).__name__}")
    if target not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, given {target!r}")
    return TARGETS[target]


def gpu_target(target: Target):
    """Triton's own description of the target."""
    from triton.backends.compiler import GPUTarget

    if target.name.startswith("sm_"):
        return GPUTarget("cuda", int(target.name.removeprefix("sm_")), 32)
    return GPUTarget("hip", target.name, 64)


@contextmanager
def fake_device(target: str | Target, on_launch: Callable[[Launch], None] | None = None) -> Iterator[list[Launch]]:
    """Inside, backend="triton" takes CPU tensors, compiles for `target` and hands launches over instead of making them.

    Outputs of a call keep what their memory held unless `on_launch` writes them. A context inside another counts alone;
    leaving one, by an exception too, restores what was before. One thread at a time: Triton's active driver belongs to
    the process.

    Args:
        target: a name from `runtime.TARGETS`, or a device of one's own.
        on_launch: called with every launch; by default they are only recorded.

    Yields:
        The launches recorded so far; stays empty when `on_launch` is given.

    Raises:
        ValueError, TypeError: unknown target.
        RuntimeError: Triton is missing, or kernels are interpreted in this process.
        triton.runtime.errors.OutOfResources: from a launch inside that needs more shared memory than the target has.
    """
    described = target_of(target)
    runtime.require_compiled()
    from triton.runtime import driver

    launches: list[Launch] = []
    before = driver._active
    with runtime.pretend_target(described):
        driver.set_active(_Driver(described, on_launch or launches.append))
        try:
            yield launches
        finally:
            driver.set_active(before)


def keep_fake_device(target: Target, on_launch: Callable[[Launch], None]) -> None:
    """From now on hand every launch of this process to `on_launch`, compiled for `target`."""
    from triton.runtime import driver

    driver.set_active(_Driver(target, on_launch))


class _Driver:
    """What Triton asks of the active driver, answered from the table of targets."""

    def __init__(self, target: Target, on_launch: Callable[[Launch], None]):
        self.target, self.on_launch, self.utils, self.launcher_cls = target, on_launch, self, _Launcher

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self):
        return gpu_target(self.target)

    def get_current_device(self) -> Target:
        # kernels and limits are cached by device: this keeps each target's apart, and from a real device's number
        return self.target

    def get_current_stream(self, device: Target) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_device_properties(self, device: Target) -> dict[str, int]:
        return {
            "max_shared_mem": self.target.shared_bytes,
            "multiprocessor_count": self.target.multiprocessors,
            "warpSize": gpu_target(self.target).warp_size,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, device: Target) -> tuple[None, None, int, int, int]:
        """No module and no function, so that nothing is ever unloaded; registers and spills unknown, 1024 threads."""
        return None, None, 0, 0, 1024


class _Launcher:
    """Stands for the compiled launcher of one kernel; which driver it reports to is decided at each launch."""

    def __init__(self, source, metadata):
        self.source = source

    def __call__(
        self, grid_0, grid_1, grid_2, stream, function, packed, metadata, enter_hook, exit_hook, *arguments
    ) -> None:
        from triton.runtime import driver

        jit = self.source.fn
        compiled = jit.device_caches[driver.active.get_current_device()][0].values()
        launch = Launch(
            function=jit,
            kernel=next(kernel for kernel in compiled if kernel.src is self.source),
            grid=(grid_0, grid_1, grid_2),
            arguments=dict(zip(jit.arg_names, arguments, strict=True)),
            types={name: self.source.signature[name] for name in jit.arg_names},
            aligned=frozenset(
                jit.arg_names[path[0]]
                for path, attributes in self.source.attrs.items()
                if ["tt.divisibility", 16] in attributes
            ),
            target=driver.active.target,
        )
        driver.active.on_launch(launch)
