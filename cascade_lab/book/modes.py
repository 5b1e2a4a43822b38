"""In which modes each claim held: in the interpreter, as code compiled for sm_80 or sm_90 and executed, on a GPU.

The interpreter's verdicts are those of the notebooks as they are kept, which `check` proves fresh. For every other mode
the notebooks are run with default parameters, and what came of each claim is kept in figures/measured/modes.json. A
claim is known by notebook, id and statement: one that was changed since holds nowhere until the modes are run again.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from cascade_lab.book import runner
from cascade_lab.book.execution import load, temporary_folder
from cascade_lab.evidence.claims import HOLDS, gather
from cascade_lab.files import UsageError, one_line, put_in_place, read_json

INTERPRETED, ON_A_GPU = "interpreted", "on a GPU"
EXECUTED = {"sm_80": "executed sm_80", "sm_90": "executed sm_90"}
MODES = (INTERPRETED, *EXECUTED.values(), ON_A_GPU)
COLUMN = "held in"
MARKS = {INTERPRETED: "I", "executed sm_80": "80", "executed sm_90": "90", ON_A_GPU: "GPU"}
"""One mark for each mode, where a column has no room for its name."""

Held = dict[tuple[str, str, str], tuple[str, ...]]


def record_file(folder: Path) -> Path:
    """The record beside a folder of notebooks."""
    return folder.parent / "figures" / "measured" / "modes.json"


def held(folder: Path) -> Held:
    """Modes by (notebook, id, statement), in the order of `MODES`; empty where there is no record.

    Raises:
        UsageError: the record is damaged.
    """
    path = record_file(folder)
    if not path.is_file():
        return {}
    try:
        return _held(read_json(path))
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} is damaged ({one_line(error)}); `cascade-lab modes` makes it again") from None


def _held(record: object) -> Held:
    notebooks = record.get("notebooks") if isinstance(record, dict) else None
    if not isinstance(notebooks, dict) or not all(isinstance(claims, list) for claims in notebooks.values()):
        raise ValueError("expected an object whose notebooks list their claims")
    found: Held = {}
    for notebook, claims in notebooks.items():
        for claim in claims:
            if not isinstance(claim, dict) or set(claim) != {"id", "statement", "modes"}:
                raise ValueError(f"{notebook}: expected id, statement and modes, given {one_line(repr(claim), 80)}")
            modes = claim["modes"]
            if not isinstance(modes, list) or modes != [mode for mode in MODES if mode in modes]:
                raise ValueError(f"{notebook}: modes: expected some of {MODES}, given {one_line(repr(modes), 80)}")
            found[notebook, str(claim["id"]), str(claim["statement"])] = tuple(modes)
    return found


def text(modes: Sequence[str]) -> str:
    """Modes in one cell of a table: "interpreted; executed sm_80, sm_90"."""
    executed = [target for target, mode in EXECUTED.items() if mode in modes]
    parts = [INTERPRETED] * (INTERPRETED in modes) + [f"executed {', '.join(executed)}"] * bool(executed)
    return "; ".join(parts + [ON_A_GPU] * (ON_A_GPU in modes))


def with_modes(records: Sequence[Mapping[str, object]], known: Held) -> list[dict[str, object]]:
    """Objects of claims.json, each with the cell that says in which modes it held."""
    key = ("notebook", "id", "statement")
    return [dict(record) | {COLUMN: text(known.get(tuple(record[name] for name in key), ()))} for record in records]


def counts(known: Held) -> dict[str, int]:
    """Claims that held, by mode."""
    return {mode: sum(mode in modes for modes in known.values()) for mode in MODES}


def record(
    environments: Mapping[str, Mapping[str, str]],
    *,
    folder: Path,
    devices: Sequence[str],
    provenance: Mapping[str, str],
    cell_timeout: int = runner.CELL_TIMEOUT,
) -> int:
    """Run all notebooks once per mode and write which claims held where; nothing when a notebook fails in one.

    What held on a GPU stays recorded when this machine has none, for claims that are as they were.

    Args:
        environments: by mode of `MODES` other than the interpreter, the variables that bring it about.
        folder: the notebooks folder.
        devices: what the modes stand for, for the record.
        provenance: versions and machine, for the record.
        cell_timeout: seconds for each cell.

    Returns:
        0, or 1 after the messages of the run that failed.
    """
    before = held(folder)
    committed = {path.stem: gather(load(path)) for path in runner.select(folder)}
    verdicts = {
        (stem, claim.id): [INTERPRETED] * (claim.verdict == HOLDS) for stem in committed for claim in committed[stem]
    }
    for mode, environment in environments.items():
        with temporary_folder() as output:
            status = runner.run(
                folder=folder, output=output, environment=environment, cell_timeout=cell_timeout, quiet=True
            )
            if status:
                return status
            for made in runner.read_claims(output):
                if made["verdict"] == HOLDS:
                    verdicts[made["notebook"], made["id"]].append(mode)
    notebooks: dict[str, list[dict[str, object]]] = {}
    for stem, claims in committed.items():
        notebooks[stem] = []
        for claim in claims:
            modes = verdicts[stem, claim.id]
            if ON_A_GPU not in environments and ON_A_GPU in before.get((stem, claim.id, claim.statement), ()):
                modes.append(ON_A_GPU)
            notebooks[stem].append(
                {"id": claim.id, "statement": claim.statement, "modes": sorted(modes, key=MODES.index)}
            )
    made = {
        "source": "cascade-lab modes",
        "devices": list(devices),
        "date": datetime.date.today().isoformat(),
        "provenance": dict(provenance),
        "notebooks": notebooks,
    }
    content = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
    put_in_place({record_file(folder): content.encode()})
    print(summary(_held(made)))
    return 0


def summary(known: Held) -> str:
    """How many claims held in each mode, in one line."""
    found = ", ".join(f"{number} {mode}" for mode, number in counts(known).items() if number)
    return f"of {len(known)} claims hold {found}"
