"""What a reader may change in a notebook: the literals of its one cell tagged `parameters`.

The cell is read as syntax, never executed: `name: type = literal  # comment`. Its annotations, or else its
literals, say which values are accepted; everything derived from a parameter belongs into a later cell.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from cascade_lab.files import UsageError, one_line

TAG = "parameters"
_SCALARS = {"int": int, "float": float, "bool": bool, "str": str}


class NotebookError(Exception):
    """A notebook that cannot be trusted.

    Attributes:
        cell: position in the notebook file, counted from 1 over all cells; None when no single cell is at
            fault.
        cause: what is wrong, in one line.
    """

    def __init__(self, cause: str, cell: int | None = None):
        self.cause = one_line(cause)
        super().__init__(self.cause if cell is None else f"cell {cell}: {self.cause}")
        self.cell = cell


@dataclass(frozen=True)
class Parameter:
    """One assignment of the parameters cell; `type` is int, float, bool, str, list[...] or ... | None."""

    name: str
    type: str
    default: object

    def accept(self, value: object) -> object:
        """`value` in the parameter's type; text for a parameter that is not text is read as a Python literal.

        Raises:
            UsageError: the value is of another type, or not finite.
        """
        given = value
        optional = self.type.endswith(" | None")
        plain = self.type.removesuffix(" | None")
        if isinstance(value, str) and (plain != "str" or (optional and value == "None")):
            text = value.strip()
            try:
                value = _literal({"true": "True", "false": "False"}.get(text, text))
            except ValueError:
                raise self._refusal(given) from None
        if value is None and optional:
            return None
        if plain.startswith("list"):
            item = plain[5:-1]
            if not isinstance(value, list) or not all(_is(item, each) for each in value):
                raise self._refusal(given)
            return [_SCALARS[item](each) for each in value]
        if not _is(plain, value):
            raise self._refusal(given)
        return _SCALARS[plain](value)

    def _refusal(self, given: object) -> UsageError:
        return UsageError(f"parameter {self.name!r}: expected {self.type}, given {one_line(repr(given), 80)}")


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
    if isinstance(default, str) and not parameter.type.startswith("str"):
        raise ValueError(f"the value is not of type {parameter.type}")
    try:
        parameter.accept(default)
    except UsageError:
        raise ValueError(f"the value is not of type {parameter.type}") from None
    return parameter


def _type_named(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = parse(annotation.value, "eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"unknown type {annotation.value!r}") from None
    match annotation:
        case ast.Name(id=name) if name in _SCALARS:
            return name
        case ast.Subscript(value=ast.Name(id="list"), slice=ast.Name(id=name)) if name in _SCALARS:
            return f"list[{name}]"
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            return f"{_type_named(left).removesuffix(' | None')} | None"
    raise ValueError(
        f"unknown type {ast.unparse(annotation)!r}; known are {', '.join(_SCALARS)}, list[...] of these and ... | None"
    )


def _type_of(value: object) -> str:
    if isinstance(value, list):
        kinds = {_type_of(item) for item in value}
        if kinds == {"int", "float"}:
            return "list[float]"
        if len(kinds) == 1 and (kind := kinds.pop()) in _SCALARS:
            return f"list[{kind}]"
    elif type(value).__name__ in _SCALARS:
        return type(value).__name__
    raise ValueError("the value needs a type annotation, or is of a kind that cannot be a parameter")


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(parse(text, "eval"))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(text) from None


def _is(type_name: str, value: object) -> bool:
    if type_name == "float":
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and abs(value) <= sys.float_info.max
    return type(value) is _SCALARS[type_name]
