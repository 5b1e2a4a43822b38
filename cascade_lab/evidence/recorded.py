"""Recorded measurements: figures/measured/*.json, each with its source, its devices and its date.

`load` reads one for a notebook, `published` the one of others' times of plain and cascade attention, and `gpu_runs`
those of `cascade-lab bench` on GPUs. Nothing is measured here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cascade_lab.files import one_line, read_json
from cascade_lab.trigger import DEVICES, DeviceModel, predict_branches

REQUIRED = ("source", "devices", "date")
MAX_RECORD = 1 << 23


def load(name: str) -> dict | None:
    """The record figures/measured/`name`.json, or None where the notebook stands alone.

    Raises:
        ValueError: no JSON object of at most 8 MiB, or one without its source, devices and date.
    """
    if not re.fullmatch(r"\w+", name):
        raise ValueError(f"name: expected letters, digits and underscores, given {one_line(repr(name), 80)}")
    for path in (folder / f"{name}.json" for folder in _folders()):
        if path.is_file():
            record = read_json(path, MAX_RECORD)
            if not isinstance(record, dict):
                raise ValueError(f"{path.name}: expected a JSON object, given a {type(record).__name__}")
            kinds = {"source": (dict, list, str), "devices": list, "date": str}
            if missing := [key for key in REQUIRED if not record.get(key) or not isinstance(record[key], kinds[key])]:
                raise ValueError(f"{path.name}: expected {', '.join(REQUIRED)}, {', '.join(missing)} missing")
            return record
    return None


def _folders() -> list[Path]:
    return [
        root / "figures" / "measured" for root in (Path(__file__).resolve().parents[2], Path.cwd(), Path.cwd().parent)
    ]


@dataclass(frozen=True)
class GpuRun:
    """What a run of `cascade-lab bench` on a GPU says about two claims.

    Attributes:
        device, date: of the run.
        naive_over_cascade: prefix length to (time ratio, ratio of tokens by the ledger), at the run's centre.
        prefill: hit ratio to (share of the time that is left, share of the pairs), of the longest prompt.
    """

    device: str
    date: str
    naive_over_cascade: Mapping[int, tuple[float, float]]
    prefill: Mapping[float, tuple[float, float]]

    def prefill_distance(self, law: Callable[[float], float]) -> float:
        """Mean distance of the time that is left from `law`, over hit ratios above 0; NaN without any."""
        found = [abs(time - law(h)) for h, (time, _) in self.prefill.items() if h > 0]
        return sum(found) / len(found) if found else math.nan


def gpu_runs() -> tuple[GpuRun, ...]:
    """The recorded runs on GPUs, figures/measured/gpu_*.json of the first folder that has any; none without."""
    found = next(filter(None, (sorted(folder.glob("gpu_*.json")) for folder in _folders())), [])
    return tuple(_gpu_run(read_json(path, MAX_RECORD)) for path in found)


def _gpu_run(record: dict) -> GpuRun:
    rows_of = {name: section.get("rows", []) for name, section in record["sections"].items()}
    _, topk, batch, group, rows = record["scale"]["centre"]
    centre = {"topk": topk, "batch": batch, "group": group, "rows": rows}
    verified = [row for row in rows_of.get("verify", []) if centre.items() <= row.items()]
    cascades = {row["length"]: row["plans"]["cascade"] for row in verified}
    prefills = rows_of.get("prefill", [])
    without = {row["new"]: row["seconds"] for row in prefills if row["hit"] == 0}
    n = max(without, default=0)
    left = {r["hit"] / n: (r["seconds"] / without[n], r["remaining"]) for r in prefills if r["new"] + r["hit"] == n}
    return GpuRun(
        device=record["provenance"]["device"],
        date=record["provenance"]["date"],
        naive_over_cascade={n: (c["ratio_measured"], c["ratio_predicted"]) for n, c in sorted(cascades.items())},
        prefill=dict(sorted(left.items())),
    )


@dataclass(frozen=True)
class PublishedCase:
    """Someone's measurement of plain against cascade attention over one shared prefix, and what it takes to model it.

    Attributes:
        source: where it was published.
        device: the device, with the assumptions that its model needed.
        prefix_len, branches, suffix_len: the shape; num_q_heads, num_kv_heads, head_dim: of one layer.
        speedup: plain over cascade.
        launches: kernels per call of each plan in that implementation.
        plain_us, cascade_us: as published; None where only the ratio was.
        wrong: empty where the model gets the sign right, else why it does not.
    """

    source: str
    device: DeviceModel
    prefix_len: int
    branches: int
    suffix_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    speedup: float
    launches: Mapping[str, int]
    plain_us: float | None = None
    cascade_us: float | None = None
    wrong: str = ""

    def predicted_speedup(self) -> float:
        """Plain over cascade by the trigger's model, 16-bit cache; decoding, so each branch has one query row."""
        by_plan = predict_branches(
            self.prefix_len,
            self.branches,
            self.suffix_len,
            1,
            device_model=self.device,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rows="leaf",
            launches=self.launches,
        )
        return by_plan["naive"].seconds / by_plan["cascade"].seconds


def published() -> tuple[PublishedCase, ...]:
    """Published times of plain and cascade attention, figures/measured/published.json; none without that record."""
    record = load("published")
    if record is None:
        return ()
    devices = DEVICES | {model["name"]: DeviceModel(**model) for model in record["device models"]}
    cases = [series | case for series in record["series"] for case in series["cases"]]
    return tuple(_case({key: value for key, value in case.items() if key != "cases"}, devices) for case in cases)


def _case(fields: dict, devices: Mapping[str, DeviceModel]) -> PublishedCase:
    """A case from what its series and it say; a speed-up that is not given is the ratio of its times."""
    if "speedup" not in fields:
        fields["speedup"] = fields["plain_us"] / fields["cascade_us"]
    return PublishedCase(**fields | {"device": devices[fields["device"]]})
