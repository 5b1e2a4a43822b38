"""The runner under fault: whatever happens, one clear line, the last good result, and nothing left behind."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
from nbformat.v4 import new_output

from cascade_lab import cli
from cascade_lab.book import canonical, execution, runner
from cascade_lab.evidence.claims import MIME
from cascade_lab.files import Stopped, as_exceptions, held_back
from tests.limits import HANGS_S
from tests.notebook_cases import CLAIM, FIELDS, PARAMETERS, code, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are looked for in /proc")

REACHED = "import os, pathlib, time\n_ = pathlib.Path(os.environ['REACHED']).write_text(str(os.getpid()))\n"
NO_NAMESPACE, LAST_GOOD = 77, "the last good one"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["cascade_lab.cli", "cascade_lab.book.export", "papermill", "nbclient", "IPython"])


def _carry_out(arguments, place, prepare, report):
    """The body of one process: a `cascade-lab` command in its own session and environment, a fault prepared before."""
    os.setsid()
    default_signals()
    os.chdir(place["cwd"])
    os.environ |= place["environment"]
    tempfile.tempdir = None
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(place["streams"] / name, os.O_WRONLY | os.O_CREAT), number)
    if prepare is not None:
        prepare()
    status = cli.main(arguments)
    sys.stdout.flush()
    if report is not None:
        report()
    # Without Python's own way out, which would wait for what this test looks for.
    os._exit(status)


def default_signals():
    """As in a terminal; under nohup, or behind an ampersand, some are ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Place:
    """A checkout with notebooks and earlier results, a home and a folder for temporary files of its own."""

    def __init__(self, root):
        self.root, self.folder, self.output = root, root / "checkout" / "notebooks", root / "checkout" / "build"
        self.mark, self.reached = uuid.uuid4().hex, root / "reached"
        for name in ("home", "tmp", "streams", "checkout/notebooks", "checkout/build"):
            (root / name).mkdir(parents=True)
        self.started = 0

    def keep(self, *stems):
        """Results of an earlier run."""
        for stem in stems:
            for name in (f"{stem}.ipynb", f"{stem}.html"):
                (self.output / name).write_text(LAST_GOOD)
        records = [{"id": "1.1", "notebook": stem, **FIELDS} for stem in stems]
        (self.output / "claims.json").write_text(json.dumps(records))

    def start(self, *arguments, prepare=None, report=None):
        self.started += 1
        streams = self.root / "streams" / str(self.started)
        streams.mkdir()
        environment = {"HOME": str(self.root / "home"), "TMPDIR": str(self.root / "tmp"), "CI": "1"}
        environment |= {"MARK": self.mark, "REACHED": str(self.reached)}
        place = {"cwd": self.root / "checkout", "environment": environment, "streams": streams}
        process = FORKS.Process(target=_carry_out, args=(arguments, place, prepare, report))
        process.start()
        process.streams = streams
        return process

    def end(self, process):
        process.join(HANGS_S)
        if process.exitcode is None:
            process.kill()
            pytest.fail("the command did not end")
        read = [(process.streams / name).read_text() for name in ("stdout", "stderr")]
        return process.exitcode, *read

    def run(self, *arguments, **faults):
        return self.end(self.start("run", *arguments, **faults))

    def files(self):
        """Every file with its bytes, but for the streams of the commands."""
        return {
            path.relative_to(self.root).as_posix(): path.read_bytes() if path.is_file() else None
            for path in self.root.rglob("*")
            if self.root / "streams" not in path.parents and path != self.reached
        }

    def processes(self):
        """Those that a command of this place started, which are kernels and what their cells started."""
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"MARK={self.mark}".encode() in environment.read_bytes():
                    state = (environment.parent / "stat").read_text().rsplit(")", 1)[1].split()[0]
                    found += [environment.parent.name] if state != "Z" else []
        return found


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    for pid in made.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def executed_claim(id):
    output = new_output("display_data", data={MIME: {"id": id, **FIELDS}})
    return code(CLAIM, outputs=[output], count=2)


def wait_for(condition):
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def only_failure_added(before, after, name):
    """Whether nothing changed but the kept output and the claims, which lost those of the failed notebook."""
    changed = {path for path in before.keys() | after.keys() if before.get(path, ...) != after.get(path, ...)}
    return changed <= {"checkout/build/failed", f"checkout/build/failed/{name}.ipynb", "checkout/build/claims.json"}


# what a cell can do


FAULTS = {
    "killed": (REACHED + "os.kill(os.getpid(), 9)", r"cell 3: the kernel died \(DeadKernelError\)"),
    "endless": (REACHED + "while True:\n    pass", r"cell 3: took longer than 3 s \(TimeoutError\)"),
    "deaf": (
        REACHED + "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True:\n    pass",
        r"cell 3: took longer than 3 s",
    ),
    "with children": ("%%bash\nsleep 1000 & sleep 1000", r"cell 3: took longer than 3 s"),
    "a million lines": (
        "for i in range(10**6):\n    print(i)",
        r"cell 3: prints more than 1 MiB; print less, or write to a file",
    ),
    "one long line": ("print('x' * 10**7)", r"cell 3: prints more than 1 MiB"),
    "endless pictures": (
        "from IPython.display import display\nwhile True:\n    display({'text/html': 'x' * 10**6}, raw=True)",
        r"cell 3: shows more than 16 MiB",
    ),
    "an error of many lines": (
        "raise ValueError('first\\nsecond\\x1b[2J\\x07' + 'x' * 10**6)",
        r"cell 3: ValueError: first \(output",
    ),
}


# of an endless cell, an endless print and an endless display, each of its own kind; the others are variants of these
QUICK_FAULTS = ("killed", "endless", "one long line", "endless pictures", "an error of many lines")


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[] if fault in QUICK_FAULTS else pytest.mark.long) for fault in FAULTS]
)
def test_whatever_a_cell_does_there_is_one_line_and_nothing_is_left(fault, place, monkeypatch, capfd):
    """K80, K81 (tests/known_faults.md): no hidden limit, and the memory a cell can claim by printing is bounded."""
    source, message = FAULTS[fault]
    write(place.folder, "01_bad", code(source), code(CLAIM))
    place.keep("01_bad", "02_other")
    before = place.files()
    for name, value in (("TMPDIR", place.root / "tmp"), ("HOME", place.root / "home"), ("MARK", place.mark)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("REACHED", str(place.reached))
    monkeypatch.setattr(tempfile, "tempdir", None)

    slow = "3" if "longer" in message else "60"
    arguments = ["run", "01", "--notebooks", str(place.folder), "--output", str(place.output), "--timeout", slow]
    assert cli.main(arguments) == 1

    errors = capfd.readouterr().err
    assert errors.count("\n") == 1
    assert len(errors) < 500
    assert re.match(rf"01_bad\.ipynb, {message}", errors)
    assert "\x1b" not in errors
    assert only_failure_added(before, place.files(), "01_bad")
    assert [r["notebook"] for r in runner.read_claims(place.output)] == ["02_other"]
    assert place.processes() == []
    kept = execution.load(place.output / "failed" / "01_bad.ipynb").cells[2].outputs
    assert sum(len(each.get("text", "")) for each in kept) <= execution.MAX_PRINTED


@pytest.mark.long
def test_much_output_below_the_limit_is_kept_whole(place):
    """K81: 30,000 lines are slower than the kernel's answer, and none is lost."""
    write(place.folder, "01_long", "for i in range(30_000):\n    print(i)", CLAIM)
    assert place.run()[::2] == (0, "")
    outputs = execution.load(place.output / "01_long.ipynb").cells[2].outputs
    assert [each.text for each in outputs] == ["".join(f"{i}\n" for i in range(30_000))]


@pytest.mark.parametrize("lacking", ["home", ".config", ".cache", ".triton"])
def test_a_home_that_cannot_be_written_leaves_no_warning_in_the_notebook(lacking, place):
    """F18 of tests/known_faults.md: whole or in part, for a file stands where a folder would be made."""
    home = place.root / "home"
    if lacking == "home":
        home.rmdir()
        home.touch()
    else:
        (home / lacking).touch()
    look = "import matplotlib, os\nfound = matplotlib.get_configdir(), matplotlib.get_cachedir()\n"
    look += "found += (os.environ.get('TRITON_CACHE_DIR', os.path.expanduser('~/.triton')),)\n"
    look += "for each in found:\n    os.makedirs(each, exist_ok=True)\nprint(len(found))"
    write(place.folder, "01_plot", look, CLAIM)
    assert place.run()[::2] == (0, "")
    outputs = execution.load(place.output / "01_plot.ipynb").cells[2].outputs
    assert [(each.name, each.text) for each in outputs] == [("stdout", "3\n")]


# signals


STOPS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


@pytest.mark.parametrize(
    ("number", "whole_group", "moment"),
    [
        (signal.SIGINT, True, "cell"),
        (signal.SIGTERM, False, "starting"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                (signal.SIGINT, False, "starting"),
                (signal.SIGINT, False, "cell"),
                (signal.SIGINT, True, "starting"),
                (signal.SIGTERM, False, "cell"),
                (signal.SIGHUP, True, "starting"),
                (signal.SIGHUP, True, "cell"),
            )
        ),
    ],
)
def test_a_signal_ends_the_run_and_its_kernel(number, whole_group, moment, place):
    """K80: at kernel start-up and in a cell, to the process alone and to its group as a terminal sends it."""
    write(place.folder, "01_slow", REACHED + "time.sleep(60)", CLAIM)
    place.keep("01_slow")
    before = place.files()
    process = place.start("run")
    if moment == "cell":
        wait_for(lambda: place.reached.exists() and place.reached.read_text())
    else:
        wait_for(place.processes)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    assert place.end(process) == (128 + number, "", f"{STOPS[number]}\n")
    assert place.files() == before
    assert place.processes() == []


def test_an_impatient_second_interrupt_leaves_no_kernel_either(place):
    """The cell ignores the interrupt, so that the kernel must be killed, which takes its time."""
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    write(place.folder, "01_deaf", deaf + REACHED + "while True:\n    pass", CLAIM)
    before = place.files()
    process = place.start("run")
    wait_for(lambda: place.reached.exists() and place.reached.read_text())
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.3)
    assert place.end(process) == (130, "", "interrupted\n")
    assert place.files() == before
    assert place.processes() == []


def test_a_run_killed_outright_leaves_nothing_among_the_results(place):
    """Nothing can be done on SIGKILL: the kernel ends by itself, and what was under way lies with temporary files."""
    write(place.folder, "01_slow", REACHED + "if not pathlib.Path('fast').exists():\n    time.sleep(60)", CLAIM)
    process = place.start("run")
    wait_for(lambda: place.reached.exists() and place.reached.read_text())
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    wait_for(lambda: not place.processes())
    assert list(place.output.iterdir()) == []
    (place.folder / "fast").touch()
    assert place.run()[::2] == (0, "")
    assert sorted(path.name for path in place.output.iterdir()) == ["01_slow.html", "01_slow.ipynb", "claims.json"]


class Interrupted:
    """Interrupts itself at the nth call of a function of `os`, as a reader would by chance."""

    def __init__(self, name, nth, number):
        self.name, self.nth, self.number = name, nth, number

    def __call__(self):
        real, calls = getattr(os, self.name), []

        def interrupted(*arguments, **options):
            if "/tmp/cascade-" not in str(arguments[0]):
                calls.append(arguments)
                if len(calls) == self.nth:
                    os.kill(os.getpid(), self.number)
            return real(*arguments, **options)

        setattr(os, self.name, interrupted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_renames_waits_until_all_results_are_in_place(number, place):
    write(place.folder, "01_good", CLAIM)
    write(place.folder, "02_never", CLAIM)
    place.keep("01_good", "02_never")
    exitcode, _, errors = place.run(prepare=Interrupted("replace", 2, number))
    assert (exitcode, errors) == (128 + number, f"{STOPS[number]}\n")
    assert [(place.output / f"01_good.{kind}").read_text() != LAST_GOOD for kind in ("html", "ipynb")] == [True, True]
    assert [(place.output / f"02_never.{kind}").read_text() for kind in ("html", "ipynb")] == [LAST_GOOD] * 2
    records = runner.read_claims(place.output)
    assert [(r["notebook"], r["statement"]) for r in records] == [
        ("01_good", "rows arrive"),
        ("02_never", "rows arrive"),
    ]
    assert len(list(place.output.iterdir())) == 5
    assert place.processes() == []


@pytest.fixture
def terminal_signals():
    before = {number: signal.getsignal(number) for number in STOPS}
    default_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("terminal_signals")
def test_signals_become_exceptions_and_wait_where_they_are_held_back():
    before = [signal.getsignal(number) for number in STOPS]
    for number, words in STOPS.items():
        done = []
        status = None
        try:
            with as_exceptions():
                with held_back():
                    signal.raise_signal(number)
                    done.append("held back")
                done.append("never")
        except Stopped as stop:
            status = stop.status
            done.append(str(stop))
        assert (done, status) == (["held back", words], 128 + number)
    assert [signal.getsignal(number) for number in STOPS] == before


def test_an_ignored_signal_stays_ignored(monkeypatch):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with as_exceptions(), held_back():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_run_notebooks_without_touching_signals():
    done = []

    def body():
        with as_exceptions(), held_back():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGINT)]


# places that cannot be written


class FileLimit:
    """No file may grow beyond this many bytes: what a quota does, without any right."""

    def __init__(self, limit):
        self.limit = limit

    def __call__(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.limit))


class SmallDisk:
    """A disk of this many bytes over a folder, seen by this process and its children only."""

    def __init__(self, folder, size, full):
        self.folder, self.size, self.full = folder, size, full

    def __call__(self):
        new_user, new_mounts = 0x10000000, 0x00020000
        user, group = os.getuid(), os.getgid()
        if ctypes.CDLL(None).unshare(new_mounts | (new_user if user else 0)):
            os._exit(NO_NAMESPACE)
        try:
            if user:
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"0 {user} 1")
                Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError:
            os._exit(NO_NAMESPACE)
        mounts = [
            ["mount", "--make-rprivate", "/"],
            ["mount", "-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", str(self.folder)],
        ]
        if any(subprocess.run(mount, capture_output=True).returncode for mount in mounts):
            os._exit(NO_NAMESPACE)
        for name, content in (("01_good.html", LAST_GOOD), ("01_good.ipynb", LAST_GOOD), ("claims.json", "[]")):
            (self.folder / name).write_text(content)
        with (self.folder / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while self.full:
                file.write(b"x" * 256)


class Listing:
    """Write down what lies in a folder that nobody else sees."""

    def __init__(self, folder, report):
        self.folder, self.report = folder, report

    def __call__(self):
        found = {path.name: path.read_text() for path in self.folder.iterdir() if path.name != "filler"}
        self.report.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("source", "full"),
    [("print('x' * 40_000)", "tmp"), ("print('<' * 9_000)", "build")],
    ids=["while it runs", "its page"],
)
def test_results_beyond_a_quota_are_not_published(source, full, place):
    """The second notebook fits, and only its page, which spells each character as four, does not."""
    write(place.folder, "01_good", CLAIM, source)
    place.keep("01_good")
    before = place.files()
    exitcode, _, errors = place.run(prepare=FileLimit(30_000))
    assert (exitcode, errors.count("\n")) == (1, 1)
    assert re.match(rf"01_good\.ipynb: no results: File too large: .*/{full}", errors)
    assert place.files() == before
    assert place.processes() == []


FILL = """import pathlib
with pathlib.Path({disk!r}, 'filler').open('ab', buffering=0) as file:
    try:
        while file.write(b'x' * 64):
            pass
    except OSError:
        pass"""


@pytest.mark.parametrize("full", [True, False], ids=["full before", "filled by a cell"])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(full, place, tmp_path):
    write(place.folder, "01_good", CLAIM, FILL.format(disk=str(place.output)))
    listing = tmp_path / "listing"
    exitcode, _, errors = place.run(
        prepare=SmallDisk(place.output, 204_800, full), report=Listing(place.output, listing)
    )
    if exitcode == NO_NAMESPACE:
        pytest.skip("this user may not mount a file system; the quota above stands for it")
    # whether a full disk still takes an empty folder differs between file systems
    assert exitcode in ((1, 2) if full else (1,))
    assert re.fullmatch(r"(cascade-lab run|01_good\.ipynb): .*No space left on device.*\n", errors)
    found = json.loads(listing.read_text())
    assert found == {"01_good.html": LAST_GOOD, "01_good.ipynb": LAST_GOOD, "claims.json": "[]"}
    assert place.processes() == []


class Obedient:
    """Permission bits count for this process and its children, for the administrator as well."""

    def __call__(self):
        if os.getuid():
            return
        override, read_search, drop_bound = 1, 2, 24
        libc = ctypes.CDLL(None, use_errno=True)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        sets = (ctypes.c_uint32 * 6)()
        done = libc.capget(header, sets)
        for i in range(3):
            sets[i] &= ~(1 << override | 1 << read_search)
        # the bounding set first: it needs a right that only the old set is sure to have
        done |= libc.prctl(drop_bound, override) | libc.prctl(drop_bound, read_search)
        if done | libc.capset(header, sets):
            os._exit(NO_NAMESPACE)


@contextlib.contextmanager
def read_only(folder):
    """No file or folder below can be changed by those for whom permission bits count."""
    paths = [folder, *folder.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(modes[path] & ~0o222)
    try:
        yield
    finally:
        for path in reversed(paths):
            path.chmod(modes[path])


def test_a_read_only_checkout_and_home_give_the_same_results_elsewhere(place):
    """K86: nothing is written beside the sources; matplotlib would warn in the cell when it finds no cache."""
    checkout = place.root / "checkout"
    package = Path(cli.__file__).parent
    shutil.copytree(package, checkout / "cascade_lab", ignore=shutil.ignore_patterns("__pycache__"))
    write(place.folder, "01_good", CLAIM, "import matplotlib.pyplot as plt\n_ = plt.figure()\nplt.close()")
    before = place.files()
    with read_only(checkout), read_only(place.root / "home"):
        exitcode, _, errors = place.run(prepare=Obedient())
        if exitcode == NO_NAMESPACE:
            pytest.skip("this administrator cannot give up its rights")
        assert exitcode == 2
        assert re.fullmatch(
            r"cascade-lab run: cannot write to .*build \(.*\); name a place with --output DIR\n", errors
        )
        assert place.files() == before
        results = place.root / "results"
        exitcode, table, errors = place.run("--output", str(results), prepare=Obedient())
        assert (exitcode, errors) == (0, "")
        assert table.splitlines()[-1].split()[-1] == "holds"
        refreshed = place.end(place.start("refresh", prepare=Obedient()))
        assert refreshed[0] == 2
        assert re.fullmatch(r"cascade-lab refresh: .*notebooks is rewritten, and cannot be\n", refreshed[2])
    assert execution.load(results / "01_good.ipynb").cells[3].outputs == []
    after = place.files()
    assert {name for name in after if not name.startswith("results")} == set(before)
    assert sorted(path.name for path in results.iterdir()) == ["01_good.html", "01_good.ipynb", "claims.json"]


def test_no_room_for_temporary_files_is_wrong_usage(place, monkeypatch, capsys):
    monkeypatch.setattr(canonical, "problems", lambda path, notebook: [])
    write(place.folder, "01_good", CLAIM)
    monkeypatch.setattr(tempfile, "tempdir", str(place.root / "nowhere"))
    for command in (["run", "--output", str(place.output)], ["refresh"], ["check"]):
        assert cli.main([command[0], "--notebooks", str(place.folder), *command[1:]]) == 2
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1
        assert "no place for temporary files" in errors
        assert "name one with TMPDIR" in errors
    assert list(place.output.iterdir()) == []


# places that exist already


def in_process(place, *arguments):
    return cli.main(["run", "--notebooks", str(place.folder), "--output", str(place.output), *arguments])


def test_results_go_around_what_else_lies_in_the_output_folder(place, monkeypatch, capsys):
    """A link is replaced, never followed; a folder in a result's place fails before anything is put into place."""
    monkeypatch.setattr(runner, "execute", lambda notebook, *_, **__: notebook)
    write(place.folder, "01_good", executed_claim("1.1"))
    outside = place.root / "outside"
    outside.write_text("mine")
    (place.output / "notes.txt").write_text("mine")
    (place.output / "01_good.html").symlink_to(outside)
    (place.output / "claims.json").symlink_to(place.root / "dangling")
    assert in_process(place) == 0
    assert outside.read_text() == (place.output / "notes.txt").read_text() == "mine"
    assert not (place.output / "01_good.html").is_symlink()
    assert not (place.root / "dangling").exists()
    before = place.files()

    (place.output / "01_good.html").unlink()
    (place.output / "01_good.html").mkdir()
    assert in_process(place) == 1
    errors = capsys.readouterr().err
    assert re.fullmatch(r"01_good\.ipynb: no results: 01_good\.html is a folder: .*\n", errors)
    assert {**place.files(), "checkout/build/01_good.html": before["checkout/build/01_good.html"]} == before

    shutil.rmtree(place.output)
    place.output.write_text("a file")
    assert in_process(place) == 2
    assert "cannot write to" in capsys.readouterr().err
    assert place.output.read_text() == "a file"

    place.output.unlink()
    (place.root / "disk").mkdir()
    place.output.symlink_to(place.root / "disk")
    assert in_process(place) == 0
    assert sorted(path.name for path in (place.root / "disk").iterdir()) == [
        "01_good.html",
        "01_good.ipynb",
        "claims.json",
    ]


@pytest.mark.parametrize("output", ["notebooks", ".", "link"])
def test_results_never_overwrite_the_notebooks_or_the_committed_figures(output, place, capsys):
    path = write(place.folder, "01_good", CLAIM)
    (place.folder.parent / "link").symlink_to(place.folder)
    before = path.read_bytes()
    place.output = place.folder.parent / output
    assert in_process(place) == 2
    assert "results would overwrite committed files" in capsys.readouterr().err
    assert path.read_bytes() == before


# notebooks whose parameters cannot be trusted


@pytest.mark.parametrize(
    ("parameters", "cells", "message"),
    [
        (None, [], r"01_bad\.ipynb[:,] expected exactly one cell tagged 'parameters', found 0"),
        (
            PARAMETERS,
            [code("rows: int = 4", "parameters")],
            r"01_bad\.ipynb, cell 3: expected exactly one cell .* found 2",
        ),
        ("rows = 3\ntwice = 2 * rows", [], r"01_bad\.ipynb, cell 2: .*`twice = 2 \* rows`: the value is not a literal"),
        ("rows = len('abc')", [], r"01_bad\.ipynb, cell 2: .*not a literal"),
    ],
)
@pytest.mark.parametrize("command", ["run", "check", "refresh"])
def test_a_notebook_without_plain_parameters_is_never_started(command, parameters, cells, message, place, capsys):
    """K77."""
    write(place.folder, "01_bad", *cells, code("raise SystemExit('it ran')"), parameters=parameters)
    if command == "run":
        place.keep("01_bad")
    before = place.files()
    options = ["--output", str(place.output)] if command == "run" else []
    assert cli.main([command, "--notebooks", str(place.folder), *options]) == 1
    errors = capsys.readouterr().err
    assert re.match(message, errors)
    assert command == "check" or errors.count("\n") == 1
    after = place.files()
    assert only_failure_added(before, after, "01_bad")
    assert "checkout/build/failed" not in after


# commands beside each other


@pytest.mark.long
def test_commands_beside_each_other_in_one_checkout_do_not_collide(place):
    """Two runs of one notebook, a run of another, a refresh and a check: all results are there and belong together."""
    wait = "import time\ntime.sleep(0.5)"
    for name in ("01_one", "02_two"):
        write(place.folder, name, code(CLAIM, "nbval-check-output"), wait)
    assert place.end(place.start("refresh"))[::2] == (0, "")
    before = {path: path.read_bytes() for path in place.folder.iterdir()}
    commands = [["run", "01"], ["run", "01"], ["run", "02"], ["refresh"], ["check"]]
    processes = [place.start(*command) for command in commands]
    assert [place.end(process)[::2] for process in processes] == [(0, "")] * len(commands)
    assert [r["notebook"] for r in runner.read_claims(place.output)] == ["01_one", "02_two"]
    names = ["01_one.html", "01_one.ipynb", "02_two.html", "02_two.ipynb", "claims.json"]
    assert sorted(path.name for path in place.output.iterdir()) == names
    assert {path: path.read_bytes() for path in place.folder.iterdir()} == before
    assert list((place.root / "tmp").iterdir()) == []
    assert place.processes() == []


def test_no_claim_is_lost_when_many_publish_at_once(place):
    failures = []

    def publish(number):
        path = place.folder / f"{number:02}_n.ipynb"
        record = {"id": "1", "notebook": path.stem, **FIELDS}
        for _ in range(10):
            try:
                runner._publish({place.output / path.name: b"{}"}, [record], path, place.output, None)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [r["notebook"] for r in runner.read_claims(place.output)] == [f"{n:02}_n" for n in range(8)]
    assert len(list(place.output.iterdir())) == 9


def test_a_notebook_saved_while_it_is_refreshed_keeps_what_was_saved(place, monkeypatch, capsys):
    path = write(place.folder, "01_good", CLAIM)

    def saved_meanwhile(notebook, *_, **__):
        write(place.folder, "01_good", CLAIM, "y = 2")
        return notebook

    monkeypatch.setattr(runner, "execute", saved_meanwhile)
    assert runner.refresh(folder=place.folder, figures=place.root / "figures") == 1
    assert (
        capsys.readouterr().err == "01_good.ipynb: was changed while it ran, so nothing was written; refresh it again\n"
    )
    assert "y = 2" in path.read_text()


def test_a_run_that_is_stopped_keeps_the_claims_of_notebooks_it_did_not_reach(place, monkeypatch):
    place.keep("01_good", "02_other", "03_removed")
    for name in ("01_good", "02_other"):
        write(place.folder, name, executed_claim("9.9"))

    def stopped_at_the_second(notebook, *_, path, **__):
        if path.stem != "01_good":
            raise Stopped(signal.SIGINT)
        return notebook

    monkeypatch.setattr(runner, "execute", stopped_at_the_second)
    with pytest.raises(Stopped):
        runner.run(folder=place.folder, output=place.output)
    found = {r["notebook"]: r["id"] for r in runner.read_claims(place.output)}
    assert found == {"01_good": "9.9", "02_other": "1.1"}


def test_the_status_of_a_failed_run_survives_a_reader_that_left(place, monkeypatch):
    """As in `cascade-lab run | head -1`."""
    write(place.folder, "01_bad", CLAIM, parameters=None)

    def broken(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(runner, "print_table", broken)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert in_process(place) == 1
