"""Compares synchronization rules with and without stragglers: time to a loss.

    python benchmarks/synchronization.py                  # about 10 minutes
    python benchmarks/synchronization.py --report-only    # only write the section again

Runs one experiment for each kind of straggler and writes its section of docs/experiments.md.
Experiments that are already in the directory are resumed, so that the script can be interrupted.
Use an otherwise idle machine: ranks and servers share its processors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from experiment_runs import run_or_resume, step_text
from page_section import PAGE, write_image, write_section
from svg_plots import Bar, bars

from ddltrace.analyzer.formatting.units import NOT_KNOWN
from ddltrace.experiments.harness.file_names import RESULTS_FILE
from ddltrace.experiments.harness.results import Results, Row
from ddltrace.experiments.harness.results_file import read
from ddltrace.experiments.harness.results_table import (
    clock_cells,
    distribution_text,
    number_text,
)

STRAGGLERS: Final = {
    "no straggler": "",
    "rank 2 computes 4 times as long": "rank=2,factor=4",
    "rank 2 computes 12 times as long in the last 3 of each 15 steps": (
        "rank=2,factor=12,burst=3,every=15"
    ),
}
RULES: Final = (
    *("ps:servers=1", "ssp:bound=1", "ssp:bound=4", "adaptive_ssp", "asp", "backup:workers=1"),
    *("grouped:size=2,every=4", "gossip", "adpsgd"),
)


@dataclass(frozen=True)
class Cell:
    """One experiment.

    Attributes:
        title: The heading of its table.
        name: The name of its directory.
        slow: Its straggler, as for ``--slow``; empty for none.
    """

    title: str
    name: str
    slow: str


CELLS: Final = tuple(
    Cell(title, f"straggler-{number}", slow)
    for number, (title, slow) in enumerate(STRAGGLERS.items())
)


def main() -> None:
    """Runs the missing experiments and writes the section."""
    options = _parse_options()
    if not options.report_only:
        for cell in CELLS:
            _run(cell, options)
    found = [
        (cell, read(options.directory / cell.name / RESULTS_FILE))
        for cell in CELLS
        if (options.directory / cell.name / RESULTS_FILE).is_file()
    ]
    if not found:
        sys.exit(f"there is no experiment in {options.directory}")
    write_section("synchronization", _section(found, options.page), options.page)
    print(f"wrote {options.page}")


def _run(cell: Cell, options: argparse.Namespace) -> None:
    sizes = ["--ranks", "4", "--width", str(options.width), "--steps", str(options.steps)]
    rounds = ["--repeats", str(options.repeats), "--target-loss", str(options.target_loss)]
    slow = ["--slow", cell.slow] if cell.slow else []
    run_or_resume(
        cell.title,
        options.directory / cell.name,
        ["--workload", "digits", *sizes, *rounds, *slow],
        options.strategy or RULES,
    )


def _section(found: Sequence[tuple[Cell, Results]], page: Path) -> str:
    settings = found[0][1].settings
    target = settings.get("target_loss")
    rounds = settings.get("repeats", 1)
    image = write_image("synchronization", _plot(found), page)
    parts = [
        "## Synchronization and stragglers",
        f"`benchmarks/synchronization.py` with ddltrace {settings.get('ddltrace')} and torch "
        f"{settings.get('torch')}: {settings.get('ranks')} workers and the rules' servers share "
        f"{settings.get('cpus')} cores; workload `digits` of width {settings.get('width')}, "
        f"{settings.get('steps')} steps, {rounds} round{'' if rounds == 1 else 's'}. Time to loss: "
        "seconds from the start of the first step until the mean training loss of five steps is at "
        f"most {target}; none if that loss was not reached. Where workers run ahead of each other, "
        "the step time is the mean over workers. The [guide](experiment-guide.md) explains the "
        "rules and columns.",
        f"![Seconds to a loss of {target}]({image})",
    ]
    for cell, results in found:
        parts += [_table(cell, results), _conclusion(results)]
    return "\n\n".join(part for part in parts if part)


def _table(cell: Cell, results: Results) -> str:
    lines = [
        f"### {cell.title[0].upper()}{cell.title[1:]}",
        "",
        "| strategy | step ms | s to loss | loss at the end | staleness: mean | max | "
        "blocked ms a step | updates dropped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results.rows:
        marks = [NOT_KNOWN] * 4
        if row.synchronization is not None:
            mean, largest, _, blocked, dropped, _ = clock_cells(row, None)
            marks = [mean, largest, blocked, dropped]
        lines.append("| " + " | ".join([*_speed(row), *marks]) + " |")
    failed = [
        f"- `{row.strategy}` {row.status}: {row.reason}" for row in results.rows if not row.is_sound
    ]
    shown = [
        f"- `{row.strategy}`: {distribution_text(row.synchronization['staleness'])}"
        for row in results.rows
        if row.synchronization is not None and row.synchronization["staleness"]
    ]
    staleness = ["", "Staleness in steps, with its share of the reads:", "", *shown]
    return "\n".join([*lines, *(["", *failed] if failed else []), *(staleness if shown else [])])


def _conclusion(results: Results) -> str:
    """Who reached the loss first, compared with the first row."""
    reached = {
        row.strategy: row.time_to_loss_us for row in results.rows if row.time_to_loss_us is not None
    }
    base = results.rows[0].strategy
    if base not in reached or len(reached) < 2:
        return ""
    ratios = {name: reached[base] / us for name, us in reached.items() if name != base}
    best = max(ratios, key=lambda name: ratios[name])
    slower = sorted(name for name, ratio in ratios.items() if ratio < 1)
    text = f"First at the loss: `{best}`, {ratios[best]:.2f} times as fast as `{base}`."
    if slower:
        text += f" Slower than `{base}`: {', '.join(f'`{name}`' for name in slower)}."
    missing = [row.strategy for row in results.rows if row.strategy not in reached]
    if missing:
        text += f" Not reached: {', '.join(f'`{name}`' for name in missing)}."
    return text


def _speed(row: Row) -> list[str]:
    return [
        f"`{row.strategy}`",
        step_text(row, 2),
        number_text(row.time_to_loss_us, 1e-6, 2),
        number_text(row.train_loss, 1, 4),
    ]


def _plot(found: Sequence[tuple[Cell, Results]]) -> str:
    series = {
        cell.title: {
            row.strategy: None if row.time_to_loss_us is None else Bar(row.time_to_loss_us / 1e6)
            for row in results.rows
        }
        for cell, results in found
    }
    return bars("Seconds to the loss", series, "s")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("synchronization-benchmark"))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--target-loss", type=float, default=1.0)
    parser.add_argument("--strategy", action="append", help="repeat it; default: all rules")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
