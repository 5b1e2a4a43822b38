"""The checks of arguments that all public functions share: one of integers, one of tensors.

A value of the wrong kind raises TypeError, a wrong value ValueError, and the text is always "name: expected ..., given
...". Integers are Python's, and NumPy's and torch's of no dimension; a bool is none. What an argument means, and
whether two of them fit, is not known here.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable

import numpy as np
import torch


def integer(name: str, x, low: int | None = None, high: int | None = None) -> int:
    """`x` as a Python integer within the bounds that are given."""
    if type(x) is not int:
        x = _index(name, x)
    if (low is not None and x < low) or (high is not None and x > high):
        bounds = f"a number >= {low}" if high is None else f"an integer from {low} to {high}"
        raise ValueError(f"{name}: expected {bounds}, given {shown(x)}")
    return x


def heads(num_q_heads, num_kv_heads) -> tuple[int, int]:
    """Head counts, the first a multiple of the second."""
    num_kv_heads = integer("num_kv_heads", num_kv_heads, 1)
    num_q_heads = integer("num_q_heads", num_q_heads)
    if num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads: expected a positive multiple of num_kv_heads = {num_kv_heads}, given {num_q_heads}"
        )
    return num_q_heads, num_kv_heads


def integers(name: str, x, low: int = 0) -> int | np.ndarray:
    """A Python integer, or an array of integers as it is, none below `low`."""
    if not isinstance(x, np.ndarray) or x.ndim == 0:
        return integer(name, x, low)
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, given {shown(x)}")
    if x.size and x.min() < low:
        raise ValueError(f"{name}: expected numbers >= {low}, given {int(x.min())}")
    return x


def integer_list(name: str, x: Iterable, low: int | None = 0) -> list[int]:
    """The integers of an iterable, one-dimensional array or tensor as Python's, none below `low`."""
    array = isinstance(x, (torch.Tensor, np.ndarray))
    if isinstance(x, str) or not isinstance(x, Iterable) or (array and x.ndim != 1):
        raise TypeError(f"{name}: expected a sequence of integers, given {shown(x)}")
    values = x.tolist() if array else list(x)
    for i, n in enumerate(values):
        if type(n) is not int or (low is not None and n < low):
            values[i] = integer(f"{name}[{i}]", n, low)
    return values


def number(name: str, x, low: float = -math.inf, high: float = math.inf) -> int | float:
    """`x`, a real number within bounds; the caller refuses NaN and infinity where no bound does."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        if isinstance(x, numbers.Number) or not hasattr(x, "__index__"):
            raise TypeError(f"{name}: expected a number, given {shown(x)}")
        x = _index(name, x, "a number")
    if not low <= x <= high and (low, high) != (-math.inf, math.inf):
        bounds = f"a number >= {low}" if high == math.inf else f"a number in [{low}, {high}]"
        raise ValueError(f"{name}: expected {bounds}, given {shown(x)}")
    return x


def _index(name: str, x, expected: str = "an integer") -> int:
    if not isinstance(x, bool) and not (isinstance(x, torch.Tensor) and (x.dim() or x.dtype == torch.bool)):
        try:
            return operator.index(x)
        except (TypeError, RuntimeError):  # torch's own on a tensor without data
            pass
    raise TypeError(f"{name}: expected {expected}, given {shown(x)}")


def tensor(
    name: str,
    x,
    layout: str = "",
    sizes: tuple[int, ...] = (),
    *,
    dtypes: tuple[torch.dtype, ...] = (),
    like: tuple[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`x`, a tensor.

    Args:
        layout: names of its dims, "[T, H_q]".
        sizes: of all dims, where they are known.
        dtypes: those allowed.
        like: name and tensor on whose device it has to be.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, given {type(x).__name__}")
    if dtypes and x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {dtype_names(dtypes)}, given {x.dtype}")
    if x.shape != sizes if sizes else layout and x.dim() != layout.count(",") + 1:
        wanted = f"{layout} = {list(sizes)}" if sizes else layout
        raise ValueError(f"{name}: expected {wanted}, given shape {tuple(x.shape)}")
    if like is not None and x.device != like[1].device:
        raise ValueError(f"{name}: expected device {like[1].device} as {like[0]}, given {x.device}")
    return x


def unit_stride(name: str, x: torch.Tensor) -> None:
    """Refuse a tensor whose last dim is not contiguous; strides of one without elements do not matter."""
    if x.shape[-1] > 1 and x.stride(-1) != 1 and x.numel():
        raise ValueError(f"{name}: expected unit stride in the last dim, given strides {x.stride()}")


def dtype(name: str, x) -> torch.dtype:
    """`x`, a dtype."""
    if not isinstance(x, torch.dtype):
        raise TypeError(f"{name}: expected a torch.dtype, given {shown(x)}")
    return x


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """Their names in a message: "int32", or "float32, float16 or bfloat16"."""
    names = [str(x).removeprefix("torch.") for x in dtypes]
    return " or ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def shown(x) -> str:
    """A value in a message, in one line of bounded length."""
    if isinstance(x, (torch.Tensor, np.ndarray)) and x.ndim:
        kind = "a tensor" if isinstance(x, torch.Tensor) else "an array"
        return f"{kind} of {str(x.dtype).removeprefix('torch.')} with shape {tuple(x.shape)}"
    if isinstance(x, int) and abs(x) >= 10**30:
        return "an integer of over 30 digits"
    text = " ".join(repr(x).split())
    return text if len(text) <= 80 else f"{type(x).__name__} {text[:60]}..."
