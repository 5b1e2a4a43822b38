"""The load recorder: an independent witness of what a Triton kernel reads and writes.

In interpreter mode every load, store and atomic of a kernel is one call with explicit addresses.
`record_loads` stands between the kernel and memory, so it counts bytes issued, bytes touched at least once
(`distinct <= loaded`, with equality exactly when nothing is read twice), and which program read which row,
and it stops a launch whose access lies outside every tensor that it knows. It says nothing about caches or
time, and sees nothing of a compiled launch.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cascade_lab import runtime

__all__ = ["Launch", "OutOfBounds", "Program", "Record", "TensorRecord", "record_loads"]


class OutOfBounds(RuntimeError):
    """A kernel touched memory that belongs to no registered tensor; raised in place of the access.

    Example:
        >>> from cascade_lab.evidence.reads import OutOfBounds, record_loads
        >>> o, lse = torch.ones(2, 1, 16), torch.zeros(2, 1)  # neither named nor allocated inside
        >>> with record_loads():
        ...     try:
        ...         cl.merge_state(o, lse, o, lse, backend="triton")
        ...     except OutOfBounds as error:
        ...         print(str(error)[:15])
        load of 4 bytes
    """


@dataclass(frozen=True)
class Launch:
    """One kernel launch: the kernel's name and its grid, always three numbers.

    Example:
        >>> from cascade_lab.evidence.reads import record_loads
        >>> with record_loads() as record:
        ...     a, b, lse = torch.ones(2, 1, 16), torch.ones(2, 1, 16), torch.zeros(2, 1)
        ...     record.register(a=a, b=b)
        ...     o, _ = cl.merge_state(a, lse, b, lse, backend="triton")
        >>> [(launch.kernel, len(launch.grid)) for launch in record.launches]
        [('_merge_pair_kernel', 3)]
    """

    kernel: str
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Program:
    """One program: the index of its launch in `Record.launches` and its program id.

    Example:
        >>> from cascade_lab.evidence.reads import record_loads
        >>> with record_loads() as record:
        ...     a, b, lse = torch.ones(2, 1, 16), torch.ones(2, 1, 16), torch.zeros(2, 1)
        ...     record.register(a=a, b=b)
        ...     o, _ = cl.merge_state(a, lse, b, lse, backend="triton")
        >>> {program.launch for program in record["a"].rows_by_program()}  # of the first launch
        {0}
    """

    launch: int
    index: tuple[int, int, int]


class TensorRecord:
    """What the launches did to one tensor. Byte counts are Python integers.

    `loaded_bytes` counts lanes whose mask is true, `attempted_bytes` all lanes (of a load that spreads over
    several tensors, with the first of them), `distinct_bytes` what was loaded at least once; `stored_bytes`
    and `distinct_stored_bytes` likewise for stores; `atomic_bytes` counts atomic operations, which are
    neither loads nor stores here. A row is one index of all dimensions but the last, numbered in logical
    order.

    Example:
        >>> from cascade_lab.evidence.reads import record_loads
        >>> with record_loads() as record:
        ...     a, b, lse = torch.ones(2, 1, 16), torch.ones(2, 1, 16), torch.zeros(2, 1)
        ...     record.register(a=a, b=b)
        ...     o, _ = cl.merge_state(a, lse, b, lse, backend="triton")
        >>> record["a"].loaded_bytes, record["a"].rows.tolist()  # 2 rows of 16 numbers of 4 bytes
        (128, [0, 1])
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.dtype: torch.dtype = tensor.dtype
        self.itemsize: int = tensor.element_size()
        self.loaded_bytes: int = 0
        self.attempted_bytes = 0
        self.stored_bytes: int = 0
        self.atomic_bytes: int = 0
        self._start = tensor.data_ptr()
        self._dims = _strided_dims(tensor)
        self._extent = self.itemsize + sum((size - 1) * stride for size, stride, _ in self._dims)
        self._table: np.ndarray | None = None
        if not _nested(self._dims, self.itemsize):
            offsets = np.zeros(1, np.int64)
            weights = np.zeros(1, np.int64)
            for size, stride, weight in self._dims:
                step = np.arange(size, dtype=np.int64)
                offsets = (offsets[:, None] + step * stride).ravel()
                weights = (weights[:, None] + step * weight).ravel()
            self._table, first = np.unique(offsets, return_index=True)
            self._table_index = weights[first]
        self._numel = tensor.numel()
        self._seen: dict[str, np.ndarray] = {}
        self._rows: dict[Program, list[np.ndarray]] = {}

    @property
    def distinct_bytes(self) -> int:
        return int(np.unpackbits(self._flags("load")).sum())

    @property
    def distinct_stored_bytes(self) -> int:
        return int(np.unpackbits(self._flags("store")).sum())

    @property
    def rows(self) -> np.ndarray:
        """Distinct rows of which at least one byte was loaded, ascending, int64."""
        width = self.shape[-1] if self.shape else 1
        return np.flatnonzero(self._flags("load").reshape(-1, max(width, 1)).any(1))

    def rows_by_program(self) -> dict[Program, np.ndarray]:
        """Distinct rows each program loaded, in launch order; programs that loaded nothing are absent."""
        return {program: np.unique(np.concatenate(parts)) for program, parts in self._rows.items()}

    def _flags(self, kind: str) -> np.ndarray:
        """Per logical element one bit for each of its bytes that was loaded or stored; made on first use."""
        if kind not in self._seen:
            self._seen[kind] = np.zeros(self._numel, np.uint8)
        return self._seen[kind]

    def _locate(self, addresses: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per access of `width <= itemsize` bytes: is it inside, its logical element, its byte within it."""
        rest = (addresses - np.uint64(self._start)).astype(np.int64)
        inside = (rest >= 0) & (rest < self._extent)
        if self._table is not None:
            place = np.searchsorted(self._table, rest, side="right") - 1
            element = self._table_index[place]
            rest = rest - self._table[place]
        else:
            element = np.zeros_like(rest)
            for size, stride, weight in self._dims:
                step = rest // stride
                inside &= step < size
                rest = rest - step * stride
                element += step * weight
        return inside & (rest + width <= self.itemsize), element, rest

    def _add(self, kind: str, element: np.ndarray, byte: np.ndarray, width: int, program: Program) -> None:
        count = element.size * width
        if kind == "atomic":
            self.atomic_bytes += count
            return
        if kind == "store":
            self.stored_bytes += count
        else:
            self.loaded_bytes += count
            row = element // self.shape[-1] if self.shape else element
            self._rows.setdefault(program, []).append(np.unique(row))
        seen = self._flags(kind)
        if width == self.itemsize:
            seen[element] = (1 << width) - 1
        else:
            np.bitwise_or.at(seen, element, (((1 << width) - 1) << byte).astype(np.uint8))


def _strided_dims(tensor: Tensor) -> list[tuple[int, int, int]]:
    """(size, stride in bytes, logical weight), largest stride first, broadcasts dropped, fused."""
    weight = 1
    dims = []
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size > 1 and stride > 0:
            dims.append((size, stride * tensor.element_size(), weight))
        weight *= size
    dims.sort(key=lambda dim: -dim[1])
    fused: list[tuple[int, int, int]] = []
    for size, stride, weight in dims:
        if fused and fused[-1][1] == size * stride and fused[-1][2] == size * weight:
            fused[-1] = (fused[-1][0] * size, stride, weight)
        else:
            fused.append((size, stride, weight))
    return fused


def _nested(dims: list[tuple[int, int, int]], itemsize: int) -> bool:
    extent = itemsize
    for size, stride, _ in reversed(dims):
        if stride < extent:
            return False
        extent += (size - 1) * stride
    return True


@dataclass
class _Storage:
    """One allocation and its registered tensors; naming a view ends an anonymous whole."""

    start: int
    end: int
    keep: Tensor
    tensors: list[TensorRecord] = field(default_factory=list)
    anonymous: bool = False


class Record:
    """What `record_loads` saw. `record[name]` is a `TensorRecord`; `launches`, `dots` and totals cover all
    tensors.

    `dots` counts matrix products per (M, N, K), so executed tile elements are `sum(m * n * c for (m, n, _), c
    in ...)`.

    Example:
        >>> from cascade_lab.evidence.reads import record_loads
        >>> with record_loads() as record:
        ...     a, b, lse = torch.ones(2, 1, 16), torch.ones(2, 1, 16), torch.zeros(2, 1)
        ...     record.register(a=a, b=b)
        ...     o, _ = cl.merge_state(a, lse, b, lse, backend="triton")
        >>> len(record.launches), record["a"].distinct_bytes + record["b"].distinct_bytes
        (1, 256)
    """

    def __init__(self) -> None:
        self.tensors: dict[str, TensorRecord] = {}
        self.launches: list[Launch] = []
        self.dots: Counter[tuple[int, int, int]] = Counter()
        self._storages: dict[int, _Storage] = {}
        self._starts: list[int] = []
        self._allocations: Counter[str] = Counter()
        self._grid_index = (0, 0, 0)

    def __getitem__(self, name: str) -> TensorRecord:
        return self.tensors[name]

    @property
    def loaded_bytes(self) -> int:
        return sum(t.loaded_bytes for t in self.tensors.values())

    @property
    def stored_bytes(self) -> int:
        return sum(t.stored_bytes for t in self.tensors.values())

    def allocated(self) -> list[TensorRecord]:
        """Tensors that were allocated while recording and not named since, in order of allocation."""
        return [t for t in self.tensors.values() if ":" in t.name]

    def register(self, **tensors: Tensor | None) -> None:
        """Name tensors on the CPU; None is passed over.

        A view registers exactly its own elements, not the memory between them, and where registered views
        overlap, the one named first is charged. Naming a view of memory that was allocated while recording
        makes that memory strict: only its named views may be touched. ValueError for a name already used or a
        tensor that is not on the CPU.
        """
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if name in self.tensors:
                raise ValueError(f"{name}: already registered")
            if tensor.device.type != "cpu":
                raise ValueError(f"{name}: the interpreter works on CPU memory, given a tensor on {tensor.device}")
            self._insert(name, tensor, anonymous=False)

    def _insert(self, name: str, tensor: Tensor, anonymous: bool) -> None:
        self.tensors[name] = entry = TensorRecord(name, tensor)
        if tensor.numel() == 0:
            return
        memory = tensor.untyped_storage()
        storage = self._storages.get(memory.data_ptr())
        if storage is None:
            storage = _Storage(memory.data_ptr(), memory.data_ptr() + memory.nbytes(), tensor, anonymous=anonymous)
            self._storages[storage.start] = storage
            insort(self._starts, storage.start)
        elif storage.anonymous and not anonymous:
            for whole in storage.tensors:
                del self.tensors[whole.name]
            storage.tensors.clear()
            storage.anonymous = False
        storage.tensors.append(entry)

    def _allocate(self, operation: str, tensor: Tensor) -> None:
        if tensor.numel() and tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() not in self._storages:
            self._insert(f"{operation}:{self._allocations[operation]}", tensor.detach(), anonymous=True)
            self._allocations[operation] += 1

    def _storage_at(self, address: int) -> _Storage | None:
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        storage = self._storages[self._starts[place]]
        return storage if address < storage.end else None

    def _access(self, kind: str, addresses: np.ndarray, mask: np.ndarray, width: int) -> None:
        lanes = np.asarray(addresses, dtype=np.uint64).ravel()
        active = lanes[np.broadcast_to(np.asarray(mask, dtype=bool), np.shape(addresses)).ravel()]
        program = Program(len(self.launches) - 1, self._grid_index)
        owner = None
        left = active
        while left.size:
            storage = self._storage_at(int(left[0]))
            found = False
            for entry in storage.tensors if storage else ():
                piece = min(width, entry.itemsize)
                parts = (
                    left if piece == width else (left[:, None] + np.arange(0, width, piece, dtype=np.uint64)).ravel()
                )
                inside, element, byte = entry._locate(parts, piece)
                whole = inside if piece == width else inside.reshape(left.size, -1).all(1)
                if not whole.any():
                    continue
                taken = np.repeat(whole, parts.size // left.size)
                entry._add(kind, element[taken], byte[taken], piece, program)
                owner = owner or entry
                left = left[~whole]
                found = True
                break
            if not found:
                raise OutOfBounds(self._describe(kind, int(left[0]), width))
        if kind == "load":
            if owner is None and lanes.size:
                owner = self._nearest(int(lanes[0]))
            if owner is not None:
                owner.attempted_bytes += lanes.size * width

    def _nearest(self, address: int) -> TensorRecord | None:
        def distance(entry: TensorRecord) -> int:
            return max(entry._start - address, address - (entry._start + entry._extent) + 1, 0)

        entries = [entry for storage in self._storages.values() for entry in storage.tensors]
        return min(entries, key=distance, default=None)

    def _describe(self, kind: str, address: int, width: int) -> str:
        launch = self.launches[-1] if self.launches else Launch("?", (0, 0, 0))
        text = f"{kind} of {width} bytes at 0x{address:x} in kernel {launch.kernel}"
        text = f"{text}, program {self._grid_index} of {launch.grid}"
        near = self._nearest(address)
        if near is None:
            return f"{text}: no tensor is registered"
        offset = address - near._start
        if 0 <= offset < near._extent:
            place = f"between the elements of {near.name}, {offset} bytes after its start"
        elif offset < 0:
            place = f"{-offset} bytes before the start of {near.name}"
        else:
            place = f"{offset - near._extent} bytes past the end of {near.name}"
        return f"{text}: outside every registered tensor, {place} (shape {list(near.shape)}, {near.dtype})"


_UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}


class Poisoned(TorchDispatchMode):
    """Fills tensors that torch leaves uninitialised: floats with NaN, integers with their largest value."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if _operation(func) in _UNINITIALISED:
            _poison(result)
        return result


def _operation(func) -> str:
    return func._schema.name.split("::")[-1]


def _poison(tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


class _Allocations(Poisoned):
    """Registers every tensor that a torch operation creates and poisons the uninitialised ones."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        operation = _operation(func)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for output, schema in zip(outputs, func._schema.returns, strict=False):
            if not isinstance(output, Tensor) or output.layout != torch.strided:
                continue
            if schema.alias_info is not None and operation != "lift_fresh":
                continue
            inputs = (
                a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor) and a.layout == torch.strided
            )
            if operation == "lift_fresh" or output.untyped_storage().data_ptr() not in inputs:
                self.record._allocate(operation, output)
        return result


_active: Record | None = None


@contextmanager
def record_loads(**tensors: Tensor | None) -> Iterator[Record]:
    """Record every access of the interpreted launches made inside, and hold them to registered memory.

    `tensors` are named as in `Record.register`, which may also be called inside. Every tensor that torch
    allocates inside is known as `operation:number`; uninitialised ones are filled with NaN (integers with
    their largest value), so that an element nobody wrote shows. A load, store or atomic outside known memory
    raises `OutOfBounds` at once. RuntimeError when nested, when Triton runs compiled, or when a compiled
    kernel is launched inside. The interpreter is restored on the way out, whatever happens.

    A kernel of one's own is interpreted when `runtime.jit` decorates it, or `triton.jit` under TRITON_INTERPRET=1. One
    thread at a time: what other threads launch is recorded as well, and what they allocate is not known.

    Example:
        >>> from cascade_lab.evidence.reads import record_loads
        >>> with record_loads() as record:
        ...     q, (k, v) = torch.randn(1, 1, 16), torch.randn(2, 4, 2, 1, 16)  # 4 pages of 2 tokens
        ...     record.register(k=k, v=v)
        ...     pages, lens = torch.tensor([[3, 0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
        ...     o, lse = cl.attention(q, k, v, pages, lens, backend="triton")
        >>> record["k"].rows.tolist()  # both tokens of page 3, and the first of page 0
        [0, 6, 7]
    """
    global _active
    if _active is not None:
        raise RuntimeError("record_loads cannot be nested: one recorder is already active")
    runtime.require_triton()
    if runtime.triton_mode() != "interpreted":
        raise RuntimeError(
            f"record_loads sees interpreted launches only, and Triton runs {runtime.triton_mode()} here: "
            f"start Python with {runtime.SWITCH}=1"
        )
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    record = Record()
    record.register(**tensors)

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    saved = [
        (builder, name, builder.__dict__[name])
        for name in (
            "create_masked_load",
            "create_masked_store",
            "create_atomic_rmw",
            "create_atomic_cas",
            "create_dot",
            "set_grid_dim",
        )
    ]
    saved += [(executor, "__call__", executor.__call__), (JITFunction, "run", JITFunction.run)]
    load, store, atomic_rmw, atomic_cas, dot, grid_dim, launch, _ = (original for _, _, original in saved)

    def width(pointers) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def access(kind: str, self, pointers, mask) -> None:
        record._grid_index = tuple(self.grid_idx)
        record._access(kind, pointers.data, mask if isinstance(mask, np.ndarray) else mask.data, width(pointers))

    def create_masked_load(self, ptrs, mask, *args, **kwargs):
        access("load", self, ptrs, mask)
        return load(self, ptrs, mask, *args, **kwargs)

    def create_masked_store(self, ptrs, value, mask, *args, **kwargs):
        access("store", self, ptrs, mask)
        return store(self, ptrs, value, mask, *args, **kwargs)

    def create_atomic_rmw(self, operation, ptr, value, mask, *args, **kwargs):
        access("atomic", self, ptr, mask)
        return atomic_rmw(self, operation, ptr, value, mask, *args, **kwargs)

    def create_atomic_cas(self, ptr, *args, **kwargs):
        access("atomic", self, ptr, np.ones_like(ptr.data, dtype=bool))
        return atomic_cas(self, ptr, *args, **kwargs)

    def create_dot(self, a, b, *args, **kwargs):
        m, k = a.data.shape[-2:]
        record.dots[m, b.data.shape[-1], k] += math.prod(a.data.shape[:-2])
        return dot(self, a, b, *args, **kwargs)

    def set_grid_dim(self, *grid):
        record.launches[-1] = replace(record.launches[-1], grid=grid)
        return grid_dim(self, *grid)

    def launch_recorded(self, *args, **kwargs):
        record.launches.append(Launch(self.fn.__name__, (0, 0, 0)))
        try:
            return launch(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, OutOfBounds):
                    raise cause from None
                cause = cause.__cause__
            raise

    def launch_compiled(self, *args, **kwargs):
        raise RuntimeError(
            f"kernel {self.__name__} was compiled, so record_loads cannot see it: "
            f"decorate it with cascade_lab.runtime.jit, or set {runtime.SWITCH} before @triton.jit decorates"
        )

    wrappers = (create_masked_load, create_masked_store, create_atomic_rmw, create_atomic_cas, create_dot)
    wrappers += (set_grid_dim, launch_recorded, launch_compiled)
    try:
        _active = record
        for (owner, name, _), wrapper in zip(saved, wrappers, strict=True):
            setattr(owner, name, wrapper)
        with _Allocations(record):
            yield record
    finally:
        for owner, name, original in saved:
            setattr(owner, name, original)
        record._storages.clear()
        record._starts.clear()
        _active = None
