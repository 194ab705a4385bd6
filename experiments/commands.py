"""``ddltrace experiment``: communication strategies run for real, traced and compared."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path

import click

from ddltrace.experiments.workloads import WORKLOADS

_DEFAULT_STRATEGIES = ("ddp", "fifo", "wfbp")


@click.group()
def experiment() -> None:
    """Run communication strategies for real and compare what their traces say."""


@experiment.command(
    "list",
    epilog="""\b
Examples:
  ddltrace experiment list
  ddltrace experiment list --json""",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(as_json: bool) -> None:
    """List the techniques that exist, along the axes on which they combine."""
    from ddltrace.experiments.strategy.listing import as_json as listing_as_json
    from ddltrace.experiments.strategy.listing import as_text

    click.echo(json.dumps(listing_as_json(), indent=1) if as_json else as_text())


@experiment.command(
    "run",
    epilog="""\b
Examples:
  ddltrace experiment run
  ddltrace experiment run --strategy ddp --strategy ddp:bucket_mb=1 --strategy wfbp
  ddltrace experiment run --ranks 4 --width 64 --steps 100 -o wide
  sudo ddltrace experiment run --hosts 4 --bandwidth 400mbit -o shaped""",
)
@click.option(
    "--strategy",
    "specs",
    multiple=True,
    metavar="SPEC",
    help="A strategy to run; repeat it. The first is the baseline.  "
    f"[default: {', '.join(_DEFAULT_STRATEGIES)}]",
)
@click.option(
    "--ranks", type=click.IntRange(2, 64), help="Rank processes.  [default: --hosts, else 2]"
)
@click.option(
    "--steps",
    type=click.IntRange(2),
    default=60,
    show_default=True,
    help="Training steps, warm-up included.",
)
@click.option(
    "--warmup",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Steps at the start that are trained but not measured.",
)
@click.option(
    "--workload",
    type=click.Choice(list(WORKLOADS)),
    default="digits",
    show_default=True,
    help="digits: a CNN on scikit-learn's 8 x 8 images of digits.",
)
@click.option(
    "--width",
    type=click.IntRange(1, 1024),
    default=32,
    show_default=True,
    help="Size of the model: bytes to send and computation grow with its square.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Examples per rank and step.",
)
@click.option(
    "--learning-rate",
    type=click.FloatRange(0, min_open=True),
    default=0.02,
    show_default=True,
    help="Of SGD with momentum 0.9.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Of the weights, the split and the order of the data.",
)
@click.option(
    "--hosts",
    type=int,
    help="Put each rank into a network namespace of its own (needs root and iproute2).",
)
@click.option("--bandwidth", help="Rate of each host's link, e.g. 400mbit; with --hosts.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Directory to make.  [default: ddltrace-experiment-DATE-TIME]",
)
@click.option("--force", is_flag=True, help="Replace an experiment that stands in the way.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the table.")
def run_command(
    *,
    specs: tuple[str, ...],
    ranks: int | None,
    steps: int,
    warmup: int,
    workload: str,
    width: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    hosts: int | None,
    bandwidth: str | None,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Train with each strategy, trace it, and print one table.

    Every strategy trains the same model from the same weights on the same data. The numbers
    are measured from each run's own trace, which stays in the output directory.
    """
    from ddltrace.experiments.harness.results import RESULTS_FILE
    from ddltrace.experiments.harness.runner import Settings, run_experiment
    from ddltrace.experiments.strategy.spec import parse
    from ddltrace.tracer.optional_packages import require_extra, require_torch
    from ddltrace.tracer.output_directory import make_empty

    require_torch("ddltrace experiment run")
    if workload == "digits":
        require_extra("experiments", "the workload digits")
    strategies = [parse(spec) for spec in specs or _DEFAULT_STRATEGIES]
    _refuse_repeated([strategy.spec for strategy in strategies])
    _check_network(ranks, hosts, bandwidth)
    settings = Settings(
        workload=workload,
        width=width,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        ranks=hosts or ranks or 2,
        steps=steps,
        warmup=warmup,
        hosts=hosts,
        bandwidth=bandwidth,
    )
    directory = output or Path(time.strftime("ddltrace-experiment-%Y%m%d-%H%M%S"))
    make_empty(directory, marker=RESULTS_FILE, kind="experiment", force=force)
    results = run_experiment(strategies, settings, directory, report=_report_progress)
    _print(results, as_json=as_json)
    click.echo(f"ddltrace: results and traces in {directory}", err=True)
    traces = " ".join(shlex.quote(str(directory / strategy.slug)) for strategy in strategies)
    click.echo(f"ddltrace: next: ddltrace dashboard {traces}", err=True)


@experiment.command(
    "compare",
    epilog="""\b
Examples:
  ddltrace experiment compare shaped
  ddltrace experiment compare shaped as-is --baseline shaped/ddp
  ddltrace experiment compare trace-before trace-after""",
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--baseline", metavar="ROW", help="Row to compare with.  [default: the first]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the table.")
def compare_command(paths: tuple[Path, ...], baseline: str | None, as_json: bool) -> None:
    """Print the results of experiments, or of any traces, side by side."""
    from ddltrace.experiments.harness.results import combine, load

    names = _tell_apart(paths)
    loaded = []
    for name, path in zip(names, paths, strict=True):
        results = load(path)
        if not results.settings:  # a trace: one row, called as its directory
            results.rows = [dataclasses.replace(row, strategy=name) for row in results.rows]
        loaded.append((name, results))
    _print(combine(loaded, baseline), as_json=as_json)


def _print(results: object, *, as_json: bool) -> None:
    from ddltrace.experiments.harness.results import Results
    from ddltrace.experiments.harness.results_table import render

    assert isinstance(results, Results)
    click.echo(json.dumps(results.to_json()) if as_json else render(results))


def _report_progress(line: str) -> None:
    if sys.stderr.isatty():
        click.echo(line, err=True)


def _refuse_repeated(specs: list[str]) -> None:
    from ddltrace.tracer.errors import UsageError

    repeated = {spec for spec in specs if specs.count(spec) > 1}
    if repeated:
        raise UsageError(f"--strategy {min(repeated)} is given twice")


def _check_network(ranks: int | None, hosts: int | None, bandwidth: str | None) -> None:
    """Finds out before anything runs whether the network can be had."""
    from ddltrace.experiments.network.emulated import check_capabilities, parse_bandwidth
    from ddltrace.tracer.errors import UsageError

    if (hosts is None) != (bandwidth is None):
        raise UsageError("--hosts and --bandwidth belong together")
    if hosts is None or bandwidth is None:
        return
    if ranks not in (None, hosts):
        raise UsageError(f"--hosts {hosts} runs one rank on each host, not --ranks {ranks}")
    parse_bandwidth(bandwidth)
    check_capabilities()


def _tell_apart(paths: tuple[Path, ...]) -> list[str]:
    """Short names for paths: the last part where that is unique, else the path."""
    short = [path.resolve().name for path in paths]
    return [
        name if short.count(name) == 1 else str(path)
        for name, path in zip(short, paths, strict=True)
    ]
