"""The API reference: one page for each public module, made of the docstrings of the names in its `__all__`.

pdoc reads the modules; the pages have the look and the navigation of the site and need no script. pdoc's own templates
have a navigation of their own, and headings and ids that a screen reader cannot follow.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pdoc.doc
import pdoc.docstrings

import cascade_lab
from cascade_lab.book import markdown
from cascade_lab.book.export import render
from cascade_lab.book.layout import PUBLIC

PACKAGE = "cascade_lab"
_LONG = 60
_EXAMPLE = re.compile(r"^Example:\n(?P<lines>(?:[ \t]+\S.*\n?|\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """One documented name: a function, a class, a constant, a method or a property."""

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
    places, homes = {}, {}
    for name, module in shown.items():
        for member in module.members.values():
            homes.setdefault(member.name, name)
            places.setdefault(member.name, f"{name}.html#{member.name}")
            places.setdefault(f"{name.rpartition('.')[2]}.{member.name}", f"{name}.html#{member.name}")
    for name in shown:
        places.setdefault(name, f"{name}.html")
        places.setdefault(name.rpartition(".")[2], f"{name}.html")

    def link(text: str) -> str:
        return places.get(text.removeprefix(f"{PACKAGE}.").removesuffix("()"), "")

    groups = [
        (
            heading,
            [
                (name, _summary(shown[name].docstring, link), list(shown[name].members))
                for name in names
                if name in shown
            ],
        )
        for heading, names in PUBLIC.items()
    ]
    top = {name: homes[name] for name in cascade_lab.__all__ if name in homes}
    yield "index.html", _page(PACKAGE, _text(cascade_lab.__doc__, link), navigation, groups=groups, top=top)
    for name, module in shown.items():
        calls = sorted((one for one in module.members.values() if one.kind != "variable"), key=_place)
        members = [_entry(member, module, link) for member in calls]
        constants = [_entry(one, module, link) for one in module.members.values() if one.kind == "variable"]
        short = [entry.name for entry in members if top.get(entry.name) == name]
        text = _text(module.docstring, link)
        content = {"members": members, "constants": constants, "short": short}
        yield f"{name}.html", _page(f"{PACKAGE}.{name}", text, navigation, **content)


def module_names() -> list[str]:
    """The documented modules, named within the package."""
    return [name for names in PUBLIC.values() for name in names]


def _page(title: str, text: str, navigation: Sequence[tuple[str, str, str]], **content: object) -> str:
    page = {"title": title, "text": text, "navigation": navigation, "root": "../", "here": "api/index.html"}
    blank = {"groups": [], "top": {}, "members": [], "constants": [], "short": []}
    return render("api.html.j2", **(blank | page | content))


def _place(member: pdoc.doc.Doc) -> tuple[str, int]:
    """Where a name is defined, so that a page keeps the order of the derivation."""
    return str(member.source_file), (member.source_lines or (0, 0))[0]


def _entry(member: pdoc.doc.Doc, module: pdoc.doc.Module, link: Callable[[str], str]) -> Entry:
    parts = ()
    if member.kind == "class":
        own = [part for part in member.own_members if not part.name.startswith("_") and part.docstring]
        parts = tuple(_entry(part, module, link) for part in own if not part.docstring.startswith("Alias for field"))
    docstring = member.docstring or _passed_on(member, module)
    return Entry(member.name, member.qualname, _signature(member, module), _text(docstring, link), parts)


def _passed_on(member: pdoc.doc.Doc, module: pdoc.doc.Module) -> str:
    """What stands below a constant in the module of a package that defines it."""
    for part in pkgutil.iter_modules(getattr(module.obj, "__path__", ())):
        inner = pdoc.doc.Module(importlib.import_module(f"{module.fullname}.{part.name}"))
        if member.name in inner.members and inner.members[member.name].docstring:
            return inner.members[member.name].docstring
    return ""


def _signature(member: pdoc.doc.Doc, module: pdoc.doc.Module) -> str:
    """A call as the source writes it, one parameter a line where it is long, or a constant with its value.

    An exception has none, for nobody but its module raises it.
    """
    if member.kind == "variable":
        value = member.default_value_str
        return f"{member.name} = {value}" if 0 < len(value) <= _LONG and member.name in module.members else ""
    if member.kind == "class" and issubclass(member.obj, Exception):
        return ""
    call = (member.members["__init__"] if member.kind == "class" else member).signature
    named = {id(value): name for name, value in vars(module.obj).items() if name.isupper()}
    parameters = [
        parameter.replace(default=_Named(named[id(parameter.default)]))
        if len(repr(parameter.default)) > _LONG and id(parameter.default) in named
        else parameter
        for parameter in call.parameters.values()
        if not parameter.name.startswith("_") and parameter.name not in ("self", "cls")
    ]
    # annotations name classes with the modules that define them
    return member.name + re.sub(
        rf"\b(?:{PACKAGE}|fractions|torch\.distributed)\.(?:\w+\.)*", "", str(call.replace(parameters=parameters))
    )


class _Named(str):
    """A default shown by the name that the module has for it."""

    __repr__ = str.__str__


def _text(docstring: str | None, link: Callable[[str], str]) -> str:
    source = _EXAMPLE.sub(_session, inspect.cleandoc(docstring or ""))
    source = pdoc.docstrings.google(source)
    # sections of a docstring are no headings of the page
    source = re.sub(r"^#{6} (.+)$", r"**\1**\n", source, flags=re.MULTILINE)
    # a formula on a line of its own may wrap, a table may not
    return re.sub(r"<pre>(?=<code>.*</code></pre>)", '<pre class="formula">', markdown.to_html(source, link=link))


def _session(found: re.Match[str]) -> str:
    """An example as a block of code, whose prompts would otherwise be taken for quotations."""
    return f"**Example:**\n\n```pycon\n{textwrap.dedent(found['lines']).strip()}\n```\n"


def _summary(docstring: str, link: Callable[[str], str]) -> str:
    first = inspect.cleandoc(docstring).split("\n\n")[0].rstrip(":")
    return markdown.to_html(first, link=link)
