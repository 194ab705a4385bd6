"""Compares message libraries on one link: time, bandwidth and processor time against size.

    sudo python benchmarks/transports.py                  # about 15 minutes
    python benchmarks/transports.py --report-only         # only write the section again

Runs `ddltrace experiment transports` on two emulated hosts for each bandwidth, in rounds, and
writes its section of docs/experiments.md. What was measured stays in benchmarks/results/, one file
for each round; a round that has one is not measured again. Needs root, iproute2, the extras `mpi`,
`zmq` and `grpc`, and an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from measured_files import measured, over_rounds
from page_section import PAGE, RESULTS, write_image, write_section
from svg_plots import curves

from ddltrace.analyzer.formatting.units import NOT_KNOWN
from ddltrace.experiments.transport_benchmark.comparison import Point

BANDWIDTHS: Final = ("100mbit", "1gbit")
TRANSPORTS: Final = ("gloo", "tcp", "tcp:connections=4", "zmq", "grpc", "mpi", "ucx")
_OPERATIONS: Final = ("ping_pong", "push_pull", "all_reduce")


def main() -> None:
    """Measures the missing rounds and writes the section."""
    options = _parse_options()
    bandwidths = options.bandwidth or BANDWIDTHS
    cases = list(itertools.product(range(1, options.repeats + 1), bandwidths))
    measure = None if options.report_only else partial(_measure, options)
    found: dict[str, list[dict[str, Any]]] = {}
    for (_, bandwidth), results in measured(cases, options.directory, _name, measure):
        found.setdefault(bandwidth, []).append(results)
    write_section("transports", _section(found, options.page), options.page)
    print(f"wrote {options.page}")


def _name(case: tuple[int, str]) -> str:
    number, bandwidth = case
    return f"transports-{bandwidth}-{number}"


def _measure(options: argparse.Namespace, case: tuple[int, str], file: Path) -> None:
    number, bandwidth = case
    command = [sys.executable, "-m", "ddltrace", "experiment", "transports", "--json"]
    command += ["--hosts", "2", "--bandwidth", bandwidth, "--max-bytes", str(options.max_bytes)]
    command += ["--rounds", str(options.rounds)]
    for transport in options.transport or TRANSPORTS:
        command += ["--transport", transport]
    print(f"== {bandwidth}, round {number}", flush=True)
    # If a library is missing, its row says so and the exit status is 1.
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        sys.exit(done.returncode or 1)
    results = json.loads(done.stdout) | {"date": datetime.date.today().isoformat()}
    file.write_text(json.dumps(results), encoding="utf-8")


def _section(found: dict[str, list[dict[str, Any]]], page: Path) -> str:
    first, *others = next(iter(found.values()))
    parts = [
        "## Transports on one link",
        f"`benchmarks/transports.py` on {first['date']} with ddltrace {version('ddltrace')}, "
        f"{os.cpu_count()} cores: two ranks, each on an emulated host; median of "
        f"{1 + len(others)} rounds with the lowest and the highest one, where a round runs all "
        "transports in turn. *us*: median time of the "
        "smallest message; of a ping-pong, half a round. *Mbit/s*: bytes of the largest message "
        f"over its time; {_range(first)}. A push-pull sends the message there and back in one "
        "round. The emulated link lets short bursts pass at once, so a ping-pong of large messages "
        "can exceed its rate by some percent. *Processor*: time of both ranks, with all threads of "
        "the library, for each byte of the largest message. "
        "[The operations](experiment-guide.md#transports).",
    ]
    for bandwidth, rounds in found.items():
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
        # The same transports in the same order in every round.
        for rows in zip(*(results["transports"] for results in rounds), strict=True):
            values = [part for name in _OPERATIONS for part in _cells(rows, name)]
            lines.append(f"| `{rows[0]['transport']}` | {' | '.join(values)} |")
        missing = [
            f"- `{row['transport']}` {row['status']}: {row['reason'].partition(chr(10))[0]}"
            for results in rounds
            for row in results["transports"]
            if row["status"] != "complete"
        ]
        image = write_image(f"transports-{bandwidth}", _plot(bandwidth, rounds), page)
        plot = f"![One-way time of a message at {bandwidth}]({image})"
        parts.append("\n".join([*lines, *(["", *missing] if missing else []), "", plot]))
    return "\n\n".join(parts)


def _range(results: dict[str, Any]) -> str:
    sizes = [point["bytes"] for row in results["transports"] for point in row["points"]]
    return f"sizes are {min(sizes):,} to {max(sizes):,} bytes"


def _cells(rows: Sequence[dict[str, Any]], operation: str) -> list[str]:
    ends = [(points[0], points[-1]) for row in rows if (points := _points(row, operation))]
    if not ends:
        return [NOT_KNOWN] * 3
    return [
        over_rounds([smallest.one_way_us for smallest, _ in ends], 0),
        over_rounds([largest.gbit_s * 1e3 for _, largest in ends], 0),
        over_rounds([largest.cpu_ns_per_byte for _, largest in ends], 2),
    ]


def _points(row: dict[str, Any], operation: str) -> list[Point]:
    """What was measured of one operation, by size."""
    points = [Point(**each) for each in row["points"] if each["operation"] == operation]
    return sorted(points, key=lambda point: point.bytes)


def _plot(bandwidth: str, rounds: Sequence[dict[str, Any]]) -> str:
    us: dict[str, dict[int, list[float]]] = {}
    for results in rounds:
        for row in results["transports"]:
            for point in _points(row, "ping_pong"):
                sizes = us.setdefault(row["transport"], {})
                sizes.setdefault(point.bytes, []).append(point.one_way_us)
    series = {
        name: [(float(size), statistics.median(values)) for size, values in sizes.items()]
        for name, sizes in us.items()
    }
    return curves(f"One-way time of a message at {bandwidth}", series, "bytes", "us")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--bandwidth", action="append", help="repeat it; default: two")
    parser.add_argument("--transport", action="append", help="repeat it; default: all on the CPU")
    parser.add_argument("--max-bytes", type=int, default=4 << 20)
    parser.add_argument("--rounds", type=int, default=100, help="timed messages of a size")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of all transports")
    parser.add_argument("--report-only", action="store_true", help="measure nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
