"""JupyterLab itself: each notebook opened in a browser, Run All chosen from the menu, and what is then shown read.

Everything happens on a copy without outputs, so that all that is seen comes from this run, and with a home of its
own, so that neither the checkout nor the reader's settings are touched.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest

from cascade_lab.book import canonical, markdown
from cascade_lab.evidence.claims import FAILS, HOLDS, gather
from tests.browser.conftest import CHECKOUT

NOTEBOOKS = sorted(path.stem for path in (CHECKOUT / "notebooks").glob("*.ipynb"))
START_S, RUN_S = 120, 400
# All cells in the page at once, so that they can be counted; no question on leaving, no news from outside.
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none", "recordTiming": False},
    "docmanager-extension/plugin": {"autosave": False},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
# The committed outputs, which the counts below are compared with, come from the CPU interpreter.
ON_CPU = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Server:
    """A running JupyterLab: its address, its token and the folder it shows."""

    url: str
    token: str
    root: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    place = tmp_path_factory.mktemp("jupyterlab")
    root, home = place / "checkout", place / "home"
    for name in ("notebooks", "figures"):
        shutil.copytree(CHECKOUT / name, root / name)
    for path in (root / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, path)
    for name, values in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    port, token = free_port(), secrets.token_hex(16)
    folders = {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    environment = (
        os.environ
        | ON_CPU
        | folders
        | {
            "HOME": str(home),
            "IPYTHONDIR": str(home / "ipython"),
            "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
            "JUPYTER_PREFER_ENV_PATH": "1",
            "PYTHONPATH": str(CHECKOUT),
        }
    )
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"]
    with (place / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log, start_new_session=True)
    running = Server(f"http://127.0.0.1:{port}", token, root)
    try:
        wait_for(running, process, place / "server.log")
        yield running
    finally:
        # the server ends its kernels when it is asked to stop
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(server, process, log):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"JupyterLab ended with {process.returncode}:\n{log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"{server.url}/api?token={server.token}", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    pytest.fail(f"JupyterLab did not answer within {START_S} s:\n{log.read_text()[-2000:]}")


@pytest.fixture
def page(browser, server):
    """A page that may talk to the server alone."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    foreign, errors = [], []

    def route(request):
        host = urlsplit(request.request.url)
        if host.scheme in ("data", "blob") or request.request.url.startswith(server.url):
            return request.continue_()
        foreign.append(request.request.url)
        return request.abort()

    context.route("**/*", route)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert foreign == []
    assert errors == []


def open_and_run_all(page, server, path):
    page.goto(f"{server.url}/lab/workspaces/{secrets.token_hex(4)}/tree/{path}?token={server.token}")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=START_S * 1000)
    # asked before its kernel is there, JupyterLab opens a dialog instead of running anything
    page.get_by_text("| Idle").wait_for(timeout=START_S * 1000)
    # what is collapsed is not drawn
    for menu, item in (("View", "Expand All Code"), ("View", "Expand All Outputs"), ("Run", "Run All Cells")):
        page.locator(".lm-MenuBar-itemLabel").get_by_text(menu, exact=True).click()
        page.locator(".lm-Menu-itemLabel").get_by_text(item, exact=True).click()


def end_kernels(page, server):
    for session in page.request.get(f"{server.url}/api/sessions?token={server.token}").json():
        page.request.delete(f"{server.url}/api/sessions/{session['id']}?token={server.token}")


# how JupyterLab shows both what raises and what is written to stderr
ERROR = '.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]'
STATE = """() => {
  const cells = [...document.querySelectorAll('.jp-Notebook .jp-CodeCell')];
  const prompts = cells.map(c => c.querySelector('.jp-InputArea-prompt').textContent.trim());
  const outputs = kind => [...document.querySelectorAll(`.jp-OutputArea-output[data-mime-type="${kind}"]`)];
  const box = node => { const r = node.getBoundingClientRect(); return [r.width, r.height]; };
  return {
    cells: cells.length,
    ran: prompts.filter(p => /^\\[\\d+\\]:$/.test(p)).length,
    waiting: prompts.filter(p => p === '[*]:').length,
    errors: outputs('application/vnd.jupyter.stderr').map(o => o.textContent),
    pictures: [...document.querySelectorAll('.jp-OutputArea-output img, .jp-OutputArea-output > svg')].map(i =>
      [i.complete !== false && i.naturalWidth !== 0, ...box(i)]),
    claims: outputs('text/markdown').map(o => o.textContent.trim()).filter(t => /^[✓✗–] \\d/.test(t)),
    formulas: document.querySelectorAll('.jp-Notebook mjx-container').length,
    misread: [...document.querySelectorAll('.jp-Notebook mjx-merror')].map(e => e.textContent),
  };
}"""


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_run_all_gives_the_claims_and_figures_that_are_committed(name, server, page, pictures):
    committed = nbformat.read(CHECKOUT / "notebooks" / f"{name}.ipynb", as_version=4)
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    images = [out for cell in code for out in cell.outputs if "image/png" in out.get("data", {})]
    claims = gather(committed)
    assert claims
    assert not any(claim.verdict == FAILS for claim in claims)

    open_and_run_all(page, server, f"notebooks/{name}.ipynb")
    deadline = time.monotonic() + RUN_S
    while True:
        state = page.evaluate(STATE)
        assert state["errors"] == []
        if state["waiting"] == 0 and state["ran"] == state["cells"]:
            break
        assert time.monotonic() < deadline, f"{state['waiting']} of {state['cells']} cells still wait after {RUN_S} s"
        page.wait_for_timeout(500)
    # the last output is drawn after its cell is done
    page.wait_for_function("document.querySelectorAll('.jp-OutputArea-output img').length >= " + str(len(images)))
    state = page.evaluate(STATE)

    assert state["cells"] == len(code)
    assert state["errors"] == []
    assert [line.split()[1] for line in state["claims"]] == [claim.id for claim in claims]
    told = [line.startswith("✓") and " holds: " in line for line in state["claims"]]
    assert told == [claim.verdict == HOLDS for claim in claims]
    assert len(state["pictures"]) == len(images)
    for loaded, width, height in state["pictures"]:
        assert loaded
        assert min(width, height) > 50
    assert state["formulas"] > 10
    assert state["misread"] == []
    page.screenshot(path=pictures / f"jupyterlab_{name}.png")
    end_kernels(page, server)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_committed_notebook_opens_unmodified_and_saving_it_changes_nothing(name, server, page):
    """With the Python that saved last; with another JupyterLab notes its version, and nothing else."""
    path = server.root / f"{name}.ipynb"
    committed = (CHECKOUT / "notebooks" / f"{name}.ipynb").read_text()

    def saved_by(version):
        return re.sub(r'(\n   "version": )"[^"]*"\n', rf'\1"{version}"\n', committed)

    for version in (platform.python_version(), "3.12.0"):
        path.write_text(saved_by(version))
        page.goto(f"{server.url}/lab/workspaces/{secrets.token_hex(4)}/tree/{path.name}?token={server.token}")
        page.get_by_text("| Idle").wait_for(timeout=START_S * 1000)
        page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        modified = page.locator(".lm-TabBar-tab.jp-mod-dirty")
        if version == platform.python_version():
            assert modified.count() == 0
        else:
            modified.wait_for()
        before = path.stat().st_mtime_ns
        page.locator(".lm-MenuBar-itemLabel", has_text="File").click()
        page.locator(".lm-Menu-itemLabel").get_by_text("Save Notebook", exact=True).click()
        deadline = time.monotonic() + START_S
        # the file is written in place, so that for a moment it is not whole
        while path.stat().st_mtime_ns == before or not path.read_text().endswith("}\n"):
            assert time.monotonic() < deadline
            page.wait_for_timeout(100)
        assert path.read_text() == saved_by(platform.python_version())
        assert canonical.problems(path) == []
        end_kernels(page, server)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_headings_have_the_ids_of_the_site_and_hidden_source_is_collapsed(name, server, page, pictures):
    """What links name, so that the same link works in both; and what the first line of a hidden cell looks like."""
    path = server.root / f"{name}_committed.ipynb"
    shutil.copy(CHECKOUT / "notebooks" / f"{name}.ipynb", path)
    cells = nbformat.read(path, as_version=4).cells
    page.goto(f"{server.url}/lab/workspaces/{secrets.token_hex(4)}/tree/{path.name}?token={server.token}")
    page.get_by_text("| Idle").wait_for(timeout=START_S * 1000)
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    expected = [id for id, _ in markdown.sections(cell.source for cell in cells if cell.cell_type == "markdown")]
    found = page.eval_on_selector_all(
        ".jp-MarkdownCell :is(h1, h2, h3)", "all => all.map(h => h.id || h.dataset.jupyterId)"
    )
    assert found == list(dict.fromkeys(expected))
    folded = [cell for cell in cells if canonical.is_folded(cell)]
    closed = page.locator(".jp-CodeCell .jp-InputPlaceholder")
    assert closed.count() == len(folded) > 3
    said = [text.strip().removeprefix("# ").rstrip("…").rstrip() for text in closed.all_inner_texts()]
    assert all(canonical.purpose(cell) in text for cell, text in zip(folded, said, strict=True))
    page.screenshot(path=pictures / f"jupyterlab_{name}_opened.png")
    end_kernels(page, server)


def test_a_link_to_a_section_leads_there_in_this_notebook_and_in_another(server, page):
    """JupyterLab looks for a section before a notebook that it just opens is drawn, so the other is open already."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    texts = {
        "links_to": ["# To", *["line\n\n" * 60] * 2, "## It's there: a law, again\n\nreached there", "line\n\n" * 60],
        "links_from": ["# From\n\n[here](#It's-here:-a-law,-again) [there](links_to.ipynb#It's-there:-a-law,-again)"]
        + ["line\n\n" * 60, "## It's here: a law, again\n\nreached here"],
    }
    for name, cells in texts.items():
        markdown_cells = [nbformat.v4.new_markdown_cell(text) for text in cells]
        notebook = nbformat.v4.new_notebook(cells=markdown_cells, metadata={"kernelspec": kernel})
        nbformat.write(notebook, server.root / f"{name}.ipynb")
    workspace = f"{server.url}/lab/workspaces/{secrets.token_hex(4)}"
    for name in texts:
        page.goto(f"{workspace}/tree/{name}.ipynb?token={server.token}")
        page.get_by_text("| Idle").wait_for(timeout=START_S * 1000)
    for words, said in (("here", "reached here"), ("there", "reached there")):
        goal = page.locator(".jp-RenderedMarkdown").get_by_text(said, exact=True)
        assert not in_view(page, goal)
        page.get_by_role("link", name=words, exact=True).click()
        deadline = time.monotonic() + START_S
        while not in_view(page, goal):
            assert time.monotonic() < deadline, words
            page.wait_for_timeout(200)
        page.locator(".jp-Notebook:visible").evaluate("node => { node.scrollTop = 0; }")
    end_kernels(page, server)


def in_view(page, locator):
    box = locator.bounding_box() if locator.count() and locator.is_visible() else None
    return box is not None and 0 <= box["y"] < page.viewport_size["height"] - 30


def test_a_failing_cell_is_seen(server, page):
    """The check above can fail: a claim that does not hold leaves an error output, and its line says so."""
    source = "from cascade_lab.evidence.claims import claim\nclaim('9.1', 'a sum', measured=3, expected=4)"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)], metadata={"kernelspec": kernel})
    nbformat.write(notebook, server.root / "failing.ipynb")
    open_and_run_all(page, server, "failing.ipynb")
    page.wait_for_selector(ERROR, timeout=START_S * 1000)
    state = page.evaluate(STATE)
    assert "claim 9.1 fails" in state["errors"][0]
    assert [line[0] for line in state["claims"]] == ["✗"]
    end_kernels(page, server)
