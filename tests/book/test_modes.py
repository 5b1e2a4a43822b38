"""In which modes of Triton the claims hold: the record, how it is made, and runs that show it to be true."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from nbformat import from_dict

from cascade_lab import cli, runtime
from cascade_lab.book import modes, runner
from cascade_lab.book.execution import load
from cascade_lab.evidence import recorded
from cascade_lab.evidence.claims import MIME, gather
from cascade_lab.files import UsageError
from tests.notebook_cases import FIELDS, code, shown_claim, write

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / "notebooks"
EXECUTED = {target: f"executed {target}" for target in ("sm_80", "sm_90")}
needs_triton = pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")


def test_the_record_names_exactly_the_claims_of_the_committed_notebooks():
    """`cascade-lab modes` makes it again after a claim has changed."""
    claims = {path.stem: gather(load(path)) for path in runner.select(FOLDER)}
    known = modes.held(FOLDER)
    assert list(known) == [(name, claim.id, claim.statement) for name, made in claims.items() for claim in made]
    for name, made in claims.items():
        for claim in made:
            in_interpreter = modes.INTERPRETED in known[name, claim.id, claim.statement]
            assert in_interpreter == (claim.verdict == "holds"), (name, claim.id)


def test_the_record_says_where_it_is_from():
    record = recorded.load("modes")
    assert (record["source"], record["devices"][:2]) == ("cascade-lab modes", ["sm_80", "sm_90"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])


def test_readme_counts_what_the_record_holds():
    known = modes.held(FOLDER)
    found = modes.counts(known)
    (row,) = [line for line in (CHECKOUT / "README.md").read_text().splitlines() if "whose PTX is executed" in line]
    (numbers,) = re.findall(r"(\d+) claims of (\d+) hold for sm_80, (\d+) for sm_90", row)
    expected = found["executed sm_80"], len(known), found["executed sm_90"]
    assert tuple(map(int, numbers)) == expected, modes.summary(known)
    for limit in ("not machine code", "the assembler is trusted", "nothing is timed"):
        assert limit in row


# `make test` executes one notebook for one target, test-all every notebook for one and a sample for the other
SAMPLE = [("04_other_regions", "sm_80")]
LONG = [(path.stem, "sm_90") for path in sorted(FOLDER.glob("*.ipynb"))] + [
    ("01_lse_splitting", "sm_80"),
    ("06_across_ranks", "sm_80"),
]


@needs_triton
@pytest.mark.parametrize(("name", "target"), [*SAMPLE, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)])
def test_claims_hold_as_executed_code_where_the_record_says_so(name, target, tmp_path):
    assert cli.main(["run", name, "--target", target, "--output", str(tmp_path), "--timeout", "600"]) == 0
    assert not (tmp_path / "claims.json").exists()
    executed = load(tmp_path / target / f"{name}.ipynb")
    printed = "".join(output.get("text", "") for cell in executed.cells for output in cell.get("outputs", ()))
    assert f"triton mode: executed for {target}" in printed
    made = {record["id"]: record["verdict"] for record in runner.read_claims(tmp_path / target)}
    known = {id: held for (notebook, id, _), held in modes.held(FOLDER).items() if notebook == name}
    assert set(made) == set(known)
    for id, held in known.items():
        assert (made[id] == "holds") == (EXECUTED[target] in held), (id, made[id])


WHERE = "import os\nprint(os.environ.get('CASCADE_LAB_TARGET'), os.environ.get('TRITON_INTERPRET'))"
# stands for the mode in notebooks that import no kernel
ELSEWHERE = "os.environ.get('CASCADE_LAB_TARGET') == 'sm_90'"


def small(folder):
    """A notebook that says where it runs, and whose second claim is made in the interpreter and for sm_80 alone."""
    second = "\n".join(f"    {line}" for line in shown_claim("1.2").splitlines())
    cells = [WHERE, shown_claim("1.1"), f"if not {ELSEWHERE}:\n{second}", shown_claim("1.3")]
    shown = {id: {"output_type": "display_data", "data": {MIME: {"id": id, **FIELDS}, "text/plain": "claim"},
                  "metadata": {MIME: {"measured": 3}}} for id in ("1.1", "1.2", "1.3")}  # fmt: skip
    made = [code(cell, outputs=[from_dict(shown[f"1.{i}"])] if i else []) for i, cell in enumerate(cells)]
    return write(folder, "01_small", *made)


def printed(path):
    return load(path).cells[2].outputs[0].text.strip()


@needs_triton
def test_a_run_for_a_target_lies_apart_and_lists_what_it_could_not_measure(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(runtime.SWITCH, "1")
    monkeypatch.delenv(runtime.TARGET, raising=False)
    folder, output = tmp_path / "notebooks", tmp_path / "build"
    small(folder)
    assert cli.main(["run", "--notebooks", str(folder)]) == 0
    assert cli.main(["run", "--notebooks", str(folder), "--target", "sm_90"]) == 0
    assert printed(output / "01_small.ipynb") == "None 1"
    assert printed(output / "sm_90" / "01_small.ipynb") == "sm_90 0"
    verdicts = [
        [(r["id"], r["verdict"], r["measured"]) for r in runner.read_claims(p)] for p in (output, output / "sm_90")
    ]
    assert verdicts[0] == [(id, "holds", 3) for id in ("1.1", "1.2", "1.3")]
    assert verdicts[1] == [verdicts[0][0], ("1.2", "not measured here", None), verdicts[0][2]]
    capsys.readouterr()
    assert cli.main(["claims", "--notebooks", str(folder), "--target", "sm_90"]) == 0
    assert capsys.readouterr().out.count("not measured here") == 1


@needs_triton
def test_modes_are_recorded_shown_and_forgotten_when_the_claim_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    folder = tmp_path / "notebooks"
    path = small(folder)
    place = tmp_path / "figures" / "measured" / "modes.json"
    options = ["--notebooks", str(folder)]
    assert cli.main(["modes", *options]) == 0
    said = "of 3 claims hold 3 interpreted, 3 executed sm_80, 2 executed sm_90"
    assert capsys.readouterr().out.strip() == said
    both = ("interpreted", "executed sm_80", "executed sm_90")
    rows = {("01_small", f"1.{i}", "rows arrive"): both[:2] if i == 2 else both for i in (1, 2, 3)}
    assert modes.held(folder) == rows

    # what a GPU once showed stays, as long as the claim is the same
    record = json.loads(place.read_text())
    for claim in record["notebooks"]["01_small"]:
        claim["modes"].append("on a GPU")
    place.write_text(json.dumps(record))
    path.write_text(path.read_text().replace("rows arrive", "rows arrived", 1))
    assert cli.main(["modes", *options]) == 0
    texts = [modes.text(held) for held in modes.held(folder).values()]
    assert sum("on a GPU" in text for text in texts) == 2
    capsys.readouterr()

    assert cli.main(["run", *options]) == 0
    assert cli.main(["claims", *options]) == 0
    header, _, first, second, third = capsys.readouterr().out.splitlines()[-5:]
    assert header.split()[-2:] == ["held", "in"]
    assert second.endswith("holds    interpreted; executed sm_80; on a GPU")
    assert third.endswith("holds    interpreted; executed sm_80, sm_90; on a GPU")


def test_a_notebook_that_fails_in_one_mode_leaves_the_record_as_it_was(tmp_path, capsys):
    folder = tmp_path / "notebooks"
    write(folder, "01_small", code(shown_claim("1.1")), f"import os\nassert not {ELSEWHERE}")
    place = tmp_path / "figures" / "measured" / "modes.json"
    place.parent.mkdir(parents=True)
    place.write_text('{"notebooks": {}}')
    environments = {"executed sm_90": {runtime.TARGET: "sm_90"}}
    assert modes.record(environments, folder=folder, devices=["sm_90"], provenance={}) == 1
    assert "01_small.ipynb, cell 4: AssertionError" in capsys.readouterr().err
    assert place.read_text() == '{"notebooks": {}}'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "damaged"),
        ("[]", "whose notebooks list"),
        ('{"notebooks": {"01": 3}}', "whose notebooks list"),
        ('{"notebooks": {"01": [{"id": "1.1"}]}}', "01: expected id, statement and modes"),
        ('{"notebooks": {"01": [{"id": "1", "statement": "s", "modes": ["sm_90"]}]}}', "expected some of"),
    ],
)
def test_a_damaged_record_is_named(text, named, tmp_path):
    place = modes.record_file(tmp_path / "notebooks")
    place.parent.mkdir(parents=True)
    place.write_text(text)
    with pytest.raises(UsageError, match=named):
        modes.held(tmp_path / "notebooks")


@pytest.mark.parametrize("command", ["run", "claims"])
@pytest.mark.parametrize(
    ("target", "known"), [("sm_86", ", which is compiled for but not executed"), ("h100", ""), ("SM_90", "")]
)
def test_a_target_that_is_not_executed_is_one_line_and_status_2(command, target, known, tmp_path, capsys):
    assert cli.main([command, "--target", target, "--output", str(tmp_path / "out")]) == 2
    said = f"cascade-lab {command}: --target: expected one of sm_80, sm_90, given {target!r}{known}\n"
    assert capsys.readouterr() == ("", said)
    assert not (tmp_path / "out").exists()


def test_the_target_of_the_environment_is_taken_as_if_it_were_given():
    command = [sys.executable, "-m", "cascade_lab", "run", "04"]
    environment = os.environ | {runtime.TARGET: "sm_75", "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=CHECKOUT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("cascade-lab run: --target: expected one of sm_80, sm_90, given 'sm_75'")
