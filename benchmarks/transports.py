"""Compares message libraries on one link: time, bandwidth and processor time against size.

    sudo python benchmarks/transports.py                  # about 5 minutes
    python benchmarks/transports.py --report-only         # only write the section again

Runs `ddltrace experiment transports` on two emulated hosts for each bandwidth, and writes its
section of docs/experiments.md. A bandwidth that is already in the directory is not measured again.
Needs root, iproute2, the extras `mpi`, `zmq` and `grpc`, and an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from measured_files import measured
from page_section import PAGE, write_image, write_section
from svg_plots import curves

from ddltrace.analyzer.formatting.units import NOT_KNOWN
from ddltrace.experiments.transport_benchmark.comparison import Point

BANDWIDTHS: Final = ("100mbit", "1gbit")
TRANSPORTS: Final = ("gloo", "tcp", "tcp:connections=4", "zmq", "grpc", "mpi", "ucx")
_OPERATIONS: Final = ("ping_pong", "push_pull", "all_reduce")


def main() -> None:
    """Measures the missing bandwidths and writes the section."""
    options = _parse_options()
    bandwidths = options.bandwidth or BANDWIDTHS
    measure = None if options.report_only else partial(_measure, options)
    found = measured(bandwidths, options.directory, str, measure)
    write_section("transports", _section(found, options.page), options.page)
    print(f"wrote {options.page}")


def _measure(options: argparse.Namespace, bandwidth: str, file: Path) -> None:
    command = [sys.executable, "-m", "ddltrace", "experiment", "transports", "--json"]
    command += ["--hosts", "2", "--bandwidth", bandwidth, "--max-bytes", str(options.max_bytes)]
    command += ["--rounds", str(options.rounds)]
    for transport in options.transport or TRANSPORTS:
        command += ["--transport", transport]
    print(f"== {bandwidth}", flush=True)
    # If a library is missing, its row says so and the exit status is 1.
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        sys.exit(done.returncode or 1)
    results = json.loads(done.stdout) | {"date": datetime.date.today().isoformat()}
    file.write_text(json.dumps(results), encoding="utf-8")


def _section(found: Sequence[tuple[str, dict[str, Any]]], page: Path) -> str:
    first = found[0][1]
    parts = [
        "## Transports on one link",
        f"`benchmarks/transports.py` on {first['date']} with ddltrace {version('ddltrace')}, "
        f"{os.cpu_count()} cores: two ranks, each on an emulated host. *us*: median time of the "
        "smallest message; of a ping-pong, half a round. *Mbit/s*: bytes of the largest message "
        f"over its time; {_range(first)}. A push-pull sends the message there and back in one "
        "round. The emulated link lets short bursts pass at once, so a ping-pong of large messages "
        "can exceed its rate by some percent. *Processor*: time of both ranks, with all threads of "
        "the library, for each byte of the largest message. "
        "[The operations](experiment-guide.md#transports).",
    ]
    for bandwidth, results in found:
        lines = [
            f"### {bandwidth}",
            "",
            "| transport | "
            + " | ".join(
                f"{name.replace('_', '-')}: us | Mbit/s | processor ns/byte" for name in _OPERATIONS
            )
            + " |",
            "|---|" + "---|" * (3 * len(_OPERATIONS)),
        ]
        for row in results["transports"]:
            values = [part for name in _OPERATIONS for part in _cells(row, name)]
            lines.append(f"| `{row['transport']}` | {' | '.join(values)} |")
        missing = [
            f"- `{row['transport']}` {row['status']}: {row['reason'].partition(chr(10))[0]}"
            for row in results["transports"]
            if row["status"] != "complete"
        ]
        image = write_image(f"transports-{bandwidth}", _plot(bandwidth, results), page)
        plot = f"![One-way time of a message at {bandwidth}]({image})"
        parts.append("\n".join([*lines, *(["", *missing] if missing else []), "", plot]))
    return "\n\n".join(parts)


def _range(results: dict[str, Any]) -> str:
    sizes = [point["bytes"] for row in results["transports"] for point in row["points"]]
    return f"sizes are {min(sizes):,} to {max(sizes):,} bytes"


def _cells(row: dict[str, Any], operation: str) -> list[str]:
    points = _points(row, operation)
    if not points:
        return [NOT_KNOWN] * 3
    smallest, *_, largest = points
    return [
        f"{smallest.one_way_us:.0f}",
        f"{largest.gbit_s * 1e3:.0f}",
        f"{largest.cpu_ns_per_byte:.2f}",
    ]


def _points(row: dict[str, Any], operation: str) -> list[Point]:
    """What was measured of one operation, by size."""
    points = [Point(**each) for each in row["points"] if each["operation"] == operation]
    return sorted(points, key=lambda point: point.bytes)


def _plot(bandwidth: str, results: dict[str, Any]) -> str:
    series = {
        row["transport"]: [
            (float(point.bytes), point.one_way_us) for point in _points(row, "ping_pong")
        ]
        for row in results["transports"]
        if row["points"]
    }
    return curves(f"One-way time of a message at {bandwidth}", series, "bytes", "us")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("transports-benchmark"))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--bandwidth", action="append", help="repeat it; default: two")
    parser.add_argument("--transport", action="append", help="repeat it; default: all on the CPU")
    parser.add_argument("--max-bytes", type=int, default=4 << 20)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--report-only", action="store_true", help="measure nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
