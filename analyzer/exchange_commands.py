"""The commands ``import`` and ``export``: other tools' formats, in and out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ddltrace.analyzer.engine.engine_options import chosen_engine, engine_options
from ddltrace.analyzer.exporters import FORMATS
from ddltrace.analyzer.importers.import_options import communication_kernels_option
from ddltrace.analyzer.report.warnings import report_damage
from ddltrace.tracer.next_command import print_next_command
from ddltrace.tracer.number_text import counted
from ddltrace.tracer.optional_packages import require_extra
from ddltrace.tracer.storage.location import Location, location_of
from ddltrace.tracer.trace.arrow_arrays import without_pandas

without_pandas()  # only the command line imports this module

Command = TypeVar("Command", bound=Callable[..., Any])


def _output_options(help: str, replaced: str) -> Callable[[Command], Command]:
    """The options -o and --force of a command; `help` describes the output."""
    output = click.option(
        "-o", "--output", type=click.Path(path_type=Path), required=True, help=help
    )
    force = click.option("--force", is_flag=True, help=f"Overwrite {replaced} that exists.")
    return lambda command: output(force(command))


@click.command(
    name="import",
    epilog="""\b
Examples:
  ddltrace import kineto-folder -o kineto-trace
  ddltrace import worker0.pt.trace.json.gz -o one-rank
  ddltrace import rank0.json rank1.json -o two-ranks
  ddltrace import /tmp/nccl_trace_rank_ -o hang --force
  ddltrace import kineto-folder -o kineto-trace --engine dask
""",
)
@click.argument("sources", nargs=-1, required=True, type=location_of, metavar="SOURCE...")
@click.option(
    "--memory-limit",
    metavar="SIZE",
    help="Memory that the import of a file may take, such as 8GB. By default ten times the file's "
    "decompressed size, at least 256 MB. All commands take it from DDLTRACE_IMPORT_MEMORY.",
)
@_output_options("Trace directory to create.", "the files of a trace")
@communication_kernels_option
@engine_options
def import_(
    *,
    sources: tuple[Location, ...],
    memory_limit: str | None,
    output: Path,
    force: bool,
    engine: str,
    scheduler: str | None,
) -> None:
    """Convert another tool's trace to a trace directory.

    SOURCE is a file, or a folder with one file per rank, or several of them that are the ranks of
    one job (docs/trace-format.md says how ranks are found): Kineto JSON (torch.profiler), Chrome
    JSON, a Horovod timeline, Flight Recorder dumps, NCCL Inspector files, rings of
    NCCL's events, Chakra execution traces (.et, or their JSON), plain or gzip; or a
    Parquet file of StragglerAnalysis. On a Dask cluster, the workers read the files of a folder of
    Kineto JSON; other formats are read by this process.
    """
    from ddltrace.analyzer.importers import formats
    from ddltrace.analyzer.importers.memory_limit import limited_to
    from ddltrace.analyzer.importers.write_imported import save
    from ddltrace.tracer.errors import TraceError
    from ddltrace.tracer.storage.plain_files import local_copy

    for source in sources:
        if not source.exists():
            raise TraceError(f"{source} does not exist")
    with (
        limited_to(memory_limit),
        chosen_engine(engine, scheduler) as opened,
        contextlib.ExitStack() as copies,
    ):
        files = [copies.enter_context(local_copy(source, formats.MAX_FILES)) for source in sources]
        # Copies of files from a store are on this machine only.
        trace = formats.read(files, opened if files == list(sources) else None)
    save(trace, output, force=force)
    for note in trace.run.notes:
        click.echo(f"ddltrace: note: {click.unstyle(note)}", err=True)
    events = sum(table.num_rows for table in trace.tables.values())
    click.echo(
        f"ddltrace: {counted(events, 'event')} of {counted(len(trace.tables), 'rank')} "
        f"({trace.run.source}) in {output}",
        err=True,
    )
    print_next_command("analyze", output)


@click.command(
    epilog="""\b
Examples:
  ddltrace export first-trace --to perfetto -o trace.pftrace
  ddltrace export first-trace --to chrome -o trace.json.gz
  ddltrace export kineto-folder --to parquet -o events.parquet
  ddltrace export gpu-trace --to chrome --per-rank -o for-hta
  ddltrace export first-trace --to chakra -o execution-traces
""",
)
@click.argument("trace", type=location_of)
@click.option(
    "--to",
    type=click.Choice(FORMATS),
    required=True,
    help="chrome and perfetto: for trace viewers. parquet and csv: one row per event. chakra and "
    "chakra-json: a folder with an MLCommons Chakra execution trace of each rank.",
)
@click.option(
    "--per-rank",
    is_flag=True,
    help="Chrome JSON only: write a folder with one file per rank, which Holistic Trace Analysis "
    "and other tools for torch.profiler's files can read.",
)
@_output_options(
    "File to write (a folder with --per-rank and for Chakra); .gz compresses Chrome JSON, "
    "Perfetto's format and CSV.",
    "a file",
)
@communication_kernels_option
def export(trace: Location, to: str, per_rank: bool, output: Path, force: bool) -> None:
    """Convert a trace for other tools.

    TRACE is a trace directory, or a file or folder of an importable format. In trace viewers a
    rank is a process and a lane is a thread; arrows connect a send with its receive and a
    gradient with the message that carried it.
    """
    from ddltrace.analyzer.exporters import export as write
    from ddltrace.analyzer.open_trace import open_trace

    extra = {"perfetto": "perfetto", "chakra": "chakra", "chakra-json": "chakra"}.get(to)
    if extra is not None:
        require_extra(extra, f"export --to {to}")
    opened = open_trace(trace)
    events = write(opened, to, output, force=force, per_rank=per_rank)
    report_damage(opened)
    click.echo(f"ddltrace: {counted(events, 'event')} in {output}", err=True)
    if not per_rank and to in ("chrome", "perfetto"):
        click.echo(f"ddltrace: next: open {output} at https://ui.perfetto.dev", err=True)
