"""The commands of the tracer: ``run``, ``merge`` and ``doctor``."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddltrace.tracer.config import COUNTERS_VARIABLE, LEVELS, OFF_VARIABLE, CaptureConfig
from ddltrace.tracer.errors import (
    MissingCapabilityError,
    TraceError,
    UnwritableError,
    UsageError,
)
from ddltrace.tracer.extensions import require_extension
from ddltrace.tracer.launch.emulated_hosts import (
    check_options,
    host_options,
    on_hosts,
)
from ddltrace.tracer.masked_command import masked_command
from ddltrace.tracer.nccl.event_kinds import DIRECTORY_VARIABLE
from ddltrace.tracer.next_command import print_next_command, say
from ddltrace.tracer.number_text import counted
from ddltrace.tracer.optional_packages import require_extra
from ddltrace.tracer.output_directory import check_apart
from ddltrace.tracer.peak_option import peak_option
from ddltrace.tracer.plugin_option import plugin_option
from ddltrace.tracer.storage.location import PART_PREFIX, Location, location_of
from ddltrace.tracer.trace.run_info import JOB_LABEL, PART_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddltrace.tracer.launch.launcher import JobResult
    from ddltrace.tracer.launch.upload import BackgroundUpload
    from ddltrace.tracer.trace.trace_parts import Part


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="""\b
Examples:
  ddltrace run -- torchrun --nproc-per-node 2 train.py --epochs 3
  ddltrace run -o first-trace --level comm -- python -m torch.distributed.run train.py
  ddltrace run -o s3://bucket/run -- torchrun --nproc-per-node 2 train.py
  ddltrace run -o shared/trace -- torchrun --nnodes 2 --node-rank 0 ... train.py
  mpirun -n 4 ddltrace run --from-mpi -o trace -- python train.py
  ddltrace run --nccl -- torchrun --nproc-per-node 8 train.py
  ddltrace run --off -o trace -- torchrun --nproc-per-node 2 train.py
  ddltrace run --dashboard -- torchrun --nproc-per-node 2 train.py
  ddltrace run --metrics :9464 --alert 'wait_share>20% for 50 steps' -- torchrun train.py
  ddltrace run --strategy p3 --steps 100 -- torchrun --nproc-per-node 2 train.py
  sudo ddltrace run --hosts 4 --bandwidth 400mbit -- python train.py

The exit status is the job's own; 1 if the job succeeded but nothing could be recorded.""",
)
@click.option(
    "-o",
    "--output",
    type=location_of,
    metavar="PATH",
    help="Trace directory to create, or a URL in a store, such as s3://bucket/run: the trace is "
    "written to a directory of that name here and uploaded, and after the job until there is no "
    "progress for 60 seconds (DDLTRACE_UPLOAD_WAIT).  [default: ddltrace-trace-DATE-TIME]",
)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="layer",
    show_default=True,
    envvar="DDLTRACE_LEVEL",
    help="comm: messages, waits, phases and steps. layer: also each layer and gradient. "
    "op: also single operators and device kernels, in the steps of --op-steps.",
)
@click.option(
    "--op-steps",
    metavar="A:B",
    default="10:13",
    show_default=True,
    help="Level op: run PyTorch's profiler in the steps A to B - 1.",
)
@click.option(
    "--off",
    is_flag=True,
    envvar=OFF_VARIABLE,
    help="Record nothing until ddltrace on is called: the job runs as without ddltrace, but for a "
    "few instructions in each step.",
)
@click.option(
    "--trigger",
    "triggers",
    multiple=True,
    metavar="EXPRESSION",
    help="Record nothing but some steps from time to time: 'step>2x for 20 steps' (after a step "
    "that takes more than twice the median), 'late>10ms for 20 steps' (when a rank is late in the "
    "10 steps that are recorded every minute for this) or 'every 1h for 20 steps'; repeat it. "
    "Implies --off.",
)
@click.option(
    "--measure-cost",
    type=click.IntRange(min=0),
    metavar="STEPS",
    default=0,
    help="Alternate recording on and off over STEPS steps, starting at step 200, to measure the "
    "overhead. Half of these steps are missing from the trace.  [default: record every step]",
)
@click.option(
    "--counters/--no-counters",
    default=True,
    show_default=True,
    envvar=COUNTERS_VARIABLE,
    help="Once a second, record processor, memory, network and device counters.",
)
@click.option(
    "--nccl",
    is_flag=True,
    envvar="DDLTRACE_NCCL",
    help="Also record the events of NCCL itself: algorithms, channels, sends and receives of its "
    "proxies (table nccl_events).",
)
@click.option(
    "--nccl-events",
    metavar="KINDS",
    default="default",
    show_default=True,
    help="With --nccl: kinds of events, divided by commas, such as coll,proxy_step; docs/nccl.md "
    "lists them.",
)
@click.option(
    "--strategy",
    metavar="SPEC",
    help="Train with this communication strategy in place of DistributedDataParallel's own; "
    "see: ddltrace experiment list",
)
@plugin_option()
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="End the job, with status 0, after N optimizer steps.",
)
@click.option(
    "--slow",
    multiple=True,
    metavar="rank=R,factor=F[,burst=B,every=E]",
    help="Let a rank compute F times as long; repeat it. With burst and every, in the last B of "
    "each E steps only. Needs DistributedDataParallel.",
)
@click.option(
    "--dashboard",
    is_flag=True,
    help="Serve the dashboard beside the job and open its live page. The server ends with the "
    "job; messages of the server go to stderr.",
)
@click.option(
    "--metrics",
    multiple=True,
    metavar="TARGET",
    help="Serve metrics of this launcher's ranks for Prometheus on :PORT (of 127.0.0.1) or "
    "HOST:PORT, or send them to OpenTelemetry's collector (otlp); see the command watch.",
)
@click.option(
    "--alert",
    "alerts",
    multiple=True,
    metavar="EXPRESSION",
    help="Print a line when a limit is passed, such as 'wait_share>20% for 50 steps', and for "
    "dead ranks and hangs; repeat it. The help of the command watch lists the quantities.",
)
@peak_option("the metric mfu")
@click.option(
    "--force", is_flag=True, help="Overwrite an existing trace: its files, and no others."
)
@click.option(
    "--keep-command",
    is_flag=True,
    help="Record the command line as it is. By default, words that are or look like secrets, such "
    "as the value of --api-key, are recorded as ***.",
)
@click.option(
    "--part",
    metavar="NAME",
    help="Name of this launcher, if the job has several: write to DIR/part-NAME.  "
    "[default: derived from torchrun's --nnodes or the variables of mpirun, srun, ...]",
)
@click.option(
    "--from-mpi",
    is_flag=True,
    help="Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which PyTorch needs, from "
    "the variables of the mpirun or srun that starts this for each rank.",
)
@host_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(  # noqa: PLR0917 - click passes one argument for each option
    output: Location | None,
    level: str,
    op_steps: str,
    off: bool,
    triggers: tuple[str, ...],
    measure_cost: int,
    counters: bool,
    nccl: bool,
    nccl_events: str,
    strategy: str | None,
    plugins: tuple[str, ...],
    steps: int | None,
    slow: tuple[str, ...],
    dashboard: bool,
    metrics: tuple[str, ...],
    alerts: tuple[str, ...],
    peak_tflops: float | None,
    force: bool,
    keep_command: bool,
    part: str | None,
    from_mpi: bool,
    command: tuple[str, ...],
    **cluster: Any,
) -> int:
    """Run a training job and record its trace.

    The training script is not changed. Every process started by COMMAND that joins a process
    group of torch.distributed records its messages, waits, layers, gradients and steps.
    """
    from ddltrace.tracer.launch.launcher import keep_owner_access, run_job, run_untraced
    from ddltrace.tracer.launch.missing_events import explain_nothing_recorded
    from ddltrace.tracer.launch.mpi_ranks import torch_variables
    from ddltrace.tracer.nccl.job_rings import check_events, plugin_environment
    from ddltrace.tracer.trace.trace_parts import Part, part_name, part_of_job

    watching = _watching(metrics, alerts, peak_tflops, dashboard=dashboard)
    window = _step_range(op_steps)
    off = _begins_off(off, triggers, measure_cost)
    of_nccl = plugin_environment(check_events(nccl_events)) if nccl else {}
    check_options(cluster)
    if cluster["hosts"] is not None:
        command = tuple(on_hosts(cluster, command))
    plugin_options = {
        **{"strategy": strategy, "steps": steps, "slow": list(slow)},
        "plugin": list(plugins),
    }
    plugin = _checked_plugin(plugin_options)
    if from_mpi:
        os.environ.update(torch_variables(os.environ))
    umask = keep_owner_access()
    found = Part(part_name(part), None) if part else part_of_job(command, dict(os.environ))
    whole = _local_directory(output, found)
    upload = _upload_of(output, whole, found, force=force)
    try:
        directory = _prepare(whole, found, upload, force=force)
        config = CaptureConfig(
            directory=directory.resolve(),
            level=level,
            op_steps=window,
            measure_cost=measure_cost,
            counters=counters,
            off=off,
            triggers=triggers,
            plugin=plugin,
            plugin_options=plugin_options,
        )
        if of_nccl:
            os.environ.update({**of_nccl, DIRECTORY_VARIABLE: str(config.directory)})
        _build_native()
        labels = _labels(found, plugin_options)
        recorded = command if keep_command else masked_command(command)
        with _beside(directory, whole, watching, dashboard=dashboard):
            beside = None if upload is None else upload.beside()
            result = run_job(command, config, umask, labels, beside, recorded=recorded)
    except UnwritableError as error:
        # The job runs anyway: it may have waited long for its machines. But without the tracer
        # nothing would apply its strategy.
        if plugin:
            raise
        say(f"nothing is recorded, the job runs untraced: {error}")
        return run_untraced(command, umask)
    missing = None if upload is None else upload.finish()
    if result.num_ranks == 0:
        why = explain_nothing_recorded(command, result.reasons)
        say(f"nothing was recorded: {why}")
        _keep_reason(directory, why)
        if missing is not None:
            _report_place(whole, upload, missing)
        return result.exit_status if result.harmed else result.exit_status or 1
    _report_trace(directory, result, with_cost=measure_cost > 0)
    if found is not None and upload is None:
        say(
            "it is one part of the job's trace; if the others are not in "
            f"{whole}, too: ddltrace merge {shlex.quote(str(whole))} OTHER... -o OUT"
        )
    _report_place(whole, upload, missing)
    return result.exit_status


def _watching(
    metrics: tuple[str, ...],
    alerts: tuple[str, ...],
    peak_tflops: float | None,
    *,
    dashboard: bool,
) -> list[str]:
    """The options of the command that watches the job; empty for none.

    Raises:
        MissingCapabilityError: An extra is missing.
        UsageError: An option is wrong.
    """
    from ddltrace.tracer.alert_expression import parse_limit
    from ddltrace.tracer.connections.metric_targets import parse_target

    if dashboard:
        require_extra("dashboard", "ddltrace run --dashboard")
    options = []
    for text in metrics:
        parse_target(text)
        options += ["--metrics", text]
    for text in alerts:
        parse_limit(text)
        options += ["--alert", text]
    if peak_tflops is not None:
        if not options:
            raise UsageError("--peak-tflops is for --metrics and --alert")
        options += ["--peak-tflops", str(peak_tflops)]
    return options


@contextlib.contextmanager
def _beside(
    directory: Path, whole: Path, watching: list[str], *, dashboard: bool
) -> Iterator[None]:
    """Runs what a user wants beside the job."""
    from ddltrace.tracer.launch.beside_job import beside_job

    with contextlib.ExitStack() as stack:
        if dashboard:
            stack.enter_context(beside_job("dashboard", str(whole)))
        if watching:
            stack.enter_context(beside_job("watch", str(directory), *watching))
        yield


def _begins_off(off: bool, triggers: tuple[str, ...], measure_cost: int) -> bool:
    """Whether the job begins without recording.

    Raises:
        UsageError: The options contradict each other, or one is wrong.
    """
    from ddltrace.tracer.trigger_expression import parse_trigger

    for text in triggers:
        parse_trigger(text)
    if (off or triggers) and measure_cost:
        raise UsageError("--measure-cost needs a job that is recorded: leave out --off, --trigger")
    return off or bool(triggers)


def _checked_plugin(options: dict[str, Any]) -> str:
    """The module that applies options to every rank of the job; empty if none is given.

    Raises:
        MissingCapabilityError: It is not installed.
        UsageError: An option is wrong.
    """
    given = [f"--{name}" for name, value in options.items() if value not in (None, [])]
    if not given:
        return ""
    plugin = require_extension("strategy", given[0])
    plugin.check(options)
    return plugin.__name__


def _report_trace(directory: Path, result: JobResult, *, with_cost: bool) -> None:
    """Reports what was recorded."""
    if with_cost:
        say(_measured_cost(directory))
    for note in result.notes:
        say(f"note: {note}")
    ranks = counted(result.num_ranks, "rank")
    say(f"trace of {ranks} in {directory}")


def _keep_reason(directory: Path, why: str) -> None:
    """Adds to an empty trace why nothing was recorded, for its readers."""
    from ddltrace.tracer.trace.run_files import read_run_file, write_run

    with contextlib.suppress(OSError, TraceError):  # the job may have deleted it
        run = read_run_file(directory)
        if run.status != "running":  # processes of the job can still record
            run.notes.append(f"the likely reason: {why}")
            write_run(directory, run)


def _labels(part: Part | None, plugin_options: dict[str, Any]) -> dict[str, object]:
    """The labels of a run: of one of several launchers, and techniques of the user's."""
    labels: dict[str, object] = {}
    if plugin_options.get("techniques"):
        labels["techniques"] = plugin_options["techniques"]
    if part is not None:
        labels[PART_LABEL] = part.name
        if part.job is not None:
            labels[JOB_LABEL] = part.job
    return labels


def _local_directory(output: Location | None, part: Part | None) -> Path:
    """Where a trace is written on this machine."""
    if output is None:
        return Path(_default_name(part))
    return output if isinstance(output, Path) else Path(output.name)


def _upload_of(
    output: Location | None, whole: Path, part: Part | None, *, force: bool
) -> BackgroundUpload | None:
    """The upload of a trace to a store; None for a trace that stays on this machine.

    Raises:
        UsageError: The store has such a trace, and it must not be replaced.
    """
    if output is None or isinstance(output, Path):
        return None
    from ddltrace.tracer.launch.upload import BackgroundUpload

    whole = whole.resolve()
    own = whole if part is None else whole / (PART_PREFIX + part.name)
    upload = BackgroundUpload(whole, own, output.url)
    if not force:
        upload.check(say, force=False)
    return upload


def _prepare(
    whole: Path, part: Part | None, upload: BackgroundUpload | None, *, force: bool
) -> Path:
    """Creates the directory that this launcher writes; with `force`, in place of what is there.

    Raises:
        UsageError: It exists and must not, or cannot, be replaced.
        UnwritableError: It cannot be created.
    """
    from ddltrace.tracer.launch.launcher import prepare_directory
    from ddltrace.tracer.trace.trace_parts import open_shared_directory

    directory = whole
    if part is None:
        prepare_directory(directory, force=force)
    else:
        directory = open_shared_directory(whole, part, force=force)
    if upload is not None and force:
        # Empties the place in the store, so it comes last.
        upload.check(say, force=True)
    return directory


def _report_place(whole: Path, upload: BackgroundUpload | None, missing: str | None) -> None:
    """Reports where the trace is, and the next command."""
    if upload is None:
        print_next_command("analyze", whole)
    elif missing is None:
        say(f"uploaded; {whole} may be deleted")
        print_next_command("analyze", upload.url)
    else:
        say(
            f"the upload is not complete: {missing}; the trace is in {whole}; to go on: "
            f"{upload.resume_command}"
        )


def _build_native() -> None:
    """Compiles the C++ library before the first job that can use it."""
    from ddltrace.tracer.native import build as native_build

    if not native_build.is_wanted():
        return
    say("compiling for this PyTorch, once (some seconds)")
    try:
        native_build.build()
    except MissingCapabilityError as error:
        say(
            f"the C++ library is unavailable, recording costs more: {error} "
            f"({native_build.SWITCH}=0 turns it off)"
        )


def _measured_cost(directory: Path) -> str:
    """The overhead that the ranks measured."""
    from ddltrace.tracer.capture.overhead_probe import cost_text
    from ddltrace.tracer.trace.run_reader import read_run

    try:
        costs = [info.cost for info in read_run(directory).ranks if info.cost is not None]
    except TraceError as error:
        return f"no measured overhead: {error}"
    if not costs:
        return "no measured overhead: the job must take at least 216 steps"
    return f"{costs[0]['steps']} steps with and without recording: {cost_text(costs)}"


def _step_range(text: str) -> tuple[int, int]:
    first, separator, stop = text.partition(":")
    if not (separator and first.isdigit() and stop.isdigit() and int(first) < int(stop)):
        raise click.BadParameter(f"{text!r} is not a range of steps like 10:13")
    return int(first), int(stop)


def _default_name(part: Part | None) -> str:
    if part is not None and part.job is not None:
        from ddltrace.tracer.trace.trace_parts import part_name

        return f"ddltrace-trace-{part_name(part.job)}"
    return time.strftime("ddltrace-trace-%Y%m%d-%H%M%S")


@click.command(
    epilog="""\b
Examples:
  ddltrace merge node-0/trace node-1/trace -o whole-trace
  ddltrace merge shared-trace -o one-file-per-rank"""
)
@click.argument(
    "directories", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR..."
)
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Directory to create."
)
@click.option(
    "--force", is_flag=True, help="Overwrite an existing trace: its files, and no others."
)
def merge(directories: tuple[Path, ...], output: Path, force: bool) -> None:
    """Merge the traces that several launchers recorded of one job.

    Each DIR was written by a ddltrace run of the same job: one per node, or one per task. If one
    of them cannot be read, nothing is written. ddltrace collect takes URLs as well, goes on without
    directories that it cannot read, and refuses those of different jobs or times.
    """
    from ddltrace.tracer.launch.launcher import prepare_directory
    from ddltrace.tracer.trace.run_reader import read_run
    from ddltrace.tracer.trace.trace_parts import merge as merge_directories

    for directory in directories:
        read_run(directory)
        check_apart(directory, output)
    prepare_directory(output, force=force)
    run = merge_directories(directories, output)
    for note in run.notes:
        say(f"note: {note}")
    say(f"trace of {len(run.ranks)} rank processes in {output}")
    print_next_command("analyze", output)


@click.command(
    epilog="""\b
Examples:
  ddltrace doctor
  ddltrace doctor --python /opt/conda/bin/python
  NCCL_PROFILER_PLUGIN=$(ddltrace doctor --nccl-plugin) DDLTRACE_NCCL_DIR=rings torchrun train.py
  ddltrace doctor --nccl-switch first-trace coll,p2p,kernel_ch"""
)
@click.option(
    "--python",
    "interpreter",
    default=sys.executable,
    help="The interpreter that runs your job.  [default: this one]",
)
@click.option(
    "--nccl-plugin",
    is_flag=True,
    help="Print the path of the plugin that NCCL loads to record its events, and nothing else.",
)
@click.option(
    "--nccl-switch",
    type=(click.Path(exists=True, file_okay=False, path_type=Path), str),
    metavar="DIRECTORY KINDS",
    help="Change the kinds of NCCL's events that a running job records into a directory, as "
    "--nccl-events names them, and do nothing else.",
)
def doctor(interpreter: str, *, nccl_plugin: bool, nccl_switch: tuple[Path, str] | None) -> int:
    """Check what can be recorded on this machine.

    Exits with 1 if jobs of the given interpreter cannot be traced.
    """
    if nccl_plugin:
        from ddltrace.tracer.nccl import library

        click.echo(library.find())
        return 0
    if nccl_switch is not None:
        from ddltrace.tracer.nccl.job_rings import switch_events

        say(f"rings whose events were changed: {switch_events(*nccl_switch)}")
        return 0
    from ddltrace.tracer.launch.doctor import examine

    findings = examine(interpreter)
    for finding in findings:
        mark = {"ok": "ok     ", "missing": "MISSING", "absent": "-      "}[finding.state]
        click.echo(f"{mark}  {finding.subject}: {finding.detail}")
        if finding.remedy:
            click.echo(f"         -> {finding.remedy}")
    return 1 if any(finding.state == "missing" for finding in findings) else 0
