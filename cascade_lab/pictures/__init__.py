"""Pictures: a style, and a module per notebook with one function per picture; `show` displays and saves one."""

from cascade_lab.pictures.style import show, style

__all__ = ["show", "style"]
