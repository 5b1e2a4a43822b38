"""The model of the last-level cache: streams counted by hand, an LRU written out, and what no order changes."""

from collections import OrderedDict

import numpy as np
import pytest

from cascade_lab import runtime
from cascade_lab.evidence import l2
from cascade_lab.evidence.compiled import in_child
from cascade_lab.evidence.ptx.run import Run

needs_triton = pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")
LOCKSTEP, ROUND_ROBIN, WALK, STAGGERED = l2.DRIFTS


def launch(*programs, storages=None, kernel="k"):
    """A launch by hand: per program its accesses as (tensor, sectors) or (tensor, sectors, kind)."""
    stream, counts = [], {}
    # accesses of all programs in turn, as the executor records those of a batch
    for step in range(max(map(len, programs))):
        for i, accesses in enumerate(programs):
            if step < len(accesses):
                name, sectors, *kind = accesses[step]
                kind = kind[0] if kind else "load"
                stream.append(((i, 0, 0), name, np.array(sectors), kind))
                counts[name, kind] = counts.get((name, kind), 0) + len(sectors)
    storages = storages or {name: 4096 * (1 + i) for i, name in enumerate(dict.fromkeys(x[1] for x in stream))}
    return Run(kernel, "sm_80", (len(programs), 1, 1), 32, sectors=counts, stream=stream, storages=storages)


def replayed(*runs, slots=1, drift=LOCKSTEP, seed=0):
    return l2.replay(l2.record(runs), slots=slots, drift=drift, seed=seed)


def line(i):
    """The four sectors of line i."""
    return list(range(4 * i, 4 * i + 4))


def test_what_was_never_read_comes_from_dram_once():
    found = replayed(launch([("k", line(0)), ("k", line(1)), ("v", line(0))]))
    assert found.volume == {"k": 256, "v": 128}
    assert found.dram(1 << 20) == found.dram(128) == found.compulsory() == {"k": 256, "v": 128}


@pytest.mark.parametrize(("lines", "dram"), [(1, 6), (2, 6), (3, 3), (4, 3)])
def test_a_second_pass_hits_when_all_lines_fit_and_never_otherwise(lines, dram):
    """LRU on a loop of three lines: all or nothing."""
    loop = [("k", line(0)), ("k", line(1)), ("k", line(2))]
    found = replayed(launch(loop * 2))
    assert found.volume == {"k": 6 * 128}
    assert found.dram(128 * lines) == {"k": 128 * dram}
    assert found.compulsory() == {"k": 3 * 128}
    # a part of a line holds nothing
    assert found.dram(128 * lines + 127) == found.dram(128 * lines)


def test_a_line_is_filled_by_sectors_and_lost_as_a_whole():
    # sectors 0 and 1, then 1 and 2 of one line: three are read; after another line, one place holds none of them
    accesses = [("k", [0, 1]), ("k", [1, 2]), ("k", line(1)), ("k", [0, 3]), ("k", [1])]
    found = replayed(launch(accesses))
    assert found.volume == {"k": 32 * 11}
    assert found.compulsory() == {"k": 32 * (4 + 4)}
    # with one place: 0, 1; 2; the other line; 0, 3; and 1 again, for the line came back without it
    assert found.dram(128) == {"k": 32 * (2 + 1 + 4 + 2 + 1)}
    assert found.dram(256) == {"k": 32 * (2 + 1 + 4 + 1)}


def test_a_sector_that_one_instruction_asks_for_twice_is_moved_twice_and_read_once():
    found = replayed(launch([("q", [5, 5, 5])]))
    assert (found.volume, found.dram(128)) == ({"q": 96}, {"q": 32})


def test_what_was_stored_is_found_without_a_read_until_it_is_lost():
    """Partial states pass from launch to launch, under two names; the merge's own output reads nothing."""
    write = launch([("o", line(0), "store"), ("o", line(1), "store"), ("q", line(0))], storages={"o": 4096, "q": 8192})
    merge = launch([("os", line(0)), ("os", line(1)), ("o", line(0), "store")], storages={"os": 4096, "o": 12288})
    found = replayed(write, merge)
    assert found.volume == {"o": 256, "q": 128, "o 2": 0}
    assert found.compulsory() == {"o": 0, "q": 128, "o 2": 0}
    assert found.dram(3 * 128) == {"o": 0, "q": 128, "o 2": 0}
    assert found.dram(2 * 128) == {"o": 256, "q": 128, "o 2": 0}
    # a store of one sector brings no other
    partly = replayed(launch([("o", [0], "store"), ("o", [0, 1])]))
    assert partly.dram(128) == {"o": 32}


@pytest.mark.parametrize(
    ("drift", "slots", "dram"),
    [
        # side by side, the second program finds what the first has just read
        (LOCKSTEP, 2, 4),
        (l2.Drift("pairs", burst=2), 2, 4),
        # four lines ahead are two too many for two places
        (ROUND_ROBIN, 2, 8),
        (LOCKSTEP, 1, 8),
        # 0 1 0 2 1 3 2 3, one step late: the first 0 and the last 3 are found
        (l2.Drift("one step", stagger=0.5), 2, 6),
        (l2.Drift("two steps", stagger=1.0), 2, 8),
    ],
)
def test_copies_hit_as_long_as_they_stay_close(drift, slots, dram):
    """Two programs read the same four lines through a cache of two."""
    copy = [("k", line(i)) for i in range(4)]
    assert replayed(launch(copy, copy), slots=slots, drift=drift).dram(256) == {"k": 128 * dram}


def test_programs_wait_in_grid_order_for_a_slot():
    """Three programs of 3, 1 and 2 accesses on two slots: the third starts where the second ended."""
    programs = [[("k", [4 * (10 * p + i)]) for i in range(n)] for p, n in enumerate((3, 1, 2))]
    recording = l2.record([launch(*programs)])
    (one,) = recording._launches
    order = l2._order(one.per_program, 2, LOCKSTEP, np.random.default_rng(0))
    assert (one.sectors[order] // 4).tolist() == [0, 10, 1, 20, 2, 21]
    wide = l2._order(one.per_program, 9, LOCKSTEP, np.random.default_rng(0))
    assert (one.sectors[wide] // 4).tolist() == [0, 10, 20, 1, 21, 2]
    late = l2._order(one.per_program, 2, STAGGERED, np.random.default_rng(0))
    # the second slot opens 1/2 x 3 steps late, and the third program takes the first slot when that is free
    assert (one.sectors[late] // 4).tolist() == [0, 1, 10, 2, 20, 21]


def test_grid_order_is_x_first():
    stream = [((x, y, 0), "k", np.array([4 * (2 * y + x)]), "load") for x in (1, 0) for y in (1, 0)]
    run = Run("k", "sm_80", (2, 2, 1), 32, sectors={("k", "load"): 4}, stream=stream, storages={"k": 4096})
    (one,) = l2.record([run])._launches
    assert (one.sectors // 4).tolist() == [0, 1, 2, 3]


def random_runs(rng, programs=7, tensors=("k", "v", "q")):
    """Two ragged launches over shared tensors, with stores and parts of lines."""
    runs = []
    for _ in range(2):
        work = [
            [
                (
                    tensors[rng.integers(len(tensors))],
                    np.sort(rng.integers(0, 60, rng.integers(1, 9))),
                    "store" if rng.random() < 0.2 else "load",
                )
                for _ in range(rng.integers(1, 40))
            ]
            for _ in range(programs)
        ]
        runs.append(launch(*work, storages={name: 4096 * (1 + i) for i, name in enumerate(tensors)}))
    return runs


def by_dictionary(recording, slots, drift, seed, capacity):
    """Lines in a dictionary, the longest unused first: bytes from DRAM by tensor."""
    rng, cache = np.random.default_rng(seed), OrderedDict()
    dram = dict.fromkeys(recording.names, 0)
    for one in recording._launches:
        ends = one.sizes.cumsum()
        for access in l2._order(one.per_program, slots, drift, rng):
            for sector in one.sectors[ends[access] - one.sizes[access] : ends[access]].tolist():
                held = cache.pop(sector // 4, set())
                if sector not in held and one.loads[access]:
                    at = np.searchsorted(recording._lines, sector // 4, "right") - 1
                    dram[recording.names[at]] += 32
                cache[sector // 4] = held | {sector}
                if len(cache) > capacity // 128:
                    cache.popitem(last=False)
    return dram


@pytest.mark.parametrize("drift", [*l2.DRIFTS, l2.Drift("both", burst=3, random=True, stagger=0.4)], ids=str)
@pytest.mark.parametrize("slots", [1, 3, 20])
def test_every_capacity_agrees_with_a_cache_written_out(drift, slots):
    rng = np.random.default_rng([slots, drift.burst])
    recording = l2.record(random_runs(rng))
    found = l2.replay(recording, slots=slots, drift=drift, seed=5)
    assert found.volume == recording.volume
    before = found.volume
    for capacity in (128, 3 * 128, 10 * 128, 25 * 128, 44 * 128, 1 << 20):
        dram = found.dram(capacity)
        assert dram == by_dictionary(recording, slots, drift, 5, capacity)
        # a larger LRU cache holds all that a smaller one does
        assert all(found.compulsory()[name] <= dram[name] <= before[name] for name in dram)
        before = dram
    assert found.dram(1 << 20) == found.compulsory()


def test_a_random_walk_repeats_by_its_seed():
    recording = l2.record(random_runs(np.random.default_rng(8)))
    one, again, other = (l2.replay(recording, slots=4, drift=WALK, seed=seed).dram(9 * 128) for seed in (1, 1, 2))
    assert one == again != other


def test_bad_input_is_refused_by_name():
    run = launch([("k", [0])])
    recording = l2.record([run])
    with pytest.raises(ValueError, match="runs: expected at least one launch"):
        l2.record([])
    with pytest.raises(ValueError, match="slots: expected a number >= 1, given 0"):
        l2.replay(recording, slots=0, drift=LOCKSTEP)
    with pytest.raises(ValueError, match="capacity: expected a number >= 128, given 127"):
        replayed(run).dram(127)
    with pytest.raises(TypeError, match="capacity: expected an integer"):
        replayed(run).dram(1e6)
    with pytest.raises(ValueError, match="burst: expected a number >= 1"):
        l2.Drift("none", burst=0)
    for stagger in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="stagger: expected a number from 0"):
            l2.Drift("back", stagger=stagger)


@needs_triton
def test_a_launch_without_its_stream_is_refused():
    said = in_child("without_stream()", module="tests.evidence.l2_programs")
    assert said == "runs: expected launches with their streams, given merge_pair_kernel without"


@needs_triton
def test_compiled_plans_move_the_ledgers_bytes_and_read_the_distinct_ones():
    """Two requests of 480 and 176 prefix tokens, 3 branches of 4 and 2 of 5, on 3 programs side by side."""
    lengths, capacity = [480, 176], 64 << 10
    found = in_child(f"plans({lengths}, 4, {capacity})", module="tests.evidence.l2_programs")
    drafts = 3 * 4 + 2 * 5
    prefix = sum(lengths)
    per_token = 2 * 2 * 64 * 2
    for x in found.values():
        assert sum(x["volume"][t] for t in "kv") == x["ledger"]
        assert sum(x["volume"].values()) == 32 * x["sectors"]
        assert x["distinct"] == per_token * (prefix + drafts)
        for replay in x["replays"].values():
            assert sum(replay["compulsory"][t] for t in "kv") == x["distinct"]
            assert replay["unbounded"] == replay["compulsory"]
            for name, read in replay["dram"].items():
                assert replay["compulsory"][name] <= read <= x["volume"][name]
    naive, cascade, fused = (found[plan] for plan in ("naive", "cascade", "fused"))
    assert naive["ledger"] == per_token * (3 * 480 + 2 * 176 + drafts)
    assert cascade["ledger"] == fused["ledger"] == per_token * (prefix + drafts)
    # what is loaded once is read once, in any order
    for x in (cascade, fused):
        assert all(sum(replay["dram"][t] for t in "kv") == x["distinct"] for replay in x["replays"].values())
    # the naive plan's copies side by side need their lines once, far apart more often
    assert sum(naive["replays"]["lockstep"]["dram"][t] for t in "kv") < naive["ledger"]
    assert "merge_many_kernel" in cascade["kernels"]
    # partial states are read where they were just written
    parts = [name for name in cascade["volume"] if name.startswith("o")]
    assert sum(cascade["volume"][name] for name in parts) > 0
    assert sum(cascade["replays"]["lockstep"]["compulsory"][name] for name in parts) == 0
