"""Starts a dashboard: opens its traces, and prints its address while the app is made.

Importing NumPy, Arrow and Dash takes a second, so this module does it in functions, after the
options were checked.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ddltrace.dashboard.access import Access, WsgiApp, is_loopback
from ddltrace.dashboard.discovery import Found, discover
from ddltrace.dashboard.server import FIRST_PORT, bind, open_browser, serve
from ddltrace.tracer.errors import TraceError, UsageError
from ddltrace.tracer.optional_packages import require_extra
from ddltrace.tracer.trace.trace_files import RUN_FILE

if TYPE_CHECKING:
    from ddltrace.analyzer.engine.engine import Engine
    from ddltrace.dashboard.experiments import OpenExperiment
    from ddltrace.dashboard.runs.allowed_runs import AllowedRuns
    from ddltrace.dashboard.workspace import Workspace

FEATURE: Final = "ddltrace dashboard"
_NICE_BESIDE_JOB: Final = 10


@dataclass(frozen=True)
class Options:
    """The options of `ddltrace dashboard`.

    Attributes:
        traces: The paths and URLs.
        host: Address to listen on.
        port: Port to listen on; None for the first free one.
        no_browser: Whether no browser is opened.
        no_token: Whether everyone who reaches the address may use the dashboard.
        allow_run: Whether experiments can be started from the page.
        beside_job: Whether it ends when standard input is closed.
    """

    traces: tuple[str, ...]
    host: str
    port: int | None
    no_browser: bool
    no_token: bool
    allow_run: bool
    beside_job: bool


def serve_dashboard(options: Options, engine: Engine | None) -> None:
    """Opens the traces and serves them until interrupted.

    Args:
        engine: Analyzes the traces; None for the embedded engine.

    Raises:
        TraceError: A trace cannot be read.
        UsageError: The address cannot be used, or not with ``--allow-run``.
    """
    if options.beside_job:
        os.nice(_NICE_BESIDE_JOB)
    found = discover(options.traces)
    listening = bind(options.host, options.port)
    loopback = is_loopback(listening.getsockname()[0])
    access = Access(None if options.no_token else secrets.token_urlsafe(32), loopback=loopback)
    runs = _allowed_runs(options, listening, loopback=loopback) if options.allow_run else None

    def start(url: str) -> WsgiApp:
        workspace = _open(found, engine, runs)
        is_live = bool(workspace.traces) and workspace.is_running(0)
        page = access.address(f"{url}live" if is_live else url)
        _announce(page, options, listening, loopback=loopback)
        try:
            from ddltrace.dashboard.app import create_app
        except ImportError:
            require_extra("dashboard", FEATURE)
            raise
        app = create_app(workspace)
        # An analysis would take processor time from a running job; pages make it on request.
        if not is_live:
            _in_background(lambda: workspace.warm_up(_warn))
        return access.guard(app.server)

    try:
        serve(listening, start)
    finally:
        if runs is not None:
            runs.control.close()


def _announce(url: str, options: Options, listening: socket.socket, *, loopback: bool) -> None:
    """Prints the address, and opens it in a browser."""
    port = listening.getsockname()[1]
    if options.port is None and port != FIRST_PORT:
        _warn(f"port {FIRST_PORT} is taken, using {port}")
    if not loopback:
        whoever = "can reach this machine" if options.no_token else "has the address below"
        _warn(
            f"listening on {options.host}, without encryption: everyone who {whoever} can read the "
            "traces"
        )
    elif options.no_token:
        _warn("--no-token: every user of this machine can read the traces")
    ends = "it ends with the job" if options.beside_job else "Ctrl-C ends it"
    click.echo(f"Dashboard: {url}  ({ends})", err=options.beside_job)
    if options.beside_job:
        _stop_with_job()
    if not options.no_browser:
        open_browser(url)


def _warn(text: str) -> None:
    click.echo(text, err=True)


def _allowed_runs(options: Options, listening: socket.socket, *, loopback: bool) -> AllowedRuns:
    """The permission to start experiments.

    Raises:
        UsageError: Others can reach the server.
    """
    if options.no_token:
        listening.close()
        raise UsageError(
            "--allow-run with --no-token would let every user of this machine start programs as "
            "you: leave --no-token out"
        )
    if not loopback:
        listening.close()
        raise UsageError(
            f"--allow-run with --host {options.host} would let others start programs on this "
            "machine: leave --host out, and reach the page through an SSH tunnel"
        )
    from ddltrace.dashboard.runs.allowed_runs import AllowedRuns
    from ddltrace.dashboard.runs.run_control import results_folder

    return AllowedRuns(results_folder([Path(trace) for trace in options.traces]))


def _open(found: Found, engine: Engine | None, runs: AllowedRuns | None) -> Workspace:
    """Opens the traces and the experiments.

    Raises:
        TraceError: A trace cannot be read.
    """
    from ddltrace.analyzer.formatting.units import printable
    from ddltrace.analyzer.open_trace import open_trace
    from ddltrace.analyzer.report.warnings import check_recorded
    from ddltrace.dashboard.experiments import OpenExperiment
    from ddltrace.dashboard.workspace import Workspace

    experiments = [
        OpenExperiment(number, printable(path.resolve().name), path)
        for number, path in enumerate(found.experiments)
    ]
    traces = [open_trace(path, engine) for path in found.traces]
    if not experiments and not any(trace.ranks for trace in traces):
        check_recorded(traces)
    traces += [open_trace(path, engine) for path in _traces_of(experiments)]
    return Workspace(traces, experiments, runs)


def _traces_of(experiments: list[OpenExperiment]) -> list[Path]:
    """The trace of each strategy's first run, as far as it is there."""
    found = []
    for experiment in experiments:
        try:
            rows = experiment.results.rows
        except TraceError as error:
            _warn(f"ddltrace: {error}")
            continue
        paths = [experiment.directory / row.trace for row in rows if row.trace]
        inside = experiment.directory.resolve()
        found += [
            path
            for path in paths
            if path.resolve().is_relative_to(inside) and (path / RUN_FILE).is_file()
        ]
    return found


def _stop_with_job() -> None:
    """Ends this process when the launcher of the job closes its standard input."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    _in_background(wait)


def _in_background(work: Callable[[], Any]) -> None:
    threading.Thread(target=work, daemon=True).start()
