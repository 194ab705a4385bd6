"""Synchronization against stragglers, and architectures against bandwidth and size.

    python benchmarks/synchronization.py                    # synchronization x straggler
    sudo python benchmarks/synchronization.py --hosts       # and architecture x bandwidth x size

Runs one experiment for each cell and writes docs/synchronization.md. Experiments that are already
in the directory are resumed, so that the script can be interrupted. The second part needs root and
iproute2. Use an otherwise idle machine: ranks and servers share its processors.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ddltrace.analyzer.formatting.units import NOT_KNOWN
from ddltrace.experiments.harness.results import Results, Row
from ddltrace.experiments.harness.results_file import RESULTS_FILE, read
from ddltrace.experiments.harness.synchronization_table import cells, distribution_text

ROOT: Final = Path(__file__).resolve().parent.parent
STRAGGLERS: Final = {
    "no straggler": "",
    "rank 2 computes 2 times as long": "rank=2,factor=2",
    "rank 2 computes 8 times as long in the last 3 of each 15 steps": (
        "rank=2,factor=8,burst=3,every=15"
    ),
}
RULES: Final = (
    *("ps:servers=1", "ssp:bound=1", "ssp:bound=4", "adaptive_ssp", "asp", "backup:workers=1"),
    *("grouped:size=2,every=4", "gossip", "adpsgd"),
)
ARCHITECTURES: Final = (
    *("ddp", "ring", "halving_doubling", "tree", "double_tree", "mesh"),
    *("hierarchical:ranks_per_host=2", "ps:servers=1", "ps:servers=2", "ps:sharded=true", "auto"),
)
WIDTHS: Final = (8, 32)
NETWORKS: Final = {
    "100mbit": ("--bandwidth", "100mbit"),
    "400mbit": ("--bandwidth", "400mbit"),
    "400mbit, 4:1 between racks of 2": (
        *("--bandwidth", "400mbit", "--hosts-per-rack", "2", "--bandwidth-between", "200mbit"),
    ),
}


@dataclass(frozen=True)
class Cell:
    """One experiment.

    Attributes:
        title: The heading of its table.
        name: The name of its directory.
        options: Options of ``ddltrace experiment run``.
        strategies: The rows.
    """

    title: str
    name: str
    options: tuple[str, ...]
    strategies: Sequence[str]


def main() -> None:
    """Runs the missing experiments and writes the page."""
    options = _parse_options()
    stragglers = [
        Cell(
            title,
            f"straggler-{number}",
            (
                *("--ranks", "4", "--width", "8", "--steps", str(options.steps)),
                *("--target-loss", str(options.target_loss)),
                *(("--slow", slow) if slow else ()),
            ),
            RULES,
        )
        for number, (title, slow) in enumerate(STRAGGLERS.items())
    ]
    networks = [
        Cell(
            f"width {width} at {title}",
            f"network-{number}-{width}",
            ("--hosts", "4", *network, "--width", str(width), "--steps", "30"),
            ARCHITECTURES,
        )
        for number, (title, network) in enumerate(NETWORKS.items())
        for width in WIDTHS
        if options.hosts
    ]
    for cell in () if options.report_only else (*stragglers, *networks):
        _run(cell, options)
    page = [_heading(options)]
    for cell in stragglers:
        if (found := _results(cell, options)) is not None:
            page.append(_synchronization_table(cell, found))
    if any(_results(cell, options) is not None for cell in networks):
        page.append("## Architecture, bandwidth and size\n")
    for cell in networks:
        if (found := _results(cell, options)) is not None:
            page.append(_architecture_table(cell, found))
    options.page.write_text("\n".join(page), encoding="utf-8")
    print(f"wrote {options.page}")


def _run(cell: Cell, options: argparse.Namespace) -> None:
    directory = options.directory / cell.name
    command = [sys.executable, "-m", "ddltrace", "experiment"]
    if (directory / RESULTS_FILE).is_file():
        command += ["resume", str(directory)]
    else:
        command += ["run", "-o", str(directory), "--repeats", str(options.repeats)]
        command += ["--workload", "digits", *cell.options]
        for strategy in cell.strategies:
            command += ["--strategy", strategy]
    print(f"== {cell.title}", flush=True)
    # If a strategy failed, its row says so and the exit status is 1.
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)


def _results(cell: Cell, options: argparse.Namespace) -> Results | None:
    file = options.directory / cell.name / RESULTS_FILE
    return read(file) if file.is_file() else None


def _heading(options: argparse.Namespace) -> str:
    return (
        "# Synchronization and architectures, measured\n\n"
        "Written by `benchmarks/synchronization.py` "
        f"({options.repeats} round(s), {os.cpu_count()} processors, which all ranks and servers "
        "share). The workload is `digits`. The [guide](experiment-guide.md) explains the columns.\n"
        "\n## Synchronization and stragglers\n\n"
        "Time to loss: seconds from the first step's start until the mean training loss of five "
        f"steps is at most {options.target_loss:g}.\n"
    )


def _synchronization_table(cell: Cell, results: Results) -> str:
    lines = [
        f"### {cell.title}\n",
        "| strategy | step (ms) | time to loss (s) | loss at the end | staleness: mean | max | "
        "blocked (ms a step) | updates dropped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results.rows:
        marks = [NOT_KNOWN] * 4
        if row.synchronization is not None:
            mean, largest, _, blocked, dropped, _ = cells(row, None)
            marks = [mean, largest, blocked, dropped]
        lines.append("| " + " | ".join([*_speed(row), *marks]) + " |")
    shown = [
        f"- `{row.strategy}`: {distribution_text(row.synchronization['staleness'])}"
        for row in results.rows
        if row.synchronization is not None and row.synchronization["staleness"]
    ]
    return "\n".join(
        [*lines, "", "Staleness in steps, with its share of the reads:", "", *shown, ""]
    )


def _architecture_table(cell: Cell, results: Results) -> str:
    lines = [
        f"### {cell.title}, {results.settings.get('gradient_bytes', 0) / 1e6:.1f} MB\n",
        "| strategy | step (ms) | exposed (ms) | wire (MB) | skew | chosen |",
        "|---|---|---|---|---|---|",
    ]
    for row in results.rows:
        placement, auto = row.choices.get("placement"), row.choices.get("auto")
        chosen = "; ".join(choice["name"] for choice in auto["choices"]) if auto else NOT_KNOWN
        skew = f"{placement['skew']:.3f}" if placement else NOT_KNOWN
        values = [
            *(_speed(row)[:2]),
            _number(row.exposed_us, 1e-3, 2),
            _number(row.wire_bytes, 1e-6, 3),
            *(skew, chosen),
        ]
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join([*lines, ""])


def _speed(row: Row) -> list[str]:
    time = row.step_time
    text = row.status
    if time is not None:
        text = f"{time.us / 1e3:.2f}"
        if time.low_us is not None and time.high_us is not None:
            text += f" [{time.low_us / 1e3:.2f}, {time.high_us / 1e3:.2f}]"
    return [
        f"`{row.strategy}`",
        text,
        _number(row.time_to_loss_us, 1e-6, 2),
        _number(row.train_loss, 1, 4),
    ]


def _number(value: float | None, scale: float, digits: int) -> str:
    return NOT_KNOWN if value is None else f"{value * scale:.{digits}f}"


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="synchronization x straggler")
    parser.add_argument("--directory", type=Path, default=Path("synchronization-benchmark"))
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "synchronization.md")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--target-loss", type=float, default=1.0)
    parser.add_argument("--hosts", action="store_true", help="also architectures on four hosts")
    parser.add_argument("--report-only", action="store_true", help="only write the page again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
