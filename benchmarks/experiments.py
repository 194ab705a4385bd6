"""Compares the techniques of the catalogue on four emulated hosts at three bandwidths.

    sudo python benchmarks/experiments.py              # the small matrix
    sudo python benchmarks/experiments.py --full       # the whole catalogue, five rounds

Runs one experiment for each workload and bandwidth, then writes docs/experiments.md with its
plots. Experiments that are already in the directory are resumed, so that it can be interrupted,
and get the strategies that they lack. With `--rerun-above CORES`, runs beside which other processes
kept more cores busy are made again.
What people wrote into docs/experiments.md between its two marks is kept, and so are the sections of
the other scripts. Needs root, iproute2 and an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import html
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from experiment_runs import run_or_resume, step_text
from page_section import sections
from svg_plots import Bar, bars

from ddltrace.analyzer.formatting.units import NOT_KNOWN
from ddltrace.experiments import workloads
from ddltrace.experiments.harness.file_names import RESULTS_FILE
from ddltrace.experiments.harness.results import Results, Row, Run
from ddltrace.experiments.harness.results_file import read, write
from ddltrace.experiments.strategy.catalogue import techniques
from ddltrace.experiments.strategy.job_checks import refused_optimizer
from ddltrace.experiments.strategy.spec import parse

ROOT: Final = Path(__file__).resolve().parent.parent
WORKLOADS: Final = ("vgg", "resnet", "gpt")
BANDWIDTHS: Final = ("100mbit", "400mbit", "1gbit")
SMALL: Final = (
    "ddp",
    "ddp:bucket_mb=0.5",
    "fifo",
    "wfbp",
    "p3",
    "bf16",
    "int8",
    "topk:density=0.01+feedback",
)
TARGETS: Final = {"vgg": 2.0, "resnet": 1.0, "gpt": 3.0}
"""Training losses that every lossless strategy reaches within the small matrix's steps."""

BEGIN: Final = "<!-- findings: written by hand, kept by benchmarks/experiments.py -->"
END: Final = "<!-- end of findings -->"
_NEEDS_BASE: Final = {"feedback": "topk:density=0.01+feedback", "doublesqueeze": "doublesqueeze"}


@dataclass(frozen=True)
class Cell:
    """One experiment of the matrix."""

    workload: str
    bandwidth: str
    results: Results


def main() -> None:
    """Runs missing experiments and writes the page."""
    options = _parse_options()
    strategies = options.strategy or (_catalogue() if options.full else list(SMALL))
    cells = []
    for workload in options.workload or WORKLOADS:
        for bandwidth in options.bandwidth or BANDWIDTHS:
            directory = options.directory / f"{workload}-{bandwidth}"
            if not options.report_only:
                kinds = [workloads.WORKLOADS[workload].optimizer]
                fit = [s for s in strategies if refused_optimizer(parse(s), kinds) is None]
                _run(directory, workload, bandwidth, fit, options)
            if (directory / RESULTS_FILE).is_file():
                cells.append(Cell(workload, bandwidth, read(directory / RESULTS_FILE)))
    if not cells:
        sys.exit(f"there is no experiment in {options.directory}")
    _write_page(cells, options.page)
    print(f"wrote {options.page}")


def _run(
    directory: Path,
    workload: str,
    bandwidth: str,
    strategies: Sequence[str],
    options: argparse.Namespace,
) -> None:
    if (directory / RESULTS_FILE).is_file():
        _extend(directory, strategies, options.rerun_above)
    cluster = ["--hosts", str(options.hosts), "--bandwidth", bandwidth]
    steps = ["--steps", str(options.steps), "--warmup", str(options.warmup)]
    rounds = ["--repeats", str(options.repeats), "--timeout", str(options.timeout)]
    rounds += ["--target-loss", str(TARGETS.get(workload, 1.0))]
    pace = [] if options.pace is None else ["--pace", options.pace]
    run_or_resume(
        f"{workload} at {bandwidth}",
        directory,
        ["--workload", workload, *cluster, *steps, *rounds, *pace],
        strategies,
    )


def _extend(directory: Path, strategies: Sequence[str], most_other_cores: float | None) -> None:
    """Adds strategies to an experiment, and takes out the runs of a busy machine."""
    results = read(directory / RESULTS_FILE)
    specs = [parse(spec).spec for spec in strategies]
    settings = results.settings
    settings["strategies"] = list(dict.fromkeys([*settings["strategies"], *specs]))
    if most_other_cores is not None:
        results.rows = [
            replace(row, runs=[run for run in row.runs if _was_quiet(run, most_other_cores)])
            for row in results.rows
        ]
    write(results, directory)


def _was_quiet(run: Run, most_other_cores: float) -> bool:
    return run.other_cores is not None and run.other_cores <= most_other_cores


def _catalogue() -> list[str]:
    """Every technique by itself, after DDP with several buckets as the baseline to beat."""
    singles = [
        _NEEDS_BASE.get(entry.name, entry.name)
        for entry in techniques()
        if entry.build is not None and entry.axis in ("frequency", "volume", "order", "optimizer")
    ]
    buckets = ["ddp", "ddp:bucket_mb=0.25", "ddp:bucket_mb=1", "ddp:bucket_mb=4"]
    return list(dict.fromkeys([*buckets, *singles]))


def _write_page(cells: Sequence[Cell], page: Path) -> None:
    images = page.parent / "images"
    images.mkdir(exist_ok=True)
    parts = [_heading(cells), _findings(page)]
    for workload in dict.fromkeys(cell.workload for cell in cells):
        own = [cell for cell in cells if cell.workload == workload]
        plot = images / f"experiments-{workload}.svg"
        plot.write_text(_plot(workload, own), encoding="utf-8")
        parts.append(f"## {workload}\n\n![Speed-up over tuned DDP](images/{plot.name})")
        parts += [_table(cell) for cell in own]
    parts += sections(page)
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _heading(cells: Sequence[Cell]) -> str:
    settings = cells[0].results.settings
    rounds = settings.get("repeats", 1)
    interval = (
        f"intervals over {rounds} rounds"
        if rounds != 1
        else "intervals over the steps of one run: another run may differ by more"
    )
    pace = f", paced by {settings['pace']}" if settings.get("pace") else ""
    return f"""# Which technique wins where

Made by `benchmarks/experiments.py` with ddltrace {settings.get("ddltrace")} and torch
{settings.get("torch")} on a machine with {settings.get("cpus")} cores: {settings.get("ranks")}
ranks, each on an emulated host of its own{pace}; {settings.get("steps")} steps, of which the first
{settings.get("warmup")} are not measured; {interval}.

Every row trains the same model on the same data; [how to read the columns](experiment-guide.md).
*Tuned DDP* is the fastest DDP row of its table. **Bold**: faster than tuned DDP, not by the
noise, and with its loss reached. `~`: the interval of the speed-up contains 1, or is of one run.
*Other cores*: cores that other processes kept busy during the run, the most over rounds."""


def _findings(page: Path) -> str:
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    _, begin, rest = text.partition(BEGIN)
    inside, end, _ = rest.partition(END)
    return f"{BEGIN}{inside}{END}" if begin and end else f"{BEGIN}\n{END}"


def _table(cell: Cell) -> str:
    results = cell.results
    size = results.settings.get("gradient_bytes")
    sent = f", {size / 1e6:.1f} MB of gradients" if isinstance(size, int) else ""
    tuned = results.tuned_ddp()
    lines = [
        f"### {cell.workload} at {cell.bandwidth}{sent}",
        "",
        html.escape(results.headline(), quote=False),
        "",
        "| strategy | step ms | against tuned DDP | overlapped | wire MB | codec ms | loss | "
        "accuracy | s to loss | other cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    troubles = []
    for row, compared in results.compared():
        found, losses = compared.speedup_tuned_ddp, compared.loss_difference
        name = f"`{row.strategy}`" + (" (paced)" if row.paced else "")
        speed = "1" if row is tuned else NOT_KNOWN
        if found is not None:
            speed = f"{found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}]"
            wins = found.verdict == "faster" and losses is not None and losses.verdict == "reached"
            speed = f"**{speed}**" if wins else speed
            speed += " ~" if found.verdict == "noise" else ""
        lines.append(f"| {name} | {step_text(row)} | {speed} | {' | '.join(_costs(row))} |")
        if not row.is_sound:
            troubles.append(f"- `{row.strategy}` {row.status}: {html.escape(str(row.reason))}")
    return "\n".join([*lines, *(["", *troubles] if troubles else [])])


def _costs(row: Row) -> list[str]:
    codec = None
    if row.encode_us is not None or row.decode_us is not None:
        codec = (row.encode_us or 0.0) + (row.decode_us or 0.0)
    return [
        _number(row.overlap_ratio, 100, "%.0f %%"),
        _number(row.wire_bytes, 1e-6, "%.3f"),
        _number(codec, 1e-3, "%.1f"),
        _number(row.train_loss, 1, "%.3f"),
        _number(row.test_accuracy, 100, "%.1f %%"),
        _number(row.time_to_loss_us, 1e-6, "%.1f"),
        _number(_most([run.other_cores for run in row.runs]), 1, "%.1f"),
    ]


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _number(value: float | None, scale: float, form: str) -> str:
    return NOT_KNOWN if value is None else form % (value * scale)


def _plot(workload: str, cells: Sequence[Cell]) -> str:
    """Speed-up over tuned DDP with its interval: a bar for each strategy and bandwidth, as SVG."""
    series = {
        cell.bandwidth: {
            row.strategy: Bar(found.ratio, found.low, found.high, faint=found.verdict == "noise")
            for row, compared in cell.results.compared()
            if (found := compared.speedup_tuned_ddp) is not None
        }
        for cell in cells
    }
    title = f"{workload}: speed-up over tuned DDP"
    return bars(title, series, "", reference=1.0, note="dashed: tuned DDP; faint: noise")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="the whole catalogue, five rounds")
    parser.add_argument("--workload", action="append", help="repeat it; default: all three")
    parser.add_argument("--bandwidth", action="append", help="repeat it; default: all three")
    parser.add_argument("--strategy", action="append", help="repeat it; default: the matrix's")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    parser.add_argument("--pace", help="as of ddltrace experiment run")
    parser.add_argument("--directory", type=Path, default=Path("experiments-benchmark"))
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "experiments.md")
    parser.add_argument(
        "--rerun-above", type=float, metavar="CORES", help="repeat runs beside such other work"
    )
    parser.add_argument("--report-only", action="store_true", help="run nothing, write the page")
    options = parser.parse_args()
    options.steps = options.steps or (200 if options.full else 30)
    options.repeats = options.repeats or (5 if options.full else 1)
    if not options.report_only and os.geteuid() != 0:
        sys.exit("the emulated hosts need root: run it with sudo")
    return options


if __name__ == "__main__":
    main()
