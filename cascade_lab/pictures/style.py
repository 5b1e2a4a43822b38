"""One style for all pictures, and `show`, which puts a figure into a notebook and into files.

A picture is a function that draws one figure and returns it with the numbers behind it, so that a test judges numbers
and never pixels. Nothing that computes imports pictures, and matplotlib is imported by the first call.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cascade_lab import files
from cascade_lab.files import FIGURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SIZE = (6.4, 3.6)
# of a figure in a notebook, and of a bitmap in a file, which is sharp on screens of twice the resolution
DPI, FILE_DPI = 110, 220
# Okabe and Ito's colours; every series also has its own line style and marker, every area its own hatch
BLUE, VERMILLION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
BLACK, GREY = "#000000", "#666666"
# the two ledgers: reads and pairs have these colours in every figure and, as --reads and --pairs, on every page; dark
# enough for text on white
READS, PAIRS = BLUE, "#B34700"
PALE_READS, PALE_PAIRS, PALE = "#BBD7EA", "#F0D3C1", "#E6E6E6"
BOX = {"boxstyle": "round,pad=0.25", "facecolor": "white"}
STROKES = ("-", "--", "-.", ":", (0, (6, 1.5)), "-")
MARKERS = "os^Dv*"


def looks(*colours: str, markers: str = MARKERS) -> tuple[dict[str, object], ...]:
    """Colour, line style and marker of up to six series in one picture, as options of `plot`."""
    return tuple(
        {"color": colour, "linestyle": stroke, "marker": marker}
        for colour, stroke, marker in zip(colours, STROKES, markers, strict=False)
    )


SERIES = looks(BLUE, GREEN, VERMILLION, BLACK)
LAWS = looks(BLUE, VERMILLION, GREEN, PURPLE, BLACK, ORANGE)
TRACES = looks(VERMILLION, BLUE, GREEN, BLACK, PURPLE, markers="^osDv")
# colour and hatch of up to six areas
AREAS = ((BLUE, ""), (VERMILLION, "////"), (GREEN, "...."), (PURPLE, "xxxx"), (ORANGE, "----"), (GREY, "++++"))
# what the file of each kind must not tell: when and by which version it was made
_STAMPS = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}


@contextmanager
def style() -> Iterator[None]:
    """The style of every figure, as a context: opaque white, one size, and files without dates or random ids.

    What it does not set is matplotlib's default, whatever a matplotlibrc of the reader's says.
    """
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams |= {
            "figure.figsize": SIZE,
            "figure.dpi": DPI,
            "figure.constrained_layout.use": True,
            "figure.facecolor": "white",
            "axes.facecolor": "white",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "axes.titlelocation": "left",
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "hatch.linewidth": 0.6,
            "lines.linewidth": 1.6,
            "lines.markersize": 4.5,
            "savefig.dpi": DPI,
            "savefig.facecolor": "white",
            "svg.hashsalt": "cascade-lab",
        }
        yield


def settle(fig: Figure) -> None:
    """Lay a figure out for good, at places of four decimals.

    The solver of constrained layout ends with other last bits in other processes where panels of several heights are
    stacked.
    """
    fig.draw_without_rendering()
    fig.set_layout_engine("none")
    for ax in fig.axes:
        ax.set_position([round(x, 4) for x in ax.get_position().bounds])


def show(fig: Figure, name: str | None, *, alt: str, caption: str, png: bool = False) -> None:
    """Display a figure with its caption, save it if a folder is set, and release it.

    Args:
        fig: a figure.
        name: file name without extension; None for a picture that no two runs draw alike, which goes into no file.
        alt: what a reader who cannot see the picture needs to know; stored as `alt` in the output's image metadata.
        caption: one Markdown sentence that states the reading.
        png: the README shows this picture, so it is saved as `name.png` too.

    With the environment variable CASCADE_LAB_FIGURES set, `name.svg` is written into that folder. The output names the
    figure beside its alt text, as `figure`, and a page shows that file instead of the bitmap.

    Raises:
        ValueError: an empty alt text or caption.
    """
    if not alt.strip() or not caption.strip():
        raise ValueError("alt, caption: expected a text each, given an empty one")
    from IPython.display import display

    pixels = _encoded(fig, "png", DPI)
    folder = os.environ.get(FIGURES)
    if folder and name is not None:
        for kind in ("svg", "png") if png else ("svg",):
            save(fig, Path(folder, f"{name}.{kind}"))
    fig.clear()
    image = {"image/png": base64.b64encode(pixels).decode(), "text/plain": alt}
    about = {"alt": alt} if name is None else {"alt": alt, "figure": name}
    display(image, metadata={"image/png": about}, raw=True)
    display({"text/markdown": caption, "text/plain": caption}, raw=True)


def save(fig: Figure, path: Path) -> None:
    """Write a figure as the kind that the suffix says, .svg, .png or .pdf: the same bytes for the same numbers.

    A .png is twice as wide as in a notebook.
    """
    files.write_file(path, _encoded(fig, path.suffix.lower().removeprefix("."), FILE_DPI))


def _encoded(fig: Figure, kind: str, dpi: int) -> bytes:
    content = io.BytesIO()
    with style():
        fig.savefig(content, format=kind, metadata=_STAMPS[kind], **({"dpi": dpi} if kind == "png" else {}))
    return content.getvalue()


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Heights of labels moved up until neighbours are `gap` apart."""
    moved = list(places)
    order = sorted(range(len(places)), key=lambda i: places[i])
    for below, above in zip(order, order[1:], strict=False):
        moved[above] = max(moved[above], moved[below] + gap)
    return moved


def tokens(n: int) -> str:
    """8192 as 8K, 1048576 as 1M; other lengths as they are."""
    return f"{n >> 20}M" if n % 2**20 == 0 else f"{n >> 10}K" if n % 2**10 == 0 else str(n)


def fill_pairs(ax, cells: Sequence[Sequence[bool]]) -> None:
    """A grid of rows and keys, the true ones filled as pairs."""
    from matplotlib.colors import ListedColormap

    ax.imshow(cells, cmap=ListedColormap(["white", PAIRS]), vmin=0, vmax=1, aspect="equal")
    ax.set_xticks([x - 0.5 for x in range(1, len(cells[0]))], minor=True)
    ax.set_yticks([y - 0.5 for y in range(1, len(cells))], minor=True)
    ax.grid(which="minor", color="#BBBBBB", linewidth=0.4)
    ax.tick_params(which="minor", length=0)


def figure(size: tuple[float, float] | None = None):
    """A figure with one axis; it bypasses pyplot, so that no notebook front end shows it a second time."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=size)
    return fig, fig.add_subplot()


def panels(rows: int, columns: int, size: tuple[float, float] | None = None, **options):
    """A figure with a grid of axes, kept away from pyplot as in `figure`."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=size)
    return fig, fig.subplots(rows, columns, **options)


def runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive slots as (first, length)."""
    found: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if found and slot == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((slot, 1))
    return found
