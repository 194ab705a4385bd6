"""The commands ``upload`` and ``collect``: traces into a store, and of several nodes into one."""

from __future__ import annotations

from pathlib import Path

import click

from ddltrace.tracer.errors import StoreError, TraceError, UsageError
from ddltrace.tracer.next_command import print_next_command
from ddltrace.tracer.number_text import counted
from ddltrace.tracer.output_directory import check_apart
from ddltrace.tracer.storage.location import Location, location_of


@click.command(
    epilog="""\b
Examples:
  ddltrace upload run
  ddltrace upload my-trace s3://bucket/run"""
)
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("url", required=False)
def upload(directory: Path, url: str | None) -> None:
    """Upload a trace to a store, or go on with an upload.

    DIR is a trace directory. Without URL, it goes where ddltrace run -o URL was to upload it. A
    trace whose launcher was killed is finalized first. Files that the store has with the same size
    and checksum are skipped, and run.json goes last, so readers never take a part of the trace for
    the whole.
    """
    from ddltrace.tracer.launch.upload import Upload, url_of_upload
    from ddltrace.tracer.storage.store_threads import begin_in_store_thread
    from ddltrace.tracer.trace.finalize import finalize_abandoned
    from ddltrace.tracer.trace.run_reader import read_run

    read_run(directory)
    sending = Upload(directory, url_of_upload(directory, url))
    try:
        finalize_abandoned(directory)
        sending.remember()
        done = begin_in_store_thread(lambda: sending.send_all(_tell)).result()
    except StoreError as error:
        raise StoreError(f"{error} (to go on: {sending.resume_command})") from error
    except OSError as error:
        raise UsageError(f"{directory} cannot be uploaded: {error.strerror}") from error
    click.echo(
        f"ddltrace: {counted(done.sent, 'file')} with {counted(done.bytes, 'byte')} sent, "
        f"{counted(done.skipped, 'file', 'was')} there",
        err=True,
    )
    print_next_command("analyze", sending.url)


def _tell(name: str) -> None:
    click.echo(f"ddltrace: sending {name}", err=True)


@click.command(
    epilog="""\b
Examples:
  ddltrace collect /mnt/node-0/trace /mnt/node-1/trace -o whole
  ddltrace collect s3://bucket/node-0 s3://bucket/node-1 -o whole"""
)
@click.argument("sources", nargs=-1, required=True, type=location_of, metavar="DIR...")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Directory to create."
)
@click.option(
    "--force", is_flag=True, help="Overwrite an existing trace: its files, and no others."
)
def collect(sources: tuple[Location, ...], output: Path, force: bool) -> None:
    """Gather the traces that the nodes of one job wrote into one trace.

    Each DIR is the directory of a ddltrace run of the job, as a path or URL: of one node, whose
    disk the others do not see, or of several. Directories that cannot be read and ranks without
    files are named, and the rest is gathered; the exit status is then 1. Traces of different jobs,
    or of different times, are refused. ddltrace merge does the same with paths only: it writes
    nothing if one of them cannot be read, and does not look at times and names of jobs.
    """
    from ddltrace.tracer.launch.launcher import prepare_directory
    from ddltrace.tracer.trace.collected import collect as collect_into
    from ddltrace.tracer.trace.collected import fetched

    with fetched(sources) as found:
        for source, error in found.missing.items():
            click.echo(f"ddltrace: {source} is left out: {error}", err=True)
        if not found.directories:
            raise TraceError("none of the directories holds a trace")
        for directory in found.directories:
            check_apart(directory, output)
        found.check_one_job()
        prepare_directory(output, force=force)
        run = collect_into(found, output)
    for note in run.notes:
        click.echo(f"ddltrace: note: {note}", err=True)
    hosts = len({info.host for info in run.ranks})
    ranks = counted(len({info.rank for info in run.ranks}), "rank")
    click.echo(f"ddltrace: trace of {ranks} of {counted(hosts, 'host')} in {output}", err=True)
    print_next_command("analyze", output)
    if found.missing:
        raise TraceError(
            f"{len(found.missing)} of {len(sources)} directories could not be read: {output} is "
            "without their ranks"
        )
