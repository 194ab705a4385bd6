"""``ddltrace dashboard``: shows traces in the browser."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddltrace.tracer.optional_packages import require_extra

if TYPE_CHECKING:
    from ddltrace.dashboard.experiments import OpenExperiment


@click.command(
    epilog="\b\nExamples:\n"
    "  ddltrace dashboard my-trace\n"
    "  ddltrace dashboard before after      compare two runs\n"
    "  ddltrace dashboard my-experiment     strategies side by side, with their traces\n"
    "  ddltrace dashboard my-trace --allow-run   also start experiments from the page\n"
    "  ddltrace dashboard my-trace --no-browser --port 9000"
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
def dashboard(
    traces: tuple[str, ...], host: str, port: int | None, no_browser: bool, allow_run: bool
) -> None:
    """Show traces, experiments, or folders of both in the browser.

    Serves until interrupted with Ctrl-C. All files come from this machine; no network is needed.
    """
    require_extra("dashboard", "ddltrace dashboard")
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
    opened = [open_trace(path) for path in (*found.traces, *_traces_of(experiments))]
    listening = bind(host, port)
    if port is None and (taken := listening.getsockname()[1]) != FIRST_PORT:
        click.echo(f"port {FIRST_PORT} is taken, using {taken}", err=True)
    loopback = is_loopback(listening.getsockname()[0])
    if not loopback:
        click.echo(
            f"listening on {host}: everyone who can reach this machine can read the traces",
            err=True,
        )
    from ddltrace.dashboard.app import create_app
    from ddltrace.dashboard.runs.allowed_runs import AllowedRuns
    from ddltrace.dashboard.runs.run_control import results_folder

    runs = None
    if allow_run:
        if not loopback:
            listening.close()
            raise UsageError(
                f"--allow-run with --host {host} would let others start programs on this machine: "
                "leave --host out, and reach the page through an SSH tunnel"
            )
        runs = AllowedRuns(results_folder([Path(trace) for trace in traces]))
    workspace = Workspace(opened, experiments, runs)
    app = create_app(workspace, loopback=loopback)

    def ready(url: str) -> None:
        click.echo(f"Dashboard: {url}  (Ctrl-C ends it)")
        warm = threading.Thread(
            target=workspace.warm_up,
            args=(lambda text: click.echo(text, err=True),),
            name="warm-up",
            daemon=True,
        )
        warm.start()
        if not no_browser:
            open_browser(url)

    try:
        serve(app.server, listening, ready)
    finally:
        if runs is not None:
            runs.control.close()


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
