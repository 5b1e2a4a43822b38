"""The log that ncu writes as CSV: lines of its own, a header, and one quoted line per launch and metric."""

import csv
import io

from cascade_lab.bench.gpu.counters import ASKED, DRAM, FOUND, METRICS

HEADER = [
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
]
HEADER += ["Device", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value"]
UNITS = {DRAM: "byte", ASKED: "sector", FOUND: "sector"}


def log_of(kernels, *, unit=None, drop=None, value=None):
    """The log of ncu: lines of its own, a header, and one quoted line per launch and metric, numbers with commas."""
    text = io.StringIO()
    text.write("==PROF== Connected to process 4242\n")
    for kernel in kernels:
        text.write(f'==PROF== Profiling "{kernel}": 0%....50%....100% - 3 passes\n')
    text.write("==PROF== Disconnected from process 4242\n")
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(HEADER)
    for i, kernel in enumerate(kernels):
        sectors = 1000 * (i + 1)
        values = {ASKED: sectors, FOUND: sectors // 4, DRAM: 32 * (sectors - sectors // 4)}
        for metric in METRICS:
            if metric == drop:
                continue
            shown = f"{values[metric]:,}" if value is None else value
            fixed = ["4242", "python", "127.0.0.1", kernel, "1", "7", "(128, 1, 1)", "(64, 2, 1)", "0", "9.0"]
            writer.writerow([i, *fixed, "Command line profiler metrics", metric, unit or UNITS[metric], shown])
    return text.getvalue()
