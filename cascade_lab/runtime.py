"""Where kernels run, decided in one place.

Kernels of this package are interpreted where the machine shows no GPU and compiled otherwise, and never against a value
of TRITON_INTERPRET that the user has set. That is decided when they are first used, in this process and for them alone:
the environment stays as it is, and with it other kernels and child processes. Importing this module brings in neither
Triton nor a GPU context.

A third mode needs no GPU either: with CASCADE_LAB_TARGET=sm_90 (or sm_80) kernels are compiled for that target and what
was compiled is executed on the CPU, by an executor that registers itself here; `cascade_lab.evidence` brings one.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Literal

import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch as dispatch_modes

__all__ = [
    "BACKENDS",
    "checks_enabled",
    "device",
    "device_reason",
    "jit",
    "provenance",
    "require_triton",
    "triton_mode",
    "unchecked",
]

SWITCH = "TRITON_INTERPRET"
TARGET = "CASCADE_LAB_TARGET"
Backend = Literal["auto", "triton", "torch"]
BACKENDS: tuple[Backend, ...] = ("auto", "triton", "torch")
"""What a call's `backend` may be."""


def environment_executes() -> bool:
    """Whether CASCADE_LAB_TARGET names a target; empty is as good as absent."""
    return bool(os.environ.get(TARGET))


@dataclass(frozen=True)
class Target:
    """What kernels are compiled for.

    Attributes:
        name: "sm_90" of NVIDIA or "gfx942" of AMD.
        multiprocessors: of the device; 0 for the interpreter, which runs one program at a time.
        shared_bytes: shared memory that a block may opt in to.
    """

    name: str
    multiprocessors: int
    shared_bytes: int


_KIB = 1024
# T4, A100, RTX 3090, RTX 4090, H200, B200, RTX 5090 and MI300X; limits from the vendors' programming guides
TARGETS = {
    target.name: target
    for target in (
        Target("sm_75", 40, 64 * _KIB),
        Target("sm_80", 108, 163 * _KIB),
        Target("sm_86", 82, 99 * _KIB),
        Target("sm_89", 128, 99 * _KIB),
        Target("sm_90", 132, 227 * _KIB),
        Target("sm_100", 148, 227 * _KIB),
        Target("sm_120", 170, 99 * _KIB),
        Target("gfx942", 304, 64 * _KIB),
    )
}

_checked = contextvars.ContextVar("cascade_lab_checked", default=True)
# the target that CPU tensors stand for, and whether what is compiled for it is executed
_pretended: contextvars.ContextVar[tuple[Target, bool] | None] = contextvars.ContextVar(
    "cascade_lab_pretended", default=None
)
_start_executor: Callable[[], None] | None = None
# whether the kernels of this package are interpreted, once they are defined
_settled: bool | None = None


def device() -> torch.device:
    """The device to place tensors on: the current GPU when kernels are compiled for one, else the CPU.

    Example:
        >>> q = torch.zeros(1, 2, 8, device=cl.runtime.device())
        >>> q.device.type in ("cpu", "cuda")
        True
    """
    return torch.device("cuda" if triton_mode() == "compiled" and torch.cuda.device_count() > 0 else "cpu")


def device_reason() -> str:
    """One phrase saying why `device()` is what it is.

    Example:
        >>> isinstance(cl.runtime.device_reason(), str)  # such as 'no GPU found'
        True
    """
    if triton_mode() == "executed":
        return f"code compiled for {_current()[0].name} is executed on the CPU"
    if torch.cuda.device_count() == 0:
        return "no GPU found"
    return "a GPU was found" if device().type == "cuda" else f"{SWITCH} asks for the interpreter"


def triton_mode() -> str:
    """How Triton kernels run in this process: "compiled" for a GPU, "interpreted", "executed" (compiled for a target
    without one, and executed on the CPU), or "absent" when Triton is not installed.

    Example:
        >>> cl.runtime.triton_mode() in ("compiled", "interpreted", "executed", "absent")
        True
    """
    if not _is_installed("triton"):
        return "absent"
    if (current := _current()) is not None and current[1]:
        return "executed"
    return "interpreted" if _interpreting() else "compiled"


def _interpreting() -> bool:
    if SWITCH in os.environ:
        return os.environ[SWITCH].lower() in ("1", "true", "on", "yes", "y")
    if environment_executes():
        return False
    return torch.cuda.device_count() == 0 if _settled is None else _settled


def settle_mode() -> bool:
    """Whether kernels that are defined now are interpreted. The first answer holds in this process: `require_triton`
    refuses a TRITON_INTERPRET that says otherwise later."""
    global _settled
    if _settled is None:
        _settled = _interpreting()
    return _settled


def _current() -> tuple[Target, bool] | None:
    """The target that CPU tensors stand for, and whether it is executed: of a context, else of the environment."""
    pretended = _pretended.get()
    if pretended is None and environment_executes():
        return environment_target(), True
    return pretended


def environment_target() -> Target:
    """The target that CASCADE_LAB_TARGET names.

    Raises:
        ValueError: unknown name.
    """
    name = os.environ[TARGET]
    if name not in TARGETS:
        raise ValueError(f"{TARGET}: expected one of {', '.join(TARGETS)}, given {name!r}")
    return TARGETS[name]


def set_executor(start: Callable[[], None]) -> None:
    """Register what CASCADE_LAB_TARGET needs: `start` makes every launch of the process compile for
    `environment_target()` and execute. It is called once, when a kernel is first needed, and may refuse the target."""
    global _start_executor
    _start_executor = start


def _is_installed(package: str) -> bool:
    """Whether `package` could be imported, found out without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # hidden by an import hook, or set to None in sys.modules
        return False


def require_triton() -> None:
    """Import Triton in the mode of this process.

    Raises:
        RuntimeError: Triton is missing, or TRITON_INTERPRET has changed since kernels, or Triton itself, were defined.

    Example:
        >>> cl.runtime.require_triton()
    """
    try:
        import triton
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise RuntimeError(
            "backend='triton' needs the triton package, which could not be imported; backend='torch' works without it"
        ) from error
    interpreting = _interpreting()
    if environment_executes() and interpreting:
        raise RuntimeError(f"{TARGET} executes compiled code, but {SWITCH}={os.environ[SWITCH]} asks to interpret it")
    if _settled is not None and _settled != interpreting:
        raise RuntimeError(
            f"kernels of this process are {'interpreted' if _settled else 'compiled'} since their first use, before "
            f"{SWITCH} took its present value {os.environ.get(SWITCH)!r}: set {SWITCH} before Python starts"
        )
    if not interpreting and not isinstance(triton.language.standard.cdiv, JITFunction):
        raise RuntimeError(
            f"triton was imported in interpreted mode before {SWITCH} took its present value "
            f"{os.environ.get(SWITCH)!r}: set {SWITCH} before Python starts"
        )
    if environment_executes() and _pretended.get() is None:
        _execute_from_now_on()


def jit(kernel: Callable) -> Callable:
    """Decorate a Triton kernel of your own, as `triton.jit` does, so that it runs as this package's kernels do.

    It is compiled on a GPU, interpreted without one, and executed for the target of CASCADE_LAB_TARGET. A kernel calls
    only parts that are decorated in the same way, and its source must be readable, in a module or a notebook cell.

    Args:
        kernel: a function of `triton.language`.

    Returns:
        A kernel to launch as `kernel[grid](...)`.

    Raises:
        RuntimeError: Triton is missing, or TRITON_INTERPRET has changed since kernels were defined.

    Example:
        >>> import triton.language as tl
        >>> @cl.runtime.jit
        ... def double(p_x):
        ...     tl.store(p_x, 2 * tl.load(p_x))
        >>> x = torch.tensor([21.0], device=cl.runtime.device())
        >>> double[(1,)](x)
        >>> x.item()
        42.0
    """
    require_triton()
    # by name, for the backend imports this module
    return importlib.import_module("cascade_lab.backends.triton.mode").jit(kernel)


def _execute_from_now_on() -> None:
    global _start_executor
    if _start_executor is None:
        raise RuntimeError(f"{TARGET} is set, and nothing here executes compiled code: import cascade_lab.evidence")
    _start_executor()
    _start_executor = _started


def _started() -> None:
    """The executor is at work."""


def _pick_backend(backend: str, tensor: torch.Tensor) -> str:
    """Resolve "auto" by the device of `tensor`, and refuse a backend that cannot run there.

    Args:
        backend: "auto" (Triton for CUDA tensors, torch for CPU tensors), "triton" or "torch".
        tensor: any input of the call.

    Raises:
        ValueError: unknown name.
        RuntimeError: Triton is asked for and is missing, or runs in a mode that cannot take the tensor's device.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, given {backend!r}")
    if backend == "auto":
        backend = "triton" if tensor.device.type == "cuda" else "torch"
    # a compiler cannot trace an import, so there the operators' fakes ask
    if not torch.compiler.is_compiling():
        _require_backend(backend, tensor)
    return backend


def _require_backend(backend: str, tensor: torch.Tensor) -> None:
    """Raise RuntimeError when "triton" is missing or runs in a mode that cannot take the tensor's device."""
    if backend != "triton":
        return
    require_triton()
    if (current := _current()) is not None:
        if tensor.device.type != "cpu":
            raise RuntimeError(
                f"backend='triton' takes CPU tensors while {current[0].name} is pretended, given one on {tensor.device}"
            )
    elif tensor.device.type != "cuda" and triton_mode() == "compiled":
        raise RuntimeError(
            f"backend='triton' on {tensor.device.type} tensors runs in Triton's interpreter, but kernels are "
            f"compiled in this process; start Python with {SWITCH}=1, or use backend='torch'"
        )


def checks_enabled() -> bool:
    """False inside `unchecked()` and while a call is traced: checks that would read values back are skipped.

    Example:
        >>> with cl.runtime.unchecked():
        ...     inside = cl.runtime.checks_enabled()
        >>> cl.runtime.checks_enabled(), inside
        (True, False)
    """
    return not is_traced() and _checked.get()


def is_traced() -> bool:
    """Whether a call is recorded rather than run, by torch.compile, torch.export, make_fx or among fake tensors, so
    that its tensors have neither values nor addresses."""
    if torch.compiler.is_compiling():
        return True
    if not dispatch_modes.is_in_torch_dispatch_mode():
        return False
    return any(mode.is_infra_mode() for mode in dispatch_modes._get_current_dispatch_mode_stack())


def is_transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, ...) is at work."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def refuse_transforms(function: str) -> None:
    """What a batch is, requests and rows say, and reverse mode is there.

    Raises:
        RuntimeError: a transform of torch.func is at work.
    """
    if is_transformed():
        raise RuntimeError(
            f"{function} takes no transform of torch.func (grad, vjp, jvp, vmap, ...); use torch.autograd.grad, and in "
            f"place of vmap more requests of one call, packed by cu_seqlens_q and page_table"
        )


def refuse_forward_mode(function: str, *tensors: torch.Tensor) -> None:
    """Derivatives here are reverse-mode.

    Raises:
        RuntimeError: a tensor carries a tangent, of torch.autograd.forward_ad or torch.func.jvp.
    """
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            f"{function} has no forward-mode derivative (torch.autograd.forward_ad, torch.func.jvp); use reverse mode: "
            f"torch.autograd.grad, or torch.autograd.functional.vjp"
        )


def count_write(*tensors: torch.Tensor) -> None:
    """Tell autograd that a kernel wrote into `tensors`, as an operator of torch would by itself."""
    for x in tensors:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


def outside_autocast(function: Callable) -> Callable:
    """Decorate arithmetic that chooses its own precision: inside torch.autocast, which rounds products to half, it is
    what it is outside. The device is that of the first tensor among the arguments."""

    @functools.wraps(function)
    def run(*args):
        if not torch._C._is_any_autocast_enabled():
            return function(*args)
        kind = next(x for x in args if isinstance(x, torch.Tensor)).device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return function(*args)
        with torch.autocast(kind, enabled=False):
            return function(*args)

    return run


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Make the checks that read values, inside `unchecked()` too: what counts instead of running has no other use."""
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Skip the checks that read tensors' values back (page indices, lengths), as CUDA graph capture needs.

    torch.compile has no values to read, so compiled calls skip them everywhere.

    Shapes, dtypes, devices and strides are still checked, but not whether an output lies in an input's memory. Wrong
    values inside are undefined behaviour.

    Check once, then run unchecked: layers of a model read by the same plan. The checks of a naive plan of 960 virtual
    requests over 8,000 tokens each take 25 ms of a core in every call and 0.01 ms in here, those of its cascade 0.7 ms
    and 0.02 ms.

    Example:
        >>> batch = cl.VerifyBatch([20, 9], [cl.DraftTree.chain(3), cl.DraftTree.branches(2, 2)])
        >>> plan = batch.levels("naive")
        >>> q, (k, v) = torch.randn(7, 2, 8), torch.randn(2, batch.num_pages, 16, 1, 8)
        >>> first = cl.cascade_attention(q, k, v, plan)  # the first layer looks at every page id
        >>> with cl.runtime.unchecked():  # the layers behind it read by the same plan
        ...     second = cl.cascade_attention(q, k, v, plan)
        >>> torch.equal(first.o, second.o)
        True
    """
    if torch.compiler.is_compiling():  # skipped already, and a context variable cannot be set while tracing
        yield
        return
    token = _checked.set(False)
    try:
        yield
    finally:
        _checked.reset(token)


def require_compiled() -> None:
    """Import Triton in compiled mode.

    Raises:
        RuntimeError: Triton is missing, or kernels are interpreted in this process.
    """
    if _interpreting():
        raise RuntimeError(f"kernels are interpreted in this process; start Python with {SWITCH}=0")
    require_triton()


def pretended_target() -> Target | None:
    """The target that CPU tensors stand for, inside `pretend_target` or by CASCADE_LAB_TARGET, else None."""
    current = _current()
    return None if current is None else current[0]


@contextlib.contextmanager
def pretend_target(target: Target, executed: bool = False) -> Iterator[None]:
    """Inside, backend="triton" takes CPU tensors and launches as it would for tensors on a device of `target`.

    It chooses tiles and splits; what a launch then does is the business of the active Triton driver, and
    `cascade_lab.evidence.driver` has one that needs no device. `executed` says that this one executes what is compiled.

    Raises:
        RuntimeError: Triton is missing, or kernels are interpreted in this process.
    """
    require_compiled()
    token = _pretended.set((target, executed))
    try:
        yield
    finally:
        _pretended.reset(token)


def device_target(device: torch.device) -> Target:
    """What launches on `device` are compiled for; the interpreter takes that of sm_90, without multiprocessors."""
    pretended = pretended_target()
    if pretended is not None:
        return pretended
    if triton_mode() == "interpreted":
        return replace(TARGETS["sm_90"], multiprocessors=0)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        # "gfx942:sramecc+:xnack-"; a block has all of the memory without opting in
        name, shared_bytes = properties.gcnArchName.split(":")[0], properties.shared_memory_per_block
    else:
        name = f"sm_{properties.major}{properties.minor}"
        shared_bytes = properties.shared_memory_per_block_optin
    return Target(name, properties.multi_processor_count, shared_bytes)


def provenance() -> dict[str, str]:
    """What ran: versions, platform, device and Triton mode, as strings for a record or a notebook's last cell.

    Example:
        >>> sorted(cl.runtime.provenance())
        ['cores', 'device', 'numpy', 'python', 'system', 'torch', 'triton', 'triton mode']
    """
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    where = device()
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else platform.machine()
    return versions | {
        "system": platform.system(),
        "device": f"{where.type} ({name})",
        "cores": str(os.cpu_count()),
        "triton mode": f"executed for {_current()[0].name}" if triton_mode() == "executed" else triton_mode(),
    }
