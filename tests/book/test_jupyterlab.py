"""JupyterLab's own server, without a browser: it opens a notebook, runs all its cells in its kernel, and saves it.

What a reader sees in a browser is checked by tests/browser, which needs Chromium.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from jupyter_client import BlockingKernelClient

from cascade_lab.book import canonical
from cascade_lab.book.execution import load
from cascade_lab.evidence.claims import HOLDS, MIME, gather
from tests.limits import HANGS_LONG_S, HANGS_S

CHECKOUT = Path(__file__).resolve().parents[2]
NOTEBOOK = "04_other_regions.ipynb"


@pytest.fixture
def server(tmp_path):
    """A function that asks a running JupyterLab, whose folder is a copy of the notebooks."""
    root, home = tmp_path / "checkout", tmp_path / "home"
    for name in ("notebooks", "figures"):
        shutil.copytree(CHECKOUT / name, root / name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    folders = {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    environment = os.environ | folders | {"HOME": str(home), "IPYTHONDIR": str(home / "ipython")}
    environment |= {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONPATH": str(CHECKOUT), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TRITON_INTERPRET": "1", "CASCADE_LAB_TARGET": ""}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"]
    home.mkdir()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log)

    def ask(method, path, body=None):
        headers = {"Authorization": f"token {token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=HANGS_S) as answer:
            return answer.read()

    ask.root, ask.runtime = root, home / "runtime"
    try:
        deadline = time.monotonic() + HANGS_S
        while True:
            try:
                ask("GET", "api")
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.2)
        yield ask
    finally:
        process.terminate()
        process.wait(HANGS_S)


def test_opening_and_saving_without_an_edit_changes_no_byte(server):
    for path in sorted((CHECKOUT / "notebooks").glob("*.ipynb")):
        model = json.loads(server("GET", f"api/contents/notebooks/{path.name}?content=1"))
        assert model["mimetype"] is None
        assert [cell["metadata"].pop("trusted", None) for cell in model["content"]["cells"]]
        server("PUT", f"api/contents/notebooks/{path.name}", {"type": "notebook", "content": model["content"]})
        saved = server.root / "notebooks" / path.name
        assert saved.read_bytes() == path.read_bytes()
        assert canonical.problems(saved) == []
    assert b"jupyter-config-data" in server("GET", "lab")


@pytest.mark.long
def test_run_all_makes_the_claims_that_are_committed(server):
    notebook = load(CHECKOUT / "notebooks" / NOTEBOOK)
    body = {"path": f"notebooks/{NOTEBOOK}", "name": NOTEBOOK, "type": "notebook", "kernel": {"name": "python3"}}
    kernel = json.loads(server("POST", "api/sessions", body))["kernel"]["id"]
    client = BlockingKernelClient(connection_file=str(server.runtime / f"kernel-{kernel}.json"))
    client.load_connection_file()
    client.start_channels()
    made = []

    def collect(message):
        kind, content = message["header"]["msg_type"], message["content"]
        assert kind != "error", content
        assert content.get("name") != "stderr", content
        if MIME in content.get("data", {}):
            made.append(content["data"][MIME])

    try:
        client.wait_for_ready(timeout=HANGS_S)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                client.execute_interactive(cell.source, output_hook=collect, timeout=HANGS_LONG_S)
    finally:
        client.stop_channels()
    committed = gather(notebook)
    assert [each["id"] for each in made] == [claim.id for claim in committed]
    assert {each["verdict"] for each in made} == {HOLDS}
