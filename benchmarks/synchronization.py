"""Compares synchronization rules with and without stragglers: time to a loss.

    python benchmarks/synchronization.py                  # about 20 minutes
    python benchmarks/synchronization.py --report-only    # only write the section again

Runs one experiment for each kind of straggler and writes its section of docs/experiments.md. What
was measured stays in benchmarks/results/; an experiment that has a file there is not run again, and
one that was interrupted is resumed. Use an otherwise idle machine: ranks and servers share its
processors.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from experiment_runs import keep, read_kept, run_or_resume, step_text
from page_section import PAGE, RESULTS, with_interval, write_image, write_section
from svg_plots import Bar, bars

from ddltrace.analyzer.formatting.units import NOT_KNOWN
from ddltrace.experiments.harness.results import Results, Row, time_to_loss
from ddltrace.experiments.harness.results_table import (
    clock_cells,
    distribution_text,
    number_text,
)
from ddltrace.experiments.harness.step_intervals import half_width

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
    found = []
    for cell in CELLS:
        kept = options.results / f"synchronization-{cell.name}.json.gz"
        if not (kept.exists() or options.report_only):
            _run(cell, options)
            keep(options.directory / cell.name, kept)
        if kept.exists():
            found.append((cell, read_kept(kept)))
    if not found:
        sys.exit(f"there is no experiment in {options.results}")
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
        f"{settings.get('steps')} steps; rounds in turns: {rounds}, with 95 % intervals over them. "
        "Time to loss: "
        "seconds from the start of the first step until the mean training loss of five steps is at "
        f"most {target}; none if a round did not reach it. Where workers run ahead of each other, "
        f"the step time is the mean over workers. Below each table, times to the loss are compared "
        f"with those of `{found[0][1].rows[0].strategy}` in the same rounds. The "
        "[guide](experiment-guide.md) explains the rules and columns.",
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
    target = results.settings["target_loss"]
    for row in results.rows:
        marks = [NOT_KNOWN] * 4
        if row.synchronization is not None:
            mean, largest, _, blocked, dropped, _ = clock_cells(row, None)
            marks = [mean, largest, blocked, dropped]
        lines.append("| " + " | ".join([*_speed(row, target), *marks]) + " |")
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
    """Who reached the loss first, compared with the first row in the same rounds."""
    target = results.settings["target_loss"]
    base, *others = results.rows
    first = _us_to_loss(base, target)
    ratios = {
        row.strategy: _interval([math.log(a / b) for a, b in zip(first, own, strict=True)])
        for row in others
        if len(own := _us_to_loss(row, target)) == len(first) > 1
    }
    if not ratios:
        return ""
    best = max(ratios, key=lambda name: sum(ratios[name]))
    low, high = (math.exp(value) for value in ratios[best])
    text = (
        f"First at the loss: `{best}`, {math.sqrt(low * high):.2f} times as fast as "
        f"`{base.strategy}` [{low:.2f}, {high:.2f}]."
    )
    groups = {
        "Slower": [name for name, (_, high) in ratios.items() if high < 0],
        "Not decided": [name for name, (low, high) in ratios.items() if low <= 0 <= high],
        "Not reached in every round": [
            row.strategy for row in results.rows if not _us_to_loss(row, target)
        ],
    }
    for words, names in groups.items():
        text += f" {words}: {', '.join(f'`{name}`' for name in names)}." if names else ""
    return text


def _us_to_loss(row: Row, target: float) -> list[float]:
    """The time to the loss in each round; empty unless each round reached it."""
    times = [time_to_loss(run.losses, run.elapsed_us, target) for run in row.runs]
    return [] if None in times else [us for us in times if us is not None]


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of at least two values."""
    mean, half = statistics.fmean(values), half_width(np.array(values))
    return mean - half, mean + half


def _seconds(row: Row, target: float) -> Bar | None:
    """Mean time to the loss, with its interval if there are rounds; None unless all reached it."""
    seconds = [us / 1e6 for us in _us_to_loss(row, target)]
    if not seconds:
        return None
    low, high = _interval(seconds) if len(seconds) > 1 else (None, None)
    return Bar(statistics.fmean(seconds), low, high)


def _speed(row: Row, target: float) -> list[str]:
    found = _seconds(row, target)
    text = NOT_KNOWN
    if found is not None:
        text = with_interval(found.value, found.low, found.high, 2)
    return [f"`{row.strategy}`", step_text(row, 2), text, number_text(row.train_loss, 1, 4)]


def _plot(found: Sequence[tuple[Cell, Results]]) -> str:
    series = {
        cell.title: {
            row.strategy: _seconds(row, results.settings["target_loss"]) for row in results.rows
        }
        for cell, results in found
    }
    return bars("Seconds to the loss", series, "s")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("synchronization-benchmark"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--target-loss", type=float, default=1.0)
    parser.add_argument("--strategy", action="append", help="repeat it; default: all rules")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
