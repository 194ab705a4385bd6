"""Compares the techniques of the catalogue on four emulated hosts at three bandwidths.

    sudo python benchmarks/experiments.py --minutes 100       goes on where it stopped
    sudo python benchmarks/experiments.py --report-only

Each case is a workload at a bandwidth: `ddltrace experiment verify` predicts its strategies from a
run of DDP, writes the predictions into the ledger, and runs all of them in rounds. What was
measured stays in benchmarks/results/, one file for each case; a case that has one is not run again.
Then docs/experiments.md is written with its plots. What people wrote there between its two marks is
kept, and so are the sections of the other scripts. Needs root, iproute2 and an otherwise idle
machine.
"""

from __future__ import annotations

import argparse
import html
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from experiment_runs import keep, read_kept, step_text, verify
from page_section import PAGE, RESULTS, ROOT, findings, sections
from svg_plots import Bar, bars

from ddltrace.analyzer.formatting.units import NOT_KNOWN
from ddltrace.experiments import ledger, workloads
from ddltrace.experiments.harness.results import Results, Row
from ddltrace.experiments.strategy.job_checks import refused_optimizer
from ddltrace.experiments.strategy.spec import parse

WORKLOADS: Final = ("vgg", "resnet", "gpt")
BANDWIDTHS: Final = ("100mbit", "400mbit", "1gbit")
STRATEGIES: Final = (
    *("ddp", "ddp:bucket_mb=0.25", "ddp:bucket_mb=0.5"),
    *("fifo", "wfbp", "p3", "bytescheduler", "tictac", "poseidon", "mgwfbp", "fusion", "odsgd"),
    *("fp16", "bf16", "int8", "fp8", "int4", "thc", "qsgd", "ternary", "signsgd"),
    *("onebit+feedback", "doublesqueeze", "topk:density=0.01+feedback", "dgc"),
    *("randomk:density=0.05+feedback", "powersgd:rank=4+feedback"),
    *("accumulate:steps=4", "localsgd:period=4", "postlocalsgd:period=4,start=6"),
    *("diloco:period=8", "streaming_diloco:fragments=4,period=8", "noloco:period=8"),
    *("demo", "dion", "lars", "lamb", "muon"),
    *("fsdp", "fsdp:prefetch=2", "fsdp:reduce=fp8,gather=int8", "qwz", "qgz"),
)
"""Every technique by itself, and several sizes of DDP's buckets as the baseline to beat.

Without `best_buckets`: its search takes 38 steps, and all rows would have to train them."""


@dataclass(frozen=True)
class Cell:
    """One experiment of the matrix.

    Attributes:
        workload: Its workload.
        bandwidth: Of each host's link.
        results: What was measured.
        predicted: The answer of each strategy's prediction, as in the ledger.
    """

    workload: str
    bandwidth: str
    results: Results
    predicted: Mapping[str, Mapping[str, Any]]


def main() -> None:
    """Runs missing experiments and writes the page."""
    options = _parse_options()
    until = time.monotonic() + options.minutes * 60
    cells = []
    for workload in options.workload or WORKLOADS:
        for bandwidth in options.bandwidth or BANDWIDTHS:
            name = f"{workload}-{bandwidth}"
            kept = options.results / f"{name}.json.gz"
            if not (kept.exists() or options.report_only or time.monotonic() > until):
                _run(options.directory / name, workload, bandwidth, kept, options)
            if kept.exists():
                predicted = _predicted(options.ledger, name)
                cells.append(Cell(workload, bandwidth, read_kept(kept), predicted))
    if not cells:
        sys.exit(f"there is no experiment in {options.results}")
    _write_page(cells, options.page)
    print(f"wrote {options.page}")


def _run(
    directory: Path, workload: str, bandwidth: str, kept: Path, options: argparse.Namespace
) -> None:
    kinds = [workloads.WORKLOADS[workload].optimizer]
    fit = [
        spec
        for spec in options.strategy or STRATEGIES
        if refused_optimizer(parse(spec), kinds) is None
    ]
    cluster = ["--hosts", str(options.hosts), "--bandwidth", bandwidth]
    rounds = ["--steps", str(options.steps), "--repeats", str(options.repeats)]
    if verify(directory, ["--workload", workload, *cluster, *rounds], fit, options.ledger):
        keep(directory / "runs", kept)


def _predicted(path: Path, name: str) -> dict[str, dict[str, Any]]:
    """The latest prediction of each strategy of a case, by the folder of its trace."""
    return {
        pair.prediction["answer"]["question"]["strategy"]: pair.prediction["answer"]
        for pair in ledger.pairs(ledger.read(path))
        if Path(pair.prediction["trace"]).parents[1].name == name
        and "hosts" not in pair.prediction["answer"]["question"]
    }


def _write_page(cells: Sequence[Cell], page: Path) -> None:
    images = page.parent / "images"
    images.mkdir(exist_ok=True)
    parts = [_heading(cells), findings("experiments", page)]
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
    return f"""# Which technique wins where

Made by `benchmarks/experiments.py` with ddltrace {settings.get("ddltrace")} and torch
{settings.get("torch")} on a machine with {settings.get("cpus")} cores: {settings.get("ranks")}
ranks, each on an emulated host of its own; {settings.get("steps")} steps, of which the first
{settings.get("warmup")} are not measured; {interval}.

Every row trains the same model on the same data; [how to read the columns](experiment-guide.md).
*Tuned DDP* is the fastest DDP row of its table. `~`: not decided, because the interval of the
speed-up contains 1, or is of one run. *Predicted*: by `ddltrace whatif` from a run of DDP before
these runs, with its 90 % interval; a star marks a measured time outside of it. *Loss* and
*accuracy* are those after these few steps: they do not say how well a technique learns
([accuracy](#accuracy-of-lossy-techniques)). *Other cores*: cores that other processes kept busy
during the run, the most over rounds. The results of all runs: `benchmarks/results/`."""


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
        "| strategy | step ms | predicted ms | against tuned DDP | overlapped | wire MB | codec ms "
        "| loss | accuracy | other cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    troubles = []
    for row, compared in results.compared():
        found = compared.speedup_tuned_ddp
        speed = "1" if row is tuned else NOT_KNOWN
        if found is not None:
            speed = f"{found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}]"
            speed += " ~" if found.verdict == "noise" else ""
        predicted = _prediction_text(cell.predicted.get(row.strategy), row)
        cells = [f"`{row.strategy}`", step_text(row), predicted, speed, *_costs(row)]
        lines.append(f"| {' | '.join(cells)} |")
        if not row.is_sound:
            troubles.append(f"- `{row.strategy}` {row.status}: {html.escape(str(row.reason))}")
    return "\n".join([*lines, *(["", *troubles] if troubles else [])])


def _prediction_text(answer: Mapping[str, Any] | None, row: Row) -> str:
    if answer is None or answer["refused"] is not None:
        return NOT_KNOWN
    step, low, high = (answer[key] / 1e3 for key in ("step_us", "low_us", "high_us"))
    outside = row.step_time is not None and not low <= row.step_time.us / 1e3 <= high
    return f"{step:.1f} [{low:.1f}, {high:.1f}]{' *' if outside else ''}"


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
    parser.add_argument("--minutes", type=float, default=140.0, help="no further case after them")
    parser.add_argument("--workload", action="append", help="repeat it; default: all three")
    parser.add_argument("--bandwidth", action="append", help="repeat it; default: all three")
    parser.add_argument("--strategy", action="append", help="repeat it; default: the catalogue's")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=27)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("experiments-benchmark"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--ledger", type=Path, default=ROOT / "benchmarks" / "whatif-ledger.jsonl")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--report-only", action="store_true", help="run nothing, write the page")
    options = parser.parse_args()
    if not options.report_only and os.geteuid() != 0:
        sys.exit("the emulated hosts need root: run it with sudo")
    return options


if __name__ == "__main__":
    main()
