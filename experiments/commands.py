"""``ddltrace experiment``: communication strategies run for real, traced and compared."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddltrace.experiments.pacing.builtin import PROFILES, builtin_profile
from ddltrace.experiments.transports import NAMES as TRANSPORTS
from ddltrace.experiments.transports import read
from ddltrace.experiments.transports.protocols import NAMES as PROTOCOLS
from ddltrace.experiments.transports.protocols import read_protocol
from ddltrace.experiments.workloads import WORKLOADS
from ddltrace.tracer.errors import DdltraceError, UsageError
from ddltrace.tracer.launch.emulated_hosts import (
    NAMES,
    check_options,
    flat_network_options,
    host_options,
)
from ddltrace.tracer.next_command import print_next_command
from ddltrace.tracer.plugin_option import plugin_option

if TYPE_CHECKING:
    from ddltrace.experiments.harness.results import Results
    from ddltrace.experiments.harness.settings import Settings
    from ddltrace.experiments.pacing.profile import PaceProfile

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULT_STRATEGIES = ("ddp", "fifo", "wfbp")
_WARMUP = 10
_OF_WORKLOADS = (
    "workload",
    "width",
    "batch_size",
    "learning_rate",
    "ranks",
    "seed",
    "target_loss",
    "pace",
    "protocol",
)
_WORKLOAD_HELP = "; ".join(f"{name}: {info.summary}" for name, info in WORKLOADS.items()) + "."


_RANKS = click.option(
    "--ranks", type=click.IntRange(2, 64), help="Rank processes.  [default: --hosts, else 2]"
)
_HTML = click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the report, with plots, as one self-contained HTML file.",
)
_FORCE_HTML = click.option(
    "--force", is_flag=True, help="Overwrite the file of --html if it exists."
)


def _timeout(seconds: float, effect: str) -> Callable[[F], F]:
    """The option ``--timeout``.

    Args:
        seconds: The default.
        effect: What happens after that time, as the end of a sentence.
    """
    return click.option(
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        default=seconds,
        show_default=True,
        help=f"Seconds after which {effect}.",
    )


def _defaults(name: str) -> str:
    """The workloads' defaults of a setting, as text."""
    values: dict[str, list[str]] = {}
    for workload, info in WORKLOADS.items():
        values.setdefault(f"{getattr(info, name):g}", []).append(workload)
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{', '.join(names)}: {value}" for value, names in values.items())


_WORKLOAD = click.option(
    "--workload",
    type=click.Choice(list(WORKLOADS)),
    default="digits",
    show_default=True,
    help=_WORKLOAD_HELP,
)
_WIDTH = click.option(
    "--width",
    type=click.IntRange(1, 1024),
    help="Size of the model: bytes to send and computation grow with its square (embeddings: "
    "linearly).  "
    f"[default: {_defaults('width')}]",
)


@click.group()
def experiment() -> None:
    """Run communication strategies in real jobs and compare the measurements from their traces."""


@experiment.command(
    "list",
    epilog="""\b
Examples:
  ddltrace experiment list
  ddltrace experiment list --json""",
)
@plugin_option("Also list the techniques of this file; repeat it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(plugins: tuple[str, ...], as_json: bool) -> None:
    """List the techniques that exist, along the axes on which they combine."""
    from ddltrace.experiments.strategy.listing import as_json as listing_as_json
    from ddltrace.experiments.strategy.listing import as_text
    from ddltrace.experiments.strategy.plugins import load

    load(plugins)

    click.echo(json.dumps(listing_as_json(), indent=1) if as_json else as_text())


@experiment.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  ddltrace experiment run
  ddltrace experiment run --strategy ddp --strategy ddp:bucket_mb=1 --strategy wfbp
  ddltrace experiment run --ranks 4 --width 64 --steps 100 --repeats 5 -o wide
  sudo ddltrace experiment run --hosts 4 --bandwidth 400mbit -o shaped
  ddltrace experiment run --strategy bf16 --steps 100 -- torchrun train.py
  ddltrace experiment run --also big="torchrun train.py --bucket 100" -- torchrun train.py""",
)
@click.option(
    "--strategy",
    "specs",
    multiple=True,
    metavar="SPEC",
    help="A strategy to run; repeat it. The first is the baseline.  "
    f"[default: {', '.join(_DEFAULT_STRATEGIES)}]",
)
@plugin_option()
@_RANKS
@click.option(
    "--steps",
    type=click.IntRange(2),
    default=60,
    show_default=True,
    help="Training steps, warm-up included. Steps in which a strategy searches, calibrates itself "
    "or has not begun are added, for all strategies alike.",
)
@click.option(
    "--warmup",
    type=click.IntRange(1),
    help="Steps at the start that are trained but not measured.  "
    f"[default: {_WARMUP}, at most half of --steps]",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Rounds. Each runs every strategy once, with the next seed. One round names no winner.",
)
@click.option(
    "--max-minutes",
    type=click.FloatRange(0, min_open=True),
    help="After --repeats rounds, make more until all differences to the baseline are decided or "
    "the next round would not end within this time.  [default: no more rounds]",
)
@click.option(
    "--also",
    multiple=True,
    metavar="NAME=COMMAND",
    help="Another setting of your own job, as the row NAME in the same rounds; repeat it.",
)
@_WORKLOAD
@_WIDTH
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help=f"Examples per rank and step.  [default: {_defaults('batch_size')}]",
)
@click.option(
    "--learning-rate",
    type=click.FloatRange(0, min_open=True),
    help=f"Learning rate of the optimizer.  [default: {_defaults('learning_rate')}]",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the weights, the split and the order of the data in the first round.",
)
@click.option(
    "--target-loss",
    type=float,
    help="Report the time until the training loss, averaged over 5 steps, is at most this.",
)
@click.option(
    "--max-other-cores",
    type=click.FloatRange(0),
    metavar="CORES",
    help="A run during which other processes keep more cores busy than this is made once more, if "
    "the machine is quiet then, and else marked as disturbed.  [default: a tenth of the machine's]",
)
@_timeout(3600.0, "a run is ended and reported as hung")
@click.option(
    "--pace",
    metavar="TRACE|PROFILE",
    help="Let each layer wait out the device time that a trace of any format, or a built-in "
    f"profile ({', '.join(PROFILES)}), gives it. Rows are labelled paced, and the default batch "
    "is a quarter.",
)
@click.option(
    "--protocol",
    metavar="NAME[:slowdown=N]",
    help=f"Let messages take the times of a protocol's profile ({', '.join(PROTOCOLS)}). With a "
    "slowdown, messages and the layers of --pace take N times as long, so that this machine can "
    "keep up. Rows are labelled; see: ddltrace experiment list.",
)
@click.option(
    "--slow",
    multiple=True,
    metavar="rank=R,factor=F[,burst=B,every=E]",
    help="Let a rank compute F times as long; repeat it. With burst and every, in the last B of "
    "each E steps only.",
)
@host_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Directory to create.  [default: ddltrace-experiment-DATE-TIME]",
)
@click.option(
    "--force", is_flag=True, help="Overwrite an existing experiment, and the file of --html."
)
@click.option(
    "--keep-command",
    is_flag=True,
    help="Record COMMAND as it is. By default, words that are or look like secrets, such as the "
    "value of --api-key, are recorded as ***, and the experiment cannot be resumed.",
)
@_HTML
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run_command(
    *,
    specs: tuple[str, ...],
    plugins: tuple[str, ...],
    ranks: int | None,
    steps: int,
    warmup: int | None,
    repeats: int,
    max_minutes: float | None,
    also: tuple[str, ...],
    workload: str,
    width: int | None,
    batch_size: int | None,
    learning_rate: float | None,
    seed: int,
    target_loss: float | None,
    max_other_cores: float | None,
    timeout: float,
    pace: str | None,
    protocol: str | None,
    slow: tuple[str, ...],
    output: Path | None,
    force: bool,
    keep_command: bool,
    html: Path | None,
    as_json: bool,
    command: tuple[str, ...],
    **cluster: Any,
) -> None:
    """Train with each strategy, trace it, and print one table.

    In each round, every strategy trains the same model from the same weights on the same data.
    The numbers are measured from each run's own trace, which stays in the output directory. A
    strategy that fails, diverges or hangs is reported in its row, and the exit status is 1.

    COMMAND is your own job, as in `-- torchrun train.py`. It is started once without a strategy,
    as the row "unchanged", and once with each strategy in place of the communication of its
    DistributedDataParallel, and ended after --steps. Without COMMAND, a built-in workload is
    trained. --also adds rows of your own, such as another bucket size or another branch; without
    --strategy, only these are compared with the unchanged job.
    """
    from ddltrace.experiments.harness.job_command import check_own_command, read_also
    from ddltrace.experiments.harness.results import UNCHANGED
    from ddltrace.experiments.harness.runner import (
        is_experiment,
        remove_experiment,
        run_experiment,
    )
    from ddltrace.experiments.harness.settings import Settings
    from ddltrace.experiments.pacing.profile import PROFILE_FILE
    from ddltrace.experiments.pacing.slowdown import read_slowdown
    from ddltrace.experiments.strategy.plugins import load
    from ddltrace.experiments.strategy.spec import parse, refuse_repeated
    from ddltrace.tracer.optional_packages import require_extra, require_torch
    from ddltrace.tracer.output_directory import make_room

    require_torch("ddltrace experiment run")
    records = load(plugins)
    _check_html(html, force=force)
    defaults = () if also else _DEFAULT_STRATEGIES
    strategies = [parse(spec).spec for spec in specs or defaults]
    refuse_repeated(strategies)
    if also and not command:
        raise UsageError("--also is another setting of your own job: give its COMMAND after --")
    opening, slowest = max((parse(spec).opening_steps, spec) for spec in strategies or ("ddp",))
    own_rows = read_also(also, [UNCHANGED, *strategies])
    of_hosts = _ranks_on_hosts(ranks, **cluster)
    settings = Settings(
        strategies=[UNCHANGED, *strategies, *own_rows] if command else strategies,
        ranks=of_hosts if command else of_hosts or ranks or 2,
        steps=steps + opening,
        warmup=min(_WARMUP, steps // 2) if warmup is None else warmup,
        repeats=repeats,
        max_minutes=max_minutes,
        also=own_rows,
        seed=seed,
        max_other_cores=(
            (os.cpu_count() or 1) / 10 if max_other_cores is None else max_other_cores
        ),
        timeout_s=timeout,
        target_loss=target_loss,
        slow=list(slow),
        **cluster,
        command=list(command),
        keep_command=keep_command,
        plugins=records,
    )
    if command:
        _refuse_options_of_workloads()
        for words in (command, *own_rows.values()):
            check_own_command(words, cluster)
    else:
        info = WORKLOADS[workload]
        if info.needs_sklearn:
            require_extra("experiments", f"the workload {workload}", by_import=False)
        settings = dataclasses.replace(
            settings,
            workload=workload,
            width=width or info.width,
            batch_size=batch_size or max(1, info.batch_size // (1 if pace is None else 4)),
            learning_rate=learning_rate or info.learning_rate,
            pace=pace,
            protocol=None if protocol is None else read_protocol(protocol).spec,
        )
    _check_strategies(strategies, settings)
    for text in slow:
        read_slowdown(text, settings.ranks)
    profile = None if pace is None else _profile(pace)
    if opening:
        added = f"{opening} steps are added, in which {slowest} searches or has not begun"
        click.echo(f"ddltrace: {added}", err=True)
    directory = output or Path(time.strftime("ddltrace-experiment-%Y%m%d-%H%M%S"))
    make_room(directory, "experiment", is_experiment, remove_experiment, force=force)
    if profile is not None:
        profile.write(directory / PROFILE_FILE)
    results = run_experiment(settings, directory)
    _conclude(results, directory, html=html, as_json=as_json)


@experiment.command(
    "resume",
    epilog="""\b
Examples:
  ddltrace experiment resume ddltrace-experiment-20260102-030405""",
)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_HTML
@_FORCE_HTML
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def resume_command(directory: Path, html: Path | None, force: bool, as_json: bool) -> None:
    """Continue an experiment that was interrupted or had failures.

    Finished runs are kept. Runs that are missing, failed or hung are made again with the
    experiment's own settings.
    """
    from ddltrace.experiments.harness.runner import resume_experiment

    _check_html(html, force=force)
    results = resume_experiment(directory)
    _conclude(results, directory, html=html, as_json=as_json)


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
@_HTML
@_FORCE_HTML
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def compare_command(
    paths: tuple[Path, ...], baseline: str | None, html: Path | None, force: bool, as_json: bool
) -> None:
    """Print the results of experiments, or of any traces, side by side."""
    from ddltrace.experiments.harness.results import combine
    from ddltrace.experiments.harness.results_file import load

    _check_html(html, force=force)
    names = _tell_apart(paths)
    loaded = []
    for name, path in zip(names, paths, strict=True):
        results = load(path)
        if not results.settings:  # a trace: one row, called as its directory
            results.rows = [dataclasses.replace(row, strategy=name) for row in results.rows]
        loaded.append((name, results))
    combined = combine(loaded, baseline)
    _print(combined, as_json=as_json)
    is_experiment = len(paths) == 1 and bool(combined.settings)
    _write_html(combined, html, paths[0] if is_experiment else None)


@experiment.command(
    "transports",
    epilog="""\b
Examples:
  ddltrace experiment transports
  ddltrace experiment transports --transport gloo --transport zmq --html transports.html
  ddltrace experiment transports --transport tcp --transport tcp:nagle=true
  sudo ddltrace experiment transports --hosts 2 --bandwidth 1gbit""",
)
@click.option(
    "--transport",
    "names",
    multiple=True,
    metavar="SPEC",
    help=f"A message library ({', '.join(TRANSPORTS)}), with options as in tcp:connections=4; "
    "repeat it.  [default: all]",
)
@click.option(
    "--protocol",
    "protocols",
    multiple=True,
    metavar="NAME[:slowdown=N]",
    help=f"Measure TCP paced by a protocol's profile ({', '.join(PROTOCOLS)}) as well; repeat it. "
    "Without --transport, measure nothing else.",
)
@_RANKS
@click.option(
    "--max-bytes",
    type=click.IntRange(4),
    default=16 << 20,
    show_default=True,
    help="Largest message.",
)
@click.option(
    "--rounds",
    type=click.IntRange(5),
    default=200,
    show_default=True,
    help="Timed rounds of each size; large messages get fewer, 5 at least.",
)
@_timeout(300.0, "a transport is ended and reported as failed")
@flat_network_options
@_HTML
@_FORCE_HTML
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the tables.")
def transports_command(
    *,
    names: tuple[str, ...],
    protocols: tuple[str, ...],
    ranks: int | None,
    max_bytes: int,
    rounds: int,
    timeout: float,
    hosts: int | None,
    bandwidth: str | None,
    html: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Compare message libraries: latency, bandwidth and processor time against size.

    Every library runs in a job of its own and carries the same operations over the same links: a
    ping-pong, push and pull with a server, and a ring all-reduce. A library that is not installed
    or fails is reported with the reason, and the exit status is 1 if no library could be measured
    or one failed.
    """
    from ddltrace.experiments.transport_benchmark.comparison import Settings, compare, sizes_up_to
    from ddltrace.experiments.transport_benchmark.report import render
    from ddltrace.tracer.optional_packages import require_torch

    require_torch("ddltrace experiment transports")
    _check_html(html, force=force)
    _ranks_on_hosts(ranks, hosts=hosts, bandwidth=bandwidth)
    settings = Settings(
        transports=tuple(dict.fromkeys(read(name)[0] for name in names))
        or (() if protocols else TRANSPORTS),
        protocols=tuple(dict.fromkeys(read_protocol(spec).spec for spec in protocols)),
        ranks=hosts or ranks or 2,
        sizes=sizes_up_to(max_bytes),
        rounds=rounds,
        hosts=hosts,
        bandwidth=bandwidth,
        timeout_s=timeout,
    )
    found = compare(settings, lambda name: click.echo(f"ddltrace: measuring {name}", err=True))
    click.echo(json.dumps(found.to_json()) if as_json else render(found))
    if html is not None:
        from ddltrace.experiments.transport_benchmark.report import write_html

        write_html(found, html)
        click.echo(f"ddltrace: report in {html}", err=True)
    states = [result.status for result in found.results]
    if "failed" in states or "complete" not in states:
        failed = [result.name for result in found.results if result.status != "complete"]
        raise DdltraceError(f"not measured: {', '.join(failed)}")


@experiment.command(
    "calibrate",
    epilog="""\b
Examples:
  ddltrace experiment calibrate --ranks 4 -o calibration.json
  ddltrace experiment calibrate --ranks 2 --trace first-trace
  sudo ddltrace experiment calibrate --hosts 4 --bandwidth 400mbit --trace shaped/ddp""",
)
@_RANKS
@click.option(
    "--rounds",
    type=click.IntRange(3),
    default=10,
    show_default=True,
    help="Timed rounds of each size and exchange.",
)
@_timeout(600.0, "the measurement is ended")
@flat_network_options
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="SPEC",
    help="A strategy to time a message of; repeat it for more.  [default: every technique]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write.  [default: calibration.json in --trace, else here]",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Store it with this trace, where ddltrace whatif finds it.",
)
def calibrate_command(
    *,
    ranks: int | None,
    rounds: int,
    timeout: float,
    hosts: int | None,
    bandwidth: str | None,
    strategies: tuple[str, ...],
    output: Path | None,
    trace: Path | None,
) -> None:
    """Measure what messages cost here, for ddltrace whatif.

    All_reduces of 1 KiB to 16 MiB run on all ranks and on two of them, with NCCL where there are
    GPUs, else with Gloo. With Gloo, the engine's exchanges follow: what codecs and architectures
    take of the processors, which takes minutes for every technique. Run it on the machines, and
    with the number of ranks, of the job whose trace is asked about.
    """
    from ddltrace.analyzer.whatif.calibration import FILE
    from ddltrace.experiments.calibration import calibrate
    from ddltrace.experiments.predicted import applicable
    from ddltrace.tracer.optional_packages import require_torch

    require_torch("ddltrace experiment calibrate")
    _ranks_on_hosts(ranks, hosts=hosts, bandwidth=bandwidth)
    file = output or (trace or Path()) / FILE
    found = calibrate(
        hosts or ranks or 2,
        rounds,
        timeout,
        hosts=hosts,
        bandwidth=bandwidth,
        strategies=strategies or applicable(),
    )
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for point in found["points"]:
        click.echo(f"{point['ranks']} ranks, {point['bytes']:>10,} bytes: {point['us']:,.0f} us")
    click.echo(f"ddltrace: calibration in {file}", err=True)
    if trace is not None and output is None:
        print_next_command("whatif", trace, "--all")


@experiment.command(
    "verify",
    epilog="""\b
Examples:
  ddltrace experiment verify --strategy wfbp --strategy bf16 --ledger ledger.jsonl
  sudo ddltrace experiment verify --hosts 4 --bandwidth 1gbit --trace shaped/ddp \\
      --strategy ddp --ledger ledger.jsonl
  ddltrace experiment verify --ledger ledger.jsonl""",
)
@click.option(
    "--strategy",
    "specs",
    multiple=True,
    metavar="SPEC",
    help="A strategy to predict and then run; repeat it. Without any, only check the ledger.",
)
@click.option(
    "--ledger",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="Where predictions and measurements are appended, as JSON Lines.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Predict from this trace of the same job, on whatever network it ran.  [default: run the "
    "job without changes first]",
)
@_RANKS
@click.option("--steps", type=click.IntRange(4), default=40, show_default=True, help="Steps.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Rounds.")
@_WORKLOAD
@_WIDTH
@_timeout(600.0, "a run is ended and reported as hung")
@flat_network_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Directory of the runs, to create.  [default: ddltrace-verify-DATE-TIME]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the ledger's lines as JSON.")
def verify_command(
    *,
    specs: tuple[str, ...],
    path: Path,
    trace: Path | None,
    ranks: int | None,
    steps: int,
    repeats: int,
    workload: str,
    width: int | None,
    timeout: float,
    hosts: int | None,
    bandwidth: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Predict strategies from a trace, write that down, then run them and compare.

    The predictions are in the ledger, each line with the hash of the line before, before the first
    run starts. Then the baseline and every strategy run in turns, also those that cannot be
    predicted, and what was measured of the predictions is appended.
    Without --strategy, the ledger is checked and shown.
    """
    from ddltrace.experiments import ledger
    from ddltrace.experiments.harness.settings import Settings
    from ddltrace.experiments.strategy.spec import parse
    from ddltrace.experiments.verification import verify
    from ddltrace.tracer.optional_packages import require_torch

    if specs:
        require_torch("ddltrace experiment verify")
        strategies = [parse(spec).spec for spec in specs]
        of_hosts = _ranks_on_hosts(ranks, hosts=hosts, bandwidth=bandwidth)
        info = WORKLOADS[workload]
        settings = Settings(
            strategies=["ddp"],
            ranks=of_hosts or ranks or 2,
            steps=steps + max(parse(spec).opening_steps for spec in strategies),
            warmup=min(_WARMUP, steps // 2),
            repeats=repeats,
            workload=workload,
            width=width or info.width,
            batch_size=info.batch_size,
            learning_rate=info.learning_rate,
            timeout_s=timeout,
            hosts=hosts,
            bandwidth=bandwidth,
        )
        _check_strategies(strategies, settings)
        directory = output or Path(time.strftime("ddltrace-verify-%Y%m%d-%H%M%S"))
        directory.mkdir(parents=True)
        found = verify(settings, strategies, trace, path, directory)
    else:
        found = ledger.pairs(ledger.read(path))
    if as_json:
        for pair in found:
            click.echo(json.dumps({"prediction": pair.prediction, "measurement": pair.measurement}))
        return
    for line in ledger.summary(found):
        click.echo(line)
    if specs:
        click.echo(f"\nNext: ddltrace experiment verify --ledger {path}  (checks and shows it)")


def _conclude(results: Results, directory: Path, *, html: Path | None, as_json: bool) -> None:
    """Prints the results of an experiment that has ended.

    Raises:
        DdltraceError: A strategy did not complete.
    """
    _print(results, as_json=as_json)
    _write_html(results, html, directory)
    click.echo(f"ddltrace: results and traces in {directory}", err=True)
    traces = [directory / row.trace for row in results.rows if row.trace]
    if traces:
        print_next_command("dashboard", *traces)
    bad = [row for row in results.rows if not row.is_sound]
    if bad:
        reasons = "; ".join(f"{row.strategy} {row.status}: {row.reason}" for row in bad)
        raise DdltraceError(
            f"{len(bad)} of {len(results.rows)} strategies did not complete: {reasons}"
        )


def _print(results: Results, *, as_json: bool) -> None:
    from ddltrace.analyzer.formatting.terminal import terminal_width
    from ddltrace.experiments.harness.results_table import render

    click.echo(json.dumps(results.to_json()) if as_json else render(results, terminal_width()))


def _check_html(html: Path | None, *, force: bool) -> None:
    """Checks before anything runs whether the report can be written."""
    from ddltrace.tracer.optional_packages import require_extra
    from ddltrace.tracer.output_directory import check_new_file

    if html is None:
        return
    require_extra("report", "--html")
    check_new_file(html, "--html", force=force)


def _write_html(results: Results, html: Path | None, directory: Path | None) -> None:
    if html is not None:
        from ddltrace.experiments.harness.html_report import write_html

        write_html(results, html, directory)
        click.echo(f"ddltrace: report in {html}", err=True)


def _profile(pace: str) -> PaceProfile:
    """The profile of a built-in name, or of a trace."""
    from ddltrace.experiments.pacing.trace_profile import profile_of_trace

    if pace in PROFILES:
        return builtin_profile(pace)
    if not Path(pace).exists():
        raise UsageError(
            f"--pace {pace!r:.80} is neither a trace nor a profile; "
            f"there are the profiles {', '.join(PROFILES)}"
        )
    return profile_of_trace(Path(pace))


def _refuse_options_of_workloads() -> None:
    """Refuses options that only built-in workloads have, for a job that is not one."""
    context = click.get_current_context()
    for name in _OF_WORKLOADS:
        if context.get_parameter_source(name) != click.core.ParameterSource.DEFAULT:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} belongs to the built-in workloads, not to a COMMAND")


def _ranks_on_hosts(ranks: int | None, **cluster: Any) -> int | None:
    """Checks before anything runs whether the emulated cluster can be created.

    Args:
        ranks: ``--ranks``, if it was given.
        cluster: The options of the cluster that were given.

    Returns:
        The number of ranks on all hosts; None without a cluster.
    """
    cluster = dict.fromkeys(NAMES) | cluster
    check_options(cluster)
    if cluster["hosts"] is None:
        return None
    total: int = cluster["hosts"] * (cluster["ranks_per_host"] or 1)
    if ranks not in (None, total):
        each = cluster["ranks_per_host"] or 1
        raise UsageError(
            f"--hosts {cluster['hosts']} runs {'one rank' if each == 1 else f'{each} ranks'} on "
            f"each host, not --ranks {ranks}; see --ranks-per-host"
        )
    return total


def _check_strategies(specs: Sequence[str], settings: Settings) -> None:
    """Refuses strategies that the job would refuse, as far as the job is known.

    The packages of a job of the user's own are not known: another Python may run it.

    Args:
        specs: The strategies.
        settings: The experiment's.
    """
    from ddltrace.experiments.strategy.job_checks import (
        refused_optimizer,
        refused_ranks,
        require_packages,
    )
    from ddltrace.experiments.strategy.spec import parse

    for spec in specs:
        strategy = parse(spec)
        way, library = strategy.parallelism, strategy.transport and strategy.transport.name
        if settings.workload and way is not None and strategy.frequency is not None:
            raise UsageError(
                f"strategy {spec!r:.80} needs a job of your own, which calls fully_shard with a "
                "mesh of two dimensions (replicate, shard)"
            )
        fit = None if way is None else way.workloads
        if fit is not None and settings.workload not in (None, *fit):
            raise UsageError(
                f"strategy {spec!r:.80} cannot split the workload {settings.workload}; "
                f"use --workload {fit[0]}"
            )
        if settings.protocol is not None and (way is not None or library in ("gloo", "nccl")):
            raise UsageError(
                f"--protocol cannot pace the messages of strategy {spec!r:.80}: leave out its "
                "transport, or take tcp, zmq, grpc, mpi or ucx; models cannot be split"
            )
        reason = None
        if settings.ranks is not None:
            examples = settings.batch_size and settings.batch_size * settings.ranks
            reason = refused_ranks(strategy, settings.ranks, examples)
        if settings.workload is not None:
            own = refused_optimizer(strategy, [WORKLOADS[settings.workload].optimizer])
            if own is not None:
                accepted = [
                    name
                    for name, info in WORKLOADS.items()
                    if refused_optimizer(strategy, [info.optimizer]) is None
                ]
                reason = f"{own.partition(';')[0]}; choose --workload {', '.join(accepted)}"
            require_packages(strategy)
            if strategy.transport is not None:
                from ddltrace.experiments.transports.backends.register import check_available

                check_available(strategy.transport)
        if reason is not None:
            raise UsageError(f"strategy {spec!r:.80} cannot be applied: {reason}")


def _tell_apart(paths: tuple[Path, ...]) -> list[str]:
    """Short names for paths: the last part where that is unique, else the path."""
    short = [path.resolve().name for path in paths]
    return [
        name if short.count(name) == 1 else str(path)
        for name, path in zip(short, paths, strict=True)
    ]
