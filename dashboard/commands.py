"""``ddltrace dashboard``: shows traces in the browser."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ddltrace.analyzer.engine.engine_options import chosen_engine, engine_options
from ddltrace.tracer.optional_packages import require_extra

if TYPE_CHECKING:
    from ddltrace.analyzer.engine.engine import Engine
    from ddltrace.dashboard.experiments import OpenExperiment


_NICE_BESIDE_JOB: Final = 10


@click.command(
    epilog="\b\nExamples:\n"
    "  ddltrace dashboard my-trace\n"
    "  ddltrace dashboard before after      compare two runs\n"
    "  ddltrace dashboard my-experiment     strategies side by side, with their traces\n"
    "  ddltrace dashboard my-trace --allow-run   also start experiments from the page\n"
    "  ddltrace dashboard my-trace --no-browser --port 9000\n"
    "  ddltrace dashboard large-trace --engine dask --scheduler tcp://head:8786"
)
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Everyone who can reach it can read the traces.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port to listen on.  [default: the first free one from 8050 on]",
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
@click.option(
    "--allow-run",
    is_flag=True,
    help="Let the experiments page start experiments on this machine. Everyone who can open the "
    "page can start them, so the address must be a loopback address.",
)
@engine_options
# `ddltrace run --dashboard` starts the server with it: see tracer/launch/dashboard_server.py.
@click.option("--beside-job", is_flag=True, hidden=True, help="End when standard input is closed.")
def dashboard(  # noqa: PLR0917 - click passes one argument for each option
    traces: tuple[str, ...],
    host: str,
    port: int | None,
    no_browser: bool,
    allow_run: bool,
    engine: str,
    scheduler: str | None,
    beside_job: bool,
) -> None:
    """Show traces, experiments, or folders of both in the browser.

    Serves until interrupted with Ctrl-C. All files come from this machine; no network is needed.
    With --engine dask, a cluster analyzes the traces and builds the timelines of large ones.
    """
    require_extra("dashboard", "ddltrace dashboard")
    with chosen_engine(engine, scheduler) as chosen:
        _serve(
            traces,
            chosen,
            host=host,
            port=port,
            no_browser=no_browser,
            allow_run=allow_run,
            beside_job=beside_job,
        )


def _serve(
    traces: tuple[str, ...],
    engine: Engine | None,
    *,
    host: str,
    port: int | None,
    no_browser: bool,
    allow_run: bool,
    beside_job: bool,
) -> None:
    """Opens the traces and serves them until interrupted; the options are those of `dashboard`."""
    if beside_job:
        os.nice(_NICE_BESIDE_JOB)
    from ddltrace.analyzer.formatting.units import printable
    from ddltrace.analyzer.trace.opened_trace import open_trace
    from ddltrace.dashboard.discovery import discover
    from ddltrace.dashboard.experiments import OpenExperiment
    from ddltrace.dashboard.hosts import is_loopback
    from ddltrace.dashboard.server import FIRST_PORT, bind, open_browser, serve
    from ddltrace.dashboard.workspace import Workspace
    from ddltrace.tracer.errors import UsageError

    found = discover(traces)
    experiments = [
        OpenExperiment(number, printable(path.resolve().name), path)
        for number, path in enumerate(found.experiments)
    ]
    paths = (*found.traces, *_traces_of(experiments))
    opened = [open_trace(path, engine) for path in paths]
    listening = bind(host, port)
    if port is None and (taken := listening.getsockname()[1]) != FIRST_PORT:
        click.echo(f"port {FIRST_PORT} is taken, using {taken}", err=True)
    loopback = is_loopback(listening.getsockname()[0])
    if not loopback:
        click.echo(
            f"listening on {host}: everyone who can reach this machine can read the traces",
            err=True,
        )
    if allow_run and not loopback:
        listening.close()
        raise UsageError(
            f"--allow-run with --host {host} would let others start programs on this machine: "
            "leave --host out, and reach the page through an SSH tunnel"
        )
    runs = None
    if allow_run:
        from ddltrace.dashboard.runs.allowed_runs import AllowedRuns
        from ddltrace.dashboard.runs.run_control import results_folder

        runs = AllowedRuns(results_folder([Path(trace) for trace in traces]))
    workspace = Workspace(opened, experiments, runs)
    is_live = bool(workspace.traces) and workspace.is_running(0)
    # An analysis would take processor time from a running job; pages make it on request.
    if not is_live:
        # Before the app is imported: stored files are read meanwhile.
        threading.Thread(
            target=workspace.warm_up,
            args=(lambda text: click.echo(text, err=True),),
            name="warm-up",
            daemon=True,
        ).start()
    from ddltrace.dashboard.app import create_app

    app = create_app(workspace, loopback=loopback)

    def ready(url: str) -> None:
        url = f"{url}live" if is_live else url
        ends = "it ends with the job" if beside_job else "Ctrl-C ends it"
        click.echo(f"Dashboard: {url}  ({ends})", err=beside_job)
        if beside_job:
            _stop_with_job()
        if not no_browser:
            open_browser(url)

    try:
        serve(app.server, listening, ready)
    finally:
        if runs is not None:
            runs.control.close()


def _stop_with_job() -> None:
    """Ends this process when the launcher of the job closes its standard input."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="job", daemon=True).start()


def _traces_of(experiments: list[OpenExperiment]) -> list[Path]:
    """The trace of each strategy's first run, as far as it is there."""
    from ddltrace.tracer.errors import TraceError
    from ddltrace.tracer.trace.trace_files import RUN_FILE

    found = []
    for experiment in experiments:
        try:
            rows = experiment.results.rows
        except TraceError as error:
            click.echo(f"ddltrace: {error}", err=True)
            continue
        paths = [experiment.directory / row.trace for row in rows if row.trace]
        inside = experiment.directory.resolve()
        found += [
            path
            for path in paths
            if path.resolve().is_relative_to(inside) and (path / RUN_FILE).is_file()
        ]
    return found
