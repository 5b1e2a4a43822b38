"""How the kernels of this package come to run: compiled by Triton, or interpreted, each for this package alone.

`triton.jit` asks TRITON_INTERPRET when it decorates, and so decides for a whole process and its children. `jit` here
asks `runtime` once, for our kernels, and leaves the environment, Triton's own switch and everybody else's kernels as
they are. An interpreted launch borrows `triton.language`, whose functions Triton's interpreter replaces while a kernel
runs: launches take turns, and after each every name is what it was. What another thread compiles meanwhile, or
interprets by `triton.jit`, is not kept apart.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from types import FunctionType

from triton import language
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, mangle_type

from cascade_lab import runtime


def jit(fn: Callable) -> JITFunction | InterpretedFunction:
    """Decorate a kernel or one of its parts, as `triton.jit` does, for the mode that `runtime` has chosen."""
    return InterpretedKernel(fn) if runtime.settle_mode() else JITFunction(fn)


_kept = threading.local()


def run_kernel(kernel: JITFunction | InterpretedFunction, grid: tuple[int, ...], *args, **kwargs) -> None:
    """Launch a kernel; inside `kept_launches`, a compiled one is noted with its arguments."""
    compiled = kernel[grid](*args, **kwargs)
    found = getattr(_kept, "launches", None)
    if found is not None and isinstance(kernel, JITFunction):
        rest = [kwargs[name] for name in kernel.arg_names[len(args) :]]
        found.append((compiled[(*grid, 1, 1)[:3]], (*args, *rest)))


@contextlib.contextmanager
def kept_launches() -> Iterator[list[tuple[Callable, tuple]]]:
    """What this thread launches inside the block: what launches the compiled kernel again, and its arguments.

    The list stays empty where kernels are interpreted. A launch from it costs neither the binding of arguments nor the
    search for the kernel that fits them, so its arguments must be as they were but for the tensors, and these as
    aligned as they were.
    """
    before, _kept.launches = getattr(_kept, "launches", None), []
    try:
        yield _kept.launches
    finally:
        _kept.launches = before


class InterpretedKernel(InterpretedFunction):
    """A function that Triton's interpreter runs, however `triton.jit` decorates in this process."""

    def run(self, *args, grid, warmup, **kwargs):
        with _language():
            return super().run(*args, grid=grid, warmup=warmup, **kwargs)

    def __call__(self, *args, **kwargs):
        """A call from within a kernel, whose launch has the language in its hands."""
        return self.rewrite()(*args, **kwargs)


# Triton imports more when it first looks at an argument, and that takes names of the language over: so before borrowing
mangle_type(0)

_launching = threading.RLock()
# a fork waits for the launch of another thread, whose language its child could not give back
os.register_at_fork(before=_launching.acquire, after_in_parent=_launching.release, after_in_child=_launching.release)

# as `triton.jit` has defined the functions of Triton's own library
_LIBRARY = (JITFunction, InterpretedFunction)
_NAMESPACES = (
    language,
    language.core,
    language.math,
    language.standard,
    language.tensor,
    language.dtype,
    language.core.tensor_descriptor_base,
)


@contextlib.contextmanager
def _language() -> Iterator[None]:
    """`triton.language` as interpreted kernels need it, for one thread, and back as it was."""
    with _launching:
        before = [dict(vars(space)) for space in _NAMESPACES]
        try:
            for space in (language, language.standard, language.tensor):
                for name, value in vars(space).copy().items():
                    if isinstance(value, _LIBRARY):
                        setattr(space, name, _interpreted(value) if space is not language.tensor else _method(value))
            # what the library of the language is written in
            interpreter._patch_lang(language.standard.sum.fn)
            yield
        finally:
            for space, names in zip(_NAMESPACES, before, strict=True):
                _restore(space, names)


def _restore(space, names: dict) -> None:
    for name, value in vars(space).copy().items():
        if name not in names:
            delattr(space, name)
        elif names[name] is not value:
            setattr(space, name, names[name])


# functions of the language's library, interpreted, by the globals that they had; each library keeps globals of its own
_libraries: dict[int, dict] = {}


def _interpreted(function: JITFunction | InterpretedFunction) -> InterpretedKernel:
    """A function of Triton's library as the interpreter takes it; the same object in every launch."""
    names = function.fn.__globals__
    if id(names) not in _libraries:
        library = _libraries[id(names)] = dict(names)
        for name, value in names.items():
            if isinstance(value, _LIBRARY):
                library[name] = _interpreted(value) if value.fn.__globals__ is not names else _copy(value.fn, library)
    return _libraries[id(names)][function.fn.__name__]


def _copy(fn: FunctionType, names: dict) -> InterpretedKernel:
    copy = FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = fn.__kwdefaults__, fn.__annotations__
    return InterpretedKernel(copy)


def _method(function: JITFunction | InterpretedFunction) -> Callable:
    return lambda *args, **kwargs: _interpreted(function)(*args, **kwargs)
