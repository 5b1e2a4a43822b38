"""The API reference: one page for each public module, made of its docstrings.

pdoc reads the modules; the pages have the look of the site and need no script. Public is what has a docstring and no
leading underscore, in the package's own modules, less those that only run or prove it.
"""

from __future__ import annotations

import html
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pdoc.doc
import pdoc.docstrings

import cascade_lab
from cascade_lab.book import markdown
from cascade_lab.book.export import render

PACKAGE = "cascade_lab"
# What a notebook's author calls besides the package; everything else in evidence is for the runner.
WITH_EVIDENCE = ("evidence.claims",)
_LEFT_OUT = ("__main__", "backends", "cli", "evidence", "bench", "book", "files", "ops", "pictures", "trace_report")
_WIDE = 96


@dataclass(frozen=True)
class Entry:
    """One documented name: a function, a class, a method or a property."""

    name: str
    anchor: str
    signature: str
    text: str
    parts: tuple[Entry, ...] = ()


def pages(navigation: Sequence[tuple[str, str, str]]) -> Iterator[tuple[str, str]]:
    """(file name, page) of the package and of each module; links among them are relative.

    Args:
        navigation: as for a notebook's page; addresses as seen from the folder above.
    """
    shown = {name: pdoc.doc.Module(importlib.import_module(f"{PACKAGE}.{name}")) for name in module_names()}
    places = {}
    for name, module in shown.items():
        for member in _public(module):
            places.setdefault(member.name, f"{name}.html#{member.qualname}")
            places.setdefault(f"{name.rpartition('.')[2]}.{member.name}", f"{name}.html#{member.qualname}")
    for name in shown:
        places.setdefault(name, f"{name}.html")
    exported = [name for name in cascade_lab.__all__ if name in places]

    def link(text: str) -> str:
        return places.get(text.removeprefix(f"{PACKAGE}.").removesuffix("()"), "")

    objects = {name: getattr(cascade_lab, name) for name in exported}
    yield (
        "index.html",
        _page(
            PACKAGE,
            _text(cascade_lab.__doc__, link),
            navigation,
            modules=[(name, _summary(module.docstring, link)) for name, module in shown.items()],
            names=[(name, places[name], _summary(inspect.getdoc(objects[name]) or "", link)) for name in exported],
        ),
    )
    for name, module in shown.items():
        top, rest = [], []
        for member in _public(module):
            own = getattr(cascade_lab, member.name, None) is member.obj and member.name in cascade_lab.__all__
            (top if own else rest).append(_entry(member, link))
        groups = [(f"In <code>{PACKAGE}</code>", top), (f"In <code>{PACKAGE}.{html.escape(name)}</code>", rest)]
        yield (
            f"{name}.html",
            _page(
                f"{PACKAGE}.{name}",
                _text(module.docstring, link),
                navigation,
                groups=[(heading, members) for heading, members in groups if members],
            ),
        )


def module_names() -> list[str]:
    """The documented modules, named within the package."""
    found = sorted(m.name for m in pkgutil.iter_modules(cascade_lab.__path__))
    return [name for name in found if name not in _LEFT_OUT and not name.startswith("_")] + list(WITH_EVIDENCE)


def _page(title: str, text: str, navigation: Sequence[tuple[str, str, str]], **content: object) -> str:
    blank = {"modules": [], "names": [], "groups": []}
    page = {"title": title, "text": text, "navigation": navigation, "root": "../", "here": "api/index.html"}
    return render("api.html.j2", **(blank | page | content))


def _public(module: pdoc.doc.Module) -> list[pdoc.doc.Doc]:
    # imported names belong to the module that defines them
    return [
        member
        for member in module.members.values()
        if not member.name.startswith("_")
        and member.docstring
        and member.kind in ("class", "function")
        and member.taken_from[0] == module.modulename
    ]


def _entry(member: pdoc.doc.Doc, link: Callable[[str], str]) -> Entry:
    parts = ()
    if member.kind == "class":
        parts = tuple(
            _entry(part, link)
            for part in member.own_members
            if not part.name.startswith("_") and part.docstring and not part.docstring.startswith("Alias for field")
        )
    return Entry(member.name, member.qualname, _signature(member), _text(member.docstring, link), parts)


def _signature(member: pdoc.doc.Doc) -> str:
    """The call as the source writes it, one parameter a line where it is long; annotations are not evaluated."""
    if member.kind == "variable":
        return ""
    try:
        signature = inspect.signature(member.obj)
    except (TypeError, ValueError):
        return ""
    parts, star = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls") and "." in member.qualname:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        annotated = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
        equals = " = " if annotated else "="
        default = "" if parameter.default is parameter.empty else f"{equals}{_default(parameter.default)}"
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        parts.append(f"{prefix}{parameter.name}{annotated}{default}")
    returned = (
        "" if signature.return_annotation is signature.empty else f" -> {_annotation(signature.return_annotation)}"
    )
    returned = "" if member.kind == "class" else returned
    line = f"{member.name}({', '.join(parts)}){returned}"
    if len(line) <= _WIDE:
        return line
    return f"{member.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"


def _annotation(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: object) -> str:
    # a factory's marker or an object without a readable form says nothing to a reader
    text = repr(value)
    return "..." if text.startswith("<") else text


def _text(docstring: str | None, link: Callable[[str], str]) -> str:
    source = pdoc.docstrings.google(inspect.cleandoc(docstring or ""))
    # sections of a docstring are no headings of the page
    source = re.sub(r"^#{6} (.+)$", r"**\1**\n", source, flags=re.MULTILINE)
    return markdown.to_html(source, link=link)


def _summary(docstring: str, link: Callable[[str], str]) -> str:
    first = inspect.cleandoc(docstring).split("\n\n")[0].rstrip(":")
    return markdown.to_html(first, link=link)
