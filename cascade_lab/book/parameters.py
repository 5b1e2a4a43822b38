"""What a reader may change in a notebook: the literals of its one cell tagged `parameters`.

The cell is read as syntax, never executed: `name: type = literal  # comment`. Its annotations, or else its
literals, say which values are accepted; everything derived from a parameter belongs in a later cell.
"""

from __future__ import annotations

import ast
import contextlib
import json
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cascade_lab.files import UsageError, one_line

TAG = "parameters"
_SCALARS = {"int": int, "float": float, "bool": bool, "str": str}
_OPEN = {"list": list, "dict": dict}


class NotebookError(Exception):
    """A notebook that cannot be trusted.

    Attributes:
        cell: position in the notebook file, counted from 1 over all cells; None when no single cell is at
            fault.
        cause: what is wrong, in one line.
    """

    def __init__(self, cause: str, cell: int | None = None):
        self.cause: str = one_line(cause)
        super().__init__(self.cause if cell is None else f"cell {cell}: {self.cause}")
        self.cell = cell


@dataclass(frozen=True)
class Parameter:
    """One assignment of the parameters cell.

    `type` is int, float, bool, str, list[...] or dict[..., ...] of types, some of these with | between them, or
    | None; `list` and `dict` alone hold anything that a literal can.
    """

    name: str
    type: str
    default: object

    def accept(self, value: object) -> object:
        """`value` in the parameter's type; text for a parameter that is not text is read as a Python or JSON literal.

        Raises:
            UsageError: the value is of another type, or not finite.
        """
        kind = parse(self.type, "eval").body
        readings = [value]
        if isinstance(value, str) and self.type != "str":
            # text may be meant as it stands where the type has text too, and then it is so at last
            readings = [*_literals(value.strip()), *(readings if _has_text(kind) else [])]
        for reading in readings:
            with contextlib.suppress(ValueError):
                return _converted(kind, reading)
        raise UsageError(f"parameter {self.name!r}: expected {self.type}, given {one_line(repr(value), 80)}")


def read_parameters(notebook: Mapping) -> dict[str, Parameter]:
    """The parameters of a notebook by name, in order.

    Raises:
        NotebookError: there is not exactly one parameters cell, or it holds anything but assignments of
            literals.
    """
    tagged = [i for i, c in enumerate(notebook["cells"], 1) if TAG in c.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        raise NotebookError(
            f"expected exactly one cell tagged {TAG!r}, found {len(tagged)}", tagged[1] if tagged else None
        )
    (number,) = tagged
    cell = notebook["cells"][number - 1]
    if cell["cell_type"] != "code":
        raise NotebookError(f"the {TAG} cell is not a code cell", number)
    try:
        body = parse(cell["source"]).body
    except SyntaxError as error:
        raise NotebookError(f"the {TAG} cell is not plain Python: {error.msg} (line {error.lineno})", number) from None
    except (ValueError, RecursionError, MemoryError) as error:
        cause = str(error) or "nested too deep"
        raise NotebookError(f"the {TAG} cell is not plain Python: {cause}", number) from None
    parameters: dict[str, Parameter] = {}
    for statement in body:
        try:
            parameter = _parameter(statement)
        except ValueError as error:
            line = one_line(ast.unparse(statement).splitlines()[0], 60)
            raise NotebookError(f"the {TAG} cell holds `{line}`: {error}", number) from None
        if parameter.name in parameters:
            raise NotebookError(f"the {TAG} cell assigns {parameter.name!r} twice", number)
        parameters[parameter.name] = parameter
    return parameters


def parse(source: str, mode: str = "exec") -> ast.Module | ast.Expression:
    """Python source as syntax, without the warnings that a parser prints about a stranger's style.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as `ast.parse` for what is no Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source, mode=mode)


def bind(parameters: Mapping[str, Parameter], given: Mapping[str, object], notebook: str) -> dict[str, object]:
    """The given values in the types of the notebook's parameters.

    Raises:
        UsageError: a name the notebook does not have, with those it has; or a value of the wrong type.
    """
    for name in given:
        if name not in parameters:
            known = ", ".join(f"{p.name}: {p.type} = {p.default!r}" for p in parameters.values()) or "none"
            raise UsageError(f"{notebook}: unknown parameter {name!r}; its parameters are {known}")
    try:
        return {name: parameters[name].accept(value) for name, value in given.items()}
    except UsageError as error:
        raise UsageError(f"{notebook}: {error}") from None


def _parameter(statement: ast.stmt) -> Parameter:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            annotation = None
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value, annotation=annotation):
            pass
        case _:
            raise ValueError("only `name = literal` or `name: type = literal` may stand there")
    try:
        default = ast.literal_eval(value)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError("the value is not a literal") from None
    parameter = Parameter(name, _type_of(default) if annotation is None else _type_named(annotation), default)
    try:
        _converted(parse(parameter.type, "eval").body, default)
    except ValueError:
        raise ValueError(f"the value is not of type {parameter.type}") from None
    return parameter


def _type_named(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = parse(annotation.value, "eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"unknown type {annotation.value!r}") from None
    try:
        _check_type(annotation)
    except (ValueError, RecursionError):
        raise ValueError(
            f"unknown type {one_line(ast.unparse(annotation), 60)!r}; known are {', '.join(_SCALARS)}, "
            "list[...] and dict[..., ...] of these, and | between them or before None"
        ) from None
    return ast.unparse(annotation)


def _check_type(kind: ast.expr) -> None:
    """Raises ValueError for what `_converted` does not know."""
    match kind:
        case ast.Name(id=name) if name in _SCALARS or name in _OPEN:
            return
        case ast.Constant(value=None):
            return
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            _check_type(item)
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[key, item])):
            _check_type(key)
            _check_type(item)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            _check_type(left)
            _check_type(right)
        case _:
            raise ValueError(ast.unparse(kind))


def _converted(kind: ast.expr, value: object) -> object:
    """`value` as one of the type `kind`, integers as floats where floats are expected.

    Raises:
        ValueError: it is of another type.
    """
    match kind:
        case ast.Constant(value=None) if value is None:
            return None
        case ast.Name(id=name) if name in _SCALARS and _is(name, value):
            return _SCALARS[name](value)
        case ast.Name(id=name) if name in _OPEN and type(value) is _OPEN[name]:
            _check_finite(value)
            return value
        case ast.Subscript(value=ast.Name(id="list"), slice=item) if isinstance(value, list):
            return [_converted(item, each) for each in value]
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[key, item])) if isinstance(value, dict):
            return {_converted(key, k): _converted(item, each) for k, each in value.items()}
        case ast.BinOp(left=left, right=right):
            try:
                return _converted(left, value)
            except ValueError:
                return _converted(right, value)
    raise ValueError(value)


def _check_finite(value: object) -> None:
    """Raises ValueError for a literal that holds what no notebook and no JSON can."""
    if isinstance(value, list):
        for each in value:
            _check_finite(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            _check_finite(key)
            _check_finite(each)
    elif value is not None and not any(_is(name, value) for name in _SCALARS):
        raise ValueError(value)


def _has_text(kind: ast.expr) -> bool:
    match kind:
        case ast.BinOp(left=left, right=right):
            return _has_text(left) or _has_text(right)
    return isinstance(kind, ast.Name) and kind.id == "str"


def _type_of(value: object) -> str:
    """The type that a literal shows: its own, or of the items that it holds."""
    if isinstance(value, list) and value:
        return f"list[{_union(value)}]"
    if isinstance(value, dict) and value:
        return f"dict[{_union(value)}, {_union(value.values())}]"
    if type(value).__name__ in _SCALARS:
        return type(value).__name__
    raise ValueError("the value needs a type annotation, or is of a kind that cannot be a parameter")


def _union(values: Iterable[object]) -> str:
    """The types of the values in the order in which they come; an empty item could hold anything."""
    empty = {list: "list", dict: "dict", type(None): "None"}
    kinds = [empty[type(v)] if type(v) in empty and not v else _type_of(v) for v in values]
    if "float" in kinds:
        kinds = [kind for kind in kinds if kind != "int"]
    return " | ".join(dict.fromkeys(kinds))


def _literals(text: str) -> list[object]:
    """What a text says as a Python literal or as JSON; {"a": true} is no Python, and (1, 2) no JSON."""
    found = []
    for read in (lambda: ast.literal_eval(parse(text, "eval")), lambda: json.loads(text)):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            found.append(read())
    return found


def _is(type_name: str, value: object) -> bool:
    if type_name == "float":
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and abs(value) <= sys.float_info.max
    return type(value) is _SCALARS[type_name]
