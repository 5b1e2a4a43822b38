"""A reader's own settings of matplotlib, IPython, locale, encoding and time zone decide no byte of a result."""

import locale
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cascade_lab.book.execution import load
from tests.notebook_cases import CLAIM, write

CHECKOUT = Path(__file__).resolve().parents[2]
DRAWING = """from cascade_lab.pictures.style import figure, show, style
with style():
    fig, ax = figure()
    _ = ax.plot([1, 10, 1000], [1.5, 2.5, 10_000.25], label="ü, − and $h^2$")
    ax.set_xscale("log")
    _ = ax.legend(loc="upper left")
    _ = ax.bar([30], [5000], hatch="//", width=20)
show(fig, "01_drawn", alt="a line and a bar", caption="it rises", png=True)
print(f"{10_000.25:,} ü − {'I'.lower()}")"""
STYLE = """backend: pdf
figure.figsize: 2, 2
figure.dpi: 50
savefig.bbox: tight
savefig.transparent: True
font.family: serif
font.size: 30
svg.fonttype: none
text.color: red
lines.marker: x
axes.grid: True
axes.labelcolor: red
axes.linewidth: 5
axes.prop_cycle: cycler('color', 'rgb')
axes.formatter.use_locale: True
hatch.color: red
legend.fontsize: 30
xtick.direction: in
path.simplify: False
"""


def own_style(home):
    (home / ".config" / "matplotlib").mkdir(parents=True)
    (home / ".config" / "matplotlib" / "matplotlibrc").write_text(STYLE)
    return {}


def style_of_the_environment(home):
    (home / "my.rc").write_text(STYLE)
    return {"MATPLOTLIBRC": str(home / "my.rc"), "MPLBACKEND": "svg"}


def own_profile(home):
    startup = home / ".ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00.py").write_text("print('hello')\nimport matplotlib\nmatplotlib.rcParams['font.size'] = 30\n")
    (home / "start.py").write_text("print('hello')\n")
    return {"PYTHONSTARTUP": str(home / "start.py"), "IPYTHONDIR": str(home / ".ipython")}


def languages():
    """A locale without Unicode, and those with other decimals or letters that this machine has."""
    return ["C", *filter(installed, ("de_DE.UTF-8", "tr_TR.UTF-8", "ja_JP.UTF-8"))]


def installed(name):
    before = locale.setlocale(locale.LC_ALL)
    try:
        return bool(locale.setlocale(locale.LC_ALL, name))
    except locale.Error:
        return False
    finally:
        locale.setlocale(locale.LC_ALL, before)


def spoken(language):
    return lambda home: {"LC_ALL": language, "LANG": language, "LANGUAGE": "de", "PYTHONCOERCECLOCALE": "0"}


SETTINGS = {
    "matplotlibrc": own_style,
    "MATPLOTLIBRC": style_of_the_environment,
    "profile": own_profile,
    "latin": lambda home: {"PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1:replace", "LC_ALL": "C"},
    "time zone": lambda home: {"TZ": "Asia/Kolkata", "SOURCE_DATE_EPOCH": "1000000000"},
    **{f"locale {name}": spoken(name) for name in languages()},
}
PLAIN = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TMPDIR")


def published(root, names):
    """Every figure's bytes, and all outputs of the notebook, as one run under these settings leaves them."""
    home = root / "home"
    home.mkdir(parents=True)
    environment = {name: os.environ[name] for name in PLAIN if name in os.environ} | {"HOME": str(home)}
    environment |= {"CI": "1", "LC_ALL": "C.UTF-8"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), environment.get("PYTHONPATH")]))
    for name in names:
        environment |= SETTINGS[name](home)
    write(root / "notebooks", "01_drawn", DRAWING, CLAIM)
    command = [sys.executable, "-m", "cascade_lab", "refresh", "01_drawn"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    figures = {path.name: path.read_bytes() for path in sorted((root / "figures").iterdir())}
    outputs = [cell.get("outputs") for cell in load(root / "notebooks" / "01_drawn.ipynb").cells]
    shutil.rmtree(root)
    return figures, outputs


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    figures, outputs = published(tmp_path_factory.mktemp("plain") / "a", [])
    assert set(figures) == {"01_drawn.svg", "01_drawn.png"}
    assert outputs[2][-1]["text"] == "10,000.25 ü − i\n"
    return figures, outputs


def test_all_of_a_reader_s_settings_together_change_no_byte(plain, tmp_path):
    every = [name for name in SETTINGS if name not in ("MATPLOTLIBRC", "latin")]
    assert published(tmp_path / "a", every) == plain


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_none_of_a_reader_s_settings_changes_a_byte(name, plain, tmp_path):
    assert published(tmp_path / "a", [name]) == plain
