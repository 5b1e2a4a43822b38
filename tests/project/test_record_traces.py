"""The record of public traces follows from their files, and its maker from small files by hand."""

import json
from pathlib import Path

import pytest

from cascade_lab.evidence import recorded
from cascade_lab.traces import AGENTIC, generate, replay, summarize, write_mooncake
from tools import record_traces

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def test_recorded_results_are_those_of_the_published_traces():
    record = recorded.load("traces")
    if not DATA.is_dir():
        pytest.skip("the published traces are not beside this checkout (../shared/data)")
    again = record_traces.summarise(DATA)
    assert {name: value for name, value in record.items() if name != "date"} == again


def test_a_summary_has_the_sums_of_both_traces_to_six_digits(tmp_path):
    conversation, agentic = (tmp_path / record_traces.SOURCES[name]["file"] for name in ("conversation", "agentic"))
    for path in (conversation, agentic):
        path.parent.mkdir()
    write_mooncake(generate(0, 50), conversation)
    pairs = list(replay(generate(1, 30, traffic=AGENTIC), block_size=64))
    agentic.write_text("input_tokens,prefix_hit_tokens\n" + "".join(f"{n},{hit}\n" for n, hit in pairs))
    found = json.loads(json.dumps(record_traces.summarise(tmp_path)))
    assert [found["traces"][name]["requests"] for name in ("conversation", "agentic")] == [50, 30]
    expected = summarize(pairs)
    assert found["traces"]["agentic"]["pairs_left"] == expected.pairs_left
    assert found["traces"]["agentic"]["rms_hit"] == pytest.approx(expected.rms_hit, rel=1e-6)
    assert sum(found["traces"]["conversation"]["histogram"]["requests"]) == 50
    assert [source["licence"] for source in found["source"]] == ["Apache-2.0"] * 2
    sweep = list(found["conversation token_hit by capacity"].values())
    assert sweep == sorted(sweep)
